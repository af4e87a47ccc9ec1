// SPDX-License-Identifier: Apache-2.0
// cuda::PeerComm keeps the communicator contract, for threads and for processes, on one shared GPU or with a
// GPU each; has windows within islands of a job; can be captured and replayed; and ends the waits for a rank
// that is missing, dead or out of step.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/backend.hpp>
#include <helix/comm/bootstrap.hpp>
#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"
#include "cuda/host_comm.hpp"
#include "cuda/process_job.hpp"
#include "cuda/unnamed_stream.hpp"
#include "support/failure.hpp"
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
using helix::cuda::Graph;
using helix::cuda::PeerComm;
using helix::cuda::PeerWindow;
using helix::cuda::Stream;
using helix::test::HostComm;
using helix::test::RankOutcomes;
using helix::test::run_job;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

static_assert(helix::Communicator<PeerComm, PeerComm::Stream>);
static_assert(helix::comm::CollectiveComm<PeerComm>);

namespace {

/// Rank r uses device r modulo the number of devices.
std::vector<int> devices_of(int size, int devices) {
  std::vector<int> all(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) all[static_cast<std::size_t>(rank)] = rank % devices;
  return all;
}

std::vector<PeerComm> group_on_one_gpu(int size, std::chrono::milliseconds timeout = 20s,
                                       bool hosts_meet = true) {
  return PeerComm::create_group(devices_of(size, 1), {.timeout = timeout, .hosts_meet = hosts_meet});
}

void copy_async(void* target, const void* source, std::size_t bytes, const Stream& stream) {
  HELIX_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream.handle()));
}

void run_contract(PeerComm& comm) {
  HostComm<PeerComm> host(comm);
  for (const auto& row : helix::contract::communicator_contract<HostComm<PeerComm>>()) {
    const auto begin = std::chrono::steady_clock::now();
    row.body(host);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (std::getenv("HELIX_TEST_TIMES") != nullptr && comm.rank() == 0)
      std::printf("  %d ranks: %s: %.3f s\n", comm.size(), row.name, took.count());
  }
}

