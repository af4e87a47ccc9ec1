// SPDX-License-Identifier: Apache-2.0
// One process a rank on the CPU under mpirun. Where MPI was not built in, it is refused.
#pragma once

#include <chrono>
#include <memory>

#include "cli/launch.hpp"

namespace helix::decode {

/// Owns MPI until it is destroyed, last in main. @throws Error(unsupported) where MPI was not built in.
std::unique_ptr<Launcher> make_mpi_launcher(std::chrono::milliseconds timeout);

}  // namespace helix::decode
