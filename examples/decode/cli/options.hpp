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

/// The options of one run.
struct Options {
  std::filesystem::path model;
  std::filesystem::path prompts_file;  ///< File that the prompts come from; empty: none.
  std::filesystem::path teacher_file;  ///< File that the continuations come from; empty: none.
  /// kv_dtype is set when the checkpoint is known, unless kv_dtype_name is given.
  GenerationRequest request;
  TopologySpec topology;  ///< Widths; unused if is_topology_auto.
  bool is_topology_auto = false;
  /// Number of ranks to choose a topology for; 0 means the launcher's number of processes, or else at most
  /// one rank for each GPU.
  int num_ranks = 0;
  bool is_prefill_auto = true;      ///< Whether request.prefill_tokens follows from the device.
  bool is_mla_prefill_auto = true;  ///< Whether request.mla_prefill follows from the device too.
  std::string kv_dtype_name;        ///< Empty: the checkpoint's type.
  Device device = Device::cpu;
  PeerMemory peer_memory = PeerMemory::automatic;
  std::optional<DType> activation;  ///< nullopt: see choose_activation().
  bool is_plan_only = false;
  bool verify = false;
  std::set<std::string> given_sampling;  ///< Sampling options on the command line, such as "--top-p".
  bool serve = false;  ///< Whether to serve; request.serving is then set when the checkpoint is known.
  /// 0: decided by the checkpoint.
  ServeLimits serve_limits{.max_sequences = 8, .max_tokens = 0, .kv_tokens = 0};
  int timeout_seconds = 60;    ///< Longest wait for another rank.
  std::string tuning;          ///< Argument of cpu::fix_tuning(); empty: kernels choose by timing.
  int num_threads = 0;         ///< Threads per rank; 0: the machine's cores, shared by its ranks.
  std::filesystem::path json;  ///< Report file; empty: none.
};

/// Adds the values that all ranks of a job must share and that are in neither the request nor the topology.
/// The paths of files, the number of threads and the use of the result may differ between ranks.
void add_fields(JobFields& fields, const Options& options);

/// The device on the command line, even if parse_options() refuses it, or else the device of auto. It is
/// needed to connect to the other processes and tell them about an error in the options.
Device named_device(int argc, char** argv);

/// Parses the command line and reads the files that it names. Returns nullopt after --help and --version,
/// which it prints.
/// @throws Error(invalid_argument), Error(io) or Error(invalid_file) naming option and value.
std::optional<Options> parse_options(int argc, char** argv);

/// Parses ids such as "1, 2, 3".
/// @throws Error(invalid_argument) naming `what` and the text.
TokenIds parse_ids(const std::string& text, const std::string& what);

}  // namespace helix::decode
