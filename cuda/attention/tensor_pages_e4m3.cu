// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for pages that hold the e4m3 rows of a head one after another.
#include "cuda/attention/tensor_launch.cuh"

namespace helix::cuda {

const AttentionKernel kTensorPagesE4m3{
    .fits =
        [](const AttentionCall& call) {
          const KvFormat& format = call.kv.format;
          return fits_tensor(call) && format.dtype == DType::fp8_e4m3 && fits_tensor_dims(format) &&
                 fits_page_copies(format, e4m3_tile_tokens(format.head_dim, true));
        },
    .query_tile_rows = tensor_query_tile_rows,
    .sm_rows = tensor_sm_rows,
    .has_fixed_query_tile = false,
    .launch = [](const AttentionParams& p, const AttentionCall& call,
                 const AttentionGrid& grid) { launch_tensor_e4m3<PageCopies>(p, call.kv, grid); }};

}  // namespace helix::cuda
