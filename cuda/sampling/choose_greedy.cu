// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::choose_greedy: greedy choice over the ranks' shards of the vocabulary, in one kernel.
//
// The blocks of a cluster find the largest logit of a row on this rank. Each peer gets one sealed packet per
// row: the largest, the sum of squares, and a word that identifies the step. All ranks take the largest of
// all packets.
#include <algorithm>
#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include <helix/backend/exchange.hpp>
#include <helix/cuda/backend.hpp>

#include "cuda/comm/peer_sealed.cuh"
#include "cuda/comm/peer_wait.cuh"
#include "cuda/exchange/header.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/warp.cuh"
#include "cuda/sampling/logit_rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kRoundRows = 32;  // rows per group and round; their packets fit a slot of any group size
constexpr std::uint32_t kTag = 0x63686f73;
constexpr std::uint32_t kHighBit = 0x80000000;

static_assert(kRoundRows * sizeof(uint4) <= kMinPieceBytes);

/// Launch arguments.
template <class T>
struct ChoiceRows {
  LogitRows<T> logits;
  std::int64_t rows;
  int groups;  // clusters, each of which takes every groups-th row
  std::int64_t num_tokens;
  const std::int64_t* positions;
  std::int32_t* tokens;
  float* norms;  // or null
};

/// What a rank knows about a row.
struct RowChoice {
  Ranked largest;
  float squares;

  friend __device__ RowChoice operator+(const RowChoice& a, const RowChoice& b) {
    return {a.largest > b.largest ? a.largest : b.largest, a.squares + b.squares};
  }
};

using Reduce = cub::BlockReduce<RowChoice, kLogitThreads>;

struct SharedState {
  typename Reduce::TempStorage reduce;
  RowChoice of_block;           // of the current row
  RowChoice found[kRoundRows];  // of the round's rows, on this rank
  std::uint32_t counts[kMaxPeers];
  unsigned long long terms;  // sum of exchange_epoch_term()
  bool has_given_up;
};

/// One group's rows. The leading block of a cluster exchanges with the peers, over its own channel.
template <bool kIsAligned, class T>
struct ChoiceGroup {
  const PeerChannel& channel;
  const ChoiceRows<T>& args;
  SharedState& shared;
  BlockChannel ends;

  __device__ ChoiceGroup(const PeerChannel& to, const ChoiceRows<T>& rows, SharedState& state)
      : channel(to), args(rows), shared(state), ends{to, RowBlocks::row()} {}

  /// The choice for row `row` on this rank; valid in thread 0 of the leading block.
  __device__ RowChoice find(std::int64_t row) const {
    RowChoice mine{0, 0.0f};
    for_each_logit<kIsAligned>(args.logits, row, [&](float logit, std::int32_t id) {
      mine.largest = max(mine.largest, ranked_of<T>(logit, id));
      mine.squares += logit * logit;
    });
    mine = Reduce(shared.reduce).Reduce(mine, [](const RowChoice& a, const RowChoice& b) { return a + b; });
    if (RowBlocks::count() == 1) return mine;
    if (threadIdx.x == 0) shared.of_block = mine;
    RowBlocks::sync();
    if (threadIdx.x == 0 && RowBlocks::rank() == 0)
      for (int block = 1; block < RowBlocks::count(); ++block)
        mine = mine + RowBlocks::of(block, shared.of_block);
    RowBlocks::sync();
    return mine;
  }

  /// The word that identifies the step in its packets; never ~0.
  __device__ std::uint32_t step_word() const {
    return (static_cast<std::uint32_t>(exchange_epoch(0, shared.terms) >> 32) ^ kTag ^
            static_cast<std::uint32_t>(args.num_tokens)) &
           ~kHighBit;
  }

  /// Prepares what the leader's packets need. Called by all threads.
  __device__ void begin() const {
    const int size = channel.waits.size;
    if (size == 1) return;
    if (threadIdx.x == 0) {
      shared.terms = 0;
      shared.has_given_up = has_given_up(channel.waits);
    }
    if (static_cast<int>(threadIdx.x) < size) shared.counts[threadIdx.x] = ends.counts()[threadIdx.x];
    __syncthreads();
    const unsigned long long terms = sum_epoch_terms(args.positions, args.num_tokens, kLogitThreads);
    if (threadIdx.x % kWarp == 0 && terms != 0) atomicAdd(&shared.terms, terms);
    __syncthreads();
  }

  /// Sends the round's k-th row to the peers. Called by at least one thread per rank.
  __device__ void send(int k) const {
    const int p = static_cast<int>(threadIdx.x);
    const PeerWaits& waits = channel.waits;
    if (p >= waits.size || p == waits.rank || shared.has_given_up) return;
    const RowChoice& own = shared.found[k];
    const std::uint32_t count = shared.counts[p] + 1;
    // The low word is the complement of an id: its highest bit is set. Without that bit no word is ~0.
    store_sealed(ends.sealed_slot(p, count, waits.rank) + k * sizeof(uint4),
                 {key_of_ranked(own.largest), static_cast<std::uint32_t>(own.largest) & ~kHighBit,
                  __float_as_uint(own.squares), step_word()});
  }

