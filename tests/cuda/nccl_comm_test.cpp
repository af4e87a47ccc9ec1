// SPDX-License-Identifier: Apache-2.0
// cuda::NcclComm keeps the communicator contract on all GPUs of the machine, in one process and as a job of
// several processes, and the waits for a missing or dead rank end.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <helix/backend.hpp>
#include <helix/comm/bootstrap.hpp>
#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"
#include "cuda/host_comm.hpp"
#include "cuda/process_job.hpp"
#include "cuda/unnamed_stream.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::DType;
using helix::Error;
using helix::ErrorCode;
using helix::comm::Bootstrap;
using helix::comm::BootstrapOptions;
using helix::contract::require;
using helix::cuda::Buffer;
using helix::cuda::NcclComm;
using helix::cuda::Stream;
using helix::test::HostComm;
using helix::test::RankOutcomes;
using helix::test::run_job;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

static_assert(helix::Communicator<NcclComm, NcclComm::Stream>);
static_assert(helix::comm::CollectiveComm<NcclComm>);

namespace {

std::vector<int> first_devices(int count) {
  std::vector<int> devices(static_cast<std::size_t>(count));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

/// NCCL's variables in the environment of this process.
std::vector<std::string> nccl_variables() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::string_view(*variable).starts_with("NCCL_")) variables.emplace_back(*variable);
  }
  return variables;
}

/// NCCL rounds f16 and bf16 sums at each rank. Sums of small whole numbers need no rounding; other sums at
/// least have the same bits on all ranks.
template <class T>
void short_sums_contract(HostComm<NcclComm>& comm) {
  HostComm<NcclComm>::Stream stream;
  for (const std::size_t count : {1u, 1023u, 8193u}) {
    std::vector<T> in;
    for (std::size_t i = 0; i < count; ++i)
      in.emplace_back(static_cast<float>(static_cast<int>(i % 9) - 4 + comm.rank()));
    std::vector<T> out(count);
    const auto num = static_cast<std::int64_t>(count);
    comm.all_reduce(in.data(), out.data(), num, helix::kDTypeOf<T>, stream);
    const int size = comm.size();
    for (std::size_t i = 0; i < count; ++i) {
      const auto expected = static_cast<float>(size * (static_cast<int>(i % 9) - 4) + size * (size - 1) / 2);
      require(static_cast<float>(out[i]) == expected, "element ", i, " is ", static_cast<float>(out[i]),
              ", expected ", expected);
      in[i] = T(1.0f / static_cast<float>(i + 2 + static_cast<std::size_t>(comm.rank())));
    }
    comm.all_reduce(in.data(), out.data(), num, helix::kDTypeOf<T>, stream);
    helix::contract::require_equal_bits_on_all_ranks(
        comm, out.data(), num * static_cast<std::int64_t>(sizeof(T)), "all_reduce");
  }
}

/// The parts of the contract that NCCL can keep: the order of its sums is not defined.
void nccl_contract(HostComm<NcclComm>& comm) {
  for (const auto& row : helix::contract::communicator_contract<HostComm<NcclComm>>()) {
    const std::string name = row.name;
    if (name == "f32 sums are in rank order") continue;
    if (name.starts_with("reductions equal")) {
      helix::contract::reduction_contract_of<float>(comm);
      short_sums_contract<helix::f16>(comm);
      short_sums_contract<helix::bf16>(comm);
    } else {
      row.body(comm);
    }
  }
}

/// Runs one rank of a job that the tests below start, as HELIX_TEST_JOB says.
void run_job_rank(const std::string& job) {
  const BootstrapOptions from_launcher = BootstrapOptions::from_environment();
  BootstrapOptions options = from_launcher;
  options.timeout = 60s;
  options.heartbeat = 50ms;
  Bootstrap bootstrap(options);
  helix::cuda::use_device(options.local_rank);
  NcclComm comm = NcclComm::connect(bootstrap, options.local_rank);
  HostComm<NcclComm> host(comm);
  if (job == "contract") return nccl_contract(host);
  HostComm<NcclComm>::Stream stream;
  bootstrap.set_step(1);
  host.barrier(stream);
  bootstrap.set_step(2);
  if (options.rank == options.size - 1) std::_Exit(0);  // dies without a word
  const auto begin = std::chrono::steady_clock::now();
  try {
    host.barrier(stream);
  } catch (const Error& error) {
    const std::string culprit = "rank " + std::to_string(options.size - 1) + " of";
    require(error.code() == ErrorCode::peer_failed, "another error: ", error.what());
    require(std::string(error.what()).starts_with(culprit), "the wrong culprit: ", error.what());
    require(std::chrono::steady_clock::now() - begin < 30s, "it took too long");
    return;
  }
  require(false, "the barrier did not fail");
}

}  // namespace

