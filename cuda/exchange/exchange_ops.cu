// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: packs, checks and combines partial attention between KVP ranks.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/exchange/combine_rows.cuh"
#include "cuda/exchange/header.cuh"
#include "cuda/exchange/target_place.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {
namespace {

constexpr int kThreads = kCombineThreads;

__global__ void __launch_bounds__(kWarp) stamp_kernel(StampArgs args) {
  write_headers(args);
}

/// Partials as rows of bytes, one per token and head, and where they go.
struct PackRows {
  const std::byte* out;
  std::int64_t out_token_bytes;
  std::int64_t out_head_bytes;
  std::byte* packed;
  std::int64_t packed_token_bytes;
  std::int64_t packed_head_bytes;
  std::int64_t row_bytes;
  const float* lse;
  std::int64_t lse_token_stride;
  std::int64_t lse_head_stride;
  float* packed_lse;
  std::int64_t packed_lse_token_stride;
  std::int64_t packed_lse_head_stride;
  std::int64_t tokens;
  int heads;
  LseConvention convention;  // of lse
  TargetSlot slot;           // of packed and packed_lse
};

/// The last block writes the headers. The others copy rows, with `share.threads` threads per row, in units of
/// Unit. Reads and writes tokens * heads * (Dv * sizeof(T) + 4) bytes each.
template <class Unit>
__global__ void __launch_bounds__(kThreads) pack_kernel(PackRows rows, RowShare share, StampArgs headers) {
  if (blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x < kWarp && headers.message != nullptr) write_headers(headers);
    return;
  }
  const unsigned row = share.row(blockIdx.x);
  if (row >= rows.tokens * rows.heads) return;
  const std::int64_t token = row / static_cast<unsigned>(rows.heads);
  const std::int64_t head = row % static_cast<unsigned>(rows.heads);
  const bool is_second = rows.slot.exchanges != nullptr && *rows.slot.exchanges % 2 == 1;
  const std::int64_t slot_begin = is_second ? rows.slot.bytes : 0;
  if (share.thread() == 0) {
    float* const packed_lse = rows.packed_lse + slot_begin / static_cast<std::int64_t>(sizeof(float));
    packed_lse[token * rows.packed_lse_token_stride + head * rows.packed_lse_head_stride] =
        to_natural(rows.lse[token * rows.lse_token_stride + head * rows.lse_head_stride], rows.convention);
  }
  const auto* source =
      reinterpret_cast<const Unit*>(rows.out + token * rows.out_token_bytes + head * rows.out_head_bytes);
  auto* target = reinterpret_cast<Unit*>(rows.packed + slot_begin + token * rows.packed_token_bytes +
                                         head * rows.packed_head_bytes);
  const std::int64_t units = rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t i = share.thread(); i < units; i += share.threads) target[i] = source[i];
}

/// Rows to be sent as lines, one per token and head.
template <class T>
struct LineSource {
  TensorView<const T, 3> out;
  TensorView<const float, 2> lse;
  LseConvention convention;  // of lse
};

/// `share.threads` threads per row. Reads tokens * heads * (Dv * sizeof(T) + 4) bytes and writes twice as
/// many.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pack_lines_kernel(LineSource<T> from, RowShare share, TargetSlot slot,
                      const __grid_constant__ TargetLines lines) {
  wait_for_previous();
  start_next();  // not before: see follow_previous() of attention
  const auto heads = static_cast<unsigned>(from.out.extent(1));
  const unsigned row = share.row(blockIdx.x);
  if (row >= static_cast<unsigned>(from.out.extent(0)) * heads) return;
  const std::int64_t token = row / heads;
  const std::int64_t head = row % heads;
  const TargetPlace place(slot.exchanges, lines.gave_up);
  const std::int64_t begin = place.slot * slot.bytes;
  if (share.thread() == 0) {
    store_line(lines.rows.lse_of(token, head) + begin,
               __float_as_uint(to_natural(from.lse(token, head), from.convention)),
               exchange_row_tag(lines.positions, token, lines.tokens), place.count);
  }
  const T* const source = &from.out(token, head, 0);
  std::byte* const to = lines.rows.out_of(token, head) + begin;
  for (std::int64_t i = share.thread(); i * kLineColumns<T> < from.out.extent(2); i += share.threads) {
    Vector<T, kLineColumns<T>> columns;
#pragma unroll
    for (int j = 0; j < kLineColumns<T>; ++j) columns.elements[j] = source[i * kLineColumns<T> + j];
    const auto* words = reinterpret_cast<const std::uint32_t*>(&columns);
    store_line(to + i * kLineBytes, words[0], words[1], place.count);
  }
}

