// SPDX-License-Identifier: Apache-2.0
// Sizes of public models, as their config.json files state them.
#include <array>
#include <sstream>

#include <helix/error.hpp>
#include <helix/plan/model.hpp>

namespace helix::plan {
namespace {

/// Fields with the names of config.json: hidden_size, num_hidden_layers and so on.
struct GroupedQuery {
  std::int64_t hidden_size;
  std::int64_t num_hidden_layers;
  std::int64_t num_attention_heads;
  std::int64_t num_key_value_heads;
  std::int64_t head_dim;
  std::int64_t intermediate_size;
  std::int64_t vocab_size;
};

Model grouped_query(std::string name, std::string source, const GroupedQuery& config) {
  Model model;
  model.name = std::move(name);
  model.source = std::move(source);
  model.hidden = config.hidden_size;
  model.num_layers = config.num_hidden_layers;
  model.num_query_heads = config.num_attention_heads;
  model.num_kv_heads = config.num_key_value_heads;
  model.head_dim = config.head_dim;
  model.value_dim = config.head_dim;
  model.ffn = config.intermediate_size;
  model.vocab = config.vocab_size;
  return model;
}

Model latent(std::string name, std::string source, std::int64_t hidden_size, std::int64_t num_hidden_layers,
             std::int64_t num_attention_heads, std::int64_t intermediate_size, std::int64_t vocab_size,
             const LatentAttention& attention, const Experts& experts) {
  Model model = grouped_query(
      std::move(name), std::move(source),
      {hidden_size, num_hidden_layers, num_attention_heads, 1, 0, intermediate_size, vocab_size});
  model.head_dim = attention.kv_lora_rank + attention.qk_rope_head_dim;
  model.value_dim = attention.kv_lora_rank;
  model.latent = attention;
  model.experts = experts;
  return model;
}

Model llama_8b() {
  return grouped_query("llama-3.1-8b", "config.json of meta-llama/Llama-3.1-8B",
                       {4096, 32, 32, 8, 128, 14336, 128256});
}

Model llama_70b() {
  return grouped_query("llama-3.1-70b", "config.json of meta-llama/Llama-3.1-70B",
                       {8192, 80, 64, 8, 128, 28672, 128256});
}

Model llama_405b() {
  return grouped_query("llama-3.1-405b", "config.json of meta-llama/Llama-3.1-405B",
                       {16384, 126, 128, 8, 128, 53248, 128256});
}

/// DeepSeek-V3 and R1 have the same shape. Without the extra layer that predicts a second token.
Model deepseek_r1() {
  return latent(
      "deepseek-r1", "config.json of deepseek-ai/DeepSeek-R1", 7168, 61, 128, 18432, 129280,
      {.q_lora_rank = 1536,
       .kv_lora_rank = 512,
       .qk_nope_head_dim = 128,
       .qk_rope_head_dim = 64,
       .v_head_dim = 128},
      {.num_experts = 256, .top_k = 8, .expert_ffn = 2048, .shared_ffn = 2048, .first_dense_layers = 3});
}

Model deepseek_v2_lite() {
  return latent(
      "deepseek-v2-lite", "config.json of deepseek-ai/DeepSeek-V2-Lite", 2048, 27, 16, 10944, 102400,
      {.q_lora_rank = 0,
       .kv_lora_rank = 512,
       .qk_nope_head_dim = 128,
       .qk_rope_head_dim = 64,
       .v_head_dim = 128},
      {.num_experts = 64, .top_k = 6, .expert_ffn = 1408, .shared_ffn = 2 * 1408, .first_dense_layers = 1});
}

Model qwen3_32b() {
  Model model =
      grouped_query("qwen3-32b", "config.json of Qwen/Qwen3-32B", {5120, 64, 64, 8, 128, 25600, 151936});
  model.has_qk_norm = true;
  return model;
}

/// Its intermediate_size belongs to no layer: all are MoE layers.
Model qwen3_235b() {
  Model model = grouped_query("qwen3-235b-a22b", "config.json of Qwen/Qwen3-235B-A22B",
                              {4096, 94, 64, 4, 128, 0, 151936});
  model.has_qk_norm = true;
  model.experts = Experts{.num_experts = 128, .top_k = 8, .expert_ffn = 1536};
  return model;
}

Model mixtral_8x22b() {
  Model model = grouped_query("mixtral-8x22b", "config.json of mistralai/Mixtral-8x22B-Instruct-v0.1",
                              {6144, 56, 48, 8, 128, 0, 32768});
  model.experts = Experts{.num_experts = 8, .top_k = 2, .expert_ffn = 16384};
  return model;
}

/// Even layers see 128 tokens. Biases and attention sinks, a few millionths of the model, are left out.
Model gpt_oss_120b() {
  Model model =
      grouped_query("gpt-oss-120b", "config.json of openai/gpt-oss-120b", {2880, 36, 64, 8, 64, 0, 201088});
  model.window = 128;
  model.full_attention_stride = 2;
  model.experts = Experts{.num_experts = 128, .top_k = 4, .expert_ffn = 2880};
  return model;
}

/// The text model: every second layer routed, three of four layers attend within chunks of 8192 tokens, which
/// are taken as windows.
Model llama_4_maverick() {
  Model model =
      grouped_query("llama-4-maverick", "text_config in config.json of meta-llama/Llama-4-Maverick-17B-128E",
                    {5120, 48, 40, 8, 128, 16384, 202048});
  model.window = 8192;
  model.full_attention_stride = 4;
  model.experts = Experts{.num_experts = 128,
                          .top_k = 1,
                          .expert_ffn = 8192,
                          .shared_ffn = 8192,
                          .first_dense_layers = 1,
                          .layer_stride = 2};
  return model;
}

constexpr std::array<Model (*)(), 10> kPresets{llama_8b,         llama_70b,       llama_405b, deepseek_r1,
                                               deepseek_v2_lite, qwen3_32b,       qwen3_235b, mixtral_8x22b,
                                               gpt_oss_120b,     llama_4_maverick};

}  // namespace

std::vector<std::string> model_preset_names() {
  std::vector<std::string> names;
  for (const auto preset : kPresets) names.push_back(preset().name);
  return names;
}

Model model_preset(std::string_view name) {
  std::ostringstream known;
  for (const auto preset : kPresets) {
    Model model = preset();
    if (model.name == name) return model;
    known << (known.tellp() > 0 ? ", " : "") << model.name;
  }
  throw Error(ErrorCode::invalid_argument, "there is no model preset \"", name, "\"; known are ",
              known.str());
}

}  // namespace helix::plan
