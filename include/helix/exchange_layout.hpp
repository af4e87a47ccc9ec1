// SPDX-License-Identifier: Apache-2.0
// ExchangeLayout: where the messages of an exchange lie in the memory of KvpAllToAll, and what is in them.
#pragma once

#include <cstdint>

#include <helix/backend/exchange.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/rank_shape.hpp>

namespace helix {

/// Sizes of a rank's exchanges. They must be equal on all ranks of the KVP group.
struct KvpAllToAllSpec {
  std::int64_t max_tokens = 0;       ///< Tokens of the largest step, all slices together.
  std::int64_t num_query_heads = 0;  ///< Hq/TPA.
  std::int64_t value_dim = 0;        ///< Dv.
  int max_slices = 1;                ///< Most exchanges of one step in flight at once: the slices of HOP-B.
  /// Whether steps of few bytes over windows may travel as lines (PartialTarget::lines), if the backend
  /// supports lines. Set it to false for an attention of your own that writes out and lse only.
  bool has_lines = true;
  /// Number of the KVP group in its stage, which its ranks share: their TPA rank. If a communicator has ranks
  /// of several groups, what they exchange is then an Error instead of a wrong result: out_of_step, over
  /// windows a timeout. Numbers that differ by a multiple of 256 are not told apart.
  int group = 0;

  /// For the layers of a rank, in steps of up to `max_tokens` tokens.
  static constexpr KvpAllToAllSpec of_layers(const RankShape& shape, std::int64_t max_tokens,
                                             int max_slices = 1) {
    return {.max_tokens = max_tokens,
            .num_query_heads = shape.query_heads,
            .value_dim = shape.value_dim,
            .max_slices = max_slices,
            .group = shape.tpa_rank()};
  }
};

namespace detail {

/// Returns the spec if a group of `kvp` ranks can use it. @throws Error(invalid_argument) otherwise.
inline KvpAllToAllSpec checked_exchange_spec(const KvpAllToAllSpec& spec, int kvp) {
  HELIX_EXPECTS(spec.num_query_heads >= 1 && spec.num_query_heads % kvp == 0 && spec.value_dim >= 1 &&
                    spec.max_tokens >= 0 && spec.max_slices >= 1,
                ErrorCode::invalid_argument, "KvpAllToAll: ", spec.num_query_heads, " query heads over KVP ",
                kvp, ", value_dim ", spec.value_dim, ", max_tokens ", spec.max_tokens, ", max_slices ",
                spec.max_slices, "; KVP must divide the heads and sizes be positive");
  HELIX_EXPECTS(spec.group >= 0, ErrorCode::invalid_argument, "KvpAllToAll: group is ", spec.group,
                "; it must be 0 or more: the TPA rank of its ranks");
  HELIX_EXPECTS(spec.max_tokens <= kMaxStepTokens && spec.num_query_heads <= kMaxCount &&
                    spec.value_dim <= kMaxRowElements / spec.num_query_heads,
                ErrorCode::invalid_argument, "KvpAllToAll: max_tokens is ", spec.max_tokens, ", at most ",
                kMaxStepTokens, " are supported; num_query_heads is ", spec.num_query_heads, ", at most ",
                kMaxCount, "; value_dim is ", spec.value_dim, ", at most ", kMaxRowElements,
                " over the heads");
  return spec;
}

}  // namespace detail

/// The part of a step that one exchange carries.
struct ExchangeSlice {
  /// Number of the slice. Parts of a step that attend absorbed and expanded (MlaPrefill) each count from 0.
  int index = 0;
  std::int64_t first_token = 0;  ///< Tokens of the step before the slice.
  std::int64_t tokens = 0;
  std::int64_t value_dim = 0;  ///< Dv of the slice's partials, at most the spec's; 0: the spec's.
};

namespace detail {

/// Returns the slice with its value_dim filled in, if exchanges of `spec` over `kvp` ranks can carry it.
/// @throws Error(invalid_argument) otherwise.
inline ExchangeSlice checked_exchange_slice(const KvpAllToAllSpec& spec, ExchangeSlice slice,
                                            std::int64_t kvp, bool has_windows) {
  if (slice.value_dim == 0) slice.value_dim = spec.value_dim;
  HELIX_EXPECTS(kvp > 1 && slice.tokens >= 0 && slice.first_token >= 0 &&
                    slice.tokens <= spec.max_tokens - slice.first_token,
                ErrorCode::invalid_argument, "exchange: ", slice.tokens, " tokens after ", slice.first_token,
                " over KVP ", kvp, "; built for up to ", spec.max_tokens, ", and KVP 1 sends nothing");
  HELIX_EXPECTS(slice.index >= 0 && slice.index < spec.max_slices, ErrorCode::invalid_argument,
                "exchange: slice ", slice.index, "; built for up to ", spec.max_slices);
  HELIX_EXPECTS(!has_windows || slice.index == 0, ErrorCode::invalid_argument, "exchange: slice ",
                slice.index, "; over windows a step is one slice");
  HELIX_EXPECTS(slice.value_dim > 0 && slice.value_dim <= spec.value_dim, ErrorCode::invalid_argument,
                "exchange: value_dim ", slice.value_dim, "; built for up to ", spec.value_dim);
  return slice;
}

}  // namespace detail

/// Layout of the packed message to one KVP peer. It has one block per head: [header 16 B][lse f32:
/// tokens][out: tokens * Dv], each part padded to 16 B. Only the header of the first block counts. The heads
/// of all peers lie at one constant stride, so attention writes [tokens, Hq/TPA, Dv] straight into the
/// messages.
struct ExchangeMessage {
  std::int64_t lse_begin;      ///< Bytes from the start of a head's block to its lse.
  std::int64_t out_begin;      ///< Bytes from the start of a head's block to its outputs.
  std::int64_t head_bytes;     ///< Bytes of a head's block.
  std::int64_t message_bytes;  ///< Bytes of one peer's message: its `heads` blocks.

