// SPDX-License-Identifier: Apache-2.0
// Warnings about jobs that are legal but probably not what the user wants.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cli/launch.hpp"
#include "generate/generation_defaults.hpp"

namespace helix::decode {

/// One line for each of these: replicas without a sequence; tensors that config.json does not use; rope keys
/// that the rope's type does not take; windows given to a model without windows; end-of-sequence ids outside
/// of the vocabulary; keys of generation_config.json that are not built; its repetition_penalty without
/// --serve; a plan that exceeds the free memory of this machine or of a GPU. Rank 0 warns about its machine
/// and about what all ranks share; each process warns about its own GPU.
std::vector<std::string> warnings(const Launcher& launcher, const Checkpoint& checkpoint,
                                  const ModelConfig& config, const GenerationDefaults& defaults,
                                  const Topology& topo, const GenerationRequest& request,
                                  const LaunchOptions& launch, const std::vector<RankMemory>& plan);

/// Bytes that the plan's first `num_ranks` ranks take on one machine. They share the weights used in place,
/// which count as no more than the checkpoint's files.
std::int64_t host_bytes(const std::vector<RankMemory>& plan, std::size_t num_ranks,
                        const Checkpoint& checkpoint);

/// Bytes that the plan takes on each GPU. `gpus` holds the GPU of each rank.
std::map<int, std::int64_t> gpu_bytes(const std::vector<RankMemory>& plan, const std::vector<int>& gpus);

/// Checks on rank 0, for the CPU, that the ranks of its machine need no more than the machine's whole memory
/// or the container's limit. The checkpoint's files do not count, because the system may drop their pages and
/// read them again.
/// @throws Error(capacity) with both figures; otherwise the system would kill the process.
void expect_memory(const Launcher& launcher, const LaunchOptions& launch,
                   const std::vector<RankMemory>& plan);

}  // namespace helix::decode
