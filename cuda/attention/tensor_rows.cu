// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for rows of any strides.
#include "cuda/attention/tensor.cuh"

namespace helix::cuda {

const AttentionKernel kTensorRows{.name = "tensor_rows",
                                  .fits = fits_tensor,
                                  .rows = tensor_rows,
                                  .has_fixed_rows = false,
                                  .launch = TensorLaunch<ChunkCopies>::run};

}  // namespace helix::cuda
