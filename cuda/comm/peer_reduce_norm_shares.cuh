// SPDX-License-Identifier: Apache-2.0
// All-reduce, residual and norm over the memory of peers in two shots: each rank sums a share of the rows,
// then sends the sums to all.
//
// Each of `size` ranks sends 2 (size - 1) / size times the bytes of the rows instead of size - 1 times, but
// waits twice. Sums travel as T, with the same bits on all ranks.
#pragma once

#include <cstdint>

#include "cuda/comm/peer_reduce_norm.cuh"

namespace helix::cuda {

/// One block's part. A round covers rows_a_round rows of each rank's share. Message 1 of a round holds the
/// sender's part of the reader's share, message 2 the sums of the sender's share.
template <class T, class W, int kPackets>
struct PeerNormShares : PeerNormBlock<T, W, false, kPackets> {
  using Block = PeerNormBlock<T, W, false, kPackets>;
  using Block::channel;
  using Block::each;
  using Block::element;
  using Block::ends;
  using Block::kElements;
  using Block::place;
  using Block::plan;
  using Block::rows;
  using typename Block::Packet;

  using Block::Block;

  /// The k-th row of `owner`'s share in the round that begins at row `first`. The order of ranks differs by
  /// block, so that few rows are spread over all ranks.
  __device__ std::int64_t row_of(std::int64_t first, int owner, int k) const {
    const int turn = (owner + static_cast<int>(blockIdx.x) / plan.parts) % channel.waits.size;
    return first + (std::int64_t{turn} * plan.rows_a_round + k) * plan.groups;
  }

  /// Calls use(k, row) for the rows of `owner`'s share.
  template <class Use>
  __device__ __forceinline__ void for_share(std::int64_t first, int owner, const Use& use) const {
    for (int k = 0; k < plan.rows_a_round; ++k) {
      const std::int64_t row = row_of(first, owner, k);
      if (row < rows.rows) use(k, row);
    }
  }

  __device__ __forceinline__ uint4* part(std::int64_t row, int i) const {
    return reinterpret_cast<uint4*>(rows.summand + element(row, i));
  }
  /// Packet i of the k-th row of a share, in message `count` from `sender` to `reader`.
  __device__ __forceinline__ uint4* packet(int reader, std::uint32_t count, int sender, int k, int i) const {
    return reinterpret_cast<uint4*>(ends.slot(reader, count, sender) + place(k, i));
  }

  /// Sends this rank's parts of the other ranks' shares.
  __device__ __forceinline__ void send_parts(std::int64_t first,
                                             const std::uint32_t (&counts)[kMaxPeers]) const {
    for_peers(channel.waits, [&](int p) {
      for_share(first, p, [&](int k, std::int64_t row) {
        each([&](int, int i) { *packet(p, counts[p] + 1, channel.waits.rank, k, i) = *part(row, i); });
      });
    });
  }

  /// Sums this rank's share in rank order and sends the sums to all. They overwrite this rank's part.
  __device__ __forceinline__ void send_sums(std::int64_t first,
                                            const std::uint32_t (&counts)[kMaxPeers]) const {
    const int rank = channel.waits.rank;
    for_share(first, rank, [&](int k, std::int64_t row) {
      each([&](int, int i) {
        float total[kElements];
#pragma unroll 2
        for (int p = 0; p < channel.waits.size; ++p) {
          const uint4 x = p == rank ? *part(row, i) : __ldcg(packet(rank, counts[p] + 1, p, k, i));
          const Packet& values = reinterpret_cast<const Packet&>(x);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const float value = to_float(values.elements[e]);
            total[e] = p == 0 ? value : total[e] + value;
          }
        }
        store_vector(reinterpret_cast<T*>(part(row, i)), total);
        for_peers(channel.waits, [&](int p) {
          store_vector(reinterpret_cast<T*>(packet(p, counts[p] + 2, rank, k, i)), total);
        });
      });
    });
  }

  /// Finishes all rows of the round from their sums.
  __device__ __forceinline__ void finish_rows(std::int64_t first,
                                              const std::uint32_t (&counts)[kMaxPeers]) const {
    const int rank = channel.waits.rank;
    for (int owner = 0; owner < channel.waits.size; ++owner) {
      for_share(first, owner, [&](int k, std::int64_t row) {
        Packet residual[kPackets];
        each([&](int j, int i) {
          residual[j] = *reinterpret_cast<const Packet*>(rows.residual + element(row, i));
        });
        Block::finish(row, residual, [&](int, int i, float(&total)[kElements]) {
          const uint4 x =
              owner == rank ? *part(row, i) : __ldcg(packet(rank, counts[owner] + 2, owner, k, i));
          const Packet& values = reinterpret_cast<const Packet&>(x);
#pragma unroll
          for (int e = 0; e < kElements; ++e) total[e] = to_float(values.elements[e]);
        });
      });
    }
  }

  /// Called when all threads have written message `number` of this round. Tells the peers if `sends`, then
  /// waits for their messages. Returns whether this rank may send what follows.
  __device__ __forceinline__ bool meet(int number, const std::uint32_t (&counts)[kMaxPeers],
                                       bool sends) const {
    const int p = static_cast<int>(threadIdx.x);
    bool is_there = sends;
    __syncthreads();
    if (p < channel.waits.size && p != channel.waits.rank) {
      const std::uint32_t count = counts[p] + static_cast<std::uint32_t>(number);
      if (sends) ends.send(p, count, plan.tag);
      is_there = ends.receive(p, count, plan.tag) && sends;
    }
    return __syncthreads_and(is_there) != 0;
  }

  __device__ void run(std::uint32_t (&counts)[kMaxPeers]) const {
    const int p = static_cast<int>(threadIdx.x);
    const bool is_peer = p < channel.waits.size && p != channel.waits.rank;
    if (p < channel.waits.size) counts[p] = ends.counts()[p];
    bool sends = may_send(channel.waits);
    const std::int64_t round = std::int64_t{plan.groups} * plan.rows_a_round * channel.waits.size;
    for (std::int64_t first = blockIdx.x / plan.parts; first < rows.rows; first += round) {
      if (sends) send_parts(first, counts);
      sends = meet(1, counts, sends);
      if (sends) send_sums(first, counts);
      sends = meet(2, counts, sends);
      finish_rows(first, counts);
      __syncthreads();
      if (is_peer) ends.counts()[p] = counts[p] += 2;
      __syncthreads();
    }
  }
};

}  // namespace helix::cuda
