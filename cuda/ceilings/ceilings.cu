// SPDX-License-Identifier: Apache-2.0
// Kernels that read memory at its peak rate, by loads or by bulk copies, and one that fills it.
#include <algorithm>

#include <helix/error.hpp>
#include <helix/splitmix64.hpp>

#include "cuda/ceilings/ceilings.hpp"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda::bench {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 8;

__global__ __launch_bounds__(kThreads) void read(const uint4* data, std::size_t count, unsigned* sink) {
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  unsigned sum = 0;
  std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) x[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  for (; i < count; i += stride) sum += data[i].x ^ data[i].w;
  if (sum == 0x9e3779b9u) *sink = sum;  // keeps the loads from being removed
}

constexpr unsigned kPartBytes = 16 << 10;  // most bytes of a bulk copy
constexpr unsigned kCacheLineBytes = 128;
constexpr unsigned kCacheLineWords = kCacheLineBytes / sizeof(unsigned);
constexpr int kSmStages = 14;  // stages of kPartBytes that fit in an SM's shared memory
constexpr std::size_t kBlockSharedBytes = 227 << 10;
constexpr std::size_t kSmSharedBytes = 228 << 10;
constexpr std::size_t kReservedBytes = 1 << 10;  // reserved by CUDA in each block

/// Shared memory of a block that reads by bulk copies.
template <int kStages>
struct BulkRing {
  unsigned parts[kStages][kPartBytes / kCacheLineBytes][kCacheLineWords];
  RingBarriers<kStages> barriers;
};

/// How the bytes are divided: into parts of whole lines, which blocks take in turn.
struct BulkParts {
  std::size_t bytes;
  std::size_t count;
  unsigned part_bytes;

  __device__ unsigned bytes_of(std::size_t part) const {
    const std::size_t rest = bytes - part * part_bytes;
    return rest < part_bytes ? static_cast<unsigned>(rest) : part_bytes;
  }
};

/// A thread of the second warp copies; the first warp sums a word of each line that has landed. Waits are
/// only for the block's own copies. Never launched below compute capability 9.0, where nothing is copied.
template <int kStages>
__global__ __launch_bounds__(2 * kWarp) void bulk_read(const unsigned char* data, BulkParts parts,
                                                       unsigned* sum) {
  extern __shared__ __align__(kCacheLineBytes) unsigned char memory[];
  auto& ring = *reinterpret_cast<BulkRing<kStages>*>(memory);
  if (threadIdx.x == 0) {
    ring.barriers.init(1, 1);
    fence_barrier_init();
  }
  __syncthreads();
  RingPlace<kStages> place(ring.barriers);
  if (threadIdx.x < kWarp) {
    unsigned found = 0;
    for (std::size_t part = blockIdx.x; part < parts.count; part += gridDim.x, place.advance()) {
      place.wait_full();
      const auto& stage = ring.parts[place.stage()];
      const unsigned lines = parts.bytes_of(part) / kCacheLineBytes;
      const auto first = static_cast<unsigned>(part * (parts.part_bytes / kCacheLineBytes) % kCacheLineWords);
      for (unsigned line = threadIdx.x; line < lines; line += kWarp)
        found += stage[line][(first + line) % kCacheLineWords];  // no two lanes share a bank
      __syncwarp();
      barrier_arrive_if(threadIdx.x == 0, place.empty());
    }
    found = __reduce_add_sync(~0u, found);
    if (threadIdx.x == 0) atomicAdd(sum, found);
  } else if (threadIdx.x == kWarp) {
    for (std::size_t part = blockIdx.x; part < parts.count; part += gridDim.x, place.advance()) {
      const unsigned bytes = parts.bytes_of(part);
      place.wait_empty();
      barrier_expect(place.full(), bytes);
      copy_bulk(static_cast<unsigned>(__cvta_generic_to_shared(ring.parts[place.stage()])),
                data + part * parts.part_bytes, bytes, place.full());
    }
  }
}

