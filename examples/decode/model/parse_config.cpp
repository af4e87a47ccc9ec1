// SPDX-License-Identifier: Apache-2.0
// Reading config.json key by key.
#include "model/parse_config.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>

#include "files/object_reader.hpp"
#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

constexpr std::int64_t kMaxHeadDim = std::int64_t{1} << 16;
constexpr double kMaxFactor = 1e6;

constexpr std::string_view kSupportedModels =
    "llama, mistral, ministral, qwen2, qwen3, deepseek_v2, deepseek_v3";

/// Both names of one architecture: transformers treats a mistral with layer_types as a ministral.
bool is_mistral(const std::string& model_type) {
  return model_type == "mistral" || model_type == "ministral";
}

/// Default values that transformers uses for a model family when a key is absent.
struct FamilyDefaults {
  std::int64_t num_kv_heads = 0;  // 0: as many as query heads
  std::int64_t head_dim = 0;      // 0: hidden / heads
  std::int64_t max_positions = 2048;
  std::int64_t eos_id = 2;  // -1: none
  bool is_deepseek = false;
};

/// @throws Error(unsupported) for a model_type that is not built.
FamilyDefaults family_defaults(const ObjectReader& top, const std::string& model_type) {
  if (model_type == "llama") return {};
  if (is_mistral(model_type)) return {.num_kv_heads = 8, .max_positions = 131072};
  if (model_type == "qwen2") return {.num_kv_heads = 32, .max_positions = 32768, .eos_id = -1};
  if (model_type == "qwen3")
    return {.num_kv_heads = 32, .head_dim = 128, .max_positions = 32768, .eos_id = -1};
  if (model_type == "deepseek_v2") return {.is_deepseek = true};
  if (model_type == "deepseek_v3") return {.max_positions = 4096, .eos_id = 1, .is_deepseek = true};
  top.unsupported("model_type", " is ", printable(model_type), "; supported are ", kSupportedModels);
}

DType parse_dtype_key(const ObjectReader& top, DType absent) {
  const char* key = top.has("dtype") ? "dtype" : "torch_dtype";
  if (!top.has(key)) return absent;
  constexpr std::string_view kModule = "torch.";  // prefix in older files
  const std::string given = top.string(key);
  const std::string_view dtype =
      std::string_view(given).substr(given.starts_with(kModule) ? kModule.size() : 0);
  if (dtype == "auto") return absent;
  if (dtype == "float32") return DType::f32;
  if (dtype == "float16") return DType::f16;
  if (dtype == "bfloat16") return DType::bf16;
  top.unsupported(key, " is ", printable(given), "; supported are bfloat16, float16, float32");
}

/// A boolean that is true if the key is absent. Null is false, as in transformers.
bool true_unless_null(const ObjectReader& reader, const char* key) {
  return reader.boolean_or(key, reader.is_absent(key));
}

/// The rope_type; older files spell the key "type".
RopeType parse_rope_type(const ObjectReader& scaling) {
  const char* key = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.string_or(key, "default");
  if (type == "default") return RopeType::standard;
  if (type == "linear") return RopeType::linear;
  if (type == "dynamic") return RopeType::dynamic;
  if (type == "llama3") return RopeType::llama3;
  if (type == "yarn") return RopeType::yarn;
  scaling.unsupported(key, " is ", printable(type), "; supported are default, linear, dynamic, llama3, yarn");
}

void parse_llama3(const ObjectReader& scaling, RopeConfig& rope) {
  rope.low_freq_factor = scaling.number("low_freq_factor", 1e-6, kMaxFactor);
  rope.high_freq_factor = scaling.number("high_freq_factor", 1e-6, kMaxFactor);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.fail("high_freq_factor", *scaling.find("high_freq_factor"),
                 "more than low_freq_factor, which is ", rope.low_freq_factor);
  }
}

/// A positive number. Zero counts as absent, as in transformers.
double nonzero_or(const ObjectReader& scaling, const char* key, double fallback) {
  const nlohmann::json* value = scaling.find(key);
  return value == nullptr || *value == 0 ? fallback : scaling.number(key, 1e-3, kMaxFactor);
}