bool has_word(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

/// The error of a group that has neither windows nor NCCL.
template <class Call>
helix::test::Failure refusal_of(Call&& call) {
  const auto failure = helix::test::failure_of(call);
  require(failure.has_value(), "no error");
  require(failure->code == ErrorCode::unsupported, "another error: ", failure->what);
  return *failure;
}

/// Jobs with two islands, as on two machines: even ranks form one, odd ranks the other.
int island_of(int rank) {
  return rank % 2;
}

/// Checks that the ranks of one island write into each other's memory.
void run_island(PeerComm& island) {
  require(island.has_windows(), "no windows inside an island");
  require(island.transport().starts_with("peer memory"), island.transport());
  run_contract(island);
  const Stream stream = Stream::create();
  const PeerWindow window = island.allocate_window(1000, 1);
  const int mine = 100 + island.rank();
  for (int peer = 0; peer < island.size(); ++peer)
    copy_async(window.part(peer) + 4 * island.rank(), &mine, 4, stream);
  island.barrier(stream);
  std::vector<int> got(static_cast<std::size_t>(island.size()));
  copy_async(got.data(), window.data(), got.size() * 4, stream);
  island.synchronize(stream);
  for (int peer = 0; peer < island.size(); ++peer)
    require(got[static_cast<std::size_t>(peer)] == 100 + peer, "rank ", peer, " wrote ",
            got[static_cast<std::size_t>(peer)]);
}

/// Checks that a group across islands uses NCCL, or refuses without it.
void run_crossing(PeerComm& group, bool has_nccl) {
  require(!group.has_windows(), "windows between islands");
  require(group.transport() == (has_nccl ? "NCCL" : "none"), group.transport());
  const auto no_windows = refusal_of([&] { (void)group.allocate_window(1000, 1); });
  require(no_windows.says("do not reach each other's memory"), no_windows.what);
  if (has_nccl) return run_contract(group);
  const Stream stream = Stream::create();
  const Buffer data(1024);
  for (int i = 0; i < 2; ++i) {
    const auto no_transport = refusal_of([&] { group.barrier(stream); });
    require(no_transport.says("NCCL is not to be used"), no_transport.what);
    (void)refusal_of([&] { group.all_reduce(data.data(), data.data(), 16, DType::f32, stream); });
    group.synchronize(stream);  // no rank has failed
  }
}

/// Captures a sum within an island and then one across all islands in one graph.
void replay_both(PeerComm& island, PeerComm& across, int size) {
  const Stream stream = Stream::create();
  std::vector<float> values(1000);
  const Buffer sum(values.size() * sizeof(float));
  const auto queue = [&] {
    island.all_reduce(sum.data(), sum.data(), std::ssize(values), DType::f32, stream);
    across.all_reduce(sum.data(), sum.data(), std::ssize(values), DType::f32, stream);
  };
  queue();  // NCCL must connect outside captures
  across.synchronize(stream);
  const Graph graph = Graph::capture(stream, queue);
  for (int replay = 0; replay < 5; ++replay) {
    std::fill(values.begin(), values.end(), static_cast<float>(replay + 1));
    copy_async(sum.data(), values.data(), sum.size_bytes(), stream);
    graph.replay(stream);
    island.synchronize(stream);
    copy_async(values.data(), sum.data(), sum.size_bytes(), stream);
    across.synchronize(stream);
    for (const float got : values)
      require(got == static_cast<float>(size * (replay + 1)), "replay ", replay, ": ", got);
  }
}

void run_islands(PeerComm& world, bool has_nccl) {
  run_crossing(world, has_nccl);
  PeerComm island = world.split(island_of(world.rank()), -world.rank());
  require(island.size() == world.size() / 2, "another size");
  require(island.rank() == (world.size() - 1 - world.rank()) / 2, "another rank");
  PeerComm pair = world.split(world.rank() / 2, world.rank());
  require(pair.size() == 2 && pair.rank() == world.rank() % 2, "another pair");
  run_crossing(pair, has_nccl);
  // All ranks of the job in another order: such a group can be split off without NCCL.
  PeerComm turned = world.split(7, -world.rank());
  require(turned.rank() == world.size() - 1 - world.rank(), "another rank of all");
  island = turned.split(island_of(world.rank()), turned.rank());
  require(island.rank() == (world.size() - 1 - world.rank()) / 2, "another rank of the turned");
  run_island(island);
  PeerComm one = turned.split(turned.rank(), 0);
  require(one.size() == 1 && one.has_windows(), "a rank alone has its own memory");
  run_contract(one);
  if (has_nccl) {
    replay_both(island, pair, world.size());
    one = pair.split(pair.rank(), 0);
    require(one.size() == 1 && one.has_windows(), "a rank alone has its own memory");
  } else {
    (void)refusal_of([&] { (void)pair.split(pair.rank(), 0); });
  }
  const Stream stream = Stream::create();  // the refusals have left the group usable
  island.barrier(stream);
  island.synchronize(stream);
}

/// The last rank of the job exits, dies or hangs; the waits of the other ranks end and name it.
void run_failing(PeerComm& comm, const BootstrapOptions& options, const std::string& job) {
  const Stream stream = Stream::create();
  comm.begin_step(1);
  comm.barrier(stream);
  comm.synchronize(stream);
  comm.begin_step(2);
  const bool is_culprit = options.rank == options.size - 1;
  if (is_culprit && has_word(job, "death")) std::_Exit(0);  // without a word
  if (is_culprit && has_word(job, "kill")) (void)std::raise(SIGKILL);
  if (is_culprit && has_word(job, "stop")) std::this_thread::sleep_for(9s);
  const auto begin = std::chrono::steady_clock::now();
  try {
    // Other islands are not affected.
    while (std::chrono::steady_clock::now() - begin < 2 * options.timeout) {
      comm.barrier(stream);
      comm.synchronize(stream);
      std::this_thread::sleep_for(10ms);
    }
  } catch (const Error& error) {
    if (is_culprit) return;
    const std::string culprit = "rank " + std::to_string(options.size - 1);
    require(has_word(error.what(), culprit), "the wrong culprit: ", error.what());
    require(std::chrono::steady_clock::now() - begin < 2 * options.timeout, "it took too long");
    return;
  }
  require(false, "the barrier did not fail");
}

/// Checks that all ranks refuse a window for which there is no room, and that the group remains usable.
void expect_window_without_room(const PeerComm& comm) {
  const auto failure = helix::test::failure_of([&] { (void)comm.allocate_window(std::size_t{1} << 40, 1); });
  require(failure.has_value() && failure->code == ErrorCode::capacity,
          "no Error(capacity): ", failure ? failure->what : "no error");
  require(comm.allocate_window(1000, 1).data() != nullptr, "no window after one that was refused");
}

/// Checks that ranks with different calls all get an error and can continue.
void run_disagreeing(PeerComm& comm) {
  const auto refused = [&](const auto& call) {
    const auto failure = helix::test::failure_of(call);
    require(failure.has_value(), "no error");
    require(failure->code == ErrorCode::invalid_argument && failure->says("ranks disagree"), failure->what);
  };
  refused([&] { comm.rank() == 0 ? (void)comm.allocate_window(1000, 1) : (void)comm.split(0, 0); });
  refused([&] { (void)comm.allocate_window(comm.rank() == 0 ? 1000 : 2000, 1); });
  expect_window_without_room(comm);
  run_contract(comm);
}

/// Runs one rank of a job that the tests below start, as HELIX_TEST_JOB says.
void run_job_rank(const std::string& job) {
  BootstrapOptions options = BootstrapOptions::from_environment();
  options.timeout = has_word(job, "contract") || job == "disagree" ? 60s : 4s;
  options.heartbeat = 50ms;
  Bootstrap bootstrap(options);
  const int device = options.local_rank % helix::cuda::device_count();
  helix::cuda::use_device(device);
  if (!has_word(job, "islands")) {
    PeerComm comm = PeerComm::connect(bootstrap, device, {});
    require(comm.has_windows(), "no windows between processes of one machine");
    if (job == "disagree") return run_disagreeing(comm);
    return job == "contract" ? run_contract(comm) : run_failing(comm, options, job);
  }
  const bool has_nccl = helix::cuda::device_count() >= options.size;
  const PeerComm::Options of_island = {.island = "island " + std::to_string(island_of(options.rank))};
  if (options.size == 2 && !has_nccl) {
    const auto apart = refusal_of([&] { (void)PeerComm::connect(bootstrap, device, of_island); });
    require(apart.says("ranks 0, 1 do not reach each other's memory"), apart.what);
    return bootstrap.barrier();
  }
  PeerComm world = PeerComm::connect(bootstrap, device, of_island);
  if (has_word(job, "contract")) {
    run_islands(world, has_nccl);
    return bootstrap.barrier();  // otherwise one island leaves while the other still needs the job
  }
  PeerComm island = world.split(island_of(options.rank), options.rank);
  run_failing(island, options, job);
}

}  // namespace

