// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel over latents of e4m3.
#pragma once

#include "cuda/attention/kernel.hpp"

namespace helix::cuda {

/// Attention over latents of e4m3 up to out or split partials, to be combined by the launch after it. Returns
/// how many work items there are at most.
int launch_latent_e4m3(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid);

}  // namespace helix::cuda
