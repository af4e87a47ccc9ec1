// SPDX-License-Identifier: Apache-2.0
// StageModel: one rank's part of a model (its pipeline stage's layers, its slices, its KV shard) and one step
// through it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

#include <helix/batch_buffer.hpp>
#include <helix/decode_layer.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>
#include <helix/vocabulary.hpp>

#include "captured_steps.hpp"
#include "generation.hpp"
#include "model_config.hpp"
#include "step_buffer.hpp"
#include "weights.hpp"

namespace helix::decode {

/// The tokens of one step on the host. Every stage of a replica gets the same.
struct Step {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> query_offsets{0};
  std::vector<SequenceId> sequences;         ///< one an entry of query_offsets
  std::vector<std::int32_t> logit_rows;      ///< tokens whose successor is drawn
  std::vector<std::uint64_t> draw_counters;  ///< one a logit row, unique over the generation
  bool is_decode = false;                    ///< steps of its shape may come again: worth to be captured

  friend bool operator==(const Step&, const Step&) = default;

  /// Empties it; keeps the memory.
  void clear() {
    tokens.clear();
    positions.clear();
    query_offsets.assign(1, 0);
    sequences.clear();
    logit_rows.clear();
    draw_counters.clear();
    is_decode = false;
  }
};

/// What a step drew, [logit rows].
struct Drawn {
  std::span<const std::int32_t> tokens;  ///< the same on all ranks of the replica
  std::span<const float> logit_norms;    ///< L2, of the logits; where StepOptions asks for them
};

/// Capacities, equal on all ranks.
struct StageLimits {
  std::int64_t max_sequences = 0;
  std::int64_t max_step_tokens = 0;
  std::int64_t max_logit_rows = 0;
  int max_slices = 8;
};

/// What stays the same from step to step. Equal on all ranks.
struct StepOptions {
  int hop_b_slices = 0;  ///< 0: chosen, 1: off
  SamplingConfig sampling{};
  bool has_logit_norms = false;  ///< of each logit row, on the last stage
  bool captures = true;  ///< replays decode steps of equal shapes where the backend and the ranks allow it
};

/// LayerConfig of layer `layer`, with `inverse_frequency` on the device.
LayerConfig layer_config(const ModelConfig& model, std::int64_t layer, const float* inverse_frequency);

/// Bytes of the buffers that the steps of one rank of `stage` work in, besides weights and cache.
template <Backend B>
struct StepWorkspace {
  std::size_t hidden = 0;
  std::size_t layer = 0;
  std::size_t head = 0;  ///< last stage only

  static StepWorkspace plan(B& backend, const Topology& topo, int stage, const ModelConfig& model,
                            const StageLimits& limits) {
    StepWorkspace bytes;
    bytes.hidden = static_cast<std::size_t>(limits.max_step_tokens * topo.shape().hidden) *
                   sizeof(typename B::Activation);
    bytes.layer = decode_layer_workspace_bytes(backend, topo, layer_config(model, 0, nullptr),
                                               limits.max_step_tokens, limits.max_slices);
    if (stage == topo.pp() - 1) bytes.head = VocabularyHead<B>::workspace_bytes(topo, limits.max_logit_rows);
    return bytes;
  }
  std::size_t total() const { return hidden + layer + head; }
};

/// One rank of one stage. Collective: all ranks of the replica build it and step it together.
///
/// A step has its batch and inputs copied to fixed addresses, and is then queued, or replayed where one of
/// its shape was captured. It ends by making the inputs of the step that feeds each drawn token at the next
/// position, for which nothing is copied then. With a communicator whose collectives one launch does for all
/// ranks, only a rank that is alone in its replica captures.
template <Backend B>
class StageModel {
 public:
  using T = typename B::Activation;
  using Stream = typename B::Stream;

