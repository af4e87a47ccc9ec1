// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: packing, checking and combining partial attention between KVP ranks.
#include <algorithm>
#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include <helix/cuda/backend.hpp>

#include "cuda/operators_state.hpp"
#include "rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeaderWords = sizeof(ExchangeHeader) / sizeof(std::uint32_t);

/// Sum of exchange_epoch_term() over the positions, valid in thread 0. The whole block calls it, once.
__device__ std::uint64_t sum_epoch_terms(const std::int64_t* positions, std::int64_t tokens) {
  using Reduce = cub::BlockReduce<std::uint64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  std::uint64_t terms = 0;
  if (positions != nullptr) {
    for (std::int64_t i = threadIdx.x; i < tokens; i += kThreads)
      terms += exchange_epoch_term(positions[i], i);
  }
  return Reduce(storage).Sum(terms);
}

/// A header as words: messages need not be aligned to 8.
__device__ __forceinline__ void header_words(std::uint64_t epoch, std::int64_t tokens, std::int64_t sender,
                                             std::uint32_t (&words)[kHeaderWords]) {
  words[0] = static_cast<std::uint32_t>(epoch);
  words[1] = static_cast<std::uint32_t>(epoch >> 32);
  words[2] = static_cast<std::uint32_t>(tokens);
  words[3] = static_cast<std::uint32_t>(sender);
}

/// One block advances the epoch and writes the header of each message. No other block reads the epoch.
__device__ void write_headers(std::byte* messages, std::int64_t message_bytes, std::int64_t count,
                              std::int64_t tokens, std::int64_t sender, std::uint64_t* epoch,
                              const std::int64_t* positions) {
  __shared__ std::uint32_t words[kHeaderWords];
  const std::uint64_t terms = sum_epoch_terms(positions, tokens);
  if (threadIdx.x == 0) {
    const std::uint64_t exchanges = *epoch + 1;
    *epoch = exchanges;
    header_words(exchange_epoch(exchanges, terms), tokens, sender, words);
  }
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < count * kHeaderWords; i += kThreads) {
    auto* header = reinterpret_cast<std::uint32_t*>(messages + i / kHeaderWords * message_bytes);
    header[i % kHeaderWords] = words[i % kHeaderWords];
  }
}

__global__ void __launch_bounds__(kThreads) stamp_kernel(StampArgs args) {
  write_headers(args.message, 0, 1, args.tokens, args.sender, args.epoch, args.positions);
}

/// How a block of kThreads splits over rows: `threads` (a power of two) each.
struct RowShare {
  int threads;

  /// The fewest threads that serve a row of `items` at once.
  explicit RowShare(std::int64_t items) : threads(1) {
    while (threads < kThreads && threads < items) threads *= 2;
  }
  int rows() const { return kThreads / threads; }

  __device__ int thread() const { return static_cast<int>(threadIdx.x) & (threads - 1); }
  __device__ std::int64_t row(unsigned block) const {
    return (static_cast<std::int64_t>(block) * kThreads + threadIdx.x) / threads;
  }
};

/// Partials as rows of bytes, one a token and head.
struct PackRows {
  const std::byte* out;
  std::int64_t out_token_bytes;
  std::int64_t out_head_bytes;
  std::int64_t row_bytes;
  const float* lse;
  std::int64_t lse_token_stride;
  std::int64_t lse_head_stride;
  std::int64_t tokens;
  int heads;       // of all peers
  int peer_heads;  // of one
  int kvp;
  std::byte* messages;
  std::int64_t message_bytes;
  std::int64_t kvp_rank;
  std::uint64_t* epoch;
  const std::int64_t* positions;
};

