// SPDX-License-Identifier: Apache-2.0
// The command line of helix-decode.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "cli/launch.hpp"
#include "generate/generation.hpp"

namespace helix::decode {

/// What the command line asks for.
struct Options {
  std::filesystem::path model;
  GenerationRequest request;  ///< kv_dtype is set once the checkpoint is known, unless kv_dtype_name says.
  TopologySpec topology;      ///< Widths; unused if is_topology_auto.
  bool is_topology_auto = false;
  int num_ranks = 0;          ///< Ranks to choose a topology for; 0: as many as the launcher started.
  std::string kv_dtype_name;  ///< Empty: the checkpoint's.
  Device device = Device::cpu;
  DType activation = DType::f32;
  bool is_plan_only = false;
  bool verify = false;
  int timeout_seconds = 60;    ///< Longest wait for another rank.
  int num_threads = 0;         ///< Threads a rank; 0: the machine's cores shared by this process's ranks.
  std::filesystem::path json;  ///< Report file; empty: none.
};

/// Parses and reads the files that the options name. nullopt after --help, which it prints.
/// @throws Error(invalid_argument), Error(io) or Error(invalid_file) naming option and value.
std::optional<Options> parse_options(int argc, char** argv);

/// "1, 2, 3" -> ids. @throws Error(invalid_argument) naming `what` and the text.
TokenIds parse_ids(const std::string& text, const std::string& what);

}  // namespace helix::decode
