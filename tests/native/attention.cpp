// Attention over fragmented block tables, rope, and what attention writes for the next product.
#include <algorithm>

#include "check.h"
#include "core/memory.h"
#include "isa/attention.h"

namespace twostep::test {

namespace {

constexpr double kLog2e = 1.44269504088896341;

struct Case {
  KVType type;
  int head_dim, group, window;
  float softcap;
  int context;  // positions written
  int tokens;   // the last of them that ask

  int first() const { return context - tokens; }
  std::string name() const {
    std::string s = "attention";
    for (const int x : {static_cast<int>(type), head_dim, group, window, static_cast<int>(softcap), context}) {
      s += " " + std::to_string(x);
    }
    return s;
  }
};

// What a KV block makes of a value.
float stored(KVType type, float x) {
  if (type == KVType::BF16) return bf16_to_f32(f32_to_bf16(x));
  return type == KVType::F16 ? f16_to_f32(f32_to_f16(x)) : x;
}

// One request's inputs, the same for every table.
struct Sequence {
  explicit Sequence(const Case& c, int kv_head = 0) {
    Random random(static_cast<uint64_t>(c.context) * 31 + c.head_dim + 1000 * kv_head);
    k = random.values(static_cast<size_t>(c.context) * c.head_dim);
    v = random.values(static_cast<size_t>(c.context) * c.head_dim);
    q = random.values(static_cast<size_t>(c.tokens) * c.group * c.head_dim);
    const float scale = query_scale(1.0f / std::sqrt(static_cast<float>(c.head_dim)), c.softcap);
    for (float& x : q) x *= scale;
    const int used = (c.context + kBlockSize - 1) / kBlockSize;
    for (int i = 0; i < 2 * used + 1; i++) block_ids.push_back(i);
    Random order(used);  // the same for all KV heads
    for (size_t i = block_ids.size() - 1; i > 0; i--) {
      std::swap(block_ids[i], block_ids[order.below(static_cast<int>(i) + 1)]);
    }
  }
  std::vector<float> k, v, q;
  std::vector<int32_t> block_ids;  // the second half belongs to nobody
};

constexpr int kHeads = 3;

// The pools of one table; what nobody wrote is NaN. `s` belongs to KV head `head`.
class Cache {
 public:
  Cache(const KernelTable& table, const Case& c, const Sequence& s, int head = 0)
      : kernels_(*table.attention),
        layout_(kernels_.layout[static_cast<int>(c.type)]),
        case_(c),
        sequence_(s),
        head_(head) {
    const size_t bytes_of_head = kBlockSize * c.head_dim * layout_.element_bytes, block = kHeads * bytes_of_head;
    places_ = {bytes_of_head, block, block * (kNeighbours + 3)};
    const size_t bytes = places_.stride * (s.block_ids.size() / kNeighbours + 1);
    k_ = Memory(bytes);
    v_ = Memory(bytes);
    std::memset(k_.as<char>(), 0xff, k_.bytes());
    std::memset(v_.as<char>(), 0xff, v_.bytes());
    write(s, head);
  }

  void write(const Sequence& s, int head) {
    const int d = case_.head_dim;
    for (int p = 0; p < case_.context; p++) {
      const size_t at = places_.of(s.block_ids[p / kBlockSize]) + head * places_.head_bytes;
      layout_.write_token(&s.k[p * d], &s.v[p * d], d, k_.as<char>() + at, v_.as<char>() + at, p % kBlockSize);
    }
  }

  // Tokens first .. first + count - 1 of those that ask, as one tile; [count * group, head_dim].
  // `length` above 0: as if they were the first of a text of that length, without a causal mask.
  std::vector<float> attend(int first, int count, int length = 0) const {
    const int position = length > 0 ? 0 : case_.first() + first;
    return attend(&sequence_.q[first * case_.group * case_.head_dim], count, 1, position, length);
  }

  // The last token, with the queries q [kHeads * group, head_dim] of all KV heads at once.
  std::vector<float> attend_heads(const std::vector<float>& q) const {
    return attend(q.data(), 1, kHeads, case_.context - 1, 0);
  }

 private:
  std::vector<float> attend(const float* q, int count, int heads, int position, int length) const {
    const int d = case_.head_dim, rows_of_token = heads * case_.group, rows = count * rows_of_token;
    std::vector<float> packed(rows * d + 16), scores(static_cast<size_t>(rows) * kScoreStride), y(rows * d);
    layout_.pack_q(q, rows_of_token * d, rows, rows_of_token, d, packed.data());
    const size_t head = head_ * places_.head_bytes;
    const AttentionTile tile{rows, case_.group, heads, d, position, case_.window,
                             case_.softcap * static_cast<float>(kLog2e), packed.data(), scores.data(),
                             k_.as<char>() + head, v_.as<char>() + head, places_, sequence_.block_ids.data(), length};
    Part total(rows, d), part(rows, d);
    const int begin = case_.window > 0 ? std::max(0, position - case_.window + 1) / kSegment : 0;
    const int end = ((length > 0 ? length : position + count) - 1) / kSegment + 1;
    layout_.attend_segment(tile, begin, total.view());
    for (int s = begin + 1; s < end; s++) {
      layout_.attend_segment(tile, s, part.view());
      kernels_.merge(total.view(), part.view(), rows, d);
    }
    kernels_.finish(total.view(), rows, d, y.data());
    return y;
  }

