#include "isa/peak.h"

#include "isa/amx/tile.h"

namespace twostep::avx512 {
extern const PeakKernels* const kPeakKernels;
}

namespace twostep::amx {
namespace {

// Four tiles of sums; a multiplication takes 16 cycles, and its sum is there after 52.
template <class Multiply>
void run(int64_t rounds, float* sink, Multiply multiply) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.set(tile, 16, 64);
  alignas(64) float sums[16 * 16] = {};
  const Tiles configured(config);
  load<0>(sums, 64);
  load<1>(sums, 64);
  load<2>(sums, 64);
  load<3>(sums, 64);
  load<4>(sums, 64);
  load<5>(sums, 64);
  for (int64_t r = 0; r < rounds; r++) multiply();
  store<0>(sums, 64);
  for (int i = 0; i < 64; i++) sink[i] = sums[i];
}

double int8(int64_t rounds, float* sink) {
  run(rounds, sink, [] {
    dot_s8<0, 4, 5>();
    dot_s8<1, 4, 5>();
    dot_s8<2, 4, 5>();
    dot_s8<3, 4, 5>();
  });
  return 2.0 * 16 * 16 * 64 * 4 * static_cast<double>(rounds);
}

double bf16(int64_t rounds, float* sink) {
  run(rounds, sink, [] {
    dot_bf16<0, 4, 5>();
    dot_bf16<1, 4, 5>();
    dot_bf16<2, 4, 5>();
    dot_bf16<3, 4, 5>();
  });
  return 2.0 * 16 * 16 * 32 * 4 * static_cast<double>(rounds);
}

double fp32(int64_t rounds, float* sink) { return avx512::kPeakKernels->fp32(rounds, sink); }

const PeakKernels kTable = {int8, bf16, fp32};

}  // namespace
extern const PeakKernels* const kPeakKernels;
const PeakKernels* const kPeakKernels = &kTable;
}  // namespace twostep::amx
