// SPDX-License-Identifier: Apache-2.0
// Changes to captured graphs that make them cheaper to launch.
#pragma once

#include <cuda_runtime_api.h>

namespace helix::cuda {

/// Replaces the memsets of `graph`, which fill_zero() and cuBLASLt's split-K products queue, by kernels of
/// the device whose memory they set. The host launches a graph of 153 kernels in 2.2 us; with 16 memsets
/// among them it takes 23 us (H200, driver 580).
void replace_memsets(cudaGraph_t graph);

}  // namespace helix::cuda
