// Sampling's passes over a row of logits: the same integers, candidates and counts everywhere.
#include "check.h"
#include "isa/sample.h"

namespace twostep::test {

namespace {

constexpr float kMinusInf = -INFINITY;
constexpr int kSizes[] = {1, 5, 8, 15, 16, 63, 64, 65, 127, 1000, 5003};

std::vector<float> random_logits(Random& random, int n) {
  std::vector<float> x(n);
  for (float& v : x) {
    v = random.below(20) == 0 ? kMinusInf : static_cast<float>(random.below(4000)) / 128 - 15;
  }
  x[random.below(n)] = 16;
  return x;
}

struct Scanned {
  LogitScan scan;
  std::vector<float> z, block_max;
};

Scanned scan(const SampleKernels& kernels, const std::vector<float>& x, const uint32_t* allowed,
             float scale, bool write) {
  const int n = static_cast<int>(x.size());
  Scanned s{{}, std::vector<float>(n + 1, 7.0f), std::vector<float>(sample_blocks(n))};
  s.scan = kernels.scan(x.data(), allowed, scale, n, write ? s.z.data() : nullptr, s.block_max.data());
  return s;
}

void test_scan(const SampleKernels& tested, const SampleKernels& scalar, int n, Report& report) {
  const std::string what = "scan " + std::to_string(n);
  Random random(n);
  const auto x = random_logits(random, n);
  std::vector<uint32_t> words((n + 31) / 32);
  for (uint32_t& w : words) w = static_cast<uint32_t>(random.bits());
  for (const uint32_t* allowed : {static_cast<const uint32_t*>(nullptr), static_cast<const uint32_t*>(words.data())}) {
    for (const bool write : {false, true}) {
      const Scanned got = scan(tested, x, allowed, 0.7f, write), want = scan(scalar, x, allowed, 0.7f, write);
      report.expect(got.scan.max == want.scan.max && !got.scan.broken && !want.scan.broken, what);
      report.expect_same(got.z.data(), want.z.data(), n + 1, what + " z");
      report.expect_equal(got.block_max.data(), want.block_max.data(), want.block_max.size(), what + " block_max");
      float highest = kMinusInf;
      for (int i = 0; i < n; i++) {
        if ((!allowed || allowed[i / 32] >> i % 32 & 1) && x[i] * 0.7f > highest) highest = x[i] * 0.7f;
      }
      report.expect(got.scan.max == highest, what + " max");
    }
  }
  for (const float bad : {INFINITY, NAN}) {
    auto broken = x;
    broken[random.below(n)] = bad;
    for (const bool write : {false, true}) {
      report.expect(scan(tested, broken, nullptr, 1.0f, write).scan.broken, what + " broken");
      report.expect(scan(tested, broken, words.data(), 1.0f, write).scan.broken, what + " broken, masked");
    }
  }
}

void test_weights(const SampleKernels& tested, const SampleKernels& scalar, int n, float lo,
                  Report& report) {
  const std::string what = "weights " + std::to_string(n) + " from " + std::to_string(lo);
  Random random(n + 7);
  const Scanned s = scan(scalar, random_logits(random, n), nullptr, 1.0f, true);
  const size_t blocks = s.block_max.size();
  const float max = s.scan.max;
  std::vector<uint64_t> got_blocks(blocks, 1), want_blocks(blocks), got(n + 1, 7), want(n + 1, 7);
  const uint64_t total = tested.sum_weights(s.z.data(), n, max, max + lo, s.block_max.data(), got_blocks.data());
  report.expect(total == scalar.sum_weights(s.z.data(), n, max, max + lo, s.block_max.data(), want_blocks.data()),
                what + " total");
  report.expect_equal(got_blocks.data(), want_blocks.data(), blocks, what + " blocks");
  tested.weights(s.z.data(), n, max, got.data());
  scalar.weights(s.z.data(), n, max, want.data());
  report.expect_equal(got.data(), want.data(), n + 1, what);
  uint64_t sum = 0;
  for (int i = 0; i < n; i++) {
    if (s.z[i] >= max + lo) sum += got[i];
    const double exact = std::exp(static_cast<double>(s.z[i]) - max) * (1ull << kWeightBits);
    report.expect(std::fabs(static_cast<double>(got[i]) - exact) <= 1 + 1e-6 * exact, what + " against exp");
  }
  report.expect(sum == total, what + " add up");
}

void test_collect(const SampleKernels& tested, int n, float lo, Report& report) {
  const std::string what = "collect " + std::to_string(n) + " from " + std::to_string(lo);
  Random random(n + 9);
  const Scanned s = scan(tested, random_logits(random, n), nullptr, 1.0f, true);
  std::vector<float> values(n + kCollectSlack), want;
  std::vector<int32_t> ids(n + kCollectSlack), want_ids;
  for (int i = 0; i < n; i++) {
    if (s.z[i] < lo) continue;
    want.push_back(s.z[i]);
    want_ids.push_back(i);
  }
  const int found = static_cast<int>(want.size());
  report.expect(tested.collect(s.z.data(), n, lo, s.block_max.data(), values.data(), ids.data()) == found, what);
  report.expect_same(values.data(), want.data(), want.size(), what + " values");
  report.expect_equal(ids.data(), want_ids.data(), want.size(), what + " ids");
  report.expect(tested.count(s.z.data(), n, lo, s.block_max.data()) == found, what + " count");
}

void test_bucket(const SampleKernels& tested, const SampleKernels& scalar, int n, Report& report) {
  Random random(n + 11);
  const auto v = random_logits(random, n);
  std::vector<int32_t> got(n + kCollectSlack), want(n + kCollectSlack);
  tested.bucket(v.data(), n, 16.0f, 33.3f, 1023, got.data());
  scalar.bucket(v.data(), n, 16.0f, 33.3f, 1023, want.data());
  report.expect_equal(got.data(), want.data(), n, "bucket " + std::to_string(n));
}

}  // namespace

void test_sample(const Kernels& kernels, Report& report) {
  const SampleKernels &tested = *kernels.tested.sample, &scalar = *kernels.scalar.sample;
  for (const int n : kSizes) {
    test_scan(tested, scalar, n, report);
    for (const float lo : {-kNegligible, -5.0f, 0.0f}) test_weights(tested, scalar, n, lo, report);
    for (const float lo : {kMinusInf, -20.0f, 10.0f, 15.99f, 17.0f}) test_collect(tested, n, lo, report);
    test_bucket(tested, scalar, n, report);
  }
}

}  // namespace twostep::test