/// A check, and where its failure is recorded.
struct Check {
  CheckExchangeArgs args;
  FailureRecord* failure;
  unsigned* claim;
};

/// Called by one warp. Records the lowest peer whose header is wrong, unless a failure is recorded already.
__device__ void check_headers(const Check& check) {
  const CheckExchangeArgs& args = check.args;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* sent = reinterpret_cast<const std::uint32_t*>(args.sent);
  const std::uint64_t expected_epoch = sent[0] | static_cast<std::uint64_t>(sent[1]) << 32;
  unsigned wrong_peer = ~0u;
  for (std::int64_t peer = lane; peer < args.peers && wrong_peer == ~0u; peer += kWarp) {
    const auto* header = reinterpret_cast<const std::uint32_t*>(args.messages + peer * args.message_bytes);
    bool is_equal = true;
#pragma unroll
    for (int i = 0; i < kHeaderWords; ++i)
      is_equal = is_equal && header[i] == header_word(expected_epoch, sent[2], peer, i);
    if (!is_equal) wrong_peer = static_cast<unsigned>(peer);
  }
  wrong_peer = __reduce_min_sync(~0u, wrong_peer);
  if (lane != 0 || wrong_peer == ~0u) return;
  if (atomicCAS(check.claim, 0u, 1u) != 0u) return;
  FailureRecord* failure = check.failure;
  const auto* header =
      reinterpret_cast<const std::uint32_t*>(args.messages + wrong_peer * args.message_bytes);
  failure->peer = wrong_peer;
  failure->header = {header[0] | static_cast<std::uint64_t>(header[1]) << 32, header[2], header[3]};
  failure->expected = {expected_epoch, sent[2], wrong_peer};
  __threadfence_system();  // a host that sees is_complete sees the rest
  *static_cast<volatile std::uint32_t*>(&failure->is_complete) = 1u;
}

__global__ void __launch_bounds__(kWarp) check_kernel(Check check) {
  check_headers(check);
}

/// `share.threads` threads per row (token, head). Reads tokens * heads * ranks * (Dv * sizeof(T) + 4) bytes.
/// Latency-bound at decode sizes, so up to kRanks ranks are loaded in one trip to memory. With kChecks the
/// last block compares the messages' headers. kConverts (a foreign convention) is a separate kernel, because
/// a branch between the loads cost the natural one 5 to 19 %.
template <class T, int kCount, int kRanks, bool kChecks, bool kConverts>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineRows<T> rows, RowShare share, Check check) {
  follow_previous();
  if (kChecks && blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x < kWarp) check_headers(check);
    return;
  }
  const unsigned row = share.row(blockIdx.x);
  const auto heads = static_cast<unsigned>(rows.heads);
  if (row < rows.tokens * rows.heads)
    merge_partials<kCount, kRanks>(
        rows,
        PartialRowInMemory<T, kConverts>(rows, rows.partial_out, rows.partial_lse, row / heads, row % heads),
        share, row / heads, row % heads);
}

}  // namespace

