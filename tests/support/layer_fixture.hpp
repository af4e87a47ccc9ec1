// SPDX-License-Identifier: Apache-2.0
// Runs one random layer over several steps, with one thread per rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <helix/backend.hpp>
#include <helix/batch_buffer.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/decode_layer.hpp>
#include <helix/hop_b.hpp>
#include <helix/job_comms.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "support/device_layer.hpp"
#include "support/layer_script.hpp"
#include "support/oracle.hpp"
#include "support/random_layer.hpp"
#include "support/ranks.hpp"
#include "support/worse.hpp"

namespace helix::test {

struct LayerRunOptions {
  std::int64_t chunk = 1;
  std::int64_t page_tokens = 4;
  int hop_b_slices = 1;
  int max_slices = 4;
  DType weight_dtype = DType::f32;
  DType kv_dtype = DType::f32;
  OutputShard o_shard = OutputShard::by_combined_heads;
  MlaPrefill mla_prefill{};
};

/// One rank with everything that decode_layer needs.
template <Backend B>
class LayerRank {
 public:
  LayerRank(B& backend, const Topology& topo, const oracle::Layer& layer, const Script& script,
            const LayerRunOptions& options)
      : backend_(&backend),
        shape_(topo.rank_shape(backend.comms().stage->rank())),
        options_(options),
        stream_(backend.create_stream()),
        layer_(backend, topo, layer, options.weight_dtype, options.o_shard, options.mla_prefill),
        cache_(backend, topo, cache_spec(topo, script, options)),
        exchange_(backend,
                  KvpAllToAllSpec::of_layers(shape_, std::max<std::int64_t>(1, script.max_step_tokens()),
                                             options.max_slices)),
        hop_b_(backend, options.max_slices),
        batch_(backend, std::max<std::int64_t>(1, script.sequences),
               std::max<std::int64_t>(1, script.max_step_tokens())),
        workspace_(backend.allocate(decode_layer_workspace_bytes(backend, shape_, script.max_step_tokens(),
                                                                 LayerInput::hidden, options.mla_prefill))),
        hidden_(backend.allocate(static_cast<std::size_t>(script.max_step_tokens() * layer.hidden) *
                                 sizeof(float))) {
    // A layer reads only workspace memory that it has written itself; otherwise NaN would show.
    const std::vector<float> poison(workspace_.size_bytes() / sizeof(float), std::nanf(""));
    backend.upload(workspace_.data(), poison.data(), poison.size() * sizeof(float), stream_);
    for (std::int64_t b = 0; b < script.sequences; ++b) sequences_.push_back(cache_.add());
  }

  LayerRank(const LayerRank&) = delete;
  LayerRank& operator=(const LayerRank&) = delete;
  ~LayerRank() {
    try {
      backend_->synchronize(stream_);  // after a failure, queued work may still use the memory below
    } catch (...) {
    }
  }

  /// Uploads a step's inputs and makes room for its tokens.
  void prepare(const Step& step) {
    std::vector<std::int32_t> offsets{0};
    std::vector<std::int32_t> slots;
    std::vector<std::int64_t> positions;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      for (std::int64_t t = 0; t < step.counts[b]; ++t) positions.push_back(cache_.length(sequences_[b]) + t);
      offsets.push_back(static_cast<std::int32_t>(positions.size()));
      slots.push_back(cache_.slot(sequences_[b]));
    }
    cache_.append(sequences_, step.counts, stream_);
    batch_.set(offsets, positions, slots, stream_);
    tokens_ = step.num_tokens();
    backend_->upload(hidden_.data(), step.hidden.data(), step.hidden.size() * sizeof(float), stream_);
  }

  DecodeLayerOptions<B> layer_options() {
    return {.exchange = &exchange_,
            .hop_b = &hop_b_,
            .hop_b_slices = options_.hop_b_slices,
            .workspace = {workspace_.data(), workspace_.size_bytes()}};
  }
  TensorView<float, 2> hidden() const {
    return {reinterpret_cast<float*>(hidden_.data()), {tokens_, shape_.hidden}};
  }

  /// Queues the layer on the inputs uploaded by prepare().
  void launch() {
    decode_layer(*backend_, shape_, layer_.config(), layer_.weights(), cache_.layer(0), batch_.batch(),
                 hidden(), layer_options(), stream_);
  }

  /// Waits for the hidden states, then truncates the rejected tokens.
  std::vector<float> finish(const Step& step) {
    std::vector<float> out(static_cast<std::size_t>(hidden().size()));
    backend_->download(out.data(), hidden_.data(), out.size() * sizeof(float), stream_);
    backend_->synchronize(stream_);
    for (std::size_t b = 0; b < sequences_.size(); ++b)
      if (step.rejected[b] > 0)
        cache_.truncate(sequences_[b], cache_.length(sequences_[b]) - step.rejected[b]);
    return out;
  }

  std::vector<float> run(const Step& step) {
    prepare(step);
    launch();
    return finish(step);
  }