  /// `pipeline`: the ranks of equal stage_rank, by stage; it outlives the model.
  StageModel(B& backend, const Topology& topo, int stage, const ModelConfig& model, StageWeights<B> weights,
             const KvCacheSpec& cache, const StageLimits& limits, const StepOptions& options,
             typename B::Comm& pipeline)
      : backend_(&backend),
        topo_(&topo),
        stage_(stage),
        options_(options),
        pipeline_(&pipeline),
        weights_(std::move(weights)),
        stream_(backend.create_stream()),
        inverse_frequency_(backend.allocate(model.inverse_frequencies().size() * sizeof(float))),
        cache_(backend, topo, cache),
        exchange_(backend, {.max_tokens = limits.max_step_tokens,
                            .num_query_heads = topo.query_heads(backend.comms().stage->rank()).size(),
                            .value_dim = topo.shape().value_dim}),
        hop_b_(backend, limits.max_slices),
        batch_(backend, limits.max_sequences, limits.max_step_tokens),
        buffer_(backend, limits.max_step_tokens, limits.max_logit_rows),
        decode_steps_(options.captures &&
                      (CapturesAlone<typename B::Comm> || topo.pp() * topo.stage_size() == 1)) {
    const std::vector<float> frequencies = model.inverse_frequencies();
    backend.upload(inverse_frequency_.data(), frequencies.data(), frequencies.size() * sizeof(float),
                   stream_);
    const Range layers = topo.layers(stage);
    for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
      configs_.push_back(
          layer_config(model, layer, reinterpret_cast<const float*>(inverse_frequency_.data())));
    }
    const auto bytes = StepWorkspace<B>::plan(backend, topo, stage, model, limits);
    hidden_ = backend.allocate(bytes.hidden);
    layer_workspace_ = backend.allocate(bytes.layer);
    head_workspace_ = backend.allocate(bytes.head);
    if (is_last()) {
      head_ = std::make_unique<VocabularyHead<B>>(backend, topo, weights_.final_norm, weights_.lm_head,
                                                  configs_.front().norm_epsilon);
    }
    backend.synchronize(stream_);
  }

  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ == topo_->pp() - 1; }
  bool has_logit_norms() const { return options_.has_logit_norms; }
  ShardedKVCache<B>& cache() { return cache_; }
  Stream stream() const { return stream_; }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(configs_.size()); }

  RankMemory memory() const {
    RankMemory memory;
    memory.weights_bytes = weights_.bytes();
    memory.kv_bytes = static_cast<std::int64_t>(cache_.allocated_bytes());
    memory.workspace_bytes = static_cast<std::int64_t>(hidden_.size_bytes() + layer_workspace_.size_bytes() +
                                                       head_workspace_.size_bytes());
    return memory;
  }

  /// Runs the step's tokens through this stage; the cache must hold the grown sequences already
  /// (cache().append). The hidden states come from the stage before and go to the one after over the
  /// pipeline; so do the tokens, one a logit row, that the last stage draws. Queued; finish() waits.
  void forward(const Step& step) {
    const auto num_tokens = static_cast<std::int64_t>(step.tokens.size());
    const auto num_rows = static_cast<std::int64_t>(step.logit_rows.size());
    if (step != next_) upload_inputs(step);
    const auto queue = [this, num_tokens, num_rows] { return queue_step(num_tokens, num_rows); };
    last_ = step.is_decode ? decode_steps_.run(step.query_offsets, num_rows, stream_, queue) : queue();
    next_ = step;
    for (std::int64_t& position : next_.positions) position += position >= 0 ? 1 : 0;
    for (std::uint64_t& counter : next_.draw_counters) ++counter;
  }

  /// Waits for the last forward(). @returns what it drew; valid until the next one. @throws the first
  /// failure.
  Drawn finish() {
    const auto num_rows = static_cast<std::int64_t>(next_.logit_rows.size());
    // Before the download, which may hold the thread until the stream gets there: only synchronize() ends a
    // wait for a rank that has failed.
    backend_->synchronize(stream_);
    buffer_.download(num_rows, stream_);
    backend_->synchronize(stream_);
    const Drawn drawn{buffer_.drawn(num_rows), buffer_.drawn_norms(num_rows)};
    std::ranges::copy(drawn.tokens, next_.tokens.begin());
    return drawn;
  }

  /// Bytes that the exchanges of the last forward() send to other ranks, all layers.
  std::int64_t sent_payload_bytes() const { return last_.sent_payload_bytes; }

  /// Steps that were replayed from a captured one.
  std::int64_t num_replayed_steps() const { return decode_steps_.num_replayed(); }

  /// Destroys the captured steps: before a communicator is aborted, which would wait for that. No step
  /// follows.
  void drop_captured_steps() noexcept { decode_steps_.clear(); }

  /// Last stage, after finish(): logits of the first `count` ids in one row of the last forward(), fewer
  /// where the vocabulary has fewer. Waits.
  std::vector<float> first_logits(std::int64_t row, std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(std::min(count, topo_->shape().vocab)));
    for (int rank = 0; rank < topo_->stage_size(); ++rank) {
      const Range shard = topo_->vocab(rank);
      const std::int64_t end = std::min(shard.end, std::ssize(values));
      if (end <= shard.begin) continue;
      const T* source = last_.logits.data() + rank * last_.logits.stride(0) + row * last_.logits.stride(1);
      backend_->download(values.data() + shard.begin, source,
                         static_cast<std::size_t>(end - shard.begin) * sizeof(T), stream_);
    }
    backend_->synchronize(stream_);
    return {values.begin(), values.end()};
  }

 private:
  /// What depends on a step's shape alone.
  struct StepResult {
    TensorView<const T, 3> logits{};  // views of the workspace; last stage only
    std::int64_t sent_payload_bytes = 0;
  };

  void upload_inputs(const Step& step) {
    slots_.clear();
    for (const SequenceId& sequence : step.sequences) slots_.push_back(cache_.slot(sequence));
    buffer_.set(step.tokens, step.logit_rows, step.draw_counters, stream_);
    batch_.set(step.query_offsets, step.positions, slots_, stream_);
  }

  /// Queues the step and the inputs of the next. Reads of the host nothing but shapes (invariant 10).
  StepResult queue_step(std::int64_t num_tokens, std::int64_t num_rows) {
    StepResult result;
    const Batch batch = batch_.batch();
    const TensorView<T, 2> hidden(reinterpret_cast<T*>(hidden_.data()), {num_tokens, topo_->shape().hidden});
    const auto hidden_bytes = hidden.size() * static_cast<std::int64_t>(sizeof(T));
    if (is_first()) {
      embed_tokens(*backend_, *topo_, buffer_.tokens(), weights_.embedding, hidden, stream_);
    } else {
      pipeline_->recv(hidden.data(), hidden_bytes, stage_ - 1, stream_);
    }
    const std::int64_t sent_before = exchange_.sent_payload_bytes();
    for (std::size_t layer = 0; layer < configs_.size(); ++layer) {
      decode_layer(*backend_, *topo_, configs_[layer], weights_.layers[layer],
                   cache_.layer(static_cast<int>(layer)), batch, hidden,
                   {.exchange = &exchange_,
                    .hop_b = &hop_b_,
                    .hop_b_slices = options_.hop_b_slices,
                    .workspace = {layer_workspace_.data(), layer_workspace_.size_bytes()}},
                   stream_);
    }
    result.sent_payload_bytes = exchange_.sent_payload_bytes() - sent_before;
    if (!is_last()) {
      pipeline_->send(hidden.data(), hidden_bytes, stage_ + 1, stream_);
    } else {
      result.logits = head_->logits(hidden, batch.positions, buffer_.rows(), num_rows,
                                    {head_workspace_.data(), head_workspace_.size_bytes()}, stream_);
      if (options_.has_logit_norms) head_->norms(result.logits, buffer_.norms(), stream_);
      head_->sample(result.logits, options_.sampling, buffer_.counters(), buffer_.tokens(), stream_);
    }
    if (topo_->pp() > 1 && num_rows > 0)
      pipeline_->broadcast(buffer_.tokens(), num_rows * static_cast<std::int64_t>(sizeof(std::int32_t)),
                           topo_->pp() - 1, stream_);
    batch_.advance(stream_);
    if (options_.sampling.temperature > 0.0f) buffer_.advance(num_rows, stream_);  // greedy: not read
    return result;
  }

  B* backend_;
  const Topology* topo_;
  int stage_;
  StepOptions options_;
  typename B::Comm* pipeline_;
  StageWeights<B> weights_;
  Stream stream_;
  typename B::Buffer inverse_frequency_;
  ShardedKVCache<B> cache_;
  KvpAllToAll<B> exchange_;
  HopB<B> hop_b_;
  BatchBuffer<B> batch_;
  StepBuffer<B> buffer_;
  typename B::Buffer hidden_;
  typename B::Buffer layer_workspace_;
  typename B::Buffer head_workspace_;
  std::unique_ptr<VocabularyHead<B>> head_;
  std::vector<LayerConfig> configs_;
  std::vector<std::int32_t> slots_;
  Step next_;  // whose inputs the device holds
  StepResult last_;
  CapturedSteps<B, StepResult> decode_steps_;  // destroyed first
};

}  // namespace helix::decode
