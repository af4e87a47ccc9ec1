// SPDX-License-Identifier: Apache-2.0
// A million decode steps on GPUs, replayed if each rank has a GPU or windows of its own.
#include "faults/soak.hpp"

#include <cstdint>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/peer_comm.hpp>

#include "cuda/gpu.hpp"
#include "support/resident_memory.hpp"

namespace helix::test {
namespace {

constexpr std::int64_t kTokensARound = 8000;
// Of host and device memory: what driver and allocator may keep.
constexpr std::int64_t kGrowthBytes = 8 << 20;

std::int64_t host_and_device_bytes() {
  return ResidentMemory::now().all() + cuda::device_memory(0).total_bytes - cuda::device_memory(0).free_bytes;
}

/// Ranks over peer memory, all on one GPU or with a GPU each.
void soak_on_gpus(const TopologySpec& spec, const std::vector<int>& devices, int rounds) {
  using Backend = cuda::Backend<cuda::PeerComm, float>;
  soak<Backend>(
      spec, rounds, kTokensARound, cuda::PeerComm::create_group(devices, {.use_nccl = false}),
      [&](const JobComms<cuda::PeerComm>& comms, int rank) {
        return Backend(comms.stage, comms.kvp, devices[static_cast<std::size_t>(rank)]);
      },
      host_and_device_bytes, kGrowthBytes);
}

TEST_CASE("soak: 16000 tokens of two ranks that share a GPU, over peer memory") {
  HELIX_REQUIRE_GPUS(1);
  soak_on_gpus({.kvp = 2}, {0, 0}, 2);
}

TEST_CASE("soak: 16000 tokens of two GPUs over peer memory") {
  HELIX_REQUIRE_GPUS(2);
  soak_on_gpus({.kvp = 2}, {0, 1}, 2);
}

TEST_CASE("soak: 1000000 tokens of two ranks that share a GPU, over peer memory", "[.][full]") {
  HELIX_REQUIRE_GPUS(1);
  soak_on_gpus({.kvp = 2}, {0, 0}, 125);
}

TEST_CASE("soak: 1000000 tokens of two GPUs over peer memory", "[.][full]") {
  HELIX_REQUIRE_GPUS(2);
  soak_on_gpus({.kvp = 2}, {0, 1}, 125);
}

}  // namespace
}  // namespace helix::test
