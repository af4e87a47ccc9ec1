// SPDX-License-Identifier: Apache-2.0
// What helix-decode prints and writes: memory plan, tokens, timing, JSON.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/launch.hpp"
#include "generate/generation.hpp"

namespace helix::decode {

/// "1.50 MiB".
std::string format_bytes(std::int64_t bytes);

/// One line per rank: weights, KV, workspace and their sum, and the part of the weights that is used in place
/// in the checkpoint's files.
std::string format_memory(const std::vector<RankMemory>& memory, const Topology& topo);

/// The tokens generated for each sequence, timing and exchange.
std::string format_result(const GenerationResult& result);

/// The type of the activations and, on the CPU, the ways in which the tuned kernels worked.
std::string format_computation(const LaunchOptions& launch);

/// Writes the JSON report. @throws Error(io).
void write_json(const std::filesystem::path& file, const Topology& topo, const GenerationRequest& request,
                const LaunchOptions& launch, const GenerationResult& result);

/// Compares the results token by token.
/// @throws Error(internal) naming the first sequence and step that differ, with both tokens.
void check_same_tokens(const GenerationResult& result, const GenerationResult& one_rank);

}  // namespace helix::decode
