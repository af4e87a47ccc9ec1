// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for KV of q's type in rows of any strides.
#include "cuda/attention/tensor_launch.cuh"

namespace helix::cuda {

const AttentionKernel kTensorRows{.fits = fits_unequal_rows_16,
                                  .query_tile_rows = tensor_query_tile_rows,
                                  .sm_rows = tensor_sm_rows,
                                  .has_fixed_query_tile = false,
                                  .launch = launch_tensor_16_bits<ChunkCopies>};

}  // namespace helix::cuda
