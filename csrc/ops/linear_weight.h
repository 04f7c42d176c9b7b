// Weights packed for the kernels of one instruction set.
#pragma once
#include <memory>
#include <vector>

#include "core/memory.h"
#include "isa/kernels.h"
#include "isa/linear.h"

namespace twostep {

// Rows of a weight as its file holds them. `data` is read while packing and not kept.
struct RawPart {
  Format format;
  int n, k;
  const uint8_t* data;
};

enum class Precision : uint8_t {
  Int8,  // quantised weights times activations in int8
  Exact  // quantised weights expanded inside the kernel, activations in float32
};

// Outputs of a unit: what one task computes at least (ops/linear_grid.h).
inline constexpr int kUnit = 32;

// Panels that share a kind. Those of a unit follow each other, units lie at one distance.
struct Segment {
  Kind kind;
  const uint8_t* data;
  size_t panel_bytes;
  size_t unit_stride;  // bytes from a unit's first panel to the next one's
  int first;           // output of the first panel
  int n;               // outputs; the last panel is padded with zeros
};

// Where a part's panels go: the first at `offset`, as in a Segment.
struct PackTarget {
  Kind kind;
  size_t offset;
  size_t panel_bytes, unit_stride;
};

// Whether none of the weights is NaN or infinite; at the speed of memory.
bool is_finite(const RawPart& part, int num_threads);

class PackedWeight {
 public:
  // Stacks `parts` (one k; formats may differ) row by row. Activations are read as int8 if all parts
  // are quantised and `precision` says so, as the kernels' bf16_form if all are BF16, else as float32.
  // Throws std::invalid_argument for shapes that disagree or don't fill whole blocks.
  PackedWeight(const KernelTable& table, const std::vector<RawPart>& parts, Precision precision,
               int num_threads, Arena& arena);

  const std::vector<Segment>& segments() const { return segments_; }
  ActForm act_form() const { return form_; }
  int n() const { return n_; }
  int k() const { return k_; }
  int groups() const { return (k_ + kGroup - 1) / kGroup; }
  int width() const { return width_; }
  size_t bytes() const { return bytes_; }
  // Row `id` as float32 [k]: the file's values, and what the float32 kernels multiply with.
  void unpack_row(int id, float* out) const;

 private:
  friend struct GatedWeight;
  explicit PackedWeight(const LinearKernels& kernels) : kernels_(&kernels), width_(kernels.width) {}

  const LinearKernels* kernels_;
  std::shared_ptr<uint8_t> memory_;
  size_t bytes_ = 0;
  std::vector<Segment> segments_;
  ActForm form_ = ActForm::F32;
  int n_ = 0, k_ = 0, width_;
};

// The weights of act(x W_gate^T) * (x W_up^T), one shape. Their units alternate in memory where their
// kinds agree: a task, which multiplies a unit of gate, then one of up, reads straight on.
struct GatedWeight {
  GatedWeight(const KernelTable& table, const RawPart& gate, const RawPart& up, Precision precision,
              int num_threads, Arena& arena);
  PackedWeight gate, up;  // share their memory
  size_t bytes() const { return gate.bytes(); }
};

}  // namespace twostep
