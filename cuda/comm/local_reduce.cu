// SPDX-License-Identifier: Apache-2.0
// Sums and copies of several ranks on one GPU. Memory-bound: a reduction reads num_ranks times its count and
// writes up to num_ranks times its count.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/comm/local_reduce.hpp"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;  // threads loop over the rest
constexpr int kCopiesALaunch = 128;        // 3 KiB of the 4 KiB of parameters

struct ReduceParams {
  const void* in[kMaxLocalRanks];
  void* out[kMaxLocalRanks];
  int num_ranks;
  std::int64_t count;
  bool scatter;
};

struct CopyParams {
  LocalCopy copies[kCopiesALaunch];
};

/// Sums packet `i`, of kCount elements, of the slice at `in_begin`. Reads all inputs before it writes, so an
/// output may be an input.
template <int kCount, class T>
__device__ __forceinline__ void reduce_packet(const ReduceParams& params, std::int64_t in_begin,
                                              std::int64_t i, int first, int last) {
  float sum[kCount];
  const auto load = [&](int rank, float(&packet)[kCount]) {
    load_vector(static_cast<const T*>(params.in[rank]) + in_begin + i * kCount, packet);
  };
  load(0, sum);
#pragma unroll 4
  for (int rank = 1; rank < params.num_ranks; ++rank) {
    float packet[kCount];
    load(rank, packet);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += packet[j];
  }
  for (int rank = first; rank < last; ++rank)
    store_vector(static_cast<T*>(params.out[rank]) + i * kCount, sum);
}

/// A thread owns one packet of 16 bytes of every rank at a time; blockIdx.y is the slice of a scatter.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceParams params) {
  const int slice = static_cast<int>(blockIdx.y);
  const std::int64_t in_begin = params.scatter ? slice * params.count : 0;
  const int first = params.scatter ? slice : 0;
  const int last = params.scatter ? slice + 1 : params.num_ranks;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t packets = params.count / kCount;
  for (std::int64_t i = begin; i < packets; i += stride)
    reduce_packet<kCount, T>(params, in_begin, i, first, last);
  for (std::int64_t i = packets * kCount + begin; i < params.count; i += stride)
    reduce_packet<1, T>(params, in_begin, i, first, last);
}

template <class T>
void launch_reduce(const LocalReduction& reduction, StreamHandle stream) {
  ReduceParams params{};
  params.num_ranks = reduction.num_ranks;
  params.count = reduction.count;
  params.scatter = reduction.scatter;
  std::size_t alignment = common_alignment({reduction.scatter ? step_of<T>(reduction.count) : 0});
  for (int rank = 0; rank < reduction.num_ranks; ++rank) {
    params.in[rank] = reduction.in[rank];
    params.out[rank] = reduction.out[rank];
    alignment = common_alignment({alignment, address_of(params.in[rank]), address_of(params.out[rank])});
  }
  with_vector<T>(alignment == 16, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const std::int64_t work = reduction.count / kCount + (kCount > 1 ? 1 : 0);
    const auto blocks = static_cast<unsigned>(std::min(ceil_div<std::int64_t>(work, kThreads), kMaxBlocks));
    const dim3 grid(blocks, reduction.scatter ? static_cast<unsigned>(reduction.num_ranks) : 1u);
    reduce_kernel<T, kCount><<<grid, kThreads, 0, stream>>>(params);
  });
  HELIX_CHECK_LAUNCH();
}

/// Copies packets of type W; both pointers must have the same remainder modulo sizeof(W). Bytes before the
/// first and after the last whole packet are copied singly.
template <class W>
__device__ __forceinline__ void copy_as(const LocalCopy& copy, std::int64_t begin, std::int64_t stride) {
  constexpr std::int64_t kWidth = sizeof(W);
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(copy.source) % kWidth);
  const std::int64_t before = misaligned == 0 ? 0 : kWidth - misaligned;
  const std::int64_t head = before < copy.bytes ? before : copy.bytes;
  const std::int64_t packets = (copy.bytes - head) / kWidth;
  const auto* __restrict__ source = reinterpret_cast<const W*>(copy.source + head);
  auto* __restrict__ target = reinterpret_cast<W*>(copy.target + head);
  for (std::int64_t i = begin; i < packets; i += stride) target[i] = source[i];
  for (std::int64_t i = begin; i < head; i += stride) copy.target[i] = copy.source[i];
  for (std::int64_t i = head + packets * kWidth + begin; i < copy.bytes; i += stride) {
    copy.target[i] = copy.source[i];
  }
}

/// blockIdx.y is the copy; its blocks share the packets.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyParams params) {
  const LocalCopy copy = params.copies[blockIdx.y];
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::uintptr_t difference =
      reinterpret_cast<std::uintptr_t>(copy.source) ^ reinterpret_cast<std::uintptr_t>(copy.target);
  if (difference % 16 == 0) {
    copy_as<uint4>(copy, begin, stride);
  } else if (difference % 4 == 0) {
    copy_as<std::uint32_t>(copy, begin, stride);
  } else {
    copy_as<std::byte>(copy, begin, stride);
  }
}

}  // namespace

void local_reduce(const LocalReduction& reduction, DType dtype, StreamHandle stream) {
  if (reduction.count == 0) return;
  switch (dtype) {
    case DType::f16:
      launch_reduce<f16>(reduction, stream);
      break;
    case DType::bf16:
      launch_reduce<bf16>(reduction, stream);
      break;
    default:
      launch_reduce<float>(reduction, stream);
      break;
  }
}

void local_copy(std::span<const LocalCopy> copies, StreamHandle stream) {
  for (std::size_t done = 0; done < copies.size(); done += kCopiesALaunch) {
    const std::size_t num = std::min<std::size_t>(copies.size() - done, kCopiesALaunch);
    CopyParams params{};
    std::copy_n(copies.begin() + static_cast<std::ptrdiff_t>(done), num, params.copies);
    std::int64_t largest = 0;
    for (std::size_t i = 0; i < num; ++i) largest = std::max(largest, params.copies[i].bytes);
    constexpr std::int64_t kBytesABlock = std::int64_t{kThreads} * 16;
    const std::int64_t most = std::max<std::int64_t>(1, 4 * kMaxBlocks / static_cast<std::int64_t>(num));
    const std::int64_t blocks = std::clamp<std::int64_t>(ceil_div(largest, kBytesABlock), 1, most);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(num));
    copy_kernel<<<grid, kThreads, 0, stream>>>(params);
    HELIX_CHECK_LAUNCH();
  }
}

}  // namespace helix::cuda
