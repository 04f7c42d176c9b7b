// What the machine can do at most, measured: memory reads, and arithmetic by kind.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>

#include "bindings/bindings.h"
#include "core/memory.h"
#include "isa/peak.h"

namespace twostep {

namespace {

// Runs work(t) on `num_threads` threads and returns the seconds until all are done.
double timed(int num_threads, const std::function<void(int)>& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; t++) threads.emplace_back(work, t);
  work(0);
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Sequential read of a fresh buffer by several threads, best of 5, GB/s.
double measure_bandwidth(int num_threads, int megabytes) {
  if (num_threads < 1 || megabytes < 1) throw std::invalid_argument("bandwidth: no threads or bytes");
  const size_t bytes = static_cast<size_t>(megabytes) << 20;
  Memory memory(bytes);
  std::memset(memory.as<char>(), 1, bytes);
  const size_t per_thread = bytes / num_threads / 64 * 64;
  double best = 0;
  std::vector<uint64_t> sums(num_threads * 8);
  for (int round = 0; round < 5; round++) {
    const double seconds = timed(num_threads, [&](int t) {
      const auto* p = reinterpret_cast<const uint64_t*>(memory.as<char>() + per_thread * t);
      uint64_t sum[8] = {};
      for (size_t i = 0; i < per_thread / 8; i += 8) {
        for (int k = 0; k < 8; k++) sum[k] += p[i + k];
      }
      for (int k = 0; k < 8; k++) sums[t * 8] += sum[k];
    });
    best = std::max(best, static_cast<double>(per_thread) * num_threads / seconds / 1e9);
  }
  return best;
}

// Operations per second of one kind of arithmetic, registers only, best of 5, GOP/s.
double measure_peak(const std::string& isa, const std::string& kind, int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("peak: no threads");
  const PeakKernels& kernels = *kernel_table(isa).peak;
  auto* const run = kind == "int8"   ? kernels.int8
                    : kind == "bf16" ? kernels.bf16
                    : kind == "fp32" ? kernels.fp32
                                     : nullptr;
  if (run == nullptr) throw std::invalid_argument("peak: kind is int8, bf16 or fp32");
  float sink[64];
  int64_t rounds = 1 << 10;
  while (timed(1, [&](int) { run(rounds, sink); }) < 0.005) rounds *= 2;
  double best = 0;
  std::vector<double> done(num_threads);
  for (int round = 0; round < 5; round++) {
    const double seconds = timed(num_threads, [&](int t) {
      float own[64];
      done[t] = run(4 * rounds, own);  // 20 ms: the threads' starts do not show
    });
    double sum = 0;
    for (const double one : done) sum += one;
    best = std::max(best, sum / seconds / 1e9);
  }
  return best;
}

}  // namespace

void bind_peak(nb::module_& m) {
  m.def("measure_bandwidth", &measure_bandwidth, nb::arg("num_threads"), nb::arg("megabytes") = 256,
        nb::call_guard<nb::gil_scoped_release>(), "Sequential read, GB/s.");
  m.def("measure_peak", &measure_peak, nb::arg("isa"), nb::arg("kind"), nb::arg("num_threads"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Multiplications and additions of kind int8, bf16 or fp32 in registers, GOP/s.");
}

}  // namespace twostep
