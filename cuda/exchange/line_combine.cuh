// SPDX-License-Identifier: Apache-2.0
// The combine of partials that arrive as lines (LineRows). Each thread waits only for the lines that it
// merges, so a row is merged as soon as its last line has arrived.
//
// Blocks may start, wait and merge while this rank's own attention runs, which starts them once all earlier
// kernels have ended. Until it has ended too they read lines and what those kernels wrote, but store no
// result: a combined row may overlap memory that attention uses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <helix/backend/exchange.hpp>

#include "cuda/comm/peer_lines.cuh"
#include "cuda/comm/peer_wait.cuh"
#include "cuda/exchange/combine_rows.cuh"
#include "cuda/exchange/window_counts.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {

/// One row of an exchange, from all ranks, with the interface of PartialRowInMemory.
template <class T>
struct PartialRowInLines {
  /// How long a thread polls for lines before it waits for its own rank's attention. The peers' deadline
  /// counts from the end of that attention.
  static constexpr std::uint64_t kAheadNs = 1'000'000;

  const PeerWaits& waits;
  int ranks;
  std::int64_t sender_bytes;
  const std::byte* out;  // of rank 0
  const std::byte* lse_line;
  std::uint32_t count;
  std::uint32_t tag;

  __device__ __forceinline__ PartialRowInLines(const PeerWaits& how, const WindowExchangeArgs& args,
                                               const WindowPlace& place, std::int64_t token,
                                               std::int64_t head)
      : waits(how), ranks(static_cast<int>(args.peers)), sender_bytes(args.sender_bytes) {
    out = args.lines.out_of(token, head) + place.slot_begin;
    lse_line = args.lines.lse_of(token, head) + place.slot_begin;
    count = static_cast<std::uint32_t>(place.exchanges);
    tag = exchange_row_tag(args.positions, token, args.tokens);
  }

  /// Waits for the lse of `rank`.
  __device__ float lse(int rank) const {
    uint2 line;
    const bool is_there = await(rank, [&] { return load_line(lse_line + rank * sender_bytes, count, line); });
    return is_there ? __uint_as_float(line.x) : -kInfinity;
  }

  __device__ __forceinline__ void before_store() const { wait_for_previous(); }

  /// Waits for the lines of all ranks. An lse that never comes counts as -inf.
  template <int kCount, int kRanks>
  __device__ __forceinline__ void load(PartialColumns<T, kCount, kRanks>& to, int column, int begin) const {
    unsigned missing = look(to, column, begin);
    if (missing != 0) {
      const std::uint64_t start = global_ns();
      const auto goes_on = [&] { return global_ns() - start < kAheadNs && !has_given_up(waits); };
      for (unsigned i = 1; missing != 0 && (i % 64 != 0 || goes_on()); ++i) missing = look(to, column, begin);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if ((missing >> r & 1) == 0) continue;
      const bool is_there =
          await(begin + r, [&] { return look_at(begin + r, column, to.lse[r], to.out[r]); });
      if (!is_there) to.lse[r] = -kInfinity;
    }
  }

 private:
  /// Returns the ranks, a bit each from `begin` on, whose lines have not all come. Issues all loads at once.
  template <int kCount, int kRanks>
  __device__ __forceinline__ unsigned look(PartialColumns<T, kCount, kRanks>& to, int column,
                                           int begin) const {
    unsigned missing = 0;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (begin + r >= ranks) {
        to.lse[r] = -kInfinity;
      } else if (!look_at(begin + r, column, to.lse[r], to.out[r])) {
        missing |= 1u << r;
      }
    }
    return missing;
  }

  template <int kCount>
  __device__ __forceinline__ bool look_at(int rank, int column, float& lse,
                                          Vector<T, kCount>& columns) const {
    static_assert(kCount == kLineColumns<T> || kCount == 1);
    uint2 first;
    uint2 line;
    const bool has_lse = load_line(lse_line + rank * sender_bytes, count, first);
    const bool has_columns =
        load_line(out + rank * sender_bytes + column / kLineColumns<T> * kLineBytes, count, line);
    lse = __uint_as_float(first.x);
    const auto* elements = reinterpret_cast<const T*>(&line);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      columns.elements[j] = elements[kCount == 1 ? column % kLineColumns<T> : j];
    if (has_lse && first.y != tag) give_up(waits, PeerFault::out_of_step, rank, first.y, tag);
    return has_lse && has_columns;
  }

  /// Waits until has_come(). False: it never will.
  template <class HasCome>
  __device__ __forceinline__ bool await(int rank, const HasCome& has_come) const {
    wait_for_previous();
    return wait_for_peer(waits, rank, count, [&](std::uint64_t& value) {
      const bool is_there = has_come();
      value = is_there ? count : 0;
      return is_there ? Seen::there : Seen::not_yet;
    });
  }
};

/// A block takes share.rows() rows side by side. There are as many blocks as all rows need, up to two per SM
/// (or PeerWaits::most_blocks); beyond that, blocks take further rows in turn.
template <class T, int kCount, int kRanks>
__global__ void __launch_bounds__(kCombineThreads)
    line_combine_kernel(const __grid_constant__ PeerWaits waits,
                        const __grid_constant__ WindowExchangeArgs args,
                        const __grid_constant__ CombineRows<T> rows, RowShare share) {
  // Where ranks share the GPU the next kernel could take the room of the kernels that this one waits for.
  if (waits.most_blocks == 0) start_next();
  const WindowPlace place(args);
  __syncthreads();
  const bool is_last = count_reader(args);
  for_rows_of_block(rows, share, blockIdx.x, gridDim.x, [&](unsigned token, unsigned head) {
    merge_partials<kCount, kRanks>(rows, PartialRowInLines<T>(waits, args, place, token, head), share, token,
                                   head);
  });
  wait_for_previous();
  if (is_last) counts_of(args).exchanges = place.exchanges;
}

template <class T>
void launch_line_combine(const PeerWaits& waits, const WindowExchangeArgs& args, const CombineRows<T>& rows,
                         int num_sms, bool is_hopper, Stream stream) {
  const bool is_aligned = common_alignment({address_of(rows.out), step_of<T>(rows.out_strides[0]),
                                            step_of<T>(rows.out_strides[1])}) >= 8;
  const auto launch = [&](auto count, auto ranks) {
    constexpr int kCount = decltype(count)::value;
    const RowShare share(rows.dim / kCount);
    const unsigned needed = share.blocks(rows.tokens * rows.heads);
    const int room = waits.most_blocks > 0 ? waits.most_blocks : 2 * num_sms;
    launch_early(line_combine_kernel<T, kCount, decltype(ranks)::value>,
                 std::min(needed, static_cast<unsigned>(room)), kCombineThreads, 0, stream.handle(),
                 is_hopper, waits, args, rows, share);
  };
  const auto launch_ranks = [&](auto count) {
    with_ranks(rows.ranks, [&](auto ranks) { launch(count, ranks); });
  };
  if (is_aligned) {
    launch_ranks(std::integral_constant<int, kLineColumns<T>>{});
  } else {
    launch_ranks(std::integral_constant<int, 1>{});
  }
}

}  // namespace helix::cuda