void parse_yarn(const ObjectReader& scaling, RopeConfig& rope) {
  rope.beta_fast = nonzero_or(scaling, "beta_fast", 32.0);
  rope.beta_slow = nonzero_or(scaling, "beta_slow", 1.0);
  if (rope.beta_fast < rope.beta_slow) {
    scaling.fail("beta_fast", nlohmann::json(rope.beta_fast), "at least beta_slow, which is ",
                 rope.beta_slow);
  }
  rope.mscale = nonzero_or(scaling, "mscale", 0.0);
  if (scaling.has("attention_factor"))
    rope.attention_factor = scaling.number("attention_factor", 1e-6, kMaxFactor);
  rope.truncate = true_unless_null(scaling, "truncate");
}

void parse_scaling(const ObjectReader& top, const ObjectReader& scaling, RopeConfig& rope,
                   std::int64_t max_positions) {
  if (rope.type == RopeType::standard) return;
  if (rope.type == RopeType::llama3 || rope.type == RopeType::yarn) {
    const ObjectReader& source = top.has("original_max_position_embeddings") ? top : scaling;
    rope.original_max_position_embeddings =
        source.integer_or("original_max_position_embeddings", max_positions, 1, kMaxTokens);
  }
  if (rope.type == RopeType::yarn && scaling.is_null("factor")) {
    rope.factor =
        static_cast<double>(max_positions) / static_cast<double>(rope.original_max_position_embeddings);
  } else {
    rope.factor = scaling.number("factor", 1.0, kMaxFactor);
  }
  rope.mscale_all_dim = nonzero_or(scaling, "mscale_all_dim", 0.0);
  if (rope.type == RopeType::llama3) parse_llama3(scaling, rope);
  if (rope.type == RopeType::yarn) parse_yarn(scaling, rope);
}

/// Keys that transformers does not read for this rope type either: misspelt ones, or keys of newer versions.
std::vector<std::string> unread_rope_keys(const ObjectReader& scaling, RopeType type) {
  std::set<std::string_view> known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  if (type != RopeType::standard) known.insert({"factor", "mscale_all_dim"});
  if (type == RopeType::llama3 || type == RopeType::yarn) known.insert("original_max_position_embeddings");
  if (type == RopeType::llama3) known.insert({"low_freq_factor", "high_freq_factor"});
  if (type == RopeType::yarn)
    known.insert({"beta_fast", "beta_slow", "mscale", "attention_factor", "truncate"});
  std::vector<std::string> unread;
  for (const auto& [key, value] : scaling.json().items())
    if (!value.is_null() && !known.contains(key)) unread.push_back(key);
  return unread;
}

void parse_rope(const ObjectReader& top, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  // If a file has both layouts, the older one (rope_theta beside rope_scaling) wins.
  const std::optional<ObjectReader> older = top.object("rope_scaling");
  const std::optional<ObjectReader> scaling = older ? older : top.object("rope_parameters");
  // Parsed before the keys that an unsupported type might need.
  if (scaling) rope.type = parse_rope_type(*scaling);

  constexpr double kMinTheta = 1.001;  // yarn divides by the logarithm of theta
  constexpr double kMaxTheta = 1e15;
  if (scaling && scaling->has("rope_theta")) {
    rope.theta = scaling->number("rope_theta", kMinTheta, kMaxTheta);
  } else {
    rope.theta = top.number_or("rope_theta", rope.theta, kMinTheta, kMaxTheta);
  }
  const auto check_partial = [](const ObjectReader& reader) {
    if (reader.number_or("partial_rotary_factor", 1.0, 0.0, 1.0) != 1.0) {
      reader.unsupported("partial_rotary_factor", " is not 1; partial rotary embeddings are not built");
    }
  };
  check_partial(top);
  if (!scaling) return;
  check_partial(*scaling);
  for (const auto& [key, value] : scaling->json().items()) {
    if (value.is_object()) {
      scaling->unsupported(printable(key).c_str(), " is an object; one rope for all layers is supported");
    }
  }
  parse_scaling(top, *scaling, rope, config.max_positions);
  config.unread_rope_keys = unread_rope_keys(*scaling, rope.type);
}

