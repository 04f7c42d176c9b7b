// Mixture of experts: route, gather, gated product, down product.
//
// A pair is one (row, chosen expert). Pairs are sorted by expert, then row, so an expert's rows are
// neighbours and are cut into tiles like any batch. How many tiles there are is known only after
// routing: the ops behind it have a fixed number of chunks that share the tiles out.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "ops/linear.h"
#include "ops/linear_grid.h"

namespace twostep {

namespace {

constexpr int kRowsPerChunk = 8;

struct Expert {
  std::shared_ptr<GatedWeight> gated;
  std::shared_ptr<PackedWeight> down;
  LinearGrid gate, up, out;

  Expert(const LinearKernels& kernels, std::shared_ptr<GatedWeight> g, std::shared_ptr<PackedWeight> d)
      : gated(std::move(g)),
        down(std::move(d)),
        gate(kernels, gated->gate),
        up(kernels, gated->up),
        out(kernels, *down) {}
};

// What the four ops share. Steps run one after the other, so one set of buffers is enough.
struct Moe {
  struct Tile {
    int expert;
    int r0, rows;  // pairs
  };

  const LinearKernels& kernels;
  MoeSpec spec;
  std::shared_ptr<Rows> logits;
  std::shared_ptr<ActBuffer> act;
  std::shared_ptr<Rows> out;
  std::vector<Expert> experts;

  std::vector<int32_t> expert_of;  // [max_rows * top_k], ascending within a row
  std::vector<float> weight_of;
  std::vector<int32_t> row_of_pair;
  std::vector<float> weight_of_pair;
  std::vector<Tile> in_tiles, down_tiles;  // ascending experts; of the forms that each product reads
  ActBuffer gathered, hidden;

  Moe(const KernelTable& table, const MoeSpec& s, std::shared_ptr<Rows> logits_,
      std::shared_ptr<ActBuffer> act_, std::shared_ptr<Rows> out_, std::vector<Expert> experts_)
      : kernels(*table.linear),
        spec(s),
        logits(std::move(logits_)),
        act(std::move(act_)),
        out(std::move(out_)),
        experts(std::move(experts_)),
        expert_of(static_cast<size_t>(s.max_rows) * s.top_k),
        weight_of(expert_of.size()),
        row_of_pair(expert_of.size()),
        weight_of_pair(expert_of.size()),
        gathered(act->act().form, act->act().width, static_cast<int>(expert_of.size())),
        hidden(experts[0].down->act_form(), experts[0].down->k(), static_cast<int>(expert_of.size())) {}

  int num_experts() const { return static_cast<int>(experts.size()); }
};

class MoeOp : public Op {
 public:
  explicit MoeOp(std::shared_ptr<Moe> moe) : moe_(std::move(moe)) {}

 protected:
  int rows(const Step& step) const { return step.num_rows(moe_->spec.set); }
  static int part(int total, int i, int n) {
    return static_cast<int>(static_cast<int64_t>(total) * i / n);
  }
  const std::shared_ptr<Moe> moe_;
};

class MoeRoute final : public MoeOp {
 public:
  using MoeOp::MoeOp;
  const char* name() const override { return "moe_route"; }
  int num_chunks(const Step& step) const override {
    if (rows(step) > moe_->spec.max_rows) throw std::invalid_argument("moe: too many rows");
    return (rows(step) + kRowsPerChunk - 1) / kRowsPerChunk;
  }
  void run(const Step& step, int chunk, Worker&) const override {
    const int end = std::min(rows(step), (chunk + 1) * kRowsPerChunk);
    std::vector<int32_t> order(moe_->num_experts());
    for (int m = chunk * kRowsPerChunk; m < end; m++) route(m, order);
  }

