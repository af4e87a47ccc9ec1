// SPDX-License-Identifier: Apache-2.0
// StageModel: one rank's part of a model (its pipeline stage's layers, its weight slices, its KV shard), and
// the steps through it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <helix/batch_buffer.hpp>
#include <helix/embed_tokens.hpp>
#include <helix/rank_shape.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>
#include <helix/vocabulary_head.hpp>

#include "model/captured_steps.hpp"
#include "model/counted_step.hpp"
#include "model/first_logits.hpp"
#include "model/layer_stack.hpp"
#include "model/logit_extras.hpp"
#include "model/model_config.hpp"
#include "model/stage_plan.hpp"
#include "model/stage_weights.hpp"
#include "model/step.hpp"
#include "model/step_buffer.hpp"
#include "model/step_workspace.hpp"

namespace helix::decode {

/// One rank of one stage. Collective: all ranks of the replica construct it and run each step together.
///
/// A step copies its batch and inputs to fixed addresses. Its work is then queued, or replayed if a step of
/// this shape was captured. Each step ends by preparing the inputs of the following step, which feeds each
/// drawn token at the next position; such a step then copies nothing. If one launch runs a communicator's
/// collectives for all ranks, only a rank that is alone in its replica captures.
template <DecoderBackend B>
class StageModel {
 public:
  using T = typename B::Activation;
  using Stream = typename B::Stream;

  /// `pipeline` holds the ranks with equal stage_rank, by stage; it must outlive the model. Collective over
  /// the stage.
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
        bytes_(StepWorkspace<B>::plan(backend, topo, rank_shape(), stage, limits)),
        layers_(backend, topo, rank_shape(), topo.layers(stage), model, cache, limits, bytes_, stream_),
        batch_(backend, limits.max_sequences, limits.max_step_tokens),
        buffer_(backend, limits.max_step_tokens, limits.max_logit_rows),
        extras_(backend),
        hidden_(backend.allocate(bytes_.hidden)),
        head_workspace_(backend.allocate(bytes_.head)),
        decode_steps_(options.captures &&
                      (CapturesAlone<typename B::Comm> || topo.pp() * topo.stage_size() == 1)) {
    if (options.has_logit_norms)
      first_logits_ = std::make_unique<FirstLogits<B>>(backend, topo, limits.max_logit_rows, stream_);
    if (is_last()) {  // the last stage's layers return normed rows
      head_ = std::make_unique<VocabularyHead<B>>(backend, topo, WeightView{}, weights_.lm_head,
                                                  model.rms_norm_eps);
    }
    backend.synchronize(stream_);
  }

  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ == topo_->pp() - 1; }
  bool has_logit_norms() const { return options_.has_logit_norms; }
  ShardedKVCache<B>& cache() { return layers_.cache(); }
  Stream stream() const { return stream_; }
  std::int64_t num_layers() const { return layers_.num_layers(); }

  RankMemory memory() {
    return {.weights_bytes = weights_.buffer_bytes() + weights_.in_place_bytes(),
            .weights_in_place_bytes = weights_.in_place_bytes(),
            .kv_bytes = static_cast<std::int64_t>(cache().allocated_bytes()),
            .workspace_bytes = static_cast<std::int64_t>(bytes_.total())};
  }

  /// Runs steps of the given shapes on padding, which reads and writes no cache, or on an empty slot. This
  /// loads kernels, plans products, connects ranks, captures the decode step and replays it once. Collective
  /// over the replica; waits. The cache must be empty.
  void warm_up(const WarmUp& shapes) {
    if (shapes.prefill_tokens > 0)
      run_padding(1, shapes.prefill_tokens, shapes.is_random, /*is_decode=*/false);
    for (const std::int64_t length : shapes.prompts)
      run_prompt(length, std::min(length, shapes.prefill_tokens), shapes.is_random);
    for (int i = 0; i < 3 && shapes.sequences > 0; ++i)  // queue, capture, replay
      run_padding(shapes.sequences, shapes.decode_tokens, shapes.is_random, /*is_decode=*/true);
    num_warm_up_replays_ = decode_steps_.num_replayed();
  }

