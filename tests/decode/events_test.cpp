// SPDX-License-Identifier: Apache-2.0
// The contents of a serving decoder's events, key by key.
#include "serve/events.hpp"

#include <nlohmann/json.hpp>

#include "support/catch.hpp"

namespace helix::test {

using decode::FinishReason;
using Json = nlohmann::json;

TEST_CASE("the end of a request says why, of how many tokens, and the time from one to the next", "[quick]") {
  const auto end = [](std::int64_t completion_tokens) {
    return Json::parse(
        decode::end_event("a", FinishReason::length,
                          {.prompt_tokens = 9, .cached_tokens = 7, .completion_tokens = completion_tokens},
                          {.queued_ms = 1.5, .prefill_ms = 2.5, .decode_ms = 12.0}));
  };
  CHECK(end(5) ==
        Json{{"event", "end"},
             {"id", "a"},
             {"reason", "length"},
             {"usage", {{"prompt_tokens", 9}, {"cached_tokens", 7}, {"completion_tokens", 5}}},
             {"timing", {{"queued_ms", 1.5}, {"prefill_ms", 2.5}, {"decode_ms", 12.0}, {"ttl_ms", 3.0}}}});
  CHECK(end(1)["timing"]["ttl_ms"] == 0.0);  // there is no second token
  CHECK(end(0)["timing"]["ttl_ms"] == 0.0);
}

TEST_CASE("statistics and abilities stand under their names", "[quick]") {
  CHECK(Json::parse(decode::stats_event(
            {.queued = 1, .running = 2, .retained = 3, .pages = 4, .pages_used = 5, .resident_bytes = 6})) ==
        Json{{"event", "stats"},
             {"queued", 1},
             {"running", 2},
             {"retained", 3},
             {"pages", 4},
             {"pages_used", 5},
             {"resident_bytes", 6}});
  Json ready = Json::parse(
      decode::ready_event({.kvp = 2,
                           .tpa = 3,
                           .ep = 4,
                           .pp = 5,
                           .dp = 6,
                           .activation = "f32",
                           .vocab = 7,
                           .eos_ids = {8, 9},
                           .max_sequences = 10,
                           .max_tokens = 11,
                           .kv_tokens = 12,
                           .temperature = 0.5f,
                           .memory = {.weights_bytes = 13, .kv_bytes = 14, .workspace_bytes = 15}}));
  ready.erase("version");
  CHECK(ready == Json{{"event", "ready"},
                      {"topology", {{"kvp", 2}, {"tpa", 3}, {"ep", 4}, {"pp", 5}, {"dp", 6}}},
                      {"activation", "f32"},
                      {"vocab", 7},
                      {"eos", {8, 9}},
                      {"max_sequences", 10},
                      {"context", 11},
                      {"kv_tokens", 12},
                      {"temperature", 0.5},
                      {"memory", {{"weights_bytes", 13}, {"kv_bytes", 14}, {"workspace_bytes", 15}}}});
}

}  // namespace helix::test