/// Block 0 writes the headers; each other block copies rows, `share.threads` threads a row in units of Unit.
/// Bytes read and written: tokens * heads * (Dv * sizeof(T) + 4) each.
template <class Unit>
__global__ void __launch_bounds__(kThreads) pack_kernel(PackRows rows, RowShare share) {
  if (blockIdx.x == 0) {
    write_headers(rows.messages, rows.message_bytes, rows.kvp, rows.tokens, rows.kvp_rank, rows.epoch,
                  rows.positions);
    return;
  }
  const std::int64_t row = share.row(blockIdx.x - 1);
  if (row >= rows.tokens * rows.heads) return;
  const std::int64_t token = row / rows.heads;
  const int head = static_cast<int>(row % rows.heads);
  const int peer = head / rows.peer_heads;
  const std::int64_t place = token * rows.peer_heads + head % rows.peer_heads;  // in the message
  std::byte* lse = rows.messages + peer * rows.message_bytes + sizeof(ExchangeHeader);
  std::byte* out = lse + rows.tokens * rows.peer_heads * static_cast<std::int64_t>(sizeof(float));
  if (share.thread() == 0) {
    reinterpret_cast<float*>(lse)[place] =
        rows.lse[token * rows.lse_token_stride + head * rows.lse_head_stride];
  }
  const auto* source =
      reinterpret_cast<const Unit*>(rows.out + token * rows.out_token_bytes + head * rows.out_head_bytes);
  auto* target = reinterpret_cast<Unit*>(out + place * rows.row_bytes);
  const std::int64_t units = rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t i = share.thread(); i < units; i += share.threads) target[i] = source[i];
}

/// One block. Records the lowest peer whose header is not what it must be, unless a failure stands already.
__global__ void __launch_bounds__(kThreads)
    check_kernel(CheckExchangeArgs args, FailureRecord* failure, unsigned* claim) {
  __shared__ std::uint64_t expected_epoch;
  __shared__ unsigned wrong_peer;
  const std::uint64_t terms = sum_epoch_terms(args.positions, args.tokens);
  if (threadIdx.x == 0) {
    expected_epoch = exchange_epoch(*args.epoch, terms);
    wrong_peer = ~0u;
  }
  __syncthreads();
  for (std::int64_t peer = threadIdx.x; peer < args.peers; peer += kThreads) {
    const auto* header = reinterpret_cast<const std::uint32_t*>(args.messages + peer * args.message_bytes);
    std::uint32_t expected[kHeaderWords];
    header_words(expected_epoch, args.tokens, peer, expected);
    bool is_equal = true;
#pragma unroll
    for (int i = 0; i < kHeaderWords; ++i) is_equal = is_equal && header[i] == expected[i];
    if (!is_equal) atomicMin(&wrong_peer, static_cast<unsigned>(peer));
  }
  __syncthreads();
  if (threadIdx.x != 0 || wrong_peer == ~0u) return;
  if (atomicCAS(claim, 0u, 1u) != 0u) return;
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
};

