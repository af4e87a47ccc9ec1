// SPDX-License-Identifier: Apache-2.0
// MpiLaunch over cpu::MpiComm.
#include <helix/cpu/backend.hpp>
#include <helix/cpu/mpi_comm.hpp>

#include "generate.hpp"
#include "launch.hpp"

namespace helix::decode {

struct MpiLaunch::State {
  cpu::MpiSession session{nullptr, nullptr};
};

MpiLaunch::MpiLaunch() : state_(std::make_unique<State>()) {}
MpiLaunch::~MpiLaunch() = default;

int MpiLaunch::rank() const {
  return state_->session.world_rank();
}
int MpiLaunch::size() const {
  return state_->session.world_size();
}

GenerationResult MpiLaunch::run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                                const GenerationRequest& request, const LaunchOptions& options) {
  auto comms = WorldComms<cpu::MpiComm>::split(cpu::MpiComm(MPI_COMM_WORLD, options.timeout), topo);
  cpu::Backend<cpu::MpiComm> backend(comms.stage, comms.kvp, threads_per_rank(options, topo));
  return generate(backend, comms, topo, checkpoint, config, request, options.show_progress);
}

void MpiLaunch::abort(std::string_view reason) {
  state_->session.abort(reason);
}

}  // namespace helix::decode
