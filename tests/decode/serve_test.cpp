// SPDX-License-Identifier: Apache-2.0
// helix-decode --serve in this process: golden texts under every legal topology, a fuzzed session, and
// hostile clients.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/cpu/backend.hpp>
#include <helix/job_comms.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "cli/rank_threads.hpp"
#include "decode/serve_client.hpp"
#include "serve/serve_request.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using Json = nlohmann::json;
using decode::GenerationRequest;
using decode::TokenIds;

GenerationRequest serving(std::int64_t max_sequences, std::int64_t max_tokens, std::int64_t kv_tokens) {
  GenerationRequest request;
  request.serving = {.max_sequences = max_sequences, .max_tokens = max_tokens, .kv_tokens = kv_tokens};
  request.kv_dtype = DType::f32;
  request.page_tokens = 16;
  return request;
}

Json golden_text(const std::string& name) {
  std::ifstream file(std::string(HELIX_TEST_DATA) + "/" + name + "/golden-text.json");
  return Json::parse(file);
}

/// An end event reduced to little memory, because a long session is checked for growth.
struct End {
  std::string reason;
  std::int64_t cached_tokens = 0;
};

/// The results of a session so far, by request.
struct Answers {
  std::map<std::string, TokenIds> tokens;
  std::map<std::string, End> ends;
  std::vector<Json> errors;
  std::optional<Json> stats;

  void add(const Json& event) {
    const std::string kind = event["event"];
    if (kind == "token") {
      TokenIds& list = tokens[event["id"]];
      REQUIRE(event["index"] == list.size());
      list.push_back(event["token"]);
    } else if (kind == "end") {
      const End end{event["reason"], event["usage"]["cached_tokens"]};
      REQUIRE(ends.emplace(event["id"], end).second);
    } else if (kind == "error") {
      errors.push_back(event);
    } else if (kind == "stats") {
      stats = event;
    } else {
      REQUIRE(kind == "ready");
    }
  }
};

/// Reads events until `done` is true.
template <class Done>
void read_until(ServeClient& client, Answers& answers, const Done& done) {
  while (!done()) {
    const auto event = client.next_event();
    REQUIRE(event);
    answers.add(*event);
  }
}

Json stats_of(ServeClient& client, Answers& answers) {
  answers.stats.reset();
  client.send({{"stats", true}});
  read_until(client, answers, [&] { return answers.stats.has_value(); });
  return *answers.stats;
}

void check_golden_texts(const std::string& name, int num_ranks, MlaForm form = MlaForm::automatic) {
  const ReferenceModel model(name);
  const Json golden = golden_text(name);
  std::vector<TopologySpec> specs = Topology::legal_topologies(model.config.shape, num_ranks);
  if (num_ranks > 1) {
    specs.push_back({.pp = num_ranks});
    specs.push_back({.dp = num_ranks});
  }
  if (num_ranks == 4) specs.push_back({.kvp = 2, .pp = 2});
  REQUIRE(specs.size() > 0);
  for (const TopologySpec& spec : specs) {
    CAPTURE(name, spec.kvp, spec.tpa, spec.tpf, spec.ep, spec.pp, spec.dp, static_cast<int>(form));
    GenerationRequest request = serving(3, 512, 2048);  // fewer at once than there are, so some wait
    request.mla_prefill = form;
    ServeClient client(model, spec, request, {.num_threads = 1});
    Answers answers;
    for (std::size_t i = 0; i < golden["cases"].size(); ++i) {
      const Json& text = golden["cases"][i];
      client.send({{"id", std::to_string(i)},
                   {"prompt", text["prompt"]},
                   {"max_tokens", text["tokens"].size()},
                   {"ignore_eos", true}});
    }
    read_until(client, answers, [&] { return answers.ends.size() == golden["cases"].size(); });
    for (std::size_t i = 0; i < golden["cases"].size(); ++i) {
      CAPTURE(i);
      CHECK(answers.tokens[std::to_string(i)] == golden["cases"][i]["tokens"].get<TokenIds>());
    }
    CHECK(answers.errors.empty());
    client.finish();
  }
}

