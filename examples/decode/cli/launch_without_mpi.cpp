// SPDX-License-Identifier: Apache-2.0
// Replaces launch_mpi.cpp if MPI is not built in: refuses to launch.
#include <helix/error.hpp>

#include "cli/launch_mpi.hpp"

namespace helix::decode {

std::unique_ptr<Launcher> make_mpi_launcher(std::chrono::milliseconds) {
  throw Error(ErrorCode::unsupported,
              "started by mpirun, but this build has no MPI; install libopenmpi-dev and configure with "
              "HELIX_MPI=ON, or run without mpirun: ranks are then threads");
}

}  // namespace helix::decode