TEST_CASE("one rank of a job", "[.]") {
  if (const char* job = std::getenv("HELIX_TEST_JOB")) CHECK_NOTHROW(run_job_rank(job));
}

TEST_CASE("PeerComm keeps the communicator contract on threads of one GPU") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(1, 2, 3, 4, 8);
  run_ranks_or_throw(group_on_one_gpu(size), [size](PeerComm& comm) {
    helix::cuda::use_device(0);
    require(comm.shares_device() == (size > 1), "ranks of one GPU do not know that they share it");
    run_contract(comm);
  });
}

TEST_CASE(
    "PeerComm keeps the communicator contract with a GPU each and large messages over windows or NCCL") {
  HELIX_REQUIRE_GPUS(2);
  const bool use_nccl = GENERATE(false, true);
  const int size = helix::cuda::device_count();
  run_ranks_or_throw(PeerComm::create_group(devices_of(size, size), {.timeout = 20s, .use_nccl = use_nccl}),
                     [use_nccl](PeerComm& comm) {
                       helix::cuda::use_device(comm.rank());
                       require(comm.has_windows(), "no windows");
                       require(!comm.shares_device(), "GPUs are taken for shared");
                       require((comm.transport() == "peer memory") == !use_nccl, comm.transport());
                       run_contract(comm);
                     });
}

TEST_CASE("PeerComm keeps the communicator contract between processes") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 3);
  const std::vector<int> codes = run_job(size, "contract");
  CHECK(codes == std::vector<int>(codes.size(), 0));
}

