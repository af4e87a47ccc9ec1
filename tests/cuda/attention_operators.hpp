// SPDX-License-Identifier: Apache-2.0
// The operations as tests of attention take them: with all kernels, and with those of every GPU.
#pragma once

#include <helix/cuda/backend.hpp>

#include "support/catch.hpp"

namespace helix::test {

/// The operations with all kernels, and, in other runs of the test case, as other GPUs have them.
template <class T>
cuda::Operators<T> attention_operators() {
  using cuda::AttentionTarget;
  cuda::Operators<T> operators;
  if (sizeof(T) == 2)
    operators.set_attention_target(GENERATE(AttentionTarget::this_gpu, AttentionTarget::any_gpu));
  return operators;
}

/// The same for MLA, of whose kernels one is for GPUs with little shared memory.
template <class T>
cuda::Operators<T> latent_attention_operators() {
  using cuda::AttentionTarget;
  cuda::Operators<T> operators;
  operators.set_attention_target(
      GENERATE(AttentionTarget::this_gpu, AttentionTarget::any_gpu, AttentionTarget::least_gpu));
  return operators;
}

}  // namespace helix::test