/// Random requests, including malformed lines; some begin like earlier ones.
class RandomSession {
 public:
  RandomSession(std::int64_t vocab, unsigned seed) : random_(seed), vocab_(vocab) {}

  Json next() {
    TokenIds prompt;
    if (!earlier_.empty() && pick(2) == 0) {
      prompt = earlier_[pick(earlier_.size())];
      prompt.resize(prompt.size() - pick(1 + prompt.size() / 3));
    }
    const std::size_t more = 1 + pick(36);
    for (std::size_t i = 0; i < more; ++i)
      prompt.push_back(static_cast<std::int32_t>(pick(static_cast<std::size_t>(vocab_))));
    if (prompt.size() > 60) prompt.resize(60);
    if (earlier_.size() < 16) earlier_.push_back(prompt);
    Json request{{"id", std::string("r").append(std::to_string(count_++))},
                 {"prompt", prompt},
                 {"max_tokens", 1 + pick(12)}};
    if (pick(3) == 0) request["ignore_eos"] = true;
    if (pick(3) == 0) request["stop"] = {pick(static_cast<std::size_t>(vocab_))};
    if (pick(2) == 0) {
      request["temperature"] = 0.2 + 0.1 * static_cast<double>(pick(10));
      request["seed"] = random_();
      if (pick(2) == 0) request["top_p"] = 0.8;
      if (pick(2) == 0) request["top_k"] = 20;
      if (pick(2) == 0) request["min_p"] = 0.05;
    }
    if (pick(4) == 0) request["repetition_penalty"] = 1.2;
    if (pick(4) == 0) request["frequency_penalty"] = 0.3;
    if (pick(4) == 0) request["log_probs"] = pick(4);
    return request;
  }
  std::string malformed() {
    static const std::vector<std::string> kLines{"",
                                                 "   ",
                                                 "{",
                                                 "[]",
                                                 "null",
                                                 "17",
                                                 "\"text\"",
                                                 "{}",
                                                 "{\"id\":\"x\"}",
                                                 "{\"prompt\":[1]}",
                                                 "{\"id\":\"x\",\"prompt\":[]}",
                                                 "{\"id\":\"x\",\"prompt\":[-1]}",
                                                 "{\"id\":\"x\",\"prompt\":[1.5]}",
                                                 "{\"id\":\"x\",\"prompt\":[99999999]}",
                                                 "{\"id\":\"x\",\"prompt\":[1],\"max_tokens\":0}",
                                                 "{\"id\":\"x\",\"prompt\":[1],\"max_tokens\":100000}",
                                                 "{\"id\":\"x\",\"prompt\":[1],\"temperature\":-1}",
                                                 "{\"id\":\"x\",\"prompt\":[1],\"top_p\":0}",
                                                 "{\"id\":\"x\",\"prompt\":[1],\"tempratur\":1}",
                                                 "{\"id\":\"x\",\"id\":\"y\",\"prompt\":[1]}",
                                                 "{\"cancel\":\"nobody\"}",
                                                 "{\"cancel\":3}",
                                                 "{\"stats\":false}",
                                                 "{\"id\":\"x\",\"prompt\":[[1]]}",
                                                 "{\"id\":\"\",\"prompt\":[1]}",
                                                 "\xff\xfe"};
    return kLines[pick(kLines.size())];
  }
  std::size_t pick(std::size_t below) { return random_() % below; }

 private:
  std::mt19937 random_;
  std::int64_t vocab_;
  std::vector<TokenIds> earlier_;
  int count_ = 0;
};

