// SPDX-License-Identifier: Apache-2.0
// PeerChannel: what a kernel needs to exchange messages in a group whose ranks write into each other's
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace helix::cuda {

/// Most ranks of a group; a set of ranks fits in one word.
inline constexpr int kMaxPeers = 64;
/// Most blocks of a kernel that exchanges flagged words; a kernel that would have more uses this many. Enough
/// for two blocks per SM, the most that few_rows runs, on a whole Hopper chip (144 SMs; H100 and H200 have
/// 132).
inline constexpr int kMaxFlaggedWordBlocks = 320;

/// PeerChannel::piece is a multiple of this.
inline constexpr std::int64_t kMinPieceBytes = 1024;

/// Why a kernel stopped waiting for its peers.
enum class PeerFault : std::uint32_t {
  none,
  late,         ///< The deadline is past.
  out_of_step,  ///< A peer is at another call or step.
  gave_up,      ///< A peer says that it has stopped waiting.
  aborted       ///< This process has aborted the group.
};

/// The first failed wait of a rank. Host memory, written by the device.
struct PeerFailure {
  std::uint32_t is_complete = 0;  ///< Written last.
  PeerFault fault = PeerFault::none;
  std::uint32_t group = 0;    ///< PeerWaits::group.
  std::uint32_t peer = 0;     ///< Rank in the group.
  std::uint64_t missing = 0;  ///< Bit set of the ranks that were waited for.
  std::uint64_t seen = 0;     ///< Last flag or header seen from `peer`.
  std::uint64_t wanted = 0;
};

/// Shared by all kernels of a rank, in all of its groups, to stop their waits. Device memory, initially zero.
struct PeerStop {
  std::uint32_t gave_up = 0;       ///< Not 0: no kernel waits any more.
  std::uint32_t claim = 0;         ///< Not 0: 1 + PeerWaits::group of the thread that records the failure.
  unsigned long long missing = 0;  ///< PeerFailure::missing, of that group.
};

/// How kernels wait for the peers of a group, and when they stop.
struct PeerWaits {
  PeerFailure* failure = nullptr;
  const std::uint32_t* abort = nullptr;  ///< Host memory; not 0: stop.
  PeerStop* stop = nullptr;
  std::uint64_t timeout_ns = 0;
  std::uint32_t* poison = nullptr;  ///< Rank 0's [size]; word p of a rank says that peer p has given up.
  std::int64_t stride = 0;          ///< Bytes between the memory of consecutive ranks.
  std::uint32_t group = 0;
  int rank = 0;
  int size = 1;
  int most_blocks = 0;  ///< Most blocks of a waiting kernel, to leave room for other ranks'; 0: no limit.
};

/// A window for messages of up to `channels` blocks. Each block has its own channel to each peer: two message
/// slots in the peer's memory, a flag for each slot, and a count of the messages so far. So no block waits
/// for another block of its own grid. Message `count` uses slot count % 2. Reuse is safe: a sender of message
/// n has seen the flag of the peer's message n - 1, which the peer sent after it had read message n - 2.
///
/// - Plain messages (peer_wait.cuh) are any bytes, up to `piece` each. A flag stored after the data says that
///   it is there. `counts` counts them per peer. Flags are never cleared: the count tells old from new.
/// - Sealed messages (peer_sealed.cuh) are short rows. Each word is its own flag, and the reader clears it to
///   0. `counts` counts them too; the flags of plain messages stay as they are.
/// - Flagged words (peer_flagged_words.cuh) are a few bytes from many blocks. Each word has its flag beside
///   it, which is never cleared. `flagged_word_counts` counts them for all peers at once: a block sends all
///   peers equally many.
struct PeerChannel {
  PeerWaits waits;
  std::byte* window = nullptr;      ///< Rank 0's part; stride as in `waits`.
  std::int64_t flags = 0;           ///< Offset of flags [channels, 2, size] of 8 bytes: count and tag.
  std::int64_t slots = 0;           ///< Offset of plain slots [channels, 2, size, piece].
  std::int64_t sealed = 0;          ///< Offset of sealed slots, of the same shape.
  std::int64_t piece = 0;           ///< Bytes of a slot.
  std::uint32_t* counts = nullptr;  ///< [channels, size] on this rank's device.
  int channels = 0;

  /// Offset of flagged words [kMaxFlaggedWordBlocks, 2, size, most_flagged_words] of 8 bytes.
  std::int64_t flagged_words = 0;
  std::int64_t most_flagged_words = 0;           ///< Per message.
  std::uint32_t* flagged_word_counts = nullptr;  ///< [kMaxFlaggedWordBlocks] on this rank's device.
};

/// A hash of what both ends of a message must agree on: the kind of the call and the values `agreed`.
constexpr std::uint32_t call_tag(std::uint32_t kind, std::initializer_list<std::int64_t> agreed) {
  constexpr std::uint32_t kFactor = 0x9e3779b1u;
  std::uint32_t tag = kind * kFactor;
  for (const std::int64_t value : agreed)
    tag = (tag ^ static_cast<std::uint32_t>(value) ^ static_cast<std::uint32_t>(value >> 32)) * kFactor;
  return tag;
}
static_assert(call_tag(1, {2}) != call_tag(2, {1}) && call_tag(1, {2, 3}) != call_tag(1, {3, 2}));

}  // namespace helix::cuda
