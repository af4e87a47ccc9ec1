// SPDX-License-Identifier: Apache-2.0
// All-reduce, residual and norm as one kernel over the memory of peers.
//
// One shot: each rank sends its part to all ranks, and sums all parts itself in rank order. The two-shot
// form, which sends fewer bytes among many ranks, is in peer_reduce_norm_shares.cuh. A long row is split over
// the blocks of a cluster, each with its own channel, so that even few rows leave through several SMs. Small
// messages, as when decoding, are sealed, which saves a round trip between data and flag. Larger ones are
// plain data followed by a flag.
#pragma once

#include <cstdint>

#include "cuda/comm/peer_sealed.cuh"
#include "cuda/comm/peer_wait.cuh"
#include "cuda/runtime/cluster.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {

/// The rows of one call; all tensors are dense.
template <class T, class W>
struct PeerNormRows {
  T* summand;       // [rows, width]
  T* residual;      // [rows, width]
  const W* weight;  // [width]
  T* out;           // [rows, width] or null: no norm
  std::int64_t rows;
  std::int64_t width;  // a multiple of kVector<T>
  float epsilon;
};

/// How a call is divided.
struct PeerNormPlan {
  int groups = 1;  ///< Rows taken at a time.
  int parts = 1;   ///< Blocks of a row, which form a cluster.
  int threads = 512;
  int row_packets = 0;      ///< 16-byte packets of a block's part of a row.
  int rows_a_round = 1;     ///< Per block; in two shots, of each rank's share.
  bool is_sealed = false;   ///< Packets are their own flags.
  bool has_shares = false;  ///< Each rank sums a share of the rows: two shots.
  std::uint32_t tag = 0;    ///< Of the flags; differs between calls that are divided differently.
};

/// Most packets of a row that a thread holds; one if sealed.
inline constexpr int kPeerNormPackets = 4;
inline constexpr int kPeerNormThreads = 512;

/// One block's part of a one-shot call. A rank sends rows * width * sizeof(T) * (size - 1) bytes.
template <class T, class W, bool kSealed, int kPackets>
struct PeerNormBlock {
  static constexpr int kElements = kVector<T>;
  using Packet = Vector<T, kElements>;

  const PeerChannel& channel;
  const PeerNormRows<T, W>& rows;
  const PeerNormPlan& plan;
  BlockChannel ends;
  int first_packet;
  int packets;

  __device__ PeerNormBlock(const PeerChannel& to, const PeerNormRows<T, W>& all, const PeerNormPlan& cut)
      : channel(to), rows(all), plan(cut), ends{to, static_cast<int>(blockIdx.x)} {
    first_packet = static_cast<int>(blockIdx.x) % plan.parts * plan.row_packets;
    packets = min(plan.row_packets, static_cast<int>(rows.width / kElements) - first_packet);
  }

  /// Index of the tensors' element at which packet `i` of this block's part of `row` begins.
  __device__ std::int64_t element(std::int64_t row, int i) const {
    return row * rows.width + static_cast<std::int64_t>(first_packet + i) * kElements;
  }
  /// Bytes from the start of a slot to packet `i` of the k-th row of a round.
  __device__ std::int64_t place(int k, int i) const { return (std::int64_t{k} * plan.row_packets + i) * 16; }

  /// Calls use(j, i) for this thread's packets of a row; packet i is its j-th.
  template <class Use>
  __device__ __forceinline__ void each(const Use& use) const {
#pragma unroll
    for (int j = 0; j < kPackets; ++j) {
      const int i = static_cast<int>(threadIdx.x + static_cast<unsigned>(j) * blockDim.x);
      if (i < packets) use(j, i);
    }
  }

  /// A thread's packets of a row.
  struct Own {
    uint4 part[kPackets];
    Packet residual[kPackets];
  };

  __device__ __forceinline__ void load(std::int64_t row, Own& own) const {
    each([&](int j, int i) {
      own.part[j] = *reinterpret_cast<const uint4*>(rows.summand + element(row, i));
      own.residual[j] = *reinterpret_cast<const Packet*>(rows.residual + element(row, i));
    });
  }

  /// Sends a row, number k of the round, to all peers.
  __device__ __forceinline__ void send(const Own& own, int k,
                                       const std::uint32_t (&counts)[kMaxPeers]) const {
    const int rank = channel.waits.rank;
    for_peers(channel.waits, [&](int p) {
      const std::uint32_t count = counts[p] + 1;
      std::byte* const slot = kSealed ? ends.sealed_slot(p, count, rank) : ends.slot(p, count, rank);
      each([&](int j, int i) {
        if constexpr (kSealed) {
          store_sealed(slot + place(k, i), own.part[j]);
        } else {
          *reinterpret_cast<uint4*>(slot + place(k, i)) = own.part[j];
        }
      });
    });
  }