/// A session of `num_requests`. Each answer must equal that of the same request alone on one rank.
void check_session(const TopologySpec& spec, int num_requests, unsigned seed) {
  const ReferenceModel model("llama-tiny");
  RandomSession session(model.config.shape.vocab, seed);
  ServeClient client(model, spec, serving(6, 80, 400), {.num_threads = 1});
  ServeClient alone(model, {}, serving(1, 80, 80), {.num_threads = 1});
  Answers answers;
  std::vector<std::string> sent;  // requests as they were sent
  std::set<std::string> cancelled;
  const Json before = stats_of(client, answers);
  CHECK(before["pages_used"] == 0);
  CHECK(before["resident_bytes"] > 1 << 20);
  std::int64_t resident = 0;
  while (std::ssize(sent) < num_requests) {
    for (std::size_t i = session.pick(5); i > 0; --i) {
      sent.push_back(session.next().dump());
      client.send_line(sent.back());
    }
    if (session.pick(5) == 0) client.send_line(session.malformed());
    if (session.pick(8) == 0 && !sent.empty()) {
      const std::string& recent = sent[sent.size() - 1 - session.pick(std::min<std::size_t>(6, sent.size()))];
      const std::string id = Json::parse(recent)["id"];
      client.send({{"cancel", id}});
      cancelled.insert(id);
    }
    if (session.pick(50) == 0) client.send({{"forget", true}});
    // At most a dozen unanswered, so that requests join while others run.
    read_until(client, answers, [&] { return sent.size() - answers.ends.size() < 12; });
    if (resident == 0 && std::ssize(sent) > num_requests / 4)
      resident = stats_of(client, answers)["resident_bytes"];
  }
  read_until(client, answers, [&] { return answers.ends.size() == sent.size(); });
  client.send({{"forget", true}});
  const Json after = stats_of(client, answers);
  CHECK(after["running"] == 0);
  CHECK(after["retained"] == 0);
  CHECK(after["pages_used"] == 0);
  // Both decoders and the answers are in this process.
  CHECK(after["resident_bytes"].get<std::int64_t>() - resident < 16 << 20);

  std::int64_t shared = 0;
  int compared = 0;
  Answers expected;
  for (const std::string& request : sent) {
    const std::string id = Json::parse(request)["id"];
    shared += answers.ends.at(id).cached_tokens;
    alone.send({{"forget", true}});
    alone.send_line(request);
    read_until(alone, expected, [&] { return expected.ends.contains(id); });
    CAPTURE(request);
    const TokenIds& got = answers.tokens[id];
    const TokenIds& wanted = expected.tokens[id];
    if (answers.ends.at(id).reason == "cancelled") {
      REQUIRE(cancelled.contains(id));
      REQUIRE(got.size() <= wanted.size());
      REQUIRE(std::equal(got.begin(), got.end(), wanted.begin()));
    } else {
      ++compared;
      REQUIRE(got == wanted);
      REQUIRE(answers.ends.at(id).reason == expected.ends.at(id).reason);
    }
  }
  CHECK(compared > num_requests / 2);
  CHECK(shared > num_requests / 2);  // tokens
}

