// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for pages that boxes divide, of the type of q.
#include "cuda/attention/tensor_launch.cuh"

namespace helix::cuda {

const AttentionKernel kTensorBoxes{
    .fits =
        [](const AttentionCall& call) {
          const KvFormat& format = call.kv.format;
          return fits_tensor(call) && format.dtype == call.dtype && fits_boxes(call) &&
                 (fits_tensor_dims(format) || (format.head_dim == 192 && format.value_dim == 128));
        },
    .query_tile_rows = tensor_query_tile_rows,
    .sm_rows = tensor_sm_rows,
    .has_fixed_query_tile = false,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          call.dtype == DType::bf16 ? launch_tensor_16<bf16, BoxTileCopies>(p, call.kv, grid)
                                    : launch_tensor_16<f16, BoxTileCopies>(p, call.kv, grid);
        }};

}  // namespace helix::cuda
