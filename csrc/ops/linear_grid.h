// How a matrix product is cut into chunks.
#pragma once
#include <cstddef>
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
  // How a tile finds its weights.
  struct Reads {
    bool in_cache = false;    // they were just read, or fetched
    std::ptrdiff_t next = 0;  // then: bytes from each to the one to be fetched meanwhile; or 0
    ReadAhead* ahead = nullptr;  // to be fetched besides
  };
  // `work` times this weight (2 for a gated pair) over `rows` rows in `tiles` tiles. Prefers to cut the outputs,
  // so that a chunk reads its weights from memory once. Many tiles are cut as well, so that the activations of a
  // chunk stay in the L2 cache, and go in order of rows: a thread then has much the same rows in one op after the
  // other, and the cores have less to hand over to each other.
  Cut cut(int rows, int tiles, int work = 1) const;
  Chunk chunk(const Cut& cut, int tiles, int index) const;
  // Calls f(tile, first_unit, end_unit, Reads) for all of a chunk. Memory is read while weights in the cache are
  // multiplied: few tiles go unit by unit, and all but the first fetch the next unit; the last of many tiles
  // fetches the next chunk.
  template <class Fn>
  void for_each(const Cut& cut, int tiles, int index, Fn f) const {
    const Chunk c = chunk(cut, tiles, index);
    if (cut.by_tiles) {
      const bool is_fetched = fetches_next_ && c.first_unit > 0;
      for (int t = c.first_tile; t < c.end_tile; t++) {
        f(t, c.first_unit, c.end_unit,
          Reads{t > c.first_tile || is_fetched, t == c.end_tile - 1 ? next(c.first_unit, c.end_unit) : 0});
      }
      return;
    }
    const int step = fetches_next_ && tiles > 1 ? 1 : c.end_unit - c.first_unit;
    for (int unit = c.first_unit; unit < c.end_unit; unit += step) {
      for (int t = c.first_tile; t < c.end_tile; t++) {
        f(t, unit, unit + step, t == 0 ? Reads{} : Reads{true, next(unit, unit + step)});
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
  // From the weights of a unit to those of a later one, where kernels fetch them and there are any.
  std::ptrdiff_t next(int from, int to) const {
    return fetches_next_ && to < num_units() ? units_[to].panel - units_[from].panel : 0;
  }

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
