// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: packing, checking and combining partial attention between KVP ranks.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/exchange/header.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {
namespace {

constexpr int kThreads = 256;
__global__ void __launch_bounds__(kWarp) stamp_kernel(StampArgs args) {
  write_headers(args);
}

/// How a block of kThreads splits over rows: `threads` (a power of two) each.
struct RowShare {
  int threads;

  /// The fewest threads that serve a row of `items` at once.
  explicit RowShare(std::int64_t items) : threads(1) {
    while (threads < kThreads && threads < items) threads *= 2;
  }
  __host__ __device__ int rows() const { return kThreads / threads; }

  __device__ int thread() const { return static_cast<int>(threadIdx.x) & (threads - 1); }
  __device__ unsigned row(unsigned block) const {
    return block * static_cast<unsigned>(rows()) + threadIdx.x / static_cast<unsigned>(threads);
  }
};

/// Partials as rows of bytes, one a token and head, and where they go.
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
};

/// The last block writes the headers; each other block copies rows, `share.threads` threads a row in units of
/// Unit. Bytes read and written: tokens * heads * (Dv * sizeof(T) + 4) each.
template <class Unit>
__global__ void __launch_bounds__(kThreads) pack_kernel(PackRows rows, RowShare share, StampArgs headers) {
  if (blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x < kWarp) write_headers(headers);
    return;
  }
  const unsigned row = share.row(blockIdx.x);
  if (row >= rows.tokens * rows.heads) return;
  const std::int64_t token = row / static_cast<unsigned>(rows.heads);
  const std::int64_t head = row % static_cast<unsigned>(rows.heads);
  if (share.thread() == 0) {
    rows.packed_lse[token * rows.packed_lse_token_stride + head * rows.packed_lse_head_stride] =
        to_natural(rows.lse[token * rows.lse_token_stride + head * rows.lse_head_stride], rows.convention);
  }
  const auto* source =
      reinterpret_cast<const Unit*>(rows.out + token * rows.out_token_bytes + head * rows.out_head_bytes);
  auto* target =
      reinterpret_cast<Unit*>(rows.packed + token * rows.packed_token_bytes + head * rows.packed_head_bytes);
  const std::int64_t units = rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t i = share.thread(); i < units; i += share.threads) target[i] = source[i];
}

/// A check, and where its failure is recorded.
struct Check {
  CheckExchangeArgs args;
  FailureRecord* failure;
  unsigned* claim;
};

/// One warp. Records the lowest peer whose header is not what it must be, unless a failure stands already.
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
      is_equal = is_equal && header[i] == header_word(expected_epoch, args.tokens, peer, i);
    if (!is_equal) wrong_peer = static_cast<unsigned>(peer);
  }
  wrong_peer = __reduce_min_sync(~0u, wrong_peer);
  if (lane != 0 || wrong_peer == ~0u) return;
  if (atomicCAS(check.claim, 0u, 1u) != 0u) return;
  FailureRecord* failure = check.failure;
  const auto* header =
      reinterpret_cast<const std::uint32_t*>(args.messages + wrong_peer * args.message_bytes);
  failure->peer = wrong_peer;
  failure->sender = header[3];
  failure->epoch = header[0] | static_cast<std::uint64_t>(header[1]) << 32;
  failure->expected_epoch = expected_epoch;
  failure->tokens = header[2];
  failure->expected_tokens = static_cast<std::uint32_t>(args.tokens);
  __threadfence_system();  // the host that sees is_complete sees the rest
  *static_cast<volatile std::uint32_t*>(&failure->is_complete) = 1u;
}

__global__ void __launch_bounds__(kWarp) check_kernel(Check check) {
  check_headers(check);
}

template <class T>
struct CombineRows {
  const T* partial_out;      // [ranks, tokens, heads, dim]
  const float* partial_lse;  // [ranks, tokens, heads]
  const float* sink;         // [heads] or null
  T* out;                    // [tokens, heads, dim]
  float* lse;                // [tokens, heads] or null
  std::int64_t partial_strides[3];
  std::int64_t partial_lse_strides[3];
  std::int64_t out_strides[2];
  std::int64_t lse_strides[2];
  std::int64_t tokens;
  int ranks;
  int heads;
  int dim;
  LseConvention convention;  // of partial_lse

