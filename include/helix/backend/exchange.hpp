// SPDX-License-Identifier: Apache-2.0
// ExchangeBackend: packing, checking and combining partial attention, and the arguments of each.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <helix/backend/communicator.hpp>
#include <helix/backend/queue.hpp>
#include <helix/error.hpp>
#include <helix/kv_layout.hpp>
#include <helix/lse.hpp>
#include <helix/splitmix64.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

namespace detail {

/// Throws Error(invalid_argument) unless the convention is one of the enumeration's.
inline void check_convention(std::string_view operation, LseConvention convention) {
  HELIX_EXPECTS(convention == LseConvention::natural || convention == LseConvention::base2 ||
                    convention == LseConvention::natural_positive_inf_if_empty,
                ErrorCode::invalid_argument, operation, ": convention is ", static_cast<int>(convention),
                "; it must be natural (0), base2 (1) or natural_positive_inf_if_empty (2)");
}

}  // namespace detail

/// Attention over one shard. Shards combine exactly: out = sum_r exp(lse_r - LSE) out_r, LSE = log(sum_r
/// exp(lse_r)).
template <class T>
struct Partial {
  TensorView<T, 3> out;      ///< [tokens, heads, Dv]; 0 where the shard holds no visible token.
  TensorView<float, 2> lse;  ///< [tokens, heads]; -inf there, or what the convention says.
};

/// The header that a packed message begins with; KvpAllToAll says what follows.
struct ExchangeHeader {
  std::uint64_t epoch = 0;  ///< exchange_epoch() of the sender (invariant 13).
  std::uint32_t tokens = 0;
  std::uint32_t sender = 0;  ///< kvp_rank of the sender.
};

/// The term that position number `index` of a step adds to the sum in exchange_epoch().
HELIX_HOST_DEVICE constexpr std::uint64_t exchange_epoch_term(std::int64_t position, std::int64_t index) {
  return detail::splitmix64_mix(static_cast<std::uint64_t>(position) +
                                static_cast<std::uint64_t>(index + 1) * detail::kSplitmix64Step);
}

/// The epoch that a header carries: the exchanges that the sender has done, this one included, plus a hash of
/// the positions in the upper half. The count alone cannot tell steps apart: a collective pairs the n-th call
/// of each rank with the n-th of the others, also when one of them has left out a step. The positions of two
/// steps in a row differ as sequences grow; where they do not (two prompts of one length, one after the
/// other, or steps of padding), a rank that leaves out the first goes unseen. `terms`: the sum of
/// exchange_epoch_term() over the positions, which threads may share out; 0 without positions.
HELIX_HOST_DEVICE constexpr std::uint64_t exchange_epoch(std::uint64_t exchanges, std::uint64_t terms) {
  return exchanges + (terms >> 32 << 32);
}

/// The epoch of `positions` [tokens]; nullptr: the count alone.
constexpr std::uint64_t exchange_epoch(std::uint64_t exchanges, const std::int64_t* positions,
                                       std::int64_t tokens) {
  std::uint64_t terms = 0;
  for (std::int64_t i = 0; positions != nullptr && i < tokens; ++i)
    terms += exchange_epoch_term(positions[i], i);
  return exchange_epoch(exchanges, terms);
}

/// Writes the header of `count` messages, `message_bytes` apart: exchange_epoch(`*exchanges` + 1,
/// positions, tokens) (and adds one to `*exchanges`), `tokens`, `sender`.
struct StampArgs {
  std::byte* message = nullptr;  ///< First message; null: nothing is stamped.
  std::int64_t tokens = 0;
  std::int64_t sender = 0;
  std::uint64_t* exchanges = nullptr;       ///< Device counter of the sender.
  const std::int64_t* positions = nullptr;  ///< [tokens] of the exchange, or nullptr.
  std::int64_t count = 1;
  std::int64_t message_bytes = 0;
};