TEST_CASE("one rank of a job", "[.]") {
  if (const char* job = std::getenv("HELIX_TEST_JOB")) CHECK_NOTHROW(run_job_rank(job));
}

TEST_CASE("NcclComm keeps the communicator contract, one thread a GPU") {
  HELIX_REQUIRE_GPUS(1);
  for (int size = 1; size <= helix::cuda::device_count(); ++size) {
    const std::vector<int> devices = first_devices(size);
    run_ranks_or_throw(
        NcclComm::create_group(devices),
        [](NcclComm& comm) {
          helix::cuda::use_device(comm.rank());
          HostComm<NcclComm> host(comm);
          nccl_contract(host);
        },
        120s);
  }
}

TEST_CASE("NcclComm keeps the communicator contract, one process a GPU") {
  HELIX_REQUIRE_GPUS(2);
  const std::vector<int> codes = run_job(helix::cuda::device_count(), "contract");
  CHECK(codes == std::vector<int>(codes.size(), 0));
}

TEST_CASE("a process that dies ends the others' waits on the GPU") {
  HELIX_REQUIRE_GPUS(2);
  const std::vector<int> codes = run_job(helix::cuda::device_count(), "death");
  CHECK(codes == std::vector<int>(codes.size(), 0));
}

TEST_CASE("NCCL operations follow each other without a host wait") {
  HELIX_REQUIRE_GPUS(2);
  run_ranks_or_throw(NcclComm::create_group(first_devices(2)), [](NcclComm& comm) {
    helix::cuda::use_device(comm.rank());
    constexpr std::size_t kCount = 1 << 16;
    const Stream stream = Stream::create();
    const Buffer a(kCount * sizeof(float));
    const Buffer b(kCount * sizeof(float));
    std::vector<float> values(kCount, static_cast<float>(comm.rank() + 1));
    HELIX_CUDA_CHECK(
        cudaMemcpyAsync(a.data(), values.data(), a.size_bytes(), cudaMemcpyHostToDevice, stream.handle()));
    for (int round = 0; round < 20; ++round) {
      comm.all_reduce(a.data(), a.data(), kCount, DType::f32, stream);
      comm.all_to_all(a.data(), b.data(), kCount / 2 * sizeof(float), stream);
      comm.all_to_all(b.data(), a.data(), kCount / 2 * sizeof(float), stream);
    }
    comm.synchronize(stream);
    HELIX_CUDA_CHECK(cudaMemcpy(values.data(), a.data(), a.size_bytes(), cudaMemcpyDeviceToHost));
    const float expected = 3.0f * static_cast<float>(1 << 19);
    for (const float value : values) require(value == expected, "got ", value, ", expected ", expected);
  });
}

TEST_CASE("a rank that never calls is named, and the waiting streams are released") {
  HELIX_REQUIRE_GPUS(2);
  const RankOutcomes outcomes = run_ranks(NcclComm::create_group(first_devices(2), 8s), [](NcclComm& comm) {
    helix::cuda::use_device(comm.rank());
    const Stream stream = Stream::create();
    comm.barrier(stream);
    comm.synchronize(stream);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(12s);
    }
    comm.barrier(stream);
    comm.synchronize(stream);
  });
  CHECK(outcomes.code(0) == ErrorCode::timeout);
  CHECK_THAT(outcomes.message(0),
             ContainsSubstring("barrier: the stream of rank 0 of 2 did not finish within 8 s") &&
                 ContainsSubstring("rank 1 is behind: its call 1 was barrier, this rank made 2"));
  CHECK(outcomes.code(1) == ErrorCode::peer_failed);
  CHECK_THAT(outcomes.message(1), ContainsSubstring("rank 0 failed: barrier"));
}

TEST_CASE("an abort releases the streams of all ranks and ends later calls, also of parts") {
  HELIX_REQUIRE_GPUS(2);
  const RankOutcomes outcomes = run_ranks(NcclComm::create_group(first_devices(2)), [](NcclComm& comm) {
    helix::cuda::use_device(comm.rank());
    NcclComm part = comm.split(0, comm.rank());
    const Stream stream = Stream::create();
    part.barrier(stream);
    part.synchronize(stream);
    if (comm.rank() == 0) {
      part.barrier(stream);  // the only rank to call it
      part.synchronize(stream);
    } else {
      std::this_thread::sleep_for(300ms);
      comm.abort("disk on fire");
      comm.abort("and the second");
      part.barrier(stream);
    }
  });
  for (const int rank : {0, 1}) {
    CHECK(outcomes.code(rank) == ErrorCode::peer_failed);
    CHECK(outcomes.message(rank) == "rank 1 failed: disk on fire");
  }
}

