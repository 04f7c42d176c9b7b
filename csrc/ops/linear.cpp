#include "ops/linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa/rows.h"
#include "ops/linear_grid.h"
#include "plan/row_chunks.h"

namespace twostep {

namespace {

std::string shape_name(const char* op, const PackedWeight& w) {
  return std::string(op) + " " + std::to_string(w.n()) + "x" + std::to_string(w.k());
}

void check_input(const char* op, const ActBuffer& act, const PackedWeight& w) {
  if (act.act().form != w.act_form()) {
    throw std::invalid_argument(std::string(op) + ": the weight reads another activation form");
  }
  if (act.act().width != w.k()) {
    throw std::invalid_argument(std::string(op) + ": activations of " +
                                std::to_string(act.act().width) + " for a weight with K = " +
                                std::to_string(w.k()));
  }
}

void check_output(const char* op, const Rows& out, const PackedWeight& w) {
  if (out.width != w.n()) {
    throw std::invalid_argument(std::string(op) + ": rows of " + std::to_string(out.width) +
                                " for a weight with N = " + std::to_string(w.n()));
  }
}

void check_rows(const char* op, int rows, const Rows* out) {
  if (out && rows > out->max_rows) {
    throw std::invalid_argument(std::string(op) + ": " + std::to_string(rows) +
                                " rows in buffers for " + std::to_string(out->max_rows));
  }
}

class Linear final : public Op {
 public:
  Linear(const KernelTable& table, const char* op, std::shared_ptr<ActBuffer> act,
         std::shared_ptr<PackedWeight> weight, std::shared_ptr<Vector> bias, std::shared_ptr<Rows> out,
         bool add, float softcap, RowSet set)
      : table_(table),
        name_(shape_name(op, *weight)),
        act_(std::move(act)),
        weight_(std::move(weight)),
        bias_(std::move(bias)),
        out_(std::move(out)),
        add_(add),
        softcap_(softcap),
        set_(set),
        grid_(*table.linear, *weight_) {
    check_input(op, *act_, *weight_);
    check_output(op, *out_, *weight_);
    if (bias_ && bias_->size != weight_->n()) {
      throw std::invalid_argument(name_ + ": the bias has " + std::to_string(bias_->size) + " values");
    }
  }
  const char* name() const override { return name_.c_str(); }
  int num_chunks(const Step& step) const override {
    check_rows(name(), step.num_rows(set_), out_.get());
    return cut(step).size();
  }
  void run(const Step& step, int index, Worker& worker) const override {
    const Tiles& tiles = step.tiles_of(set_, weight_->act_form());
    grid_.for_each(cut(step), tiles.size(), index, [&](int t, int first, int end, LinearGrid::Reads reads) {
      const auto& tile = tiles.tiles[t];
      reads.ahead = worker.ahead.unless_done();
      float* y = out_->row(tile.r0) + grid_.unit_first(first);
      grid_.run(act_->act(), tile.r0, tile.rows, first, end, y, out_->width,
                bias_ ? bias_->data : nullptr, add_, reads);
      if (softcap_ != 0) cap(tile, first, end);
    });
  }
  Stretch weights(const Step& step, int first, int end) const override {
    return grid_.weights(cut(step), step.tiles_of(set_, weight_->act_form()).size(), first, end);
  }

 private:
  LinearGrid::Cut cut(const Step& step) const {
    return grid_.cut(step.num_rows(set_), step.tiles_of(set_, weight_->act_form()).size());
  }
  void cap(const Tiles::Tile& tile, int first_unit, int end_unit) const {
    const int first = grid_.unit_first(first_unit), last = end_unit - 1;
    const int n = grid_.unit_first(last) + grid_.unit_outputs(last) - first;
    for (int m = tile.r0; m < tile.r0 + tile.rows; m++) {
      table_.rows->softcap(out_->row(m) + first, softcap_, n);
    }
  }

  const KernelTable& table_;
  const std::string name_;
  const std::shared_ptr<ActBuffer> act_;
  const std::shared_ptr<PackedWeight> weight_;
  const std::shared_ptr<Vector> bias_;
  const std::shared_ptr<Rows> out_;
  const bool add_;
  const float softcap_;
  const RowSet set_;
  const LinearGrid grid_;
};

class GatedLinear final : public Op {
 public:
  GatedLinear(const KernelTable& table, std::shared_ptr<ActBuffer> act,
              std::shared_ptr<GatedWeight> weight, GateFn fn,
              std::vector<std::shared_ptr<ActBuffer>> acts, std::shared_ptr<Rows> rows, RowSet set)
      : kernels_(*table.linear),
        name_(shape_name("gated_linear", weight->gate)),
        act_(std::move(act)),
        weight_(std::move(weight)),
        fn_(fn),
        acts_(std::move(acts)),
        rows_(std::move(rows)),
        set_(set),
        gate_(kernels_, weight_->gate),
        up_(kernels_, weight_->up) {
    check_input(name(), *act_, weight_->gate);
    if (rows_) check_output(name(), *rows_, weight_->gate);
    for (const auto& act_out : acts_) {
      if (act_out->act().width != weight_->gate.n()) {
        throw std::invalid_argument(name_ + ": an output activation has another width");
      }
    }
  }
  const char* name() const override { return name_.c_str(); }
  int num_chunks(const Step& step) const override {
    check_rows(name(), step.num_rows(set_), rows_.get());
    return cut(step).size();
  }
  void run(const Step& step, int index, Worker& worker) const override {
    const Tiles& tiles = step.tiles_of(set_, weight_->gate.act_form());
    gate_.for_each(cut(step), tiles.size(), index, [&](int t, int first, int end, LinearGrid::Reads reads) {
      reads.ahead = worker.ahead.unless_done();
      for (int unit = first; unit < end; unit++) run_unit(step, tiles.tiles[t], unit, reads);
    });
  }
  Stretch weights(const Step& step, int first, int end) const override {
    return gate_.weights(cut(step), step.tiles_of(set_, weight_->gate.act_form()).size(), first, end);
  }

