#include "ops/linear_decode.h"

#include <cstring>
#include <stdexcept>

namespace twostep {

namespace {

struct FormatInfo {
  const char* name;
  BlockSize block;
  int first_scale = 0, scales = 0;  // half-precision numbers of a quantised block: byte of the first, how many
};
constexpr FormatInfo kFormats[] = {
    {"F32", {1, 4}},
    {"F16", {1, 2}},
    {"BF16", {1, 2}},
    {"Q8_0", {32, 34}, 0, 1},
    {"Q4_0", {32, 18}, 0, 1},
    {"Q4_1", {32, 20}, 0, 2},
    {"Q5_0", {32, 22}, 0, 1},
    {"Q5_1", {32, 24}, 0, 2},
    {"Q4_K", {256, 144}, 0, 2},
    {"Q5_K", {256, 176}, 0, 2},
    {"Q6_K", {256, 210}, 208, 1},
};
const FormatInfo& info_of(Format format) { return kFormats[static_cast<int>(format)]; }

uint16_t load_u16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

// Whether one of `count` words, `stride` bytes apart, has all bits of `exponent` set. No way out of the loop, so that
// the compiler's vectors can take it.
template <class Word>
inline bool any_bad(const uint8_t* p, size_t count, size_t stride, Word exponent) {
  bool bad = false;
  for (size_t i = 0; i < count; i++) {
    Word x;
    std::memcpy(&x, p + i * stride, sizeof(Word));
    bad |= (x & exponent) == exponent;
  }
  return bad;
}

void nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; i++) {
    q[i] = packed[i] & 15;
    q[16 + i] = packed[i] >> 4;
  }
}

// Bit i of the little-endian word becomes bit 4 of value i: eight copies of a byte, each with its own
// bit left, which carries into bit 7.
void fifth_bits(const uint8_t* word, uint8_t* q) {
  for (int i = 0; i < kGroup / 8; i++) {
    const uint64_t bits = word[i] * 0x0101010101010101u & 0x8040201008040201u;
    uint64_t eight;
    std::memcpy(&eight, q + 8 * i, 8);
    eight |= (bits + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    std::memcpy(q + 8 * i, &eight, 8);
  }
}

void set_scale(Group& out, const uint8_t* d, const uint8_t* dmin = nullptr) {
  out.d = load_u16(d);
  out.dmin = dmin ? load_u16(dmin) : 0;
  out.scale[0] = out.scale[1] = 1;
  out.minimum = 1;
}

// Scale and minimum of sub-block j of 8: 6 bits each; the last four keep their two upper bits in the
// upper bits of the first eight bytes.
void k_scales(const uint8_t* packed, int j, Group& out) {
  if (j < 4) {
    out.scale[0] = packed[j] & 63;
    out.minimum = packed[4 + j] & 63;
  } else {
    out.scale[0] = static_cast<int16_t>((packed[4 + j] & 15) | packed[j - 4] >> 6 << 4);
    out.minimum = static_cast<uint8_t>(packed[4 + j] >> 4 | packed[j] >> 6 << 4);
  }
  out.scale[1] = out.scale[0];
}

// 32 bytes hold sub-block 2j in their low nibbles and 2j + 1 in their high ones.
void k_nibbles(const uint8_t* packed, int j, uint8_t* q) {
  const uint8_t* bytes = packed + j / 2 * 32;
  for (int i = 0; i < kGroup; i++) q[i] = j % 2 ? bytes[i] >> 4 : bytes[i] & 15;
}

// Q4_K and Q5_K: d, dmin (subtracted), 12 bytes of scales, then 32 bytes of fifth bits (Q5_K), then
// nibbles.
void decode_k(const uint8_t* block, int j, bool five_bits, Group& out) {
  out.d = load_u16(block);
  out.dmin = load_u16(block + 2) ^ 0x8000;
  k_scales(block + 4, j, out);
  k_nibbles(block + (five_bits ? 48 : 16), j, out.q);
  if (!five_bits) return;
  for (int i = 0; i < kGroup; i++) out.q[i] |= (block[16 + i] >> j & 1) << 4;
}

// Q6_K: 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales, d. Half h of the block
// (128 weights) has sub-blocks of 32 with their low nibbles in the bytes 64 h + 32 (j % 2) ...
void decode_q6_k(const uint8_t* block, int g, Group& out) {
  const int half = g / 4, j = g % 4;
  const uint8_t* low = block + half * 64 + j % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < kGroup; i++) {
    const int nibble = j < 2 ? low[i] & 15 : low[i] >> 4;
    out.q[i] = static_cast<uint8_t>(nibble | (high[i] >> 2 * j & 3) << 4);
  }
  out.d = load_u16(block + 208);
  out.dmin = 0;
  for (int h = 0; h < 2; h++) out.scale[h] = static_cast<int8_t>(block[192 + g * 2 + h]);
  out.minimum = 0;
}

}  // namespace

Format format_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kFormats); i++) {
    if (name == kFormats[i].name) return static_cast<Format>(i);
  }
  throw std::invalid_argument("weight format '" + name + "' is not one this engine reads");
}

const char* name_of(Format format) { return info_of(format).name; }

bool is_finite(Format format, const uint8_t* blocks, size_t count) {
  if (format == Format::F32) return !any_bad<uint32_t>(blocks, count, 4, 0x7f800000);
  if (format == Format::F16) return !any_bad<uint16_t>(blocks, count, 2, 0x7c00);
  if (format == Format::BF16) return !any_bad<uint16_t>(blocks, count, 2, 0x7f80);
  const FormatInfo& info = info_of(format);
  for (int i = 0; i < info.scales; i++) {
    if (any_bad<uint16_t>(blocks + info.first_scale + 2 * i, count, info.block.bytes, 0x7c00)) return false;
  }
  return true;
}

BlockSize block_size(Format format) { return info_of(format).block; }

size_t row_bytes(Format format, int k) {
  const BlockSize block = block_size(format);
  if (k <= 0 || k % block.length != 0) {
    throw std::invalid_argument("rows of " + std::to_string(k) + " weights are not a multiple of " +
                                name_of(format) + "'s block of " + std::to_string(block.length));
  }
  return static_cast<size_t>(k / block.length) * block.bytes;
}

void decode_group(Format format, const uint8_t* block, int j, Group& out) {
  switch (format) {
    case Format::Q8_0:  // as 0..255
      for (int i = 0; i < kGroup; i++) out.q[i] = block[2 + i] ^ 0x80;
      return set_scale(out, block);
    case Format::Q4_0:
      nibbles(block + 2, out.q);
      return set_scale(out, block);
    case Format::Q4_1:
      nibbles(block + 4, out.q);
      return set_scale(out, block, block + 2);
    case Format::Q5_0:
      nibbles(block + 6, out.q);
      fifth_bits(block + 2, out.q);
      return set_scale(out, block);
    case Format::Q5_1:
      nibbles(block + 8, out.q);
      fifth_bits(block + 4, out.q);
      return set_scale(out, block, block + 2);
    case Format::Q4_K:
      return decode_k(block, j, false, out);
    case Format::Q5_K:
      return decode_k(block, j, true, out);
    case Format::Q6_K:
      return decode_q6_k(block, j, out);
    default:
      throw std::logic_error("decode_group: not a quantised format");
  }
}

}  // namespace twostep
