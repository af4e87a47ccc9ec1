// SPDX-License-Identifier: Apache-2.0
// VocabularyHead: final norm, LM head and sampling, split over the vocabulary.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <helix/backend/optional.hpp>
#include <helix/backend/vocabulary.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/topology.hpp>
#include <helix/workspace.hpp>

namespace helix {
namespace detail {

/// Throws Error(invalid_argument) unless `rows` is in [0, kMaxStepTokens].
inline void check_num_rows(std::int64_t rows) {
  HELIX_EXPECTS(rows >= 0 && rows <= kMaxStepTokens, ErrorCode::invalid_argument, "VocabularyHead: ", rows,
                " rows; they must be in [0, ", kMaxStepTokens, "]");
}

}  // namespace detail

/// Final norm, LM head and sampling of one rank. A rank that skipped or repeated a step is an
/// Error(out_of_step) on the stream, not a wrong token (invariant 13), unless the next step has the same
/// positions (exchange_epoch()). An error of one rank alone (its workspace, its addresses, a failure of its
/// backend) leaves the others waiting in the gather. Its caller must then call the stage's abort(), which
/// wakes them; else they get Error(timeout). Not thread-safe: all ranks must queue logits() and draw_greedy()
/// in the same order, and one stream, or events, must order these calls. After a move each use of the old
/// object is Error(invalid_argument).
template <VocabularyBackend B>
class VocabularyHead {
 public:
  using T = typename B::Activation;

  /// Takes the weights of this rank: `final_norm` [1, M], or empty if rows reach logits() normed, as
  /// decode_layer's next_norm leaves them; `lm_head` [Topology::vocab rows, M]. Local. Waits for the upload
  /// of a few numbers, and keeps the backend's address.
  /// @throws Error(invalid_argument) if the stage communicator is not the topology's, lm_head is not this
  /// rank's shard or has no address, final_norm has another shape, either is not f32, f16 or bf16, or
  /// norm_epsilon is below 0 or not finite; Error(capacity) if the memory cannot be had.
  VocabularyHead(B& backend, const Topology& topology, WeightView final_norm, WeightView lm_head,
                 float norm_epsilon)
      : backend_(&backend),
        final_norm_(final_norm),
        lm_head_(lm_head),
        norm_epsilon_(norm_epsilon),
        ranks_(checked_ranks(backend, topology)),
        rank_(backend.comms().stage->rank()),
        width_(width_of(topology)),
        state_(backend.allocate(static_cast<std::size_t>(ranks_ + 2) * sizeof(std::int64_t))) {
    const Range shard = topology.vocab(rank_);
    HELIX_EXPECTS(lm_head.rows == shard.size() && lm_head.cols == topology.shape().hidden,
                  ErrorCode::invalid_argument, "VocabularyHead: lm_head is [", lm_head.rows, ", ",
                  lm_head.cols, "]; this rank's shard is [", shard.size(), ", ", topology.shape().hidden,
                  "]");
    detail::check_given("VocabularyHead", "lm_head", lm_head.data, lm_head.rows);
    HELIX_EXPECTS(final_norm.empty() || (final_norm.rows == 1 && final_norm.cols == lm_head.cols),
                  ErrorCode::invalid_argument, "VocabularyHead: final_norm is [", final_norm.rows, ", ",
                  final_norm.cols, "]; it must be [1, ", lm_head.cols, "] or empty");
    detail::check_weight_data("VocabularyHead", "lm_head", lm_head);
    detail::check_weight_data("VocabularyHead", "final_norm", final_norm);
    detail::check_epsilon("VocabularyHead", "norm_epsilon", norm_epsilon);
    // Device state: [0] the number of gathers so far, [1 ..] where each rank's ids begin.
    std::vector<std::int64_t> begins(static_cast<std::size_t>(ranks_ + 1));
    for (int r = 0; r < ranks_; ++r) begins[static_cast<std::size_t>(r)] = topology.vocab(r).begin;
    begins.back() = topology.shape().vocab;
    typename B::Stream stream = backend.create_stream();
    backend.upload(state_.data() + sizeof(std::int64_t), begins.data(), begins.size() * sizeof(std::int64_t),
                   stream);
    backend.synchronize(stream);
  }

  /// Logits of all ranks, [N, rows, width]: shard s holds ids [begins[s], begins[s+1]) in its first columns.
  /// A view of the workspace.
  using Logits = TensorView<T, 3>;

  /// Bytes that logits() needs for up to `rows` rows, at an address that is a multiple of 16.
  /// @throws Error(invalid_argument) unless rows is in [0, kMaxStepTokens].
  static std::size_t workspace_bytes(const Topology& topology, std::int64_t rows) {
    detail::check_num_rows(rows);
    WorkspaceArena measure;
    carve(topology.stage_size(), width_of(topology), topology.shape().hidden, rows, measure);
    return measure.used_bytes();
  }

