// What the native kernel tests share: random numbers, comparisons, and a count of what failed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/act.h"
#include "isa/kernels.h"
#include "isa/linear.h"
#include "isa/rows.h"

namespace twostep::test {

// xorshift64*
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t bits() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  int below(int n) { return static_cast<int>((bits() >> 33) % static_cast<uint64_t>(n)); }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(bits() >> 40) * 5.9604644775390625e-8f;
  }
  // Roughly normal, with an outlier now and then, as real activations have.
  float value() {
    const float x = uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1);
    return below(64) == 0 ? 20 * x : x;
  }
  std::vector<float> values(size_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = value();
    return v;
  }

 private:
  uint64_t state_;
};

// The kernels under test, and what they are compared with.
struct Kernels {
  const KernelTable& tested;
  const KernelTable& scalar;

  // Sums run in one order where vectors are as wide, so results have the same bytes.
  bool same_order() const { return tested.linear->width == scalar.linear->width; }
};

class Report {
 public:
  void expect(bool holds, const std::string& what) {
    checks_++;
    if (holds) return;
    if (failures_++ < 20) std::printf("FAILED: %s\n", what.c_str());
  }
  // Every bit, but any NaN equals any other.
  void expect_same(const float* got, const float* want, size_t n, const std::string& what) {
    size_t i = 0;
    while (i < n && (std::memcmp(got + i, want + i, 4) == 0 || (got[i] != got[i] && want[i] != want[i]))) i++;
    char where[96] = "";
    if (i < n) std::snprintf(where, sizeof where, ": [%zu] is %.9g, not %.9g", i, got[i], want[i]);
    expect(i == n, what + where);
  }
  template <class T>
  void expect_equal(const T* got, const T* want, size_t n, const std::string& what) {
    size_t i = 0;
    while (i < n && got[i] == want[i]) i++;
    expect(i == n, i < n ? what + ": differs at " + std::to_string(i) : what);
  }
  // |got - want| <= slack * size
  void expect_close(const float* got, const std::vector<double>& want, const std::vector<double>& size,
                    double slack, const std::string& what) {
    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
      const double error = std::fabs(got[i] - want[i]) / std::fmax(size[i], 1e-30);
      if (!(error <= worst)) worst = error;
    }
    char figure[64];
    std::snprintf(figure, sizeof figure, ": off by %.2e, more than %.0e", worst, slack);
    expect(worst <= slack, what + figure);
  }
  int checks() const { return checks_; }
  int failures() const { return failures_; }

 private:
  int checks_ = 0, failures_ = 0;
};

struct Tile {
  int r0, rows;
};
// As even as possible, at most max_rows each: what Tiles::build does.
inline std::vector<Tile> tiles_of(int num_rows, int max_rows) {
  const int n = (num_rows + max_rows - 1) / max_rows;
  std::vector<Tile> tiles;
  for (int i = 0, r0 = 0; i < n; i++) {
    const int end = num_rows * (i + 1) / n;
    tiles.push_back({r0, end - r0});
    r0 = end;
  }
  return tiles;
}

// Row-major x [rows, width] as activations, by the kernels of `table`.
inline void put_rows(const KernelTable& table, const float* x, int rows, const Act& act) {
  for (const Tile& t : tiles_of(rows, table.linear->max_tile_rows[static_cast<int>(act.form)])) {
    for (int m = t.r0; m < t.r0 + t.rows; m++) {
      table.rows->put_row(x + static_cast<size_t>(m) * act.width, act, t.r0, t.rows, m);
    }
  }
}

// Value k of row m, which lies in tile t.
inline double act_value(const Act& act, const Tile& t, int m, int k) {
  const size_t slot = act.slot(t.r0, t.rows, m, k / kGroup), at = slot * kGroup + k % kGroup;
  switch (act.form) {
    case ActForm::Q8: return static_cast<double>(act.scale[slot]) * act.q[at];
    case ActForm::BF16: return bf16_to_f32(act.bf16[at]);
    case ActForm::F32: break;
  }
  return act.f32[at];
}

void test_linear(const Kernels&, Report&);
void test_attention(const Kernels&, Report&);
void test_rows(const Kernels&, Report&);
void test_sample(const Kernels&, Report&);

}  // namespace twostep::test