  struct Part {
    Part(int rows, int d) : max(rows), sum(rows), out(static_cast<size_t>(rows) * d) {}
    AttentionPartial view() { return {max.data(), sum.data(), out.data()}; }
    std::vector<float> max, sum, out;
  };

  const AttentionKernels& kernels_;
  const AttentionLayout& layout_;
  const Case& case_;
  const Sequence& sequence_;
  const int head_;
  KVPlaces places_;
  Memory k_, v_;
};

// Row r in float64: the sum, and that of |terms|.
void expected(const Case& c, const Sequence& s, int r, double* want, double* size) {
  const int d = c.head_dim, position = c.first() + r / c.group;
  const int begin = c.window > 0 ? std::max(0, position - c.window + 1) : 0;
  std::vector<double> weight;
  double top = -INFINITY, sum = 0;
  for (int p = begin; p <= position; p++) {
    double x = 0;  // log2 of the weight
    for (int i = 0; i < d; i++) x += static_cast<double>(s.q[r * d + i]) * stored(c.type, s.k[p * d + i]);
    if (c.softcap > 0) x = c.softcap * kLog2e * std::tanh(x / kLog2e / 2);
    weight.push_back(x);
    top = std::max(top, x);
  }
  for (double& w : weight) sum += w = std::exp2(w - top);
  for (int i = 0; i < d; i++) {
    want[i] = size[i] = 0;
    for (int p = begin; p <= position; p++) {
      const double term = weight[p - begin] / sum * stored(c.type, s.v[p * d + i]);
      want[i] += term;
      size[i] += std::fabs(term);
    }
  }
}

void test_case(const Kernels& kernels, const Case& c, Report& report) {
  const Sequence s(c);
  const Cache tested(kernels.tested, c, s);
  const size_t row = static_cast<size_t>(c.group) * c.head_dim, n = c.tokens * row;
  const std::vector<float> got = tested.attend(0, c.tokens);
  std::vector<double> want(n), size(n);
  for (int r = 0; r < c.tokens * c.group; r++) expected(c, s, r, &want[r * c.head_dim], &size[r * c.head_dim]);
  // avx512 and amx multiply bf16 by bf16: queries and weights are rounded as well.
  const std::string isa = kernels.tested.isa;
  const bool rounds = (isa == "avx512" || isa == "amx") && c.type == KVType::BF16;
  report.expect_close(got.data(), want, size, rounds ? 0.1 : 5e-5, c.name());
  if (kernels.same_order()) {
    const std::vector<float> plain = Cache(kernels.scalar, c, s).attend(0, c.tokens);
    report.expect_same(got.data(), plain.data(), n, c.name() + " against plain C++");
  }
  for (int t = 0; t < c.tokens; t++) {
    report.expect_same(tested.attend(t, 1).data(), &got[t * row], row, c.name() + ", alone token " + std::to_string(t));
  }
  // The last token's values are in a block that those before it see a part of.
  Sequence wild = s;
  std::fill_n(wild.v.end() - c.head_dim, c.head_dim, NAN);
  const Cache broken(kernels.tested, c, wild);
  report.expect_same(broken.attend(0, c.tokens).data(), got.data(), n - row, c.name() + ", NaN in the last token");
}

void test_tiles(const Kernels& kernels, Report& report) {
  for (const KVType type : {KVType::BF16, KVType::F16, KVType::F32}) {
    for (const auto& [head_dim, group, window, softcap] :
         {std::tuple{64, 3, 0, 0.0f}, {16, 1, 0, 0.0f}, {80, 4, 20, 0.0f}, {32, 2, 300, 0.0f},
          {64, 1, 0, 30.0f}, {48, 7, 0, 0.0f}}) {
      const int most = std::max(1, kernels.tested.attention->tile_rows / group);
      for (const int context : {1, 16, 17, 40, 256, 270, 600}) {
        const int tokens = std::min(most, context);
        test_case(kernels, {type, head_dim, group, window, softcap, context, tokens}, report);
      }
    }
  }
}

// A token alone gets the same from all KV heads at once as from one after the other.
void test_heads(const Kernels& kernels, Report& report) {
  for (const KVType type : {KVType::BF16, KVType::F16, KVType::F32}) {
    for (const auto& [head_dim, group, window] : {std::tuple{64, 3, 0}, {80, 1, 20}, {32, 20, 300}}) {
      for (const int context : {1, 16, 17, 256, 270, 600}) {
        const Case c{type, head_dim, group, window, 0.0f, context, 1};
        std::vector<Sequence> heads;
        for (int h = 0; h < kHeads; h++) heads.emplace_back(c, h);
        Cache together(kernels.tested, c, heads[0]);
        std::vector<float> q, want;
        for (int h = 0; h < kHeads; h++) {
          together.write(heads[h], h);
          q.insert(q.end(), heads[h].q.begin(), heads[h].q.end());
          const std::vector<float> one = Cache(kernels.tested, c, heads[h], h).attend(0, 1);
          want.insert(want.end(), one.begin(), one.end());
        }
        report.expect_same(together.attend_heads(q).data(), want.data(), want.size(), c.name() + ", heads together");
      }
    }
  }
}

// Without a causal mask a query at any position sees what the last one sees with it.
void test_whole_text(const Kernels& kernels, Report& report) {
  for (const KVType type : {KVType::BF16, KVType::F16, KVType::F32}) {
    for (const int context : {1, 16, 17, 256, 270}) {
      const Case c{type, 32, 1, 0, 0.0f, context, 1};
      const Sequence s(c);
      const Cache cache(kernels.tested, c, s);
      const std::vector<float> last = cache.attend(0, 1), first = cache.attend(0, 1, context);
      report.expect_same(first.data(), last.data(), last.size(), c.name() + ", whole text");
    }
  }
}

void test_rope(const Kernels& kernels, bool interleaved, int head_dim, int rotary_dim, Report& report) {
  const std::string what = (interleaved ? "rope pairs " : "rope halves ") + std::to_string(head_dim) +
                           " " + std::to_string(rotary_dim);
  const int half = rotary_dim / 2;
  const float scale = 0.37f;
  Random random(head_dim + rotary_dim);
  std::vector<float> x = random.values(head_dim), c(half), s(half), got(head_dim + 1, 7.0f);
  for (int i = 0; i < half; i++) {
    const float angle = random.uniform(-3, 3);
    c[i] = std::cos(angle);
    s[i] = std::sin(angle);
  }
  std::vector<float> want(head_dim + 1, 7.0f);
  for (int i = 0; i < head_dim; i++) want[i] = x[i] * scale;
  for (int i = 0; i < half; i++) {
    const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
    want[a] = (x[a] * c[i] - x[b] * s[i]) * scale;
    want[b] = (x[b] * c[i] + x[a] * s[i]) * scale;
  }
  const RopeArgs args{c.data(), s.data(), rotary_dim, head_dim, interleaved, scale};
  kernels.tested.attention->rope(x.data(), args, 1, got.data());
  report.expect_same(got.data(), want.data(), head_dim + 1, what);
  const int heads = 3;
  std::vector<float> several, rotated(heads * head_dim + 1, 7.0f);
  for (int h = 0; h < heads; h++) several.insert(several.end(), x.begin(), x.end());
  kernels.tested.attention->rope(several.data(), args, heads, rotated.data());
  for (int h = 0; h < heads; h++) {
    report.expect_same(&rotated[h * head_dim], want.data(), head_dim, what + ", head " + std::to_string(h));
  }
  report.expect(rotated.back() == 7.0f, what + " wrote beyond its heads");
  kernels.tested.attention->rope(x.data(), args, 1, x.data());
  report.expect_same(x.data(), want.data(), head_dim, what + " in place");
}

void test_put_groups(const Kernels& kernels, Report& report) {
  Random random(3);
  const int width = 6 * kGroup;
  const auto x = random.values(width);
  for (const ActForm form : {ActForm::Q8, ActForm::BF16, ActForm::F32}) {
    const ActBuffer got(form, width, 1), want(form, width, 1);
    kernels.tested.attention->put_groups(&x[0], 0, 2, got.act(), 0, 1, 0);
    kernels.tested.attention->put_groups(&x[2 * kGroup], 2, 4, got.act(), 0, 1, 0);
    put_rows(kernels.scalar, x.data(), 1, want.act());
    for (int k = 0; k < width; k++) {
      report.expect(act_value(got.act(), {0, 1}, 0, k) == act_value(want.act(), {0, 1}, 0, k), "put_groups");
    }
  }
}

}  // namespace

void test_attention(const Kernels& kernels, Report& report) {
  test_tiles(kernels, report);
  test_heads(kernels, report);
  test_whole_text(kernels, report);
  for (const bool interleaved : {false, true}) {
    for (const auto& [head_dim, rotary_dim] :
         {std::pair{64, 64}, {80, 20}, {16, 2}, {48, 48}, {32, 6}, {256, 256}, {96, 72}}) {
      test_rope(kernels, interleaved, head_dim, rotary_dim, report);
    }
  }
  test_put_groups(kernels, report);
}

}  // namespace twostep::test
