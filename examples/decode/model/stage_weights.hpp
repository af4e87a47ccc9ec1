// SPDX-License-Identifier: Apache-2.0
// StageWeights: one rank's weights in buffers of a backend, and the views that layers read them by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <helix/layer_weights.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "model/model_config.hpp"
#include "model/weight_plan.hpp"
#include "model/weight_stream.hpp"

namespace helix::decode {

/// Views on one rank's weights.
struct StageWeightViews {
  std::vector<LayerWeights> layers;  ///< Layers of Topology::layers, in order.
  WeightView embedding;              ///< [vocabulary shard, M]: first stage, and last stage when tied.
  WeightView final_norm;             ///< [1, M], last stage.
  WeightView lm_head;                ///< [vocabulary shard, M], last stage; the embedding when tied.
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

/// Loads the slices of `world_rank` a few MiB at a time. Allocates, and waits for `stream`.
/// @throws as plan_weights() and stream_weights().
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
  // Copies that the backend may hold meanwhile.
  constexpr std::size_t kMaxPendingBytes = std::size_t{64} << 20;
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
