// SPDX-License-Identifier: Apache-2.0
// ExchangeBackend: packing, checking and combining partial attention, and the arguments of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <helix/backend/communicator.hpp>
#include <helix/backend/queue.hpp>
#include <helix/error.hpp>
#include <helix/exchange_header.hpp>
#include <helix/host_device.hpp>
#include <helix/lse.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

namespace detail {

/// Throws Error(invalid_argument) unless `convention` is a named value of the enumeration.
inline void check_convention(std::string_view operation, LseConvention convention) {
  HELIX_EXPECTS(convention == LseConvention::natural || convention == LseConvention::base2 ||
                    convention == LseConvention::natural_positive_inf_if_empty,
                ErrorCode::invalid_argument, operation, ": convention is ", static_cast<int>(convention),
                "; it must be natural (0), base2 (1) or natural_positive_inf_if_empty (2)");
}

}  // namespace detail

/// Attention over one shard, normalised over that shard. Shards combine exactly: out = sum_r exp(lse_r - LSE)
/// out_r, LSE = log(sum_r exp(lse_r)).
template <class T>
struct Partial {
  TensorView<T, 3> out;  ///< [tokens, heads, Dv]; 0 where the shard holds no visible token.
  /// [tokens, heads]; where no token is visible -inf, or what the convention says.
  TensorView<float, 2> lse;
};

/// Arguments of stamp(), which writes the headers of `count` messages, `message_bytes` apart. Each gets the
/// epoch exchange_epoch(`*exchanges` + 1, positions, tokens), `tokens` and `sender`. Adds one to
/// `*exchanges`.
struct StampArgs {
  std::byte* message = nullptr;  ///< First message; null, in PartialTarget::headers alone: there are none.
  std::int64_t tokens = 0;
  std::int64_t sender = 0;
  std::uint64_t* exchanges = nullptr;       ///< Device counter of the sender's exchanges.
  const std::int64_t* positions = nullptr;  ///< [tokens], positions of the exchange, or nullptr.
  std::int64_t count = 1;
  std::int64_t message_bytes = 0;
};

/// Which of two places a result goes to: the first, or, while *exchanges is odd, the one `bytes` after it.
/// The device reads the count, so that a captured step with an odd number of exchanges replays correctly.
struct TargetSlot {
  /// Count of exchanges, which goes up as each ends; null: always the first place.
  const std::uint64_t* exchanges = nullptr;
  std::int64_t bytes = 0;
};

inline constexpr std::int64_t kExchangeLineBytes = 16;     ///< Bytes of a line of LineRows.
inline constexpr std::int64_t kExchangeLineDataBytes = 8;  ///< Bytes of data in a line of LineRows.

/// Rows of partials as 16-byte lines that each carry their arrival flag, as in NCCL's LL protocol: 4 bytes of
/// data, the number of the exchange, 4 bytes of data, the complement of the number. Lines need no header, and
/// no fence between data and header, but take twice the bytes, so they are for small steps. The log-sum-exp
/// of a row and its exchange_row_tag() are the data of one line. The number is the low 32 bits of the
/// count of WindowExchangeArgs, this exchange included. Addresses are those of the first slot.
template <class Byte>
struct LineRows {
  Byte* out = nullptr;  ///< First line of the outputs of row (0, 0); null: no lines are used.
  Byte* lse = nullptr;  ///< Line of the lse of row (0, 0).
  /// Bytes between tokens of out.
  std::int64_t token_bytes = 0;
  std::int64_t head_bytes = 0;  ///< Bytes between heads, of out and of lse. An lse has one line per token.

  /// First line of the outputs of row (token, head).
  HELIX_HOST_DEVICE constexpr Byte* out_of(std::int64_t token, std::int64_t head) const {
    return out + token * token_bytes + head * head_bytes;
  }
  /// Line of the lse of row (token, head).
  HELIX_HOST_DEVICE constexpr Byte* lse_of(std::int64_t token, std::int64_t head) const {
    return lse + token * kExchangeLineBytes + head * head_bytes;
  }
};

/// Lines that attention writes in place of out and lse. They lie in the slot that a TargetSlot selects, and
/// the TargetSlot's count of exchanges numbers them.
struct TargetLines {
  LineRows<std::byte> rows{};  ///< Where the lines lie; null: out and lse are written.
  /// Device word that is not 0 once this rank has stopped waiting for others. What it computes from then on
  /// is wrong and must not be flagged as arrived.
  const std::uint32_t* gave_up = nullptr;
  const std::int64_t* positions = nullptr;  ///< [tokens], positions of the exchange, or nullptr: zeros.
  std::int64_t tokens = 0;                  ///< Tokens of the exchange.
};

/// Bytes of memory at WindowExchangeArgs::exchanges: a rank's count, then zeros for the backend's own use.
inline constexpr std::size_t kExchangeCountBytes = 16;

