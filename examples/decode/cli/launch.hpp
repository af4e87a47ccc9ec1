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

/// The device of --device auto: cuda where the CUDA backend is built and sees GPUs, one at least for each
/// process that mpirun started here; else cpu. Never an error without a driver. Processes of one machine
/// agree.
/// @throws Error(invalid_argument) naming the variable of the launcher that is missing or wrong.
Device automatic_device();

/// Processes of the job on this machine, as mpirun says; nullopt where the launcher says nothing of it.
std::optional<int> known_local_processes();

/// Processes of the job on this machine: known_local_processes(), else 1.
int num_local_processes();

/// Which GPU a rank thread gets.
enum class GpuPlacement {
  automatic,  ///< one_each where there are as many GPUs as ranks and several of both, else shared.
  shared,     ///< All ranks on LaunchOptions::gpu.
  one_each    ///< Rank r on GPU r.
};

/// Whether ranks on GPUs write into each other's memory, over cuda::PeerComm.
enum class PeerMemory {
  automatic,  ///< Where each rank has a GPU of its own; PeerComm uses NCCL for groups that do not all reach
              ///< each other.
  on,         ///< Also where ranks share a GPU, whose process then needs what let_ranks_share_a_gpu() sets.
  off         ///< cuda::NcclComm, or cuda::LocalComm on a shared GPU.
};

/// How the ranks of this process compute and wait.
struct LaunchOptions {
  int num_threads = 0;  ///< Threads of a CPU rank; 0: the machine's cores shared by its ranks.
  bool show_progress = false;
  Frontend* client = nullptr;  ///< Of a serving decoder, in the root's process.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< Longest wait for another rank.
  Device device = Device::cpu;
  DType activation =
      DType::f32;  ///< f32, f16 or bf16; of the CPU, where f16 is none, what its products take.
  GpuPlacement placement = GpuPlacement::automatic;
  PeerMemory peer_memory = PeerMemory::automatic;
  int gpu = 0;                   ///< GPU of ranks that share one, and of the memory plan.
  int num_local_ranks = 0;       ///< Ranks on this machine; 0: all of the topology.
  std::int64_t rank_memory = 0;  ///< As Launcher::rank_memory().
};

/// Adds what all ranks of a job must have alike; the threads of a rank, its machine, its GPU and its output
/// are its own.
void add_fields(JobFields& fields, const LaunchOptions& options);

/// Runs all ranks of `topo` as threads of this process.
/// @throws the error of the rank that failed first, not those of the ranks that it took along;
/// Error(unsupported) without the device.
GenerationResult run_local(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                           const GenerationRequest& request, const LaunchOptions& options = {});

/// What a generation's root shows and whom it talks to.
RootIo root_io(const LaunchOptions& options);

/// What products of a rank on the CPU take.
cpu::ProductInputs product_inputs(const LaunchOptions& options);

/// Threads that share one rank's operations on the CPU.
int threads_per_rank(const LaunchOptions& options, const Topology& topo);

/// The memory of each rank, by world rank, without loading a weight. KV is that of the longest sequences.
/// @throws Error(unsupported) without the device, which knows what its kernels need.
std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options = {});

/// How this process takes part in a job. Each kind of job has one of its own; see make_launcher().
class Launcher {
 public:
  Launcher() = default;
  virtual ~Launcher() = default;
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  /// Whether each rank is a process; else all are threads of this one.
  virtual bool has_processes() const = 0;
  /// Rank of this process in the job; 0 where there is one process.
  virtual int rank() const = 0;
  /// Processes of the job.
  virtual int size() const = 0;
  /// GPU of this process, if it is to use one.
  virtual int gpu() const { return 0; }
  /// Ranks of the job on this process's machine; 0: all, as threads of this process.
  virtual int num_local_ranks() const { return 0; }
  /// Compares the machines of the processes. Collective, before agree(); bounded. Does nothing where no
  /// decision depends on them.
  virtual void compare_machines() {}
  /// Memory that --topology auto may give a rank on the CPU, bytes, once machines are compared: the least
  /// part of any machine's, alike on all processes. 0: of this machine's, shared by all ranks.
  virtual std::int64_t rank_memory() const { return 0; }

  /// The ranks' devices in words, for the user; empty: nothing to say.
  virtual std::string describe_devices(const Topology& topo, const LaunchOptions& options) const = 0;

  /// Tells all processes of the job this one's statement, and compares all. Collective; bounded.
  /// Returns what follows for all. @throws what expect_agreement() does, on all processes alike, and what
  /// ended the exchange.
  JobAgreement agree(const JobStatement& mine);
  /// Whether all processes have thrown the same error, from agree(): then one speaks, and none needs to be
  /// told.
  bool all_fail_alike() const { return all_fail_alike_; }

  /// Runs all ranks of `topo`. Collective over the processes. The result is complete on every one.
  virtual GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                               const GenerationRequest& request, const LaunchOptions& options) = 0;

  /// Ends the job after a failure: tells the other processes, whose waits then end with Error(peer_failed).
  /// Returns what this process is to print of it; empty: another one does. It may end the process itself.
  virtual std::string fail(std::string_view reason) noexcept = 0;

 protected:
  /// Every process's text on every process, by rank. Collective, bounded.
  virtual std::vector<std::string> gather_texts(const std::string& mine) = 0;

 private:
  bool all_fail_alike_ = false;
};

/// All ranks as threads of this process: run() is run_local().
std::unique_ptr<Launcher> make_thread_launcher();

/// The launcher that fits the environment: a process each under torchrun, mpirun or srun with Device::cuda,
/// under mpirun with Device::cpu, else threads. Collective over the job's processes, which it connects.
/// `timeout`: the longest wait for another process. The MPI one is built first in main, before threads.
/// @throws Error(unsupported) where the device or MPI is not built in, Error(invalid_argument) naming the
/// variable of the launcher that is missing or wrong, and what Bootstrap throws.
std::unique_ptr<Launcher> make_launcher(Device device, std::chrono::milliseconds timeout);

}  // namespace helix::decode
