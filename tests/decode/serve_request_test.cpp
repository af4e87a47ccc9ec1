// SPDX-License-Identifier: Apache-2.0
// The keys of a request to a serving decoder: each sets its own member.
#include "serve/serve_request.hpp"

#include <string>
#include <variant>

#include "support/catch.hpp"

namespace helix::test {
namespace {

using decode::ServeRequest;
using decode::TokenIds;

ServeRequest parsed(const std::string& line, const decode::ServeDefaults& defaults = {}) {
  const auto command = decode::parse_command(line, defaults);
  REQUIRE(std::holds_alternative<decode::ServeCommand>(command));
  const auto& known = std::get<decode::ServeCommand>(command);
  REQUIRE(std::holds_alternative<ServeRequest>(known));
  return std::get<ServeRequest>(known);
}

const decode::ServeDefaults kDefaults = {
    .sampling = {.temperature = 0.25f, .top_p = 0.5f, .min_p = 0.0625f, .top_k = 3},
    .penalties = {.repetition = 2.0f, .presence = 3.0f, .frequency = 4.0f}};

}  // namespace

TEST_CASE("every key of a request comes to its own member", "[quick]") {
  const ServeRequest request = parsed(
      R"({"id":"a","prompt":[1,2,2],"max_tokens":11,"ignore_eos":true,"stop":[5,6],"temperature":0.75,)"
      R"("top_p":0.875,"top_k":12,"min_p":0.125,"seed":18446744073709551615,"repetition_penalty":1.5,)"
      R"("presence_penalty":-0.5,"frequency_penalty":1,"log_probs":4})",
      kDefaults);
  CHECK(request.id == "a");
  CHECK(request.prompt == TokenIds{1, 2, 2});
  CHECK(request.max_tokens == 11);
  CHECK(request.ignore_eos);
  CHECK(request.stop == TokenIds{5, 6});
  CHECK(request.seed == 18446744073709551615u);
  CHECK(request.sampling ==
        SamplingConfig{.temperature = 0.75f, .top_p = 0.875f, .min_p = 0.125f, .top_k = 12});
  CHECK(request.penalties == decode::Penalties{.repetition = 1.5f, .presence = -0.5f, .frequency = 1.0f});
  CHECK(request.num_best == 4);
}

TEST_CASE("a request that says nothing has the defaults, and one key changes one of them", "[quick]") {
  ServeRequest request = parsed(R"({"id":"a","prompt":[1]})", kDefaults);
  CHECK_FALSE(request.max_tokens);
  CHECK_FALSE(request.ignore_eos);
  CHECK(request.stop.empty());
  CHECK_FALSE(request.seed);
  CHECK_FALSE(request.num_best);
  CHECK(request.sampling == kDefaults.sampling);
  CHECK(request.penalties == kDefaults.penalties);

  request = parsed(R"({"id":"a","prompt":[1],"temperature":0,"frequency_penalty":0})", kDefaults);
  decode::ServeDefaults changed = kDefaults;
  changed.sampling.temperature = 0.0f;
  changed.penalties.frequency = 0.0f;
  CHECK(request.sampling == changed.sampling);
  CHECK(request.penalties == changed.penalties);
}

TEST_CASE("a number beyond its bounds is refused with both bounds", "[quick]") {
  const auto refusal = [](const std::string& setting) {
    const auto command = decode::parse_command(R"({"id":"a",)" + setting + "}", {});
    REQUIRE(std::holds_alternative<decode::BadLine>(command));
    return std::get<decode::BadLine>(command).message;
  };
  for (const char* number : {"2147483648", "5000000000", "-1"}) {
    CHECK(refusal(R"("prompt":[1],"top_k":)" + std::string(number)) ==
          "\"top_k\" is the number " + std::string(number) + "; expected a whole number of 0 to 2147483647");
    CHECK(refusal(R"("prompt":[1,)" + std::string(number) + "]") ==
          "\"prompt\" holds the number " + std::string(number) +
              "; expected an array of token ids of 0 to 2147483647");
  }
  CHECK(parsed(R"({"id":"a","prompt":[2147483647],"top_k":2147483647})").sampling.top_k == 2147483647);
  // These members are floats. The larger values here do not fit into a float and would become infinite.
  for (const char* key : {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"}) {
    const std::string quoted = '"' + std::string(key) + '"';
    for (const char* number : {"1e300", "-1e39"}) {
      CHECK(refusal(R"("prompt":[1],)" + quoted + ":" + number) ==
            quoted + " is the number '" + number + "'; expected a number of -3.4e38 to 3.4e38");
    }
  }
  CHECK(parsed(R"({"id":"a","prompt":[1],"temperature":3e38})").sampling.temperature == 3e38f);
}

TEST_CASE("cancel, stats and forget are commands of their own", "[quick]") {
  const auto command = [](const std::string& line) {
    return std::get<decode::ServeCommand>(decode::parse_command(line, {}));
  };
  CHECK(std::get<decode::CancelCommand>(command(R"({"cancel":"b"})")).id == "b");
  CHECK(std::holds_alternative<decode::StatsCommand>(command(R"({"stats":true})")));
  CHECK(std::holds_alternative<decode::ForgetCommand>(command(R"({"forget":true})")));
}

TEST_CASE("a command beside other keys, and a request whose values contradict the model's, are refused",
          "[quick]") {
  const auto refusal = [](const std::string& line) {
    const auto command = decode::parse_command(line, {});
    REQUIRE(std::holds_alternative<decode::BadLine>(command));
    return std::get<decode::BadLine>(command).message;
  };
  for (const char* line : {R"({"cancel":"b","stats":true})", R"({"id":"a","prompt":[1],"cancel":"b"})"})
    CHECK(refusal(line).find("\"cancel\" stands beside other keys") != std::string::npos);
  CHECK(refusal(R"({"id":"a","prompt":[1],"forget":true})").find("\"forget\" stands") != std::string::npos);
  for (const char* penalty : {"repetition_penalty", "presence_penalty", "frequency_penalty"}) {
    const std::string line = R"({"id":"a","prompt":[1],")" + std::string(penalty) + R"(":101})";
    CHECK(refusal(line).find(std::string(penalty) + " is 101") != std::string::npos);
  }
}

}  // namespace helix::test
