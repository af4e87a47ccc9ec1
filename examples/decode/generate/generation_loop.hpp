// SPDX-License-Identifier: Apache-2.0
// GenerationLoop: one rank's chunked prefill, then decode steps of one or several query tokens.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include <helix/error.hpp>

#include "generate/decode_totals.hpp"
#include "generate/fed_tokens.hpp"
#include "generate/gather_results.hpp"
#include "generate/generation.hpp"
#include "generate/measure.hpp"
#include "generate/progress.hpp"
#include "generate/request_plan.hpp"
#include "generate/roll_call.hpp"
#include "generate/step_builder.hpp"
#include "generate/synthetic_kv.hpp"
#include "model/stage_model.hpp"

namespace helix::decode {

/// One rank's loop over one request: prefill, decode, and collect the results.
template <DecoderBackend B>
class GenerationLoop {
 public:
  GenerationLoop(B& backend, typename B::Comm& world, const Topology& topo, const ModelConfig& config,
                 const GenerationRequest& request, StageModel<B>& model, const RootIo& io)
      : backend_(backend),
        world_(world),
        topo_(topo),
        config_(config),
        request_(request),
        model_(model),
        at_(topo.coordinates(world.rank())),
        show_progress_(io.show_progress && world.rank() == 0),
        reports_logits_(model.has_logit_norms()),
        roll_call_(backend, world, model.stream(), at_.replica, topo.pp() * topo.stage_size(),
                   io.meeting_interval) {
    const Range mine = replica_sequences(topo, request, at_.replica);
    for (std::int64_t index = mine.begin; index < mine.end; ++index) {
      SequenceProgress& sequence = sequences_.emplace_back();
      sequence.index = index;
      sequence.id = model.cache().add();
      sequence.counts = TokenCounts(request.penalties, {});
      if (request.synthetic_context > 0) continue;
      sequence.prompt = &request.prompts[static_cast<std::size_t>(index)];
      sequence.result.prompt = *sequence.prompt;
      sequence.counts = TokenCounts(request.penalties, *sequence.prompt);
    }
  }

