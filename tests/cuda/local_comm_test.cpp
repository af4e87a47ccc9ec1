// SPDX-License-Identifier: Apache-2.0
// cuda::LocalComm keeps the communicator contract, orders the ranks' streams, is capturable, and names the
// culprit of a failure.
#include <chrono>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/backend.hpp>
#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"
#include "cuda/host_comm.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::DType;
using helix::Error;
using helix::ErrorCode;
using helix::contract::require;
using helix::cuda::Buffer;
using helix::cuda::LocalComm;
using helix::cuda::Stream;
using helix::test::HostComm;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

static_assert(helix::Communicator<LocalComm, LocalComm::Stream>);
static_assert(helix::comm::CollectiveComm<LocalComm>);

namespace {

/// Calls that fail before anything is queued need no GPU, so they use the default stream.
Stream no_stream() {
  return Stream::borrow(nullptr);
}

template <class Body>
RankOutcomes run_failing(int size, Body body, std::chrono::milliseconds timeout = 20s) {
  return run_ranks(LocalComm::create_group(size, timeout), body);
}

float* floats(const Buffer& buffer) {
  return reinterpret_cast<float*>(buffer.data());
}

void copy_async(void* target, const void* source, std::size_t bytes, const Stream& stream) {
  HELIX_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream.handle()));
}

}  // namespace

TEST_CASE("cuda::LocalComm keeps the communicator contract") {
  HELIX_REQUIRE_GPUS(1);
  for (const int size : {1, 2, 3, 4, 8}) {
    for (const auto& row : helix::contract::communicator_contract<HostComm<LocalComm>>()) {
      DYNAMIC_SECTION(size << " ranks: " << row.name) {
        run_ranks_or_throw(LocalComm::create_group(size), [&](LocalComm& comm) {
          helix::cuda::use_device(0);
          HostComm<LocalComm> host(comm);
          row.body(host);
        });
      }
    }
  }
}

TEST_CASE("exchanges of more ranks than one launch copies for are exact") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(LocalComm::create_group(33), [](LocalComm& comm) {
    helix::cuda::use_device(0);
    HostComm<LocalComm> host(comm);
    helix::contract::all_to_all_v_contract(host);
    helix::contract::rank_order_contract(host);
  });
  CHECK_THROWS_AS(LocalComm::create_group(65), Error);
}

TEST_CASE("streams wait for each other, on buffers that are filled before and overwritten after") {
  HELIX_REQUIRE_GPUS(1);
  for (const int size : {2, 3, 8}) {
    run_ranks_or_throw(LocalComm::create_group(size), [size](LocalComm& comm) {
      helix::cuda::use_device(0);
      constexpr int kRounds = 100;
      constexpr std::size_t kCount = 5000;
      constexpr std::size_t kSlowBytes = 64 << 20;
      const Stream stream = Stream::create();
      std::vector<float> table(kRounds * kCount);
      const auto value = [](int rank, int round, std::size_t i) {
        return static_cast<float>((static_cast<int>(i) * 7 + round * 13 + rank * 101) % 1000);
      };
      for (int round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < kCount; ++i) {
          table[static_cast<std::size_t>(round) * kCount + i] = value(comm.rank(), round, i);
        }
      }
      const Buffer inputs(table.size() * sizeof(float));
      const Buffer results(table.size() * sizeof(float));
      const Buffer in(kCount * sizeof(float));
      const Buffer out(kCount * sizeof(float));
      const Buffer slow(kSlowBytes);
      copy_async(inputs.data(), table.data(), inputs.size_bytes(), stream);
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t row = static_cast<std::size_t>(round) * kCount;
        if (round % size == comm.rank())  // this rank is late
          HELIX_CUDA_CHECK(cudaMemsetAsync(slow.data(), round, kSlowBytes, stream.handle()));
        copy_async(in.data(), floats(inputs) + row, in.size_bytes(), stream);
        comm.all_reduce(in.data(), out.data(), kCount, DType::f32, stream);
        HELIX_CUDA_CHECK(cudaMemsetAsync(in.data(), 0xff, in.size_bytes(), stream.handle()));
        copy_async(floats(results) + row, out.data(), out.size_bytes(), stream);
      }
      copy_async(table.data(), results.data(), results.size_bytes(), stream);
      HELIX_CUDA_CHECK(cudaStreamSynchronize(stream.handle()));
      for (int round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < kCount; ++i) {
          float expected = 0;
          for (int rank = 0; rank < size; ++rank) expected += value(rank, round, i);
          const float got = table[static_cast<std::size_t>(round) * kCount + i];
          require(got == expected, "round ", round, " element ", i, " is ", got, ", expected ", expected);
        }
      }
    });
  }
}