 private:
  void route(int m, std::vector<int32_t>& order) const {
    const float* logits = moe_->logits->row(m);
    const int top_k = moe_->spec.top_k;
    std::iota(order.begin(), order.end(), 0);
    // NaN last, so that the order is total; its row's softmax is NaN all the same.
    const auto better = [&](int a, int b) {
      const bool nan_a = std::isnan(logits[a]), nan_b = std::isnan(logits[b]);
      if (nan_a || nan_b) return nan_a == nan_b ? a < b : nan_b;
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(), better);
    std::sort(order.begin(), order.begin() + top_k);
    const float peak = *std::max_element(logits, logits + order.size());
    double total = 0;
    for (size_t e = 0; e < order.size(); e++) total += std::exp(static_cast<double>(logits[e]) - peak);
    double chosen = 0;
    for (int i = 0; i < top_k; i++) chosen += std::exp(static_cast<double>(logits[order[i]]) - peak);
    // A NaN anywhere in the row must show, also where the chosen experts' own sum would hide it.
    const double divisor = moe_->spec.norm_topk_prob ? chosen + 0 * total : total;
    for (int i = 0; i < top_k; i++) {
      const size_t at = static_cast<size_t>(m) * top_k + i;
      moe_->expert_of[at] = order[i];
      moe_->weight_of[at] =
          static_cast<float>(std::exp(static_cast<double>(logits[order[i]]) - peak) / divisor);
    }
  }
};

// Sorts the pairs by expert and cuts them into tiles.
class MoeSort final : public MoeOp {
 public:
  using MoeOp::MoeOp;
  const char* name() const override { return "moe_sort"; }
  int num_chunks(const Step& step) const override { return rows(step) > 0 ? 1 : 0; }
  void run(const Step& step, int, Worker&) const override {
    Moe& moe = *moe_;
    const int pairs = rows(step) * moe.spec.top_k;
    std::vector<int> starts(moe.num_experts() + 1);
    for (int i = 0; i < pairs; i++) starts[moe.expert_of[i] + 1]++;
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int> next(starts.begin(), starts.end() - 1);
    for (int i = 0; i < pairs; i++) {
      const int at = next[moe.expert_of[i]]++;
      moe.row_of_pair[at] = i / moe.spec.top_k;
      moe.weight_of_pair[at] = moe.weight_of[i];
    }
    cut(starts, moe.gathered.act().form, moe.in_tiles);
    cut(starts, moe.hidden.act().form, moe.down_tiles);
  }

 private:
  void cut(const std::vector<int>& starts, ActForm form, std::vector<Moe::Tile>& tiles) const {
    tiles.clear();
    Tiles even;
    for (int e = 0; e < moe_->num_experts(); e++) {
      even.build(starts[e + 1] - starts[e], moe_->kernels.max_tile_rows[static_cast<int>(form)]);
      for (const auto& tile : even.tiles) tiles.push_back({e, starts[e] + tile.r0, tile.rows});
    }
  }
};

// Copies each pair's input row into its expert's tile.
class MoeGather final : public MoeOp {
 public:
  using MoeOp::MoeOp;
  const char* name() const override { return "moe_gather"; }
  int num_chunks(const Step& step) const override {
    return (rows(step) * moe_->spec.top_k + kRowsPerChunk - 1) / kRowsPerChunk;
  }
  void run(const Step& step, int chunk, Worker&) const override {
    const int n = num_chunks(step), tiles = static_cast<int>(moe_->in_tiles.size());
    for (int t = part(tiles, chunk, n); t < part(tiles, chunk + 1, n); t++) {
      const Moe::Tile& tile = moe_->in_tiles[t];
      for (int p = tile.r0; p < tile.r0 + tile.rows; p++) gather(step, tile, p);
    }
  }

 private:
  void gather(const Step& step, const Moe::Tile& tile, int pair) const {
    const Act &from = moe_->act->act(), &to = moe_->gathered.act();
    const int m = moe_->row_of_pair[pair];
    const auto& source = step.tiles_of(moe_->spec.set, from.form).of_row(m);
    for (int g = 0; g < from.groups; g++) {
      copy_slot(from, from.slot(source.r0, source.rows, m, g), to, to.slot(tile.r0, tile.rows, pair, g));
    }
  }
  static void copy_slot(const Act& from, size_t s, const Act& to, size_t d) {
    switch (from.form) {
      case ActForm::Q8:
        std::memcpy(to.q + d * kGroup, from.q + s * kGroup, kGroup);
        to.scale[d] = from.scale[s];
        to.sum[d] = from.sum[s];
        to.zero8[d] = from.zero8[s];
        to.zero128[d] = from.zero128[s];
        to.zero8_low[d] = from.zero8_low[s];
        return;
      case ActForm::BF16:
        std::memcpy(to.bf16 + d * kGroup, from.bf16 + s * kGroup, kGroup * 2);
        return;
      case ActForm::F32:
        std::memcpy(to.f32 + d * kGroup, from.f32 + s * kGroup, kGroup * 4);
    }
  }
};

class MoeGated final : public MoeOp {
 public:
  using MoeOp::MoeOp;
  const char* name() const override { return "moe_gated"; }
  int num_chunks(const Step& step) const override {
    const auto units = static_cast<int64_t>(moe_->experts[0].gate.num_units());
    return static_cast<int>(std::min<int64_t>(256, rows(step) * moe_->spec.top_k * units));
  }
  void run(const Step& step, int chunk, Worker&) const override {
    const int n = num_chunks(step), units = moe_->experts[0].gate.num_units();
    const int work = static_cast<int>(moe_->in_tiles.size()) * units;
    for (int i = part(work, chunk, n); i < part(work, chunk + 1, n); i++) {
      run_unit(moe_->in_tiles[i / units], i % units);
    }
  }

