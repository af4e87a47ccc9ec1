// SPDX-License-Identifier: Apache-2.0
// PeerChannel: what a kernel needs to know of a group whose ranks write into each other's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace helix::cuda {

/// Ranks of a group at most: a set of them is one word.
inline constexpr int kMaxPeers = 64;
/// Blocks of a kernel that exchange flagged words, at most: room for two on each SM, the most that few_rows
/// has, of a whole Hopper chip (144 SMs, of which H100 and H200 have 132). Kernels that would have more take
/// as many.
inline constexpr int kMaxFlaggedWordBlocks = 320;

/// PeerChannel::piece is a multiple of it.
inline constexpr std::int64_t kMinPieceBytes = 1024;

/// Why a kernel stopped waiting for its peers.
enum class PeerFault : std::uint32_t {
  none,
  late,         ///< The deadline is past.
  out_of_step,  ///< A peer is at another call or step.
  gave_up,      ///< A peer has stopped waiting, and says so.
  aborted       ///< This process has aborted the group.
};

/// The first wait of a rank that was in vain: host memory that the device writes.
struct PeerFailure {
  std::uint32_t is_complete = 0;  ///< Written last.
  PeerFault fault = PeerFault::none;
  std::uint32_t group = 0;    ///< PeerWaits::group.
  std::uint32_t peer = 0;     ///< Rank in the group.
  std::uint64_t missing = 0;  ///< Ranks of the group that were waited for, a bit each.
  std::uint64_t seen = 0;     ///< Flag or header of `peer`.
  std::uint64_t wanted = 0;
};

/// What kernels of a rank, of all of its groups, tell each other when they stop waiting: on its device,
/// zeroed.
struct PeerStop {
  std::uint32_t gave_up = 0;  ///< Nothing is waited for any more.
  std::uint32_t claim = 0;    ///< The failure is taken.
  unsigned long long missing = 0;
};

/// How kernels wait for the peers of a group, and stop waiting.
struct PeerWaits {
  PeerFailure* failure = nullptr;
  const std::uint32_t* abort = nullptr;  ///< Host memory; not 0: stop.
  PeerStop* stop = nullptr;
  std::uint64_t timeout_ns = 0;
  std::uint32_t* poison = nullptr;  ///< [size] of rank 0, written by the peers that have given up.
  std::int64_t stride = 0;          ///< Bytes from one rank's to the next one's.
  std::uint32_t group = 0;
  int rank = 0;
  int size = 1;
  int most_blocks = 0;  ///< Blocks of a kernel that waits, so that other ranks find room; 0: any.
};

/// A window for messages of up to `channels` blocks. Each block has a channel of its own to each peer: two
/// message slots in the peer's memory, a flag for each, and a count of the messages so far, so that no block
/// waits for another of its own grid. A message of a block goes into slot count % 2: whoever sends message n
/// has seen the flag of the peer's message n - 1, which the peer sent when it had read message n - 2.
///
/// - Plain messages (peer_wait.cuh), any bytes of a block: a flag behind the data says that they have come;
///   counted in `counts`, for each peer. Nobody clears them: the count tells.
/// - Sealed ones (peer_sealed.cuh), short rows: each word is its own flag; counted in `counts` too, with the
///   flags left as they are. Their reader leaves 0.
/// - Flagged words (peer_flagged_words.cuh), few bytes by many blocks: each has its flag beside it. Counted
///   in `flagged_word_counts`, for all peers, whom a block sends as many. Nobody clears them.
struct PeerChannel {
  PeerWaits waits;
  std::byte* window = nullptr;  ///< Rank 0's part; stride as in `waits`.
  std::int64_t flags = 0;       ///< Bytes to flags [channels, 2, size] of 8 bytes: count, tag of the call.
  std::int64_t slots = 0;       ///< Bytes to slots [channels, 2, size, piece] of plain messages.
  std::int64_t sealed = 0;      ///< Bytes to as many slots of sealed messages.
  std::int64_t piece = 0;       ///< Bytes of a slot.
  std::uint32_t* counts = nullptr;  ///< [channels, size] on this rank's device.
  int channels = 0;

  /// Bytes to flagged words [kMaxFlaggedWordBlocks, 2, size, most_flagged_words] of 8 bytes.
  std::int64_t flagged_words = 0;
  std::int64_t most_flagged_words = 0;           ///< Of a message.
  std::uint32_t* flagged_word_counts = nullptr;  ///< [kMaxFlaggedWordBlocks] on this rank's device.
};

/// What both ends of a message say of its call: the kind, and what they must agree on to meet.
constexpr std::uint32_t call_tag(std::uint32_t kind, std::initializer_list<std::int64_t> agreed) {
  constexpr std::uint32_t kFactor = 0x9e3779b1u;
  std::uint32_t tag = kind * kFactor;
  for (const std::int64_t value : agreed)
    tag = (tag ^ static_cast<std::uint32_t>(value) ^ static_cast<std::uint32_t>(value >> 32)) * kFactor;
  return tag;
}
static_assert(call_tag(1, {2}) != call_tag(2, {1}) && call_tag(1, {2, 3}) != call_tag(1, {3, 2}));

}  // namespace helix::cuda