  /// Natural log-sum-exp of `rank` in the row whose lse begins at `row`.
  template <bool kConverts>
  __device__ __forceinline__ float lse_of(const float* row, int rank) const {
    const float lse = row[rank * partial_lse_strides[0]];
    return kConverts ? to_natural(lse, convention) : lse;
  }
};

/// Partials of ranks [begin, begin + kRanks) of one row, all asked for at once.
template <class T, int kCount, int kRanks, bool kConverts>
struct PartialColumns {
  float lse[kRanks];
  Vector<T, kCount> out[kRanks];

  __device__ __forceinline__ void load(const CombineRows<T>& rows, const float* from_lse, const T* from_out,
                                       int begin) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int rank = begin + r;
      lse[r] = -kInfinity;
      if (rank < rows.ranks) {
        lse[r] = rows.template lse_of<kConverts>(from_lse, rank);
        out[r] = *reinterpret_cast<const Vector<T, kCount>*>(from_out + rank * rows.partial_strides[0]);
      }
    }
  }
};

/// The largest log-sum-exp, NaN if one is: nothing is larger.
__device__ __forceinline__ float larger_lse(float max, float lse) {
  return lse > max || isnan(lse) ? lse : max;
}

/// `share.threads` threads a row (token, head); each has kCount columns and computes the weights itself,
/// which costs less than sharing them. Ranks in increasing order (invariant 7). Reads tokens * heads * ranks
/// * (Dv * sizeof(T) + 4) bytes; bound by latency at decode sizes: up to kRanks ranks take one trip to
/// memory. With kChecks the last block compares the messages' headers. Conversion from a foreign convention
/// is a kernel of its own (kConverts): a branch between the loads cost the natural one 5 to 19 %.
template <class T, int kCount, int kRanks, bool kChecks, bool kConverts>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineRows<T> rows, RowShare share, Check check) {
  follow_previous();
  if (kChecks && blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x < kWarp) check_headers(check);
    return;
  }
  const unsigned row = share.row(blockIdx.x);
  if (row >= rows.tokens * rows.heads) return;
  const std::int64_t token = row / static_cast<unsigned>(rows.heads);
  const std::int64_t head = row % static_cast<unsigned>(rows.heads);
  const float* partial_lse =
      rows.partial_lse + token * rows.partial_lse_strides[1] + head * rows.partial_lse_strides[2];
  const T* partial_out = rows.partial_out + token * rows.partial_strides[1] + head * rows.partial_strides[2];
  const float sink = rows.sink != nullptr ? rows.sink[head] : -kInfinity;
  float max = sink;
  float sum = 0.0f;
  for (int i = share.thread() * kCount; i < rows.dim; i += share.threads * kCount) {
    PartialColumns<T, kCount, kRanks, kConverts> partials;
    partials.load(rows, partial_lse, partial_out + i, 0);
    max = sink;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) max = larger_lse(max, partials.lse[r]);
    for (int rank = kRanks; rank < rows.ranks; ++rank)
      max = larger_lse(max, rows.template lse_of<kConverts>(partial_lse, rank));
    const bool is_empty = max == -kInfinity;
    float mixed[kCount] = {};
    sum = is_empty ? 0.0f : expf(sink - max);
#pragma unroll 1
    for (int begin = 0; begin < rows.ranks; begin += kRanks) {
      if (begin > 0) partials.load(rows, partial_lse, partial_out + i, begin);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (partials.lse[r] == -kInfinity) continue;  // weight 0, whatever its out holds (invariant 6)
        const float weight = expf(partials.lse[r] - max);
        sum += weight;
#pragma unroll
        for (int j = 0; j < kCount; ++j) mixed[j] += weight * to_float(partials.out[r].elements[j]);
      }
    }
    const float inverse = is_empty ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int j = 0; j < kCount; ++j) mixed[j] *= inverse;
    store_vector(rows.out + token * rows.out_strides[0] + head * rows.out_strides[1] + i, mixed);
  }
  if (share.thread() == 0 && rows.lse != nullptr) {
    rows.lse[token * rows.lse_strides[0] + head * rows.lse_strides[1]] =
        max == -kInfinity ? -kInfinity : max + logf(sum);
  }
}

}  // namespace

