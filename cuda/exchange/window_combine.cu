// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: the end of an exchange through the peers' memory, and its combine.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/comm/peer_wait.cuh"
#include "cuda/exchange/combine_rows.cuh"
#include "cuda/exchange/header.cuh"
#include "cuda/exchange/line_combine.cuh"
#include "cuda/exchange/window_counts.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {
namespace {

constexpr int kThreads = kCombineThreads;
constexpr int kSendingWarp = kThreads / kWarp - 1;
static_assert(kSendingWarp * kWarp >= kMaxPeers, "the warp that sends waits for no peer");

__device__ __forceinline__ std::uint64_t header_rest(const WindowExchangeArgs& window, std::int64_t sender) {
  return static_cast<std::uint32_t>(window.tokens) | static_cast<std::uint64_t>(sender) << 32;
}

/// Blocks per SM.
constexpr int blocks_per_sm(int ranks) {
  return ranks <= 2 ? 4 : ranks <= 4 ? 3 : 2;
}

/// Tells all peers that this rank's messages are complete, unless it has given up; all threads of a block.
/// Sets the block's `epoch`, which the peers' headers must carry too; valid after its next barrier.
__device__ __forceinline__ void send_headers(const PeerWaits& waits, const WindowExchangeArgs& args,
                                             const WindowPlace& place, std::uint64_t& epoch) {
  __shared__ unsigned long long terms[kThreads / kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool may_send = warp == kSendingWarp && !has_given_up(waits);
  const unsigned long long of_warp = sum_epoch_terms(args.positions, args.tokens, kThreads);
  if (lane == 0) terms[warp] = of_warp;
  __syncthreads();
  if (warp != kSendingWarp) return;
  const std::uint64_t own =
      exchange_epoch(place.exchanges, sum_of_lanes(lane < kThreads / kWarp ? terms[lane] : 0));
  if (may_send) {
    const auto send_word = [&](int word, std::uint64_t value) {
#pragma unroll 1
      for (std::int64_t p = lane; p < args.peers; p += kWarp) {
        if (p == args.sender) continue;
        auto* header =
            reinterpret_cast<volatile std::uint64_t*>(args.sent + p * args.peer_bytes + place.slot_begin);
        header[word] = value;
      }
    };
    send_word(1, header_rest(args, args.sender));
    __threadfence_system();  // a peer that sees the epoch has the rows and the rest of the header
    send_word(0, own);
  }
  if (lane == 0) epoch = own;
}

/// Waits for the message of `peer` in the exchange that WindowPlace::exchanges counts. Sets `seen` to its
/// epoch.
__device__ bool wait_for_header(const PeerWaits& waits, const std::byte* header, std::uint64_t exchanges,
                                int peer, std::uint64_t& seen) {
  return wait_for_peer(waits, peer, exchanges, [&](std::uint64_t& value) {
    value = seen = acquire_flag(header);
    return seen_count(static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(exchanges));
  });
}

/// Gives up if the peer's message is of another step, token count or sender.
__device__ void check_header(const PeerWaits& waits, const WindowExchangeArgs& args, int peer,
                             std::uint64_t epoch, std::uint64_t seen, std::uint64_t rest) {
  if (seen != epoch) {
    give_up(waits, PeerFault::out_of_step, peer, seen, epoch);
  } else if (rest != header_rest(args, peer)) {
    give_up(waits, PeerFault::out_of_step, peer, rest, header_rest(args, peer));
  }
}

/// Block 0 sends this rank's headers and compares the peers' with them. The others, or block 0 if it is
/// alone, wait for the peers' headers and merge rows as combine_kernel does. A block takes many rows, because
/// waiting and counting cost time per block: 34 MB took 37 us with a block per 16 rows and take 20. The last
/// block that has read the count of exchanges advances it.
///
/// If the last block of attention sent the headers, they left later, after its fence, its count and its
/// reads: a step of one sequence took 2.80 ms that way and takes 2.71 this way.
template <class T, int kCount, int kRanks>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kRanks))
    window_combine_kernel(const __grid_constant__ PeerWaits waits,
                          const __grid_constant__ WindowExchangeArgs args,
                          const __grid_constant__ CombineRows<T> rows, RowShare share) {
  // Where ranks share the GPU the next kernel could take the room of the kernels that this one waits for.
  if (waits.most_blocks == 0) start_next();
  wait_for_previous();
  const WindowPlace place(args);
  const std::int64_t slot_begin = place.slot_begin;
  __shared__ std::uint64_t own_epoch;  // used by block 0
  if (blockIdx.x == 0) send_headers(waits, args, place, own_epoch);
  const int peer = static_cast<int>(threadIdx.x);
  const bool has_peer = peer < args.peers && peer != args.sender;
  const std::byte* const header = args.received + peer * args.sender_bytes + slot_begin;
  std::uint64_t seen = 0;
  std::uint64_t rest = 0;
  const bool is_there = !has_peer || wait_for_header(waits, header, place.exchanges, peer, seen);
  if (__syncthreads_and(is_there) == 0) return;
  // Compared after the rows are merged, which saves trips to memory.
  if (blockIdx.x == 0 && has_peer) rest = reinterpret_cast<const volatile std::uint64_t*>(header)[1];
  const bool is_last = count_reader(args);
  const T* const all_out = rows.partial_out + slot_begin / static_cast<std::int64_t>(sizeof(T));
  const float* const all_lse = rows.partial_lse + slot_begin / static_cast<std::int64_t>(sizeof(float));
  const unsigned sending = gridDim.x > 1 ? 1 : 0;  // blocks that only send
  if (blockIdx.x >= sending) {
    for_rows_of_block(
        rows, share, blockIdx.x - sending, gridDim.x - sending, [&](unsigned token, unsigned head) {
          merge_partials<kCount, kRanks>(
              rows, PartialRowInMemory<T, false>(rows, all_out, all_lse, token, head), share, token, head);
        });
  }
  // A peer that gave up, in any group, after its header was sent may have written its next rows over those
  // merged here. It says so in this group first. The block has used its rows, so this look comes after them.
  __syncthreads();
  if (has_peer && has_peer_given_up(waits, peer))
    give_up(waits, PeerFault::gave_up, peer, seen, place.exchanges);
  if (is_last) counts_of(args).exchanges = place.exchanges;
  if (blockIdx.x == 0 && has_peer) check_header(waits, args, peer, own_epoch, seen, rest);
}

}  // namespace

