// SPDX-License-Identifier: Apache-2.0
// The MPI launcher over cpu::MpiComm.
#include "cli/launch_mpi.hpp"

#include <helix/cpu/backend.hpp>
#include <helix/cpu/mpi_comm.hpp>
#include <helix/job_comms.hpp>

#include "generate/generate.hpp"

namespace helix::decode {
namespace {

class MpiLauncher : public Launcher {
 public:
  bool has_processes() const override { return true; }
  int rank() const override { return session_.world_rank(); }
  int size() const override { return session_.world_size(); }
  std::string describe_devices(const Topology&, const LaunchOptions&) const override { return ""; }

  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options) override {
    cpu::MpiComm world(MPI_COMM_WORLD, options.timeout);
    JobComms<cpu::MpiComm> comms = split_world(world, topo);
    cpu::Backend<cpu::MpiComm> backend(comms.stage, comms.kvp, threads_per_rank(options, topo));
    return generate(backend, world, comms.pipeline, topo, checkpoint, config, request, options.show_progress);
  }

  /// Prints the reason, on one of the ranks that fail alike, and ends the whole job with a non-zero exit.
  std::string fail(std::string_view reason) noexcept override { session_.abort(reason); }

 private:
  cpu::MpiSession session_{nullptr, nullptr};
};

}  // namespace

std::unique_ptr<Launcher> make_mpi_launcher() {
  return std::make_unique<MpiLauncher>();
}

}  // namespace helix::decode
