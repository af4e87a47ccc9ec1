// SPDX-License-Identifier: Apache-2.0
// What our programs ask of NCCL through the process's environment, where their user asks for nothing else.
// The library leaves the environment alone.
#pragma once

#include <cstdlib>

namespace helix {

/// Sets NCCL_NVLS_ENABLE=0 unless it is set: a process that dies holding NVLink multicast objects can leave
/// the host's GPUs unusable. First in main: NCCL reads its environment once, and no other thread may read it
/// yet.
inline void turn_nccl_multicast_off() {
  (void)::setenv("NCCL_NVLS_ENABLE", "0", 0);
}

/// Sets NCCL_GRAPH_MIXING_SUPPORT=0 unless it is set: what cuda::NcclComm::GraphUse::one_at_a_time says, in
/// the words of NCCL before 2.29. First in main, as above.
inline void promise_nccl_one_graph_at_a_time() {
  (void)::setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 0);
}

/// Gives streams hardware queues of their own and loads all kernels at once, unless these are set: what
/// cuda::PeerComm asks of the environment where ranks that wait for each other in kernels share a GPU.
inline void let_ranks_share_a_gpu() {
  (void)::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

}  // namespace helix
