// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for pages that hold the rows of a head one after another, of the type of q.
#include "cuda/attention/tensor_launch.cuh"
#include "cuda/runtime/operators_state.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "helix: code for compute capability 9.0 is to be built for 90a: set HELIX_CUDA_ARCHITECTURES"
#endif

namespace helix::cuda {

bool has_hopper_code() {
  cudaFuncAttributes attributes{};
  HELIX_CUDA_CHECK(
      cudaFuncGetAttributes(&attributes, attend_tensor<bf16, 64, 64, 1, 4, 32, 2, PageCopies, 32>));
  return attributes.ptxVersion >= 90;
}

namespace {

bool fits_pages(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return fits_tensor(call) && format.dtype == call.dtype && fits_tensor_dims(format) &&
         fits_page_copies(format, 32);
}

}  // namespace

const AttentionKernel kTensorPages{.fits = fits_pages,
                                   .query_tile_rows = tensor_query_tile_rows,
                                   .sm_rows = tensor_sm_rows,
                                   .has_fixed_query_tile = false,
                                   .launch = launch_tensor_16_bits<PageCopies>};

}  // namespace helix::cuda