  /// This rank's keys of one sequence [local tokens, heads, D], followed by its values. For MLA the latent
  /// rows.
  std::vector<float> read_kv(std::size_t sequence) {
    const KvFormat format = cache_.layer(0).format;
    const std::int64_t tokens = cache_.local_length(sequences_[sequence]);
    const std::int64_t keys = tokens * format.num_heads * format.head_dim;
    const std::int64_t values = format.is_latent ? 0 : tokens * format.num_heads * format.value_dim;
    std::vector<float> out(static_cast<std::size_t>(keys + values));
    if (out.empty()) return out;
    auto device = backend_->allocate(out.size() * sizeof(float));
    auto* data = reinterpret_cast<float*>(device.data());
    TensorView<float, 3> v;
    if (!format.is_latent) v = {data + keys, {tokens, format.num_heads, format.value_dim}};
    cache_.read(sequences_[sequence], 0, {0, tokens}, {data, {tokens, format.num_heads, format.head_dim}}, v,
                stream_);
    backend_->download(out.data(), data, out.size() * sizeof(float), stream_);
    backend_->synchronize(stream_);
    return out;
  }

  const LayerConfig& config() const { return layer_.config(); }
  const LayerWeights& weights() const { return layer_.weights(); }
  ShardedKVCache<B>& cache() { return cache_; }
  BatchBuffer<B>& batch() { return batch_; }
  typename B::Stream stream() const { return stream_; }

 private:
  static KvCacheSpec cache_spec(const Topology& topo, const Script& script, const LayerRunOptions& options) {
    const std::vector<std::int64_t> lengths = script.lengths();
    KvCacheSpec spec;
    spec.dtype = options.kv_dtype;
    spec.num_layers = 1;
    spec.page_tokens = options.page_tokens;
    spec.chunk = options.chunk;
    spec.max_sequences = std::max<std::int64_t>(1, script.sequences);
    spec.num_pages = std::max<std::int64_t>(
        1, PageLedger::pages_needed(KvLayout(topo.kvp(), options.chunk), options.page_tokens, lengths));
    return spec;
  }

  B* backend_;
  RankShape shape_;
  LayerRunOptions options_;
  typename B::Stream stream_;
  DeviceLayer<B> layer_;
  ShardedKVCache<B> cache_;
  KvpAllToAll<B> exchange_;
  HopB<B> hop_b_;
  BatchBuffer<B> batch_;
  typename B::Buffer workspace_;
  typename B::Buffer hidden_;
  std::vector<SequenceId> sequences_;
  std::int64_t tokens_ = 0;
};

/// The final results of one rank.
struct RankResult {
  std::vector<std::vector<float>> hidden;  // for each step
  std::vector<std::vector<float>> kv;      // for each sequence, from LayerRank::read_kv
  Range kv_heads;
  std::int64_t kvp_rank = 0;
  std::size_t kv_bytes = 0;  // of the pages that hold tokens
};

/// f32, relative to the oracle's scale: five times the largest error that was seen, with AVX-512.
inline constexpr double kLayerTolerance = 1.5e-6;

/// Largest difference from the oracle over all steps, relative to the oracle's largest value. NaN gives
/// infinity.
inline double error_of(const RankResult& result, const Expected& expected) {
  double worst = 0.0;
  double scale = 0.0;
  for (std::size_t s = 0; s < expected.hidden.size(); ++s) {
    if (result.hidden[s].size() != expected.hidden[s].size()) return HUGE_VAL;
    for (std::size_t i = 0; i < expected.hidden[s].size(); ++i) {
      const double difference = std::abs(expected.hidden[s][i] - double{result.hidden[s][i]});
      scale = std::max(scale, std::abs(expected.hidden[s][i]));
      worst = worse(worst, difference);
    }
  }
  return worst / scale;
}

/// Creates a rank's backend from its communicators: `stage`, ordered by stage_rank, and the KVP group split
/// off from it.
template <Backend B, SplittableComm Comm>
B make_backend(const Topology& topo, Comm stage) {
  Comm kvp = split_kvp(stage, topo);
  return B(std::move(stage), std::move(kvp));
}

/// Runs the script with one thread per rank, each with a communicator like LocalComm.
/// @throws with every rank's message if any rank fails.
template <Backend B = cpu::Backend<cpu::LocalComm>, SplittableComm LocalComm = cpu::LocalComm>
std::vector<RankResult> run_script(const Topology& topo, const oracle::Layer& layer, const Script& script,
                                   const LayerRunOptions& options) {
  std::vector<RankResult> results(static_cast<std::size_t>(topo.stage_size()));
  run_ranks_or_throw(LocalComm::create_group(topo.stage_size()), [&](LocalComm& comm) {
    B backend = make_backend<B>(topo, comm);
    LayerRank<B> rank(backend, topo, layer, script, options);
    RankResult& result = results[static_cast<std::size_t>(comm.rank())];
    for (const Step& step : script.steps) result.hidden.push_back(rank.run(step));
    for (std::size_t b = 0; b < static_cast<std::size_t>(script.sequences); ++b)
      result.kv.push_back(rank.read_kv(b));
    result.kv_heads = topo.kv_heads(comm.rank());
    result.kvp_rank = topo.stage_coordinates(comm.rank()).kvp_rank;
    result.kv_bytes = rank.cache().allocated_bytes();
  });
  return results;
}

}  // namespace helix::test
