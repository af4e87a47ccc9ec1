// SPDX-License-Identifier: Apache-2.0
// The kernel over latents (MLA) for few query rows, host side: which calls it takes, and its launch.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/local_tokens.hpp"
#include "cuda/attention/narrow_latent.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {
namespace {

using narrow_latent::kThreads;
using narrow_latent::kTokens;

/// The kernel for one type, cluster size and way to fetch KV tiles, on the current device.
template <class T, int kCluster, class Copies>
struct NarrowLaunch {
  static constexpr auto kKernel = narrow_latent::attend_narrow_latent<T, kCluster, Copies>;
  static constexpr int kBytes =
      static_cast<int>(sizeof(typename narrow_latent::Block<T, kCluster, Copies>::Shared));
  static_assert(kBytes <= 227 * 1024);

  /// Clusters that the device holds at a time. The blocks of a cluster need SMs of one group of SMs: of an
  /// H100's 132 SMs, 120 have room for clusters of eight or of four.
  static int most_clusters() {
    static std::array<std::atomic<int>, 64> of_devices;
    int device = 0;
    HELIX_CUDA_CHECK(cudaGetDevice(&device));
    std::atomic<int>& known = of_devices[static_cast<std::size_t>(device) % of_devices.size()];
    int most = known.load(std::memory_order_relaxed);
    if (most > 0) return most;
    HELIX_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    LaunchAttributes attributes = LaunchAttributes().clusters(kCluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kBytes;
    config.attrs = attributes.data();
    config.numAttrs = attributes.count();
    HELIX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&most, kKernel, &config));
    known.store(most, std::memory_order_relaxed);
    return most;
  }

  /// Launches the kernel if there is room for a cluster for each query tile. Returns whether it did.
  static bool launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
    static_assert(kMaxQueryTiles * kCluster <= kAttentionCounters);
    // kernels that wait may leave no room for a cluster
    if (kCluster > 1 && grid.shares_device) return false;
    const int blocks = std::max(1, grid.blocks / kBlocksPerSm);
    int clusters = kCluster == 1 ? blocks : std::min(blocks / kCluster, most_clusters());
    if (kCluster > 1 && clusters < p.num_query_tiles) return false;
    if (page_list_tokens(call.kv) <= narrow_latent::Limits<kCluster>::kWholeTiles * kTokens)
      clusters = std::min(clusters, p.num_query_tiles);  // leaves the other SMs to the next kernel
    HELIX_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    launch_with(LaunchAttributes().early().clusters(kCluster), kKernel,
                static_cast<unsigned>(clusters * kCluster), kThreads, kBytes, grid.stream, p,
                Copies::maps_of(p, call.kv));
    return true;
  }
};

/// Launches the kernel with the largest clusters that leave one for each query tile.
template <class T, class Copies>
void launch_clusters(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  NarrowLaunch<T, 8, Copies>::launch(p, call, grid) || NarrowLaunch<T, 4, Copies>::launch(p, call, grid) ||
      NarrowLaunch<T, 1, Copies>::launch(p, call, grid);
}

template <class T>
void launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  has_latent_boxes(call.kv.format) ? launch_clusters<T, narrow_latent::ChunkBoxes>(p, call, grid)
                                   : launch_clusters<T, narrow_latent::RowCopies>(p, call, grid);
}

/// Whether this kernel is faster than that of latent.cuh for sequences of up to `tokens` tokens. It starts
/// and ends 5 us sooner, but reads 28 GB/s an SM where the other reads 34; with more sequences, fewer blocks
/// share one. Times in us, this kernel and the other, 16 heads of bf16, H200 (driver 580.159.04, CUDA 13.0):
///   1 x 8192 14.0, 18.4   1 x 65536 34.1, 35.2   1 x 131072 56.4, 53.7   1 x 1048576 362, 288
///   4 x 4096 18.1, 19.2   4 x 8192 24.7, 24.2    8 x 2048 18.5, 19.3     8 x 8192 39.8, 33.7
///   16 x 512 13.2, 17.0   16 x 1024 19.4, 18.7   64 x 8192 178, 155      64 x 131072 2572, 2148
/// An H100's memory gives no more than 23 GB/s an SM: 1 x 131072 65.0, 69.9, 64 x 131072 3186, 3192.
bool is_faster(std::int64_t sequences, std::int64_t tokens) {
  constexpr std::int64_t kMax = std::int64_t{1} << 17;  // largest sequences * sequences * tokens
  return sequences * sequences <= kMax / std::max<std::int64_t>(tokens, 1);
}

}  // namespace

const AttentionKernel kNarrowLatent{
    .fits =
        [](const AttentionCall& call) {
          return fits_latents(call) && call.dtype == call.kv.format.dtype && call.most_rows <= kMmaRows &&
                 is_faster(call.num_sequences, page_list_tokens(call.kv));
        },
    .query_tile_rows =
        [](std::int64_t head_dim, std::int64_t value_dim) {
          return is_latent_shape(head_dim, value_dim) ? kMmaRows : 0;
        },
    .sm_rows = [](std::int64_t head_dim,
                  std::int64_t value_dim) { return is_latent_shape(head_dim, value_dim) ? 2 * kMmaRows : 0; },
    .has_fixed_query_tile = false,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          call.dtype == DType::bf16 ? launch<bf16>(p, call, grid) : launch<f16>(p, call, grid);
        }};

}  // namespace helix::cuda
