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
  LinearGrid(const LinearKernels&, const PackedWeight&);

  struct Chunk {
    int first_unit, end_unit;
    int first_tile, end_tile;
  };
  struct Cut {
    int unit_chunks, tile_chunks;
    bool by_tiles;  // chunks of the same tiles follow each other, else those of the same units
    int size() const { return unit_chunks * tile_chunks; }
  };
  // How a tile finds its weights: to be read, just read for the tile before, or so and the unit behind is to be
  // fetched in the meantime.
  enum class Reads : uint8_t { First, Again, AgainFetchingNext };
  // `work` times this weight (2 for a gated pair) over `rows` rows in `tiles` tiles. Prefers to cut the outputs,
  // so that a chunk reads its weights from memory once. Many tiles are cut as well, so that the activations of a
  // chunk stay in the L2 cache, and go in order of rows: a thread then has much the same rows in one op after the
  // other, and the cores have less to hand over to each other.
  Cut cut(int rows, int tiles, int work = 1) const;
  Chunk chunk(const Cut& cut, int tiles, int index) const;
  // Calls f(tile, first_unit, end_unit, Reads) for all of a chunk. Where few tiles share the weights, unit by unit:
  // memory is then read while the later tiles are multiplied as well.
  template <class Fn>
  void for_each(const Cut& cut, int tiles, int index, Fn f) const {
    const Chunk c = chunk(cut, tiles, index);
    const bool by_units = fetches_next_ && !cut.by_tiles && tiles > 1;
    const int units = by_units ? 1 : c.end_unit - c.first_unit;
    for (int unit = c.first_unit; unit < c.end_unit; unit += units) {
      for (int t = c.first_tile; t < c.end_tile; t++) {
        const bool first = t == (cut.by_tiles ? c.first_tile : 0);
        f(t, unit, unit + units, first ? Reads::First : by_units ? Reads::AgainFetchingNext : Reads::Again);
      }
    }
  }

  int num_units() const { return static_cast<int>(units_.size()); }
  int unit_outputs(int unit) const { return units_[unit].outputs; }
  int unit_first(int unit) const { return units_[unit].first; }

  // The weights of chunks first .. end - 1; with those of the other of a gated pair, where they alternate.
  Stretch weights(const Cut& cut, int tiles, int first, int end) const;

  // y[m][0 ..] = outputs of units [first, end) for the rows of one tile, which starts at row r0; y_stride floats
  // from row to row. `bias` is the whole vector or null.
  void run(const Act& act, int r0, int rows, int first, int end, float* y, size_t y_stride, const float* bias,
           bool add, Reads reads) const;

 private:
  struct Unit {
    int segment;
    int first, outputs;
    const uint8_t* panel;
  };
  const LinearKernels& kernels_;
  const std::vector<Segment> segments_;
  const ActForm form_;
  const bool fetches_next_;
  const int panels_per_unit_;
  std::vector<Unit> units_;
  double bytes_ = 0;  // of weights
  double macs_ = 0;   // for one row
  double row_bytes_ = 0;  // of activations
};

}  // namespace twostep