  static constexpr std::int64_t kAlignment = 16;

  /// Lays out `heads` query heads of `tokens` tokens, with rows of value_dim elements of element_bytes each.
  constexpr ExchangeMessage(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim,
                            std::int64_t element_bytes)
      : lse_begin(static_cast<std::int64_t>(sizeof(ExchangeHeader))),
        out_begin(lse_begin + padded(tokens * static_cast<std::int64_t>(sizeof(float)))),
        head_bytes(out_begin + padded(tokens * value_dim * element_bytes)),
        message_bytes(heads * head_bytes) {}

 private:
  static constexpr std::int64_t padded(std::int64_t bytes) { return round_up(bytes, kAlignment); }
};

/// Where the slices' messages to all peers lie in a rank's memory. The place of a slice depends on the spec
/// and on where the slice lies in the step, not on the size of the step. Slices of one step therefore never
/// overlap if the whole step attends in one form. Parts that attend absorbed and expanded (MlaPrefill) run
/// one after the other, and number their own slices.
///
/// A collective copies messages, so these are packed: only the data of the step travels. Where peers write
/// into each other's memory, padding does not travel, so messages have the size of the largest step.
class ExchangeLayout {
 public:
  /// Lays out the steps of `spec`, whose activations have element_bytes bytes each.
  constexpr ExchangeLayout(const KvpAllToAllSpec& spec, std::int64_t element_bytes)
      : token_bytes_(payload_bytes(1, spec.num_query_heads, spec.value_dim, element_bytes)),
        slice_bytes_(rounded(spec.num_query_heads * kHeadExtra) + kPiece),
        total_bytes_(rounded(spec.max_tokens * token_bytes_) + spec.max_slices * slice_bytes_) {}

  /// Bytes from the start of the memory to the first message of the slice; a multiple of 256.
  constexpr std::int64_t begin(const ExchangeSlice& slice) const {
    return rounded(slice.first_token * token_bytes_) + slice.index * slice_bytes_;
  }
  /// Bytes that are enough for any step of the spec.
  constexpr std::int64_t total_bytes() const { return total_bytes_; }

