// SPDX-License-Identifier: Apache-2.0
// StageWeights: one rank's weights, in buffers of a backend or in place in a checkpoint's files, and the
// views through which layers read them.
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

/// Views of one rank's weights.
struct StageWeightViews {
  std::vector<LayerWeights> layers;  ///< The layers of Topology::layers, in order.
  /// [vocabulary shard, M]; on the first stage, and on the last stage if tied.
  WeightView embedding;
  WeightView final_norm;  ///< [1, M], on the last stage.
  WeightView lm_head;     ///< [vocabulary shard, M], on the last stage; the embedding if tied.
};

/// The views of the plan's targets at the addresses of the buffers (backend memory, never read here) or in
/// their files.
StageWeightViews view_weights(const ModelConfig& config, const WeightPlan& plan,
                              const std::vector<const std::byte*>& buffers);

using FileMappings = std::vector<std::shared_ptr<const MappedFile>>;

/// The files that the plan's targets use in place, each once.
FileMappings mappings_of(const WeightPlan& plan);

/// One rank's weights: the buffers that hold them and the mappings that they are used in. The Checkpoint may
/// be destroyed earlier.
template <class B>
class StageWeights : public StageWeightViews {
 public:
  StageWeights(StageWeightViews views, std::vector<typename B::Buffer> buffers, FileMappings mappings = {},
               std::int64_t in_place_bytes = 0)
      : StageWeightViews(std::move(views)),
        buffers_(std::move(buffers)),
        mappings_(std::move(mappings)),
        in_place_bytes_(in_place_bytes) {}

  /// Bytes of the buffers.
  std::int64_t buffer_bytes() const {
    std::int64_t total = 0;
    for (const auto& buffer : buffers_) total += static_cast<std::int64_t>(buffer.size_bytes());
    return total;
  }

  /// Bytes of the weights that are used in place in the checkpoint's files. The ranks of a machine share
  /// these pages.
  std::int64_t in_place_bytes() const { return in_place_bytes_; }

 private:
  std::vector<typename B::Buffer> buffers_;
  FileMappings mappings_;
  std::int64_t in_place_bytes_;
};

/// Where load_stage_weights() puts the weights of a rank.
template <class B>
inline constexpr WeightHome kWeightHome = HostMemoryBackend<B> ? WeightHome::files : WeightHome::buffers;

/// The weights that layers with this prefill setting need.
constexpr LatentWeights latent_weights(const MlaPrefill& prefill) {
  return prefill.room() > 0 ? LatentWeights::both : LatentWeights::absorbed;
}

namespace detail {

/// Fills the buffers with all threads of the rank.
template <HostMemoryBackend B>
void fill_buffers(B& backend, const WeightPlan& plan, std::vector<typename B::Buffer>& buffers,
                  typename B::Stream, const WeightProgress& progress) {
  std::vector<std::byte*> addresses;
  for (auto& buffer : buffers) addresses.push_back(reinterpret_cast<std::byte*>(buffer.data()));
  load_weights(plan, addresses, backend.thread_pool(), progress);
}

/// Fills the buffers by uploads of a few MiB each.
template <class B>
void fill_buffers(B& backend, const WeightPlan& plan, std::vector<typename B::Buffer>& buffers,
                  typename B::Stream stream, const WeightProgress& progress) {
  // Limit on uploads in flight, of which the backend may hold copies.
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

/// Loads the weight slices of `world_rank`, in place if the backend and the files allow it (kWeightHome,
/// find_in_place()). Allocates, and waits for `stream`.
/// @throws as plan_weights() and load_weights() do.
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
