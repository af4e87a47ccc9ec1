// SPDX-License-Identifier: Apache-2.0
// What a person should hear of a job that is legal and yet hardly what they want.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/launch.hpp"

namespace helix::decode {

/// One line for each of: replicas without a sequence; tensors that config.json has no use for; keys of its
/// rope that the rope's type does not take; windows given to a model without; keys of generation_config.json
/// that are not built; a plan that exceeds the free memory of this machine or of a GPU. Rank 0 speaks for its
/// machine and for what all ranks share, each process for its own GPU.
std::vector<std::string> warnings(const Launcher& launcher, const Checkpoint& checkpoint,
                                  const ModelConfig& config, const Topology& topo,
                                  const GenerationRequest& request, const LaunchOptions& launch,
                                  const std::vector<RankMemory>& plan);

/// Bytes that the plan's first `num_ranks` ranks take of one machine. What they use in the checkpoint's files
/// they share: it counts as no more than the files.
std::int64_t host_bytes(const std::vector<RankMemory>& plan, std::size_t num_ranks,
                        const Checkpoint& checkpoint);

/// Bytes that the plan takes by GPU. `gpus`: the GPU of each rank.
std::map<int, std::int64_t> gpu_bytes(const std::vector<RankMemory>& plan, const std::vector<int>& gpus);

/// On the CPU, by rank 0: what the ranks of its machine take beside the checkpoint's files, which the system
/// may drop and read again, is no more than all of its memory, or than the limit of the container around it.
/// @throws Error(capacity) with both figures: the system would kill the process.
void expect_memory(const Launcher& launcher, const LaunchOptions& launch,
                   const std::vector<RankMemory>& plan);

/// The bytes of the line that begins with `key`, such as "MemAvailable:   123 kB", of /proc/meminfo's `text`;
/// nullopt without one.
std::optional<std::int64_t> parse_memory(std::string_view text, std::string_view key);

}  // namespace helix::decode