/// Which of two places a result goes to: the first, or one `bytes` behind it while *exchanges is odd. Read on
/// the device, so that a captured step with an odd number of exchanges replays rightly.
struct TargetSlot {
  const std::uint64_t* exchanges = nullptr;  ///< Those that have ended; null: always the first.
  std::int64_t bytes = 0;
};

/// What row `token` of an exchange of `tokens` that travels as lines says of it, beside its number.
/// `positions` [tokens], or nullptr: zeros.
HELIX_HOST_DEVICE constexpr std::uint32_t exchange_row_tag(const std::int64_t* positions, std::int64_t token,
                                                           std::int64_t tokens) {
  const std::int64_t position = positions == nullptr ? 0 : positions[token];
  return static_cast<std::uint32_t>(position) + static_cast<std::uint32_t>(tokens) * 0x9e3779b9u;
}

inline constexpr std::int64_t kExchangeLineBytes = 16;     ///< Of a line of LineRows.
inline constexpr std::int64_t kExchangeLineDataBytes = 8;  ///< Of them, those that are data.

/// Rows of partials as lines of 16 bytes that say themselves that they have come: 4 bytes of data, the number
/// of the exchange, 4 of data, the number's complement. No header, and no fence between data and header; but
/// twice the bytes, so for few of them. A row's log-sum-exp is a line beside its exchange_row_tag(). The
/// number is that of WindowExchangeArgs, counted from 1, its low 32 bits. Places are those of the first slot.
template <class Byte>
struct LineRows {
  Byte* out = nullptr;  ///< Lines of row (0, 0); null: nothing travels so.
  Byte* lse = nullptr;  ///< Its line of lse.
  std::int64_t token_bytes = 0;
  std::int64_t head_bytes = 0;  ///< Of out, and of lse, whose tokens are a line each.

  /// The first line of row (token, head).
  HELIX_HOST_DEVICE constexpr Byte* out_of(std::int64_t token, std::int64_t head) const {
    return out + token * token_bytes + head * head_bytes;
  }
  HELIX_HOST_DEVICE constexpr Byte* lse_of(std::int64_t token, std::int64_t head) const {
    return lse + token * kExchangeLineBytes + head * head_bytes;
  }
};

/// Where a writer of partials puts them as lines, in the slot of a TargetSlot whose exchanges number them.
struct TargetLines {
  LineRows<std::byte> rows{};  ///< In place of out and lse, unless null.
  /// A word of the device, not 0 once this rank has stopped waiting for others: what it computes from then on
  /// is wrong, and must not seem to have come.
  const std::uint32_t* gave_up = nullptr;
  const std::int64_t* positions = nullptr;  ///< [tokens] of the exchange, or nullptr: zeros.
  std::int64_t tokens = 0;                  ///< Of the exchange.
};

/// Bytes at WindowExchangeArgs::exchanges: the count of a rank, and zeros for the backend's own use.
inline constexpr std::size_t kExchangeCountBytes = 16;

/// An exchange whose messages are written straight into the memory of the peers: what is left is to say that
/// they are whole, by their headers, and to wait until the peers say so of theirs; or, of lines, to wait for
/// each. Addresses are of the first of two slots; exchange number n (from 0) uses slot n % 2, where n =
/// *exchanges. It ends with *exchanges one higher, which is the combine's to do: until then all kernels of
/// the exchange read n.
struct WindowExchangeArgs {
  std::byte* sent = nullptr;            ///< Header of this rank's message to rank 0.
  const std::byte* received = nullptr;  ///< Header of rank 0's message to this rank.
  std::int64_t peer_bytes = 0;          ///< From a header in `sent` to that of the next rank.
  std::int64_t sender_bytes = 0;        ///< From a header in `received` to that of the next rank.
  std::int64_t slot_bytes = 0;
  std::int64_t peers = 1;
  std::int64_t sender = 0;  ///< This rank.
  std::int64_t tokens = 0;
  std::uint64_t* exchanges = nullptr;       ///< Device counter, of kExchangeCountBytes.
  const std::int64_t* positions = nullptr;  ///< [tokens], or nullptr.
  LineRows<const std::byte> lines{};        ///< Of rank 0's message to this rank, if it comes as lines.
};