  /// Bytes of outputs and log-sum-exps in a rank's messages for `tokens` tokens. The slice that the rank
  /// keeps counts; headers and padding do not.
  static constexpr std::int64_t payload_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim,
                                              std::int64_t element_bytes) {
    return tokens * heads * (value_dim * element_bytes + static_cast<std::int64_t>(sizeof(float)));
  }

 private:
  static constexpr std::int64_t kPiece = 256;
  static constexpr std::int64_t kHeadExtra =  // header and padding of a head's block, at most
      static_cast<std::int64_t>(sizeof(ExchangeHeader)) + 2 * ExchangeMessage::kAlignment;

  static constexpr std::int64_t rounded(std::int64_t bytes) { return round_up(bytes, kPiece); }

  std::int64_t token_bytes_;
  std::int64_t slice_bytes_;
  std::int64_t total_bytes_;
};

/// Layout of messages in a window that spans all peers (WindowComm::allocate_window). One strided view of all
/// heads reaches the rank that combines each head: [head][slot][sender][header | lse | out | lines of out |
/// lines of lse]. Lines (LineRows) are for steps of few tokens. All offsets are those of the largest step, so
/// that a polled address never holds another step's data.
struct WindowLayout {
  std::int64_t heads;             ///< Heads that each peer combines.
  std::int64_t lse_begin;         ///< Bytes from a header to the sender's lse of that head.
  std::int64_t out_begin;         ///< Bytes from a header to the sender's outputs of that head.
  std::int64_t line_tokens;       ///< Most tokens of a step that can travel as lines.
  std::int64_t line_token_bytes;  ///< Bytes between the lines of outputs of consecutive tokens.
  std::int64_t line_out_begin;    ///< Bytes from a header to the sender's lines of outputs of that head.
  std::int64_t line_lse_begin;    ///< Bytes from a header to the sender's lines of lse of that head.
  std::int64_t sender_bytes;      ///< Bytes between the headers of consecutive senders.
  std::int64_t slot_bytes;        ///< Bytes between the two slots.
  std::int64_t total_bytes;       ///< Bytes of each rank's part of the window.

  /// Lays out the steps of `spec` between `peers` ranks, whose activations have element_bytes bytes each.
  /// Steps of up to most_line_bytes of payload may travel as lines.
  constexpr WindowLayout(const KvpAllToAllSpec& spec, std::int64_t peers, std::int64_t element_bytes,
                         std::int64_t most_line_bytes)
      : WindowLayout(
            ExchangeMessage(spec.max_tokens, spec.num_query_heads / peers, spec.value_dim, element_bytes),
            spec.num_query_heads / peers, peers,
            smaller<std::int64_t>(spec.max_tokens, most_line_bytes / ExchangeLayout::payload_bytes(
                                                                         1, spec.num_query_heads,
                                                                         spec.value_dim, element_bytes)),
            spec.value_dim * element_bytes) {}

  /// Whether a step of `tokens` tokens with rows of row_bytes bytes can travel as lines.
  constexpr bool has_lines(std::int64_t tokens, std::int64_t row_bytes) const {
    return tokens <= line_tokens && row_bytes % kExchangeLineDataBytes == 0;
  }

  /// Bytes between consecutive heads, where the ranks' parts of the window are `stride` bytes apart.
  constexpr std::int64_t head_bytes(std::int64_t stride) const { return stride / heads; }

 private:
  static constexpr std::int64_t kLine = 128;

  constexpr WindowLayout(const ExchangeMessage& message, std::int64_t peer_heads, std::int64_t peers,
                         std::int64_t most_line_tokens, std::int64_t row_bytes)
      : heads(peer_heads),
        lse_begin(message.lse_begin),
        out_begin(message.out_begin),
        line_tokens(most_line_tokens),
        line_token_bytes(round_up(row_bytes / kExchangeLineDataBytes * kExchangeLineBytes, kLine)),
        line_out_begin(round_up(message.head_bytes, kLine)),
        line_lse_begin(line_out_begin + line_tokens * line_token_bytes),
        sender_bytes(round_up(line_lse_begin + line_tokens * kExchangeLineBytes, kLine)),
        slot_bytes(peers * sender_bytes),
        total_bytes(heads * 2 * slot_bytes) {}
};

}  // namespace helix
