// SPDX-License-Identifier: Apache-2.0
// project_qkv over windows: each rank multiplies its share of the heads, and all ranks get the bits that each
// would compute alone.
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include <helix/contract/communicator.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/prepare_qkv.hpp>

#include "cuda/gpu.hpp"
#include "cuda/peer_ranks.hpp"
#include "cuda/qkv_projection.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace helix::test {
namespace {

/// Queues the kernel for shared heads, which must exist.
auto shared_over(const cuda::PeerComm& comm) {
  return [&comm](const auto& by, const auto& args, cuda::Stream stream) {
    contract::require(comm.queue_kernel("project_qkv", stream,
                                        [&](const cuda::PeerChannel& channel) {
                                          return by.project_qkv(&channel, args, stream);
                                        }),
                      "there is no kernel of shared heads");
  };
}

/// The cases of rank `rank` of `size` ranks: 48 and 36 heads. Each has a kernel even if all ranks share one
/// GPU and therefore its blocks.
std::vector<QkvCase> cases_of(int rank, int size, DType own) {
  std::vector<QkvCase> all;
  for (const QkvTokens& tokens : qkv_tokens()) {
    const QkvCase plain{.tokens = tokens,
                        .q_heads = 32,
                        .kv_heads = 8,
                        .hidden = 4096,
                        .kvp = size,
                        .kvp_rank = rank,
                        .kv = own};
    all.push_back(plain);
    all.back().follows_layer = true;
    for (const DType kv : {DType::fp8_e4m3, DType::f32}) {
      all.push_back(plain);
      all.back().kv = kv;
      all.back().pad = 8;
      all.back().is_interleaved = all.back().is_token_major = all.back().has_bias = true;
    }
    all.push_back(plain);  // heads that tiles do not divide, and one key head, which some ranks do not have
    all.back().q_heads = 34;
    all.back().kv_heads = 1;
    all.back().dim = all.back().rotary = 88;
  }
  return all;
}

}  // namespace

TEMPLATE_TEST_CASE("project_qkv over windows: ranks share the heads and have the bits of each alone", "", f16,
                   bf16) {
  HELIX_REQUIRE_HOPPER();
  const int size = GENERATE(2, 3, 4);
  run_ranks_or_throw(make_group(size), [size](cuda::PeerComm& comm) {
    cuda::use_device(device_of(comm));
    const cuda::Operators<TestType> operators(device_of(comm));
    const QkvMachine<TestType> machine(operators);
    for (const QkvCase& of : cases_of(comm.rank(), size, kDTypeOf<TestType>)) {
      QkvProjection<TestType> projection(machine, of);
      const std::vector<std::byte> expected = projection.run(qkv_in_turn);
      for (int round = 0; round < 3; ++round)
        contract::require(projection.run(shared_over(comm)) == expected, of.tokens.positions.size(),
                          " tokens, ", of.kv_heads, " KV heads of ", to_string(of.kv), ", round ", round,
                          ": other bits than alone");
    }
  });
}

TEST_CASE("project_qkv of a backend over windows takes what heads are not shared of") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(make_group(2), [](cuda::PeerComm& comm) {
    cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm.split(0, comm.rank()), comm, device_of(comm));
    const QkvMachine<bf16> machine(backend);
    QkvCase of{.q_heads = 32, .kv_heads = 8, .hidden = 4096, .kvp = 2, .kvp_rank = comm.rank()};
    const auto check = [&](const QkvCase& other) {
      QkvProjection<bf16> projection(machine, other);
      const std::vector<std::byte> expected = projection.run(qkv_in_turn);
      const std::vector<std::byte> found = projection.run(
          [&](const auto&, const auto& args, cuda::Stream stream) { project_qkv(backend, args, stream); });
      contract::require(found == expected, other.tokens.positions.size(), " tokens, hidden size ",
                        other.hidden, ": other bits than in turn");
    };
    check(of);
    of.hidden = 1024;  // so few bytes that waiting for a peer would take longer
    check(of);
    of.hidden = 4096;
    of.tokens = qkv_tokens_beyond();
    check(of);
    of.kv_heads = 3;  // 37 heads
    of.q_heads = 31;
    of.tokens = {{2}, {0, 1}};
    check(of);
  });
}

TEST_CASE("captured projections of shared heads replay rightly, and a rank that skips one is named") {
  HELIX_REQUIRE_HOPPER();
  const bool skips = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, skips ? 2s : 20s), [skips](cuda::PeerComm& comm) {
    cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm.split(0, comm.rank()), comm, device_of(comm));
    const QkvMachine<bf16> machine(backend);
    QkvProjection<bf16> projection(machine, cases_of(comm.rank(), 2, DType::bf16).front());
    const std::vector<std::byte> expected = projection.run(qkv_in_turn);
    const std::vector<std::byte> found =
        projection.run([&](const auto& by, const auto& args, cuda::Stream stream) {
          shared_over(comm)(by, args, stream);
          const cuda::Graph graph =
              cuda::Graph::capture(stream, [&] { shared_over(comm)(by, args, stream); });
          if (!skips) return replay_apart(backend, graph, stream, [](int) {});
          graph.replay(stream);
          backend.synchronize(stream);
          if (comm.rank() == 1) {
            std::this_thread::sleep_for(4s);
          } else {
            graph.replay(stream);
          }
          backend.synchronize(stream);
        });
    contract::require(found == expected, "other bits than in turn after the replays");
  });
  INFO(outcomes.all_messages());
  if (skips) {
    CHECK(outcomes.failures[0] != nullptr);
    CHECK_THAT(outcomes.message(0), ContainsSubstring("rank 1"));
  } else {
    CHECK(outcomes.all_messages().empty());
  }
}

}  // namespace helix::test
