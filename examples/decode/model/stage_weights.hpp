// SPDX-License-Identifier: Apache-2.0
// StageWeights: one rank's weights, in buffers of a backend or in place in a checkpoint's files, and the
// views that layers read them by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <helix/layer_weights.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "model/decoder_backend.hpp"
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

/// Places the plan's targets at the buffers' addresses (of the backend; never read), or in their files.
StageWeightViews view_weights(const ModelConfig& config, const WeightPlan& plan,
                              const std::vector<const std::byte*>& buffers);

using FileMappings = std::vector<std::shared_ptr<const MappedFile>>;

/// Files that targets of the plan are used in, each once.
FileMappings mappings_of(const WeightPlan& plan);

/// One rank's weights, the buffers that hold them and the mappings that they are used in. The Checkpoint may
/// go before.
template <class B>
class StageWeights : public StageWeightViews {
 public:
  StageWeights(StageWeightViews views, std::vector<typename B::Buffer> buffers, FileMappings mappings = {},
               std::int64_t in_place_bytes = 0)
      : StageWeightViews(std::move(views)),
        buffers_(std::move(buffers)),
        mappings_(std::move(mappings)),
        in_place_bytes_(in_place_bytes) {}

  /// Memory that the buffers take.
  std::int64_t buffer_bytes() const {
    std::int64_t total = 0;
    for (const auto& buffer : buffers_) total += static_cast<std::int64_t>(buffer.size_bytes());
    return total;
  }

  /// Bytes of the weights that are used in the checkpoint's files, whose pages the ranks of a machine share.
  std::int64_t in_place_bytes() const { return in_place_bytes_; }

 private:
  std::vector<typename B::Buffer> buffers_;
  FileMappings mappings_;
  std::int64_t in_place_bytes_;
};

/// Where load_stage_weights() keeps the weights of a rank.
template <class B>
inline constexpr WeightHome kWeightHome = HostMemoryBackend<B> ? WeightHome::files : WeightHome::buffers;

/// What layers that attend so hold.
constexpr LatentWeights latent_weights(const MlaPrefill& prefill) {
  return prefill.room() > 0 ? LatentWeights::both : LatentWeights::absorbed;
}

namespace detail {

/// Fills the buffers by the rank's threads.
template <HostMemoryBackend B>
void fill_buffers(B& backend, const WeightPlan& plan, std::vector<typename B::Buffer>& buffers,
                  typename B::Stream, const WeightProgress& progress) {
  std::vector<std::byte*> addresses;
  for (auto& buffer : buffers) addresses.push_back(reinterpret_cast<std::byte*>(buffer.data()));
  load_weights(plan, addresses, backend.thread_pool(), progress);
}

/// Fills the buffers by uploads, a few MiB at a time.
template <class B>
void fill_buffers(B& backend, const WeightPlan& plan, std::vector<typename B::Buffer>& buffers,
                  typename B::Stream stream, const WeightProgress& progress) {
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
}

}  // namespace detail

/// Loads the slices of `world_rank`, in place where the backend and the files allow it (kWeightHome,
/// find_in_place()). Allocates, and waits for `stream`.
/// @throws as plan_weights() and load_weights().
template <class B>
StageWeights<B> load_stage_weights(B& backend, const ModelConfig& config, const Checkpoint& checkpoint,
                                   const Topology& topo, int world_rank, typename B::Stream stream,
                                   const WeightProgress& progress = {},
                                   LatentWeights latent = LatentWeights::absorbed) {
  const WeightPlan plan = plan_weights(config, checkpoint, topo, world_rank, kWeightHome<B>, latent);
  std::vector<typename B::Buffer> buffers;
  std::vector<const std::byte*> addresses;
  for (const std::int64_t bytes : plan.buffer_bytes) {
    buffers.push_back(backend.allocate(static_cast<std::size_t>(bytes)));
    addresses.push_back(reinterpret_cast<const std::byte*>(buffers.back().data()));
  }
  detail::fill_buffers(backend, plan, buffers, stream, progress);
  return {view_weights(config, plan, addresses), std::move(buffers), mappings_of(plan),
          plan.in_place_bytes()};
}

}  // namespace helix::decode