  /// Runs the step's tokens through this stage. The cache must already be grown by the step (cache().append).
  /// Hidden states arrive from the previous stage and go to the next stage over the pipeline. The last stage
  /// draws one token per logit row and sends the tokens to all stages. Queued; finish() waits.
  void forward(const Step& step) {
    ++num_steps_;
    if (step != next_) {
      slots_.clear();
      for (const SequenceId& sequence : step.sequences) slots_.push_back(cache().slot(sequence));
      upload_inputs(step);
    }
    run(step);
  }

  /// Allows forward_next() to be called before finish(). finish() then waits only for the last step, not for
  /// the one that forward_next() queues. Returns whether the backend supports this. Not for steps with
  /// penalties or log-probabilities.
  bool can_go_ahead() { return buffer_.queue_download(num_rows(), stream_); }

  /// Like forward(), for the step that feeds the tokens drawn by the last step, even if the host does not
  /// know them yet.
  void forward_next() {
    ++num_steps_;
    run(next_);
  }

  /// Waits for the last forward(); see can_go_ahead(). @returns what it drew, valid until the next finish().
  /// @throws the first failure.
  Drawn finish() {
    buffer_.take(num_rows(), stream_);
    const Drawn drawn{buffer_.drawn(num_rows()), buffer_.drawn_norms(num_rows()),
                      buffer_.drawn_first_logits(num_rows()), extras_.download(stream_)};
    std::ranges::copy(drawn.tokens, next_.tokens.begin());
    return drawn;
  }

  /// Bytes that the exchanges of the last forward() send to other ranks, over all layers.
  std::int64_t sent_payload_bytes() const { return sent_payload_bytes_; }

  /// Number of steps that were replayed from a captured one, except those of warm_up().
  std::int64_t num_replayed_steps() const { return decode_steps_.num_replayed() - num_warm_up_replays_; }

  /// Destroys the captured steps, because a communicator's abort would wait for them. No step may follow.
  void drop_captured_steps() noexcept { decode_steps_.clear(); }

 private:
  /// Number of logit rows of the last step.
  std::int64_t num_rows() const { return std::ssize(next_.logit_rows); }

  /// Copies the step's inputs to the device; slots_ must hold the slots of its sequences.
  void upload_inputs(const Step& step) {
    buffer_.set(step.tokens, step.logit_rows, step.draw_counters, step.sampling, stream_);
    batch_.set(step.query_offsets, step.positions, slots_, stream_, /*tells_lengths=*/!step.is_decode);
  }

  /// Queues or replays the step, whose inputs are on the device.
  void run(const Step& step) {
    const CountedStep<typename B::Comm> counted(*pipeline_, num_steps_);
    extras_.set(step, stream_);
    const StepShape shape{step.query_offsets, std::ssize(step.logit_rows), step.is_random()};
    const auto queue = [this, tokens = std::ssize(step.tokens), rows = shape.num_rows,
                        is_random = shape.is_random] { return queue_step(tokens, rows, is_random); };
    sent_payload_bytes_ =
        step.is_decode && !extras_.is_needed(step) ? decode_steps_.run(shape, stream_, queue) : queue();
    counted.end();
    if (&step != &next_) next_ = step;
    for (std::int64_t& position : next_.positions) position += position >= 0 ? 1 : 0;
    for (std::uint64_t& counter : next_.draw_counters) ++counter;
  }

  /// Runs the last `tokens` tokens of a prompt without a sequence. Slot 0 has no pages yet, so its rows are
  /// those of the spare page (PageTable), whatever they hold. The drawn tokens mean nothing.
  void run_prompt(std::int64_t length, std::int64_t tokens, bool is_random) {
    Step step = padding_step(1, tokens, is_random, /*is_decode=*/false);
    std::iota(step.positions.begin(), step.positions.end(), length - tokens);
    run_without_sequences(step);
  }

  void run_padding(std::int64_t sequences, std::int64_t tokens, bool is_random, bool is_decode) {
    run_without_sequences(padding_step(sequences, tokens, is_random, is_decode));
  }

  void run_without_sequences(const Step& step) {
    slots_.assign(step.query_offsets.size() - 1, 0);
    upload_inputs(step);
    run(step);
    finish();
  }

  RankShape rank_shape() const { return topo_->rank_shape(backend_->comms().stage->rank()); }

