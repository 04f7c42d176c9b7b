#include "ops/linear_grid.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace twostep {

namespace {

// Rough speed of one thread: only the size of chunks depends on it. Factors, for every chunk asks how the
// work is cut, and a division takes as long as a claim.
constexpr double kNsPerByte = 1.0 / 12, kNsPerMac = 1.0 / 100;
// A chunk pays for its claim (some 100 ns) and is still small enough to be stolen late; 96 of them
// keep many threads busy (256 cost two threads 2 % of a prefill).
constexpr double kChunksPerNs = 1.0 / 1500, kMaxChunks = 96;
// What a chunk's weights may take of the L2 cache when several tiles read them.
constexpr double kChunksPerByte = 1.0 / (160 << 10);
// Many: from here on the activations of a chunk may take this much of it. At least two chunks.
constexpr int kManyTiles = 8;
constexpr double kActBytes = 200 << 10;

constexpr double bytes_of(ActForm form) { return form == ActForm::Q8 ? 1.6 : form == ActForm::BF16 ? 2 : 4; }

}  // namespace

LinearGrid::LinearGrid(const LinearKernels& kernels, const PackedWeight& weight)
    : kernels_(kernels),
      segments_(weight.segments()),
      form_(weight.act_form()),
      fetches_next_(kernels.fetches_next[static_cast<int>(form_)]),
      panels_per_unit_(kUnit / weight.width()) {
  for (size_t s = 0; s < segments_.size(); s++) {
    const Segment& segment = segments_[s];
    for (int n = 0; n < segment.n; n += kUnit) {
      units_.push_back({static_cast<int>(s), segment.first + n, std::min(kUnit, segment.n - n),
                        segment.data + segment.unit_stride * (n / kUnit)});
    }
    const size_t panel = info(segment.kind).panel_bytes(weight.width(), weight.groups());
    bytes_ += static_cast<double>(panel) * segment.n / weight.width();
  }
  macs_ = static_cast<double>(weight.n()) * weight.k();
  row_bytes_ = bytes_of(form_) * weight.k();
}

LinearGrid::Cut LinearGrid::cut(int rows, int tiles, int work) const {
  if (rows == 0) return {0, 0, false};
  const double bytes = bytes_ * work;
  const double total = std::max(bytes * kNsPerByte, macs_ * work * rows * kNsPerMac);
  const double wanted = std::max(1.0, std::min(total * kChunksPerNs, kMaxChunks));
  const double cached = tiles > 1 ? bytes * kChunksPerByte : 1.0;
  const int units = num_units();
  const int unit_chunks = std::max(1, std::min(units, static_cast<int>(std::max(wanted, cached))));
  if (tiles >= kManyTiles) {
    return {unit_chunks, std::max(2, std::min(tiles / 4, static_cast<int>(rows * row_bytes_ / kActBytes))), true};
  }
  const int tile_chunks = tiles == 1 ? 1 : std::max(1, std::min(tiles, static_cast<int>(wanted / unit_chunks)));
  return {unit_chunks, tile_chunks, false};
}

LinearGrid::Chunk LinearGrid::chunk(const Cut& cut, int tiles, int index) const {
  const auto part = [](int total, int i, int n) {
    return static_cast<int>(static_cast<int64_t>(total) * i / n);
  };
  const int u = cut.by_tiles ? index % cut.unit_chunks : index / cut.tile_chunks;
  const int t = cut.by_tiles ? index / cut.unit_chunks : index % cut.tile_chunks;
  return {part(num_units(), u, cut.unit_chunks), part(num_units(), u + 1, cut.unit_chunks),
          part(tiles, t, cut.tile_chunks), part(tiles, t + 1, cut.tile_chunks)};
}

Stretch LinearGrid::weights(const Cut& cut, int tiles, int first, int end) const {
  if (first >= end) return {};
  const Chunk begin = chunk(cut, tiles, first), last = chunk(cut, tiles, end - 1);
  const Unit& from = units_[begin.first_unit];
  const Unit& to = last.first_tile > begin.first_tile ? units_.back() : units_[last.end_unit - 1];
  return {reinterpret_cast<const char*>(from.panel),
          reinterpret_cast<const char*>(to.panel + segments_[to.segment].unit_stride)};
}

void LinearGrid::run(const Act& act, int r0, int rows, int first, int end, float* y, size_t y_stride,
                     const float* bias, bool add, Reads reads) const {
  const int origin = units_[first].first;
  while (first < end) {
    const Unit& unit = units_[first];
    const Segment& segment = segments_[unit.segment];
    const uint8_t* next = unit.panel;
    const auto follows = [&](const Unit& u) { return u.segment == unit.segment && u.panel == next; };
    int outputs = 0;  // of units that lie behind each other in one segment
    for (; first < end && follows(units_[first]); first++) {
      outputs += units_[first].outputs;
      next += panels_per_unit_ * segment.panel_bytes;
    }
    kernels_.panels[static_cast<int>(form_)][static_cast<int>(segment.kind)](
        {unit.panel, segment.panel_bytes, outputs, act.from_row(r0), rows, y + (unit.first - origin), y_stride,
         bias ? bias + unit.first : nullptr, add, kernels_.few_rows_hint, reads.in_cache,
         reads.next, reads.ahead});
  }
}

}  // namespace twostep