  /// Sums packet `i` over the ranks; `own` is this rank's. Requesting the packets of several ranks at once
  /// was slower, because each launch fetches the additional code: 4.5 and 5.5 us instead of 4.2 and 5.1 us
  /// for two and four ranks and 16 kB.
  __device__ __forceinline__ void sum(uint4 own, int k, int i, const std::uint32_t (&counts)[kMaxPeers],
                                      float (&total)[kElements]) const {
    const int rank = channel.waits.rank;
#pragma unroll 2
    for (int p = 0; p < channel.waits.size; ++p) {
      uint4 x = own;
      if (p != rank) {
        const std::uint32_t count = counts[p] + 1;
        if constexpr (kSealed) {
          std::byte* const from = ends.sealed_slot(rank, count, p) + place(k, i);
          x = wait_for_sealed(channel.waits, p, from, count);
          clear_sealed(from);
        } else {
          x = __ldcg(reinterpret_cast<const uint4*>(ends.slot(rank, count, p) + place(k, i)));
        }
      }
      const Packet& packet = reinterpret_cast<const Packet&>(x);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float value = to_float(packet.elements[j]);
        total[j] = p == 0 ? value : total[j] + value;
      }
    }
  }

  /// residual += sum, then its norm. sum_of(j, i, total) gives the sum of packet i of the row, this thread's
  /// j-th.
  template <class SumOf>
  __device__ __forceinline__ void finish(std::int64_t row, const Packet (&residual)[kPackets],
                                         const SumOf& sum_of) const {
    const bool has_norm = rows.out != nullptr;
    Vector<W, kElements> weight;
    if (kPackets == 1 && has_norm && static_cast<int>(threadIdx.x) < packets)  // loads while the sums arrive
      weight = *reinterpret_cast<const Vector<W, kElements>*>(rows.weight +
                                                              element(0, static_cast<int>(threadIdx.x)));
    float x[kPackets][kElements];
    float squares = 0.0f;
    each([&](int j, int i) {
      sum_of(j, i, x[j]);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        x[j][e] = to_float(from_float<T>(x[j][e] + to_float(residual[j].elements[e])));  // rounded as stored
        squares += x[j][e] * x[j][e];
      }
      store_vector(rows.residual + element(row, i), x[j]);
    });
    if (!has_norm) return;
    const float mean = cluster_sum(squares, plan.parts) / static_cast<float>(rows.width);
    const float scale = 1.0f / sqrtf(mean + rows.epsilon);
    each([&](int j, int i) {
      if (kPackets > 1) weight = *reinterpret_cast<const Vector<W, kElements>*>(rows.weight + element(0, i));
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[j][e] = x[j][e] * scale * to_float(weight.elements[e]);
      store_vector(rows.out + element(row, i), x[j]);
    });
    leave_cluster_sum(plan.parts);
  }

  /// All rows of this block, some per round.
  __device__ void run(std::uint32_t (&counts)[kMaxPeers]) const {
    const int p = static_cast<int>(threadIdx.x);
    const bool is_peer = p < channel.waits.size && p != channel.waits.rank;
    std::int64_t first = blockIdx.x / plan.parts;
    Own own;  // the first row of a round, loaded early if registers allow
    if (kPackets == 1) load(first, own);
    if (p < channel.waits.size) counts[p] = ends.counts()[p];
    // Blocks of a cluster need each other, so a block whose rank has given up continues but sends nothing.
    bool sends = may_send(channel.waits);
    for (;;) {
      const auto row_of = [&](int k) { return first + std::int64_t{k} * plan.groups; };
      const auto for_rows = [&](const auto& use) {
        for (int k = 0; k < plan.rows_a_round && row_of(k) < rows.rows; ++k) {
          if (kPackets == 1 && k == 0) {
            use(own, k);
          } else {
            Own other;
            load(row_of(k), other);
            use(other, k);
          }
        }
      };
      if (sends) for_rows([&](const Own& row, int k) { send(row, k, counts); });
      if constexpr (!kSealed) {
        __syncthreads();
        if (is_peer) {
          if (sends) ends.send(p, counts[p] + 1, plan.tag);
          (void)ends.receive(p, counts[p] + 1, plan.tag);
        }
        __syncthreads();
      }
      for_rows([&](const Own& row, int k) {
        finish(row_of(k), row.residual,
               [&](int j, int i, float(&total)[kElements]) { sum(row.part[j], k, i, counts, total); });
      });
      first += std::int64_t{plan.groups} * plan.rows_a_round;
      const bool is_last = first >= rows.rows;
      if (kSealed && !is_last)
        __threadfence_system();  // places are cleared before peers hear of the next round
      __syncthreads();
      if (is_peer) ends.counts()[p] = ++counts[p];
      if (is_last) return;
      if (kPackets == 1) load(first, own);
      sends = may_send(channel.waits);
    }
  }
};

/// Runs `Block`, a PeerNormBlock or PeerNormShares, for each block's part. Latency-bound up to about 128 KB.
template <class Block, class T, class W>
__global__ void __launch_bounds__(kPeerNormThreads)
    peer_norm_kernel(const __grid_constant__ PeerChannel channel,
                     const __grid_constant__ PeerNormRows<T, W> rows,
                     const __grid_constant__ PeerNormPlan plan) {
  __shared__ std::uint32_t counts[kMaxPeers];
  // Where ranks share the GPU the next kernel could take the room of the peers' kernels.
  if (channel.waits.most_blocks == 0) start_next();
  wait_for_previous();
  Block(channel, rows, plan).run(counts);
}

}  // namespace helix::cuda