/// Whether this process soon has a second in which it takes little time of a core.
bool comes_to_rest() {
  for (int second = 0; second < 20; ++second) {
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    if (static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC < 0.2) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("the golden texts come through JSON lines on one rank and on two", "[quick]") {
  for (const char* name : {"llama-wordnet", "deepseek-wordnet"}) {
    check_golden_texts(name, 1);
    check_golden_texts(name, 2);
  }
}

TEST_CASE("prompts that attend in either form of latent attention give the golden texts", "[quick]") {
  for (const MlaForm form : {MlaForm::absorbed, MlaForm::expanded})
    for (const int num_ranks : {1, 2}) check_golden_texts("deepseek-wordnet", num_ranks, form);
}

TEST_CASE("the golden texts come through JSON lines on four ranks") {
  for (const char* name : {"llama-wordnet", "deepseek-wordnet"}) check_golden_texts(name, 4);
}

TEST_CASE("a session of requests that join, leave, are cancelled and malformed answers each as if alone",
          "[quick]") {
  check_session({.kvp = 4}, 60, 1);
}

TEST_CASE("sessions under other topologies answer each request as if alone") {
  check_session({}, 150, 2);
  check_session({.kvp = 2, .tpa = 2}, 150, 3);
  check_session({.kvp = 2, .pp = 2}, 150, 4);
  check_session({.kvp = 2, .dp = 2}, 150, 5);
}

TEST_CASE("a session of 10000 requests under KVP 4 answers each as if alone", "[full]") {
  check_session({.kvp = 4}, 10'000, 6);
}

TEST_CASE("log-probabilities come best first, and a penalty keeps tokens from coming twice", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2, .pp = 2}, serving(2, 64, 128), {.num_threads = 1});
  Answers answers;
  const TokenIds prompt{383, 198, 141, 403};
  client.send(
      {{"id", "plain"}, {"prompt", prompt}, {"max_tokens", 6}, {"log_probs", 3}, {"ignore_eos", true}});
  std::vector<Json> events;
  while (answers.ends.empty()) {
    const auto event = client.next_event();
    REQUIRE(event);
    answers.add(*event);
    if ((*event)["event"] == "token") events.push_back(*event);
  }
  REQUIRE(events.size() == 6);
  for (const Json& event : events) {
    REQUIRE(event["best"].size() == 3);
    CHECK(event["best"][0][0] == event["token"]);  // greedy
    CHECK(event["best"][0][1] == event["log_prob"]);
    CHECK(event["log_prob"].get<double>() <= 0.0);
    CHECK(event["best"][0][1].get<double>() >= event["best"][1][1].get<double>());
    CHECK(event["best"][1][1].get<double>() >= event["best"][2][1].get<double>());
  }
  // Every repetition costs more than any logit can gain, so no token occurs twice.
  client.send({{"id", "once"},
               {"prompt", prompt},
               {"max_tokens", 40},
               {"presence_penalty", 100},
               {"ignore_eos", true}});
  read_until(client, answers, [&] { return answers.ends.contains("once"); });
  const std::set<std::int32_t> distinct(answers.tokens["once"].begin(), answers.tokens["once"].end());
  CHECK(distinct.size() == 40);
}

TEST_CASE("a decoder says first what it is able to do, and what memory its root's rank has", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const TopologySpec spec{.kvp = 2, .pp = 2};
  const GenerationRequest request = serving(3, 64, 256);
  ServeClient client(model, spec, request, {.num_threads = 1});
  const auto ready = client.next_event();
  REQUIRE(ready);
  CHECK((*ready)["event"] == "ready");
  CHECK((*ready)["topology"] == Json{{"kvp", 2}, {"tpa", 1}, {"ep", 1}, {"pp", 2}, {"dp", 1}});
  CHECK((*ready)["activation"] == "f32");
  CHECK((*ready)["vocab"] == 512);
  CHECK((*ready)["eos"] == Json{2});
  CHECK((*ready)["max_sequences"] == 3);
  CHECK((*ready)["context"] == 64);
  CHECK((*ready)["kv_tokens"] == 256);
  const auto plan = decode::plan_memory(model.checkpoint, model.config, Topology(spec, model.config.shape),
                                        request, {.num_threads = 1});
  CHECK((*ready)["memory"] == Json{{"weights_bytes", plan[0].weights_bytes},
                                   {"kv_bytes", plan[0].kv_bytes},
                                   {"workspace_bytes", plan[0].workspace_bytes}});
}

TEST_CASE("equal requests draw tokens of their own, and those of one seed the same", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 64, 256), {.num_threads = 1});
  for (const char* id : {"a", "b", "c", "d"}) {
    Json request{{"id", id},
                 {"prompt", {383, 198, 141, 403}},
                 {"max_tokens", 12},
                 {"ignore_eos", true},
                 {"temperature", 2}};
    if (*id >= 'c') request["seed"] = 7;
    client.send(request);
  }
  Answers answers;
  read_until(client, answers, [&] { return answers.ends.size() == 4; });
  CHECK(answers.tokens["a"] != answers.tokens["b"]);
  CHECK(answers.tokens["a"] != answers.tokens["c"]);
  CHECK(answers.tokens["c"] == answers.tokens["d"]);
}