  /// Receives the packet of peer `p` for the round's k-th row.
  __device__ RowChoice receive(int p, int k) const {
    const PeerWaits& waits = channel.waits;
    const std::uint32_t count = shared.counts[p] + 1;
    std::byte* const from = ends.sealed_slot(waits.rank, count, p) + k * sizeof(uint4);
    uint4 packet{};
    const bool is_there = wait_for_peer(waits, p, flag_of(count, step_word()), [&](std::uint64_t& value) {
      if (!load_sealed(from, packet)) return Seen::not_yet;
      value = flag_of(count, packet.w);
      return packet.w == step_word() ? Seen::there : Seen::wrong;
    });
    if (!is_there) return {0, 0.0f};
    clear_sealed(from);
    return {static_cast<Ranked>(packet.x) << 32 | packet.y | kHighBit, __uint_as_float(packet.z)};
  }

  /// The choice over all ranks; valid in lane 0 of the warp. All ranks add the squares in the same order.
  __device__ RowChoice gather(int k) const {
    const int size = channel.waits.size;
    RowChoice all{0, 0.0f};
    for (int p = static_cast<int>(threadIdx.x) % kWarp; p < size; p += kWarp)
      all = all + (p == channel.waits.rank ? shared.found[k] : receive(p, k));
    const int lanes = size > 1 ? kWarp : 1;
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      all = all +
            RowChoice{__shfl_xor_sync(~0u, all.largest, offset), __shfl_xor_sync(~0u, all.squares, offset)};
    return all;
  }

  __device__ void run() const {
    const bool leads = RowBlocks::rank() == 0;
    if (leads) begin();
    const auto row_of = [&](std::int64_t first, int k) { return first + std::int64_t{k} * args.groups; };
    for (std::int64_t first = RowBlocks::row(); first < args.rows; first = row_of(first, kRoundRows)) {
      int rows = 0;
      for (; rows < kRoundRows && row_of(first, rows) < args.rows; ++rows) {
        const RowChoice choice = find(row_of(first, rows));
        if (!leads) continue;
        if (threadIdx.x == 0) shared.found[rows] = choice;
        __syncthreads();
        send(rows);
      }
      if (!leads) continue;
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      for (int k = static_cast<int>(threadIdx.x) / kWarp; k < rows; k += kLogitThreads / kWarp) {
        const RowChoice choice = gather(k);
        if (lane != 0) continue;
        args.tokens[row_of(first, k)] = token_of<T>(choice.largest);
        if (args.norms != nullptr) args.norms[row_of(first, k)] = sqrtf(choice.squares);
      }
      __threadfence_system();  // places are cleared before peers hear of the next round
      __syncthreads();
      const int p = static_cast<int>(threadIdx.x);
      if (p < channel.waits.size && p != channel.waits.rank) {
        ends.counts()[p] = ++shared.counts[p];
        if (has_given_up(channel.waits)) shared.has_given_up = true;
      }
      __syncthreads();
    }
  }
};

/// Reads rows * width * sizeof(T) bytes and sends 16 bytes per row and peer. Latency-bound.
template <bool kIsAligned, class T>
__global__ void __launch_bounds__(kLogitThreads)
    choose_kernel(const __grid_constant__ PeerChannel channel, const __grid_constant__ ChoiceRows<T> rows) {
  __shared__ SharedState shared;
  // Where ranks share the GPU the next kernel could take the room of the peers' kernels.
  if (channel.waits.most_blocks == 0) start_next();
  wait_for_previous();
  ChoiceGroup<kIsAligned, T>(channel, rows, shared).run();
}

}  // namespace

template <class T>
void Operators<T>::choose_greedy(const PeerChannel* channel, const ChooseGreedyArgs<T>& args,
                                 Stream stream) const {
  const std::int64_t rows = args.logits.extent(1);
  if (rows == 0) return;
  const DeviceScope scope(state_->device);
  const PeerChannel alone{};
  const PeerChannel& peers = channel == nullptr ? alone : *channel;
  const bool has_peers = peers.waits.size > 1;
  // If ranks share a GPU, no more than other waiting kernels: clusters need room at once.
  const int most_blocks =
      peers.waits.most_blocks > 0 ? std::min(peers.channels, peers.waits.most_blocks) : state_->num_sms;
  const int most_groups = has_peers ? std::min(peers.channels, most_blocks) : most_blocks;
  const auto groups = static_cast<int>(std::min<std::int64_t>(rows, most_groups));
  const int blocks = blocks_a_row(groups, most_blocks, state_->is_hopper);
  const ChoiceRows<T> all{LogitRows<T>(args.logits, args.shard_begins),
                          rows,
                          groups,
                          args.num_tokens,
                          args.positions,
                          args.tokens,
                          args.norms};
  const auto kernel = all.logits.is_aligned() ? choose_kernel<true, T> : choose_kernel<false, T>;
  launch_with(state_->is_hopper ? LaunchAttributes().early().clusters(blocks) : LaunchAttributes(), kernel,
              static_cast<unsigned>(groups * blocks), kLogitThreads, 0, stream.handle(), peers, all);
}

#define HELIX_INSTANTIATE(T) \
  template void Operators<T>::choose_greedy(const PeerChannel*, const ChooseGreedyArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