TEST_CASE("an abort returns and releases the streams of all ranks while graphs hold the communicator") {
  HELIX_REQUIRE_GPUS(2);
  const RankOutcomes outcomes = run_ranks(NcclComm::create_group(first_devices(2)), [](NcclComm& comm) {
    helix::cuda::use_device(comm.rank());
    const Stream stream = Stream::create();
    comm.barrier(stream);
    comm.synchronize(stream);
    const auto graph = helix::cuda::Graph::capture(stream, [&] { comm.barrier(stream); });
    graph.replay(stream);
    comm.synchronize(stream);
    if (comm.rank() == 0) {
      graph.replay(stream);  // the only rank to replay it
      comm.synchronize(stream);
    } else {
      std::this_thread::sleep_for(300ms);
      const auto start = std::chrono::steady_clock::now();
      comm.abort("disk on fire");
      const auto took = std::chrono::steady_clock::now() - start;
      require(took < 10s, "the abort took ", std::chrono::duration<double>(took).count(), " s");
      comm.barrier(stream);
    }
  });
  for (const int rank : {0, 1}) {
    CHECK(outcomes.code(rank) == ErrorCode::peer_failed);
    CHECK(outcomes.message(rank) == "rank 1 failed: disk on fire");
  }
}

TEST_CASE("an engine's communicator is used, not destroyed, and aborted only if allowed") {
  HELIX_REQUIRE_GPUS(1);
  const int device = 0;
  ncclComm_t engines = nullptr;
  REQUIRE(ncclCommInitAll(&engines, 1, &device) == ncclSuccess);
  helix::cuda::use_device(0);
  {
    NcclComm comm = NcclComm::borrow(engines);
    CHECK((comm.rank() == 0 && comm.size() == 1));
    HostComm<NcclComm> host(comm);
    nccl_contract(host);
    comm.abort("over");
    CHECK_THROWS_WITH(comm.barrier(Stream::create()), "rank 0 failed: over");
  }
  int count = 0;
  CHECK(ncclCommCount(engines, &count) == ncclSuccess);
  CHECK(count == 1);
  CHECK(ncclCommDestroy(engines) == ncclSuccess);
}

TEST_CASE("NcclComm refuses a stream that names no queue, and goes on") {
  HELIX_REQUIRE_GPUS(1);
  const int size = std::min(2, helix::cuda::device_count());
  run_ranks_or_throw(NcclComm::create_group(first_devices(size)), [](NcclComm& comm) {
    helix::cuda::use_device(comm.rank());
    helix::test::refuses_unnamed_stream(comm);
  });
}

TEST_CASE("groups of impossible devices are refused") {
  CHECK_THROWS_AS(NcclComm::create_group({}), Error);
  CHECK_THROWS_WITH(NcclComm::create_group(std::vector<int>{0, 0}), ContainsSubstring("given to two ranks"));
  CHECK_THROWS_WITH(NcclComm::create_group(std::vector<int>{4096}), ContainsSubstring("wants device 4096"));
  CHECK_THROWS_AS(NcclComm::borrow(nullptr), Error);
}

TEST_CASE("making a communicator leaves the process's environment alone") {
  HELIX_REQUIRE_GPUS(1);
  const std::vector<std::string> before = nccl_variables();
  CHECK_NOTHROW(NcclComm::create_group(first_devices(1), 60s, NcclComm::GraphUse::one_at_a_time));
  CHECK(nccl_variables() == before);
}

TEST_CASE("a group that is refused leaves the process's environment alone") {
  const char* variable = std::getenv("NCCL_NVLS_ENABLE");
  const std::string value = variable == nullptr ? "" : variable;
  ::unsetenv("NCCL_NVLS_ENABLE");  // none of these calls reaches NCCL, which would read it
  const std::vector<std::string> before = nccl_variables();
  CHECK_THROWS_AS(NcclComm::create_group({}, 60s, NcclComm::GraphUse::one_at_a_time), Error);
  CHECK_THROWS_AS(NcclComm::borrow(nullptr), Error);
  CHECK(nccl_variables() == before);
  if (variable != nullptr) ::setenv("NCCL_NVLS_ENABLE", value.c_str(), 1);
}