TEST_CASE("a request that says nothing of sampling and penalties has the decoder's", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Json plain{
      {"id", "a"}, {"prompt", {383, 198, 141, 403}}, {"max_tokens", 40}, {"ignore_eos", true}, {"seed", 7}};
  const auto answer = [&](const GenerationRequest& request, const Json& line) {
    ServeClient client(model, {}, request, {.num_threads = 1});
    client.send(line);
    Answers answers;
    read_until(client, answers, [&] { return answers.ends.size() == 1; });
    return answers.tokens["a"];
  };
  Json sampled = plain;
  sampled["temperature"] = 2;
  sampled["top_k"] = 100;
  Json penalized = sampled;
  penalized["presence_penalty"] = 5;
  GenerationRequest request = serving(2, 64, 256);
  const TokenIds expected = answer(request, penalized);
  CHECK(expected != answer(request, plain));
  CHECK(expected != answer(request, sampled));
  request.sampling = {.temperature = 2.0f, .top_k = 100};
  request.penalties.presence = 5.0f;
  CHECK(answer(request, plain) == expected);
}

TEST_CASE("an idle decoder takes no time of a core", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {}, serving(2, 256, 512), {.num_threads = 1});
  REQUIRE(client.next_event());
  CHECK(comes_to_rest());
}

TEST_CASE("bad lines name the value and what to do, and a cancelled request ends", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {}, serving(1, 2048, 2048), {.num_threads = 1});
  Answers answers;
  const auto error_of = [&](const std::string& line) {
    const std::size_t before = answers.errors.size();
    client.send_line(line);
    read_until(client, answers, [&] { return answers.errors.size() > before; });
    return answers.errors.back()["message"].get<std::string>();
  };
  CHECK_THAT(error_of("{"), ContainsSubstring("not valid JSON"));
  CHECK_THAT(error_of("[1]"), ContainsSubstring("an array") && ContainsSubstring("give a request as"));
  CHECK_THAT(error_of("{\"id\":\"a\"}"), ContainsSubstring("\"prompt\" is missing"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"top_k\":1.5}"),
             ContainsSubstring("\"top_k\"") && ContainsSubstring("1.5"));
  CHECK(answers.errors.back()["id"] == "a");
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"temperature\":1e999}"),
             ContainsSubstring("not valid JSON"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"top_p\":2}"), ContainsSubstring("top_p is 2"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"top_p\":18446744073709551615}"),
             ContainsSubstring("top_p is 1.8446744e+19"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"log_probs\":21}"), ContainsSubstring("0 to 20"));
  std::string stops = "0";
  for (int i = 0; i < 1024; ++i) stops += ",0";
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"stop\":[" + stops + "]}"),
             ContainsSubstring("\"stop\" holds more than 1024 ids"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"colour\":1}"),
             ContainsSubstring("'colour' is unknown"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1,512]}"), ContainsSubstring("512"));
  CHECK_THAT(error_of("{\"id\":\"a\",\"prompt\":[1],\"max_tokens\":9223372036854775807}"),
             ContainsSubstring("max_tokens is 9223372036854775807") && !ContainsSubstring("-9"));
  CHECK_THAT(error_of(std::string("{\"id\":\"a\",\"prompt\":[1]}\0{", 25)),
             ContainsSubstring("not valid JSON at byte 24"));

  client.send({{"id", "long"}, {"prompt", {1, 2}}, {"max_tokens", 2000}, {"ignore_eos", true}});
  client.send({{"id", "waits"}, {"prompt", {3}}, {"max_tokens", 2000}, {"ignore_eos", true}});
  read_until(client, answers, [&] { return answers.tokens["long"].size() > 3; });
  client.send({{"cancel", "waits"}});
  client.send({{"cancel", "long"}});
  read_until(client, answers, [&] { return answers.ends.size() == 2; });
  CHECK(answers.ends["long"].reason == "cancelled");
  CHECK(answers.ends["waits"].reason == "cancelled");
  CHECK(answers.tokens["waits"].empty());
  CHECK(answers.tokens["long"].size() < 2000);
}