template <class T>
void Operators<T>::pack_partial(const PackPartialArgs<T>& args, Stream stream) const {
  const DeviceScope scope(state_->device);
  const auto element = static_cast<std::int64_t>(sizeof(T));
  const PartialTarget<T>& target = args.target;
  if (target.lines.rows.out != nullptr) {
    if (args.out.extent(0) == 0) return;  // there are no lines and no headers
    const RowShare share(args.out.extent(2) / kLineColumns<T>);
    launch_early(pack_lines_kernel<T>, share.blocks(args.out.extent(0) * args.out.extent(1)), kThreads, 0,
                 stream.handle(), state_->is_hopper, {args.out, args.lse, args.convention}, share,
                 target.slot, target.lines);
    return;
  }
  PackRows rows;
  rows.out = reinterpret_cast<const std::byte*>(args.out.data());
  rows.out_token_bytes = args.out.stride(0) * element;
  rows.out_head_bytes = args.out.stride(1) * element;
  rows.packed = reinterpret_cast<std::byte*>(target.out.data());
  rows.packed_token_bytes = target.out.stride(0) * element;
  rows.packed_head_bytes = target.out.stride(1) * element;
  rows.row_bytes = args.out.extent(2) * element;
  rows.lse = args.lse.data();
  rows.lse_token_stride = args.lse.stride(0);
  rows.lse_head_stride = args.lse.stride(1);
  rows.packed_lse = target.lse.data();
  rows.packed_lse_token_stride = target.lse.stride(0);
  rows.packed_lse_head_stride = target.lse.stride(1);
  rows.tokens = args.out.extent(0);
  rows.heads = static_cast<int>(args.out.extent(1));
  rows.convention = args.convention;
  rows.slot = target.slot;
  const auto launch = [&]<class Unit>(Unit) {
    const RowShare share(rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
    const unsigned blocks = 1 + share.blocks(rows.tokens * rows.heads);
    pack_kernel<Unit><<<blocks, kThreads, 0, stream.handle()>>>(rows, share, target.headers);
    HELIX_CHECK_LAUNCH();
  };
  const std::size_t alignment = common_alignment(
      {address_of(args.out.data()), step_of<T>(args.out.stride(0)), step_of<T>(args.out.stride(1)),
       step_of<T>(args.out.extent(2)), address_of(target.out.data()), step_of<T>(target.out.stride(0)),
       step_of<T>(target.out.stride(1))});
  if (alignment == 16) {
    launch(uint4{});
  } else if (alignment >= 4) {
    launch(std::uint32_t{});
  } else {
    launch(std::uint16_t{});
  }
}

template <class T>
void Operators<T>::stamp(const StampArgs& args, Stream stream) const {
  const DeviceScope scope(state_->device);
  stamp_kernel<<<1, kWarp, 0, stream.handle()>>>(args);
  HELIX_CHECK_LAUNCH();
}

template <class T>
void Operators<T>::check_exchange(const CheckExchangeArgs& args, Stream stream) const {
  const DeviceScope scope(state_->device);
  check_kernel<<<1, kWarp, 0, stream.handle()>>>(
      {args, state_->failure_record(), reinterpret_cast<unsigned*>(state_->failure_claim.data())});
  HELIX_CHECK_LAUNCH();
}

namespace {

/// Launches one block more than the rows need for the check, if there is one.
template <class T>
void launch_combine(const LseCombineArgs<T>& args, const Check& check, bool is_hopper, Stream stream) {
  const CombineRows<T> rows = combine_rows(args);
  const bool is_aligned = has_aligned_rows(args);
  with_vector<T>(is_aligned, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const RowShare share(rows.dim / kCount);
    const unsigned blocks = share.blocks(rows.tokens * rows.heads);
    const bool checks = check.args.messages != nullptr;
    const auto launch = [&](auto kernel) {
      launch_early(kernel, blocks + (checks ? 1 : 0), kThreads, 0, stream.handle(), is_hopper, rows, share,
                   check);
    };
    // Messages are natural, so checked partials are never converted.
    const auto launch_ranks = [&](auto ranks) {
      constexpr int kRanks = decltype(ranks)::value;
      if (checks) {
        launch(combine_kernel<T, kCount, kRanks, true, false>);
      } else if (args.convention == LseConvention::natural) {
        launch(combine_kernel<T, kCount, kRanks, false, false>);
      } else {
        launch(combine_kernel<T, kCount, kRanks, false, true>);
      }
    };
    // Many rows are bandwidth-bound, so use fewer registers to have more rows in flight (commit d9baa81,
    // which does not say where the crossover is).
    constexpr std::int64_t kManyRows = 8192;
    if (rows.ranks <= 4 || rows.tokens * rows.heads >= kManyRows) {
      launch_ranks(std::integral_constant<int, 4>{});
    } else {
      launch_ranks(std::integral_constant<int, 8>{});
    }
  });
}

}  // namespace

template <class T>
void Operators<T>::lse_combine(const LseCombineArgs<T>& args, Stream stream) const {
  if (args.out.size() == 0) return;
  const DeviceScope scope(state_->device);
  launch_combine(args, {}, state_->is_hopper, stream);
}

template <class T>
void Operators<T>::combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<T>& combine,
                                    Stream stream) const {
  if (combine.out.size() == 0) return check_exchange(check, stream);
  HELIX_EXPECTS(combine.convention == LseConvention::natural, ErrorCode::invalid_argument,
                "combine_exchange: messages hold natural log-sum-exps; pack_partial converts others");
  const DeviceScope scope(state_->device);
  launch_combine(combine,
                 {check, state_->failure_record(), reinterpret_cast<unsigned*>(state_->failure_claim.data())},
                 state_->is_hopper, stream);
}

#define HELIX_INSTANTIATE(T)                                                                               \
  template void Operators<T>::pack_partial(const PackPartialArgs<T>&, Stream) const;                       \
  template void Operators<T>::stamp(const StampArgs&, Stream) const;                                       \
  template void Operators<T>::check_exchange(const CheckExchangeArgs&, Stream) const;                      \
  template void Operators<T>::lse_combine(const LseCombineArgs<T>&, Stream) const;                         \
  template void Operators<T>::combine_exchange(const CheckExchangeArgs&, const LseCombineArgs<T>&, Stream) \
      const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
