#include "ops/linear_weight.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "ops/linear_decode.h"

namespace twostep {

namespace {

bool is_float(Format format) {
  return format == Format::F32 || format == Format::F16 || format == Format::BF16;
}

Kind kind_of(Format format, Kind byte_kind) {
  switch (format) {
    case Format::F32: return Kind::F32;
    case Format::F16: return Kind::F16;
    case Format::BF16: return Kind::BF16;
    case Format::Q8_0: return byte_kind;
    case Format::Q4_0: return Kind::U4;
    case Format::Q4_1: return Kind::U4M;
    case Format::Q4_K: return Kind::U4K;
    case Format::Q5_0: return Kind::U5;
    case Format::Q5_1: return Kind::U5M;
    case Format::Q5_K: return Kind::U5K;
    case Format::Q6_K: return Kind::U6K;
  }
  throw std::logic_error("kind_of: unknown format");
}

// One form for the whole weight, so that its activations are written once.
ActForm form_for(const LinearKernels& kernels, const std::vector<RawPart>& parts, Precision precision) {
  const auto all = [&](auto has) { return std::all_of(parts.begin(), parts.end(), has); };
  if (precision == Precision::Int8 && all([](const RawPart& p) { return !is_float(p.format); })) {
    return ActForm::Q8;
  }
  if (all([](const RawPart& p) { return p.format == Format::BF16; })) return kernels.bf16_form;
  return ActForm::F32;
}

// Runs work(i) for 0 <= i < n on `num_threads` threads.
void parallel_for(int n, int num_threads, const std::function<void(int)>& work) {
  std::atomic<int> next{0};
  const auto loop = [&] {
    for (int i = next++; i < n; i = next++) work(i);
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < std::min(num_threads, n); t++) threads.emplace_back(loop);
  loop();
  for (auto& thread : threads) thread.join();
}

void store_u16(uint8_t* p, uint16_t x) { std::memcpy(p, &x, 2); }

// Where the lanes of one group of a quantised panel lie.
struct GroupPlace {
  GroupPlace(Kind kind, int width, uint8_t* panel, int g)
      : values(panel + info(kind).values_offset(width, g)),
        scales(panel + info(kind).scales_offset(width, g)),
        supers(g % kSuperGroups == 0 ? panel + info(kind).supers_offset(width, g) : nullptr) {}
  uint8_t *values, *scales;
  uint8_t* supers;  // null for all groups of a super-block but the first
};

// 4 bytes of a lane in each row of 4 * width. Whole words and loops of fixed length, for the
// compiler's vectors: a start waits for this.
void put_values(Kind kind, int width, const GroupPlace& place, int lane, const Group& group) {
  uint8_t* values = place.values + lane * 4;
  uint8_t bytes[kGroup];
  if (info(kind).bits == 4) {
    for (int i = 0; i < 16; i++) bytes[i] = static_cast<uint8_t>(group.q[i] | group.q[16 + i] << 4);
    for (int j = 0; j < 4; j++) std::memcpy(values + j * width * 4, bytes + 4 * j, 4);
    return;
  }
  const uint8_t flip = kind == Kind::S8 ? 0x80 : 0;
  for (int i = 0; i < kGroup; i++) bytes[i] = group.q[i] ^ flip;
  for (int j = 0; j < 8; j++) std::memcpy(values + j * width * 4, bytes + 4 * j, 4);
}

void put_scales(Kind kind, int width, const GroupPlace& place, int lane, const Group& group) {
  const KindInfo& k = info(kind);
  if (!k.has_supers) {
    store_u16(place.scales + lane * 2, group.d);
    if (k.has_min) store_u16(place.scales + (width + lane) * 2, group.dmin);
    return;
  }
  place.scales[lane] = static_cast<uint8_t>(group.scale[0]);
  place.scales[width + lane] = k.halves ? static_cast<uint8_t>(group.scale[1]) : group.minimum;
  if (place.supers == nullptr) return;
  store_u16(place.supers + lane * 2, group.d);
  if (k.has_min) store_u16(place.supers + (width + lane) * 2, group.dmin);
}

// Group by group, so that each line of the panel is filled while it is in the cache.
void put_quantized_panel(Kind kind, Format format, int width, int groups, uint8_t* panel, int lanes,
                         const uint8_t* rows, size_t stride) {
  const BlockSize size = block_size(format);
  const int groups_of_block = size.length / kGroup;
  Group group;
  for (int g = 0; g < groups; g++) {
    const GroupPlace place(kind, width, panel, g);
    const uint8_t* block = rows + static_cast<size_t>(g / groups_of_block) * size.bytes;
    for (int lane = 0; lane < lanes; lane++) {
      decode_group(format, block + lane * stride, g % groups_of_block, group);
      put_values(kind, width, place, lane, group);
      put_scales(kind, width, place, lane, group);
    }
  }
}

// n elements of kSize bytes of each lane, the lanes side by side.
template <int kSize>
void interleave(uint8_t* panel, int width, int lanes, const uint8_t* rows, size_t stride, int n) {
  for (int i = 0; i < n; i++) {
    uint8_t* to = panel + static_cast<size_t>(i) * width * kSize;
    for (int lane = 0; lane < lanes; lane++) {
      std::memcpy(to + lane * kSize, rows + lane * stride + static_cast<size_t>(i) * kSize, kSize);
    }
  }
}

void put_float_panel(Kind kind, int width, int k, uint8_t* panel, int lanes, const uint8_t* rows,
                     size_t stride) {
  if (kind == Kind::F32) return interleave<4>(panel, width, lanes, rows, stride, k);
  if (kind == Kind::F16) return interleave<2>(panel, width, lanes, rows, stride, k);
  interleave<4>(panel, width, lanes, rows, stride, k / 2);  // bf16 lies in pairs
  if (k % 2 == 0) return;
  uint8_t* last = panel + static_cast<size_t>(k / 2) * width * 4;
  for (int lane = 0; lane < lanes; lane++) {
    std::memcpy(last + lane * 4, rows + lane * stride + static_cast<size_t>(k - 1) * 2, 2);
  }
}

void pack_part(const RawPart& part, const PackTarget& target, int width, uint8_t* base,
               int num_threads) {
  const int groups = (part.k + kGroup - 1) / kGroup;
  const size_t stride = row_bytes(part.format, part.k);
  const bool quantized = info(target.kind).is_quantized();
  parallel_for((part.n + width - 1) / width, num_threads, [&](int p) {
    const int unit = p * width / kUnit, of_unit = p % (kUnit / width);
    uint8_t* panel =
        base + target.offset + unit * target.unit_stride + of_unit * target.panel_bytes;
    const int lanes = std::min(width, part.n - p * width);
    const uint8_t* rows = part.data + static_cast<size_t>(p) * width * stride;
    if (quantized) {
      return put_quantized_panel(target.kind, part.format, width, groups, panel, lanes, rows, stride);
    }
    put_float_panel(target.kind, width, part.k, panel, lanes, rows, stride);
  });
}

void check(const std::vector<RawPart>& parts) {
  if (parts.empty()) throw std::invalid_argument("a weight needs at least one part");
  for (const RawPart& part : parts) {
    if (part.n <= 0 || part.k != parts[0].k) {
      throw std::invalid_argument("a weight's parts must have rows, all of one length");
    }
    row_bytes(part.format, part.k);
  }
}

// How many panels (or units) of `width` outputs hold n.
size_t panels_of(int n, int width) { return static_cast<size_t>((n + width - 1) / width); }

float float_at(Kind kind, const uint8_t* panel, int width, int lane, int k) {
  const size_t at = kind == Kind::BF16 ? (static_cast<size_t>(k / 2) * width + lane) * 2 + k % 2
                                       : static_cast<size_t>(k) * width + lane;
  if (kind == Kind::F32) {
    float f;
    std::memcpy(&f, panel + at * 4, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, panel + at * 2, 2);
  return kind == Kind::BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

// The values of a group of one lane, as they lie in memory.
void unpack_values(Kind kind, const uint8_t* values, int width, int lane, float* out) {
  const bool nibbles = info(kind).bits == 4;
  for (int j = 0; j < (nibbles ? 4 : 8); j++) {
    const uint8_t* bytes = values + (j * width + lane) * 4;
    for (int b = 0; b < 4; b++) {
      if (nibbles) {
        out[4 * j + b] = static_cast<float>(bytes[b] & 15);
        out[16 + 4 * j + b] = static_cast<float>(bytes[b] >> 4);
      } else {
        out[4 * j + b] = static_cast<float>(kind == Kind::S8 ? static_cast<int8_t>(bytes[b]) : bytes[b]);
      }
    }
  }
}

float half_at(const uint8_t* p, size_t index) {
  uint16_t h;
  std::memcpy(&h, p + index * 2, 2);
  return f16_to_f32(h);
}

// The scale of half h of group g of one lane, and what to add to value * scale.
struct ScaleAndOffset {
  float scale, offset;
};
ScaleAndOffset scale_at(Kind kind, const uint8_t* panel, int width, int lane, int g, int h) {
  const KindInfo& k = info(kind);
  const uint8_t* scales = panel + k.scales_offset(width, g);
  float scale, minimum = 0;
  if (k.has_supers) {
    const uint8_t* supers = panel + k.supers_offset(width, g);
    const uint8_t first = scales[h * width + lane];
    scale = half_at(supers, lane) * static_cast<float>(k.halves ? static_cast<int8_t>(first) : first);
    if (k.has_min) minimum = half_at(supers, width + lane) * static_cast<float>(scales[width + lane]);
  } else {
    scale = half_at(scales, lane);
    if (k.has_min) minimum = half_at(scales, width + lane);
  }
  return {scale, k.has_min ? minimum : -static_cast<float>(k.zero_point) * scale};
}

void unpack_group(const LinearKernels& kernels, Kind kind, const uint8_t* panel, int lane, int g,
                  float* out) {
  const KindInfo& k = info(kind);
  const int width = kernels.width, length = k.halves ? kGroup / 2 : kGroup;
  unpack_values(kind, panel + k.values_offset(width, g), width, lane, out);
  for (int h = 0; h < kGroup / length; h++) {
    const auto [scale, offset] = scale_at(kind, panel, width, lane, g, h);
    kernels.scale_and_shift(out + h * length, scale, offset, length);
  }
}

constexpr size_t kPrefetchSlack = 8192;  // kernels prefetch beyond the end

}  // namespace

bool is_finite(const RawPart& part, int num_threads) {
  constexpr size_t kPiece = size_t{1} << 20;  // bytes, some: a thread for less is not worth its start
  const BlockSize size = block_size(part.format);
  const size_t count = row_bytes(part.format, part.k) * part.n / size.bytes, piece = kPiece / size.bytes;
  std::atomic<bool> finite{true};
  parallel_for(static_cast<int>((count + piece - 1) / piece), num_threads, [&](int i) {
    const size_t first = i * piece;
    if (!is_finite(part.format, part.data + first * size.bytes, std::min(piece, count - first))) finite = false;
  });
  return finite;
}

PackedWeight::PackedWeight(const KernelTable& table, const std::vector<RawPart>& parts,
                           Precision precision, int num_threads, Arena& arena)
    : PackedWeight(*table.linear) {
  check(parts);
  const LinearKernels& kernels = *kernels_;
  k_ = parts[0].k;
  form_ = form_for(kernels, parts, precision);
  std::vector<PackTarget> targets;
  size_t size = 0;
  for (const RawPart& part : parts) {
    const Kind kind = kind_of(part.format, kernels.byte_kind);
    const size_t panel = info(kind).panel_bytes(width_, groups());
    targets.push_back({kind, size, panel, panel * (kUnit / width_)});
    size += panel * panels_of(part.n, width_);
  }
  bytes_ = size;
  memory_ = arena.allocate(size + kPrefetchSlack);
  auto* base = memory_.get();
  for (size_t i = 0; i < parts.size(); i++) {
    pack_part(parts[i], targets[i], width_, base, num_threads);
    segments_.push_back({targets[i].kind, base + targets[i].offset, targets[i].panel_bytes,
                         targets[i].unit_stride, n_, parts[i].n});
    n_ += parts[i].n;
  }
}

GatedWeight::GatedWeight(const KernelTable& table, const RawPart& gate_part, const RawPart& up_part,
                         Precision precision, int num_threads, Arena& arena)
    : gate(*table.linear), up(*table.linear) {
  check({gate_part, up_part});
  if (gate_part.n != up_part.n) throw std::invalid_argument("gate and up differ in shape");
  const LinearKernels& kernels = *table.linear;
  const ActForm form = form_for(kernels, {gate_part, up_part}, precision);
  const int width = kernels.width, groups = (gate_part.k + kGroup - 1) / kGroup;
  const RawPart* parts[] = {&gate_part, &up_part};
  const size_t units = panels_of(gate_part.n, kUnit);
  PackTarget targets[2];
  size_t sizes[2];  // of a unit
  for (int i = 0; i < 2; i++) {
    const Kind kind = kind_of(parts[i]->format, kernels.byte_kind);
    const size_t panel = info(kind).panel_bytes(width, groups);
    sizes[i] = panel * (kUnit / width);
    targets[i] = {kind, 0, panel, sizes[i]};
  }
  const bool alternate = targets[0].kind == targets[1].kind;
  targets[1].offset = alternate ? sizes[0] : sizes[0] * units;
  if (alternate) targets[0].unit_stride = targets[1].unit_stride = sizes[0] + sizes[1];
  const size_t bytes = (sizes[0] + sizes[1]) * units;
  const auto memory = arena.allocate(bytes + kPrefetchSlack);
  PackedWeight* weights[] = {&gate, &up};
  for (int i = 0; i < 2; i++) {
    pack_part(*parts[i], targets[i], width, memory.get(), num_threads);
    PackedWeight& w = *weights[i];
    w.memory_ = memory;
    w.bytes_ = bytes;
    w.form_ = form;
    w.n_ = parts[i]->n;
    w.k_ = parts[i]->k;
    w.segments_.push_back({targets[i].kind, memory.get() + targets[i].offset, targets[i].panel_bytes,
                           targets[i].unit_stride, 0, parts[i]->n});
  }
}

void PackedWeight::unpack_row(int id, float* out) const {
  const Segment* segment = &segments_[0];
  while (id >= segment->first + segment->n) segment++;
  const int row = id - segment->first, lane = row % width_;
  const uint8_t* panel = segment->data + row / kUnit * segment->unit_stride +
                         row % kUnit / width_ * segment->panel_bytes;
  if (!info(segment->kind).is_quantized()) {
    for (int k = 0; k < k_; k++) out[k] = float_at(segment->kind, panel, width_, lane, k);
    return;
  }
  for (int g = 0; g < groups(); g++) {  // quantised rows fill whole groups
    unpack_group(*kernels_, segment->kind, panel, lane, g, out + g * kGroup);
  }
}

}  // namespace twostep
