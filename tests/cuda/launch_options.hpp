// SPDX-License-Identifier: Apache-2.0
// Where the ranks of the decoder's GPU tests run.
#pragma once

#include "cli/launch.hpp"

namespace helix::test {

inline const decode::LaunchOptions kOneGpu{.device = decode::Device::cuda,
                                           .placement = decode::GpuPlacement::shared};
/// As kOneGpu, over cuda::PeerComm: kernels of the ranks wait for each other.
inline const decode::LaunchOptions kOneGpuPeers{.device = decode::Device::cuda,
                                                .placement = decode::GpuPlacement::shared,
                                                .peer_memory = decode::PeerMemory::on};
inline const decode::LaunchOptions kGpuEach{.device = decode::Device::cuda,
                                            .placement = decode::GpuPlacement::one_each};

}  // namespace helix::test
