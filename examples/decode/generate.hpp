// SPDX-License-Identifier: Apache-2.0
// generate(): the generation loop of one rank: prefill in chunks, then decode steps of one or several query
// tokens.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <iterator>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint.hpp"
#include "generation.hpp"
#include "progress.hpp"
#include "stage_model.hpp"
#include "synthetic_kv.hpp"

namespace helix::decode {

/// The groups that the loop talks to besides the stage's own. All split from one world communicator.
template <class Comm>
struct WorldComms {
  Comm world;
  Comm pipeline;  ///< same stage_rank, by stage
  Comm stage;
  Comm kvp;

  /// Collective over `world`.
  static WorldComms split(Comm world, const Topology& topo) {
    const RankCoordinates at = topo.coordinates(world.rank());
    const int n = topo.stage_size();
    Comm pipeline = world.split(at.replica * n + at.stage_rank, at.stage);
    Comm stage = world.split(at.replica * topo.pp() + at.stage, at.stage_rank);
    Comm kvp = stage.split(at.tpa_rank, at.kvp_rank);
    return {std::move(world), std::move(pipeline), std::move(stage), std::move(kvp)};
  }
};

/// Sequences of the request that `replica` generates.
inline Range replica_sequences(const Topology& topo, const GenerationRequest& request, int replica) {
  return split_evenly(request.num_sequences(), topo.dp(), replica);
}

/// Checks the request against the model, on values that all ranks share.
/// @throws Error(invalid_argument) naming the sequence and the values.
void check_request(const GenerationRequest& request, const ModelConfig& model, const Topology& topo);

/// The cache that `stage` of `replica` needs for the request: pages for the longest that each sequence gets.
KvCacheSpec plan_cache(const GenerationRequest& request, const Topology& topo, int stage, int replica);

/// Bytes of the pages that the rank at `at` needs for `sequence` of the request at its longest, all layers of
/// its stage.
std::int64_t planned_kv_bytes(const GenerationRequest& request, const Topology& topo,
                              const RankCoordinates& at, std::int64_t sequence);

/// Bytes of K and V that one token of context adds over all layers and all ranks of a replica.
std::int64_t kv_bytes_per_token(const GenerationRequest& request, const Topology& topo);

/// Capacities of the request's steps on `replica`.
StageLimits plan_limits(const GenerationRequest& request, const Topology& topo, int replica);

namespace detail {

/// One sequence's progress, the same on all ranks of a replica.
struct SequenceProgress {
  SequenceId id;
  const TokenIds* prompt = nullptr;
  std::int64_t index = 0;  // in the request
  std::int64_t prefilled = 0;
  std::int32_t pending = 0;  // drawn, not yet in the cache
  bool is_done = false;
  GeneratedSequence result;

  std::int64_t generated() const { return static_cast<std::int64_t>(result.tokens.size()); }
};

inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// Every rank's bytes on every rank, by rank. Collective. Waits before it downloads too: a download to
/// ordinary host memory may hold the thread until the stream gets there, and only synchronize() ends a wait
/// for a rank that has failed.
template <Backend B>
std::vector<std::vector<std::byte>> gather_bytes(B& backend, typename B::Comm& comm,
                                                 std::span<const std::byte> mine, typename B::Stream stream) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto my_bytes = static_cast<std::int64_t>(mine.size());
  auto counts_device = backend.allocate((size + 1) * sizeof(std::int64_t));
  backend.upload(counts_device.data(), &my_bytes, sizeof(my_bytes), stream);
  comm.all_gather(counts_device.data(), counts_device.data() + sizeof(std::int64_t), sizeof(std::int64_t),
                  stream);
  backend.synchronize(stream);
  std::vector<std::int64_t> counts(size);
  backend.download(counts.data(), counts_device.data() + sizeof(std::int64_t), size * sizeof(std::int64_t),
                   stream);
  backend.synchronize(stream);