  /// Computes the logits after the tokens `rows` (device, [num_rows] indices into hidden [tokens, M]).
  /// `positions` of all tokens (device, [tokens], global, or null) tell this step from the one before.
  /// Collective over the stage, with equal tokens, positions and num_rows on all ranks; queued on `stream`,
  /// allocates nothing, capturable.
  ///
  /// If num_rows differs between ranks, the gather fails as the communicator does for unequal sizes:
  /// Error(invalid_argument), Error(out_of_step) or Error(timeout). A rank with no rows does not enter it, so
  /// the others get Error(timeout).
  /// @throws Error(invalid_argument) unless num_rows is in [0, kMaxStepTokens], or if with rows hidden is not
  /// M wide with a last stride of 1, an address is missing or the workspace's is not a multiple of 16;
  /// Error(capacity) if `workspace` is smaller than workspace_bytes(topology, num_rows).
  Logits logits(TensorView<T, 2> hidden, const std::int64_t* positions, const std::int32_t* rows,
                std::int64_t num_rows, std::span<std::byte> workspace, typename B::Stream stream) {
    const Shard shard = multiply(hidden, rows, num_rows, workspace, stream);
    return gather(shard, hidden.extent(0), positions, stream);
  }

  /// Logits of this rank's shard, [1, rows, width of the shard]. A view of the workspace; not to be passed
  /// where Logits are expected.
  using OwnLogits = TensorView<T, 3>;

  /// Draws the likeliest token of each row into `tokens` (device, [num_rows]), equal on all ranks, as
  /// logits() and a greedy sample() would. If `norms` (device, [num_rows]) is not null, it gets what norms()
  /// gives. A backend with choose_greedy() leaves the logits where they are; with any other they are
  /// gathered. Collective over the stage, with equal tokens, positions and num_rows on all ranks; queued on
  /// `stream`, allocates nothing, capturable. If num_rows differs, ranks fail as in logits(); with
  /// choose_greedy() over windows, those with more rows get Error(timeout).
  /// @throws what logits() throws.
  OwnLogits draw_greedy(TensorView<T, 2> hidden, const std::int64_t* positions, const std::int32_t* rows,
                        std::int64_t num_rows, std::span<std::byte> workspace, std::int32_t* tokens,
                        float* norms, typename B::Stream stream) {
    detail::check_given("VocabularyHead", "tokens", tokens, num_rows);
    const Shard shard = multiply(hidden, rows, num_rows, workspace, stream);
    const OwnLogits own(shard.logits.data(), {1, num_rows, lm_head_.rows}, {0, shard.logits.stride(0), 1});
    if (num_rows == 0 ||
        choose_apart({own, shard_begins() + rank_, hidden.extent(0), positions, tokens, norms}, stream))
      return own;
    const Logits logits = gather(shard, hidden.extent(0), positions, stream);
    if (norms != nullptr) this->norms(logits, norms, stream);
    sample(logits, nullptr, nullptr, tokens, stream);
    return own;
  }

  /// Applies `count` penalties (device) to `logits`. Local; queued on `stream`.
  /// @throws Error(invalid_argument) if count is below 0, the logits do not have the shape that logits()
  /// gives, or an address is missing.
  void penalize(Logits logits, const LogitPenalty* penalties, std::int64_t count, typename B::Stream stream) {
    check_logits("penalize", logits);
    HELIX_EXPECTS(count >= 0, ErrorCode::invalid_argument, "VocabularyHead::penalize: count is ", count,
                  "; it must be at least 0");
    detail::check_given("VocabularyHead::penalize", "penalties", penalties, count);
    if (count == 0) return;
    backend_->penalize(
        PenalizeArgs<T>{
            .logits = logits, .shard_begins = shard_begins(), .penalties = penalties, .count = count},
        stream);
  }

  /// Draws one token for each row of `logits` into `tokens` (device, [rows]), equal on all ranks, by the
  /// row's config (device, [rows], each of which check_sampling() accepts; null: all rows are greedy).
  /// `counters` (device, [rows]) makes each draw its own; it may be null if `configs` is. Local; queued on
  /// `stream`.
  /// @throws Error(invalid_argument) if the logits do not have the shape that logits() gives, or an address
  /// is missing.
  void sample(Logits logits, const SamplingConfig* configs, const std::uint64_t* counters,
              std::int32_t* tokens, typename B::Stream stream) {
    check_logits("sample", logits);
    detail::check_given("VocabularyHead::sample", "tokens", tokens, logits.extent(1));
    if (configs != nullptr)
      detail::check_given("VocabularyHead::sample", "counters", counters, logits.extent(1));
    if (logits.extent(1) == 0) return;
    backend_->sample(SampleArgs<T>{.logits = logits,
                                   .shard_begins = shard_begins(),
                                   .configs = configs,
                                   .counters = counters,
                                   .tokens = tokens},
                     stream);
  }