void parse_quantization(const ObjectReader& top, ModelConfig& config) {
  const std::optional<ObjectReader> quantization = top.object("quantization_config");
  if (!quantization) return;
  const std::string method = quantization->string("quant_method");
  if (method != "fp8")
    quantization->unsupported("quant_method", " is ", printable(method), "; supported is fp8");
  const std::string format = quantization->string_or("fmt", "e4m3");
  if (format != "e4m3") quantization->unsupported("fmt", " is ", printable(format), "; supported is e4m3");
  const std::string scheme = quantization->string_or("activation_scheme", "dynamic");
  if (scheme != "dynamic") {
    quantization->unsupported("activation_scheme", " is ", printable(scheme), "; supported is dynamic");
  }
  config.fp8_blocks = {128, 128};
  if (quantization->is_absent("weight_block_size")) return;
  if (quantization->is_null("weight_block_size"))
    quantization->unsupported("weight_block_size", " is null; only block-scaled fp8 is supported");
  const std::vector<std::int64_t> block = quantization->integers("weight_block_size", 1, kMaxWidth, 2);
  if (block.size() != 2)
    quantization->fail("weight_block_size", *quantization->find("weight_block_size"), "[rows, columns]");
  config.fp8_blocks = {block[0], block[1]};
}

void parse_windows(const ObjectReader& top, ModelConfig& config) {
  const bool is_qwen = config.model_type == "qwen2" || config.model_type == "qwen3";
  const bool knows_windows = is_qwen || is_mistral(config.model_type);
  const bool wants_them = !is_qwen || top.boolean_or("use_sliding_window", false);
  // transformers assumes 4096 for an absent key; an explicit null is "no window".
  const bool has_windows = knows_windows && wants_them && !top.is_null("sliding_window");
  if (has_windows) config.sliding_window = top.integer_or("sliding_window", 4096, 1, kMaxTokens);
  if (!knows_windows && top.has("sliding_window"))
    config.unread_attention_keys.emplace_back("sliding_window");
  for (const char* key : {"attention_chunk_size", "dual_chunk_attention_config"})
    if (top.has(key)) config.unread_attention_keys.emplace_back(key);
  const auto layers = static_cast<std::size_t>(config.shape.num_layers);
  if (const nlohmann::json* types = top.find("layer_types")) {
    if (!types->is_array() || types->size() != layers)
      top.fail("layer_types", *types, "an array of ", layers, " strings");
    for (const nlohmann::json& type : *types) {
      const bool is_full = type == "full_attention";
      if (!is_full && !has_windows)
        top.fail("layer_types", type, "'full_attention' in every place, as the model has no sliding window");
      if (!is_full && type != "sliding_attention") {
        top.fail("layer_types", type, "'full_attention' or 'sliding_attention' in every place");
      }
      if (has_windows) config.is_window_layer.push_back(!is_full);
    }
    return;
  }
  if (!is_qwen || !has_windows) return;  // all layers are alike
  const std::int64_t first = top.integer_or("max_window_layers", 28, 0, kMaxCount);
  for (std::int64_t layer = 0; layer < config.shape.num_layers; ++layer)
    config.is_window_layer.push_back(layer >= first);
}

