// SPDX-License-Identifier: Apache-2.0
// The command line of helix-decode.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
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
  /// Ranks to choose a topology for; 0: as many as the launcher started, else at most a rank for each GPU.
  int num_ranks = 0;
  bool is_prefill_auto = true;      ///< Whether request.prefill_tokens is to follow from the device.
  bool is_mla_prefill_auto = true;  ///< Whether request.mla_prefill is to follow from the device too.
  std::string kv_dtype_name;        ///< Empty: the checkpoint's.
  Device device = Device::cpu;
  PeerMemory peer_memory = PeerMemory::automatic;
  std::optional<DType> activation;  ///< nullopt: see choose_activation().
  bool is_plan_only = false;
  bool verify = false;
  std::set<std::string> given_sampling;  ///< Options of how tokens are drawn that are there, as "--top-p".
  bool serve = false;                    ///< Then request.serving is set once the checkpoint is known.
  ServeLimits serve_limits{.max_sequences = 8, .max_tokens = 0, .kv_tokens = 0};  ///< 0: by the checkpoint.
  int timeout_seconds = 60;    ///< Longest wait for another rank.
  std::string tuning;          ///< What cpu::fix_tuning() takes; empty: kernels choose by timing.
  int num_threads = 0;         ///< Threads a rank; 0: the machine's cores shared by its ranks.
  std::filesystem::path json;  ///< Report file; empty: none.
};

/// Adds what all ranks of a job must have alike of what is nowhere else: neither in the request nor in the
/// topology. Where a rank finds the model, how many threads it has and what it does with the result are its
/// own.
void add_fields(JobFields& fields, const Options& options);

/// The device that the command line names, even one that parse_options() refuses, else that of auto: how to
/// tell the others of the job that it does.
Device named_device(int argc, char** argv);

/// Parses and reads the files that the options name. nullopt after --help and --version, which it prints.
/// @throws Error(invalid_argument), Error(io) or Error(invalid_file) naming option and value.
std::optional<Options> parse_options(int argc, char** argv);

/// "1, 2, 3" -> ids. @throws Error(invalid_argument) naming `what` and the text.
TokenIds parse_ids(const std::string& text, const std::string& what);

}  // namespace helix::decode