/// `share.threads` threads a row (token, head); each has kCount columns and computes the weights itself,
/// which costs less than sharing them. Ranks in increasing order (invariant 7). Reads tokens * heads * ranks
/// * (Dv * sizeof(T) + 4) bytes; bound by latency at decode sizes.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) combine_kernel(CombineRows<T> rows, RowShare share) {
  const std::int64_t row = share.row(blockIdx.x);
  if (row >= rows.tokens * rows.heads) return;
  const std::int64_t token = row / rows.heads;
  const std::int64_t head = row % rows.heads;
  const float* partial_lse =
      rows.partial_lse + token * rows.partial_lse_strides[1] + head * rows.partial_lse_strides[2];
  const T* partial_out = rows.partial_out + token * rows.partial_strides[1] + head * rows.partial_strides[2];
  const float sink = rows.sink != nullptr ? rows.sink[head] : -kInfinity;
  float max = sink;
  for (int rank = 0; rank < rows.ranks; ++rank) {
    const float lse = partial_lse[rank * rows.partial_lse_strides[0]];
    if (lse > max || isnan(lse)) max = lse;  // NaN stays: nothing is larger
  }
  const bool is_empty = max == -kInfinity;
  float sum = 0.0f;
  for (int i = share.thread() * kCount; i < rows.dim; i += share.threads * kCount) {
    float mixed[kCount] = {};
    sum = is_empty ? 0.0f : expf(sink - max);
#pragma unroll 4
    for (int rank = 0; rank < rows.ranks; ++rank) {
      const float lse = partial_lse[rank * rows.partial_lse_strides[0]];
      float partial[kCount];
      load_vector(partial_out + rank * rows.partial_strides[0] + i, partial);
      const bool is_seen = lse != -kInfinity;  // else weight 0, whatever its out holds (invariant 6)
      const float weight = is_seen ? expf(lse - max) : 0.0f;
      sum += weight;
#pragma unroll
      for (int j = 0; j < kCount; ++j) mixed[j] += is_seen ? weight * partial[j] : 0.0f;
    }
    const float inverse = is_empty ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int j = 0; j < kCount; ++j) mixed[j] *= inverse;
    store_vector(rows.out + token * rows.out_strides[0] + head * rows.out_strides[1] + i, mixed);
  }
  if (share.thread() == 0 && rows.lse != nullptr) {
    rows.lse[token * rows.lse_strides[0] + head * rows.lse_strides[1]] =
        is_empty ? -kInfinity : max + logf(sum);
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
  rows.row_bytes = args.out.extent(2) * element;
  rows.lse = args.lse.data();
  rows.lse_token_stride = args.lse.stride(0);
  rows.lse_head_stride = args.lse.stride(1);
  rows.tokens = args.out.extent(0);
  rows.heads = static_cast<int>(args.out.extent(1));
  rows.peer_heads = static_cast<int>(args.out.extent(1) / args.kvp);
  rows.kvp = static_cast<int>(args.kvp);
  rows.messages = args.messages;
  rows.message_bytes = args.message_bytes;
  rows.kvp_rank = args.kvp_rank;
  rows.epoch = args.epoch;
  rows.positions = args.positions;
  const auto launch = [&]<class Unit>(Unit) {
    const RowShare share(rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
    const unsigned blocks = 1 + ceil_div(rows.tokens * rows.heads, share.rows());
    pack_kernel<Unit><<<blocks, kThreads, 0, stream.handle()>>>(rows, share);
    HELIX_CHECK_LAUNCH();
  };
  // The outputs of a message begin behind its lse, so they are aligned to 4 at least only.
  const std::size_t alignment = common_alignment(
      {address_of(args.out.data()), step_of<T>(args.out.stride(0)), step_of<T>(args.out.stride(1)),
       step_of<T>(args.out.extent(2)), address_of(args.messages), step_of<std::byte>(args.message_bytes),
       step_of<float>(rows.tokens * rows.peer_heads)});
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
  stamp_kernel<<<1, kThreads, 0, stream.handle()>>>(args);
  HELIX_CHECK_LAUNCH();
}

template <class T>
void Operators<T>::check_exchange(const CheckExchangeArgs& args, Stream stream) const {
  const DeviceScope scope(state_->device);
  check_kernel<<<1, kThreads, 0, stream.handle()>>>(
      args, state_->failure_record(), reinterpret_cast<unsigned*>(state_->failure_claim.data()));
  HELIX_CHECK_LAUNCH();
}

template <class T>
void Operators<T>::lse_combine(const LseCombineArgs<T>& args, Stream stream) const {
  const auto& partial = args.partial_out;
  const auto& lse = args.partial_lse;
  if (args.out.size() == 0) return;
  const DeviceScope scope(state_->device);
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
                            static_cast<int>(args.out.extent(2))};
  const bool is_aligned = common_alignment({address_of(partial.data()), step_of<T>(partial.stride(0)),
                                            step_of<T>(partial.stride(1)), step_of<T>(partial.stride(2)),
                                            address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                                            step_of<T>(args.out.stride(1)), step_of<T>(rows.dim)}) == 16;
  with_vector<T>(is_aligned, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const RowShare share(rows.dim / kCount);
    const unsigned blocks = ceil_div(rows.tokens * rows.heads, share.rows());
    combine_kernel<T, kCount><<<blocks, kThreads, 0, stream.handle()>>>(rows, share);
    HELIX_CHECK_LAUNCH();
  });
}

#define HELIX_INSTANTIATE(T)                                                          \
  template void Operators<T>::pack_partial(const PackPartialArgs<T>&, Stream) const;  \
  template void Operators<T>::stamp(const StampArgs&, Stream) const;                  \
  template void Operators<T>::check_exchange(const CheckExchangeArgs&, Stream) const; \
  template void Operators<T>::lse_combine(const LseCombineArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