void parse_grouped_query(const ObjectReader& top, ModelConfig& config, const FamilyDefaults& defaults) {
  std::int64_t kv_heads = config.shape.num_query_heads;
  if (top.is_absent("num_key_value_heads") && defaults.num_kv_heads > 0) kv_heads = defaults.num_kv_heads;
  config.shape.num_kv_heads = top.integer_or("num_key_value_heads", kv_heads, 1, kMaxCount);
  if (config.shape.num_query_heads % config.shape.num_kv_heads != 0) {
    top.fail("num_key_value_heads", nlohmann::json(config.shape.num_kv_heads),
             "a divisor of num_attention_heads, which is ", config.shape.num_query_heads);
  }
  if (top.has("head_dim")) {
    config.shape.head_dim = top.integer("head_dim", 2, kMaxHeadDim);
  } else if (defaults.head_dim > 0 && top.is_absent("head_dim")) {
    config.shape.head_dim = defaults.head_dim;
  } else {
    if (config.shape.hidden % config.shape.num_query_heads != 0) {
      top.fail("num_attention_heads", nlohmann::json(config.shape.num_query_heads),
               "a divisor of hidden_size, which is ", config.shape.hidden, ", or a head_dim");
    }
    config.shape.head_dim = config.shape.hidden / config.shape.num_query_heads;
    if (config.shape.head_dim > kMaxHeadDim) {
      top.fail("num_attention_heads", nlohmann::json(config.shape.num_query_heads), "heads of at most ",
               kMaxHeadDim);
    }
  }
  if (config.shape.head_dim % 2 != 0) {
    top.fail("head_dim", nlohmann::json(config.shape.head_dim), "an even number, because rope rotates pairs");
  }
  config.shape.value_dim = config.shape.head_dim;
  config.rope.rotary_dim = config.shape.head_dim;

  const bool attention_bias = top.boolean_or("attention_bias", false);
  if (config.model_type == "qwen2") {
    config.has_qkv_bias = true;  // a property of the architecture, whatever the key says
  } else if (config.model_type == "llama" || config.model_type == "qwen3") {
    config.has_qkv_bias = config.has_output_bias = attention_bias;
  }
  config.has_mlp_bias = config.model_type == "llama" && top.boolean_or("mlp_bias", false);
  config.has_qk_norm = config.model_type == "qwen3";
}

/// Parses the router's scoring and groups; the experts' sizes must be known.
void parse_router(const ObjectReader& top, ModelConfig& config) {
  const bool is_v3 = config.model_type == "deepseek_v3";
  const MoeShape& moe = *config.shape.moe;
  RouterConfig& router = config.router;
  const std::string scoring = top.string_or("scoring_func", is_v3 ? "sigmoid" : "softmax");
  const std::string method = top.string_or("topk_method", is_v3 ? "noaux_tc" : "greedy");
  if (is_v3 && (scoring != "sigmoid" || method != "noaux_tc")) {
    top.unsupported("topk_method", " is ", printable(method), " with scoring_func ", printable(scoring),
                    "; deepseek_v3 routers are noaux_tc with sigmoid");
  }
  if (!is_v3 && (scoring != "softmax" || (method != "greedy" && method != "group_limited_greedy"))) {
    top.unsupported("topk_method", " is ", printable(method), " with scoring_func ", printable(scoring),
                    "; deepseek_v2 routers are greedy or group_limited_greedy with softmax");
  }
  router.scale =
      static_cast<float>(top.number_or("routed_scaling_factor", is_v3 ? 2.5 : 1.0, 1e-6, kMaxFactor));
  router.scoring = is_v3 ? RouterScoring::sigmoid : RouterScoring::softmax;
  router.normalize = is_v3 && true_unless_null(top, "norm_topk_prob");  // V2's weights are never renormalised
  config.has_router_bias = is_v3;

  if (method != "greedy") {
    const auto groups = [&](const char* key, std::int64_t v3_default) {
      const std::int64_t fallback = is_v3 && top.is_absent(key) ? v3_default : 1;
      return top.integer_or(key, fallback, 1, moe.num_experts);
    };
    router.num_groups = groups("n_group", 8);
    const bool has_groups = router.num_groups > 1;
    if (has_groups && top.is_null("topk_group"))
      top.fail("topk_group", nullptr, "an integer from 1 to n_group, which is ", router.num_groups);
    router.groups_kept = has_groups || top.has("topk_group") ? groups("topk_group", 4) : 1;
  }
  if (moe.num_experts % router.num_groups != 0) {
    top.fail("n_group", nlohmann::json(router.num_groups), "a divisor of n_routed_experts, which is ",
             moe.num_experts);
  }
  const std::int64_t group_size = moe.num_experts / router.num_groups;
  if (is_v3 && router.num_groups > 1 && group_size < 2) {
    top.fail("n_group", nlohmann::json(router.num_groups), "groups of at least 2 of the ", moe.num_experts,
             " experts: a group's score is the sum of its two best");
  }
  if (router.groups_kept > router.num_groups) {
    top.fail("topk_group", nlohmann::json(router.groups_kept), "at most n_group, which is ",
             router.num_groups);
  }
  if (moe.top_k > router.groups_kept * group_size) {
    top.fail("num_experts_per_tok", nlohmann::json(moe.top_k), "at most the ",
             router.groups_kept * group_size, " experts of topk_group groups");
  }
}

