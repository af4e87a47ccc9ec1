// SPDX-License-Identifier: Apache-2.0
// Sizes of public models, as their config.json files state them.
#include <array>
#include <sstream>

#include <helix/error.hpp>
#include <helix/plan/model.hpp>

namespace helix::plan {
namespace {

/// Grouped-query attention whose values are as wide as its keys.
ModelShape grouped_query(ModelShape shape) {
  shape.value_dim = shape.head_dim;
  return shape;
}

/// Latent attention in absorbed form: the latent is the one KV head.
ModelShape latent(ModelShape shape) {
  shape.num_kv_heads = 1;
  shape.head_dim = shape.mla->latent_dim();
  shape.value_dim = shape.mla->kv_lora_rank;
  return shape;
}

Model llama_8b() {
  return {.name = "llama-3.1-8b",
          .source = "config.json of meta-llama/Llama-3.1-8B",
          .shape = grouped_query({.num_query_heads = 32,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .hidden = 4096,
                                  .ffn = 14336,
                                  .vocab = 128256,
                                  .num_layers = 32})};
}

Model llama_70b() {
  return {.name = "llama-3.1-70b",
          .source = "config.json of meta-llama/Llama-3.1-70B",
          .shape = grouped_query({.num_query_heads = 64,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .hidden = 8192,
                                  .ffn = 28672,
                                  .vocab = 128256,
                                  .num_layers = 80})};
}

Model llama_405b() {
  return {.name = "llama-3.1-405b",
          .source = "config.json of meta-llama/Llama-3.1-405B",
          .shape = grouped_query({.num_query_heads = 128,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .hidden = 16384,
                                  .ffn = 53248,
                                  .vocab = 128256,
                                  .num_layers = 126})};
}

/// DeepSeek-V3 and R1 have the same shape. Omits the extra layer that predicts a second token.
Model deepseek_r1() {
  return {.name = "deepseek-r1",
          .source = "config.json of deepseek-ai/DeepSeek-R1",
          .shape = latent({.num_query_heads = 128,
                           .hidden = 7168,
                           .ffn = 18432,
                           .vocab = 129280,
                           .num_layers = 61,
                           .mla = MlaShape{.q_lora_rank = 1536,
                                           .kv_lora_rank = 512,
                                           .qk_nope_head_dim = 128,
                                           .qk_rope_head_dim = 64,
                                           .v_head_dim = 128},
                           .moe = MoeShape{.num_experts = 256,
                                           .top_k = 8,
                                           .expert_ffn = 2048,
                                           .shared_ffn = 2048,
                                           .first_dense_layers = 3}})};
}

Model deepseek_v2_lite() {
  return {.name = "deepseek-v2-lite",
          .source = "config.json of deepseek-ai/DeepSeek-V2-Lite",
          .shape = latent({.num_query_heads = 16,
                           .hidden = 2048,
                           .ffn = 10944,
                           .vocab = 102400,
                           .num_layers = 27,
                           .mla = MlaShape{.q_lora_rank = 0,
                                           .kv_lora_rank = 512,
                                           .qk_nope_head_dim = 128,
                                           .qk_rope_head_dim = 64,
                                           .v_head_dim = 128},
                           .moe = MoeShape{.num_experts = 64,
                                           .top_k = 6,
                                           .expert_ffn = 1408,
                                           .shared_ffn = 2 * 1408,
                                           .first_dense_layers = 1}})};
}

Model qwen3_32b() {
  return {.name = "qwen3-32b",
          .source = "config.json of Qwen/Qwen3-32B",
          .shape = grouped_query({.num_query_heads = 64,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .hidden = 5120,
                                  .ffn = 25600,
                                  .vocab = 151936,
                                  .num_layers = 64}),
          .has_qk_norm = true};
}

/// The config's intermediate_size applies to no layer: all are MoE layers.
Model qwen3_235b() {
  return {.name = "qwen3-235b-a22b",
          .source = "config.json of Qwen/Qwen3-235B-A22B",
          .shape = grouped_query({.num_query_heads = 64,
                                  .num_kv_heads = 4,
                                  .head_dim = 128,
                                  .hidden = 4096,
                                  .vocab = 151936,
                                  .num_layers = 94,
                                  .moe = MoeShape{.num_experts = 128, .top_k = 8, .expert_ffn = 1536}}),
          .has_qk_norm = true};
}

Model mixtral_8x22b() {
  return {.name = "mixtral-8x22b",
          .source = "config.json of mistralai/Mixtral-8x22B-Instruct-v0.1",
          .shape = grouped_query({.num_query_heads = 48,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .hidden = 6144,
                                  .vocab = 32768,
                                  .num_layers = 56,
                                  .moe = MoeShape{.num_experts = 8, .top_k = 2, .expert_ffn = 16384}})};
}

/// Even layers see 128 tokens. Omits biases and attention sinks, a few millionths of the model.
Model gpt_oss_120b() {
  return {.name = "gpt-oss-120b",
          .source = "config.json of openai/gpt-oss-120b",
          .shape = grouped_query({.num_query_heads = 64,
                                  .num_kv_heads = 8,
                                  .head_dim = 64,
                                  .hidden = 2880,
                                  .vocab = 201088,
                                  .num_layers = 36,
                                  .moe = MoeShape{.num_experts = 128, .top_k = 4, .expert_ffn = 2880}}),
          .window = 128,
          .full_attention_stride = 2};
}

/// The text model. Every second layer is routed; three of four layers attend within chunks of 8192 tokens,
/// which are treated as windows.
Model llama_4_maverick() {
  return {.name = "llama-4-maverick",
          .source = "text_config in config.json of meta-llama/Llama-4-Maverick-17B-128E",
          .shape = grouped_query({.num_query_heads = 40,
                                  .num_kv_heads = 8,
                                  .head_dim = 128,
                                  .hidden = 5120,
                                  .ffn = 16384,
                                  .vocab = 202048,
                                  .num_layers = 48,
                                  .moe = MoeShape{.num_experts = 128,
                                                  .top_k = 1,
                                                  .expert_ffn = 8192,
                                                  .shared_ffn = 8192,
                                                  .first_dense_layers = 1,
                                                  .layer_stride = 2}}),
          .window = 8192,
          .full_attention_stride = 4};
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