template <class T>
void Operators<T>::pack_partial(const PackPartialArgs<T>& args, Stream stream) const {
  const DeviceScope scope(state_->device);
  const auto element = static_cast<std::int64_t>(sizeof(T));
  PackRows rows;
  rows.out = reinterpret_cast<const std::byte*>(args.out.data());
  rows.out_token_bytes = args.out.stride(0) * element;
  rows.out_head_bytes = args.out.stride(1) * element;
  rows.packed = reinterpret_cast<std::byte*>(args.packed_out.data());
  rows.packed_token_bytes = args.packed_out.stride(0) * element;
  rows.packed_head_bytes = args.packed_out.stride(1) * element;
  rows.row_bytes = args.out.extent(2) * element;
  rows.lse = args.lse.data();
  rows.lse_token_stride = args.lse.stride(0);
  rows.lse_head_stride = args.lse.stride(1);
  rows.packed_lse = args.packed_lse.data();
  rows.packed_lse_token_stride = args.packed_lse.stride(0);
  rows.packed_lse_head_stride = args.packed_lse.stride(1);
  rows.tokens = args.out.extent(0);
  rows.heads = static_cast<int>(args.out.extent(1));
  rows.convention = args.convention;
  const auto launch = [&]<class Unit>(Unit) {
    const RowShare share(rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
    const unsigned blocks = 1 + ceil_div(rows.tokens * rows.heads, share.rows());
    pack_kernel<Unit><<<blocks, kThreads, 0, stream.handle()>>>(rows, share, args.headers);
    HELIX_CHECK_LAUNCH();
  };
  const std::size_t alignment = common_alignment(
      {address_of(args.out.data()), step_of<T>(args.out.stride(0)), step_of<T>(args.out.stride(1)),
       step_of<T>(args.out.extent(2)), address_of(args.packed_out.data()),
       step_of<T>(args.packed_out.stride(0)), step_of<T>(args.packed_out.stride(1))});
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

/// One block more than the rows need checks, if there is something to check.
template <class T>
void launch_combine(const LseCombineArgs<T>& args, const Check& check, bool is_hopper, Stream stream) {
  const auto& partial = args.partial_out;
  const auto& lse = args.partial_lse;
  const CombineRows<T> rows{partial.data(),
                            lse.data(),
                            args.sink,
                            args.out.data(),
                            args.lse.data(),
                            {partial.stride(0), partial.stride(1), partial.stride(2)},
                            {lse.stride(0), lse.stride(1), lse.stride(2)},
                            {args.out.stride(0), args.out.stride(1)},
                            {args.lse.stride(0), args.lse.stride(1)},
                            args.out.extent(0),
                            static_cast<int>(lse.extent(0)),
                            static_cast<int>(args.out.extent(1)),
                            static_cast<int>(args.out.extent(2)),
                            args.convention};
  const bool is_aligned = common_alignment({address_of(partial.data()), step_of<T>(partial.stride(0)),
                                            step_of<T>(partial.stride(1)), step_of<T>(partial.stride(2)),
                                            address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                                            step_of<T>(args.out.stride(1)), step_of<T>(rows.dim)}) == 16;
  with_vector<T>(is_aligned, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const RowShare share(rows.dim / kCount);
    const unsigned blocks = ceil_div(rows.tokens * rows.heads, share.rows());
    const bool checks = check.args.messages != nullptr;
    const auto launch = [&](auto kernel) {
      launch_early(kernel, blocks + (checks ? 1 : 0), kThreads, 0, stream.handle(), is_hopper, rows, share,
                   check);
    };
    // Messages are natural, so what is checked is never converted.
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
    // Many rows are bound by bandwidth: fewer registers, more of them in flight.
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