  /// Queues the step and the preparation of the next step's inputs. Reads only shapes from the host
  /// (invariant 10). Returns the bytes that its exchanges send, which depend only on the shape.
  std::int64_t queue_step(std::int64_t num_tokens, std::int64_t num_rows, bool is_random) {
    const Batch batch = batch_.batch();
    const TensorView<T, 2> hidden(reinterpret_cast<T*>(hidden_.data()), {num_tokens, topo_->shape().hidden});
    receive_hidden(hidden);
    const std::int64_t sent_before = layers_.sent_payload_bytes();
    const TensorView<T, 2> normed = layers_.queue(weights_, hidden, batch, options_.hop_b_slices, stream_);
    const std::int64_t sent = layers_.sent_payload_bytes() - sent_before;
    if (is_last()) {
      draw(normed, batch, num_rows, is_random);
    } else {
      pipeline_->send(hidden.data(), hidden.size() * kElementBytes, stage_ + 1, stream_);
    }
    if (topo_->pp() > 1 && num_rows > 0) {
      pipeline_->broadcast(buffer_.tokens(), num_rows * static_cast<std::int64_t>(sizeof(std::int32_t)),
                           topo_->pp() - 1, stream_);
      extras_.broadcast(*pipeline_, topo_->pp() - 1, stream_);
    }
    batch_.advance(stream_);
    if (is_random) buffer_.advance(num_rows, stream_);  // greedy decoding does not read the counters
    return sent;
  }

  void receive_hidden(TensorView<T, 2> hidden) {
    if (is_first()) {
      embed_tokens(*backend_, *topo_, buffer_.tokens(), weights_.embedding, hidden, stream_);
    } else {
      pipeline_->recv(hidden.data(), hidden.size() * kElementBytes, stage_ - 1, stream_);
    }
  }

  /// Whether rank 0's part of the logits holds all first logits that reports show. Equal on all ranks.
  bool has_first_logits_on_rank_0() const {
    return topo_->vocab(0).end >= std::min(std::int64_t{kFirstLogits}, topo_->shape().vocab);
  }

  /// Draws the tokens of the step's logit rows, and computes the requested extras. Last stage only.
  void draw(TensorView<T, 2> normed, const Batch& batch, std::int64_t num_rows, bool is_random) {
    const std::span<std::byte> workspace(head_workspace_.data(), head_workspace_.size_bytes());
    if (!is_random && extras_.is_empty() && has_first_logits_on_rank_0()) {
      const auto own =
          head_->draw_greedy(normed, batch.positions, buffer_.rows(), num_rows, workspace, buffer_.tokens(),
                             options_.has_logit_norms ? buffer_.norms() : nullptr, stream_);
      if (options_.has_logit_norms) first_logits_->keep(own, buffer_.first_logits(), stream_);
      return;
    }
    const auto logits = head_->logits(normed, batch.positions, buffer_.rows(), num_rows, workspace, stream_);
    if (options_.has_logit_norms) {
      head_->norms(logits, buffer_.norms(), stream_);
      first_logits_->keep(logits, buffer_.first_logits(), stream_);
    }
    extras_.penalize(*head_, logits, stream_);
    head_->sample(logits, buffer_.configs(), buffer_.counters(), buffer_.tokens(), stream_);
    extras_.find_log_probs(*head_, logits, buffer_.tokens(), stream_);
  }

  static constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(T));

  B* backend_;
  const Topology* topo_;
  int stage_;
  StepOptions options_;
  typename B::Comm* pipeline_;
  StageWeights<B> weights_;
  Stream stream_;
  StepWorkspace<B> bytes_;
  LayerStack<B> layers_;
  BatchBuffer<B> batch_;
  StepBuffer<B> buffer_;
  LogitExtras<B> extras_;
  typename B::Buffer hidden_;
  typename B::Buffer head_workspace_;
  std::unique_ptr<VocabularyHead<B>> head_;
  std::unique_ptr<FirstLogits<B>> first_logits_;
  std::vector<std::int32_t> slots_;
  Step next_;  // the step whose inputs are on the device
  std::uint64_t num_steps_ = 0;
  std::int64_t num_warm_up_replays_ = 0;
  std::int64_t sent_payload_bytes_ = 0;
  CapturedSteps<B, std::int64_t> decode_steps_;  // destroyed first
};

}  // namespace helix::decode
