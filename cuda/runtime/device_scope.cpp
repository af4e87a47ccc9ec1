// SPDX-License-Identifier: Apache-2.0
// Sets a thread's device, and restores the previous one if it was another.
#include "cuda/runtime/device_scope.hpp"

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>

namespace helix::cuda {

DeviceScope::DeviceScope(int device) {
  int current = -1;
  HELIX_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device) return;
  HELIX_CUDA_CHECK(cudaSetDevice(device));
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

}  // namespace helix::cuda
