// SPDX-License-Identifier: Apache-2.0
// MpiLaunch where MPI was not built in: refuses.
#include <cstdlib>

#include <helix/error.hpp>

#include "launch.hpp"

namespace helix::decode {

struct MpiLaunch::State {};

MpiLaunch::MpiLaunch() {
  throw Error(ErrorCode::unsupported,
              "started by mpirun, but this build has no MPI; install libopenmpi-dev and configure with "
              "HELIX_MPI=ON, or run without "
              "mpirun: ranks are then threads");
}
MpiLaunch::~MpiLaunch() = default;
int MpiLaunch::rank() const {
  return 0;
}
int MpiLaunch::size() const {
  return 1;
}
GenerationResult MpiLaunch::run(const Checkpoint&, const ModelConfig&, const Topology&,
                                const GenerationRequest&, const LaunchOptions&) {
  throw Error(ErrorCode::unsupported, "this build has no MPI");
}
void MpiLaunch::abort(std::string_view) {
  std::_Exit(1);
}

}  // namespace helix::decode
