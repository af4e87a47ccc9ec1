// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a generation run: threads of this process, or one process each under a launcher; on the
// CPU or on GPUs.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>

#include "checkpoint.hpp"
#include "generation.hpp"
#include "model_config.hpp"

namespace helix::decode {

enum class Device { cpu, cuda };

/// Which GPU a rank thread gets.
enum class GpuPlacement {
  automatic,  ///< one_each where there are as many GPUs as ranks and several of both, else shared
  shared,     ///< all ranks on LaunchOptions::gpu, over cuda::LocalComm
  one_each    ///< rank r on GPU r, over cuda::NcclComm
};

struct LaunchOptions {
  int num_threads = 0;  ///< a CPU rank; 0: this machine's cores shared by all ranks
  bool show_progress = false;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of each wait for another rank
  Device device = Device::cpu;
  DType activation = DType::f32;  ///< f32, f16 or bf16; the CPU has f32
  GpuPlacement placement = GpuPlacement::automatic;
  int gpu = 0;  ///< of ranks that share one, and of the memory plan
};

/// Runs all ranks of `topo` as threads of this process.
/// @throws the error of the rank that failed first, not those of the ranks that it took along;
/// Error(unsupported) without the device.
GenerationResult run_local(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                           const GenerationRequest& request, const LaunchOptions& options = {});

/// Threads that share one rank's operations on the CPU.
int threads_per_rank(const LaunchOptions& options, const Topology& topo);

/// The memory of each rank, by world rank, without loading a weight. KV is that of the longest that sequences
/// may get. @throws Error(unsupported) without the device, which knows what its kernels need.
std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options = {});

/// Whether a launcher (mpirun) started this process as one of several ranks.
bool is_mpi_process();

/// One rank of a generation on the CPU under mpirun. Owns MPI: built first in main, before threads, destroyed
/// last. Where MPI was not built in, the constructor throws Error(unsupported).
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

// ---------------------------------------------------------------------------------------------------------------
// GPUs. Where CUDA was not built in, all of these say so with Error(unsupported).
// ---------------------------------------------------------------------------------------------------------------

/// Why --device cuda cannot work here, in words; empty: it can.
std::string cuda_unavailable_reason();

/// The ranks' GPUs in words, for the user.
std::string describe_gpus(const Topology& topo, const LaunchOptions& options);

/// run_local() and plan_memory() of Device::cuda, for requests that were checked.
GenerationResult run_local_cuda(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                                const GenerationRequest& request, const LaunchOptions& options);
std::vector<RankMemory> plan_memory_cuda(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const Topology& topo, const GenerationRequest& request,
                                         const LaunchOptions& options);

/// Whether a launcher (torchrun, mpirun, srun) started this process as one of several ranks.
/// @throws Error(invalid_argument) naming the variable of the launcher that is missing or wrong.
bool is_cuda_job();

/// One rank of a generation whose ranks are processes with a GPU each, over NCCL. MPI is not used.
class CudaLaunch {
 public:
  /// Collective over the processes of the job: connects them. `config_hash`: of what must be equal on all.
  /// @throws Error(unsupported) without a GPU for this process, and what Bootstrap throws.
  CudaLaunch(std::uint64_t config_hash, std::chrono::milliseconds timeout);
  ~CudaLaunch();
  CudaLaunch(const CudaLaunch&) = delete;
  CudaLaunch& operator=(const CudaLaunch&) = delete;

  int rank() const;
  int size() const;
  int gpu() const;  ///< of this process

  /// Collective over all processes. The result is complete on every rank.
  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options);

  /// Tells the other processes, whose waits then end with Error(peer_failed).
  void abort(std::string_view reason) noexcept;

  /// Whether this rank is to print its failure: before run() all ranks fail alike, or rank 0 hears of it.
  bool reports_failures() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace helix::decode