TEST_CASE("groups inside an island have windows, and those of several have NCCL or nothing") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4);
  INFO(size << " processes");
  const std::vector<int> codes = run_job(size, "islands contract");
  CHECK(codes == std::vector<int>(codes.size(), 0));
}

TEST_CASE("messages of many rounds arrive whole") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(group_on_one_gpu(3), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    constexpr std::int64_t kCount = 3'000'001;
    const Stream stream = Stream::create();
    std::vector<float> values(kCount);
    for (std::int64_t i = 0; i < kCount; ++i)
      values[static_cast<std::size_t>(i)] = static_cast<float>(i % 1009 + 7 * comm.rank());
    const Buffer in(kCount * sizeof(float));
    const Buffer sum(kCount * sizeof(float));
    const Buffer all(3 * kCount * sizeof(float));
    copy_async(in.data(), values.data(), in.size_bytes(), stream);
    comm.all_reduce(in.data(), sum.data(), kCount, DType::f32, stream);
    comm.all_gather(in.data(), all.data(), kCount * 4, stream);
    comm.synchronize(stream);
    std::vector<float> sums(kCount);
    std::vector<float> gathered(3 * kCount);
    copy_async(sums.data(), sum.data(), sum.size_bytes(), stream);
    copy_async(gathered.data(), all.data(), all.size_bytes(), stream);
    comm.synchronize(stream);
    for (std::int64_t i = 0; i < kCount; ++i) {
      const auto at = static_cast<std::size_t>(i);
      require(sums[at] == static_cast<float>(3 * (i % 1009) + 21), "sum ", i, " is ", sums[at]);
      for (int r = 0; r < 3; ++r)
        require(gathered[static_cast<std::size_t>(r * kCount + i)] == static_cast<float>(i % 1009 + 7 * r),
                "element ", i, " of rank ", r, " is wrong");
    }
  });
}

TEST_CASE("a window reaches all peers at one stride") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(1, 2, 4);
  run_ranks_or_throw(group_on_one_gpu(size), [size](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    const PeerWindow window = comm.allocate_window(1000, 3);
    require(window.stride_bytes() % 48 == 0, "the stride is ", window.stride_bytes());
    require(window.part(comm.rank()) == window.data(), "the part of this rank is elsewhere");
    std::vector<int> zeros(250, -1);
    copy_async(zeros.data(), window.data(), 1000, stream);
    comm.synchronize(stream);
    require(zeros == std::vector<int>(250, 0), "the window is not zeroed");
    comm.barrier(stream);
    const int mine = 100 + comm.rank();
    for (int peer = 0; peer < size; ++peer)
      copy_async(window.data() + (peer - comm.rank()) * window.stride_bytes() + 4 * comm.rank(), &mine, 4,
                 stream);
    comm.synchronize(stream);
    comm.barrier(stream);
    std::vector<int> got(static_cast<std::size_t>(size));
    copy_async(got.data(), window.data(), got.size() * 4, stream);
    comm.synchronize(stream);
    for (int peer = 0; peer < size; ++peer)
      require(got[static_cast<std::size_t>(peer)] == 100 + peer, "rank ", peer, " wrote ",
              got[static_cast<std::size_t>(peer)]);
  });
}

TEST_CASE("a window for which there is no room is refused on all ranks, and the group goes on") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(group_on_one_gpu(4), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    expect_window_without_room(comm);
    run_contract(comm);
  });
}

TEST_CASE("a backend sees the failure of either of its groups, whose roots are their own") {
  HELIX_REQUIRE_GPUS(1);
  std::vector<PeerComm> kvp = group_on_one_gpu(2);
  std::barrier meeting(2);  // both ranks see the first abort
  run_ranks_or_throw(group_on_one_gpu(2), [&](PeerComm& stage) {
    helix::cuda::use_device(0);
    PeerComm& own = kvp[static_cast<std::size_t>(stage.rank())];
    const helix::cuda::Backend<PeerComm, float> backend(stage, own, 0);
    const Stream stream = backend.create_stream();
    stage.barrier(stream);
    backend.synchronize(stream);
    meeting.arrive_and_wait();
    own.abort("out of work");
    const auto failure = helix::test::failure_of([&] { backend.synchronize(stream); });
    require(failure.has_value() && failure->code == ErrorCode::peer_failed && failure->says("out of work"),
            failure ? failure->what : "no error");
  });
}