/// Where attention writes its result: a local buffer, packed messages, or the memory of peers. Attention does
/// not know who owns the memory.
template <class T>
struct PartialTarget {
  TensorView<T, 3> out;          ///< [tokens, Hq/TPA, Dv], last stride 1; 0 for a query that sees no token.
  TensorView<float, 2> lse;      ///< [tokens, Hq/TPA], natural log; -inf for a query that sees no token.
  std::int64_t first_token = 0;  ///< Token of the step that row 0 of out and lse belongs to.
  StampArgs headers{};           ///< Headers of the messages that out and lse lie in, written too.
  TargetSlot slot{};             ///< The slot of both, and of lines.
  /// Over windows, the exchange that out and lse are for, which combine_window ends; elsewhere `sent` is
  /// null.
  WindowExchangeArgs exchange{};
  TargetLines lines{};  ///< Where out and lse go as lines instead.
};

/// Copies partials that were not written in place to where attention would have written them, and writes the
/// headers of packed messages. Lines are only of backends that say kMaxLineBytes (WindowBackend).
template <class T>
struct PackPartialArgs {
  TensorView<const T, 3> out;                         ///< [tokens, KVP * h, Dv], last stride 1.
  TensorView<const float, 2> lse;                     ///< [tokens, KVP * h].
  PartialTarget<T> target;                            ///< Row 0 is row 0 of `out`; its lse is natural.
  LseConvention convention = LseConvention::natural;  ///< Of `lse`.
};

/// Verifies that every received header carries the epoch of this rank's own, `tokens`, and its sender's rank.
/// A mismatch is an Error(out_of_step) on the stream.
struct CheckExchangeArgs {
  const std::byte* messages = nullptr;  ///< [peers, message_bytes].
  std::int64_t message_bytes = 0;
  std::int64_t peers = 1;
  std::int64_t tokens = 0;
  const std::byte* sent = nullptr;  ///< A message of the same exchange that this rank stamped.
};

/// Exact merge of R partials in fixed order: out = sum_r w_r out_r / sum_r w_r (+ exp(sink - max)), w_r =
/// exp(lse_r - max). A partial with lse = -inf has weight 0 whatever its out holds; all of them -inf: out =
/// 0, lse = -inf.
template <class T>
struct LseCombineArgs {
  TensorView<const T, 4> partial_out;      ///< [R, tokens, heads, Dv], any strides with the last one 1.
  TensorView<const float, 3> partial_lse;  ///< [R, tokens, heads], any strides.
  const float* sinks = nullptr;            ///< [heads] logits that join the denominator once, or nullptr.
  TensorView<T, 3> out;                    ///< [tokens, heads, Dv], last stride 1.
  TensorView<float, 2> lse{};              ///< [tokens, heads] or empty; natural, includes the sink.
  LseConvention convention = LseConvention::natural;  ///< Convention of partial_lse.
};

/// What KvpAllToAll and lse_combine ask of a machine, beside its memory: three functions for an engine that
/// brings its own attention. One that also has combine_exchange(check, combine, stream) does the last two as
/// one.
template <class B>
concept ExchangeBackend = QueueBackend<B> && StageBackend<B> &&
    ExchangeComm<typename B::Comm, typename B::Stream> && requires(B& backend, typename B::Stream stream) {
  backend.pack_partial(PackPartialArgs<typename B::Activation>{}, stream);
  backend.check_exchange(CheckExchangeArgs{}, stream);
  backend.lse_combine(LseCombineArgs<typename B::Activation>{}, stream);
};

}  // namespace helix
