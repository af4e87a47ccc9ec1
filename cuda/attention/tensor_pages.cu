// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for pages that hold the rows of a head one after another.
#include "cuda/attention/tensor.cuh"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {

bool has_hopper_code() {
  cudaFuncAttributes attributes{};
  HELIX_CUDA_CHECK(cudaFuncGetAttributes(&attributes, attend_tensor<bf16, 64, 1, 4, 2, PageCopies>));
  return attributes.ptxVersion >= 90;
}

// K and V at the same places of their pools.
const AttentionKernel kTensorPages{.fits =
                                       [](const AttentionCall& call) {
                                         const KvFormat& format = call.kv.format;
                                         return fits_tensor(call) && format.k == format.v &&
                                                format.k.token == format.head_dim;
                                       },
                                   .query_tile_rows = tensor_query_tile_rows,
                                   .sm_rows = tensor_sm_rows,
                                   .has_fixed_query_tile = false,
                                   .launch = TensorLaunch<PageCopies>::run};

}  // namespace helix::cuda
