// SPDX-License-Identifier: Apache-2.0
// Collectives over peer memory. Each block takes a stripe of every message and proceeds in rounds: it writes
// a piece of the stripe into a slot at each peer, sets the flags, waits for the peers' flags, and reads its
// own slots. Latency-bound at decode sizes (a flag crosses NVLink in 1.2 us); above, bound by what few SMs
// can push.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/comm/peer_moves.hpp"
#include "cuda/comm/peer_wait.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kThreads = 512;

/// The part of `bytes` that a block moves, a multiple of 16 bytes except at the end.
struct Stripe {
  std::int64_t begin;
  std::int64_t bytes;

  __device__ Stripe(std::int64_t total, int block, int blocks) {
    const std::int64_t each = ((total + blocks - 1) / blocks + 15) / 16 * 16;
    begin = min(total, each * block);
    bytes = min(total, begin + each) - begin;
  }
};

/// Copies with all threads of the block. Peers may have written `from`, so reads bypass L1.
__device__ __forceinline__ void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto bits = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  std::int64_t done = 0;
  if (bits % 16 == 0) {
    const std::int64_t units = bytes / 16;
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < units; i += kThreads)
      reinterpret_cast<uint4*>(to)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
    done = units * 16;
  } else if (bits % 4 == 0) {
    const std::int64_t units = bytes / 4;
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < units; i += kThreads)
      reinterpret_cast<unsigned*>(to)[i] = __ldcg(reinterpret_cast<const unsigned*>(from) + i);
    done = units * 4;
  }
  for (std::int64_t i = done + threadIdx.x; i < bytes; i += kThreads)
    reinterpret_cast<unsigned char*>(to)[i] = __ldcg(reinterpret_cast<const unsigned char*>(from) + i);
}

/// Loads a packet that peers may have written, bypassing L1.
template <class Packet>
__device__ __forceinline__ Packet fresh(const void* from) {
  using Word = std::conditional_t<sizeof(Packet) == 16, uint4,
                                  std::conditional_t<sizeof(Packet) == 4, unsigned, unsigned short>>;
  static_assert(sizeof(Word) == sizeof(Packet));
  union {
    Word word;
    Packet packet;
  } both{__ldcg(static_cast<const Word*>(from))};
  return both.packet;
}

/// The rounds of one block with each peer.
struct Rounds {
  std::uint32_t counts[kMaxPeers];  ///< Messages so far.
  int left[kMaxPeers];
  int most;
};

/// The tag in the flags of a message of `bytes`, of a call with tag `tag`.
__device__ __forceinline__ std::uint32_t tag_with(std::uint32_t tag, std::int64_t bytes) {
  return tag ^ static_cast<std::uint32_t>(bytes) ^ static_cast<std::uint32_t>(bytes >> 32);
}

/// Sets the flags of a round, send_tag(p) for peer p, and waits for the peers' flags, recv_tag(p) from p; all
/// threads. Returns whether all came.
template <class SendTag, class RecvTag>
__device__ bool meet(const BlockChannel& ends, Rounds& rounds, const SendTag& send_tag,
                     const RecvTag& recv_tag) {
  const int p = static_cast<int>(threadIdx.x);
  bool is_there = true;
  __syncthreads();
  if (p < ends.channel.waits.size && rounds.left[p] > 0) {
    const std::uint32_t count = rounds.counts[p] + 1;
    ends.send(p, count, send_tag(p));
    is_there = ends.receive(p, count, recv_tag(p));
  }
  return __syncthreads_and(is_there) != 0;
}

/// Ends a round, when all threads have read their slots.
__device__ void finish_round(const BlockChannel& ends, Rounds& rounds) {
  const int p = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (p < ends.channel.waits.size && rounds.left[p] > 0) {
    ends.counts()[p] = ++rounds.counts[p];
    --rounds.left[p];
  }
  __syncthreads();
}

/// Reads the counts and sets left[p] = rounds_with(p) for all peers. Returns false if this rank has given up.
template <class RoundsWith>
__device__ bool begin_rounds(const BlockChannel& ends, Rounds& rounds, const RoundsWith& rounds_with) {
  const int p = static_cast<int>(threadIdx.x);
  if (p == 0) rounds.most = 0;
  __syncthreads();
  if (p < ends.channel.waits.size) {
    rounds.counts[p] = ends.counts()[p];
    rounds.left[p] = p == ends.channel.waits.rank ? 0 : rounds_with(p);
    atomicMax(&rounds.most, rounds.left[p]);
  }
  return may_send(ends.channel.waits);
}

