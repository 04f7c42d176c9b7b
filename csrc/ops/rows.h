// Ops over whole rows: RMSNorm in its forms, residual add, gather.
#pragma once
#include <memory>

#include "isa/kernels.h"
#include "plan/plan.h"

namespace twostep {

// A norm weight or bias, float32.
struct Vector {
  Memory memory;
  float* data = nullptr;
  int size = 0;

  explicit Vector(int n) : memory(n * sizeof(float) + 64), data(memory.as<float>()), size(n) {}
};

// y = rms_norm(x) * weight. Writes what is not null: `rows` (float32) and up to two activations.
std::unique_ptr<Op> make_rms_norm(const KernelTable&, std::shared_ptr<Rows> x,
                                  std::shared_ptr<Vector> weight, float eps, RowSet set,
                                  std::shared_ptr<Rows> rows,
                                  std::vector<std::shared_ptr<ActBuffer>> acts);
// residual += rms_norm(x) * weight
std::unique_ptr<Op> make_rms_norm_add(const KernelTable&, std::shared_ptr<Rows> x,
                                      std::shared_ptr<Vector> weight, float eps, RowSet set,
                                      std::shared_ptr<Rows> residual);
// residual += x
std::unique_ptr<Op> make_add(const KernelTable&, std::shared_ptr<Rows> x, RowSet set,
                             std::shared_ptr<Rows> residual);
// Activations of plain rows.
std::unique_ptr<Op> make_put_rows(const KernelTable&, std::shared_ptr<Rows> x, RowSet set,
                                  std::vector<std::shared_ptr<ActBuffer>> acts);
// y = layer_norm(x) * weight + bias, into `rows` (may be null) and activations.
std::unique_ptr<Op> make_layer_norm(const KernelTable&, std::shared_ptr<Rows> x,
                                    std::shared_ptr<Vector> weight, std::shared_ptr<Vector> bias,
                                    float eps, std::shared_ptr<Rows> rows,
                                    std::vector<std::shared_ptr<ActBuffer>> acts);
// y = x * Phi(x), into `rows` (may be null) and activations.
std::unique_ptr<Op> make_gelu(const KernelTable&, std::shared_ptr<Rows> x, std::shared_ptr<Rows> rows,
                              std::vector<std::shared_ptr<ActBuffer>> acts);
// x[t] += table[position of t]; `table` is [positions, width], one row behind the other. A step with a
// position beyond it fails with std::invalid_argument.
std::unique_ptr<Op> make_add_positions(const KernelTable&, std::shared_ptr<Rows> x,
                                       std::shared_ptr<Vector> table);
// out[m] = x[logits_indices[m]]
std::unique_ptr<Op> make_gather(std::shared_ptr<Rows> x, std::shared_ptr<Rows> out);
// Runs step.staged, alone, at the head of the forward plan.
std::unique_ptr<Op> make_apply_staged();

}  // namespace twostep