  /// Writes the log-probabilities of `tokens` (device, [rows]) to `log_probs` (device, [rows]), and the
  /// num_best likeliest ids with theirs to `best_ids` and `best_log_probs` (device, [rows, num_best]); see
  /// LogProbsArgs. Local; queued on `stream`.
  /// @throws Error(invalid_argument) if num_best is not in [0, kMaxVocabulary], the logits do not have the
  /// shape that logits() gives, or an address is missing.
  void log_probs(Logits logits, const std::int32_t* tokens, std::int64_t num_best, float* log_probs,
                 std::int32_t* best_ids, float* best_log_probs, typename B::Stream stream) {
    check_logits("log_probs", logits);
    HELIX_EXPECTS(num_best >= 0 && num_best <= kMaxVocabulary, ErrorCode::invalid_argument,
                  "VocabularyHead::log_probs: num_best is ", num_best, "; it must be in [0, ", kMaxVocabulary,
                  "]");
    const auto check_given = [&](std::string_view name, const void* address, std::int64_t count) {
      detail::check_given("VocabularyHead::log_probs", name, address, count);
    };
    check_given("tokens", tokens, logits.extent(1));
    check_given("log_probs", log_probs, logits.extent(1));
    check_given("best_ids", best_ids, num_best);
    check_given("best_log_probs", best_log_probs, num_best);
    if (logits.extent(1) == 0) return;
    backend_->log_probs(LogProbsArgs<T>{.logits = logits,
                                        .shard_begins = shard_begins(),
                                        .tokens = tokens,
                                        .num_best = num_best,
                                        .log_probs = log_probs,
                                        .best_ids = best_ids,
                                        .best_log_probs = best_log_probs},
                        stream);
  }

  /// Writes the L2 norm of each row of `logits` to `norms` (device, [rows]). Local; queued on `stream`.
  /// @throws Error(invalid_argument) if the logits do not have the shape that logits() gives, or an address
  /// is missing.
  void norms(Logits logits, float* norms, typename B::Stream stream) {
    check_logits("norms", logits);
    detail::check_given("VocabularyHead::norms", "norms", norms, logits.extent(1));
    if (logits.extent(1) == 0) return;
    backend_->logit_norms(LogitNormsArgs<T>{.logits = logits, .shard_begins = shard_begins(), .norms = norms},
                          stream);
  }

 private:
  struct Buffers {
    TensorView<T, 2> selected;      // [rows, M]
    std::span<std::byte> sent;      // [header][rows, width]
    std::span<std::byte> received;  // [N] messages like `sent`; empty for a rank alone
  };

  /// This rank's logits, inside the message that is sent.
  struct Shard {
    Buffers buffers;
    TensorView<T, 2> logits;  // [rows, width]; a shard may be narrower: the rest is not read
  };

  static int checked_ranks(B& backend, const Topology& topology) {
    detail::check_stage_size("VocabularyHead",
                             detail::given_comm("VocabularyHead", "stage", backend.comms().stage),
                             topology.stage_size());
    return topology.stage_size();
  }

  void check_logits(std::string_view operation, const Logits& logits) const {
    detail::check_not_moved("VocabularyHead", state_.data());
    detail::check_num_rows(logits.extent(1));
    HELIX_EXPECTS(logits.extent(0) == ranks_ && logits.extent(2) == width_, ErrorCode::invalid_argument,
                  "VocabularyHead::", operation, ": the logits are [", logits.extent(0), ", ",
                  logits.extent(1), ", ", logits.extent(2), "]; they must be [", ranks_, ", rows, ", width_,
                  "], as logits() gives them");
    detail::check_given("VocabularyHead", "the logits", logits.data(), logits.extent(1));
  }

  /// Columns of a message's rows: as the widest shard has, up to a multiple of 16 bytes, for products and
  /// loads of whole vectors.
  static std::int64_t width_of(const Topology& topology) {
    return round_up(topology.vocab(0).size(), static_cast<std::int64_t>(16 / sizeof(T)));
  }

  static std::int64_t message_bytes(std::int64_t width, std::int64_t rows) {
    const auto bytes = static_cast<std::int64_t>(sizeof(ExchangeHeader)) +
                       rows * width * static_cast<std::int64_t>(sizeof(T));
    return round_up(bytes, std::int64_t{16});
  }

  static Buffers carve(int ranks, std::int64_t width, std::int64_t hidden, std::int64_t rows,
                       WorkspaceArena& arena) {
    const auto bytes = static_cast<std::size_t>(message_bytes(width, rows));
    Buffers buffers;
    buffers.selected = arena.take<T, 2>({rows, hidden});
    buffers.sent = arena.take_bytes(bytes);
    if (ranks > 1) buffers.received = arena.take_bytes(bytes * static_cast<std::size_t>(ranks));
    return buffers;
  }

