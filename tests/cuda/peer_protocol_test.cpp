// SPDX-License-Identifier: Apache-2.0
// What ranks say to each other over peer memory holds however many messages there have been, tells calls
// apart that are cut differently, and is never what a rank made that has stopped waiting.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/reduce_norm.hpp>

#include "cuda/comm/peer_channel.hpp"
#include "cuda/gpu.hpp"
#include "cuda/peer_ranks.hpp"
#include "support/failure.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using helix::bf16;
using helix::DType;
using helix::ErrorCode;
using helix::contract::require;
using helix::cuda::Buffer;
using helix::cuda::Graph;
using helix::cuda::PeerComm;
using helix::cuda::Stream;
using helix::test::device_of;
using helix::test::make_group;
using helix::test::on_device;
using helix::test::on_host;
using helix::test::PeerBackend;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

namespace {

/// One rank's sums with residual and norm of rows of ones.
struct Sums {
  PeerBackend<bf16> backend;
  Stream stream;
  std::int64_t rows;
  std::int64_t width;
  Buffer partial, residual, weight, out;

  Sums(PeerComm& comm, std::int64_t num_rows, std::int64_t num_columns)
      : backend(comm, comm.split(0, comm.rank()), device_of(comm)),
        stream(backend.create_stream()),
        rows(num_rows),
        width(num_columns),
        partial(ones(rows * width + 8)),
        residual(ones(rows * width)),
        weight(ones(width)),
        out(ones(rows * width)) {}

  static Buffer ones(std::int64_t count) {
    return on_device(std::vector<bf16>(static_cast<std::size_t>(count), bf16(1.0f)));
  }

  /// `skipped`: elements between the buffer's begin and the partial's.
  void queue(std::int64_t skipped = 0) {
    const auto view = [&](const Buffer& buffer, std::int64_t first) {
      return helix::TensorView<bf16, 2>(reinterpret_cast<bf16*>(buffer.data()) + first, {rows, width});
    };
    helix::reduce_norm(backend,
                       {.partial = view(partial, skipped),
                        .residual = view(residual, 0),
                        .weight = {weight.data(), DType::bf16, 1, width},
                        .out = view(out, 0)},
                       stream);
  }

  void check_residual(float expected) {
    for (const bf16 value : on_host<bf16>(backend, residual, static_cast<std::size_t>(rows * width), stream))
      require(static_cast<float>(value) == expected, "residual ", static_cast<float>(value), ", not ",
              expected);
  }
};

/// Sets the number of messages so far between all ranks of the group, in every block. All ranks.
void set_counts(const PeerBackend<bf16>& backend, std::uint32_t count, const Stream& stream) {
  const helix::cuda::PeerChannel& channel = backend.comms().stage->begin_kernel("set_counts", stream);
  const std::vector<std::uint32_t> counts(static_cast<std::size_t>(channel.channels * channel.waits.size),
                                          count);
  backend.upload(channel.counts, counts.data(), counts.size() * sizeof(std::uint32_t), stream);
}

}  // namespace

TEST_CASE("ranks go on after two and four thousand million messages") {
  HELIX_REQUIRE_GPUS(1);
  const std::uint32_t count = GENERATE(0x7ffffffeu, 0x80000005u, 0xfffffffau, 0xfffffffdu);
  run_ranks_or_throw(make_group(2), [count](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    Sums few(comm, 1, 512);     // by lines, which leave the flags alone
    Sums many(comm, 80, 8192);  // by flags
    set_counts(few.backend, count, few.stream);
    comm.barrier(few.stream);
    few.backend.synchronize(few.stream);
    for (int i = 1; i <= 12; ++i) {
      few.queue();
      few.check_residual(static_cast<float>(1 + 2 * i));
      if (i % 3 == 0) comm.barrier(few.stream);
    }
    few.backend.synchronize(few.stream);  // the next call is on another stream
    many.queue();
    many.check_residual(3.0f);
  });
}

TEST_CASE("sums of other rows are out of step, not wrong") {
  HELIX_REQUIRE_GPUS(1);
  const RankOutcomes outcomes = run_ranks(make_group(2, 4s), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    Sums sums(comm, comm.rank() == 0 ? 65 : 66, 8192);
    sums.queue();
    sums.backend.synchronize(sums.stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK(outcomes.failures[1] != nullptr);
}

TEST_CASE("sums over windows refuse what is not aligned, on the rank that brings it") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(make_group(2), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    Sums sums(comm, 2, 512);
    const auto failure = helix::test::failure_of([&] { sums.queue(1); });
    require(failure && failure->code == ErrorCode::invalid_argument && failure->says("aligned to 16 bytes"),
            failure ? failure->what : "no error");
    sums.queue(8);
    sums.check_residual(3.0f);
  });
}

TEST_CASE("a rank that has given up sends nothing more") {
  HELIX_REQUIRE_GPUS(1);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    Sums sums(comm, 1, 512);
    sums.queue();
    sums.backend.synchronize(sums.stream);
    const Graph graph = Graph::capture(sums.stream, [&] {
      sums.queue();
      sums.queue();
    });
    if (comm.rank() == 1) std::this_thread::sleep_for(3s);  // rank 0 waits in the first sum until then
    graph.replay(sums.stream);
    if (comm.rank() == 0) std::this_thread::sleep_for(5s);  // and does not look what became of it
    sums.backend.synchronize(sums.stream);
  });
  INFO(outcomes.all_messages());
  CHECK_THAT(outcomes.message(0), Contains("rank 1"));
  CHECK_THAT(outcomes.message(1), Contains("rank 0"));
}
