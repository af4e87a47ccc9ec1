// SPDX-License-Identifier: Apache-2.0
// Short messages between the blocks of a kernel, made of flagged words. 4 bytes of data and their flag are
// one 8-byte store, so a peer that sees the flag has the data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/comm/peer_wait.cuh"

namespace helix::cuda {

/// One block's ends of its flagged-word messages. A block sends each message to all ranks, with the same
/// length on all. A word's flag holds the message count and the `tag` of the call.
struct FlaggedWords {
  const PeerChannel& channel;
  std::uint32_t tag;  ///< 1 to 255, so that a word never written matches no flag.

  __device__ std::uint32_t* count() const { return channel.flagged_word_counts + blockIdx.x; }
  /// Stores word `i` of message `count` into the memory of `reader`.
  __device__ __forceinline__ void send(int reader, std::uint32_t count, int i, std::uint32_t word) const {
    auto* to = reinterpret_cast<std::uint64_t*>(at(reader, count, channel.waits.rank, i));
    *static_cast<volatile std::uint64_t*>(to) = static_cast<std::uint64_t>(flag(count)) << 32 | word;
  }
  /// Waits for word `i` of message `count` from `sender`. False: it will not come.
  __device__ __forceinline__ bool receive(int sender, std::uint32_t count, int i, std::uint32_t& word) const {
    const std::byte* const from = at(channel.waits.rank, count, sender, i);
    return wait_for_peer(channel.waits, sender, count, [&](std::uint64_t& value) {
      const std::uint64_t both = *reinterpret_cast<const volatile std::uint64_t*>(from);
      word = static_cast<std::uint32_t>(both);
      const auto seen = static_cast<std::uint32_t>(both >> 32);
      value = seen >> kTagBits;
      return seen == flag(count) ? Seen::there : Seen::not_yet;
    });
  }

 private:
  static constexpr int kTagBits = 8;

  /// Messages in one slot are two counts apart, so dropping the count's high bits is safe: a stale word
  /// matches only after 2^24 counts in which no message was long enough to overwrite it.
  __device__ __forceinline__ std::uint32_t flag(std::uint32_t count) const { return count << kTagBits | tag; }
  __device__ __forceinline__ std::byte* at(int reader, std::uint32_t count, int sender, int i) const {
    const std::int64_t slot = slot_place(channel, blockIdx.x, count, sender);
    return channel.window + reader * channel.waits.stride + channel.flagged_words +
           (slot * channel.most_flagged_words + i) * 8;
  }
};

}  // namespace helix::cuda
