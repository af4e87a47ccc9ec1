// SPDX-License-Identifier: Apache-2.0
// What this project's programs ask of NCCL and CUDA through their environment, at the beginning of main;
// yours may do the same. The library leaves the environment alone.
#pragma once

#include <cstdlib>

namespace helix {

/// Sets NCCL_NVLS_ENABLE=0 unless it is set: a process that dies holding NVLink multicast objects can leave
/// the host's GPUs unusable. Call it first in main: NCCL reads its environment once, and setenv() is safe
/// only while there is one thread.
inline void turn_nccl_multicast_off() {
  (void)::setenv("NCCL_NVLS_ENABLE", "0", 0);
}

/// Sets NCCL_GRAPH_MIXING_SUPPORT=0 unless it is set: the promise of cuda::NcclComm::GraphUse::one_at_a_time
/// for NCCL before 2.29. Call it first in main.
inline void promise_nccl_one_graph_at_a_time() {
  (void)::setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 0);
}

/// Sets CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER unless they are set: streams get
/// hardware queues of their own, and all kernels are loaded at once. cuda::PeerComm needs both where ranks
/// that wait for each other in kernels share a GPU. Call it first in main.
inline void let_ranks_share_a_gpu() {
  (void)::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

}  // namespace helix
