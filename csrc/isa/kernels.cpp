#include "isa/kernels.h"

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef TWOSTEP_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "isa/linear.h"

namespace twostep {

#define TWOSTEP_DECLARE(isa)                             \
  namespace isa {                                        \
  extern const LinearKernels* const kLinearKernels;      \
  extern const AttentionKernels* const kAttentionKernels; \
  extern const RowKernels* const kRowKernels;            \
  extern const SampleKernels* const kSampleKernels;      \
  extern const PeakKernels* const kPeakKernels;          \
  }
TWOSTEP_DECLARE(scalar)
#if defined(__x86_64__)
TWOSTEP_DECLARE(avx2)
TWOSTEP_DECLARE(avx512)
#elif defined(__aarch64__)
TWOSTEP_DECLARE(neon)
#endif
#ifdef TWOSTEP_HAS_AMX
namespace amx {
extern const LinearKernels* const kLinearKernels;
extern const AttentionKernels* const kAttentionKernels;
extern const PeakKernels* const kPeakKernels;
}
#endif
#undef TWOSTEP_DECLARE

namespace {

#if defined(__x86_64__)
struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(uint32_t leaf, uint32_t subleaf) { __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx); }
};

uint64_t xgetbv0() {
  uint32_t lo, hi;
  asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<uint64_t>(hi) << 32) | lo;
}

bool is_intel() {
  const Cpuid vendor(0, 0);
  return vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 && vendor.ecx == 0x6c65746e;  // GenuineIntel
}

// Intel's own prefetchers stop at the end of a page; AMD's do better without hints where memory paces.
// Tokens/s of one sequence (SmolLM2-135M) on Emerald Rapids without and with: Q4_0 on AVX-512 297 and
// 373, bf16 58 and 75.
LinearKernels with_hints(const LinearKernels* kernels) {
  LinearKernels chosen = *kernels;
  chosen.few_rows_hint = is_intel();
  return chosen;
}

std::vector<std::string> read_features() {
  std::vector<std::string> found;
  const auto add = [&](bool has, const char* name) {
    if (has) found.emplace_back(name);
  };
  const uint32_t max_leaf = Cpuid(0, 0).eax;
  const Cpuid l1(1, 0);
  const bool osxsave = l1.ecx >> 27 & 1;
  const uint64_t xcr0 = osxsave ? xgetbv0() : 0;
  const bool ymm = (xcr0 & 0x6) == 0x6, zmm = (xcr0 & 0xe6) == 0xe6, tile = (xcr0 & 0x60000) == 0x60000;
  add(l1.ecx >> 20 & 1, "sse4.2");
  add(ymm && (l1.ecx >> 28 & 1), "avx");
  add(ymm && (l1.ecx >> 12 & 1), "fma");
  add(ymm && (l1.ecx >> 29 & 1), "f16c");
  if (max_leaf < 7) return found;
  const Cpuid l7(7, 0), l71(7, l7.eax >= 1 ? 1 : 0);
  const bool has71 = l7.eax >= 1;
  add(ymm && (l7.ebx >> 5 & 1), "avx2");
  add(zmm && (l7.ebx >> 16 & 1), "avx512f");
  add(zmm && (l7.ebx >> 17 & 1), "avx512dq");
  add(zmm && (l7.ebx >> 30 & 1), "avx512bw");
  add(zmm && (l7.ebx >> 31 & 1), "avx512vl");
  add(zmm && (l7.ecx >> 8 & 1), "gfni");
  add(zmm && (l7.ecx >> 11 & 1), "avx512_vnni");
  add(zmm && has71 && (l71.eax >> 5 & 1), "avx512_bf16");
  add(ymm && has71 && (l71.eax >> 4 & 1), "avx_vnni");
  add(tile && (l7.edx >> 24 & 1), "amx_tile");
  add(tile && (l7.edx >> 25 & 1), "amx_int8");
  add(tile && (l7.edx >> 22 & 1), "amx_bf16");
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
// Bits of AT_HWCAP and AT_HWCAP2 (Linux, arch/arm64/include/uapi/asm/hwcap.h), named as in
// /proc/cpuinfo; headers of older systems lack some.
std::vector<std::string> read_features() {
  const struct {
    unsigned long type;
    int bit;
    const char* name;
  } known[] = {{AT_HWCAP, 1, "asimd"}, {AT_HWCAP, 10, "asimdhp"}, {AT_HWCAP, 20, "asimddp"},
               {AT_HWCAP, 22, "sve"},  {AT_HWCAP2, 13, "i8mm"},   {AT_HWCAP2, 14, "bf16"}};
  std::vector<std::string> found;
  for (const auto& feature : known) {
    if (getauxval(feature.type) >> feature.bit & 1) found.emplace_back(feature.name);
  }
  return found;
}
#elif defined(__aarch64__) && defined(__APPLE__)
std::vector<std::string> read_features() {
  const struct {
    const char* key;
    const char* name;
  } known[] = {{"hw.optional.arm.FEAT_DotProd", "asimddp"},
               {"hw.optional.arm.FEAT_I8MM", "i8mm"},
               {"hw.optional.arm.FEAT_BF16", "bf16"}};
  std::vector<std::string> found{"asimd"};
  for (const auto& feature : known) {
    int has = 0;
    size_t size = sizeof has;
    if (sysctlbyname(feature.key, &has, &size, nullptr, 0) == 0 && has) found.emplace_back(feature.name);
  }
  return found;
}
#else
std::vector<std::string> read_features() { return {}; }
#endif

#ifdef TWOSTEP_HAS_AMX
// Asks Linux for the tiles' state, for this process and its children (Documentation/arch/x86/xstate).
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<std::string> runnable([[maybe_unused]] const std::vector<std::string>& features) {
  [[maybe_unused]] const auto all = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) {
      return std::find(features.begin(), features.end(), name) != features.end();
    });
  };
  std::vector<std::string> isas;