template <class T>
void Operators<T>::combine_window(const PeerChannel& channel, const WindowExchangeArgs& window,
                                  const LseCombineArgs<T>& combine, Stream stream) const {
  const DeviceScope scope(state_->device);
  const CombineRows<T> rows = combine_rows(combine);
  if (window.lines.out != nullptr)
    return launch_line_combine(channel.waits, window, rows, state_->num_sms, state_->is_hopper, stream);
  with_vector<T>(has_aligned_rows(combine), [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const RowShare share(rows.dim / kCount);
    const int most = channel.waits.most_blocks;
    const unsigned needed = 1 + share.blocks(rows.tokens * rows.heads);
    with_ranks(rows.ranks, [&](auto ranks) {
      constexpr int kRanks = decltype(ranks)::value;
      const int room = most > 0 ? most : blocks_per_sm(kRanks) * state_->num_sms;
      const unsigned blocks = std::min(needed, static_cast<unsigned>(room));
      launch_early(window_combine_kernel<T, kCount, kRanks>, blocks, kThreads, 0, stream.handle(),
                   state_->is_hopper, channel.waits, window, rows, share);
    });
  });
}

#define HELIX_INSTANTIATE(T)                                                                \
  template void Operators<T>::combine_window(const PeerChannel&, const WindowExchangeArgs&, \
                                             const LseCombineArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
