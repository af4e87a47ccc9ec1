// SPDX-License-Identifier: Apache-2.0
// The tail of a product of q, k and v whose heads the ranks of a KVP group share: each multiplies equally
// many and sends them, ready to be stored, to the others, whose blocks store them after their own.
//
// Every rank of the group needs all of these heads, and without sharing each computes them all with the same
// weights. The 8B shape at KVP 2 on two H200s, measured alternately, in ms: 2.526 to 2.427 with 512 tokens,
// 4.544 to 4.442 with 131072; 8 layers with eight sequences 0.792 to 0.749.
//
// A block sends to the blocks with its own number on the peers, before it waits for theirs. Blocks start in
// the order of their numbers, so the lowest waiting block is always answered.
#pragma once

#include <cstdint>

#include "cuda/comm/peer_flagged_words.cuh"
#include "cuda/linear/few_rows_qkv.cuh"

namespace helix::cuda::few_rows {

/// Tiles are of this rank's heads; all ranks have equally many.
template <int kMaxRows>
struct SharedQkv : Qkv<kMaxRows> {
  using Base = Qkv<kMaxRows>;
  static constexpr bool kReceives = true;

  struct Memory : Base::Memory {
    std::uint32_t count;  // number of the block's message
    bool sends;           // false if this rank has given up
  };

  PeerChannel channel;
  std::uint32_t tag;
  int heads;  // heads per rank

  template <class T>
  __device__ void prepare(const Product<T>& p, const Tiles& tiles, Memory& memory) const {
    std::uint32_t sent = 0;
    bool has_stopped = false;
    Base::prepare(p, tiles, memory, [&] {
      // Where ranks share the GPU the next kernel could take the room of the peers' kernels.
      if (channel.waits.most_blocks == 0) start_next();
      sent = volatile_word(words().count());
      has_stopped = has_given_up(channel.waits);
    });
    if (threadIdx.x % kWarp == 0) {
      memory.count = sent + 1;
      memory.sends = !has_stopped;
    }
    __syncwarp();
  }

  /// As Qkv::store(), after sending the pair to the peers.
  template <class T, class Total>
  __device__ __forceinline__ void store(const Product<T>& p, const Tiles& tiles, const Memory& memory,
                                        int tile, int row, int n, const Total& total) const {
    const int pair = this->pair_of(tiles, tile, n);
    if (pair >= this->pairs) return;
    const int head = this->head_of(tiles, tile);
    const typename Base::template Pair<T> found =
        this->make_pair(p, tiles, memory, tile, row, n, head, pair, total);
    static_assert(sizeof(found) == sizeof(std::uint32_t));
    if (memory.sends) {
      for_peers(channel.waits, [&](int peer) {
        words().send(peer, memory.count, (tile * p.rows + row) * tiles.height + n,
                     __builtin_bit_cast(std::uint32_t, found));
      });
    }
    this->put(p, memory, head, pair, row, found);
  }

  /// Called by the consumer warps after all tiles of the block: stores what the peers' blocks have sent.
  template <class T>
  __device__ __forceinline__ void receive(const Product<T>& p, const Tiles& tiles,
                                          const Memory& memory) const {
    const int count = tiles.mine(p.width) * p.rows * tiles.height;  // words from each peer
    for (int i = static_cast<int>(threadIdx.x); i < (channel.waits.size - 1) * count; i += kConsumerThreads) {
      const int peer = (channel.waits.rank + 1 + i / count) % channel.waits.size;
      const int word = i % count;
      const int n = word % tiles.height;
      const int row = word / tiles.height % p.rows;
      const int tile = word / tiles.height / p.rows;
      const int pair = this->pair_of(tiles, tile, n);
      if (pair >= this->pairs) continue;
      std::uint32_t sent;
      if (!words().receive(peer, memory.count, word, sent)) continue;
      const int head = this->head_of(tiles, tile) + (peer - channel.waits.rank) * heads;
      this->put(p, memory, head, pair, row, __builtin_bit_cast(typename Base::template Pair<T>, sent));
    }
    if (threadIdx.x == 0) *words().count() = memory.count;
  }

 private:
  __device__ __forceinline__ FlaggedWords words() const { return {channel, tag}; }
};

}  // namespace helix::cuda::few_rows
