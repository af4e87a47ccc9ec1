// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for KV of q's type in pages that boxes divide.
#include "cuda/attention/tensor_launch.cuh"

namespace helix::cuda {

const AttentionKernel kTensorBoxes{
    .fits = [](const AttentionCall& call) { return fits_unequal_rows_16(call) && fits_boxes(call); },
    .query_tile_rows = tensor_query_tile_rows,
    .sm_rows = tensor_sm_rows,
    .has_fixed_query_tile = false,
    .launch = launch_tensor_16_bits<BoxTileCopies>};

}  // namespace helix::cuda
