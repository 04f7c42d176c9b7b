// How a matrix product is cut into chunks.
#pragma once
#include <vector>

#include "ops/linear_weight.h"
#include "plan/op.h"

namespace twostep {

// A weight's outputs in units of up to 32: what one task computes at least, a whole number of cache
// lines of output, and one group of the next activation.
class LinearGrid {
 public:
  explicit LinearGrid(const PackedWeight& weight);

  struct Chunk {
    int first_unit, end_unit;
    int first_tile, end_tile;
    int reading_tile;  // the first to read these units
    bool in_cache(int tile) const { return tile > reading_tile; }
  };
  struct Cut {
    int unit_chunks, tile_chunks;
    bool by_tiles;  // chunks of the same tiles follow each other, else those of the same units
    int size() const { return unit_chunks * tile_chunks; }
  };
  // `work` times this weight (2 for a gated pair) over `rows` rows in `tiles` tiles. Prefers to cut the outputs,
  // so that a chunk reads its weights from memory once. Many tiles are cut as well, so that the activations of a
  // chunk stay in the L2 cache, and go in order of rows: a thread then has much the same rows in one op after the
  // other, and the cores have less to hand over to each other.
  Cut cut(int rows, int tiles, int work = 1) const;
  Chunk chunk(const Cut& cut, int tiles, int index) const;

  int num_units() const { return static_cast<int>(units_.size()); }
  int unit_outputs(int unit) const { return units_[unit].outputs; }
  int unit_first(int unit) const { return units_[unit].first; }

  // The weights of chunks first .. end - 1; with those of the other of a gated pair, where they alternate.
  Stretch weights(const Cut& cut, int tiles, int first, int end) const;

  // y[m][0 ..] = outputs of units [first, end) for the rows of one tile; y_stride floats from row to
  // row, `act` seen from the tile's first row. `bias` is the whole vector or null. `in_cache`: these
  // units have just been read for the tile before.
  void run(const LinearKernels& kernels, const Act& act, int rows, int first, int end, float* y,
           size_t y_stride, const float* bias, bool add, bool in_cache) const;

 private:
  struct Unit {
    int segment;
    int first, outputs;
    const uint8_t* panel;
  };
  const std::vector<Segment> segments_;
  const ActForm form_;
  const int panels_per_unit_;
  std::vector<Unit> units_;
  double bytes_ = 0;  // of weights
  double macs_ = 0;   // for one row
  double row_bytes_ = 0;  // of activations
};

}  // namespace twostep
