// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process, their memory plan, and the choice of a launcher.
#include "cli/launch.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <system_error>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/job_comms.hpp>

#include "cli/launch_cuda.hpp"
#include "cli/launch_mpi.hpp"
#include "cli/machine.hpp"
#include "cli/rank_threads.hpp"
#include "files/reason.hpp"
#include "generate/request_plan.hpp"

namespace helix::decode {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

namespace {

struct Failure {
  ErrorCode code;
  std::string text;
};

Failure describe(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const std::exception& error) {
    return {ErrorCode::internal, reason_of(error)};
  }
}

}  // namespace

void throw_root_failure(const std::vector<std::exception_ptr>& failures) {
  std::optional<std::size_t> root;
  std::optional<std::size_t> echo;
  bool is_shared = failures.size() == 1;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank]) continue;
    const Failure failure = describe(failures[rank]);
    if (failure.code == ErrorCode::peer_failed) {
      if (!echo) echo = rank;
    } else if (!root) {
      root = rank;
    } else if (failure.text == describe(failures[*root]).text) {
      is_shared = true;
    }
  }
  if (root && is_shared) std::rethrow_exception(failures[*root]);
  if (root) {
    const Failure failure = describe(failures[*root]);
    throw Error(failure.code, "rank ", *root, ": ", failure.text);
  }
  if (echo) std::rethrow_exception(failures[*echo]);
}

void run_on_threads(std::size_t num_ranks, const std::function<void(std::size_t)>& body) {
  enum class Start { open, go, stop };
  std::atomic<Start> start = Start::open;
  const auto decide = [&](Start decision) {
    start = decision;
    start.notify_all();
  };
  std::vector<std::jthread> ranks;
  ranks.reserve(num_ranks);
  for (std::size_t rank = 1; rank < num_ranks; ++rank) {
    try {
      ranks.emplace_back([&, rank] {
        start.wait(Start::open);
        if (start == Start::go) body(rank);
      });
    } catch (const std::exception& error) {
      decide(Start::stop);
      throw Error(ErrorCode::capacity, "the thread of rank ", rank, " of ", num_ranks,
                  " cannot be started: ", error.what(),
                  "; use fewer ranks, or raise the limit (ulimit -u or -v, a container's pids)");
    }
  }
  decide(Start::go);
  body(0);
}

int threads_per_rank(const LaunchOptions& options, const Topology& topo) {
  if (options.num_threads > 0) return options.num_threads;
  return std::max(
      1, machine_cores() / (options.num_local_ranks > 0 ? options.num_local_ranks : topo.world_size()));
}

GenerationResult run_local(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                           const GenerationRequest& request, const LaunchOptions& options) {
  check_request(request, config, topo);
  if (options.device == Device::cuda) return run_local_cuda(checkpoint, config, topo, request, options);
  LaunchOptions here = options;
  // All ranks run here, even in a process of a larger job: --verify runs when the other processes are done.
  here.num_local_ranks = 0;
  const int threads = threads_per_rank(here, topo);
  return run_rank_threads(
      cpu::LocalComm::create_group(topo.world_size(), options.timeout),
      [&](int, const JobComms<cpu::LocalComm>& comms) {
        return LocalBackend(comms.stage, comms.kvp, threads, product_inputs(options));
      },
      checkpoint, config, topo, request, root_io(options));
}

std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options) {
  check_request(request, config, topo);
  if (options.device == Device::cuda) return plan_memory_cuda(checkpoint, config, topo, request, options);
  return plan_ranks<cpu::LocalComm>(
      [&](const cpu::LocalComm& stage, const cpu::LocalComm& kvp) {
        return LocalBackend(stage, kvp, threads_per_rank(options, topo));
      },
      checkpoint, config, topo, request);
}

void add_fields(JobFields& fields, const LaunchOptions& options) {
  // A structured binding of all members: a new member does not compile until someone decides here whether it
  // must agree.
  [[maybe_unused]] const auto& [num_threads, show_progress, client, timeout, device, activation, placement,
                                peer_memory, gpu, num_local_ranks, rank_memory] = options;
  constexpr std::string_view kPeerMemory[] = {"auto", "on", "off"};
  fields.push_back({"--peer-memory", std::string(kPeerMemory[static_cast<std::size_t>(peer_memory)])});
  fields.push_back({"--device", device == Device::cuda ? "cuda" : "cpu"});
}

RootIo root_io(const LaunchOptions& options) {
  return {
      .show_progress = options.show_progress,
      .client = options.client,
      .activation = std::string(to_string(options.activation)),
      .longest_silence = std::min<std::chrono::milliseconds>(std::chrono::seconds(1), options.timeout / 4),
      .meeting_interval = options.timeout / 8};
}

cpu::ProductInputs product_inputs(const LaunchOptions& options) {
  HELIX_EXPECTS(options.activation != DType::f16, ErrorCode::unsupported,
                "activations are f16; the CPU has f32 and bf16");
  return options.activation == DType::bf16 ? cpu::ProductInputs::bf16 : cpu::ProductInputs::f32;
}

JobAgreement Launcher::agree(const JobStatement& mine) {
  std::vector<JobStatement> statements;
  for (const std::string& text : gather_texts(serialize(mine)))
    statements.push_back(deserialize_statement(text));
  try {
    return expect_agreement(statements);
  } catch (...) {
    all_fail_alike_ = true;
    throw;
  }
}

namespace {

bool is_mpi_process() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

class ThreadLauncher : public Launcher {
 public:
  bool has_processes() const override { return false; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string describe_devices(const Topology& topo, const LaunchOptions& options) const override {
    return options.device == Device::cuda ? describe_gpus(topo, options) : "";
  }
  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options) override {
    return run_local(checkpoint, config, topo, request, options);
  }
  std::string fail(std::string_view reason) noexcept override { return std::string(reason); }

 protected:
  std::vector<std::string> gather_texts(const std::string& mine) override { return {mine}; }
};

}  // namespace

std::optional<int> known_local_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    const char* value = std::getenv(name);
    int number = 0;
    if (value != nullptr && std::from_chars(value, value + std::strlen(value), number).ec == std::errc())
      return std::max(1, number);
  }
  return std::nullopt;
}

Device automatic_device() {
  if (visible_gpus() < known_local_processes().value_or(1)) return Device::cpu;
  // If only MPI can tell the ranks apart, each process would be a job of its own on the GPU.
  const bool is_open_mpi = std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr;
  return !is_mpi_process() || is_open_mpi || is_cuda_job() ? Device::cuda : Device::cpu;
}

std::unique_ptr<Launcher> make_thread_launcher() {
  return std::make_unique<ThreadLauncher>();
}

std::unique_ptr<Launcher> make_launcher(Device device, std::chrono::milliseconds timeout) {
  // Without a CUDA backend the memory plan is refused, on processes of MPI by one message for all.
  if (device == Device::cuda && is_cuda_built())
    return is_cuda_job() ? make_cuda_launcher(timeout) : make_thread_launcher();
  return is_mpi_process() ? make_mpi_launcher(timeout) : make_thread_launcher();
}

}  // namespace helix::decode
