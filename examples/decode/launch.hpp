// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a generation run: threads of this process, or one process each under mpirun.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include "checkpoint.hpp"
#include "generation.hpp"
#include "model_config.hpp"

namespace helix::decode {

struct LaunchOptions {
  int num_threads = 0;  ///< a rank; 0: this machine's cores shared by all ranks
  bool show_progress = false;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of each wait for another rank
};

/// Runs all ranks of `topo` as threads of this process.
/// @throws the error of the rank that failed first, not those of the ranks that it took along.
GenerationResult run_local(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                           const GenerationRequest& request, const LaunchOptions& options = {});

/// Threads that share one rank's operations.
int threads_per_rank(const LaunchOptions& options, const Topology& topo);

/// The memory of each rank, by world rank, without loading a weight. KV is that of the longest that sequences
/// may get.
std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options = {});

/// Whether a launcher (mpirun) started this process as one of several ranks.
bool is_mpi_process();

/// One rank of a generation under mpirun. Owns MPI: built first in main, before threads, destroyed last.
/// Where MPI was not built in, the constructor throws Error(unsupported).
class MpiLaunch {
 public:
  MpiLaunch();
  ~MpiLaunch();
  MpiLaunch(const MpiLaunch&) = delete;
  MpiLaunch& operator=(const MpiLaunch&) = delete;

  int rank() const;
  int size() const;

  /// Collective over all processes. The result is complete on every rank.
  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options);

  /// Ends the whole job with a non-zero exit. Prints `reason`; of ranks that abort alike one prints.
  [[noreturn]] void abort(std::string_view reason);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace helix::decode