TEST_CASE("collectives of all ranks are captured in one graph and replayed") {
  HELIX_REQUIRE_GPUS(1);
  constexpr int kSize = 4;
  constexpr std::size_t kCount = 3000;
  helix::cuda::use_device(0);
  std::vector<Stream> streams;
  std::vector<Buffer> values;
  std::vector<Buffer> sums;
  std::vector<Buffer> gathered;
  for (int rank = 0; rank < kSize; ++rank) {
    streams.push_back(Stream::create());
    values.emplace_back(kCount * sizeof(float));
    sums.emplace_back(kCount * sizeof(float));
    gathered.emplace_back(kSize * kCount * sizeof(float));
  }
  const std::vector<LocalComm> comms = LocalComm::create_group(kSize);
  const helix::cuda::Event fork = helix::cuda::Event::create();
  const helix::cuda::Event join = helix::cuda::Event::create();
  const cudaStream_t first = streams[0].handle();
  HELIX_CUDA_CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeRelaxed));
  HELIX_CUDA_CHECK(cudaEventRecord(fork.handle(), first));
  for (int rank = 1; rank < kSize; ++rank)
    HELIX_CUDA_CHECK(cudaStreamWaitEvent(streams[static_cast<std::size_t>(rank)].handle(), fork.handle(), 0));
  run_ranks_or_throw(comms, [&](LocalComm& comm) {
    helix::cuda::use_device(0);
    const auto rank = static_cast<std::size_t>(comm.rank());
    comm.all_reduce(values[rank].data(), sums[rank].data(), kCount, DType::f32, streams[rank]);
    comm.barrier(streams[rank]);
    comm.all_gather(sums[rank].data(), gathered[rank].data(), kCount * sizeof(float), streams[rank]);
  });
  for (int rank = 1; rank < kSize; ++rank) {
    HELIX_CUDA_CHECK(cudaEventRecord(join.handle(), streams[static_cast<std::size_t>(rank)].handle()));
    HELIX_CUDA_CHECK(cudaStreamWaitEvent(first, join.handle(), 0));
  }
  cudaGraph_t graph = nullptr;
  HELIX_CUDA_CHECK(cudaStreamEndCapture(first, &graph));
  cudaGraphExec_t executable = nullptr;
  HELIX_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; ++replay) {
    for (int rank = 0; rank < kSize; ++rank) {
      const std::vector<float> input(kCount, static_cast<float>(rank + 10 * replay));
      copy_async(values[static_cast<std::size_t>(rank)].data(), input.data(), kCount * sizeof(float),
                 streams[0]);
      HELIX_CUDA_CHECK(cudaStreamSynchronize(first));
    }
    HELIX_CUDA_CHECK(cudaGraphLaunch(executable, first));
    HELIX_CUDA_CHECK(cudaStreamSynchronize(first));
    for (int rank = 0; rank < kSize; ++rank) {
      std::vector<float> output(kSize * kCount);
      copy_async(output.data(), gathered[static_cast<std::size_t>(rank)].data(),
                 output.size() * sizeof(float), streams[0]);
      HELIX_CUDA_CHECK(cudaStreamSynchronize(first));
      CHECK(output == std::vector<float>(kSize * kCount, 6.0f + 40.0f * static_cast<float>(replay)));
    }
  }
  HELIX_CUDA_CHECK(cudaGraphExecDestroy(executable));
  HELIX_CUDA_CHECK(cudaGraphDestroy(graph));
}

TEST_CASE("sums need aligned elements") {
  LocalComm comm = LocalComm::create_group(1).front();
  alignas(4) char bytes[8] = {};
  CHECK_THROWS_WITH(comm.all_reduce(bytes + 1, bytes + 4, 1, DType::f32, no_stream()),
                    ContainsSubstring("must be aligned to the 4 bytes of f32"));
  CHECK_THROWS_WITH(comm.reduce_scatter(bytes, bytes + 3, 1, DType::bf16, no_stream()),
                    ContainsSubstring("must be aligned to the 2 bytes of bf16"));
}

TEST_CASE("calls on a GPU that differ between ranks are an error on all of them") {
  alignas(4) char data[64] = {};
  const RankOutcomes sizes = run_failing(3, [&](LocalComm& comm) {
    comm.all_reduce(data, data, comm.rank() == 2 ? 5 : 4, DType::f32, no_stream());
  });
  const RankOutcomes operations = run_failing(3, [&](LocalComm& comm) {
    if (comm.rank() == 1) {
      comm.barrier(no_stream());
    } else {
      comm.broadcast(data, 4, 0, no_stream());
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    CHECK(sizes.code(rank) == ErrorCode::invalid_argument);
    CHECK_THAT(sizes.message(rank), ContainsSubstring("rank 2 calls all_reduce of 5 x f32"));
    CHECK(operations.code(rank) == ErrorCode::invalid_argument);
    CHECK_THAT(operations.message(rank), ContainsSubstring("rank 1 calls barrier"));
  }
}

TEST_CASE("a rank that never comes to a collective on a GPU is named, and the group is over") {
  const RankOutcomes outcomes = run_failing(
      4,
      [](LocalComm& comm) {
        if (comm.rank() == 2) std::this_thread::sleep_for(1000ms);
        comm.barrier(no_stream());
      },
      400ms);
  for (const int rank : {0, 1, 3}) {
    CAPTURE(rank);
    CHECK(outcomes.code(rank) == ErrorCode::timeout);
    CHECK_THAT(outcomes.message(rank), ContainsSubstring("barrier: rank 2 did not arrive within 0.4 s"));
  }
  CHECK(outcomes.code(2) == ErrorCode::peer_failed);
}

TEST_CASE("an abort wakes the ranks that wait to queue on a GPU, in all parts") {
  alignas(4) char data[64] = {};
  const RankOutcomes outcomes = run_failing(4, [&](LocalComm& comm) {
    LocalComm part = comm.split(comm.rank() % 2, comm.rank());
    switch (comm.rank()) {
      case 0:
        comm.barrier(no_stream());
        break;
      case 1:
        part.send(data, 4, 1, no_stream());
        break;
      case 2:
        comm.split(0, 0);
        break;
      default:
        std::this_thread::sleep_for(50ms);
        part.abort("disk on fire");
        break;
    }
  });
  for (const int rank : {0, 1, 2}) {
    CAPTURE(rank);
    CHECK(outcomes.code(rank) == ErrorCode::peer_failed);
    CHECK(outcomes.message(rank) == "rank 3 failed: disk on fire");
  }
}