TEST_CASE("the error of a bad line has the id that the line says, before the mistake or behind it",
          "[quick]") {
  const auto id_of = [](const std::string& line) {
    const auto parsed = decode::parse_command(line, {});
    REQUIRE(std::holds_alternative<decode::BadLine>(parsed));
    return std::get<decode::BadLine>(parsed).id;
  };
  CHECK(id_of(R"({"prompt":[-1],"id":"a"})") == "a");
  CHECK(id_of(R"({"frequency_penalty":"x","id":"b","prompt":[1]})") == "b");
  CHECK(id_of(R"({"foo":1,"id":"c","prompt":[1]})") == "c");
  CHECK(id_of(R"({"foo":{"id":"no"},"bar":["no"],"id":"d"})") == "d");
  CHECK(id_of(R"({"prompt":[[1]],"id":"e")") == "e");
  CHECK(id_of(R"({"id":"f","id":"no"})") == "f");
  for (const char* line :
       {R"({"foo":{"id":"no"}})", R"([{"id":"no"}])", R"({"foo":1,"id":["no"]})", R"({"foo":1,"id":7})",
        R"({"foo":1 "id":"no"})", R"({"foo":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]],"id":"no"})", R"("id")"}) {
    CAPTURE(line);
    CHECK(id_of(line).empty());
  }
  CHECK(id_of(R"({"foo":1,"id":")" + std::string(257, 'x') + "\"}").empty());
}

TEST_CASE("a request whose logits are not finite ends with an error, and the one beside it goes on",
          "[quick]") {
  const Golden golden = ReferenceModel("llama-tiny").golden();
  const TokenIds& prompt = golden.prompts[0];
  const TokenIds& tokens = golden.greedy[0];
  std::int32_t bad_id = 0;  // never reached by the good request
  while (std::ranges::count(prompt, bad_id) + std::ranges::count(tokens, bad_id) > 0) ++bad_id;
  const ScratchDirectory scratch;
  write_model_with_nan(scratch.path(), bad_id);
  const ReferenceModel model(scratch.path().string());
  for (const TopologySpec& spec : {TopologySpec{}, TopologySpec{.kvp = 2}}) {
    CAPTURE(spec.kvp);
    ServeClient client(model, spec, serving(2, 256, 512), {.num_threads = 1});
    client.send({{"id", "good"}, {"prompt", prompt}, {"max_tokens", tokens.size()}, {"ignore_eos", true}});
    client.send({{"id", "bad"}, {"prompt", {1, bad_id}}, {"max_tokens", 4}});
    Answers answers;
    read_until(client, answers, [&] { return answers.ends.contains("good") && !answers.errors.empty(); });
    CHECK(answers.tokens["good"] == tokens);
    REQUIRE(answers.errors.size() == 1);
    CHECK(answers.errors[0]["id"] == "bad");
    CHECK_THAT(answers.errors[0]["message"].get<std::string>(), ContainsSubstring("no finite logits"));
    CHECK(answers.tokens["bad"].empty());
    client.send({{"id", "next"}, {"prompt", prompt}, {"max_tokens", 2}, {"ignore_eos", true}});
    read_until(client, answers, [&] { return answers.ends.contains("next"); });
    CHECK(answers.tokens["next"] == TokenIds(tokens.begin(), tokens.begin() + 2));
  }
}

TEST_CASE("a decoder finishes what it has when its input ends", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 256, 512), {.num_threads = 1});
  for (const char* id : {"a", "b", "c"})
    client.send({{"id", id}, {"prompt", {1, 2, 3}}, {"max_tokens", 20}, {"ignore_eos", true}});
  client.close();
  Answers answers;
  while (const auto event = client.next_event()) answers.add(*event);
  client.rethrow();
  REQUIRE(answers.ends.size() == 3);
  CHECK(answers.tokens["a"].size() == 20);
  CHECK(answers.tokens["a"] == answers.tokens["c"]);
}

TEST_CASE("a decoder whose client hangs up stops, whatever it has to do", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 8192, 16384), {.num_threads = 1});
  for (int i = 0; i < 100; ++i) {  // minutes of work
    client.send(
        {{"id", std::to_string(i)}, {"prompt", {1, 2, 3}}, {"max_tokens", 8000}, {"ignore_eos", true}});
  }
  for (int i = 0; i < 5; ++i) REQUIRE(client.next_event());
  CHECK_FALSE(client.has_ended(std::chrono::milliseconds(0)));
  client.hang_up();
  CHECK(client.has_ended(std::chrono::seconds(10)));
  client.rethrow();
}

