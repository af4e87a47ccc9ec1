// SPDX-License-Identifier: Apache-2.0
// Grids, and launches with checks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>

#include <cuda_runtime.h>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>

namespace helix::cuda {

/// Blocks of a grid for `count` items, `each` a block. @throws Error(unsupported) if they are 2^31 or more.
inline unsigned grid_blocks(std::int64_t count, std::int64_t each) {
  const std::int64_t blocks = ceil_div(count, each);
  HELIX_EXPECTS(blocks <= std::numeric_limits<std::int32_t>::max(), ErrorCode::unsupported, "a kernel of ",
                count, " items would take ", blocks,
                " blocks; a grid has fewer than 2^31: use smaller steps");
  return static_cast<unsigned>(blocks);
}

inline constexpr std::int64_t kMaxGridRows = 65535;  ///< Blocks of a grid along y and z.

/// Blocks in y for `rows` rows, at most what a grid takes: kernels step by gridDim.y.
inline unsigned row_blocks(std::int64_t rows) {
  return static_cast<unsigned>(std::min(rows, kMaxGridRows));
}

/// Blocks along y for `heads` heads, `each` a block. @throws Error(unsupported) if a grid takes fewer.
inline unsigned head_blocks(std::string_view operation, std::int64_t heads, std::int64_t each) {
  HELIX_EXPECTS(ceil_div(heads, each) <= kMaxGridRows, ErrorCode::unsupported, operation, ": there are ",
                heads, " heads on a rank; on a GPU at most ", kMaxGridRows * each, " are supported");
  return grid_blocks(heads, each);
}

/// Waits until all that the stream holds before this kernel has run, in a kernel of launch_early().
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the kernel after this one start, where it is one of launch_early(), as SMs become free.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// For a kernel of launch_early() that can do nothing ahead: the next may start, and this one waits.
__device__ __forceinline__ void follow_previous() {
  start_next();
  wait_for_previous();
}

/// Attributes of a launch.
class LaunchAttributes {
 public:
  /// The kernel may start while the one before it ends; see launch_early().
  LaunchAttributes& early() {
    cudaLaunchAttribute& attribute = add(cudaLaunchAttributeProgrammaticStreamSerialization);
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  /// Clusters of that many blocks, where they are more than one.
  LaunchAttributes& clusters(int blocks) {
    if (blocks > 1)
      add(cudaLaunchAttributeClusterDimension).val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    return *this;
  }

  cudaLaunchAttribute* data() { return all_.data(); }
  unsigned count() const { return count_; }

 private:
  cudaLaunchAttribute& add(cudaLaunchAttributeID id) {
    all_[count_].id = id;
    return all_[count_++];
  }

  std::array<cudaLaunchAttribute, 2> all_{};
  unsigned count_ = 0;
};

/// Launches a kernel with these attributes.
template <class... Params>
void launch_with(LaunchAttributes attributes, void (*kernel)(Params...), dim3 grid, int threads,
                 std::size_t shared_bytes, StreamHandle stream,
                 const std::type_identity_t<Params>&... params) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = attributes.count();
  HELIX_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params...));
}

/// Launches a kernel whose blocks may start while the kernel before it ends: all of them must call
/// wait_for_previous(). Before that they may read what a kernel further ahead has written, if the one before
/// has waited for that one's end when it lets this one start; and write nothing that is read by kernels.
/// `is_hopper` false: an ordinary launch.
template <class... Params>
void launch_early(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
                  StreamHandle stream, bool is_hopper, const std::type_identity_t<Params>&... params) {
  launch_with(is_hopper ? LaunchAttributes().early() : LaunchAttributes(), kernel, grid, threads,
              shared_bytes, stream, params...);
}

/// Checks the launch that stands before it.
#define HELIX_CHECK_LAUNCH() HELIX_CUDA_CHECK(cudaGetLastError())

}  // namespace helix::cuda