TEST_CASE("the end of a window waits for no kernel of other ranks, and its memory comes back zeroed") {
  HELIX_REQUIRE_GPUS(1);
  std::atomic<bool> others_wait = false;
  run_ranks_or_throw(group_on_one_gpu(2, 5s, false), [&](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    PeerWindow window = comm.allocate_window(1000, 1);
    const int garbage = -1;
    copy_async(window.data() + 96, &garbage, sizeof(garbage), stream);
    comm.synchronize(stream);
    if (comm.rank() == 1) {
      window = PeerWindow();
      comm.barrier(stream);  // its kernel waits for that of rank 0
      others_wait = true;
    } else {
      while (!others_wait) std::this_thread::yield();
      window = PeerWindow();
      comm.barrier(stream);
    }
    comm.synchronize(stream);
    window = comm.allocate_window(500, 1);
    std::vector<int> zeros(125, -1);
    copy_async(zeros.data(), window.data(), 500, stream);
    comm.synchronize(stream);
    require(zeros == std::vector<int>(125, 0), "the next window is not zeroed");
  });
}

TEST_CASE("each rank captures its own graph, and an odd number of operations replays rightly") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4);
  const int operations = GENERATE(1, 3, 4);
  run_ranks_or_throw(group_on_one_gpu(size), [=](PeerComm& comm) {
    helix::cuda::use_device(0);
    constexpr std::int64_t kCount = 5000;
    const Stream stream = Stream::create();
    const Buffer value(kCount * sizeof(float));
    const auto queue = [&] {
      for (int i = 0; i < operations; ++i)
        comm.all_reduce(value.data(), value.data(), kCount, DType::f32, stream);
    };
    std::vector<float> values(kCount, 0.0f);
    queue();
    comm.synchronize(stream);
    const Graph graph = Graph::capture(stream, queue);
    comm.barrier(stream);
    comm.synchronize(stream);
    for (int replay = 0; replay < 5; ++replay) {
      std::fill(values.begin(), values.end(), static_cast<float>(comm.rank() + replay));
      copy_async(value.data(), values.data(), value.size_bytes(), stream);
      graph.replay(stream);
      comm.synchronize(stream);
      copy_async(values.data(), value.data(), value.size_bytes(), stream);
      comm.synchronize(stream);
      float expected = static_cast<float>(size * (size - 1) / 2 + size * replay);
      for (int i = 1; i < operations; ++i) expected *= static_cast<float>(size);
      for (const float got : values)
        require(got == expected, "replay ", replay, ": ", got, ", expected ", expected);
    }
  });
}

TEST_CASE("a rank that never calls is named by the kernels that wait for it") {
  HELIX_REQUIRE_GPUS(1);
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(3, 1s, false), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    comm.barrier(stream);
    comm.synchronize(stream);
    if (comm.rank() == 1) std::this_thread::sleep_for(3s);
    comm.barrier(stream);
    comm.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  for (const int rank : {0, 2}) {
    CHECK((outcomes.code(rank) == ErrorCode::timeout || outcomes.code(rank) == ErrorCode::peer_failed));
    CHECK_THAT(outcomes.message(rank), ContainsSubstring("rank 1 did not come within 1 s"));
  }
  CHECK(outcomes.code(1) == ErrorCode::peer_failed);
}

TEST_CASE("ranks that make different calls are told where their messages meet") {
  HELIX_REQUIRE_GPUS(1);
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(2, 5s, false), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    const Buffer data(1024);
    comm.barrier(stream);
    if (comm.rank() == 0) comm.barrier(stream);
    comm.all_reduce(data.data(), data.data(), 16, DType::f32, stream);
    comm.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK(outcomes.failures[1] != nullptr);
  CHECK_THAT(outcomes.message(0) + outcomes.message(1), ContainsSubstring("out of step"));
}