 private:
  LinearGrid::Cut cut(const Step& step) const {
    return gate_.cut(step.num_rows(set_), step.tiles_of(set_, weight_->gate.act_form()).size(), 2);
  }
  // 32 values of h, which are one group of the next activation, for the rows of a tile.
  void run_unit(const Step& step, const Tiles::Tile& tile, int unit, LinearGrid::Reads reads) const {
    alignas(64) float gate[kMaxTileRows * kGroup], up[kMaxTileRows * kGroup];
    const int outputs = gate_.unit_outputs(unit);
    if (outputs < kGroup) {  // behind the width, groups hold zeros
      std::fill_n(gate, tile.rows * kGroup, 0.0f);
      std::fill_n(up, tile.rows * kGroup, 0.0f);
    }
    const Act& act = act_->act();
    gate_.run(act, tile.r0, tile.rows, unit, unit + 1, gate, kGroup, nullptr, false, reads);
    up_.run(act, tile.r0, tile.rows, unit, unit + 1, up, kGroup, nullptr, false, reads);
    kernels_.gate(fn_, gate, up, tile.rows * kGroup);
    for (const auto& out : acts_) {
      step.tiles_of(set_, out->act().form).for_each(tile, [&](const Tiles::Tile& to, int m, int count) {
        kernels_.put_rows(out->act(), to.r0, to.rows, m, count, unit, gate + (m - tile.r0) * kGroup);
      });
    }
    if (!rows_) return;
    for (int r = 0; r < tile.rows; r++) {
      std::copy_n(gate + r * kGroup, outputs, rows_->row(tile.r0 + r) + unit * kGroup);
    }
  }

  const LinearKernels& kernels_;
  const std::string name_;
  const std::shared_ptr<ActBuffer> act_;
  const std::shared_ptr<GatedWeight> weight_;
  const GateFn fn_;
  const std::vector<std::shared_ptr<ActBuffer>> acts_;
  const std::shared_ptr<Rows> rows_;
  const RowSet set_;
  const LinearGrid gate_, up_;
};

class Embed final : public Op {
 public:
  Embed(std::shared_ptr<TokenTable> tokens, std::shared_ptr<PackedWeight> weight, float scale,
        std::shared_ptr<Rows> out)
      : tokens_(std::move(tokens)), weight_(std::move(weight)), scale_(scale), out_(std::move(out)) {
    if (out_->width != weight_->k()) throw std::invalid_argument("embed: rows and table differ in width");
  }
  const char* name() const override { return "embed"; }
  int num_chunks(const Step& step) const override {
    check_rows(name(), step.num_tokens, out_.get());
    return RowChunks(step.num_tokens).count();
  }
  void run(const Step& step, int chunk, Worker&) const override {
    const RowChunks chunks(step.num_tokens);
    for (int t = chunks.begin(chunk); t < chunks.end(chunk); t++) {
      float* y = out_->row(t);
      weight_->unpack_row(token(step, t), y);
      for (int i = 0; i < out_->width; i++) y[i] *= scale_;
    }
  }

 private:
  int token(const Step& step, int t) const {
    const int row = step.rows[step.req_of_token[t]], position = step.positions[t];
    tokens_->check(row, position, 1);
    const int id = tokens_->row(row)[position];
    if (id < 0 || id >= weight_->n()) {
      throw std::out_of_range("token id " + std::to_string(id) + " is outside the vocabulary of " +
                              std::to_string(weight_->n()));
    }
    return id;
  }

  const std::shared_ptr<TokenTable> tokens_;
  const std::shared_ptr<PackedWeight> weight_;
  const float scale_;
  const std::shared_ptr<Rows> out_;
};

}  // namespace

std::unique_ptr<Op> make_linear(const KernelTable& table, std::shared_ptr<ActBuffer> act,
                                std::shared_ptr<PackedWeight> weight, std::shared_ptr<Vector> bias,
                                std::shared_ptr<Rows> out, bool add_to_out, RowSet set) {
  return std::make_unique<Linear>(table, "linear", std::move(act), std::move(weight), std::move(bias),
                                  std::move(out), add_to_out, 0.0f, set);
}

std::unique_ptr<Op> make_gated_linear(const KernelTable& table, std::shared_ptr<ActBuffer> act,
                                      std::shared_ptr<GatedWeight> weight, GateFn fn,
                                      std::vector<std::shared_ptr<ActBuffer>> acts,
                                      std::shared_ptr<Rows> rows, RowSet set) {
  return std::make_unique<GatedLinear>(table, std::move(act), std::move(weight), fn, std::move(acts),
                                       std::move(rows), set);
}

std::unique_ptr<Op> make_logits(const KernelTable& table, std::shared_ptr<ActBuffer> act,
                                std::shared_ptr<PackedWeight> weight, float softcap,
                                std::shared_ptr<Rows> out) {
  return std::make_unique<Linear>(table, "logits", std::move(act), std::move(weight), nullptr,
                                  std::move(out), false, softcap, RowSet::Logits);
}

std::unique_ptr<Op> make_embed(std::shared_ptr<TokenTable> tokens,
                               std::shared_ptr<PackedWeight> weight, float scale,
                               std::shared_ptr<Rows> out) {
  return std::make_unique<Embed>(std::move(tokens), std::move(weight), scale, std::move(out));
}

}  // namespace twostep
