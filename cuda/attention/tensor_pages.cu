// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernel for KV of q's type in pages that hold the rows of a head one after another.
#include "cuda/attention/tensor_launch.cuh"

namespace helix::cuda {

namespace {

bool fits_pages(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return fits_tensor(call) && format.dtype == call.dtype && fits_tensor_dims(format) &&
         fits_page_copies(format, kTileTokens16);
}

}  // namespace

const AttentionKernel kTensorPages{.fits = fits_pages,
                                   .query_tile_rows = tensor_query_tile_rows,
                                   .sm_rows = tensor_sm_rows,
                                   .has_fixed_query_tile = false,
                                   .launch = launch_tensor_16_bits<PageCopies>};

}  // namespace helix::cuda
