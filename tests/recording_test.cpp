// SPDX-License-Identifier: Apache-2.0
// The order in which decode_layer queues its work: the documented steps, overlap under HOP-B, and nothing but
// queueing.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <helix/decode_layer.hpp>

#include "support/catch.hpp"
#include "support/layer_fixture.hpp"
#include "support/recording_backend.hpp"

namespace helix::test {
namespace {

/// Each rank's calls between the start and the end of one decode_layer, in a step of four tokens for each of
/// five sequences.
std::vector<std::vector<Call>> record_layer(const LayerSpec& spec, TopologySpec topology, int slices) {
  const oracle::Layer layer = random_layer(spec, 8);
  const Script script = ragged_script(5, layer.hidden, 9);
  const Topology topo(topology, shape_of(layer));
  std::vector<std::vector<Call>> calls(static_cast<std::size_t>(topo.stage_size()));
  run_ranks_or_throw(topo.stage_size(), [&](cpu::LocalComm& comm) {
    auto backend = make_backend<RecordingBackend>(topo, comm);
    LayerRank<RecordingBackend> rank(backend, topo, layer, script, {.hop_b_slices = slices});
    rank.run(script.steps[0]);
    rank.prepare(script.steps[2]);
    backend.recording().clear();
    rank.launch();
    calls[static_cast<std::size_t>(comm.rank())] = backend.recording().calls();
    rank.finish(script.steps[2]);
  });
  return calls;
}

std::vector<std::string> names(const std::vector<Call>& calls) {
  std::vector<std::string> out;
  for (const Call& call : calls) out.push_back(call.name);
  return out;
}

/// Indices of the calls with the given name.
std::vector<std::size_t> find(const std::vector<Call>& calls, std::string_view name) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < calls.size(); ++i)
    if (calls[i].name == name) found.push_back(i);
  return found;
}

LayerSpec deepseek_spec() {
  LayerSpec spec;
  spec.is_mla = true;
  spec.experts = 8;
  spec.shared_ffn = 24;
  spec.is_sigmoid = true;
  return spec;
}

TEST_CASE("A dense layer queues the documented steps in order") {
  LayerSpec spec;
  spec.has_head_norms = true;
  for (const auto& calls : record_layer(spec, {.kvp = 2, .tpa = 2}, 1)) {
    CHECK(names(calls) == std::vector<std::string>{"rms_norm",  // 1
                                                   "linear",    // 2
                                                   "head_rms_norm",
                                                   "head_rms_norm",  //
                                                   "rope",
                                                   "rope",               // 3
                                                   "append_kv",          // 4
                                                   "partial_attention",  // 5
                                                   "kvp.all_to_all",     // 6
                                                   "combine_exchange",   // 7
                                                   "linear", "stage.all_reduce",
                                                   "rms_norm",  // 8
                                                   "linear", "swiglu", "linear",
                                                   "stage.all_reduce",  // 9
                                                   "rms_norm"});        // 10
    CHECK(std::all_of(calls.begin(), calls.end(),
                      [&](const Call& call) { return call.stream == calls.front().stream; }));
  }
}

TEST_CASE("A DeepSeek layer applies W_UV after the combine and sums experts in one all-reduce") {
  for (const auto& calls : record_layer(deepseek_spec(), {.kvp = 4, .ep = 2}, 1)) {
    CHECK(names(calls) == std::vector<std::string>{"rms_norm",  // 1
                                                   "linear",    // 2: of queries and the latent
                                                   "rms_norm",  // 2, 3: queries
                                                   "linear",
                                                   "rms_norm",
                                                   "rope",               // the latent
                                                   "rope",               // 3: queries
                                                   "append_kv",          // 4
                                                   "head_linear",        // W_UK
                                                   "partial_attention",  // 5
                                                   "kvp.all_to_all",     // 6
                                                   "combine_exchange",   // 7
                                                   "head_linear",
                                                   "linear",
                                                   "stage.all_reduce",
                                                   "rms_norm",  // 8
                                                   "router_logits",
                                                   "route",   // 9
                                                   "linear",  // the shared expert
                                                   "swiglu",
                                                   "linear",
                                                   "expert_ffn",
                                                   "stage.all_reduce",  //
                                                   "rms_norm"});        // 10
  }
}

