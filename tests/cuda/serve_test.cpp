// SPDX-License-Identifier: Apache-2.0
// helix-decode --serve on GPUs: the golden texts of the trained models, token by token in f32, and in 16 bits
// wherever the reference has a clear margin.
#include <cstddef>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/topology.hpp>

#include "cuda/gpu.hpp"
#include "cuda/launch_options.hpp"
#include "decode/serve_client.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

using Json = nlohmann::json;
using decode::GenerationRequest;
using decode::LaunchOptions;
using decode::TokenIds;

/// Margin between the two largest logits below which 16 bits may swap them; even at 0.1 some swap. Of about
/// 390 tokens per model above this margin, f16 changes none of llama-wordnet and one of deepseek-wordnet
/// (margin 0.11, where the scores of two groups of experts differ by 1.7e-5); bf16 changes up to 5 of
/// llama-wordnet (margins up to 0.35) and one of deepseek-wordnet. transformers behaves alike (5.23 on a CPU,
/// 448 tokens per model, teacher-forced): f16 changes none and the same one, bf16 four (margins up to 0.41)
/// and one.
constexpr double kCloseMargin = 0.1;
constexpr double kSureMargin = 0.5;
constexpr int kMaxOthers = 6;

Json golden_cases(const std::string& name) {
  std::ifstream file(std::string(HELIX_TEST_DATA) + "/" + name + "/golden-text.json");
  return Json::parse(file)["cases"];
}

GenerationRequest serving(DType kv_dtype) {
  GenerationRequest request;
  request.serving = {.max_sequences = 3, .max_tokens = 512, .kv_tokens = 4096};
  request.kv_dtype = kv_dtype;
  request.page_tokens = 16;
  return request;
}

/// Sends the requests and returns their tokens by id.
std::map<std::string, TokenIds> answers_to(ServeClient& client, const std::vector<Json>& requests) {
  for (const Json& request : requests) client.send(request);
  std::map<std::string, TokenIds> answers;
  for (std::size_t ended = 0; ended < requests.size();) {
    const auto event = client.next_event();
    REQUIRE(event);
    INFO(event->dump());
    const std::string kind = (*event)["event"];
    REQUIRE(kind != "error");
    if (kind == "token") answers[(*event)["id"]].push_back((*event)["token"]);
    if (kind == "end") ++ended;
  }
  return answers;
}

void check_exact(const std::string& name, const TopologySpec& spec, const LaunchOptions& launch) {
  const ReferenceModel model(name);
  const Json cases = golden_cases(name);
  CAPTURE(name, spec.kvp, spec.tpa, spec.tpf, spec.ep, spec.pp, spec.dp);
  ServeClient client(model, spec, serving(DType::f32), launch);
  std::vector<Json> requests;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    requests.push_back({{"id", std::to_string(i)},
                        {"prompt", cases[i]["prompt"]},
                        {"max_tokens", cases[i]["tokens"].size()},
                        {"ignore_eos", true}});
  }
  const auto answers = answers_to(client, requests);
  for (std::size_t i = 0; i < cases.size(); ++i)
    CHECK(answers.at(std::to_string(i)) == cases[i]["tokens"].get<TokenIds>());
  client.finish();
}

/// Generates the next token after each prefix of the golden text. It must be the reference's token wherever
/// the reference is sure, and almost always where the margin is not close.
void check_16_bits(const std::string& name, const TopologySpec& spec, DType dtype, LaunchOptions launch) {
  const ReferenceModel model(name);
  launch.activation = dtype;
  CAPTURE(name, to_string(dtype), spec.kvp, spec.tpa, spec.tpf, spec.ep);
  ServeClient client(model, spec, serving(dtype), launch);
  int compared = 0;
  int others = 0;
  for (const Json& text : golden_cases(name)) {
    TokenIds prompt = text["prompt"];
    const TokenIds tokens = text["tokens"];
    std::vector<Json> requests;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (text["margins"][i].get<double>() > kCloseMargin)
        requests.push_back({{"id", std::to_string(i)}, {"prompt", prompt}, {"max_tokens", 1}});
      prompt.push_back(tokens[i]);
    }
    for (const auto& [id, answer] : answers_to(client, requests)) {
      CAPTURE(text["text"].get<std::string>(), id);
      const auto i = static_cast<std::size_t>(std::stoi(id));
      REQUIRE(answer.size() == 1);
      ++compared;
      if (answer[0] == tokens[i]) continue;
      ++others;
      CHECK(text["margins"][i].get<double>() < kSureMargin);
    }
  }
  client.finish();
  CHECK(compared > 300);
  CHECK(others <= kMaxOthers);
}

const std::vector<std::string> kModels{"llama-wordnet", "deepseek-wordnet"};

}  // namespace

TEST_CASE("the golden texts come through JSON lines from ranks that share a GPU, under every topology") {
  HELIX_REQUIRE_GPUS(1);
  for (const std::string& name : kModels) {
    for (const int num_ranks : {1, 2, 4}) {
      for (const TopologySpec& spec :
           Topology::legal_topologies(ReferenceModel(name).config.shape, num_ranks)) {
        check_exact(name, spec, kOneGpu);
        if (num_ranks > 1) check_exact(name, spec, kOneGpuPeers);
      }
    }
    for (const TopologySpec& replicas :
         {TopologySpec{.kvp = 2, .dp = 2}, {.kvp = 4, .dp = 2}, {.kvp = 2, .dp = 4}})
      check_exact(name, replicas, kOneGpuPeers);
  }
}

TEST_CASE(
    "in 16 bits every token of the golden texts comes of which the reference is sure, nearly every other") {
  HELIX_REQUIRE_GPUS(1);
  for (const std::string& name : kModels) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      check_16_bits(name, {}, dtype, kOneGpu);
      check_16_bits(name, {.kvp = 2}, dtype, kOneGpu);
      check_16_bits(name, {.kvp = 4}, dtype, kOneGpu);
    }
  }
}

TEST_CASE("the golden texts come through JSON lines from two GPUs") {
  HELIX_REQUIRE_GPUS(2);
  for (const std::string& name : kModels) {
    check_exact(name, {.kvp = 2}, kGpuEach);
    check_exact(name, {.pp = 2}, kGpuEach);
    check_16_bits(name, {.kvp = 2}, DType::bf16, kGpuEach);
  }
}

}  // namespace helix::test