  static T* logits_of(std::span<std::byte> message) {
    return reinterpret_cast<T*>(message.data() + sizeof(ExchangeHeader));
  }

  /// Multiplies the selected rows by this rank's weights.
  Shard multiply(TensorView<T, 2> hidden, const std::int32_t* rows, std::int64_t num_rows,
                 std::span<std::byte> workspace, typename B::Stream stream) {
    detail::check_not_moved("VocabularyHead", state_.data());
    detail::check_num_rows(num_rows);
    HELIX_EXPECTS(num_rows == 0 || (hidden.extent(1) == lm_head_.cols && hidden.stride(1) == 1),
                  ErrorCode::invalid_argument, "VocabularyHead: hidden is [", hidden.extent(0), ", ",
                  hidden.extent(1), "] with a last stride of ", hidden.stride(1), " for ", num_rows,
                  " rows; its width must be ", lm_head_.cols, ", and the stride 1");
    detail::check_given("VocabularyHead", "hidden", hidden.data(), num_rows);
    detail::check_given("VocabularyHead", "rows", rows, num_rows);
    if (num_rows > 0) detail::check_workspace("VocabularyHead", workspace, detail::kWorkspaceAlignment);
    WorkspaceArena measure;
    carve(ranks_, width_, lm_head_.cols, num_rows, measure);
    HELIX_EXPECTS(workspace.size() >= measure.used_bytes(), ErrorCode::capacity,
                  "VocabularyHead: the workspace has ", workspace.size(), " bytes; ", num_rows, " rows need ",
                  measure.used_bytes(), ": size it with VocabularyHead::workspace_bytes()");
    WorkspaceArena arena(workspace);
    const Buffers buffers = carve(ranks_, width_, lm_head_.cols, num_rows, arena);
    const Shard shard{buffers, {logits_of(buffers.sent), {num_rows, width_}}};
    if (num_rows == 0) return shard;
    backend_->gather_rows(GatherRowsArgs<T>{.in = hidden, .rows = rows, .out = buffers.selected}, stream);
    if (!final_norm_.empty()) {
      backend_->rms_norm(RmsNormArgs<T>{.residual = buffers.selected,
                                        .weight = final_norm_,
                                        .out = buffers.selected,
                                        .epsilon = norm_epsilon_},
                         stream);
    }
    if (lm_head_.rows > 0) {
      const TensorView<T, 2> out = shard.logits.slice(1, 0, lm_head_.rows);
      backend_->linear(LinearArgs<T>{.in = buffers.selected, .weight = lm_head_, .out = out}, stream);
    }
    return shard;
  }

  /// Gathers the logits of all ranks, in a step of `tokens` tokens.
  Logits gather(const Shard& shard, std::int64_t tokens, const std::int64_t* positions,
                typename B::Stream stream) {
    const std::int64_t num_rows = shard.logits.extent(0);
    const std::int64_t message = message_bytes(width_, num_rows);
    const Buffers& buffers = shard.buffers;
    const Logits all(logits_of(ranks_ > 1 ? buffers.received : buffers.sent), {ranks_, num_rows, width_},
                     {message / static_cast<std::int64_t>(sizeof(T)), width_, 1});
    if (num_rows == 0 || ranks_ == 1) return all;
    backend_->stamp(StampArgs{.message = buffers.sent.data(),
                              .tokens = tokens,
                              .sender = rank_,
                              .exchanges = gathers(),
                              .positions = positions},
                    stream);
    backend_->comms().stage->all_gather(buffers.sent.data(), buffers.received.data(), message, stream);
    backend_->check_exchange(CheckExchangeArgs{.messages = buffers.received.data(),
                                               .message_bytes = message,
                                               .peers = ranks_,
                                               .sent = buffers.sent.data()},
                             stream);
    return all;
  }

  /// Lets the backend draw without a gather. Returns whether it did.
  bool choose_apart(const ChooseGreedyArgs<T>& args, typename B::Stream stream) {
    if constexpr (requires { backend_->choose_greedy(args, stream); }) {
      return backend_->choose_greedy(args, stream);
    } else {
      HELIX_EXPECT_NO_MEMBER(B, choose_greedy, (const ChooseGreedyArgs<Activation>&, Stream));
      return false;
    }
  }

  std::uint64_t* gathers() const { return reinterpret_cast<std::uint64_t*>(state_.data()); }
  const std::int64_t* shard_begins() const {
    return reinterpret_cast<const std::int64_t*>(state_.data()) + 1;
  }

  B* backend_;
  WeightView final_norm_;
  WeightView lm_head_;
  float norm_epsilon_;
  int ranks_;
  int rank_;
  std::int64_t width_;
  typename B::Buffer state_;
};

}  // namespace helix