void parse_experts(const ObjectReader& top, ModelConfig& config) {
  const bool is_v3 = config.model_type == "deepseek_v3";
  if (top.is_null("n_routed_experts")) return;  // a dense model
  MoeShape moe;
  moe.num_experts = top.integer("n_routed_experts", 1, kMaxRoutedExperts);
  moe.expert_ffn = top.integer("moe_intermediate_size", 1, kMaxWidth);
  const std::int64_t num_shared =
      top.is_null("n_shared_experts")
          ? 0
          : top.integer_or("n_shared_experts", is_v3 ? 1 : 2, 0, kMaxRoutedExperts);
  moe.shared_ffn = num_shared * moe.expert_ffn;
  if (moe.shared_ffn > kMaxWidth) {
    top.fail("n_shared_experts", nlohmann::json(num_shared), "at most ", kMaxWidth,
             " in moe_intermediate_size * n_shared_experts, which is ", moe.shared_ffn);
  }
  moe.top_k = is_v3 ? top.integer_or("num_experts_per_tok", 8, 1, moe.num_experts)
                    : top.integer("num_experts_per_tok", 1, moe.num_experts);
  // config.json counts the period from layer 0; MoeShape counts it from the first MoE layer.
  moe.layer_stride = top.integer_or("moe_layer_freq", 1, 1, kMaxCount);
  const std::int64_t first_dense = top.integer_or("first_k_dense_replace", is_v3 ? 3 : 0, 0, kMaxCount);
  moe.first_dense_layers = round_up(first_dense, moe.layer_stride);
  config.shape.moe = moe;
  parse_router(top, config);
}

void parse_deepseek(const ObjectReader& top, ModelConfig& config) {
  MlaShape mla;
  if (top.is_absent("q_lora_rank")) top.fail_missing("q_lora_rank", "an integer, or null for none");
  mla.q_lora_rank = top.integer_or("q_lora_rank", 0, 1, kMaxWidth);
  mla.kv_lora_rank = top.integer("kv_lora_rank", 1, kMaxWidth);
  mla.qk_nope_head_dim = top.integer("qk_nope_head_dim", 1, kMaxHeadDim);
  mla.qk_rope_head_dim = top.integer("qk_rope_head_dim", 2, kMaxHeadDim);
  mla.v_head_dim = top.integer("v_head_dim", 1, kMaxHeadDim);
  if (mla.qk_rope_head_dim % 2 != 0) {
    top.fail("qk_rope_head_dim", nlohmann::json(mla.qk_rope_head_dim),
             "an even number, because rope rotates pairs");
  }
  config.has_qkv_bias = config.has_output_bias = top.boolean_or("attention_bias", false);
  config.shape.mla = mla;
  // The checkpoint has weights of extra layers after the last, which predict further tokens.
  if (config.model_type == "deepseek_v3")
    config.num_mtp_layers = top.integer_or("num_nextn_predict_layers", 1, 0, kMaxCount);
  config.shape.num_kv_heads = 1;
  config.shape.head_dim = mla.latent_dim();
  config.shape.value_dim = mla.kv_lora_rank;
  config.has_mlp_bias = config.model_type == "deepseek_v2" && top.boolean_or("mlp_bias", false);
  config.rope.rotary_dim = mla.qk_rope_head_dim;
  // V2 has no such key: it always rotates interleaved pairs.
  config.rope.is_interleaved = config.model_type == "deepseek_v2" || true_unless_null(top, "rope_interleave");
  parse_experts(top, config);
  if (config.has_mlp_bias && config.shape.moe && config.shape.moe->shared_ffn == 0)
    top.unsupported("mlp_bias", " is true with n_shared_experts 0: biases of shared experts that are none");
}

