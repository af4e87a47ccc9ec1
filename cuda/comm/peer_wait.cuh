// SPDX-License-Identifier: Apache-2.0
// Flags in the memory of peers, and bounded waits for them.
//
// A wait polls this rank's own memory. It gives up when the deadline is past, when a peer says that it has
// given up, or when the host aborts. It then records which peer it waited for and tells the peers, and its
// kernel returns. From then on no kernel of this rank waits, so the rest of the step runs through.
#pragma once

#include <cstdint>

#include "cuda/comm/peer_channel.hpp"

namespace helix::cuda {

__device__ __forceinline__ std::uint64_t global_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// Stores a flag with release semantics at system scope: after all that this thread has written or observed.
__device__ __forceinline__ void release_flag(void* flag, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint64_t acquire_flag(const void* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t volatile_word(const std::uint32_t* word) {
  return *static_cast<const volatile std::uint32_t*>(word);
}

/// Calls use(peer) for all other ranks, starting with the next, so that not all write to the same memory at
/// once.
template <class Use>
__device__ __forceinline__ void for_peers(const PeerWaits& waits, const Use& use) {
  for (int step = 1; step < waits.size; ++step) {
    const int next = waits.rank + step;
    use(next < waits.size ? next : next - waits.size);
  }
}

/// Whether this rank has stopped waiting. Its later results are wrong and must not be sent.
__device__ __forceinline__ bool has_given_up(const PeerWaits& waits) {
  return volatile_word(&waits.stop->gave_up) != 0;
}

/// Whether this rank has not given up; one answer for all threads of the block. A barrier.
__device__ __forceinline__ bool may_send(const PeerWaits& waits) {
  return __syncthreads_or(threadIdx.x == 0 && has_given_up(waits)) == 0;
}

/// Tells the peers of this group that this rank has given up.
__device__ __forceinline__ void poison_peers(const PeerWaits& waits) {
  for (int p = 0; p < waits.size; ++p) {
    auto* word = reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(waits.poison + waits.rank) +
                                                  p * waits.stride);
    *static_cast<volatile std::uint32_t*>(word) = 1u;
  }
  __threadfence_system();
}

/// Records the failure unless one is recorded already. Releases all waits of this rank, and of the peers of
/// this group that wait for it. Peers in its other groups learn of the failure when a wait there calls this,
/// from the hosts, or at their deadlines. On return the record is complete, or its writer has taken too long.
static __device__ __noinline__ void give_up(const PeerWaits& waits, PeerFault fault, int peer,
                                            std::uint64_t seen, std::uint64_t wanted) {
  PeerStop& stop = *waits.stop;
  const std::uint32_t own_claim = waits.group + 1;
  const std::uint32_t claim = atomicCAS(&stop.claim, 0u, own_claim);
  const bool is_first = claim == 0;
  if (fault != PeerFault::gave_up && (is_first || claim == own_claim)) atomicOr(&stop.missing, 1ull << peer);
  if (has_given_up(waits)) {
    // The record is complete; only the peers of this group may not know yet.
  } else if (is_first) {
    __nanosleep(50'000);  // meanwhile other threads that give up add their peers
    PeerFailure& failure = *waits.failure;
    failure.fault = fault;
    failure.group = waits.group;
    failure.peer = static_cast<std::uint32_t>(peer);
    failure.missing = atomicOr(&stop.missing, 0ull);
    failure.seen = seen;
    failure.wanted = wanted;
    __threadfence_system();  // a host that sees is_complete sees the rest
    *static_cast<volatile std::uint32_t*>(&failure.is_complete) = 1u;
  } else {
    for (int i = 0; i < 1000 && volatile_word(&waits.failure->is_complete) == 0; ++i) __nanosleep(1'000);
  }
  poison_peers(waits);
  *static_cast<volatile std::uint32_t*>(&stop.gave_up) = 1u;
}

/// Whether `peer` has given up. Reads this rank's own memory.
__device__ __forceinline__ bool has_peer_given_up(const PeerWaits& waits, int peer) {
  const auto* own = reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const std::byte*>(waits.poison) +
                                                           waits.rank * waits.stride);
  return volatile_word(own + peer) != 0;
}

/// The peer that has given up, or -1.
__device__ inline int poisoned_by(const PeerWaits& waits) {
  for (int p = 0; p < waits.size; ++p)
    if (p != waits.rank && has_peer_given_up(waits, p)) return p;
  return -1;
}

/// What a look at a peer's word shows.
enum class Seen { not_yet, there, wrong };

/// Compares the count `seen` of a word with the expected `count`. There are two slots, so a peer is at most
/// two messages ahead. A count further ahead is an old one: messages of other kinds advance the count without
/// writing this word.
__device__ __forceinline__ Seen seen_count(std::uint32_t seen, std::uint32_t count) {
  constexpr std::uint32_t kNear = 3;
  return seen == count ? Seen::there : seen - count < kNear ? Seen::wrong : Seen::not_yet;
}

/// Polls `look(value)`, which reports what it saw and sets the `value` that a failure records, until it finds
/// the expected word. Returns whether it did; if not, nothing may be read.
template <class Look>
__device__ __forceinline__ bool wait_for_peer(const PeerWaits& waits, int peer, std::uint64_t wanted,
                                              const Look& look) {
  std::uint64_t value = 0;
  Seen seen = look(value);
  if (seen == Seen::there) return true;
  const std::uint64_t begin = global_ns();
  for (unsigned i = 1; seen == Seen::not_yet; ++i) {
    if (i % 64 == 0) {
      if (has_given_up(waits)) break;
      if (const int culprit = poisoned_by(waits); culprit >= 0) {
        give_up(waits, PeerFault::gave_up, culprit, value, wanted);
        return false;
      }
      const bool is_late = global_ns() - begin > waits.timeout_ns;
      if (is_late || (i % 4096 == 0 && volatile_word(waits.abort) != 0)) {
        give_up(waits, is_late ? PeerFault::late : PeerFault::aborted, peer, value, wanted);
        return false;
      }
    }
    seen = look(value);
  }
  if (seen == Seen::there) return true;
  // Where this rank has given up already, this only tells the peers, before this rank writes again where they
  // may still read.
  give_up(waits, PeerFault::out_of_step, peer, value, wanted);
  return false;
}

/// The flag of message `count` of a call with this tag.
__device__ __forceinline__ std::uint64_t flag_of(std::uint32_t count, std::uint32_t tag) {
  return static_cast<std::uint64_t>(count) << 32 | tag;
}

/// Index of the slot for message `count` of `block` from `sender`.
__device__ __forceinline__ std::int64_t slot_place(const PeerChannel& channel, std::int64_t block,
                                                   std::uint32_t count, int sender) {
  return (block * 2 + (count & 1)) * channel.waits.size + sender;
}

/// One block's ends of its channel.
struct BlockChannel {
  const PeerChannel& channel;
  int block;

  __device__ std::int64_t place(std::uint32_t count, int sender) const {
    return slot_place(channel, block, count, sender);
  }
  __device__ std::byte* part(int rank) const { return channel.window + rank * channel.waits.stride; }
  /// The slot in the memory of `reader` into which `sender` writes message `count`.
  __device__ std::byte* slot(int reader, std::uint32_t count, int sender) const {
    return part(reader) + channel.slots + place(count, sender) * channel.piece;
  }
  /// The slot of the same message as sealed packets.
  __device__ std::byte* sealed_slot(int reader, std::uint32_t count, int sender) const {
    return part(reader) + channel.sealed + place(count, sender) * channel.piece;
  }
  __device__ std::byte* flag(int reader, std::uint32_t count, int sender) const {
    return part(reader) + channel.flags + place(count, sender) * 8;
  }
  __device__ std::uint32_t* counts() const {
    return channel.counts + static_cast<std::int64_t>(block) * channel.waits.size;
  }

  /// Tells the peer that message `count` is in its slot. Call after a barrier that follows the writes of all
  /// threads.
  __device__ void send(int peer, std::uint32_t count, std::uint32_t tag) const {
    release_flag(flag(peer, count, channel.waits.rank), flag_of(count, tag));
  }
  /// Waits for the peer's message `count`.
  __device__ bool receive(int peer, std::uint32_t count, std::uint32_t tag) const {
    const std::byte* const own = flag(channel.waits.rank, count, peer);
    return wait_for_peer(channel.waits, peer, flag_of(count, tag), [&](std::uint64_t& value) {
      value = acquire_flag(own);
      if (value == 0) return Seen::not_yet;  // never written
      const Seen seen = seen_count(static_cast<std::uint32_t>(value >> 32), count);
      return seen == Seen::there && value != flag_of(count, tag) ? Seen::wrong : seen;
    });
  }
};

}  // namespace helix::cuda
