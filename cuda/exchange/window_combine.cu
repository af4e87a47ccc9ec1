// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: the end of an exchange through the peers' memory, and its combine.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/comm/peer_wait.cuh"
#include "cuda/exchange/combine_rows.cuh"
#include "cuda/exchange/window_headers.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {
namespace {

constexpr int kThreads = kCombineThreads;
constexpr int kSendingWarp = kThreads / kWarp - 1;
static_assert(kSendingWarp * kWarp >= kMaxPeers, "the warp that sends waits for no peer");

/// Sends the headers that attention has not sent: of messages that something else wrote. One warp. Returns
/// the epoch that the peers' must carry.
__device__ std::uint64_t send_missing_headers(const PeerWaits& waits, const WindowExchangeArgs& args,
                                              const WindowPlace& place) {
  const bool may_send = !has_given_up(waits);
  const bool is_sent = are_headers_sent(args, place);
  const std::uint64_t epoch = epoch_of(args, place);
  if (!is_sent && may_send) send_headers(args, place, epoch);
  return epoch;
}

/// Waits for the message of `peer` in exchange number `exchanges`, counted from 1; `seen` is its epoch.
__device__ bool wait_for_header(const PeerWaits& waits, const std::byte* header, std::uint64_t exchanges,
                                int peer, std::uint64_t& seen) {
  return wait_for_peer(waits, peer, exchanges, [&](std::uint64_t& value) {
    value = seen = acquire_flag(header);
    return seen_count(static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(exchanges));
  });
}

/// Records the message of a peer that is of another step, token count or sender.
__device__ void check_header(const PeerWaits& waits, const WindowExchangeArgs& args, int peer,
                             std::uint64_t epoch, std::uint64_t seen, std::uint64_t rest) {
  if (seen != epoch) {
    give_up(waits, PeerFault::out_of_step, peer, seen, epoch);
  } else if (rest != header_rest(args, peer)) {
    give_up(waits, PeerFault::out_of_step, peer, rest, header_rest(args, peer));
  }
}

/// Every block waits for the peers' headers and merges its rows, as combine_kernel does. Block 0 sees to it
/// that this rank's have left. The last block that has read the epoch advances it.
template <class T, int kCount, int kRanks>
__global__ void __launch_bounds__(kThreads)
    window_combine_kernel(const __grid_constant__ PeerWaits waits,
                          const __grid_constant__ WindowExchangeArgs args,
                          const __grid_constant__ CombineRows<T> rows, RowShare share) {
  if (waits.most_blocks == 0) start_next();  // not where it would take the room of those that are waited for
  wait_for_previous();
  const WindowPlace place(args);
  const std::int64_t slot = place.slot;
  __shared__ std::uint64_t own_epoch;  // of block 0
  if (blockIdx.x == 0 && threadIdx.x / kWarp == kSendingWarp) {
    const std::uint64_t epoch = send_missing_headers(waits, args, place);
    if (threadIdx.x % kWarp == 0) own_epoch = epoch;
  }
  const int peer = static_cast<int>(threadIdx.x);
  const bool has_peer = peer < args.peers;
  const std::byte* const header = args.received + peer * args.sender_bytes + slot;
  std::uint64_t seen = 0;
  std::uint64_t rest = 0;
  const bool is_there = !has_peer || wait_for_header(waits, header, place.exchanges, peer, seen);
  if (__syncthreads_and(is_there) == 0) return;
  // Looked at when the rows are done: a trip to memory less.
  if (blockIdx.x == 0 && has_peer) rest = reinterpret_cast<const volatile std::uint64_t*>(header)[1];
  if (threadIdx.x == 0) {
    WindowCounts& counts = counts_of(args);
    if (atomicInc(&counts.combining, gridDim.x - 1) == gridDim.x - 1) counts.exchanges = place.exchanges;
  }
  const T* const all_out = rows.partial_out + slot / static_cast<std::int64_t>(sizeof(T));
  const float* const all_lse = rows.partial_lse + slot / static_cast<std::int64_t>(sizeof(float));
  const std::int64_t num_rows = rows.tokens * rows.heads;
  for (std::int64_t first = std::int64_t{blockIdx.x} * share.rows(); first < num_rows;
       first += std::int64_t{gridDim.x} * share.rows()) {
    const unsigned row = static_cast<unsigned>(first) + threadIdx.x / static_cast<unsigned>(share.threads);
    if (row < num_rows) merge_partials<T, kCount, kRanks, false>(rows, all_out, all_lse, share, row);
  }
  if (blockIdx.x == 0 && has_peer) check_header(waits, args, peer, own_epoch, seen, rest);
}

}  // namespace

template <class T>
void Operators<T>::combine_window(const PeerChannel& channel, const WindowExchangeArgs& window,
                                  const LseCombineArgs<T>& combine, Stream stream) const {
  const DeviceScope scope(state_->device);
  const CombineRows<T> rows = combine_rows(combine);
  with_vector<T>(has_aligned_rows(combine), [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const RowShare share(rows.dim / kCount);
    const int most = channel.waits.most_blocks;
    unsigned blocks = std::max(1u, ceil_div(rows.tokens * rows.heads, share.rows()));
    if (most > 0) blocks = std::min(blocks, static_cast<unsigned>(most));
    const auto launch = [&](auto ranks) {
      launch_early(window_combine_kernel<T, kCount, decltype(ranks)::value>, blocks, kThreads, 0,
                   stream.handle(), state_->is_hopper, channel.waits, window, rows, share);
    };
    if (rows.ranks <= 2) {
      launch(std::integral_constant<int, 2>{});
    } else if (rows.ranks <= 4) {
      launch(std::integral_constant<int, 4>{});
    } else {
      launch(std::integral_constant<int, 8>{});
    }
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