 private:
  void run_unit(const Moe::Tile& tile, int unit) const {
    alignas(64) float gate[kMaxTileRows * kGroup] = {}, up[kMaxTileRows * kGroup] = {};
    const Expert& expert = moe_->experts[tile.expert];
    const Act& act = moe_->gathered.act();
    const LinearGrid::Reads reads;
    expert.gate.run(act, tile.r0, tile.rows, unit, unit + 1, gate, kGroup, nullptr, false, reads);
    expert.up.run(act, tile.r0, tile.rows, unit, unit + 1, up, kGroup, nullptr, false, reads);
    moe_->kernels.gate(moe_->spec.fn, gate, up, tile.rows * kGroup);
    for (int r = 0, count; r < tile.rows; r += count) {
      const Moe::Tile& to = down_tile(tile, tile.r0 + r);
      count = std::min(tile.rows - r, to.r0 + to.rows - (tile.r0 + r));
      moe_->kernels.put_rows(moe_->hidden.act(), to.r0, to.rows, tile.r0 + r, count, unit, gate + r * kGroup);
    }
  }
  // The tile of the next product that holds this pair: its form may allow another height.
  const Moe::Tile& down_tile(const Moe::Tile& tile, int pair) const {
    const auto& tiles = moe_->down_tiles;
    if (moe_->hidden.act().form == moe_->gathered.act().form) return tiles[&tile - moe_->in_tiles.data()];
    return *(std::upper_bound(tiles.begin(), tiles.end(), pair,
                              [](int p, const Moe::Tile& t) { return p < t.r0; }) - 1);
  }
};

// Each chunk owns 32 outputs and walks all tiles in ascending order of experts.
class MoeDown final : public MoeOp {
 public:
  using MoeOp::MoeOp;
  const char* name() const override { return "moe_down"; }
  int num_chunks(const Step& step) const override {
    return rows(step) > 0 ? moe_->experts[0].out.num_units() : 0;
  }
  void run(const Step& step, int unit, Worker&) const override {
    alignas(64) float y[kMaxTileRows * kGroup];
    const Moe& moe = *moe_;
    const int first = moe.experts[0].out.unit_first(unit), n = moe.experts[0].out.unit_outputs(unit);
    for (int m = 0; m < rows(step); m++) std::fill_n(moe.out->row(m) + first, n, 0.0f);
    for (const Moe::Tile& tile : moe.down_tiles) {
      moe.experts[tile.expert].out.run(moe.hidden.act(), tile.r0, tile.rows, unit, unit + 1, y, kGroup, nullptr,
                                       false, {});
      for (int r = 0; r < tile.rows; r++) {
        const int pair = tile.r0 + r;
        moe.kernels.add_scaled(moe.out->row(moe.row_of_pair[pair]) + first, y + r * kGroup,
                               moe.weight_of_pair[pair], n);
      }
    }
  }
};

void check(const Rows& logits, const Act& act, const std::vector<std::shared_ptr<GatedWeight>>& gated,
           const std::vector<std::shared_ptr<PackedWeight>>& down, const MoeSpec& spec, const Rows& out) {
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(std::string("moe: ") + what);
  };
  require(!gated.empty() && gated.size() == down.size(), "as many gated as down weights, at least one");
  require(logits.width == static_cast<int>(gated.size()), "one router logit for each expert");
  require(spec.top_k > 0 && spec.top_k <= logits.width, "top_k must be 1 .. number of experts");
  require(spec.max_rows > 0 && spec.max_rows <= out.max_rows && spec.max_rows <= logits.max_rows,
          "max_rows exceeds the buffers");
  for (size_t e = 0; e < gated.size(); e++) {
    const PackedWeight &gate = gated[e]->gate, &d = *down[e];
    require(gate.k() == act.width && gate.act_form() == act.form, "the experts read other activations");
    require(gate.n() == d.k() && d.n() == out.width, "the experts' shapes don't fit together");
    require(gate.n() == gated[0]->gate.n() && d.act_form() == down[0]->act_form(), "experts differ");
  }
}

}  // namespace

std::vector<std::unique_ptr<Op>> make_moe(const KernelTable& table, std::shared_ptr<Rows> router_logits,
                                          std::shared_ptr<ActBuffer> act,
                                          std::vector<std::shared_ptr<GatedWeight>> gated,
                                          std::vector<std::shared_ptr<PackedWeight>> down,
                                          const MoeSpec& spec, std::shared_ptr<Rows> out) {
  check(*router_logits, act->act(), gated, down, spec, *out);
  std::vector<Expert> experts;
  for (size_t e = 0; e < gated.size(); e++) experts.emplace_back(*table.linear, gated[e], down[e]);
  const auto moe = std::make_shared<Moe>(table, spec, std::move(router_logits), std::move(act),
                                         std::move(out), std::move(experts));
  std::vector<std::unique_ptr<Op>> ops;
  ops.push_back(std::make_unique<MoeRoute>(moe));
  ops.push_back(std::make_unique<MoeSort>(moe));
  ops.push_back(std::make_unique<MoeGather>(moe));
  ops.push_back(std::make_unique<MoeGated>(moe));
  ops.push_back(std::make_unique<MoeDown>(moe));
  return ops;
}

}  // namespace twostep