TEST_CASE("PeerComm refuses a stream that names no queue, and goes on") {
  HELIX_REQUIRE_GPUS(1);
  const bool hosts_meet = GENERATE(true, false);
  run_ranks_or_throw(group_on_one_gpu(2, 5s, hosts_meet), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    helix::test::refuses_unnamed_stream(comm);
  });
}

TEST_CASE("all_to_all_v is refused where what one rank sends is not what another expects") {
  HELIX_REQUIRE_GPUS(1);
  const bool hosts_meet = GENERATE(true, false);
  const std::int64_t sent = GENERATE(0, 16, 48, 1 << 20);
  const std::int64_t expected = GENERATE(0, 32);
  INFO(sent << " bytes, expected " << expected << ", hosts meet: " << hosts_meet);
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(3, 10s, hosts_meet), [=](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    const Buffer data(2 << 20);
    std::vector<std::int64_t> send(3, 0);
    std::vector<std::int64_t> recv(3, 0);
    if (comm.rank() == 0) send[2] = sent;
    if (comm.rank() == 2) recv[0] = expected;
    comm.all_to_all_v(data.data(), send, data.data() + (1 << 20), recv, stream);
    comm.synchronize(stream);
    comm.barrier(stream);
    comm.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  if (sent == expected) {
    CHECK(outcomes.all_messages().empty());
    return;
  }
  std::string wrong = "out of step";
  if (hosts_meet)
    wrong = "rank 0 sends " + std::to_string(sent) + " bytes to rank 2, which expects " +
            std::to_string(expected);
  const ErrorCode code = hosts_meet ? ErrorCode::invalid_argument : ErrorCode::out_of_step;
  CHECK((outcomes.code(0) == code || outcomes.code(2) == code));
  CHECK_THAT(outcomes.message(0) + outcomes.message(2), ContainsSubstring(wrong));
}

TEST_CASE("an abort lets the kernels of all ranks go, also of parts") {
  HELIX_REQUIRE_GPUS(1);
  const auto begin = std::chrono::steady_clock::now();
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(2, 20s, false), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    PeerComm part = comm.split(0, comm.rank());
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
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
  for (const int rank : {0, 1}) {
    CHECK(outcomes.code(rank) == ErrorCode::peer_failed);
    CHECK(outcomes.message(rank) == "rank 1 failed: disk on fire");
  }
}

TEST_CASE("a rank that has given up in one group lets its peers in another go where it waits") {
  HELIX_REQUIRE_GPUS(1);
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(2, 2s, false), [](PeerComm& comm) {
    helix::cuda::use_device(0);
    PeerComm part = comm.split(0, comm.rank());
    const Stream stream = Stream::create();
    const Stream other = Stream::create();
    part.barrier(stream);
    part.synchronize(stream);
    if (comm.rank() == 0) {
      comm.barrier(stream);  // the only rank to call it: gives up after 2 s
      std::this_thread::sleep_for(1s);
      part.barrier(other);  // waits for rank 1 meanwhile
      std::this_thread::sleep_for(4s);
      part.synchronize(other);
    } else {
      std::this_thread::sleep_for(2500ms);
      part.barrier(stream);
      part.barrier(stream);  // rank 0, whose host has not looked yet, does not come to this one
      part.synchronize(stream);
    }
  });
  INFO(outcomes.all_messages());
  CHECK_THAT(outcomes.message(1), ContainsSubstring("rank 0 gave up waiting for other ranks"));
}

TEST_CASE("an abort names its rank to one that waits in NCCL on the host") {
  HELIX_REQUIRE_GPUS(2);
  const std::vector<PeerComm> comms = PeerComm::create_group(devices_of(2, 2), {.timeout = 20s});
  REQUIRE(comms.front().transport() != "peer memory");
  const RankOutcomes outcomes = run_ranks(comms, [](PeerComm& comm) {
    helix::cuda::use_device(comm.rank());
    constexpr std::int64_t kBytes = 4 << 20;  // large enough for NCCL
    const Stream stream = Stream::create();
    const Buffer data(kBytes);
    if (comm.rank() == 0) {
      comm.send(data.data(), kBytes, 1, stream);  // NCCL connects the two ranks first
      comm.synchronize(stream);
    } else {
      std::this_thread::sleep_for(1s);
      comm.abort("disk on fire");
    }
  });
  CHECK(outcomes.code(0) == ErrorCode::peer_failed);
  CHECK(outcomes.message(0) == "rank 1 failed: disk on fire");
}