__global__ void __launch_bounds__(kThreads)
    move_kernel(const __grid_constant__ PeerChannel channel, const __grid_constant__ PeerMoves moves) {
  __shared__ Rounds rounds;
  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(gridDim.x);
  const BlockChannel ends{channel, block};
  const int rank = channel.waits.rank;
  const auto pieces = [&](std::int64_t bytes) {
    return static_cast<int>((Stripe(bytes, block, blocks).bytes + channel.piece - 1) / channel.piece);
  };
  const auto send_tag = [&](int p) { return tag_with(moves.tag, moves.send_bytes[p]); };
  const auto recv_tag = [&](int p) { return tag_with(moves.tag, moves.recv_bytes[p]); };
  const int least = moves.all_meet && block == 0 ? 1 : 0;
  const auto rounds_with = [&](int p) {
    return max(least, max(pieces(moves.send_bytes[p]), pieces(moves.recv_bytes[p])));
  };
  if (!begin_rounds(ends, rounds, rounds_with)) return;
  const std::byte* const own = moves.in + moves.send_begin[rank];
  if (std::byte* const to = moves.out + moves.recv_begin[rank]; moves.recv_bytes[rank] > 0 && to != own) {
    const Stripe stripe(moves.recv_bytes[rank], block, blocks);
    copy_bytes(to + stripe.begin, own + stripe.begin, stripe.bytes);
  }
  const auto length = [&](const Stripe& stripe, int round) {
    return max(std::int64_t{0}, min(channel.piece, stripe.bytes - round * channel.piece));
  };
  for (int round = 0; round < rounds.most; ++round) {
    for_peers(channel.waits, [&](int p) {
      if (rounds.left[p] <= 0) return;
      const Stripe stripe(moves.send_bytes[p], block, blocks);
      copy_bytes(ends.slot(p, rounds.counts[p] + 1, rank),
                 moves.in + moves.send_begin[p] + stripe.begin + round * channel.piece,
                 length(stripe, round));
    });
    if (!meet(ends, rounds, send_tag, recv_tag)) return;
    for_peers(channel.waits, [&](int p) {
      if (rounds.left[p] <= 0) return;
      const Stripe stripe(moves.recv_bytes[p], block, blocks);
      copy_bytes(moves.out + moves.recv_begin[p] + stripe.begin + round * channel.piece,
                 ends.slot(rank, rounds.counts[p] + 1, p), length(stripe, round));
    });
    finish_round(ends, rounds);
  }
}

/// Sums in packets of kCount elements. The stripe of a block begins at a whole packet.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ PeerChannel channel, const __grid_constant__ PeerReduction call) {
  __shared__ Rounds rounds;
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  const int block = static_cast<int>(blockIdx.x);
  const BlockChannel ends{channel, block};
  const int rank = channel.waits.rank;
  const int size = channel.waits.size;
  const Stripe stripe(call.count * kBytes, block, static_cast<int>(gridDim.x));
  const auto pieces = [&](int) {
    return static_cast<int>((stripe.bytes + channel.piece - 1) / channel.piece);
  };
  if (!begin_rounds(ends, rounds, pieces)) return;
  const std::int64_t slice = call.is_scatter ? call.count : 0;
  const auto tag = [&](int) { return call.tag; };
  for (int round = 0; round < rounds.most; ++round) {
    const std::int64_t first = (stripe.begin + round * channel.piece) / kBytes;
    const std::int64_t bytes = min(channel.piece, stripe.bytes - round * channel.piece);
    const T* const in = static_cast<const T*>(call.in) + first;
    for_peers(channel.waits, [&](int p) {
      copy_bytes(ends.slot(p, rounds.counts[p] + 1, rank), reinterpret_cast<const std::byte*>(in + p * slice),
                 bytes);
    });
    if (!meet(ends, rounds, tag, tag)) return;
    const std::int64_t packets = bytes / kBytes / kCount;
    T* const out = static_cast<T*>(call.out) + first;
    const auto sum = [&](std::int64_t i, auto count) {
      constexpr int kElements = decltype(count)::value;
      using Packet = Vector<T, kElements>;
      float total[kElements] = {};
      for (int p = 0; p < size; ++p) {
        const T* const from = p == rank
                                  ? in + rank * slice
                                  : reinterpret_cast<const T*>(ends.slot(rank, rounds.counts[p] + 1, p));
        const auto packet = fresh<Packet>(from + i);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          const float x = to_float(packet.elements[j]);
          total[j] = p == 0 ? x : total[j] + x;
        }
      }
      store_vector(out + i, total);
    };
    for (std::int64_t i = threadIdx.x; i < packets; i += kThreads)
      sum(i * kCount, std::integral_constant<int, kCount>{});
    for (std::int64_t i = packets * kCount + threadIdx.x; i < bytes / kBytes; i += kThreads)
      sum(i, std::integral_constant<int, 1>{});
    finish_round(ends, rounds);
  }
}

template <class T>
void launch_reduce(const PeerChannel& channel, const PeerReduction& call, int blocks, StreamHandle stream) {
  const bool is_aligned =
      common_alignment({address_of(call.in), address_of(call.out),
                        call.is_scatter ? step_of<T>(call.count) : std::uintptr_t{0}}) == 16;
  with_vector<T>(is_aligned, [&](auto count) {
    reduce_kernel<T, decltype(count)::value>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(channel, call);
    HELIX_CHECK_LAUNCH();
  });
}

}  // namespace

void peer_move(const PeerChannel& channel, const PeerMoves& moves, int blocks, StreamHandle stream) {
  move_kernel<<<static_cast<unsigned>(std::min(blocks, channel.channels)), kThreads, 0, stream>>>(channel,
                                                                                                  moves);
  HELIX_CHECK_LAUNCH();
}

void peer_reduce(const PeerChannel& channel, const PeerReduction& call, int blocks, StreamHandle stream) {
  blocks = std::min(blocks, channel.channels);
  if (call.dtype == DType::f32) return launch_reduce<float>(channel, call, blocks, stream);
  if (call.dtype == DType::f16) return launch_reduce<f16>(channel, call, blocks, stream);
  launch_reduce<bf16>(channel, call, blocks, stream);
}

}  // namespace helix::cuda
