// SPDX-License-Identifier: Apache-2.0
// Faults in a generation on rank threads that share one GPU, and on threads with a GPU each over NCCL and
// over peer memory, with replayed graphs.
#include "faults/rank_faults.hpp"

#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/peer_comm.hpp>

#include "cuda/gpu.hpp"

namespace helix::test {
namespace {

/// Faults cannot be thrown in a GPU's queue.
struct SharedGpu {
  using Comm = cuda::LocalComm;
  static constexpr std::chrono::milliseconds kDeadline{1000};
  static constexpr std::array kFaults = {Fault::host_exception, Fault::no_memory, Fault::host_stop,
                                         Fault::mismatch, Fault::skip};

  static std::vector<Comm> create_group(int size, std::chrono::milliseconds timeout) {
    return Comm::create_group(size, timeout);
  }
  static auto make_backend(const JobComms<FaultyComm<Comm>>& comms, const std::shared_ptr<FaultPoint>& point,
                           int /*rank*/) {
    return FaultyBackend<cuda::Backend<FaultyComm<Comm>, float>>(comms, point, 0);
  }
};

/// NCCL does not compare sizes, so there is no mismatch fault. An injection takes 4.4 s on two GPUs, because
/// the groups are created anew.
struct OneGpuEach {
  using Comm = cuda::NcclComm;
  static constexpr std::chrono::milliseconds kDeadline{2000};  // includes the time for ranks to connect
  static constexpr std::array kFaults = {Fault::host_exception, Fault::no_memory, Fault::host_stop,
                                         Fault::skip};

  static std::vector<Comm> create_group(int size, std::chrono::milliseconds timeout) {
    std::vector<int> devices(static_cast<std::size_t>(size));
    std::iota(devices.begin(), devices.end(), 0);
    return Comm::create_group(devices, timeout, Comm::GraphUse::one_at_a_time);
  }
  static auto make_backend(const JobComms<FaultyComm<Comm>>& comms, const std::shared_ptr<FaultPoint>& point,
                           int rank) {
    return FaultyBackend<cuda::Backend<FaultyComm<Comm>, float>>(comms, point, rank);
  }
};

/// The kernels of the ranks wait for each other. There is no mismatch fault: different sizes are found only
/// where the messages meet, after a byte past a buffer may have been read. `kShares` says whether all ranks
/// use one GPU.
template <bool kShares>
struct OverPeerMemory {
  using Comm = cuda::PeerComm;
  static constexpr std::chrono::milliseconds kDeadline{1500};
  static constexpr std::array kFaults = {Fault::host_exception, Fault::no_memory, Fault::host_stop,
                                         Fault::skip};

  static std::vector<Comm> create_group(int size, std::chrono::milliseconds timeout) {
    std::vector<int> devices(static_cast<std::size_t>(size), 0);
    if (!kShares) std::iota(devices.begin(), devices.end(), 0);
    return Comm::create_group(devices, {.timeout = timeout, .use_nccl = false});
  }
  static auto make_backend(const JobComms<FaultyComm<Comm>>& comms, const std::shared_ptr<FaultPoint>& point,
                           int rank) {
    return FaultyBackend<cuda::Backend<FaultyComm<Comm>, float>>(comms, point, kShares ? 0 : rank);
  }
};

TEST_CASE("faults on one GPU through peer memory: each ends all ranks and is named") {
  HELIX_REQUIRE_GPUS(1);
  inject<OverPeerMemory<true>>(Job("llama-tiny", {.kvp = 2}), 20, 8);
  inject<OverPeerMemory<true>>(Job("llama-tiny", {.kvp = 2, .tpa = 2}), 20, 9);
}

TEST_CASE("faults on two GPUs through peer memory: each ends all ranks and is named") {
  HELIX_REQUIRE_GPUS(2);
  inject<OverPeerMemory<false>>(Job("llama-tiny", {.kvp = 2}), 50, 10);
}

TEST_CASE("faults on four GPUs through peer memory: each ends all ranks and is named") {
  HELIX_REQUIRE_GPUS(4);
  inject<OverPeerMemory<false>>(Job("llama-tiny", {.kvp = 2, .tpa = 2}), 60, 11);
}

TEST_CASE("faults on one GPU: each ends all ranks, is named, and the threads work afterwards") {
  HELIX_REQUIRE_GPUS(1);
  inject<SharedGpu>(Job("llama-tiny", {.kvp = 2, .tpa = 2}), 25, 3);
  inject<SharedGpu>(Job("deepseek-tiny", {.kvp = 2}), 25, 4);
}

TEST_CASE("faults on two GPUs under KVP: each ends all ranks, is named, and the threads work afterwards") {
  HELIX_REQUIRE_GPUS(2);
  inject<OneGpuEach>(Job("llama-tiny", {.kvp = 2}), 25, 5);
}

TEST_CASE("faults on two GPUs under TPA: each ends all ranks, is named, and the threads work afterwards") {
  HELIX_REQUIRE_GPUS(2);
  inject<OneGpuEach>(Job("llama-tiny", {.tpa = 2}), 25, 6);
}

TEST_CASE("faults on four GPUs: each ends all ranks, is named, and the threads work afterwards") {
  HELIX_REQUIRE_GPUS(4);
  inject<OneGpuEach>(Job("llama-tiny", {.kvp = 2, .tpa = 2}), 25, 7);
}

}  // namespace
}  // namespace helix::test
