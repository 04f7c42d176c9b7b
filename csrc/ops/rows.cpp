#include "ops/rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "isa/rows.h"
#include "plan/row_chunks.h"

namespace twostep {

namespace {

using Acts = std::vector<std::shared_ptr<ActBuffer>>;

// One row after the other. Where they become activations, a chunk is a tile of the first: its rows share
// cache lines (scales lie side by side), which two threads would take from each other with every store.
class RowOp : public Op {
 public:
  explicit RowOp(RowSet set, Acts acts = {}) : set_(set), acts_(std::move(acts)) {}
  int num_chunks(const Step& step) const override {
    return acts_.empty() ? RowChunks(step.num_rows(set_)).count() : tiles(step).size();
  }
  void run(const Step& step, int chunk, Worker&) const override {
    if (acts_.empty()) {
      const RowChunks chunks(step.num_rows(set_));
      for (int m = chunks.begin(chunk); m < chunks.end(chunk); m++) row(step, m);
    } else {
      const Tiles::Tile& tile = tiles(step).tiles[chunk];
      for (int m = tile.r0; m < tile.r0 + tile.rows; m++) row(step, m);
    }
  }
  virtual void row(const Step& step, int m) const = 0;

 protected:
  const Tiles& tiles(const Step& step) const { return step.tiles_of(set_, acts_[0]->act().form); }

  const RowSet set_;
  const Acts acts_;
};

class RmsNorm final : public RowOp {
 public:
  RmsNorm(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Vector> weight,
          float eps, RowSet set, std::shared_ptr<Rows> rows, Acts acts)
      : RowOp(set, std::move(acts)),
        kernels_(*table.rows),
        x_(std::move(x)),
        weight_(std::move(weight)),
        eps_(eps),
        rows_(std::move(rows)) {
    if (weight_->size != x_->width) throw std::invalid_argument("rms_norm: weight and row differ in width");
  }
  const char* name() const override { return "rms_norm"; }
  void run(const Step& step, int chunk, Worker& worker) const override {
    if (acts_.empty()) return RowOp::run(step, chunk, worker);
    const Tiles::Tile& tile = tiles(step).tiles[chunk];
    const float* x[kMaxTileRows];
    for (int r = 0; r < tile.rows; r++) x[r] = x_->row(tile.r0 + r);
    for (const auto& act : acts_) {
      step.tiles_of(set_, act->act().form).for_each(tile, [&](const Tiles::Tile& to, int m, int count) {
        kernels_.rms_norm_act(args(nullptr), x + (m - tile.r0), count, act->act(), to.r0, to.rows, m);
      });
    }
    if (rows_) RowOp::run(step, chunk, worker);
  }
  void row(const Step&, int m) const override {
    kernels_.rms_norm(args(x_->row(m)), rows_->row(m));
  }

 private:
  RmsNormArgs args(const float* x) const { return {x, weight_->data, x_->width, eps_}; }

  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_;
  std::shared_ptr<Vector> weight_;
  float eps_;
  std::shared_ptr<Rows> rows_;
};

class RmsNormAdd final : public RowOp {
 public:
  RmsNormAdd(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Vector> weight,
             float eps, RowSet set, std::shared_ptr<Rows> residual)
      : RowOp(set),
        kernels_(*table.rows),
        x_(std::move(x)),
        weight_(std::move(weight)),
        eps_(eps),
        residual_(std::move(residual)) {}
  const char* name() const override { return "rms_norm_add"; }
  void row(const Step&, int m) const override {
    kernels_.rms_norm_add({x_->row(m), weight_->data, x_->width, eps_}, residual_->row(m));
  }

 private:
  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_;
  std::shared_ptr<Vector> weight_;
  float eps_;
  std::shared_ptr<Rows> residual_;
};

class Add final : public RowOp {
 public:
  Add(const KernelTable& table, std::shared_ptr<Rows> x, RowSet set, std::shared_ptr<Rows> residual)
      : RowOp(set), kernels_(*table.rows), x_(std::move(x)), residual_(std::move(residual)) {}
  const char* name() const override { return "add"; }
  void row(const Step&, int m) const override {
    kernels_.add(residual_->row(m), x_->row(m), x_->width);
  }

 private:
  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_, residual_;
};

class PutRows final : public RowOp {
 public:
  PutRows(const KernelTable& table, std::shared_ptr<Rows> x, RowSet set,
          Acts acts)
      : RowOp(set, std::move(acts)), kernels_(*table.rows), x_(std::move(x)) {}
  const char* name() const override { return "put_rows"; }
  void row(const Step& step, int m) const override {
    for (const auto& act : acts_) {
      const auto& tile = step.tiles_of(set_, act->act().form).of_row(m);
      kernels_.put_row(x_->row(m), act->act(), tile.r0, tile.rows, m);
    }
  }

 private:
  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_;
};

class LayerNorm final : public RowOp {
 public:
  LayerNorm(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Vector> weight,
            std::shared_ptr<Vector> bias, float eps, std::shared_ptr<Rows> rows,
            Acts acts)
      : RowOp(RowSet::Tokens, std::move(acts)),
        kernels_(*table.rows),
        x_(std::move(x)),
        weight_(std::move(weight)),
        bias_(std::move(bias)),
        eps_(eps),
        rows_(std::move(rows)) {
    if (weight_->size != x_->width || bias_->size != x_->width) {
      throw std::invalid_argument("layer_norm: weight or bias and row differ in width");
    }
  }
  const char* name() const override { return "layer_norm"; }
  void row(const Step& step, int m) const override {
    const LayerNormArgs args{x_->row(m), weight_->data, bias_->data, x_->width, eps_};
    for (const auto& act : acts_) {
      const auto& tile = step.tiles_of(set_, act->act().form).of_row(m);
      kernels_.layer_norm_act(args, act->act(), tile.r0, tile.rows, m);
    }
    if (rows_) kernels_.layer_norm(args, rows_->row(m));
  }

