// SPDX-License-Identifier: Apache-2.0
// The protocol between ranks over peer memory works after any number of messages, distinguishes calls that
// are divided differently, and never uses data from a rank that has stopped waiting.
#include <chrono>
#include <cmath>
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
using Catch::Matchers::ContainsSubstring;
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

/// One rank's sums, with residual and norm, of rows of ones.
struct Sums {
  PeerBackend<bf16> backend;
  Stream stream;
  std::int64_t rows;
  std::int64_t width;
  Buffer summand, residual, weight, out;

  Sums(PeerComm& comm, std::int64_t num_rows, std::int64_t num_columns)
      : backend(comm, comm.split(0, comm.rank()), device_of(comm)),
        stream(backend.create_stream()),
        rows(num_rows),
        width(num_columns),
        summand(ones(rows * width + 8)),
        residual(ones(rows * width)),
        weight(ones(width)),
        out(ones(rows * width)) {}

  static Buffer ones(std::int64_t count) {
    return on_device(std::vector<bf16>(static_cast<std::size_t>(count), bf16(1.0f)));
  }

  /// `skipped` is the number of elements before the summand in its buffer.
  void queue(std::int64_t skipped = 0) {
    const auto view = [&](const Buffer& buffer, std::int64_t first) {
      return helix::TensorView<bf16, 2>(reinterpret_cast<bf16*>(buffer.data()) + first, {rows, width});
    };
    helix::reduce_norm(backend,
                       {.summand = view(summand, skipped),
                        .residual = view(residual, 0),
                        .weight = {weight.data(), DType::bf16, 1, width},
                        .out = view(out, 0)},
                       stream);
  }

  /// Sets the summand [steps, rows, width], at most the size it was created for, to one value per step, and
  /// the residual to zeros.
  template <class ValueOf>
  void set_summand(int steps, const ValueOf& value_of) {
    std::vector<bf16> values;
    for (int step = 0; step < steps; ++step)
      values.insert(values.end(), static_cast<std::size_t>(rows * width), bf16(value_of(step)));
    backend.upload(summand.data(), values.data(), values.size() * sizeof(bf16), stream);
    const std::vector<bf16> zeros(static_cast<std::size_t>(rows * width), bf16(0.0f));
    backend.upload(residual.data(), zeros.data(), zeros.size() * sizeof(bf16), stream);
  }

  void check_residual(float expected) {
    for (const bf16 value : on_host<bf16>(backend, residual, static_cast<std::size_t>(rows * width), stream))
      require(static_cast<float>(value) == expected, "residual ", static_cast<float>(value), ", not ",
              expected);
  }
};

/// Sets the count of earlier messages between all ranks of the group, in every block. All ranks must call it.
void set_counts(const PeerBackend<bf16>& backend, std::uint32_t count, const Stream& stream) {
  backend.comms().stage->queue_kernel("set_counts", stream, [&](const helix::cuda::PeerChannel& channel) {
    const std::vector<std::uint32_t> counts(static_cast<std::size_t>(channel.channels * channel.waits.size),
                                            count);
    backend.upload(channel.counts, counts.data(), counts.size() * sizeof(std::uint32_t), stream);
    return true;
  });
}

}  // namespace

TEST_CASE("ranks go on after two and four thousand million messages") {
  HELIX_REQUIRE_GPUS(1);
  const std::uint32_t count = GENERATE(0x7ffffffeu, 0x80000005u, 0xfffffffau, 0xfffffffdu);
  run_ranks_or_throw(make_group(2), [count](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    Sums few(comm, 1, 512);     // sealed lines, which do not touch the flags
    Sums many(comm, 80, 8192);  // uses flags
    set_counts(few.backend, count, few.stream);
    comm.barrier(few.stream);
    few.backend.synchronize(few.stream);
    for (int i = 1; i <= 12; ++i) {
      few.queue();
      few.check_residual(static_cast<float>(1 + 2 * i));
      if (i % 3 == 0) comm.barrier(few.stream);
    }
    few.backend.synchronize(few.stream);  // the next call uses another stream
    many.queue();
    many.check_residual(3.0f);
  });
}

TEST_CASE("sums find nothing that was left in their slots by others") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4, 8);
  run_ranks_or_throw(make_group(size), [size](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    constexpr int kSteps = 9;
    Sums sums(comm, kSteps * 80, 8192);
    const auto value_of = [](int rank, int step) { return static_cast<float>((rank + step) % 3); };
    float expected = 0.0f;
    for (int step = 0; step < kSteps; ++step)
      for (int rank = 0; rank < size; ++rank) expected += value_of(rank, step);
    struct Shape {
      std::int64_t rows, width;
    };
    for (int round = 0; round < 3; ++round) {
      for (const Shape& s : {Shape{1, 512}, {80, 8192}, {5, 8192}, {70, 1024}, {1, 24}, {33, 2048}}) {
        sums.rows = s.rows;
        sums.width = s.width;
        sums.set_summand(kSteps, [&](int step) { return value_of(comm.rank(), step); });
        const auto queue_all = [&] {
          for (int step = 0; step < kSteps; ++step) sums.queue(step * s.rows * s.width);
        };
        if (round == 1) {
          const Graph graph = Graph::capture(sums.stream, queue_all);
          comm.barrier(sums.stream);  // a capture allocates memory, which waits for replays on the same GPU
          sums.backend.synchronize(sums.stream);
          graph.replay(sums.stream);
        } else {
          queue_all();
        }
        sums.check_residual(expected);
      }
    }
  });
}

TEST_CASE("sums of NaN of all bits are NaN, and nothing waits for them") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(make_group(2), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    Sums sums(comm, 2, 512);
    std::vector<std::uint16_t> bits(2 * 512, 0x8000);  // -0
    if (comm.rank() == 1) bits[20] = bits[21] = bits[1000] = 0xffff;
    sums.backend.upload(sums.summand.data(), bits.data(), bits.size() * sizeof(bits[0]), sums.stream);
    sums.queue();
    const auto residual = on_host<bf16>(sums.backend, sums.residual, bits.size(), sums.stream);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const float value = static_cast<float>(residual[i]);
      if (i == 20 || i == 21 || i == 1000) {
        require(std::isnan(value), "column ", i, " is ", value, ", not NaN");
      } else {
        require(value == 1.0f, "column ", i, " is ", value, ", not 1");
      }
    }
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
    require(failure && failure->says("aligned to 16 bytes"), failure ? failure->what : "no error");
    if (comm.shares_device()) {  // hosts meet, and find that no rank has queued the kernel
      require(failure->code == ErrorCode::invalid_argument, failure->what);
      sums.queue(8);
      sums.check_residual(3.0f);
    } else {  // the first rank that throws ends the group
      require(failure->code == ErrorCode::invalid_argument || failure->code == ErrorCode::peer_failed,
              failure->what);
      const auto later = helix::test::failure_of([&] { sums.queue(8); });
      require(later && later->code == ErrorCode::peer_failed, later ? later->what : "no error");
    }
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
    if (comm.rank() == 1) std::this_thread::sleep_for(3s);  // rank 0 waits in the first sum meanwhile
    graph.replay(sums.stream);
    if (comm.rank() == 0) std::this_thread::sleep_for(5s);  // and does not look at the result
    sums.backend.synchronize(sums.stream);
  });
  INFO(outcomes.all_messages());
  CHECK_THAT(outcomes.message(0), ContainsSubstring("rank 1"));
  CHECK_THAT(outcomes.message(1), ContainsSubstring("rank 0"));
}
