// Matrix products: every format and precision, 1 to 17 rows, odd shapes.
#include "check.h"
#include "ops/linear_decode.h"
#include "ops/linear_grid.h"
#include "ops/linear_weight.h"

namespace twostep::test {

namespace {

constexpr int kRows = 33;  // more than one tile in every form
constexpr Format kFormats[] = {Format::F32,  Format::F16,  Format::BF16, Format::Q8_0,
                               Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1,
                               Format::Q4_K, Format::Q5_K, Format::Q6_K};

bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }
bool is_k_quant(Format f) { return f == Format::Q4_K || f == Format::Q5_K || f == Format::Q6_K; }

void put_half(uint8_t* p, float x) {
  const uint16_t h = f32_to_f16(x);
  std::memcpy(p, &h, 2);
}

// Where the fp16 factors of a block lie; -1: none.
struct Factors {
  int d, minimum;
};
Factors factors_of(Format f) {
  switch (f) {
    case Format::Q4_1:
    case Format::Q5_1:
    case Format::Q4_K:
    case Format::Q5_K: return {0, 2};
    case Format::Q6_K: return {208, -1};
    default: return {0, -1};
  }
}

// n rows of k weights with sane factors, in which every bit pattern of the integers occurs; or, with
// `fill` >= 0, that byte throughout.
std::vector<uint8_t> random_weights(Random& random, Format format, int n, int k, int fill = -1) {
  std::vector<uint8_t> data(row_bytes(format, k) * n);
  if (is_float(format)) {
    const size_t size = format == Format::F32 ? 4 : 2;
    for (size_t i = 0; i * size < data.size(); i++) {
      const float x = random.value();
      const uint16_t h = format == Format::BF16 ? f32_to_bf16(x) : f32_to_f16(x);
      std::memcpy(&data[i * size], format == Format::F32 ? static_cast<const void*>(&x) : &h, size);
    }
    return data;
  }
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(fill < 0 ? random.below(256) : fill);
  const Factors at = factors_of(format);
  const size_t block = static_cast<size_t>(block_size(format).bytes);
  const float size = is_k_quant(format) ? 1e-4f : 1e-2f;
  for (size_t b = 0; b < data.size(); b += block) {
    put_half(&data[b + at.d], random.uniform(0.1f, 1) * size);
    if (at.minimum >= 0) put_half(&data[b + at.minimum], random.uniform(-1, 1) * size);
  }
  return data;
}

struct Product {
  int rows, n;
  std::vector<float> y;  // [rows, n]
  std::vector<double> want, size;  // of the activations as written: the sum, and that of |terms|
};

constexpr float kCanary = 12345.0f;

// All rows at once, chunk by chunk, as the op does it.
Product multiply(const KernelTable& table, const PackedWeight& weight, const float* x, int rows,
                 const float* bias, const float* before, bool reference, Report& report,
                 ReadAhead* ahead = nullptr) {
  const int n = weight.n(), k = weight.k(), stride = n + 3;
  const ActForm form = weight.act_form();
  const ActBuffer buffer(form, k, rows);
  const Act& act = buffer.act();
  put_rows(table, x, rows, act);
  std::vector<float> y(static_cast<size_t>(rows) * stride, kCanary);
  for (int m = 0; before && m < rows; m++) std::memcpy(&y[m * stride], before + m * n, n * sizeof(float));
  const LinearGrid grid(*table.linear, weight);
  const auto tiles = tiles_of(rows, table.linear->max_tile_rows[static_cast<int>(form)]);
  const int num_tiles = static_cast<int>(tiles.size());
  const auto cut = grid.cut(rows, num_tiles);
  for (int chunk = 0; chunk < cut.size(); chunk++) {
    grid.for_each(cut, num_tiles, chunk, [&](int i, int first, int end, LinearGrid::Reads reads) {
      const Tile& t = tiles[i];
      reads.ahead = ahead;
      grid.run(act, t.r0, t.rows, first, end, &y[t.r0 * stride + grid.unit_first(first)],
               static_cast<size_t>(stride), bias, before != nullptr, reads);
    });
  }
  Product product{rows, n, {}, {}, {}};
  for (int m = 0; m < rows; m++) {
    product.y.insert(product.y.end(), &y[m * stride], &y[m * stride] + n);
    for (int i = n; i < stride; i++) report.expect(y[m * stride + i] == kCanary, "wrote beyond its outputs");
  }
  if (!reference) return product;
  std::vector<float> w(k);
  product.want.resize(product.y.size());
  product.size.resize(product.y.size());
  for (int i = 0; i < n; i++) {
    weight.unpack_row(i, w.data());
    for (const Tile& t : tiles) {
      for (int m = t.r0; m < t.r0 + t.rows; m++) {
        for (int j = 0; j < k; j++) {
          const double term = act_value(act, t, m, j) * w[j];
          product.want[m * n + i] += term;
          product.size[m * n + i] += std::fabs(term);
        }
      }
    }
  }
  return product;
}

std::string describe(Format format, Precision precision, int n, int k) {
  return std::string(name_of(format)) + (precision == Precision::Int8 ? " int8 " : " exact ") +
         std::to_string(n) + "x" + std::to_string(k);
}

void test_weight(const Kernels& kernels, Format format, Precision precision, int n, int k, int fill,
                 Report& report) {
  const std::string what = describe(format, precision, n, k);
  Random random(static_cast<uint64_t>(format) * 100 + n);
  const auto raw = random_weights(random, format, n, k, fill);
  Arena arena;
  const std::vector<RawPart> parts{{format, n, k, raw.data()}};
  const PackedWeight tested(kernels.tested, parts, precision, 1, arena);
  const PackedWeight scalar(kernels.scalar, parts, precision, 1, arena);
  std::vector<float> a(k), b(k);
  for (int i = 0; i < n; i++) {
    tested.unpack_row(i, a.data());
    scalar.unpack_row(i, b.data());
    report.expect_same(a.data(), b.data(), k, what + " unpacked");
  }

  const auto x = random.values(static_cast<size_t>(kRows) * k);
  const auto run = [&](const KernelTable& table, const PackedWeight& weight, int first, int rows) {
    return multiply(table, weight, &x[static_cast<size_t>(first) * k], rows, nullptr, nullptr, rows == kRows, report);
  };
  const Product all = run(kernels.tested, tested, 0, kRows);
  report.expect_close(all.y.data(), all.want, all.size, 1e-6, what);
  if (kernels.same_order() && tested.act_form() == scalar.act_form()) {
    const Product plain = run(kernels.scalar, scalar, 0, kRows);
    report.expect_same(all.y.data(), plain.y.data(), plain.y.size(), what + " against plain C++");
  }
  for (int rows = 1; rows < kRows; rows++) {
    const Product some = run(kernels.tested, tested, 0, rows);
    report.expect_same(some.y.data(), all.y.data(), some.y.size(), what + ", rows " + std::to_string(rows));
  }
  for (int m = 0; m < kRows; m++) {
    const Product one = run(kernels.tested, tested, m, 1);
    report.expect_same(one.y.data(), &all.y[m * n], n, what + ", alone row " + std::to_string(m));
  }

  const auto bias = random.values(n), before = random.values(all.y.size());
  const Product full =
      multiply(kernels.tested, tested, x.data(), kRows, bias.data(), before.data(), false, report);
  std::vector<float> want(full.y.size());
  for (size_t i = 0; i < want.size(); i++) want[i] = before[i] + (all.y[i] + bias[i % n]);
  report.expect_same(full.y.data(), want.data(), want.size(), what + " with bias, added");
}

// Four rows fetch what is to be read ahead, one leaves it alone; neither changes a byte.
void test_ahead(const Kernels& kernels, Report& report) {
  constexpr int n = 45, k = 160, lines = 7;
  Random random(4);
  const auto raw = random_weights(random, Format::Q4_0, n, k);
  Arena arena;
  const PackedWeight weight(kernels.tested, {{Format::Q4_0, n, k, raw.data()}}, Precision::Int8, 1, arena);
  const auto x = random.values(4 * k);
  const std::vector<char> memory(static_cast<size_t>(lines) * 64);
  for (const int rows : {1, 4}) {
    ReadAhead ahead;
    ahead.add(memory.data(), 3 * 64);
    ahead.add(memory.data() + 3 * 64, (lines - 3) * 64);
    const auto run = [&](ReadAhead* read) {
      return multiply(kernels.tested, weight, x.data(), rows, nullptr, nullptr, false, report, read);
    };
    const Product plain = run(nullptr), fetching = run(&ahead);
    report.expect_same(fetching.y.data(), plain.y.data(), plain.y.size(), "a product that reads ahead");
    report.expect((ahead.unless_done() == nullptr) == (rows == 4), "read ahead with " + std::to_string(rows));
  }
}

void test_gate(const Kernels& kernels, Report& report) {
  Random random(5);
  for (const GateFn fn : {GateFn::Silu, GateFn::GeluTanh}) {
    for (const float size : {1.0f, 30.0f, 3e4f}) {
      auto gate = random.values(kGroup), up = random.values(kGroup);
      for (float& g : gate) g *= size;
      gate[7] = NAN;
      gate[8] = 0;
      auto want = gate;
      kernels.tested.linear->gate(fn, gate.data(), up.data(), kGroup);
      kernels.scalar.linear->gate(fn, want.data(), up.data(), kGroup);
      report.expect_same(gate.data(), want.data(), kGroup, "gate");
    }
  }
}

void test_add_scaled(const Kernels& kernels, Report& report) {
  Random random(6);
  for (int n = 1; n <= 41; n++) {
    const auto x = random.values(n);
    auto got = random.values(n + 1);
    auto want = got;
    kernels.tested.linear->add_scaled(got.data(), x.data(), 0.7f, n);
    for (int i = 0; i < n; i++) want[i] = std::fma(x[i], 0.7f, want[i]);
    report.expect_same(got.data(), want.data(), n + 1, "add_scaled " + std::to_string(n));
  }
}

}  // namespace

void test_linear(const Kernels& kernels, Report& report) {
  for (const Format format : kFormats) {
    for (const Precision precision : {Precision::Int8, Precision::Exact}) {
      if (is_float(format)) {
        if (precision == Precision::Exact) continue;
        for (const auto& [n, k] : {std::pair{45, 192}, {7, 45}, {9, 1}}) {
          test_weight(kernels, format, precision, n, k, -1, report);
        }
      } else {
        for (const int n : {1, 8, 45}) {
          test_weight(kernels, format, precision, n, is_k_quant(format) ? 512 : 160, -1, report);
        }
        for (const int fill : {0x00, 0x7f, 0x80, 0xff}) {
          test_weight(kernels, format, precision, 19, is_k_quant(format) ? 256 : 64, fill, report);
        }
      }
    }
  }
  test_ahead(kernels, report);
  test_gate(kernels, report);
  test_add_scaled(kernels, report);
}

}  // namespace twostep::test