 private:
  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_;
  std::shared_ptr<Vector> weight_, bias_;
  float eps_;
  std::shared_ptr<Rows> rows_;
};

class Gelu final : public RowOp {
 public:
  Gelu(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Rows> rows,
       Acts acts)
      : RowOp(RowSet::Tokens, std::move(acts)),
        kernels_(*table.rows),
        x_(std::move(x)),
        rows_(std::move(rows)) {}
  const char* name() const override { return "gelu"; }
  void row(const Step& step, int m) const override {
    for (const auto& act : acts_) {
      const auto& tile = step.tiles_of(set_, act->act().form).of_row(m);
      kernels_.gelu_act(x_->row(m), act->act(), tile.r0, tile.rows, m);
    }
    if (rows_) kernels_.gelu(x_->row(m), rows_->row(m), x_->width);
  }

 private:
  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_, rows_;
};

class AddPositions final : public RowOp {
 public:
  AddPositions(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Vector> positions)
      : RowOp(RowSet::Tokens), kernels_(*table.rows), x_(std::move(x)), positions_(std::move(positions)) {
    if (positions_->size % x_->width) {
      throw std::invalid_argument("add_positions: table and row differ in width");
    }
  }
  const char* name() const override { return "add_positions"; }
  int num_chunks(const Step& step) const override {
    const int most = positions_->size / x_->width;
    for (const int32_t length : step.seq_lens) {
      if (length > most) {
        throw std::invalid_argument("add_positions: position " + std::to_string(length - 1) +
                                    " is beyond the table of " + std::to_string(most));
      }
    }
    return RowOp::num_chunks(step);
  }
  void row(const Step& step, int m) const override {
    const size_t at = static_cast<size_t>(step.positions[m]) * x_->width;
    kernels_.add(x_->row(m), positions_->data + at, x_->width);
  }

 private:
  const RowKernels& kernels_;
  std::shared_ptr<Rows> x_;
  std::shared_ptr<Vector> positions_;
};

class Gather final : public RowOp {
 public:
  Gather(std::shared_ptr<Rows> x, std::shared_ptr<Rows> out)
      : RowOp(RowSet::Logits), x_(std::move(x)), out_(std::move(out)) {}
  const char* name() const override { return "gather"; }
  void row(const Step& step, int m) const override {
    std::memcpy(out_->row(m), x_->row(step.logits_indices[m]), sizeof(float) * x_->width);
  }

 private:
  std::shared_ptr<Rows> x_, out_;
};

class ApplyStaged final : public Op {
 public:
  const char* name() const override { return "apply_staged"; }
  int num_chunks(const Step& step) const override { return step.staged.empty() ? 0 : 1; }
  void run(const Step& step, int, Worker&) const override {
    for (const auto& write : step.staged) write();
  }
};

}  // namespace

std::unique_ptr<Op> make_rms_norm(const KernelTable& table, std::shared_ptr<Rows> x,
                                  std::shared_ptr<Vector> weight, float eps, RowSet set,
                                  std::shared_ptr<Rows> rows, Acts acts) {
  return std::make_unique<RmsNorm>(table, std::move(x), std::move(weight), eps, set, std::move(rows),
                                   std::move(acts));
}

std::unique_ptr<Op> make_rms_norm_add(const KernelTable& table, std::shared_ptr<Rows> x,
                                      std::shared_ptr<Vector> weight, float eps, RowSet set,
                                      std::shared_ptr<Rows> residual) {
  return std::make_unique<RmsNormAdd>(table, std::move(x), std::move(weight), eps, set,
                                      std::move(residual));
}

std::unique_ptr<Op> make_add(const KernelTable& table, std::shared_ptr<Rows> x, RowSet set,
                             std::shared_ptr<Rows> residual) {
  return std::make_unique<Add>(table, std::move(x), set, std::move(residual));
}

std::unique_ptr<Op> make_put_rows(const KernelTable& table, std::shared_ptr<Rows> x, RowSet set,
                                  Acts acts) {
  return std::make_unique<PutRows>(table, std::move(x), set, std::move(acts));
}

std::unique_ptr<Op> make_layer_norm(const KernelTable& table, std::shared_ptr<Rows> x,
                                    std::shared_ptr<Vector> weight, std::shared_ptr<Vector> bias,
                                    float eps, std::shared_ptr<Rows> rows,
                                    Acts acts) {
  return std::make_unique<LayerNorm>(table, std::move(x), std::move(weight), std::move(bias), eps,
                                     std::move(rows), std::move(acts));
}

std::unique_ptr<Op> make_gelu(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Rows> rows,
                              Acts acts) {
  return std::make_unique<Gelu>(table, std::move(x), std::move(rows), std::move(acts));
}

std::unique_ptr<Op> make_add_positions(const KernelTable& table, std::shared_ptr<Rows> x,
                                       std::shared_ptr<Vector> positions) {
  return std::make_unique<AddPositions>(table, std::move(x), std::move(positions));
}

std::unique_ptr<Op> make_gather(std::shared_ptr<Rows> x, std::shared_ptr<Rows> out) {
  return std::make_unique<Gather>(std::move(x), std::move(out));
}

std::unique_ptr<Op> make_apply_staged() { return std::make_unique<ApplyStaged>(); }

}  // namespace twostep
