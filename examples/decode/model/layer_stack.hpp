// SPDX-License-Identifier: Apache-2.0
// LayerStack: the layers of one pipeline stage on one rank, with the cache and the exchange that they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/decode_layer.hpp>
#include <helix/rank_shape.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "model/decoder_backend.hpp"
#include "model/model_config.hpp"
#include "model/stage_plan.hpp"
#include "model/stage_weights.hpp"
#include "model/step_workspace.hpp"

namespace helix::decode {

/// Owns everything that the layers need except their weights. Collective: all ranks of the stage construct
/// and queue it together.
template <DecoderBackend B>
class LayerStack {
 public:
  using T = typename B::Activation;
  using Stream = typename B::Stream;

  /// Queues copies on `stream`, which must be synchronised before the first step.
  LayerStack(B& backend, const Topology& topo, const RankShape& shape, Range layers, const ModelConfig& model,
             const KvCacheSpec& cache, const StageLimits& limits, const StepWorkspace<B>& bytes,
             Stream stream)
      : backend_(&backend),
        shape_(shape),
        cache_(backend, topo, cache),
        exchange_(backend, exchange_spec(shape, limits)),
        hop_b_(backend, limits.max_slices),
        normed_(backend.allocate(bytes.hidden)),
        workspace_(backend.allocate(bytes.layer)) {
    const std::vector<float> frequencies = model.rope.inverse_frequencies();
    const std::size_t frequency_bytes = frequencies.size() * sizeof(float);
    inverse_frequency_ = backend.allocate(frequency_bytes);
    backend.upload(inverse_frequency_.data(), frequencies.data(), frequency_bytes, stream);
    for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
      configs_.push_back(model.layer(layer, reinterpret_cast<const float*>(inverse_frequency_.data())));
      configs_.back().mla_prefill = limits.mla_prefill;
    }
  }

  ShardedKVCache<B>& cache() { return cache_; }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(configs_.size()); }

  /// Bytes that the exchanges queued so far send to other ranks.
  std::int64_t sent_payload_bytes() const { return exchange_.sent_payload_bytes(); }

  /// Queues all layers, in place on `hidden` [tokens, M]. Each layer ends with the input norm of the next;
  /// the last ends with `weights.final_norm`, if there is one. Returns the normed `hidden`, [tokens, M],
  /// valid until the next call.
  TensorView<T, 2> queue(const StageWeightViews& weights, TensorView<T, 2> hidden, const Batch& batch,
                         int hop_b_slices, Stream stream) {
    const TensorView<T, 2> normed(reinterpret_cast<T*>(normed_.data()), hidden.extents());
    backend_->rms_norm(RmsNormArgs<T>{.delta = {},
                                      .residual = hidden,
                                      .weight = weights.layers.front().input_norm,
                                      .out = normed,
                                      .epsilon = configs_.front().norm_epsilon},
                       stream);
    for (std::size_t layer = 0; layer < configs_.size(); ++layer) {
      const bool is_end = layer + 1 == configs_.size();
      decode_layer(*backend_, shape_, configs_[layer], weights.layers[layer],
                   cache_.layer(static_cast<int>(layer)), batch, hidden,
                   {.exchange = &exchange_,
                    .hop_b = &hop_b_,
                    .hop_b_slices = hop_b_slices,
                    .workspace = {workspace_.data(), workspace_.size_bytes()},
                    .normed = normed,
                    .next_norm = is_end ? weights.final_norm : weights.layers[layer + 1].input_norm,
                    .follows_layer = layer > 0},
                   stream);
    }
    return normed;
  }

 private:
  B* backend_;
  RankShape shape_;
  ShardedKVCache<B> cache_;
  KvpAllToAll<B> exchange_;
  HopB<B> hop_b_;
  typename B::Buffer inverse_frequency_;
  typename B::Buffer normed_;
  typename B::Buffer workspace_;
  std::vector<LayerConfig> configs_;
};

}  // namespace helix::decode