/// Leaves out sizes that no layer uses, because they must not forbid a topology. Dense layers are the first
/// layers and those between MoE layers.
void drop_unused_sizes(ModelShape& shape) {
  if (shape.moe && shape.moe->first_dense_layers >= shape.num_layers) shape.moe.reset();
  const bool has_dense_layers = !shape.moe || shape.moe->first_dense_layers > 0 ||
                                (shape.moe->layer_stride > 1 && shape.num_layers > 1);
  if (!has_dense_layers) shape.ffn = 0;
}

}  // namespace

ModelConfig parse_model_config(std::string_view json, std::string_view file, DType absent_dtype) {
  const nlohmann::json document = parse_strict_json(json, file);
  HELIX_EXPECTS(document.is_object(), ErrorCode::invalid_file, file, ": is a JSON ", document.type_name(),
                "; expected an object");
  const ObjectReader top(document, file, "");

  ModelConfig config;
  config.model_type = top.string("model_type");
  const FamilyDefaults defaults = family_defaults(top, config.model_type);

  const std::string activation = top.string_or("hidden_act", "silu");
  if (activation != "silu" && activation != "swish")  // two names of one function
    top.unsupported("hidden_act", " is ", printable(activation), "; supported is silu");
  if (top.has("per_layer_config"))
    top.unsupported("per_layer_config", " is given; layers that differ by it are not built");
  if (!true_unless_null(top, "is_causal"))
    top.unsupported("is_causal", " is not true; a decoder's attention is causal");
  constexpr std::string_view kWeights = "model.safetensors";
  if (top.string_or("transformers_weights", "model.safetensors") != kWeights)
    top.unsupported("transformers_weights", " names another file than ", kWeights,
                    ", which is read: rename it, or leave the key out");
  config.shape.hidden = top.integer("hidden_size", 1, kMaxWidth);
  config.shape.ffn = top.integer("intermediate_size", 1, kMaxWidth);
  config.shape.num_layers = top.integer("num_hidden_layers", 1, kMaxCount);
  config.shape.num_query_heads = top.integer("num_attention_heads", 1, kMaxCount);
  config.shape.vocab = top.integer("vocab_size", 1, kMaxVocabulary);
  config.max_positions = top.integer_or("max_position_embeddings", defaults.max_positions, 1, kMaxTokens);
  config.rms_norm_eps = static_cast<float>(top.number_or("rms_norm_eps", 1e-6, 1e-20, 1.0));
  config.tie_word_embeddings = top.boolean_or("tie_word_embeddings", false);
  config.dtype = parse_dtype_key(top, absent_dtype);
  config.eos_ids = top.token_ids("eos_token_id", kMaxEosIds);
  if (top.is_absent("eos_token_id") && defaults.eos_id >= 0) config.eos_ids = {defaults.eos_id};

  if (defaults.is_deepseek) {
    parse_deepseek(top, config);
  } else {
    parse_grouped_query(top, config, defaults);
  }
  parse_windows(top, config);
  parse_rope(top, config);
  // Some files leave max_position_embeddings at the trained length, as Qwen's instructions say.
  if (config.rope.type == RopeType::yarn) {
    const double extended =
        config.rope.factor * static_cast<double>(config.rope.original_max_position_embeddings);
    config.max_positions = std::max(
        config.max_positions, static_cast<std::int64_t>(std::min(extended, static_cast<double>(kMaxTokens))));
  }
  parse_quantization(top, config);
  drop_unused_sizes(config.shape);
  return config;
}

ModelConfig read_model_config(const Checkpoint& checkpoint) {
  const TensorInfo* embedding = checkpoint.find("model.embed_tokens.weight").tensor;
  const TensorInfo* head = checkpoint.find("lm_head.weight").tensor;
  const TensorInfo* table = embedding != nullptr ? embedding : head;
  const bool is_plain = table != nullptr && table->dtype && *table->dtype != DType::fp8_e4m3;
  ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path(),
                                          is_plain ? *table->dtype : DType::bf16);
  if (embedding != nullptr && head != nullptr) config.tie_word_embeddings = false;
  return config;
}

}  // namespace helix::decode
