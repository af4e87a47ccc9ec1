// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a generation run: threads of this process, or one process each under a launcher; on the
// CPU or on GPUs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/dtype.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "generate/generation.hpp"
#include "generate/job_agreement.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

enum class Device { cpu, cuda };

/// The device that --device auto chooses: cuda if the CUDA backend is built and sees at least one GPU for
/// each process that mpirun started on this machine; else cpu. A missing driver is not an error. All
/// processes of one machine choose alike.
/// @throws Error(invalid_argument) naming the launcher's variable that is missing or wrong.
Device automatic_device();

/// Number of the job's processes on this machine according to mpirun; nullopt if the launcher does not say.
std::optional<int> known_local_processes();

/// Which GPU a rank thread gets.
enum class GpuPlacement {
  automatic,  ///< one_each if there are several ranks and as many GPUs, else shared.
  shared,     ///< All ranks on LaunchOptions::gpu.
  one_each    ///< Rank r on GPU r.
};

/// Whether ranks on GPUs write into each other's memory through cuda::PeerComm.
enum class PeerMemory {
  /// If each rank has a GPU of its own. PeerComm uses NCCL for groups whose members do not all reach each
  /// other.
  automatic,
  /// Also if ranks share a GPU; the process then needs the environment that let_ranks_share_a_gpu() sets.
  on,
  off  ///< Ranks use cuda::NcclComm, or cuda::LocalComm on a shared GPU.
};

/// How the ranks of this process compute and wait.
struct LaunchOptions {
  int num_threads = 0;  ///< Threads of a CPU rank; 0: the machine's cores shared by its ranks.
  bool show_progress = false;
  /// Client of a serving decoder, in the root's process only.
  Frontend* client = nullptr;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< Longest wait for another rank.
  Device device = Device::cpu;
  /// f32, f16 or bf16; on the CPU, which has no f16, the input type of products.
  DType activation = DType::f32;
  GpuPlacement placement = GpuPlacement::automatic;
  PeerMemory peer_memory = PeerMemory::automatic;
  int gpu = 0;                   ///< GPU that ranks share, and for which memory is planned.
  int num_local_ranks = 0;       ///< Ranks on this machine; 0: all of the topology.
  std::int64_t rank_memory = 0;  ///< Memory of a rank in bytes, see Launcher::rank_memory().
};

/// Adds the values that all ranks of a job must share. The number of threads, the machine, the GPU and the
/// output may differ between ranks. The activation and the timeout are compared as options.
void add_fields(JobFields& fields, const LaunchOptions& options);

/// Runs all ranks of `topo` as threads of this process.
/// @throws the error of the rank that failed first, not the errors that it caused on other ranks;
/// Error(unsupported) if the device is missing.
GenerationResult run_local(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                           const GenerationRequest& request, const LaunchOptions& options = {});

/// What the root of a generation displays, and its client.
RootIo root_io(const LaunchOptions& options);

/// The input types of the products of a CPU rank.
cpu::ProductInputs product_inputs(const LaunchOptions& options);

/// Threads that share one rank's operations on the CPU.
int threads_per_rank(const LaunchOptions& options, const Topology& topo);

/// The planned memory of each rank, by world rank, without loading a weight. KV memory is that of the
/// sequences at their longest.
/// @throws Error(unsupported) if the device is missing, because only the device knows what its kernels need.
std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options = {});

/// How this process takes part in a job. There is one subclass per kind of job; see make_launcher().
class Launcher {
 public:
  Launcher() = default;
  virtual ~Launcher() = default;
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  /// Whether each rank is a process; if not, all ranks are threads of this process.
  virtual bool has_processes() const = 0;
  /// Rank of this process in the job; 0 if there is only one process.
  virtual int rank() const = 0;
  /// Number of processes in the job.
  virtual int size() const = 0;
  /// GPU that this process uses, if it uses one.
  virtual int gpu() const { return 0; }
  /// Number of the job's ranks on this process's machine; 0 means that all ranks are threads of this process.
  virtual int num_local_ranks() const { return 0; }
  /// What this process computes with: the instruction sets of its CPU, or the model of its GPU. Kernels of
  /// different ones round differently.
  virtual std::string processor() const { return cpu::instruction_set(); }
  /// Compares the machines of the processes. Collective, called before agree(), with a bounded wait. Does
  /// nothing if no decision depends on the machines.
  virtual void compare_machines() {}
  /// Memory in bytes that --topology auto may give a CPU rank, once machines are compared: the smallest share
  /// of any machine, equal on all processes. 0 means this machine's memory, shared by all ranks.
  virtual std::int64_t rank_memory() const { return 0; }

  /// Description of the ranks' devices for the user; empty if there is nothing to say.
  virtual std::string describe_devices(const Topology& topo, const LaunchOptions& options) const = 0;

  /// Sends this process's statement to all processes of the job and compares all statements. Collective, with
  /// a bounded wait. Returns what follows for all processes.
  /// @throws the error of expect_agreement(), the same on all processes, and any failure of the exchange.
  JobAgreement agree(const JobStatement& mine);
  /// Whether all processes have thrown the same error from agree(). One of them then reports it, and none
  /// needs to be told.
  bool all_fail_alike() const { return all_fail_alike_; }

  /// Runs all ranks of `topo`. Collective over the processes. Every process returns the complete result.
  virtual GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                               const GenerationRequest& request, const LaunchOptions& options) = 0;

  /// Ends the job after a failure: tells the other processes, whose waits then end with Error(peer_failed).
  /// Returns the text that this process must print; empty if another process prints it. May end this process
  /// itself.
  virtual std::string fail(std::string_view reason) noexcept = 0;

 protected:
  /// Gathers the text of every process on every process, by rank. Collective, with a bounded wait.
  virtual std::vector<std::string> gather_texts(const std::string& mine) = 0;

 private:
  bool all_fail_alike_ = false;
};

/// A launcher whose ranks are all threads of this process: run() is run_local().
std::unique_ptr<Launcher> make_thread_launcher();

/// The launcher that fits the environment. With Device::cuda: one process per rank under torchrun, mpirun or
/// srun; with Device::cpu, or if CUDA is not built in: one process per rank under mpirun; otherwise threads.
/// Collective over the processes of the job, which it connects. `timeout` is the longest wait for another
/// process. The MPI launcher must be created first in main, before any thread.
/// @throws Error(unsupported) if MPI is not built in or there is no GPU, Error(invalid_argument) naming the
/// launcher's variable that is missing or wrong, and the errors of Bootstrap.
std::unique_ptr<Launcher> make_launcher(Device device, std::chrono::milliseconds timeout);

}  // namespace helix::decode
