// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel over latents of e4m3.
#pragma once

#include "cuda/attention/kernel.hpp"

namespace helix::cuda {

/// Launches attention over latents of e4m3. It writes out and lse, or split partials that the next launch
/// combines. Returns the largest possible number of work items.
int launch_latent_e4m3(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid);

}  // namespace helix::cuda