  GenerationResult run() {
    const auto prefill_start = Clock::now();
    if (request_.synthetic_context > 0) {
      fill_synthetic_contexts();
    } else {
      prefill();
    }
    result_.timing.prefill_ms = milliseconds_since(prefill_start);
    decode();
    collect();
    return std::move(result_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void grow_cache() { model_.cache().append(step_.step().sequences, step_.counts(), model_.stream()); }

  /// Appends the step's tokens to the cache and runs the step.
  void run_step() {
    grow_cache();
    model_.forward(step_.step());
    drawn_ = model_.finish();
  }

  /// Appends the token drawn at logit row `row` to the sequence's result.
  void record(SequenceProgress& sequence, std::int64_t row) {
    const std::int32_t token = drawn_.tokens[static_cast<std::size_t>(row)];
    HELIX_EXPECTS(token >= 0, ErrorCode::invalid_argument, "the model gave no finite logits after ",
                  sequence.generated(), " tokens: its weights or activations have overflowed");
    sequence.pending = token;
    sequence.result.tokens.push_back(token);
    sequence.counts.add(token);
    const bool is_eos =
        !request_.ignore_eos && std::count(config_.eos_ids.begin(), config_.eos_ids.end(), token) > 0;
    sequence.is_done = is_eos || sequence.generated() >= request_.max_new_tokens;
    if (!reports_logits_) return;
    sequence.result.logits_norm.push_back(drawn_.logit_norms[static_cast<std::size_t>(row)]);
    const bool is_first = sequence.generated() == 1;
    if (!is_first && !sequence.is_done) return;
    auto& [first, last] = sequence.result.logits_first8;
    std::ranges::copy(drawn_.first_logits.subspan(static_cast<std::size_t>(row) * kFirstLogits, kFirstLogits),
                      last.begin());
    if (is_first) first = last;
  }

  void fill_synthetic_contexts() {
    const Range layers = topo_.layers(at_.stage);
    std::int64_t most_layers = 0;  // of a stage: a replica's ranks must have equally many pieces of work
    for (int stage = 0; stage < topo_.pp(); ++stage)
      most_layers = std::max(most_layers, topo_.layers(stage).size());
    for (SequenceProgress& sequence : sequences_) {
      model_.cache().append(sequence.id, request_.synthetic_context, model_.stream());
      fill_synthetic_kv(backend_, model_.cache(), sequence.id, request_.synthetic_context, layers,
                        topo_.kv_heads(at_.stage_rank), model_.stream(), show_progress_,
                        [this] { roll_call_.work_goes_on(); });
      for (std::int64_t layer = layers.size(); layer < most_layers; ++layer) roll_call_.work_goes_on();
      sequence.pending = kSyntheticFirstToken;
    }
  }

  /// Runs the prompts in chunks: every rank runs all tokens and stores those that it owns.
  void prefill() {
    std::int64_t total = 0;
    for (const SequenceProgress& sequence : sequences_)
      total += static_cast<std::int64_t>(sequence.prompt->size());
    Progress progress("prefill", total, show_progress_);
    for (std::int64_t done = 0; done < total; done += step_.num_tokens()) {
      step_.begin(/*is_decode=*/false);
      std::vector<SequenceProgress*> completed;
      std::int64_t room = request_.prefill_tokens;
      for (SequenceProgress& sequence : sequences_) {
        const auto length = static_cast<std::int64_t>(sequence.prompt->size());
        const std::int64_t count = std::min(room, length - sequence.prefilled);
        if (count == 0) continue;
        step_.add_tokens(
            sequence,
            std::span(*sequence.prompt)
                .subspan(static_cast<std::size_t>(sequence.prefilled), static_cast<std::size_t>(count)),
            sequence.prefilled);
        room -= count;
        sequence.prefilled += count;
        if (sequence.prefilled == length) {
          step_.add_logit_row(sequence, step_.num_tokens() - 1, request_.sampling);
          completed.push_back(&sequence);
        }
      }
      run_step();
      for (std::size_t row = 0; row < completed.size(); ++row)
        record(*completed[row], static_cast<std::int64_t>(row));
      progress.update(done + step_.num_tokens());
      roll_call_.work_goes_on();
    }
  }

  using Sequences = std::vector<SequenceProgress*>;

  /// Queues a decode step of all unfinished sequences, and returns these.
  Sequences queue_decode_step() {
    Sequences active;
    for (SequenceProgress& sequence : sequences_) {
      if (!sequence.is_done) active.push_back(&sequence);
    }
    if (active.empty()) return active;
    step_.begin(/*is_decode=*/true);
    for (const SequenceProgress* sequence : active) {
      const TokenIds tokens = fed_tokens(request_, *sequence);
      const std::int64_t first_row = step_.num_tokens();
      step_.add_tokens(*sequence, tokens, model_.cache().length(sequence->id));
      for (std::int64_t i = 0; i < std::ssize(tokens); ++i)
        step_.add_logit_row(*sequence, first_row + i, request_.sampling);
    }
    grow_cache();
    model_.forward(step_.step());
    return active;
  }

  /// Queues the step after that of `active` before its tokens are known, if it feeds exactly those tokens and
  /// only a token that ends a sequence can make it needless. Returns whether it did.
  bool queue_next_step(const Sequences& active) {
    const auto goes_on = [&](const SequenceProgress* sequence) {
      return !sequence->is_done && sequence->generated() + 1 < request_.max_new_tokens;
    };
    if (!feeds_drawn_tokens(request_) || !std::ranges::all_of(active, goes_on) || !model_.can_go_ahead())
      return false;
    grow_cache();
    model_.forward_next();
    return true;
  }

  void decode() {
    const std::int64_t total = request_.max_new_tokens * std::ssize(sequences_);
    Progress progress("decode", total, show_progress_);
    DecodeTotals totals;
    auto start = Clock::now();
    Sequences active = queue_decode_step();
    while (!active.empty()) {
      std::int64_t kv_tokens = 0;
      for (const SequenceProgress* sequence : active) kv_tokens += model_.cache().length(sequence->id);
      const bool is_ahead = queue_next_step(active);
      drawn_ = model_.finish();
      result_.exchange_bytes_per_rank_per_layer = model_.sent_payload_bytes() / model_.num_layers();
      std::int64_t decoded = 0;
      for (std::size_t i = 0; i < active.size(); ++i) decoded += accept(*active[i], i);
      // Otherwise the step was queued in vain.
      if (decoded > 0) totals.add(decoded, kv_tokens, milliseconds_since(start));
      progress.update(std::min(totals.decoded, total));
      roll_call_.work_goes_on();
      start = Clock::now();
      if (!is_ahead) active = queue_decode_step();
    }
    result_.captured_steps = model_.num_replayed_steps();
    totals.summarize(kv_bytes_per_token(request_, topo_), result_.timing);
  }

  /// Keeps the tokens of entry `entry` of the step that the model confirms, and truncates the cache to them.
  /// A step that was queued before the end of its sequence was known keeps nothing. Returns the number of
  /// tokens gained.
  std::int64_t accept(SequenceProgress& sequence, std::size_t entry) {
    const Step& step = step_.step();
    const std::int64_t first_row = step.query_offsets[entry];
    const std::int64_t fed = step_.counts()[entry];
    std::int64_t accepted = 0;
    while (
        !sequence.is_done && accepted < fed &&
        (accepted == 0 || step.tokens[static_cast<std::size_t>(first_row + accepted)] == sequence.pending)) {
      record(sequence, first_row + accepted);
      ++accepted;
    }
    if (accepted < fed)
      model_.cache().truncate(sequence.id, model_.cache().length(sequence.id) - fed + accepted);
    return accepted;
  }

  /// Each replica's sequences come from its rank that saw the logits. Replicas end at different times.
  void collect() {
    roll_call_.finish();
    std::vector<GeneratedSequence> own;
    if (reports_logits_) {
      for (SequenceProgress& sequence : sequences_) own.push_back(std::move(sequence.result));
    }
    RankMemory memory = model_.memory();
    memory.resident_bytes = peak_resident_bytes();
    result_.memory = gather_memory(backend_, world_, memory, model_.stream());
    result_.sequences = gather_sequences(backend_, world_, own, model_.stream());
  }

  B& backend_;
  typename B::Comm& world_;
  const Topology& topo_;
  const ModelConfig& config_;
  const GenerationRequest& request_;
  StageModel<B>& model_;
  RankCoordinates at_;
  bool show_progress_;
  // True on the first rank of the last stage, which reports for its replica.
  bool reports_logits_;
  RollCall<B> roll_call_;  // over all replicas
  std::vector<SequenceProgress> sequences_;
  StepBuilder step_;
  Drawn drawn_;  // of the last step
  GenerationResult result_;
};

}  // namespace helix::decode
