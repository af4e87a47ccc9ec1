// SPDX-License-Identifier: Apache-2.0
// Compiles and links against helix::mpi alone, which must bring helix::cpu and MPI.
#include <helix/backend.hpp>
#include <helix/cpu/mpi_comm.hpp>
#include <helix/topology.hpp>

int main() {
  static_assert(helix::Communicator<helix::cpu::MpiComm, helix::cpu::Stream>);
  return helix::Topology::violations({}, {}).empty() ? 1 : 0;
}
