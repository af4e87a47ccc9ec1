// SPDX-License-Identifier: Apache-2.0
// Whether this library was built with code for compute capability 9.0.
#include <helix/cuda/runtime.hpp>

#include "cuda/runtime/operators_state.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "helix: code for compute capability 9.0 is to be built for 90a: set HELIX_CUDA_ARCHITECTURES"
#endif

namespace helix::cuda {
namespace {

/// Built for the same architectures as all kernels.
__global__ void any_kernel() {}

}  // namespace

bool has_hopper_code() {
  cudaFuncAttributes attributes{};
  HELIX_CUDA_CHECK(cudaFuncGetAttributes(&attributes, any_kernel));
  return attributes.ptxVersion >= 90;
}

}  // namespace helix::cuda
