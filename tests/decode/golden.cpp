// SPDX-License-Identifier: Apache-2.0
// Reading and comparing golden outputs.
#include "decode/golden.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

#include <nlohmann/json.hpp>

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::test {

void write_model_with_nan(const std::filesystem::path& directory, std::int32_t token) {
  for (const char* name : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(data_directory() / "llama-tiny" / name, directory / name);
  const decode::Checkpoint checkpoint(directory);
  const auto [file, tensor] = checkpoint.find("model.embed_tokens.weight");
  if (tensor == nullptr || tensor->dtype != DType::bf16)
    throw Error(ErrorCode::internal, "llama-tiny has no embeddings of bf16");
  const std::vector<bf16> row(static_cast<std::size_t>(tensor->cols()),
                              bf16(std::numeric_limits<float>::quiet_NaN()));
  const auto bytes = static_cast<std::streamsize>(row.size() * sizeof(bf16));
  std::fstream weights(file->path(), std::ios::in | std::ios::out | std::ios::binary);
  weights.seekp(static_cast<std::streamoff>(file->offset(*tensor)) + token * bytes);
  weights.write(reinterpret_cast<const char*>(row.data()), bytes);
  if (!weights.good()) throw Error(ErrorCode::io, "cannot write to ", file->path());
}

std::filesystem::path data_directory() {
  return HELIX_TEST_DATA;
}

Golden read_golden(const std::filesystem::path& file) {
  std::ifstream in(file);
  HELIX_EXPECTS(in.good(), ErrorCode::io, file.string(), ": cannot be opened");
  const auto json = nlohmann::json::parse(in);
  Golden golden;
  json.at("prompt").get_to(golden.prompts);
  json.at("greedy").get_to(golden.greedy);
  json.at("logits_first8").get_to(golden.logits_first8);
  for (const auto& sequence : json.at("logits_norm_and_top2_margin")) {
    auto& norms = golden.logits_norm.emplace_back();
    auto& margins = golden.margin.emplace_back();
    for (const auto& step : sequence) {
      norms.push_back(step.at(0).get<float>());
      margins.push_back(step.at(1).get<float>());
    }
  }
  return golden;
}

std::vector<TopologySpec> legal_stages(const ModelShape& shape) {
  std::vector<TopologySpec> all;
  for (int ranks : {1, 2, 4, 8}) {
    for (const TopologySpec& spec : Topology::legal_topologies(shape, ranks)) all.push_back(spec);
  }
  return all;
}

std::string describe(const std::string& model, const TopologySpec& spec,
                     const decode::GenerationRequest& request) {
  return model + " kvp " + std::to_string(spec.kvp) + " tpa " + std::to_string(spec.tpa) + " tpf " +
         std::to_string(spec.tpf) + " ep " + std::to_string(spec.ep) + " pp " + std::to_string(spec.pp) +
         " dp " + std::to_string(spec.dp) + " chunk " + std::to_string(request.chunk) + " page " +
         std::to_string(request.page_tokens) + " hop-b " + std::to_string(request.hop_b_slices) + " drafts " +
         std::to_string(request.draft_tokens);
}

decode::GenerationRequest golden_request(const Golden& golden) {
  decode::GenerationRequest request;
  request.prompts = golden.prompts;
  request.max_new_tokens = static_cast<std::int64_t>(golden.greedy.front().size());
  request.ignore_eos = true;
  request.kv_dtype = DType::f32;
  return request;
}

std::string difference_from_golden(const Golden& golden, const decode::GenerationResult& result,
                                   std::int64_t vocab) {
  std::ostringstream out;
  if (result.sequences.size() != golden.greedy.size()) {
    out << result.sequences.size() << " sequences, golden has " << golden.greedy.size();
    return out.str();
  }
  for (std::size_t s = 0; s < golden.greedy.size(); ++s) {
    const auto& sequence = result.sequences[s];
    const auto& expected = golden.greedy[s];
    for (std::size_t step = 0; step < expected.size(); ++step) {
      if (step < sequence.tokens.size() && sequence.tokens[step] == expected[step]) continue;
      out << "sequence " << s << ", step " << step << ": token "
          << (step < sequence.tokens.size() ? sequence.tokens[step] : -1) << ", golden " << expected[step]
          << ", margin " << golden.margin[s][step];
      return out.str();
    }
    if (sequence.tokens.size() != expected.size() || sequence.logits_norm.size() != expected.size()) {
      out << "sequence " << s << ": " << sequence.tokens.size() << " tokens and "
          << sequence.logits_norm.size() << " norms, golden has " << expected.size();
      return out.str();
    }
    for (std::size_t which = 0; which < 2; ++which) {
      const std::size_t step = which == 0 ? 0 : expected.size() - 1;
      const float norm = golden.logits_norm[s][step];
      const float tolerance = 1e-4f * norm / std::sqrt(static_cast<float>(vocab));
      for (std::size_t i = 0; i < 8; ++i) {
        const float got = sequence.logits_first8[which][i];
        const float want = golden.logits_first8[s][which][i];
        if (std::abs(got - want) <= tolerance) continue;
        out << "sequence " << s << ", step " << step << ", logit " << i << ": " << got << ", golden " << want
            << ", tolerance " << tolerance;
        return out.str();
      }
    }
    for (std::size_t step = 0; step < expected.size(); ++step) {
      if (std::abs(sequence.logits_norm[step] - golden.logits_norm[s][step]) <=
          1e-4f * golden.logits_norm[s][step])
        continue;
      out << "sequence " << s << ", step " << step << ": logits norm " << sequence.logits_norm[step]
          << ", golden " << golden.logits_norm[s][step];
      return out.str();
    }
  }
  return {};
}

std::ostream& operator<<(std::ostream& out, const ForcedComparison::Step& step) {
  return out << "sequence " << step.sequence << ", step " << step.step << ": token " << step.token
             << ", golden " << step.expected;
}

ForcedComparison compare_forced(const Golden& golden, const decode::GenerationResult& result,
                                std::int64_t vocab) {
  ForcedComparison comparison;
  HELIX_EXPECTS(result.sequences.size() == golden.greedy.size(), ErrorCode::internal, result.sequences.size(),
                " sequences, golden has ", golden.greedy.size());
  for (std::size_t s = 0; s < golden.greedy.size(); ++s) {
    const auto& sequence = result.sequences[s];
    HELIX_EXPECTS(sequence.tokens.size() == golden.greedy[s].size(), ErrorCode::internal, "sequence ", s,
                  ": ", sequence.tokens.size(), " tokens, golden has ", golden.greedy[s].size());
    for (std::size_t step = 0; step < golden.greedy[s].size(); ++step) {
      if (golden.margin[s][step] <= 0.1f) continue;
      ++comparison.num_clear;
      if (sequence.tokens[step] != golden.greedy[s][step])
        comparison.other_argmax.push_back({s, step, sequence.tokens[step], golden.greedy[s][step]});
    }
    for (std::size_t which = 0; which < 2; ++which) {
      const float norm = which == 0 ? golden.logits_norm[s].front() : golden.logits_norm[s].back();
      const float rms = norm / std::sqrt(static_cast<float>(vocab));
      for (std::size_t i = 0; i < 8; ++i) {
        const float off =
            std::abs(sequence.logits_first8[which][i] - golden.logits_first8[s][which][i]) / rms;
        comparison.worst_logit =
            std::max(comparison.worst_logit, std::isnan(off) ? std::numeric_limits<float>::infinity() : off);
      }
    }
  }
  return comparison;
}

std::vector<decode::TokenIds> drafts_partly_wrong(const Golden& golden) {
  std::vector<decode::TokenIds> drafts = golden.greedy;
  for (decode::TokenIds& tokens : drafts)
    for (std::size_t i = 3; i < tokens.size(); i += 5) tokens[i] = (tokens[i] + 1) % 512;
  return drafts;
}

}  // namespace helix::test