TEST_CASE("Without KVP nothing is exchanged, and the only collectives are two all-reduces") {
  const auto calls = record_layer({}, {.tpa = 4}, 1).front();
  CHECK(find(calls, "kvp.all_to_all").empty());
  CHECK(find(calls, "combine_exchange").empty());
  CHECK(find(calls, "stage.all_reduce").size() == 2);
}

TEST_CASE("Under HOP-B attention of the next slice does not wait for the exchange of this one") {
  for (const int slices : {2, 4}) {
    CAPTURE(slices);
    for (const auto& calls : record_layer({}, {.kvp = 2, .tpa = 2}, slices)) {
      const auto attention = find(calls, "partial_attention");
      const auto exchange = find(calls, "kvp.all_to_all");
      const auto combine = find(calls, "combine_exchange");
      const auto output = find(calls, "stage.all_reduce").front();
      REQUIRE(attention.size() == static_cast<std::size_t>(slices));
      REQUIRE(exchange.size() == attention.size());
      REQUIRE(combine.size() == attention.size());
      std::int64_t next_token = 0;
      for (std::size_t i = 0; i < attention.size(); ++i) {
        CAPTURE(i);
        // Slices must be adjacent, without gap or overlap.
        CHECK(calls[attention[i]].begin == next_token);
        next_token += calls[attention[i]].count;
        CHECK(calls[attention[i]].stream != calls[exchange[i]].stream);
        CHECK(happens_before(calls, exchange[i], combine[i]));
        CHECK(happens_before(calls, combine[i], output));
        for (std::size_t later = i + 1; later < attention.size(); ++later) {
          CHECK_FALSE(happens_before(calls, exchange[i], attention[later]));
          CHECK_FALSE(happens_before(calls, combine[i], attention[later]));
          CHECK_FALSE(happens_before(calls, attention[later], exchange[i]));
        }
        // Queued in turn: the exchange need not wait until the host has queued all attention slices.
        if (i + 1 < attention.size()) CHECK(exchange[i] < attention[i + 1]);
      }
      CHECK(next_token == 5 * 4);
    }
  }
}

TEST_CASE("happens_before follows streams and events and nothing else") {
  const std::vector<Call> calls{{"a", 0},       {"record", 0, 7}, {"b", 0},         {"x", 1},
                                {"wait", 1, 7}, {"y", 1},         {"record", 0, 7}, {"z", 1}};
  CHECK(happens_before(calls, 0, 2));
  CHECK(happens_before(calls, 0, 5));        // ordered by the event
  CHECK_FALSE(happens_before(calls, 2, 5));  // queued after the record
  CHECK_FALSE(happens_before(calls, 0, 3));  // queued before the wait
  CHECK_FALSE(happens_before(calls, 2, 7));  // the second record has no wait
}

TEST_CASE("A step allocates nothing, creates nothing and does not wait for the device") {
  for (const int slices : {0, 1, 4}) {
    for (const bool is_deepseek : {false, true}) {
      CAPTURE(slices, is_deepseek);
      const auto ranks = is_deepseek ? record_layer(deepseek_spec(), {.kvp = 4, .ep = 4}, slices)
                                     : record_layer({}, {.kvp = 2, .tpa = 2}, slices);
      for (const auto& calls : ranks) {
        for (const Call& call : calls) {
          CAPTURE(call.name);
          for (const std::string_view forbidden :
               {"allocate", "synchronize", "create_stream", "create_event", "upload", "download", "split"}) {
            CHECK(call.name.find(forbidden) == std::string::npos);
          }
        }
      }
    }
  }
}

TEST_CASE("All ranks issue the same collectives with the same sizes, and the same calls") {
  for (const int slices : {1, 3}) {
    for (const bool is_uneven : {false, true}) {
      LayerSpec spec;
      spec.ffn = is_uneven ? 5 : 48;
      const auto ranks = record_layer(spec, {.kvp = 4, .tpa = 2, .allow_uneven_ffn = true}, slices);
      const auto collectives = [](const std::vector<Call>& calls) {
        std::vector<std::pair<std::string, std::int64_t>> found;
        for (const Call& call : calls)
          if (call.name.find('.') != std::string::npos) found.emplace_back(call.name, call.count);
        return found;
      };
      for (const auto& calls : ranks) {
        CHECK(collectives(calls) == collectives(ranks.front()));
        CHECK(names(calls) == names(ranks.front()));
      }
      CHECK(collectives(ranks.front()).size() == static_cast<std::size_t>(2 + slices));
    }
  }
}

}  // namespace
}  // namespace helix::test