TEST_CASE("what NCCL has aborted is not taken as done") {
  HELIX_REQUIRE_GPUS(2);
  std::atomic<bool> has_waited = false;
  const std::vector<PeerComm> comms = PeerComm::create_group(devices_of(2, 2), {.timeout = 2s});
  REQUIRE(comms.front().transport() != "peer memory");
  const RankOutcomes outcomes = run_ranks(comms, [&](PeerComm& comm) {
    helix::cuda::use_device(comm.rank());
    constexpr std::int64_t kCount = 1 << 20;  // large enough for NCCL
    const Stream stream = Stream::create();
    const Buffer data(kCount * sizeof(float));
    comm.all_reduce(data.data(), data.data(), kCount, DType::f32, stream);
    comm.synchronize(stream);
    if (comm.rank() == 0) {
      std::string failure;
      try {
        // NCCL first connects the two ranks, but the other rank is absent.
        comm.send(data.data(), static_cast<std::int64_t>(data.size_bytes()), 1, stream);
        comm.synchronize(stream);
      } catch (const Error& error) {
        failure = error.what();
      }
      require(failure.find("send") != std::string::npos, "the send ended with: ", failure);
      while (!has_waited) std::this_thread::sleep_for(10ms);
    } else {
      comm.all_reduce(data.data(), data.data(), kCount, DType::f32, stream);  // the only rank to call it
      std::this_thread::sleep_for(6s);
      helix::cuda::synchronize(stream);  // NCCL has released it
      try {
        comm.synchronize(stream);
      } catch (...) {
        has_waited = true;
        throw;
      }
      has_waited = true;
    }
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.message(0).empty());
  CHECK(outcomes.code(1) == ErrorCode::peer_failed);
  CHECK_THAT(outcomes.message(1), ContainsSubstring("rank 0 failed: NCCL send"));
}

TEST_CASE("hosts of ranks that share a GPU meet: one that is missing and calls that differ are named") {
  HELIX_REQUIRE_GPUS(1);
  const bool is_missing = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(3, 1s), [=](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    const Buffer data(1024);
    if (comm.rank() == 1 && is_missing) std::this_thread::sleep_for(2s);
    comm.all_gather(data.data(), data.data() + 256, comm.rank() == 1 ? 16 : 32, stream);
    comm.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  for (const int rank : {0, 2}) {
    CHECK(outcomes.code(rank) == (is_missing ? ErrorCode::timeout : ErrorCode::invalid_argument));
    CHECK_THAT(outcomes.message(rank), ContainsSubstring("rank 1"));
  }
}

TEST_CASE("hosts of ranks that share a GPU meet: calls that differ are told by what differs") {
  HELIX_REQUIRE_GPUS(1);
  struct Case {
    std::function<void(PeerComm&, const Buffer&, const Stream&)> call;
    std::vector<std::string> words;
  };
  const auto queue_kernel = [](PeerComm& comm, const char* name, const Stream& stream) {
    comm.queue_kernel(name, stream, [](const helix::cuda::PeerChannel&) { return true; });
  };
  const int i = GENERATE(0, 1, 2);
  const Case tried = std::vector<Case>{
      {[](PeerComm& comm, const Buffer& data, const Stream& stream) {
         comm.all_reduce(data.data(), data.data(), 16, comm.rank() == 0 ? DType::bf16 : DType::f16, stream);
       },
       {"all_reduce of 16 x bf16", "all_reduce of 16 x f16"}},
      {[](PeerComm& comm, const Buffer&, const Stream&) {
         (void)comm.allocate_window(1000, comm.rank() == 0 ? 1 : 2);
       },
       {"in multiples of 16", "in multiples of 32"}},
      {[=](PeerComm& comm, const Buffer&, const Stream& stream) {
         if (comm.rank() == 0) return queue_kernel(comm, "one_kernel", stream);
         queue_kernel(comm, "another_kernel", stream);
       },
       {"calls one_kernel", "calls another_kernel"}}}[static_cast<std::size_t>(i)];
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(2, 10s), [&](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Buffer data(1024);
    tried.call(comm, data, Stream::create());
  });
  for (const int rank : {0, 1}) {
    CHECK(outcomes.code(rank) == ErrorCode::invalid_argument);
    for (const std::string& word : tried.words) CHECK_THAT(outcomes.message(rank), ContainsSubstring(word));
  }
}

TEST_CASE("a kernel that one rank cannot queue ends the group at once, one that none can queue does not") {
  HELIX_REQUIRE_GPUS(1);
  const bool is_alone = GENERATE(false, true);
  const auto begin = std::chrono::steady_clock::now();
  const RankOutcomes outcomes = run_ranks(group_on_one_gpu(3, 30s), [=](PeerComm& comm) {
    helix::cuda::use_device(0);
    const Stream stream = Stream::create();
    const auto failure = helix::test::failure_of([&] {
      comm.queue_kernel("some_kernel", stream, [&](const helix::cuda::PeerChannel&) {
        if (comm.rank() == 1 || !is_alone) throw Error(ErrorCode::unsupported, "no such kernel");
        return true;
      });
    });
    require(failure.has_value(), "no error");
    if (is_alone) throw Error(failure->code, failure->what);
    require(failure->says("no such kernel"), failure->what);
    run_contract(comm);
  });
  INFO(outcomes.all_messages());
  if (!is_alone) {
    CHECK(outcomes.all_messages().empty());
    return;
  }
  CHECK(std::chrono::steady_clock::now() - begin < 15s);
  CHECK_THAT(outcomes.message(1), ContainsSubstring("no such kernel"));
  for (const int rank : {0, 2})
    CHECK_THAT(outcomes.message(rank), ContainsSubstring("rank 1 failed: no such kernel"));
}

TEST_CASE("ranks of one group allocate and free while those of another queue kernels that wait") {
  HELIX_REQUIRE_GPUS(1);
  constexpr int kCalls = 300;
  std::atomic<int> at_work = 2;
  std::atomic<int> allocations = 0;
  run_ranks_or_throw(group_on_one_gpu(4, 10s), [&](PeerComm& comm) {
    helix::cuda::use_device(0);
    PeerComm part = comm.split(comm.rank() % 2, comm.rank());
    const Stream stream = Stream::create();
    if (comm.rank() % 2 == 0) {
      const std::shared_ptr<void> end(nullptr, [&](void*) { --at_work; });  // also counts threads that fail
      const Buffer data(1024);
      for (int i = 0; i < kCalls; ++i) part.all_gather(data.data(), data.data() + 512, 128, stream);
    } else {
      for (std::size_t i = 0; at_work > 0; ++i, ++allocations) const Buffer data(1024 * (1 + i % 64));
    }
    comm.synchronize(stream);
    comm.barrier(stream);
    comm.synchronize(stream);
  });
  CHECK(allocations > 0);
}

TEST_CASE("processes whose hosts make different calls are told so") {
  HELIX_REQUIRE_GPUS(1);
  const std::vector<int> codes = run_job(2, "disagree");
  CHECK(codes == std::vector<int>(codes.size(), 0));
}

TEST_CASE("a process that exits or is killed or stands still ends the waits of others and is named") {
  HELIX_REQUIRE_GPUS(1);
  const std::string job = GENERATE("death", "kill", "stop");
  INFO(job);
  std::vector<int> codes = run_job(2, job);
  CHECK(codes.front() == 0);
  CHECK(codes.back() == (job == "kill" ? 128 + SIGKILL : 0));
}

TEST_CASE("a process that exits or is killed or stands still is named in other islands too") {
  HELIX_REQUIRE_GPUS(1);
  const std::string job = GENERATE("islands death", "islands kill", "islands stop");
  INFO(job);
  std::vector<int> codes = run_job(4, job);
  CHECK(codes.back() == (job == "islands kill" ? 128 + SIGKILL : 0));
  codes.pop_back();
  CHECK(codes == std::vector<int>(codes.size(), 0));
}

TEST_CASE("groups that cannot be are refused") {
  CHECK_THROWS_AS(PeerComm::create_group({}), Error);
  CHECK_THROWS_WITH(PeerComm::create_group(std::vector<int>{4096}), ContainsSubstring("device 4096"));
}