TEST_CASE("a flood of bad lines holds up neither requests nor the other ranks") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 256, 512),
                     {.num_threads = 1, .timeout = std::chrono::milliseconds(400)});
  constexpr std::size_t kLines = 200000;  // takes seconds
  client.send({{"id", "beside"}, {"prompt", {1, 2, 3}}, {"max_tokens", 250}, {"ignore_eos", true}});
  std::jthread writer([&] {
    std::string lines;
    for (int i = 0; i < 1000; ++i) lines += i == 0 ? "[" : "\n[";
    for (std::size_t sent = 0; sent < kLines; sent += 1000) client.send_line(lines);
    client.send({{"id", "behind"}, {"prompt", {1, 2, 3}}, {"max_tokens", 3}, {"ignore_eos", true}});
  });
  std::size_t errors = 0;
  std::size_t amid = 0;  // tokens that arrive between the errors
  Answers answers;
  while (!answers.ends.contains("beside") || !answers.ends.contains("behind")) {
    const auto event = client.next_event();
    REQUIRE(event);
    if ((*event)["event"] == "error") {
      ++errors;
      continue;
    }
    answers.add(*event);
    amid += (*event)["event"] == "token" && errors > 0 && errors < kLines;
  }
  CHECK(errors == kLines);
  CHECK(amid >= 10);
  CHECK(answers.tokens["beside"].size() == 250);
  CHECK(answers.tokens["behind"].size() == 3);
}

TEST_CASE("lines that take longer to parse than ranks wait hold up neither requests nor the other ranks") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 8192, 16384),
                     {.num_threads = 1, .timeout = std::chrono::milliseconds(1000)});
  std::string ids = "1";
  ids.reserve(std::size_t{60} << 20);
  while (ids.size() < (std::size_t{60} << 20)) ids += ",1";
  client.send({{"id", "beside"}, {"prompt", {1, 2, 3}}, {"max_tokens", 4000}, {"ignore_eos", true}});
  std::jthread writer([&] {
    client.send_line("{\"colour\":1,\"prompt\":[" + ids + "],\"id\":\"bad\"}");
    client.send_line("{\"prompt\":[" + ids + "],\"max_tokens\":3,\"id\":\"long\"}");
    client.send({{"cancel", "long"}});
    client.send({{"id", "behind"}, {"prompt", {1, 2, 3}}, {"max_tokens", 3}, {"ignore_eos", true}});
    client.close();
  });
  Answers answers;
  while (const auto event = client.next_event()) answers.add(*event);
  CHECK(client.has_ended(std::chrono::seconds(60)));
  client.rethrow();
  CHECK(answers.ends.size() == 2);
  CHECK(answers.tokens["beside"].size() == 4000);
  CHECK(answers.tokens["behind"].size() == 3);
  REQUIRE(answers.errors.size() == 3);
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"bad", "'colour' is unknown"}, {"long", "leaves no room"}, {"long", "nothing to cancel"}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CHECK(answers.errors[i]["id"] == expected[i].first);
    CHECK_THAT(answers.errors[i]["message"].get<std::string>(), ContainsSubstring(expected[i].second));
  }
}

