// SPDX-License-Identifier: Apache-2.0
// One rank's weights: which slices of a checkpoint it takes, and loading them into buffers of a Backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <helix/backend.hpp>
#include <helix/layer_weights.hpp>
#include <helix/topology.hpp>

#include "checkpoint.hpp"
#include "model_config.hpp"

namespace helix::decode {

/// What a loaded matrix is for.
enum class WeightRole : std::uint8_t {
  embedding,
  final_norm,
  lm_head,
  input_norm,
  post_attention_norm,
  qkv,
  qkv_bias,
  q_norm,
  k_norm,
  attention_out,
  attention_out_bias,
  q_a,
  q_a_norm,
  q_b,
  kv_a,
  kv_a_norm,
  w_uk,
  w_uv,
  gate_up,
  gate_up_bias,
  down,
  down_bias,
  router,
  router_bias,
  expert_gate_up,
  expert_down,
  shared_gate_up,
  shared_gate_up_bias,
  shared_down,
  shared_down_bias
};

/// A rectangle of one tensor of the checkpoint, and the row or column of the target where it goes. 1-D
/// tensors are one row.
struct WeightSlice {
  Checkpoint::Entry source;
  Checkpoint::Entry scale;  ///< fp8: the block scales to multiply with; else null
  Range rows;
  Range cols;
  std::int64_t target_row = 0;
  std::int64_t target_col = 0;
  bool is_transposed = false;  ///< target[target_row + c, target_col + r] = source[r, c]

  const std::string& tensor() const { return source.tensor->name; }
};

/// A matrix that the rank holds: contiguous and row-major at `offset` of buffer `buffer`.
struct WeightTarget {
  WeightRole role = WeightRole::embedding;
  std::int64_t layer = -1;   ///< -1: of no layer
  std::int64_t expert = -1;  ///< global id; -1: none
  DType dtype = DType::f32;  ///< the checkpoint's; f32 where fp8 or unlike types are widened
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::size_t buffer = 0;
  std::int64_t offset = 0;  ///< bytes, a multiple of 256
  std::vector<WeightSlice> slices;

  std::int64_t size_bytes() const {
    return rows * cols * static_cast<std::int64_t>(helix::size_bytes(dtype));
  }
};

/// Everything that one rank takes from a checkpoint, and where it goes. Borrows from the Checkpoint.
struct WeightPlan {
  Range layers;                            ///< of this rank's stage
  Range experts;                           ///< of this rank
  bool has_tied_head = false;              ///< lm_head is the embedding
  std::vector<WeightTarget> targets;       ///< in loading order
  std::vector<std::int64_t> buffer_bytes;  ///< one buffer a layer, and a last one for the rest
  Fp8BlockConfig fp8_blocks;

  std::int64_t allocated_bytes() const;  ///< of all buffers
  std::int64_t weight_bytes() const;     ///< of all targets: without the alignment between them
};

/// Decides every slice of `world_rank`. Reads headers only.
/// @throws Error(invalid_file) listing the tensors that are missing or have another shape than the config
/// implies (both shapes), Error(unsupported) for element types that nothing here reads,
/// Error(invalid_argument) if `topo` was built for another model.
WeightPlan plan_weights(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                        int world_rank);
WeightPlan plan_weights(const ModelConfig&, const Checkpoint&&, const Topology&, int) = delete;  // it borrows

/// Bytes that load_stage_weights() would allocate.
std::int64_t plan_weight_bytes(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                               int world_rank);

/// Takes `bytes` of host memory for `offset` of a buffer; the memory is re-used on return.
using WeightSink =
    std::function<void(std::size_t buffer, std::int64_t offset, const std::byte* data, std::size_t bytes)>;

/// Told now and then: bytes loaded so far, bytes in all.
using WeightProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Feeds all bytes of the plan to `sink`, a few MiB at a time, giving mapped pages back as it goes, so that
/// resident memory grows by what the sink keeps.
void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress);

/// Views on one rank's weights.
struct StageWeightViews {
  std::vector<LayerWeights> layers;  ///< of Topology::layers, in order
  WeightView embedding;              ///< [vocabulary shard, M]: first stage, and last stage when tied
  WeightView final_norm;             ///< [1, M], last stage
  WeightView lm_head;                ///< [vocabulary shard, M], last stage; the embedding when tied
};

/// Places the plan's targets at the buffers' addresses (of the backend; never read).
StageWeightViews view_weights(const ModelConfig& config, const WeightPlan& plan,
                              const std::vector<const std::byte*>& buffers);

/// One rank's weights and the buffers that hold them.
template <class B>
class StageWeights : public StageWeightViews {
 public:
  StageWeights(StageWeightViews views, std::vector<typename B::Buffer> buffers)
      : StageWeightViews(std::move(views)), buffers_(std::move(buffers)) {}

  /// Memory that the buffers take.
  std::int64_t bytes() const {
    std::int64_t total = 0;
    for (const auto& buffer : buffers_) total += static_cast<std::int64_t>(buffer.size_bytes());
    return total;
  }

 private:
  std::vector<typename B::Buffer> buffers_;
};

/// Loads the slices of `world_rank` straight from the mapped files. Allocates, and waits for `stream`.
/// @throws as plan_weights().
template <class B>
StageWeights<B> load_stage_weights(B& backend, const ModelConfig& config, const Checkpoint& checkpoint,
                                   const Topology& topo, int world_rank, typename B::Stream stream,
                                   const WeightProgress& progress = {}) {
  const WeightPlan plan = plan_weights(config, checkpoint, topo, world_rank);
  std::vector<typename B::Buffer> buffers;
  std::vector<const std::byte*> addresses;
  for (const std::int64_t bytes : plan.buffer_bytes) {
    buffers.push_back(backend.allocate(static_cast<std::size_t>(bytes)));
    addresses.push_back(reinterpret_cast<const std::byte*>(buffers.back().data()));
  }
  constexpr std::size_t kMaxPendingBytes = std::size_t{64}
                                           << 20;  // copies that the backend may hold meanwhile
  std::size_t pending = 0;
  const auto upload = [&](std::size_t buffer, std::int64_t offset, const std::byte* data, std::size_t bytes) {
    backend.upload(reinterpret_cast<std::byte*>(buffers[buffer].data()) + offset, data, bytes, stream);
    pending += bytes;
    if (pending < kMaxPendingBytes) return;
    backend.synchronize(stream);
    pending = 0;
  };
  stream_weights(plan, upload, progress);
  backend.synchronize(stream);
  return {view_weights(config, plan, addresses), std::move(buffers)};
}

}  // namespace helix::decode