template <class T>
__global__ void fill(T* data, std::size_t count, std::uint64_t seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const std::uint64_t x = detail::splitmix64_mix((i + seed) * detail::kSplitmix64Step);
    data[i] = from_float<T>(static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f);
  }
}

int num_sms() {
  int device = 0;
  int sms = 0;
  HELIX_CUDA_CHECK(cudaGetDevice(&device));
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms;
}

template <int kBlocksPerSm>
void launch_bulk_blocks(const void* data, std::size_t bytes, unsigned* sum, StreamHandle stream) {
  constexpr int kStages = kSmStages / kBlocksPerSm;
  constexpr std::size_t kBytes = sizeof(BulkRing<kStages>);
  static_assert(kBytes <= kBlockSharedBytes && kBlocksPerSm * (kBytes + kReservedBytes) <= kSmSharedBytes);
  const std::size_t most_blocks =
      static_cast<std::size_t>(kBlocksPerSm) * static_cast<std::size_t>(num_sms());
  // Equally many parts per block, as large as that allows.
  const std::size_t rounds = (bytes + most_blocks * kPartBytes - 1) / (most_blocks * kPartBytes);
  const std::size_t share = (bytes + most_blocks * rounds - 1) / (most_blocks * rounds);
  BulkParts parts{.bytes = bytes, .count = 0, .part_bytes = 0};
  parts.part_bytes = static_cast<unsigned>((share + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes);
  parts.count = (bytes + parts.part_bytes - 1) / parts.part_bytes;
  const auto blocks = static_cast<unsigned>(std::min(most_blocks, parts.count));
  const auto kernel = bulk_read<kStages>;
  HELIX_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)));
  kernel<<<blocks, 2 * kWarp, kBytes, stream>>>(static_cast<const unsigned char*>(data), parts, sum);
  HELIX_CHECK_LAUNCH();
}

}  // namespace

void launch_read(const void* data, std::size_t bytes, void* sink, StreamHandle stream) {
  read<<<4 * num_sms(), kThreads, 0, stream>>>(static_cast<const uint4*>(data), bytes / sizeof(uint4),
                                               static_cast<unsigned*>(sink));
  HELIX_CHECK_LAUNCH();
}

bool has_bulk_read() {
  int device = 0;
  int major = 0;
  HELIX_CUDA_CHECK(cudaGetDevice(&device));
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return false;
  cudaFuncAttributes attributes{};
  HELIX_CUDA_CHECK(cudaFuncGetAttributes(&attributes, bulk_read<kSmStages>));
  return attributes.ptxVersion >= 90;  // less: compiled from the code for 8.0
}

void launch_bulk_read(const void* data, std::size_t bytes, int blocks_per_sm, void* sum,
                      StreamHandle stream) {
  HELIX_EXPECTS(has_bulk_read(), ErrorCode::unsupported,
                "launch_bulk_read needs a GPU of compute capability 9.0 and code for it; use launch_read");
  HELIX_EXPECTS(blocks_per_sm == 1 || blocks_per_sm == 2, ErrorCode::invalid_argument,
                "launch_bulk_read: ", blocks_per_sm, " blocks an SM; give 1 or 2");
  HELIX_EXPECTS(bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
                ErrorCode::invalid_argument, "launch_bulk_read: ", bytes, " bytes at ",
                reinterpret_cast<std::uintptr_t>(data), "; both must be multiples of 16");
  if (bytes == 0) return;
  const auto launch = blocks_per_sm == 1 ? launch_bulk_blocks<1> : launch_bulk_blocks<2>;
  launch(data, bytes, static_cast<unsigned*>(sum), stream);
}

void launch_fill(void* data, DType dtype, std::size_t elements, std::uint64_t seed, StreamHandle stream) {
  dispatch(dtype, [&]<class T>(T*) {
    fill<<<16 * num_sms(), kThreads, 0, stream>>>(static_cast<T*>(data), elements, seed);
  });
  HELIX_CHECK_LAUNCH();
}

}  // namespace helix::cuda::bench