/// Arguments of combine_window(), which ends an exchange whose messages were written straight into the peers'
/// memory. It writes headers that tell the peers that this rank's messages are complete, and waits for
/// theirs. Messages that come as lines have no headers: it waits for each line. Addresses are those of the
/// first of two slots. The exchange at n = *exchanges, which begins at first_exchange_count(), uses slot n
/// % 2. The combine adds one to *exchanges at its end; until then all kernels of the exchange read n.
struct WindowExchangeArgs {
  std::byte* sent = nullptr;            ///< Header of this rank's message to rank 0.
  const std::byte* received = nullptr;  ///< Header of rank 0's message to this rank.
  std::int64_t peer_bytes = 0;          ///< Bytes between the headers of consecutive receivers in `sent`.
  std::int64_t sender_bytes = 0;        ///< Bytes between the headers of consecutive senders in `received`.
  std::int64_t slot_bytes = 0;
  std::int64_t peers = 1;
  std::int64_t sender = 0;  ///< This rank's number in the group.
  std::int64_t tokens = 0;
  std::uint64_t* exchanges = nullptr;       ///< Device counter of exchanges, kExchangeCountBytes long.
  const std::int64_t* positions = nullptr;  ///< [tokens], positions of the exchange, or nullptr.
  LineRows<const std::byte> lines{};        ///< Lines of rank 0's message to this rank, if used.
};

/// Where attention writes its result: a local buffer, packed messages, or the memory of peers. Attention does
/// not need to know which.
template <class T>
struct PartialTarget {
  TensorView<T, 3> out;          ///< [tokens, Hq/TPA, Dv], last stride 1; 0 for a query that sees no token.
  TensorView<float, 2> lse;      ///< [tokens, Hq/TPA], natural log; -inf for a query that sees no token.
  std::int64_t first_token = 0;  ///< Token of the step that row 0 of out and lse belongs to.
  StampArgs headers{};  ///< Headers of the messages that out and lse lie in; attention writes them too.
  TargetSlot slot{};    ///< Slot of out, lse and lines.
  /// Exchange over windows that out and lse belong to; combine_window() ends it. Without windows `sent` is
  /// null.
  WindowExchangeArgs exchange{};
  TargetLines lines{};  ///< Lines to write in place of out and lse, if any.
};

/// Arguments of pack_partial(), which copies partials that attention has not written in place to their
/// target, and writes the headers of packed messages. Targets have lines only on backends with kMaxLineBytes
/// (WindowBackend).
template <class T>
struct PackPartialArgs {
  TensorView<const T, 3> out;      ///< [tokens, Hq/TPA, Dv], last stride 1.
  TensorView<const float, 2> lse;  ///< [tokens, Hq/TPA].
  PartialTarget<T> target;         ///< Destination; its row 0 takes row 0 of `out`, and its lse is natural.
  LseConvention convention = LseConvention::natural;  ///< Convention of `lse`.
};

/// Arguments of check_exchange(), which compares the header of every message with that of `sent`, a message
/// of this rank in the same exchange (check_exchange_header()). A difference is an Error(out_of_step) on the
/// stream.
struct CheckExchangeArgs {
  const std::byte* messages = nullptr;  ///< [peers, message_bytes].
  std::int64_t message_bytes = 0;
  std::int64_t peers = 1;
  const std::byte* sent = nullptr;  ///< A message that this rank has stamped.
};

/// Arguments of lse_combine(), the exact merge of R partials in fixed order: out = sum_r w_r out_r / (sum_r
/// w_r (+ exp(sink - max))), w_r = exp(lse_r - max). A partial with lse = -inf has weight 0, whatever its out
/// holds. If all of them are -inf: out = 0, lse = -inf.
template <class T>
struct LseCombineArgs {
  TensorView<const T, 4> partial_out;      ///< [R, tokens, heads, Dv], any strides with the last one 1.
  TensorView<const float, 3> partial_lse;  ///< [R, tokens, heads], any strides.
  const float* sinks = nullptr;            ///< [heads] logits that join the denominator once, or nullptr.
  TensorView<T, 3> out;                    ///< [tokens, heads, Dv], last stride 1.
  TensorView<float, 2> lse{};              ///< [tokens, heads] or empty; natural, includes the sink.
  LseConvention convention = LseConvention::natural;  ///< Convention of partial_lse.
};

/// A backend that lse_combine() can use.
template <class B>
concept CombineBackend = requires(B& backend, typename B::Stream stream) {
  backend.lse_combine(LseCombineArgs<typename B::Activation>{}, stream);
};

/// A backend that KvpAllToAll can use: besides memory, three functions for an engine that
/// brings its own attention. A backend that also has combine_exchange(check, combine, stream) does the last
/// two in one operation.
template <class B>
concept ExchangeBackend = QueueBackend<B> && StageBackend<B> && CombineBackend<B> &&
    ExchangeComm<typename B::Comm, typename B::Stream> && requires(B& backend, typename B::Stream stream) {
  backend.pack_partial(PackPartialArgs<typename B::Activation>{}, stream);
  backend.check_exchange(CheckExchangeArgs{}, stream);
};

}  // namespace helix
