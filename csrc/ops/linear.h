// Ops that multiply with packed weights: linear, its gated form, logits, and the embedding lookup.
#pragma once
#include <memory>
#include <vector>

#include "isa/kernels.h"
#include "ops/linear_weight.h"
#include "ops/rows.h"
#include "plan/plan.h"
#include "plan/token_table.h"

namespace twostep {

// out = act W^T + bias, or out += with `add_to_out`.
// All factories throw std::invalid_argument where shapes or forms disagree.
std::unique_ptr<Op> make_linear(const KernelTable&, std::shared_ptr<ActBuffer> act,
                                std::shared_ptr<PackedWeight> weight, std::shared_ptr<Vector> bias,
                                std::shared_ptr<Rows> out, bool add_to_out, RowSet set);

// h = fn(act W_gate^T) * (act W_up^T), written to `rows` (if not null) and to every one of `acts`.
std::unique_ptr<Op> make_gated_linear(const KernelTable&, std::shared_ptr<ActBuffer> act,
                                      std::shared_ptr<GatedWeight> weight, GateFn fn,
                                      std::vector<std::shared_ptr<ActBuffer>> acts,
                                      std::shared_ptr<Rows> rows, RowSet set);

// out = act W^T over the sampled rows, then cap * tanh(out / cap) unless `softcap` is 0.
std::unique_ptr<Op> make_logits(const KernelTable&, std::shared_ptr<ActBuffer> act,
                                std::shared_ptr<PackedWeight> weight, float softcap,
                                std::shared_ptr<Rows> out);

// out[t] = scale * W[token of t]. A step whose token ids lie outside the table fails with
// std::out_of_range.
std::unique_ptr<Op> make_embed(std::shared_ptr<TokenTable> tokens,
                               std::shared_ptr<PackedWeight> weight, float scale,
                               std::shared_ptr<Rows> out);

// Mixture of experts over the rows of a set: softmax over router_logits [T, E], the best top_k of them (ties: the lower
// id), and out = sum over those experts, in ascending order, of
//     weight * (fn(act W_gate^T) * (act W_up^T)) W_down^T
// with weights that sum to 1 if `norm_topk_prob`. `max_rows` is the largest T.
struct MoeSpec {
  int top_k;
  bool norm_topk_prob;
  GateFn fn;
  int max_rows;
  RowSet set = RowSet::Tokens;
};
std::vector<std::unique_ptr<Op>> make_moe(const KernelTable&, std::shared_ptr<Rows> router_logits,
                                          std::shared_ptr<ActBuffer> act,
                                          std::vector<std::shared_ptr<GatedWeight>> gated,
                                          std::vector<std::shared_ptr<PackedWeight>> down,
                                          const MoeSpec& spec, std::shared_ptr<Rows> out);

}  // namespace twostep
