// Norms, GELU, residual add, soft cap, and activations in every form.
#include "check.h"

namespace twostep::test {

namespace {

constexpr int kWidths[] = {1, 7, 8, 9, 31, 32, 33, 100, 576, 1000};

// Everything that an activation holds for its rows.
void expect_same_act(const Act& got, const Act& want, int rows, const std::string& what, Report& report) {
  const size_t slots = static_cast<size_t>(rows) * want.groups;
  if (want.form == ActForm::F32) {
    report.expect_same(got.f32, want.f32, slots * kGroup, what + " f32");
  } else if (want.form == ActForm::BF16) {
    report.expect_equal(got.bf16, want.bf16, slots * kGroup, what + " bf16");
  } else {
    report.expect_equal(got.q, want.q, slots * kGroup, what + " q");
    report.expect_same(got.scale, want.scale, slots, what + " scale");
    report.expect_same(got.sum, want.sum, slots, what + " sum");
    report.expect_equal(got.zero8, want.zero8, slots, what + " zero8");
    report.expect_equal(got.zero128, want.zero128, slots, what + " zero128");
    report.expect_equal(got.zero8_low, want.zero8_low, slots, what + " zero8_low");
  }
}

void test_put_row(const Kernels& kernels, Report& report) {
  Random random(1);
  const int rows = 3;
  for (const ActForm form : {ActForm::Q8, ActForm::BF16, ActForm::F32}) {
    for (const int width : kWidths) {
      auto x = random.values(static_cast<size_t>(rows) * width);
      x[width / 2] = 0;
      x[width + width / 3] = random.below(2) ? INFINITY : NAN;
      for (int i = 0; i < width && i < 40; i++) x[2 * width + i] = 0;  // a group of zeros
      const ActBuffer got(form, width, rows), want(form, width, rows);
      for (int m = 0; m < rows; m++) {
        kernels.tested.rows->put_row(&x[m * width], got.act(), 0, rows, m);
        kernels.scalar.rows->put_row(&x[m * width], want.act(), 0, rows, m);
      }
      expect_same_act(got.act(), want.act(), rows, "put_row " + std::to_string(width), report);
    }
  }
}

// Any number of rows of a tile at once, among them one with NaN or infinity, zeros, tiny and huge numbers,
// gives what each gives alone; rows beside them are left as they are.
void test_put_rows(const Kernels& kernels, Report& report) {
  const int rows = kMaxTileRows, groups = 3, g = 1;
  for (const ActForm form : {ActForm::Q8, ActForm::BF16, ActForm::F32}) {
    for (int count = 1; count <= rows; count++) {
      for (const bool broken : {false, true}) {
        Random random(count);
        // Bf16 numbers below 2^-126 are zeros to what multiplies them, and may be stored as such.
        const float tiny = form == ActForm::BF16 ? 1e-30f : 1e-36f;
        const int m = count == rows ? 0 : 1;
        const int n = std::min(count, rows - m);
        auto x = random.values(static_cast<size_t>(n) * kGroup);
        for (int i = 0; i < kGroup; i++) x[(n / 2) * kGroup + i] *= n % 2 ? 0.0f : tiny;
        x[(n - 1) * kGroup + 3] = 3e38f;
        if (broken) x[(n / 3) * kGroup + count] = count % 2 ? NAN : -INFINITY;
        const ActBuffer got(form, groups * kGroup, rows), want(form, groups * kGroup, rows);
        kernels.tested.linear->put_rows(got.act(), 0, rows, m, n, g, x.data());
        for (int r = 0; r < n; r++) {
          kernels.scalar.linear->put_rows(want.act(), 0, rows, m + r, 1, g, &x[r * kGroup]);
        }
        expect_same_act(got.act(), want.act(), rows, "put_rows of " + std::to_string(n), report);
      }
    }
  }
}

void test_rms_norm(const Kernels& kernels, int width, Report& report) {
  const std::string what = "rms_norm " + std::to_string(width);
  Random random(width);
  const auto x = random.values(width), weight = random.values(width), residual = random.values(width);
  const RmsNormArgs args{x.data(), weight.data(), width, 1e-5f};
  std::vector<float> y(width + 1, 7.0f), plain(width), in_place = x, added = residual;
  kernels.tested.rows->rms_norm(args, y.data());
  report.expect(y[width] == 7.0f, what + " wrote beyond the row");

  double squares = 0;
  for (const float v : x) squares += static_cast<double>(v) * v;
  const double scale = 1 / std::sqrt(squares / width + 1e-5);
  std::vector<double> want(width), size(width);
  for (int i = 0; i < width; i++) {
    want[i] = x[i] * scale * weight[i];
    size[i] = std::fabs(want[i]);
  }
  report.expect_close(y.data(), want, size, 1e-6, what);
  if (kernels.same_order()) {
    kernels.scalar.rows->rms_norm(args, plain.data());
    report.expect_same(y.data(), plain.data(), width, what + " against plain C++");
  }
  kernels.tested.rows->rms_norm({in_place.data(), weight.data(), width, 1e-5f}, in_place.data());
  report.expect_same(in_place.data(), y.data(), width, what + " in place");
  kernels.tested.rows->rms_norm_add(args, added.data());
  for (int i = 0; i < width; i++) plain[i] = residual[i] + y[i];
  report.expect_same(added.data(), plain.data(), width, what + " added");
  for (const ActForm form : {ActForm::Q8, ActForm::BF16, ActForm::F32}) {
    const ActBuffer got(form, width, 1), put(form, width, 1);
    const float* rows[] = {args.x};
    kernels.tested.rows->rms_norm_act(args, rows, 1, got.act(), 0, 1, 0);
    kernels.tested.rows->put_row(y.data(), put.act(), 0, 1, 0);
    expect_same_act(got.act(), put.act(), 1, what + " act", report);
  }
  // Rows of a tile together, from anywhere and in any order, as each alone.
  const auto second = random.values(width);
  const float* rows[] = {second.data(), args.x, second.data(), args.x, args.x};
  const ActBuffer together(ActForm::Q8, width, 8), alone(ActForm::Q8, width, 8);
  kernels.tested.rows->rms_norm_act(args, rows, 5, together.act(), 0, 8, 2);
  for (int r = 0; r < 5; r++) kernels.tested.rows->rms_norm_act(args, rows + r, 1, alone.act(), 0, 8, 2 + r);
  expect_same_act(together.act(), alone.act(), 8, what + " together", report);
}

void test_elementwise(const Kernels& kernels, int width, Report& report) {
  Random random(width + 50);
  const auto x = random.values(width);
  auto got = random.values(width + 1);
  auto want = got;
  kernels.tested.rows->add(got.data(), x.data(), width);
  for (int i = 0; i < width; i++) want[i] += x[i];
  report.expect_same(got.data(), want.data(), width + 1, "add " + std::to_string(width));
  got[0] = -1e4f;
  if (width > 2) got[1] = NAN;
  want = got;
  kernels.tested.rows->softcap(got.data(), 30.0f, width);
  kernels.scalar.rows->softcap(want.data(), 30.0f, width);
  report.expect_same(got.data(), want.data(), width + 1, "softcap " + std::to_string(width));
}

void test_layer_norm(const Kernels& kernels, int width, Report& report) {
  const std::string what = "layer_norm " + std::to_string(width);
  Random random(width + 70);
  auto x = random.values(width);
  for (float& v : x) v += 30;  // a mean that must cost no digits
  const auto weight = random.values(width), bias = random.values(width);
  const LayerNormArgs args{x.data(), weight.data(), bias.data(), width, 1e-5f};
  std::vector<float> y(width + 1, 7.0f), plain(width);
  kernels.tested.rows->layer_norm(args, y.data());
  report.expect(y[width] == 7.0f, what + " wrote beyond the row");

  double mean = 0, variance = 0;
  for (const float v : x) mean += static_cast<double>(v) / width;
  for (const float v : x) variance += (v - mean) * (v - mean) / width;
  std::vector<double> want(width), size(width);
  for (int i = 0; i < width; i++) {
    const double normed = (x[i] - mean) / std::sqrt(variance + 1e-5);
    want[i] = normed * weight[i] + bias[i];
    // The mean is rounded to float: that error grows by what the deviation is divided by.
    size[i] = (std::fabs(normed) + 30 / std::sqrt(variance + 1e-5)) * std::fabs(weight[i]) + std::fabs(bias[i]);
  }
  report.expect_close(y.data(), want, size, 2e-6, what);
  if (kernels.same_order()) {
    kernels.scalar.rows->layer_norm(args, plain.data());
    report.expect_same(y.data(), plain.data(), width, what + " against plain C++");
  }
  for (const ActForm form : {ActForm::Q8, ActForm::BF16, ActForm::F32}) {
    const ActBuffer got(form, width, 1), put(form, width, 1);
    kernels.tested.rows->layer_norm_act(args, got.act(), 0, 1, 0);
    kernels.tested.rows->put_row(y.data(), put.act(), 0, 1, 0);
    expect_same_act(got.act(), put.act(), 1, what + " act", report);
  }
}

void test_gelu(const Kernels& kernels, int width, Report& report) {
  const std::string what = "gelu " + std::to_string(width);
  Random random(width + 90);
  auto x = random.values(width);
  if (width > 8) x[1] = 0, x[2] = -30, x[3] = 30, x[4] = 1e-20f;
  std::vector<float> y(width + 1, 7.0f), plain(width);
  kernels.tested.rows->gelu(x.data(), y.data(), width);
  report.expect(y[width] == 7.0f, what + " wrote beyond the row");
  std::vector<double> want(width), size(width);
  for (int i = 0; i < width; i++) {
    want[i] = 0.5 * x[i] * (1 + std::erf(x[i] / std::sqrt(2.0)));
    size[i] = std::fabs(x[i]);
  }
  report.expect_close(y.data(), want, size, 3e-7, what);
  kernels.scalar.rows->gelu(x.data(), plain.data(), width);
  report.expect_same(y.data(), plain.data(), width, what + " against plain C++");
  for (const ActForm form : {ActForm::Q8, ActForm::BF16, ActForm::F32}) {
    const ActBuffer got(form, width, 1), put(form, width, 1);
    kernels.tested.rows->gelu_act(x.data(), got.act(), 0, 1, 0);
    kernels.tested.rows->put_row(y.data(), put.act(), 0, 1, 0);
    expect_same_act(got.act(), put.act(), 1, what + " act", report);
  }
}

}  // namespace

void test_rows(const Kernels& kernels, Report& report) {
  test_put_row(kernels, report);
  test_put_rows(kernels, report);
  for (const int width : kWidths) {
    test_rms_norm(kernels, width, report);
    test_elementwise(kernels, width, report);
    test_layer_norm(kernels, width, report);
    test_gelu(kernels, width, report);
  }
}

}  // namespace twostep::test
