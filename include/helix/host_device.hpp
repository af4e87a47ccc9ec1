// SPDX-License-Identifier: Apache-2.0
// HELIX_HOST_DEVICE: marks functions that kernels call too.
#pragma once

#if defined(__CUDACC__)
#define HELIX_HOST_DEVICE __host__ __device__
#else
#define HELIX_HOST_DEVICE
#endif
