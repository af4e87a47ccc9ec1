// SPDX-License-Identifier: Apache-2.0
// Grid sizes, and checked launches.
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

/// Blocks of a grid for `count` items, with `each` items per block. @throws Error(unsupported) if they are
/// 2^31 or more.
inline unsigned grid_blocks(std::int64_t count, std::int64_t each) {
  const std::int64_t blocks = ceil_div(count, each);
  HELIX_EXPECTS(blocks <= std::numeric_limits<std::int32_t>::max(), ErrorCode::unsupported, "a kernel of ",
                count, " items would take ", blocks,
                " blocks; a grid has fewer than 2^31: use smaller steps");
  return static_cast<unsigned>(blocks);
}

inline constexpr std::int64_t kMaxGridRows = 65535;  ///< Most blocks of a grid along y or z.

/// Blocks along y for `rows` rows, limited to what a grid allows: kernels loop in steps of gridDim.y.
inline unsigned row_blocks(std::int64_t rows) {
  return static_cast<unsigned>(std::min(rows, kMaxGridRows));
}

/// Blocks along y for `heads` heads and `others` items of the same kind, `each` per block.
/// @throws Error(unsupported) if a grid allows fewer.
inline unsigned head_blocks(std::string_view operation, std::int64_t heads, std::int64_t each,
                            std::int64_t others = 0) {
  HELIX_EXPECTS(ceil_div(heads + others, each) <= kMaxGridRows, ErrorCode::unsupported, operation,
                ": there are ", heads, " heads on a rank; on a GPU at most ", kMaxGridRows * each - others,
                " are supported");
  return grid_blocks(heads + others, each);
}

/// In a kernel of launch_early(): waits until all earlier work of the stream has completed.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start as SMs become free, if launch_early() launched it.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// For a kernel of launch_early() that has nothing to do ahead: lets the next kernel start, then waits.
__device__ __forceinline__ void follow_previous() {
  start_next();
  wait_for_previous();
}

/// Attributes of a launch.
class LaunchAttributes {
 public:
  /// The kernel may start before the previous one has ended; see launch_early().
  LaunchAttributes& early() {
    cudaLaunchAttribute& attribute = add(cudaLaunchAttributeProgrammaticStreamSerialization);
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  /// Launches clusters of `blocks` blocks if that is more than one.
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

/// Launches a kernel whose blocks may start before the previous kernel has ended. All must call
/// wait_for_previous(). Before that they must not write what kernels read, and may read what a kernel further
/// back wrote if some kernel between the two calls wait_for_previous() before start_next(). `is_hopper`
/// false: an ordinary launch.
template <class... Params>
void launch_early(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
                  StreamHandle stream, bool is_hopper, const std::type_identity_t<Params>&... params) {
  launch_with(is_hopper ? LaunchAttributes().early() : LaunchAttributes(), kernel, grid, threads,
              shared_bytes, stream, params...);
}

/// Checks the preceding launch.
#define HELIX_CHECK_LAUNCH() HELIX_CUDA_CHECK(cudaGetLastError())

}  // namespace helix::cuda