#if defined(__x86_64__)
#ifndef TWOSTEP_EMULATE_AVX512
  if (all({"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni",
           "avx512_bf16"})) {
#ifdef TWOSTEP_HAS_AMX
    if (all({"gfni", "amx_tile", "amx_int8", "amx_bf16"}) && may_use_tiles()) isas.emplace_back("amx");
#endif
    isas.emplace_back("avx512");
  }
#endif
  if (all({"avx2", "fma", "f16c"})) isas.emplace_back("avx2");
#ifdef TWOSTEP_EMULATE_AVX512
  isas.emplace_back("avx512");  // computed in plain C: for tests, never chosen by itself
#endif
#elif defined(__aarch64__)
  if (all({"asimd", "asimddp"})) isas.emplace_back("neon");
#endif
  isas.emplace_back("scalar");
  return isas;
}

}  // namespace

const KernelTable& kernel_table(const std::string& isa) {
#if defined(__x86_64__)
  static const LinearKernels avx2_linear = with_hints(avx2::kLinearKernels);
  static const LinearKernels avx512_linear = with_hints(avx512::kLinearKernels);
#endif
#ifdef TWOSTEP_HAS_AMX
  static const LinearKernels amx_linear = with_hints(amx::kLinearKernels);
#endif
  static const KernelTable tables[] = {
      {"scalar", scalar::kLinearKernels, scalar::kAttentionKernels, scalar::kRowKernels,
       scalar::kSampleKernels, scalar::kPeakKernels},
#if defined(__x86_64__)
      {"avx2", &avx2_linear, avx2::kAttentionKernels, avx2::kRowKernels,
       avx2::kSampleKernels, avx2::kPeakKernels},
      {"avx512", &avx512_linear, avx512::kAttentionKernels, avx512::kRowKernels,
       avx512::kSampleKernels, avx512::kPeakKernels},
#ifdef TWOSTEP_HAS_AMX
      {"amx", &amx_linear, amx::kAttentionKernels, avx512::kRowKernels,
       avx512::kSampleKernels, amx::kPeakKernels},
#endif
#elif defined(__aarch64__)
      {"neon", neon::kLinearKernels, neon::kAttentionKernels, neon::kRowKernels,
       neon::kSampleKernels, neon::kPeakKernels},
#endif
  };
  for (const auto& table : tables) {
    if (isa == table.isa) return table;
  }
  throw std::invalid_argument("no kernels for instruction set '" + isa + "'");
}

CpuInfo detect_cpu(const std::string& forced) {
  CpuInfo info;
  info.features = read_features();
  info.isas = runnable(info.features);
  if (forced.empty()) {
    info.isa = info.isas.front();
    info.reason = "best of what the processor supports";
    return info;
  }
  if (std::find(info.isas.begin(), info.isas.end(), forced) == info.isas.end()) {
    std::string can;
    for (const auto& isa : info.isas) can += (can.empty() ? "" : ", ") + isa;
    throw std::invalid_argument("TWOSTEP_CPU_ISA=" + forced + " cannot run here; use one of " + can);
  }
  info.isa = forced;
  info.reason = "forced by TWOSTEP_CPU_ISA";
  return info;
}

}  // namespace twostep
