// SPDX-License-Identifier: Apache-2.0
// If a rank fails inside decode_layer, all other ranks name it, and none hangs.
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include <helix/decode_layer.hpp>

#include "support/catch.hpp"
#include "support/layer_fixture.hpp"
#include "support/oracle.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

/// A cpu::Backend in which one operation fails, on the host when it is queued or on the stream when it runs.
class FailingBackend : public CpuBackend {
 public:
  using CpuBackend::CpuBackend;

  void fail_in(std::string_view operation, bool on_host) {
    operation_ = operation;
    on_host_ = on_host;
  }
  /// Fails on the host, by what is no exception.
  void throw_in(std::string_view operation) {
    fail_in(operation, true);
    throws_number_ = true;
  }
  void append_kv(const AppendKvArgs<float>& args, Stream stream) const {
    strike("append_kv", stream);
    CpuBackend::append_kv(args, stream);
  }
  void partial_attention(const PartialAttentionArgs<float>& args, Stream stream) const {
    strike("partial_attention", stream);
    CpuBackend::partial_attention(args, stream);
  }
  void combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<float>& combine,
                        Stream stream) const {
    strike("combine_exchange", stream);
    CpuBackend::combine_exchange(check, combine, stream);
  }
  void swiglu(const SwigluArgs<float>& args, Stream stream) const {
    strike("swiglu", stream);
    CpuBackend::swiglu(args, stream);
  }

 private:
  void strike(std::string_view operation, Stream stream) const {
    if (operation != operation_) return;
    if (throws_number_) throw 7;
    const auto fail = [] { throw Error(ErrorCode::internal, "a deliberate failure"); };
    if (on_host_) fail();
    stream.enqueue(fail);
  }

  std::string_view operation_;
  bool on_host_ = false;
  bool throws_number_ = false;
};

static_assert(Backend<FailingBackend>);

TEST_CASE("A rank that fails inside a layer is named by all others, and none hangs") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(5, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  for (const char* operation : {"append_kv", "partial_attention", "combine_exchange", "swiglu"}) {
    for (const bool on_host : {false, true}) {
      for (const int slices : {1, 4}) {
        for (const int culprit : {0, 3}) {
          CAPTURE(operation, on_host, slices, culprit);
          const auto started = std::chrono::steady_clock::now();
          const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
            auto backend = make_backend<FailingBackend>(topo, comm);
            LayerRank<FailingBackend> rank(backend, topo, layer, script, {.hop_b_slices = slices});
            rank.run(script.steps[0]);
            if (comm.rank() == culprit) backend.fail_in(operation, on_host);
            for (std::size_t s = 1; s < script.steps.size(); ++s) rank.run(script.steps[s]);
          });
          CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(20));
          for (int r = 0; r < 4; ++r) {
            CAPTURE(r, outcomes.message(r));
            CHECK(outcomes.message(r).find("a deliberate failure") != std::string::npos);
            CHECK(outcomes.code(r) == (r == culprit ? ErrorCode::internal : ErrorCode::peer_failed));
            if (r != culprit)
              CHECK(outcomes.message(r).find("rank " + std::to_string(culprit)) != std::string::npos);
          }
        }
      }
    }
  }
}

TEST_CASE("A host failure inside a layer aborts the stage without the caller's help") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(2, layer.hidden, 9);
  const Topology topo({.kvp = 2}, shape_of(layer));
  std::vector<cpu::LocalComm> stages = cpu::LocalComm::create_group(2);
  std::vector<std::string> seen(2);
  // The culprit catches its exception and continues, so only decode_layer can tell the other rank.
  run_ranks_or_throw(2, [&](cpu::LocalComm& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    auto backend = make_backend<FailingBackend>(topo, stages[me]);
    LayerRank<FailingBackend> rank(backend, topo, layer, script, {});
    if (me == 0) backend.fail_in("swiglu", true);
    try {
      rank.run(script.steps[0]);
    } catch (const Error& error) {
      seen[me] = std::string(to_string(error.code())) + ": " + error.what();
    }
  });
  CHECK(seen[0] == "internal: a deliberate failure");
  CHECK(seen[1].rfind("peer_failed: ", 0) == 0);
  CHECK(seen[1].find("a deliberate failure") != std::string::npos);
}

TEST_CASE("What is thrown inside a layer wakes the others even if it is no exception") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(2, layer.hidden, 9);
  const Topology topo({.kvp = 2}, shape_of(layer));
  std::vector<cpu::LocalComm> stages = cpu::LocalComm::create_group(2, std::chrono::seconds(10));
  int caught = 0;
  std::string seen;
  run_ranks_or_throw(2, [&](cpu::LocalComm& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    auto backend = make_backend<FailingBackend>(topo, stages[me]);
    LayerRank<FailingBackend> rank(backend, topo, layer, script, {});
    if (me == 0) backend.throw_in("swiglu");
    try {
      rank.run(script.steps[0]);
    } catch (const int number) {
      caught = number;
    } catch (const Error& error) {
      seen = error.what();
    }
  });
  CHECK(caught == 7);
  CHECK(seen.find("decode_layer: unknown failure") != std::string::npos);
}

TEST_CASE("A host failure inside a layer aborts the communicator of the stage and that of the KVP group") {
  const bool waits_in_stage = GENERATE(true, false);
  CAPTURE(waits_in_stage);
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(2, layer.hidden, 9);
  const Topology topo({.kvp = 2}, shape_of(layer));
  std::vector<cpu::LocalComm> stages = cpu::LocalComm::create_group(2, std::chrono::seconds(5));
  // As of an engine that makes each group by itself: aborting one does not abort the other.
  std::vector<cpu::LocalComm> groups = cpu::LocalComm::create_group(2, std::chrono::seconds(5));
  std::string seen;
  run_ranks_or_throw(2, [&](cpu::LocalComm& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    FailingBackend backend(stages[me], groups[me]);
    LayerRank<FailingBackend> rank(backend, topo, layer, script, {});
    auto stream = backend.create_stream();
    try {
      if (me == 0) {
        backend.fail_in("append_kv", true);
        rank.run(script.steps[0]);
      } else {
        (waits_in_stage ? stages : groups)[me].barrier(stream);
        stream.synchronize();
      }
    } catch (const Error& error) {
      if (me == 1) seen = error.what();
    }
  });
  CHECK(seen.find("a deliberate failure") != std::string::npos);
}

}  // namespace
}  // namespace helix::test
