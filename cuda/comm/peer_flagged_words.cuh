// SPDX-License-Identifier: Apache-2.0
// Messages of few bytes between the blocks of a kernel: flagged words, 4 bytes of data and their flag,
// written at once, so that a peer that sees the flag has the data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/comm/peer_wait.cuh"

namespace helix::cuda {

/// The ends of one block's messages of flagged words. Message `count` of a block is as long on all ranks, and
/// all send one to all: the flag of a word says which, and by `tag` of what call.
struct FlaggedWords {
  const PeerChannel& channel;
  std::uint32_t tag;  ///< 1 to 255: no word that nobody has written has this flag.

  __device__ std::uint32_t* count() const { return channel.flagged_word_counts + blockIdx.x; }
  /// Stores word `i` of message `count` in the memory of `reader`.
  __device__ __forceinline__ void send(int reader, std::uint32_t count, int i, std::uint32_t word) const {
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(at(reader, count, channel.waits.rank, i)),
                 "r"(word), "r"(flag(count))
                 : "memory");
  }
  /// Waits for word `i` of message `count` of `sender`; false: it never comes.
  __device__ __forceinline__ bool receive(int sender, std::uint32_t count, int i, std::uint32_t& word) const {
    const std::byte* const from = at(channel.waits.rank, count, sender, i);
    return wait_for_peer(channel.waits, sender, count, [&](std::uint64_t& value) {
      std::uint32_t seen;
      asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
                   : "=r"(word), "=r"(seen)
                   : "l"(from)
                   : "memory");
      value = seen >> kTagBits;
      return seen == flag(count) ? Seen::there : Seen::not_yet;
    });
  }

 private:
  static constexpr int kTagBits = 8;

  /// Two messages to one place are two counts apart, so that a count may lose its highest bits: a word is
  /// taken for an older one only if all messages of its tag in 2^24 counts have been shorter.
  __device__ __forceinline__ std::uint32_t flag(std::uint32_t count) const { return count << kTagBits | tag; }
  __device__ __forceinline__ std::byte* at(int reader, std::uint32_t count, int sender, int i) const {
    const std::int64_t slot = slot_place(channel, blockIdx.x, count, sender);
    return channel.window + reader * channel.waits.stride + channel.flagged_words +
           (slot * channel.most_flagged_words + i) * 8;
  }
};

}  // namespace helix::cuda
