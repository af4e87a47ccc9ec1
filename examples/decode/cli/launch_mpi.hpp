// SPDX-License-Identifier: Apache-2.0
// One CPU rank per process under mpirun; refused if MPI is not built in.
#pragma once

#include <chrono>
#include <memory>

#include "cli/launch.hpp"

namespace helix::decode {

/// Owns MPI until it is destroyed, which must happen last in main.
/// @throws Error(unsupported) if MPI is not built in.
std::unique_ptr<Launcher> make_mpi_launcher(std::chrono::milliseconds timeout);

}  // namespace helix::decode