TEST_CASE("a client that does not read pauses the steps until it does") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 8192, 16384),
                     {.num_threads = 1, .timeout = std::chrono::milliseconds(800)});
  // Events with 20 log-probabilities each, which together exceed the limit on a client's backlog.
  const int num_requests = 6;
  for (int i = 0; i < num_requests; ++i) {
    client.send({{"id", std::to_string(i)},
                 {"prompt", {1, 2, 3}},
                 {"max_tokens", 4000},
                 {"ignore_eos", true},
                 {"log_probs", 20}});
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (client.backlog() <= decode::Frontend::kMaxBacklog && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  REQUIRE(client.backlog() > decode::Frontend::kMaxBacklog);
  std::this_thread::sleep_for(std::chrono::seconds(2));  // longer than other ranks wait for the root
  constexpr std::size_t kStepBytes = 4096;               // events of two requests
  CHECK(client.backlog() <= decode::Frontend::kMaxBacklog + kStepBytes);
  Answers answers;
  read_until(client, answers, [&] { return answers.ends.size() == num_requests; });
  for (int i = 0; i < num_requests; ++i) CHECK(answers.tokens[std::to_string(i)].size() == 4000);
}

TEST_CASE("answers to bad lines wait in little memory, and take no time of a core, until they are read") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {}, serving(2, 256, 512), {.num_threads = 1});
  constexpr std::size_t kLines = 150000;
  std::jthread writer([&] {
    std::string lines = "[";
    for (int i = 1; i < 1000; ++i) lines += "\n[";
    for (std::size_t sent = 0; sent < kLines; sent += 1000) client.send_line(lines);
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (client.backlog() <= decode::Frontend::kMaxBacklog && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  writer.join();
  CHECK(comes_to_rest());
  constexpr std::size_t kTurnBytes = 1 << 16;  // answers between two checks of the client
  CHECK(client.backlog() > decode::Frontend::kMaxBacklog);
  CHECK(client.backlog() <= decode::Frontend::kMaxBacklog + kTurnBytes);
  for (std::size_t i = 0; i <= kLines; ++i) REQUIRE(client.next_event());  // the first one is no answer
  client.finish();
}

namespace {

/// Fails when the root next sends an order.
struct FailingBackend : cpu::Backend<cpu::LocalComm> {
  using cpu::Backend<cpu::LocalComm>::Backend;
  std::atomic<bool>* fails = nullptr;

  void upload(void* target, const void* source, std::size_t bytes, Stream stream) const {
    if (*fails) throw std::runtime_error("the root is out of order");
    cpu::Backend<cpu::LocalComm>::upload(target, source, bytes, stream);
  }
};

}  // namespace

TEST_CASE("lines that were read and not taken before a failure are answered too") {
  const ReferenceModel model("llama-tiny");
  const Topology topo({.kvp = 2}, model.config.shape);
  const GenerationRequest request = serving(2, 256, 512);
  std::atomic<bool> fails = false;
  ServeClient client([&](decode::Frontend& frontend) {
    decode::RootIo io;
    io.client = &frontend;
    decode::run_rank_threads(
        cpu::LocalComm::create_group(2),
        [&](int, const JobComms<cpu::LocalComm>& comms) {
          FailingBackend backend(comms.stage, comms.kvp, 1);
          backend.fails = &fails;
          return backend;
        },
        model.checkpoint, model.config, topo, request, io);
  });
  // Many more than it takes while the client does not read the answers.
  constexpr std::size_t kLines = 150000;
  std::string lines = "[";
  for (int i = 1; i < 1000; ++i) lines += "\n[";
  for (std::size_t sent = 0; sent < kLines; sent += 1000) client.send_line(lines);
  client.send({{"id", "late"}, {"prompt", {1, 2, 3}}, {"max_tokens", 3}});
  CHECK(comes_to_rest());
  REQUIRE(client.backlog() > decode::Frontend::kMaxBacklog);
  fails = true;
  std::size_t bad_lines = 0;
  std::vector<Json> others;
  while (const auto event = client.next_event()) {
    if ((*event)["event"] == "error" && !event->contains("id")) {
      ++bad_lines;
    } else if ((*event)["event"] != "ready") {
      others.push_back(*event);
    }
  }
  CHECK_THROWS_WITH(client.rethrow(), ContainsSubstring("the root is out of order"));
  CHECK(bad_lines == kLines);
  REQUIRE(others.size() == 1);
  CHECK(others[0]["id"] == "late");
  CHECK(others[0]["message"].get<std::string>().starts_with("the decoder failed: "));
}

TEST_CASE("an idle decoder's other ranks wait longer than their timeout", "[quick]") {
  const ReferenceModel model("llama-tiny");
  ServeClient client(model, {.kvp = 2}, serving(2, 256, 512),
                     {.num_threads = 1, .timeout = std::chrono::milliseconds(400)});
  REQUIRE(client.next_event());
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  client.send({{"id", "a"}, {"prompt", {1, 2, 3}}, {"max_tokens", 3}});
  Answers answers;
  read_until(client, answers, [&] { return answers.ends.size() == 1; });
  CHECK(answers.tokens["a"].size() == 3);
}

}  // namespace helix::test
