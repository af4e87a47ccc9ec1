// SPDX-License-Identifier: Apache-2.0
// The kernels of mma.cuh and mma_latent.cuh for KV of bf16.
#include "cuda/attention/mma_latent_launch.cuh"
#include "cuda/attention/mma_launch.cuh"

namespace helix::cuda {

template void launch_mma<bf16, false>(const AttentionParams&, const AttentionCall&, const AttentionGrid&);
template void launch_wide_mma_latent<bf16>(const AttentionParams&, const AttentionCall&,
                                           const AttentionGrid&);
template void launch_mma_latent<bf16>(const AttentionParams&, const AttentionCall&, const AttentionGrid&);
template void launch_mma<bf16, true>(const AttentionParams&, const AttentionCall&, const AttentionGrid&);
template void launch_mma_latent_tiles<bf16, 1, 1, true, 1, kMinSharedMemory.block_bytes>(
    const AttentionParams&, const AttentionCall&, const AttentionGrid&);

}  // namespace helix::cuda
