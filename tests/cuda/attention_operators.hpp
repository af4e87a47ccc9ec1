// SPDX-License-Identifier: Apache-2.0
// The operations for tests of attention: with all kernels, and restricted to those that run on every GPU.
#pragma once

#include <helix/cuda/backend.hpp>

#include "support/catch.hpp"

namespace helix::test {

/// The operations with all kernels and, in other runs of the test case, as other GPUs have them.
template <class T>
cuda::Operators<T> attention_operators() {
  using cuda::KernelTarget;
  cuda::Operators<T> operators;
  if (sizeof(T) == 2) operators.set_kernel_target(GENERATE(KernelTarget::this_gpu, KernelTarget::any_gpu));
  return operators;
}

/// The same for MLA, which also has a kernel for GPUs with little shared memory.
template <class T>
cuda::Operators<T> latent_attention_operators() {
  using cuda::KernelTarget;
  cuda::Operators<T> operators;
  operators.set_kernel_target(
      GENERATE(KernelTarget::this_gpu, KernelTarget::any_gpu, KernelTarget::least_gpu));
  return operators;
}

}  // namespace helix::test
