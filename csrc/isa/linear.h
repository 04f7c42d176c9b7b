// Matrix products: how packed weights lie in memory, and the kernels that read them.
//
// A weight is cut into panels of `width` outputs (the vector width in floats); outputs that the last
// panel lacks are zeros. K is cut into groups of 32, as activations are (core/act.h). A panel lies in
// memory in the very order in which a product reads it, group after group: a processor fetches one
// stream ahead of its reader, and hardly two that jump. A group is values | scales; where the scales
// of one are half a vector, two groups are values | scales of both | values. A super-block of eight
// groups begins with its supers.
//     4 bits: values [4][width][4] bytes: byte (j, n, b) holds, for output n, k = 4j + b in its low
//             and k = 16 + 4j + b in its high nibble (k within the group of 32)
//     8 bits: values [8][width][4] bytes: byte (j, n, b) is k = 4j + b
//     BF16:   values [16][width][2], pairs of k; F16 and F32: [32][width]
//     scales: fp16 [width], or [2][width]: scale and minimum. k-quants instead keep the integers of
//             their file: u8 [2][width], scale and minimum, or (Q6_K) s8 [2][width], the scales of the
//             group's halves
//     supers: k-quants: fp16 [width], or [2][width]: what the integers of a super-block of 256 are
//             multiplied with
// so weight = (value - zero_point) * scale + minimum, where a k-quant's scale and minimum are products
// that float32 holds exactly. Four consecutive k for each output is what the byte dot products of x86
// (vpmaddubsw, vpdpbusd) take in one lane.
#pragma once
#include "core/act.h"
#include "core/read_ahead.h"

namespace twostep {

// How the values of a packed weight lie in memory.
enum class Kind : uint8_t {
  U4,   // 0..15, zero point 8: Q4_0
  U4M,  // 0..15, minimum: Q4_1
  U4K,  // 0..15, minimum, super-blocks: Q4_K
  U5,   // 0..31 in a byte, zero point 16: Q5_0
  U5M,  // 0..31 in a byte, minimum: Q5_1
  U5K,  // 0..31 in a byte, minimum, super-blocks: Q5_K
  U6K,  // 0..63 in a byte, zero point 32, groups of 16, super-blocks: Q6_K
  U8,   // 0..255, zero point 128: Q8_0 where the dot product is unsigned by signed
  S8,   // -128..127: Q8_0 elsewhere
  BF16,
  F16,
  F32,
};
inline constexpr int kNumKinds = 12;

// Groups in a super-block of k-quants; their K is a multiple of it.
inline constexpr int kSuperGroups = 8;

struct KindInfo {
  int bits;
  int max_value;
  int zero_point;
  bool has_min;
  bool has_supers;  // k-quants
  bool halves;      // two scales in each group of 32

  constexpr bool is_quantized() const { return max_value != 0; }
  constexpr size_t value_bytes(int width) const {
    return static_cast<size_t>(width) * kGroup * bits / 8;
  }
  constexpr size_t scale_bytes(int width) const {
    const int terms = has_min || halves ? 2 : 1;
    return is_quantized() ? static_cast<size_t>(width) * terms * (has_supers ? 1 : 2) : 0;
  }
  // Of a whole super-block: a vector, of which Q6_K fills half.
  constexpr size_t super_bytes(int width) const { return has_supers ? static_cast<size_t>(width) * 4 : 0; }
  // Whether the scales of two groups lie together.
  constexpr bool in_pairs(int width) const { return scale_bytes(width) % (static_cast<size_t>(width) * 4) != 0; }
  constexpr size_t group_bytes(int width) const { return value_bytes(width) + scale_bytes(width); }
  // Where things of group g begin in a panel.
  constexpr size_t values_offset(int width, int g) const {
    return group_offset(width, g) + (in_pairs(width) && g % 2 ? scale_bytes(width) : 0);
  }
  constexpr size_t scales_offset(int width, int g) const {
    return group_offset(width, g) + (in_pairs(width) && g % 2 ? 0 : value_bytes(width));
  }
  constexpr size_t supers_offset(int width, int g) const {
    return g / kSuperGroups * (group_bytes(width) * kSuperGroups + super_bytes(width));
  }
  constexpr size_t panel_bytes(int width, int groups) const {
    const size_t supers = super_bytes(width) * (groups / kSuperGroups);
    return (group_bytes(width) * groups + supers + 63) / 64 * 64;
  }

 private:
  constexpr size_t group_offset(int width, int g) const {
    return group_bytes(width) * g + super_bytes(width) * (g / kSuperGroups + 1);
  }
};

constexpr KindInfo kKindInfo[kNumKinds] = {
    {4, 15, 8, false, false, false},    // U4
    {4, 15, 0, true, false, false},     // U4M
    {4, 15, 0, true, true, false},      // U4K
    {8, 31, 16, false, false, false},   // U5
    {8, 31, 0, true, false, false},     // U5M
    {8, 31, 0, true, true, false},      // U5K
    {8, 63, 32, false, true, true},     // U6K
    {8, 255, 128, false, false, false}, // U8
    {8, 127, 0, false, false, false},   // S8
    {16, 0, 0, false, false, false},    // BF16
    {16, 0, 0, false, false, false},    // F16
    {32, 0, 0, false, false, false},    // F32
};
constexpr const KindInfo& info(Kind kind) { return kKindInfo[static_cast<int>(kind)]; }

// One tile of rows times consecutive panels.
struct PanelArgs {
  const uint8_t* panel;
  size_t panel_stride;  // bytes from a panel to the next
  int outputs;          // y columns to write; ceil(outputs / width) panels are read
  Act act;              // from the tile's first row
  int rows;             // the tile's, 1 .. max_tile_rows
  float* y;             // row m at y + m * y_stride
  size_t y_stride;
  const float* bias;    // [outputs] or null
  bool add;             // y += instead of y =
  bool few_rows_hint;   // see LinearKernels
  bool in_cache;        // the panels have just been read, for the tile before, or fetched
  std::ptrdiff_t next;  // then: bytes from each to the one that is read next and to be fetched now; or 0
  // Or null. Products of int8 fetch it, some lines with each group, in proportion to its products.
  ReadAhead* ahead = nullptr;
};

enum class GateFn : uint8_t { Silu, GeluTanh };

struct LinearKernels {
  int width;
  int max_tile_rows[kNumActForms];
  ActForm bf16_form;  // what BF16 weights read
  Kind byte_kind;     // how Q8_0 is packed: U8 or S8
  // Null where a kind can't be read with a form.
  void (*panels[kNumActForms][kNumKinds])(const PanelArgs&);
  // gate = fn(gate) * up, [n]; n is a multiple of 32
  void (*gate)(GateFn fn, float* gate, const float* up, int n);
  // Group g of rows m .. m + count - 1, which lie in tile (r0, rows), from x [count, 32].
  void (*put_rows)(const Act&, int r0, int rows, int m, int count, int g, const float* x);
  // y += scale * x, [n]
  void (*add_scaled)(float* y, const float* x, float scale, int n);
  // x = x * scale + offset, rounded once; n is a multiple of 16
  void (*scale_and_shift)(float* x, float scale, float offset, int n);
  // Whether products of few rows, which memory paces, ask for weights ahead of time (kernel_table).
  bool few_rows_hint = false;
  // Whether panels in the cache fetch the next ones while they are multiplied.
  bool fetches_next[kNumActForms] = {};
};

}  // namespace twostep
