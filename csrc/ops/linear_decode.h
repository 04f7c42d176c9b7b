// Reading weights as files hold them: a group of 32 at a time, as integers and scales.
#pragma once
#include <string>

#include "core/types.h"
#include "isa/linear.h"

namespace twostep {

// Throws std::invalid_argument for a name that is none of the eleven formats.
Format format_of(const std::string& name);
const char* name_of(Format format);

// Weights and bytes of one block; {1, 4} for F32.
struct BlockSize {
  int length, bytes;
};
BlockSize block_size(Format format);
// Bytes of a row of `k` weights. Throws std::invalid_argument unless k fills whole blocks.
size_t row_bytes(Format format, int k);

// Whether none of the weights of so many blocks is NaN or infinite. Of a quantised format that is a matter of its
// scales: integers cannot be bad.
bool is_finite(Format format, const uint8_t* blocks, size_t count);

// weight[i] = (q[i] - zero_point) * d * scale[i / 16] + dmin * minimum, with the zero point of the
// format's kind. `d` and `dmin` are fp16; `scale` and `minimum` are 1 but for k-quants.
struct Group {
  uint8_t q[kGroup];
  uint16_t d, dmin;
  int16_t scale[2];
  uint8_t minimum;
};
// Group j of a block of a quantised format.
void decode_group(Format format, const uint8_t* block, int j, Group& out);

}  // namespace twostep
