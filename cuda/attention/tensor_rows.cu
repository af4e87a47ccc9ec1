// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for rows of any strides.
#include "cuda/attention/tensor.cuh"

namespace helix::cuda {

const AttentionKernel kTensorRows{.fits = fits_tensor,
                                  .query_tile_rows = tensor_query_tile_rows,
                                  .sm_rows = tensor_sm_rows,
                                  .has_fixed_query_tile = false,
                                  .launch = TensorLaunch<ChunkCopies>::run};

}  // namespace helix::cuda