  const std::int64_t widest = std::max<std::int64_t>(1, *std::max_element(counts.begin(), counts.end()));
  auto device = backend.allocate(static_cast<std::size_t>(widest) * (size + 1));
  backend.upload(device.data(), mine.data(), mine.size(), stream);
  comm.all_gather(device.data(), device.data() + widest, widest, stream);
  backend.synchronize(stream);
  std::vector<std::vector<std::byte>> all(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    all[rank].resize(static_cast<std::size_t>(counts[rank]));
    backend.download(all[rank].data(), device.data() + widest * (static_cast<std::int64_t>(rank) + 1),
                     all[rank].size(), stream);
  }
  backend.synchronize(stream);
  return all;
}

std::vector<std::byte> serialize(const std::vector<GeneratedSequence>& sequences);
std::vector<GeneratedSequence> deserialize(std::span<const std::byte> bytes);

/// Most memory that this process has had resident.
std::int64_t peak_resident_bytes();

/// Median and 99th percentile.
std::pair<double, double> median_and_p99(std::vector<double> values);

/// One rank's loop over one request: prefill, decode, collect.
template <Backend B>
class GenerationLoop {
 public:
  GenerationLoop(B& backend, WorldComms<typename B::Comm>& comms, const Topology& topo,
                 const ModelConfig& config, const GenerationRequest& request, StageModel<B>& model,
                 bool show_progress)
      : backend_(backend),
        comms_(comms),
        topo_(topo),
        config_(config),
        request_(request),
        model_(model),
        at_(topo.coordinates(comms.world.rank())),
        show_progress_(show_progress),
        reports_logits_(model.has_logit_norms()) {
    const Range mine = replica_sequences(topo, request, at_.replica);
    for (std::int64_t index = mine.begin; index < mine.end; ++index) {
      SequenceProgress& sequence = sequences_.emplace_back();
      sequence.index = index;
      sequence.id = model.cache().add();
      if (request.synthetic_context > 0) continue;
      sequence.prompt = &request.prompts[static_cast<std::size_t>(index)];
      sequence.result.prompt = *sequence.prompt;
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

  /// Adds `tokens` of one sequence, from position `first`, to the step.
  void add_tokens(const SequenceProgress& sequence, std::span<const std::int32_t> tokens,
                  std::int64_t first) {
    for (std::int32_t token : tokens) {
      step_.tokens.push_back(token);
      step_.positions.push_back(first++);
    }
    step_.query_offsets.push_back(static_cast<std::int32_t>(step_.tokens.size()));
    step_.sequences.push_back(sequence.id);
    counts_.push_back(static_cast<std::int64_t>(tokens.size()));
  }

  /// Asks for the successor of the token at `row` of the step.
  void add_logit_row(const SequenceProgress& sequence, std::int64_t row) {
    step_.logit_rows.push_back(static_cast<std::int32_t>(row));
    step_.draw_counters.push_back(static_cast<std::uint64_t>(sequence.index) << 40 |
                                  static_cast<std::uint64_t>(step_.positions[static_cast<std::size_t>(row)]));
  }

  void begin_step() {
    step_.clear();
    counts_.clear();
  }

  /// Grows the cache by the step and runs it.
  void run_step() {
    model_.cache().append(step_.sequences, counts_, model_.stream());
    model_.forward(step_);
    drawn_ = model_.finish();
  }

  /// Takes the token drawn at logit row `row` into the sequence's result.
  void record(SequenceProgress& sequence, std::int64_t row) {
    const std::int32_t token = drawn_.tokens[static_cast<std::size_t>(row)];
    sequence.pending = token;
    sequence.result.tokens.push_back(token);
    const bool is_eos =
        !request_.ignore_eos && std::count(config_.eos_ids.begin(), config_.eos_ids.end(), token) > 0;
    sequence.is_done = is_eos || sequence.generated() >= request_.max_new_tokens;
    if (!reports_logits_) return;
    sequence.result.logits_norm.push_back(drawn_.logit_norms[static_cast<std::size_t>(row)]);
    const bool is_first = sequence.generated() == 1;
    if (!is_first && !sequence.is_done) return;
    auto& [first, last] = sequence.result.logits_first8;
    const std::vector<float> logits = model_.first_logits(row, std::ssize(last));
    std::ranges::copy(logits, last.begin());
    if (is_first) first = last;
  }

  void fill_synthetic_contexts() {
    const Range layers = topo_.layers(at_.stage);
    for (SequenceProgress& sequence : sequences_) {
      const std::array ids{sequence.id};
      const std::array counts{request_.synthetic_context};
      model_.cache().append(ids, counts, model_.stream());
      fill_synthetic_kv(backend_, model_.cache(), sequence.id, request_.synthetic_context, layers,
                        topo_.kv_heads(at_.stage_rank), model_.stream(), show_progress_);
      sequence.pending = kSyntheticFirstToken;
    }
  }

  /// Prompts in chunks: every rank runs all tokens and stores what it owns.
  void prefill() {
    std::int64_t total = 0;
    for (const SequenceProgress& sequence : sequences_)
      total += static_cast<std::int64_t>(sequence.prompt->size());
    Progress progress("prefill", total, show_progress_);
    for (std::int64_t done = 0; done < total; done += static_cast<std::int64_t>(step_.tokens.size())) {
      begin_step();
      std::vector<SequenceProgress*> completed;
      std::int64_t room = request_.prefill_tokens;
      for (SequenceProgress& sequence : sequences_) {
        const auto length = static_cast<std::int64_t>(sequence.prompt->size());
        const std::int64_t count = std::min(room, length - sequence.prefilled);
        if (count == 0) continue;
        add_tokens(
            sequence,
            std::span(*sequence.prompt)
                .subspan(static_cast<std::size_t>(sequence.prefilled), static_cast<std::size_t>(count)),
            sequence.prefilled);
        room -= count;
        sequence.prefilled += count;
        if (sequence.prefilled == length) {
          add_logit_row(sequence, static_cast<std::int64_t>(step_.tokens.size()) - 1);
          completed.push_back(&sequence);
        }
      }
      run_step();
      for (std::size_t row = 0; row < completed.size(); ++row)
        record(*completed[row], static_cast<std::int64_t>(row));
      progress.update(done);
    }
  }

  std::optional<std::int32_t> teacher_token(const SequenceProgress& sequence, std::int64_t i) const {
    const auto index = static_cast<std::size_t>(sequence.index);
    if (index >= request_.teacher.size() || i < 0 || i >= std::ssize(request_.teacher[index]))
      return std::nullopt;
    return request_.teacher[index][static_cast<std::size_t>(i)];
  }

  /// What a decode step feeds: the pending token (or the teacher's, when forcing), then drafts.
  TokenIds decode_tokens(const SequenceProgress& sequence) const {
    const std::int64_t generated = sequence.generated();
    if (request_.draft_tokens == 1)
      return {teacher_token(sequence, generated - 1).value_or(sequence.pending)};
    TokenIds tokens{sequence.pending};
    while (std::ssize(tokens) < request_.draft_tokens &&
           generated + std::ssize(tokens) < request_.max_new_tokens) {
      const auto draft = teacher_token(sequence, generated + std::ssize(tokens) - 1);
      if (!draft) break;
      tokens.push_back(*draft);
    }
    return tokens;
  }

  void decode() {
    const double kv_token_bytes = static_cast<double>(kv_bytes_per_token(request_, topo_));
    const std::int64_t total = request_.max_new_tokens * std::ssize(sequences_);
    Progress progress("decode", total, show_progress_);
    std::vector<double> step_ms;
    double kv_bytes_read = 0.0;
    std::int64_t decoded = 0;
    std::vector<SequenceProgress*> active;
    while (true) {
      active.clear();
      for (SequenceProgress& sequence : sequences_) {
        if (!sequence.is_done) active.push_back(&sequence);
      }
      if (active.empty()) break;
      const auto start = Clock::now();
      begin_step();
      step_.is_decode = true;
      for (const SequenceProgress* sequence : active) {
        const std::int64_t length = model_.cache().length(sequence->id);
        const TokenIds tokens = decode_tokens(*sequence);
        const std::int64_t first_row = std::ssize(step_.tokens);
        add_tokens(*sequence, tokens, length);
        for (std::int64_t i = 0; i < std::ssize(tokens); ++i) add_logit_row(*sequence, first_row + i);
        kv_bytes_read += static_cast<double>(length + std::ssize(tokens)) * kv_token_bytes;
      }
      run_step();
      result_.exchange_bytes_per_rank_per_layer = model_.sent_payload_bytes() / model_.num_layers();
      for (std::size_t i = 0; i < active.size(); ++i) decoded += accept(*active[i], i);
      step_ms.push_back(milliseconds_since(start));
      progress.update(std::min(decoded, total));
    }
    result_.captured_steps = model_.num_replayed_steps();
    summarize(step_ms, decoded, kv_bytes_read);
  }

  /// Keeps what the model confirms of entry `entry` of the step, and truncates the cache to it. Returns the
  /// tokens gained.
  std::int64_t accept(SequenceProgress& sequence, std::size_t entry) {
    const std::int64_t first_row = step_.query_offsets[entry];
    const std::int64_t fed = counts_[entry];
    std::int64_t accepted = 0;
    do {
      record(sequence, first_row + accepted);
      ++accepted;
    } while (!sequence.is_done && accepted < fed &&
             step_.tokens[static_cast<std::size_t>(first_row + accepted)] == sequence.pending);
    if (accepted < fed) {
      model_.cache().truncate(sequence.id, model_.cache().length(sequence.id) - fed + accepted,
                              model_.stream());
    }
    return accepted;
  }

  void summarize(const std::vector<double>& step_ms, std::int64_t decoded, double kv_bytes_read) {
    double decode_ms = 0.0;
    for (double ms : step_ms) decode_ms += ms;
    if (step_ms.empty() || decode_ms == 0.0) return;
    std::tie(result_.timing.ttl_median_ms, result_.timing.ttl_p99_ms) = median_and_p99(step_ms);
    result_.timing.tokens_per_s = static_cast<double>(decoded) / decode_ms * 1e3;
    result_.timing.kv_gb_per_s = kv_bytes_read / decode_ms * 1e-6;
  }

  /// Memory from all ranks, sequences from the rank of each replica that saw the logits, on every rank.
  void collect() {
    RankMemory memory = model_.memory();
    memory.resident_bytes = peak_resident_bytes();
    for (const auto& bytes :
         gather_bytes(backend_, comms_.world, std::as_bytes(std::span(&memory, 1)), model_.stream())) {
      std::memcpy(&result_.memory.emplace_back(), bytes.data(), sizeof(RankMemory));
    }
    std::vector<GeneratedSequence> own;
    if (reports_logits_) {
      for (SequenceProgress& sequence : sequences_) own.push_back(std::move(sequence.result));
    }
    for (const auto& bytes : gather_bytes(backend_, comms_.world, serialize(own), model_.stream())) {
      for (GeneratedSequence& sequence : deserialize(bytes)) result_.sequences.push_back(std::move(sequence));
    }
  }

  B& backend_;
  WorldComms<typename B::Comm>& comms_;
  const Topology& topo_;
  const ModelConfig& config_;
  const GenerationRequest& request_;
  StageModel<B>& model_;
  RankCoordinates at_;
  bool show_progress_;
  bool reports_logits_;  // the last stage's first rank does, for its replica
  std::vector<SequenceProgress> sequences_;
  Step step_;
  std::vector<std::int64_t> counts_;  // tokens of each entry of step_
  Drawn drawn_;                       // by the last step
  GenerationResult result_;
};

}  // namespace detail

/// Loads this rank's weights, then generates. Collective over comms.world; every rank passes the same
/// request. The result is complete on every rank. A failure aborts the world, so that no rank waits for this
/// one, and is rethrown.
template <Backend B>
GenerationResult generate(B& backend, WorldComms<typename B::Comm>& comms, const Topology& topo,
                          const Checkpoint& checkpoint, const ModelConfig& config,
                          const GenerationRequest& request, bool show_progress) {
  check_request(request, config, topo);
  const RankCoordinates at = topo.coordinates(comms.world.rank());
  show_progress = show_progress && at.world_rank == 0;
  try {
    const auto load_start = std::chrono::steady_clock::now();
    StageWeights<B> weights = [&] {
      Progress progress("weights", 1000, show_progress);
      return load_stage_weights(backend, config, checkpoint, topo, at.world_rank, backend.create_stream(),
                                [&](std::int64_t done, std::int64_t total) {
                                  progress.update(total > 0 ? done * 1000 / total : 1000);
                                });
    }();
    StageModel<B> model(backend, topo, at.stage, config, std::move(weights),
                        plan_cache(request, topo, at.stage, at.replica),
                        plan_limits(request, topo, at.replica),
                        {.hop_b_slices = request.hop_b_slices,
                         .sampling = request.sampling,
                         .has_logit_norms = at.stage == topo.pp() - 1 && at.stage_rank == 0,
                         .captures = request.cuda_graphs},
                        comms.pipeline);
    const double load_ms = detail::milliseconds_since(load_start);
    try {
      GenerationResult result =
          detail::GenerationLoop<B>(backend, comms, topo, config, request, model, show_progress).run();
      result.timing.load_ms = load_ms;
      return result;
    } catch (const std::exception& error) {
      model.drop_captured_steps();
      comms.world.abort(error.what());  // before the model's streams drain: they may wait for other ranks
      throw;
    }
  } catch (const std::exception& error) {
    comms.world.abort(error.what());
    throw;
  }
}

}  // namespace helix::decode
