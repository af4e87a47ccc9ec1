// SPDX-License-Identifier: Apache-2.0
// Golden outputs of the reference checkpoints: reads them and compares them with a generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "cli/launch.hpp"
#include "generate/generation.hpp"
#include "model/parse_config.hpp"

namespace helix::test {

/// golden.json or golden-long.json: transformers' greedy continuation, the logits of the first and the last
/// token, and for each step the norm of the logits and the margin between the two largest.
struct Golden {
  std::vector<decode::TokenIds> prompts;
  std::vector<decode::TokenIds> greedy;
  std::vector<std::vector<std::vector<float>>> logits_first8;  // [sequence][2][8]
  std::vector<std::vector<float>> logits_norm;                 // [sequence][step]
  std::vector<std::vector<float>> margin;
};

std::filesystem::path data_directory();
Golden read_golden(const std::filesystem::path& file);

/// A checkpoint, its config and its golden outputs.
struct ReferenceModel {
  explicit ReferenceModel(const std::string& name)
      : name(name), checkpoint(data_directory() / name), config(decode::read_model_config(checkpoint)) {}

  std::string name;
  decode::Checkpoint checkpoint;
  decode::ModelConfig config;

  Golden golden() const { return read_golden(data_directory() / name / "golden.json"); }
  Golden golden_long() const { return read_golden(data_directory() / name / "golden-long.json"); }
};

/// Writes llama-tiny to `directory`, with an embedding of NaN for `token`.
void write_model_with_nan(const std::filesystem::path& directory, std::int32_t token);

inline const std::vector<std::string> kReferenceModels = {"llama-tiny", "llama-tiny-16q8kv", "deepseek-tiny",
                                                          "deepseek-tiny-fp8", "deepseek-v2-tiny"};

/// Every legal stage of 1, 2, 4 and 8 ranks.
std::vector<TopologySpec> legal_stages(const ModelShape& shape);

/// Description of a case.
std::string describe(const std::string& model, const TopologySpec& spec,
                     const decode::GenerationRequest& request);

/// A request with the golden prompts and f32 KV, which must reproduce the golden output.
decode::GenerationRequest golden_request(const Golden& golden);

/// Describes the first difference; empty if there is none. Tokens must be identical, each logit within 1e-4 *
/// norm / sqrt(vocab), and norms must agree too.
std::string difference_from_golden(const Golden& golden, const decode::GenerationResult& result,
                                   std::int64_t vocab);

/// Compares a teacher-forced generation with the golden one; rounding may change close decisions.
struct ForcedComparison {
  struct Step {
    std::size_t sequence = 0;
    std::size_t step = 0;
    std::int32_t token = 0;
    std::int32_t expected = 0;

    bool operator==(const Step&) const = default;
  };
  std::vector<Step> other_argmax;  ///< steps with another argmax although the reference margin exceeds 0.1
  int num_clear = 0;               ///< number of steps with such a margin
  float worst_logit = 0.0f;  ///< largest difference of a logit, divided by the RMS of its step; inf for NaN
};
std::ostream& operator<<(std::ostream& out, const ForcedComparison::Step& step);

/// @throws Error(internal) if the generation's sequences or lengths differ from the golden ones.
ForcedComparison compare_forced(const Golden& golden, const decode::GenerationResult& result,
                                std::int64_t vocab);

/// The golden continuations as drafts. Every fifth draft is wrong, so that it is rejected and truncated.
std::vector<decode::TokenIds> drafts_partly_wrong(const Golden& golden);

}  // namespace helix::test
