// SPDX-License-Identifier: Apache-2.0
// Reading config.json, and the rope and softmax constants that follow from it.
#include "model_config.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "strict_json.hpp"

namespace helix::decode {
namespace {

constexpr std::int64_t kMaxDim = std::int64_t{1} << 24;
constexpr std::int64_t kMaxHeadDim = std::int64_t{1} << 16;
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 20;
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;
constexpr std::int64_t kMaxExperts = std::int64_t{1} << 16;
constexpr std::int64_t kMaxVocab = std::int64_t{1} << 28;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 40;
constexpr std::int64_t kMaxTokenId = (std::int64_t{1} << 31) - 1;
constexpr std::size_t kMaxEosIds = 1024;
constexpr double kMaxFactor = 1e6;

constexpr std::string_view kSupportedModels = "llama, mistral, qwen2, qwen3, deepseek_v2, deepseek_v3";

/// Reads typed, bounded values out of one JSON object. A key that is null counts as given only for is_null().
class ObjectReader {
 public:
  ObjectReader(const nlohmann::json& object, std::string_view file, std::string prefix)
      : object_(object), file_(file), prefix_(std::move(prefix)) {}

  bool has(const char* key) const { return find(key) != nullptr; }
  bool is_null(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && found->is_null();
  }
  bool is_absent(const char* key) const { return object_.find(key) == object_.end(); }

  std::int64_t integer(const char* key, std::int64_t low, std::int64_t high) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) fail_missing(key, "an integer from ", low, " to ", high);
    return checked_integer(*value, key, low, high);
  }

  std::int64_t integer_or(const char* key, std::int64_t fallback, std::int64_t low, std::int64_t high) const {
    return has(key) ? integer(key, low, high) : fallback;
  }

  double number(const char* key, double low, double high) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) fail_missing(key, "a number from ", low, " to ", high);
    if (!value->is_number()) fail(key, *value, "a number from ", low, " to ", high);
    const auto result = value->get<double>();
    if (!(result >= low && result <= high)) fail(key, *value, "a number from ", low, " to ", high);
    return result;
  }

  double number_or(const char* key, double fallback, double low, double high) const {
    return has(key) ? number(key, low, high) : fallback;
  }

  bool boolean_or(const char* key, bool fallback) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) fail(key, *value, "true or false");
    return value->get<bool>();
  }

  std::string string(const char* key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) fail_missing(key, "a string");
    if (!value->is_string()) fail(key, *value, "a string");
    return value->get<std::string>();
  }

  std::string string_or(const char* key, const char* fallback) const {
    return has(key) ? string(key) : fallback;
  }

  /// The object under `key`; nullopt if it is absent, null or empty.
  std::optional<ObjectReader> object(const char* key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_object()) fail(key, *value, "an object");
    if (value->empty()) return std::nullopt;
    return ObjectReader(*value, file_, prefix_ + key + ".");
  }

  /// One integer or a list of them, as eos_token_id is written.
  std::vector<std::int64_t> integers(const char* key, std::int64_t low, std::int64_t high,
                                     std::size_t max_size) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_array()) return {checked_integer(*value, key, low, high)};
    if (value->size() > max_size) fail(key, *value, "at most ", max_size, " integers");
    std::vector<std::int64_t> result;
    for (const nlohmann::json& entry : *value) result.push_back(checked_integer(entry, key, low, high));
    return result;
  }

  /// nullptr if absent or null.
  const nlohmann::json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  const nlohmann::json& json() const { return object_; }

  template <class... Parts>
  [[noreturn]] void fail(const char* key, const nlohmann::json& value, const Parts&... expected) const {
    throw Error(ErrorCode::invalid_file, file_, ": ", prefix_, key, " is ", shown(value), "; expected ",
                expected...);
  }

  template <class... Parts>
  [[noreturn]] void fail_missing(const char* key, const Parts&... expected) const {
    throw Error(ErrorCode::invalid_file, file_, ": ", prefix_, key, " is missing; expected ", expected...);
  }

  template <class... Parts>
  [[noreturn]] void unsupported(const char* key, const Parts&... parts) const {
    throw Error(ErrorCode::unsupported, file_, ": ", prefix_, key, parts...);
  }

 private:
  static std::string shown(const nlohmann::json& value) {
    if (value.is_string()) return printable(value.get_ref<const std::string&>());
    if (value.is_structured())
      return std::string("an ") + value.type_name() + " of " + std::to_string(value.size());
    return value.dump();
  }

  std::int64_t checked_integer(const nlohmann::json& value, const char* key, std::int64_t low,
                               std::int64_t high) const {
    const bool fits = value.is_number_unsigned()
                          ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxPositions)
                          : value.is_number_integer();
    const std::int64_t result = fits ? value.get<std::int64_t>() : 0;
    if (!fits || result < low || result > high) fail(key, value, "an integer from ", low, " to ", high);
    return result;
  }

  const nlohmann::json& object_;
  std::string_view file_;
  std::string prefix_;
};

/// What transformers assumes of a family when a key is absent.
struct FamilyDefaults {
  std::int64_t num_kv_heads = 0;  // 0: as many as query heads
  std::int64_t head_dim = 0;      // 0: hidden / heads
  std::int64_t max_positions = 2048;
};

void parse_rope(const ObjectReader& top, RopeConfig& rope, std::int64_t max_positions) {
  // The older layout (rope_theta beside rope_scaling) wins over the newer one where a file has both.
  const std::optional<ObjectReader> older = top.object("rope_scaling");
  const std::optional<ObjectReader> scaling = older ? older : top.object("rope_parameters");

  constexpr double kMinTheta = 1.0 + 1e-6;  // yarn divides by its logarithm
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

  const char* type_key = scaling->has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling->string_or(type_key, "default");
  if (type == "default") return;
  if (type == "linear") {
    rope.type = RopeType::linear;
  } else if (type == "llama3") {
    rope.type = RopeType::llama3;
  } else if (type == "yarn") {
    rope.type = RopeType::yarn;
  } else {
    scaling->unsupported(type_key, " is ", printable(type), "; supported are default, linear, llama3, yarn");
  }

  if (rope.type == RopeType::llama3 || rope.type == RopeType::yarn) {
    const ObjectReader& source = top.has("original_max_position_embeddings") ? top : *scaling;
    rope.original_max_position_embeddings =
        source.integer_or("original_max_position_embeddings", max_positions, 1, kMaxPositions);
  }
  if (rope.type == RopeType::yarn && scaling->is_null("factor")) {
    rope.factor =
        static_cast<double>(max_positions) / static_cast<double>(rope.original_max_position_embeddings);
  } else {
    rope.factor = scaling->number("factor", 1.0, kMaxFactor);
  }
  if (rope.type == RopeType::llama3) {
    rope.low_freq_factor = scaling->number("low_freq_factor", 1e-6, kMaxFactor);
    rope.high_freq_factor = scaling->number("high_freq_factor", 1e-6, kMaxFactor);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      scaling->fail("high_freq_factor", *scaling->find("high_freq_factor"),
                    "more than low_freq_factor, which is ", rope.low_freq_factor);
    }
  }
  if (rope.type == RopeType::yarn) {
    // Zero means "not given" for these, as in transformers.
    const auto or_default = [&](const char* key, double fallback) {
      const nlohmann::json* value = scaling->find(key);
      return value == nullptr || *value == 0 ? fallback : scaling->number(key, 1e-3, kMaxFactor);
    };
    rope.beta_fast = or_default("beta_fast", 32.0);
    rope.beta_slow = or_default("beta_slow", 1.0);
    if (rope.beta_fast < rope.beta_slow) {
      scaling->fail("beta_fast", nlohmann::json(rope.beta_fast), "at least beta_slow, which is ",
                    rope.beta_slow);
    }
    rope.mscale = or_default("mscale", 0.0);
    rope.mscale_all_dim = or_default("mscale_all_dim", 0.0);
    if (scaling->has("attention_factor"))
      rope.attention_factor = scaling->number("attention_factor", 1e-6, kMaxFactor);
    rope.truncate = scaling->boolean_or("truncate", true);
  }
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
  if (!quantization->has("weight_block_size")) {
    quantization->unsupported("weight_block_size", " is absent; only block-scaled fp8 is supported");
  }
  const std::vector<std::int64_t> block = quantization->integers("weight_block_size", 1, kMaxDim, 2);
  if (block.size() != 2)
    quantization->fail("weight_block_size", *quantization->find("weight_block_size"), "[rows, columns]");
  config.fp8_blocks = {block[0], block[1]};
}

void parse_windows(const ObjectReader& top, ModelConfig& config) {
  if (config.model_type == "mistral") {
    // transformers assumes 4096 for an absent key; an explicit null is "no window".
    if (!top.is_null("sliding_window"))
      config.sliding_window = top.integer_or("sliding_window", 4096, 1, kMaxPositions);
    return;
  }
  if (config.model_type != "qwen2" && config.model_type != "qwen3") return;
  if (!top.boolean_or("use_sliding_window", false) || top.is_null("sliding_window")) return;
  config.sliding_window = top.integer_or("sliding_window", 4096, 1, kMaxPositions);
  const auto layers = static_cast<std::size_t>(config.num_layers);
  if (const nlohmann::json* types = top.find("layer_types")) {
    if (!types->is_array() || types->size() != layers)
      top.fail("layer_types", *types, "an array of ", layers, " strings");
    for (const nlohmann::json& type : *types) {
      const bool is_full = type == "full_attention";
      if (!is_full && type != "sliding_attention") {
        top.fail("layer_types", type, "'full_attention' or 'sliding_attention' in every place");
      }
      config.is_window_layer.push_back(!is_full);
    }
    return;
  }
  const std::int64_t first = top.integer_or("max_window_layers", 28, 0, kMaxLayers);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    config.is_window_layer.push_back(layer >= first);
}

void parse_grouped_query(const ObjectReader& top, ModelConfig& config, const FamilyDefaults& defaults) {
  std::int64_t kv_heads = config.num_query_heads;
  if (top.is_absent("num_key_value_heads") && defaults.num_kv_heads > 0) kv_heads = defaults.num_kv_heads;
  config.num_kv_heads = top.integer_or("num_key_value_heads", kv_heads, 1, kMaxHeads);
  if (config.num_query_heads % config.num_kv_heads != 0) {
    top.fail("num_key_value_heads", nlohmann::json(config.num_kv_heads),
             "a divisor of num_attention_heads, which is ", config.num_query_heads);
  }
  if (top.has("head_dim")) {
    config.head_dim = top.integer("head_dim", 2, kMaxHeadDim);
  } else if (defaults.head_dim > 0 && top.is_absent("head_dim")) {
    config.head_dim = defaults.head_dim;
  } else {
    if (config.hidden % config.num_query_heads != 0) {
      top.fail("num_attention_heads", nlohmann::json(config.num_query_heads),
               "a divisor of hidden_size, which is ", config.hidden, ", or a head_dim");
    }
    config.head_dim = config.hidden / config.num_query_heads;
    if (config.head_dim > kMaxHeadDim) {
      top.fail("num_attention_heads", nlohmann::json(config.num_query_heads), "heads of at most ",
               kMaxHeadDim);
    }
  }
  if (config.head_dim % 2 != 0) {
    top.fail("head_dim", nlohmann::json(config.head_dim), "an even number, because rope rotates pairs");
  }
  config.rope.rotary_dim = config.head_dim;

  const bool attention_bias = top.boolean_or("attention_bias", false);
  if (config.model_type == "qwen2") {
    config.has_qkv_bias = true;  // the architecture's, whatever the key says
  } else if (config.model_type == "llama" || config.model_type == "qwen3") {
    config.has_qkv_bias = config.has_output_bias = attention_bias;
  }
  config.has_mlp_bias = config.model_type == "llama" && top.boolean_or("mlp_bias", false);
  config.has_qk_norm = config.model_type == "qwen3";
  parse_windows(top, config);
}

void parse_experts(const ObjectReader& top, ModelConfig& config) {
  const bool is_v3 = config.model_type == "deepseek_v3";
  if (top.is_null("n_routed_experts")) return;  // a dense model
  MoeConfig moe;
  moe.num_experts = top.integer("n_routed_experts", 1, kMaxExperts);
  moe.expert_ffn = top.integer("moe_intermediate_size", 1, kMaxDim);
  moe.num_shared_experts =
      top.is_null("n_shared_experts") ? 0 : top.integer_or("n_shared_experts", is_v3 ? 1 : 2, 0, kMaxExperts);
  if (moe.shared_ffn() > kMaxDim) {
    top.fail("n_shared_experts", nlohmann::json(moe.num_shared_experts), "at most ", kMaxDim,
             " in moe_intermediate_size * n_shared_experts, which is ", moe.shared_ffn());
  }
  moe.top_k = is_v3 ? top.integer_or("num_experts_per_tok", 8, 1, moe.num_experts)
                    : top.integer("num_experts_per_tok", 1, moe.num_experts);
  moe.first_dense_layers = top.integer_or("first_k_dense_replace", is_v3 ? 3 : 0, 0, kMaxLayers);
  moe.layer_freq = top.integer_or("moe_layer_freq", 1, 1, kMaxLayers);
  moe.routed_scaling_factor =
      static_cast<float>(top.number_or("routed_scaling_factor", is_v3 ? 2.5 : 1.0, 1e-6, kMaxFactor));

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
  moe.scoring = is_v3 ? RouterScoring::sigmoid : RouterScoring::softmax;
  moe.has_router_bias = is_v3;
  moe.normalize = is_v3 && top.boolean_or("norm_topk_prob", true);  // V2's weights are never renormalised

  if (method == "greedy") {
    moe.num_groups = moe.groups_kept = 1;
  } else {
    const auto groups = [&](const char* key, std::int64_t v3_default) {
      const std::int64_t fallback = is_v3 && top.is_absent(key) ? v3_default : 1;
      return top.integer_or(key, fallback, 1, moe.num_experts);
    };
    moe.num_groups = groups("n_group", 8);
    moe.groups_kept = groups("topk_group", 4);
  }
  if (moe.num_experts % moe.num_groups != 0) {
    top.fail("n_group", nlohmann::json(moe.num_groups), "a divisor of n_routed_experts, which is ",
             moe.num_experts);
  }
  const std::int64_t group_size = moe.num_experts / moe.num_groups;
  if (is_v3 && moe.num_groups > 1 && group_size < 2) {
    top.fail("n_group", nlohmann::json(moe.num_groups), "groups of at least 2 of the ", moe.num_experts,
             " experts: a group's score is the sum of its two best");
  }
  if (moe.groups_kept > moe.num_groups) {
    top.fail("topk_group", nlohmann::json(moe.groups_kept), "at most n_group, which is ", moe.num_groups);
  }
  if (moe.top_k > moe.groups_kept * group_size) {
    top.fail("num_experts_per_tok", nlohmann::json(moe.top_k), "at most the ", moe.groups_kept * group_size,
             " experts of topk_group groups");
  }
  config.moe = moe;
}

void parse_deepseek(const ObjectReader& top, ModelConfig& config) {
  MlaConfig mla;
  if (top.is_absent("q_lora_rank")) top.fail_missing("q_lora_rank", "an integer, or null for none");
  mla.q_lora_rank = top.integer_or("q_lora_rank", 0, 1, kMaxDim);
  mla.kv_lora_rank = top.integer("kv_lora_rank", 1, kMaxDim);
  mla.qk_nope_head_dim = top.integer("qk_nope_head_dim", 1, kMaxHeadDim);
  mla.qk_rope_head_dim = top.integer("qk_rope_head_dim", 2, kMaxHeadDim);
  mla.v_head_dim = top.integer("v_head_dim", 1, kMaxHeadDim);
  if (mla.qk_rope_head_dim % 2 != 0) {
    top.fail("qk_rope_head_dim", nlohmann::json(mla.qk_rope_head_dim),
             "an even number, because rope rotates pairs");
  }
  if (top.boolean_or("attention_bias", false)) {
    top.unsupported("attention_bias", " is true; latent attention with biases is not built");
  }
  config.mla = mla;
  config.num_kv_heads = 1;
  config.head_dim = mla.kv_lora_rank + mla.qk_rope_head_dim;
  config.has_mlp_bias = config.model_type == "deepseek_v2" && top.boolean_or("mlp_bias", false);
  config.rope.rotary_dim = mla.qk_rope_head_dim;
  config.rope.is_interleaved = top.boolean_or("rope_interleave", true);
  parse_experts(top, config);
}

/// yarn's 0.1 * mscale * ln(scale) + 1.
double yarn_mscale(double scale, double mscale) {
  return scale <= 1.0 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0;
}

/// Piecewise scaling by wavelength: short waves stay, long ones are slowed by `factor`, in between a blend.
void scale_llama3(const RopeConfig& rope, std::vector<float>& frequencies) {
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const auto low_wavelength = static_cast<float>(context / rope.low_freq_factor);
  const auto high_wavelength = static_cast<float>(context / rope.high_freq_factor);
  const auto factor = static_cast<float>(rope.factor);
  for (float& frequency : frequencies) {
    const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / frequency;
    if (wavelength > low_wavelength) {
      frequency /= factor;
    } else if (!(wavelength < high_wavelength)) {
      const float smooth =
          (static_cast<float>(context) / wavelength - static_cast<float>(rope.low_freq_factor)) /
          static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
      frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
    }
  }
}

/// A ramp over the dimensions between fast rotations (kept) and slow ones (interpolated).
void scale_yarn(const RopeConfig& rope, std::vector<float>& frequencies) {
  const auto dim = static_cast<double>(rope.rotary_dim);
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const auto correction_dim = [&](double rotations) {
    return dim * std::log(context / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(rope.theta));
  };
  double low = correction_dim(rope.beta_fast);
  double high = correction_dim(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (static_cast<float>(high - low) == 0.0f) high += 0.001;  // no division by zero

  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const auto position = static_cast<float>(2 * i) / static_cast<float>(rope.rotary_dim);
    const float period = std::pow(static_cast<float>(rope.theta), position);
    const float kept = 1.0f / period;
    const float interpolated = 1.0f / (static_cast<float>(rope.factor) * period);
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    frequencies[i] = interpolated * (1.0f - keep) + kept * keep;
  }
}

}  // namespace

ModelShape ModelConfig::shape() const {
  ModelShape shape;
  shape.num_query_heads = num_query_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.value_dim = mla ? mla->kv_lora_rank : head_dim;
  shape.hidden = hidden;
  shape.vocab = vocab;
  shape.num_layers = num_layers;
  if (mla) {
    shape.mla = MlaShape{.q_lora_rank = mla->q_lora_rank,
                         .kv_lora_rank = mla->kv_lora_rank,
                         .qk_nope_head_dim = mla->qk_nope_head_dim,
                         .qk_rope_head_dim = mla->qk_rope_head_dim,
                         .v_head_dim = mla->v_head_dim};
  }
  // A size that no layer uses must not forbid a topology. Dense layers are the first ones and the gaps of
  // layer_freq.
  const bool has_moe = moe && moe->first_dense_layers < num_layers &&
                       (num_layers - 1) / moe->layer_freq * moe->layer_freq >= moe->first_dense_layers;
  const bool has_dense = !has_moe || moe->first_dense_layers > 0 || (moe->layer_freq > 1 && num_layers > 1);
  if (has_dense) shape.ffn = ffn;
  if (has_moe) {
    const std::int64_t freq = moe->layer_freq;
    shape.moe = MoeShape{.num_experts = moe->num_experts,
                         .top_k = moe->top_k,
                         .expert_ffn = moe->expert_ffn,
                         .shared_ffn = moe->shared_ffn(),
                         .first_dense_layers = (moe->first_dense_layers + freq - 1) / freq * freq,
                         .layer_stride = freq};
  }
  return shape;
}

bool ModelConfig::is_moe_layer(std::int64_t layer) const {
  return moe && layer >= moe->first_dense_layers && layer % moe->layer_freq == 0;
}

std::int64_t ModelConfig::window(std::int64_t layer) const {
  const bool applies = is_window_layer.empty() || is_window_layer.at(static_cast<std::size_t>(layer));
  return applies ? sliding_window : 0;
}

std::vector<float> ModelConfig::inverse_frequencies() const {
  std::vector<float> frequencies(static_cast<std::size_t>(rope.rotary_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float position = static_cast<float>(2 * i) / static_cast<float>(rope.rotary_dim);
    frequencies[i] = 1.0f / std::pow(static_cast<float>(rope.theta), position);
  }
  switch (rope.type) {
    case RopeType::standard:
      break;
    case RopeType::linear:
      for (float& frequency : frequencies) frequency /= static_cast<float>(rope.factor);
      break;
    case RopeType::llama3:
      scale_llama3(rope, frequencies);
      break;
    case RopeType::yarn:
      scale_yarn(rope, frequencies);
      break;
  }
  return frequencies;
}

float ModelConfig::rope_magnitude() const {
  if (rope.type != RopeType::yarn) return 1.0f;
  if (rope.attention_factor) return static_cast<float>(*rope.attention_factor);
  if (rope.mscale != 0.0 && rope.mscale_all_dim != 0.0) {
    return static_cast<float>(yarn_mscale(rope.factor, rope.mscale) /
                              yarn_mscale(rope.factor, rope.mscale_all_dim));
  }
  return static_cast<float>(yarn_mscale(rope.factor, 1.0));
}

float ModelConfig::softmax_scale() const {
  if (!mla) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  double scale = 1.0 / std::sqrt(static_cast<double>(mla->qk_head_dim()));
  if (rope.type == RopeType::yarn && rope.mscale_all_dim != 0.0) {
    const double m = yarn_mscale(rope.factor, rope.mscale_all_dim);
    scale *= m * m;
  }
  return static_cast<float>(scale);
}

ModelConfig parse_model_config(std::string_view json, std::string_view file) {
  const nlohmann::json document = parse_strict_json(json, file);
  HELIX_EXPECTS(document.is_object(), ErrorCode::invalid_file, file, ": is a JSON ", document.type_name(),
                "; expected an object");
  const ObjectReader top(document, file, "");

  ModelConfig config;
  config.model_type = top.string("model_type");
  FamilyDefaults defaults;
  bool is_deepseek = false;
  if (config.model_type == "llama") {
    defaults = {0, 0, 2048};
  } else if (config.model_type == "mistral") {
    defaults = {8, 0, 131072};
  } else if (config.model_type == "qwen2") {
    defaults = {32, 0, 32768};
  } else if (config.model_type == "qwen3") {
    defaults = {32, 128, 32768};
  } else if (config.model_type == "deepseek_v2" || config.model_type == "deepseek_v3") {
    is_deepseek = true;
    defaults = {0, 0, config.model_type == "deepseek_v2" ? 2048 : 4096};
  } else {
    top.unsupported("model_type", " is ", printable(config.model_type), "; supported are ", kSupportedModels);
  }

  const std::string activation = top.string_or("hidden_act", "silu");
  if (activation != "silu")
    top.unsupported("hidden_act", " is ", printable(activation), "; supported is silu");
  config.hidden = top.integer("hidden_size", 1, kMaxDim);
  config.ffn = top.integer("intermediate_size", 1, kMaxDim);
  config.num_layers = top.integer("num_hidden_layers", 1, kMaxLayers);
  config.num_query_heads = top.integer("num_attention_heads", 1, kMaxHeads);
  config.vocab = top.integer("vocab_size", 1, kMaxVocab);
  config.max_positions = top.integer_or("max_position_embeddings", defaults.max_positions, 1, kMaxPositions);
  config.rms_norm_eps = static_cast<float>(top.number_or("rms_norm_eps", 1e-6, 1e-20, 1.0));
  config.tie_word_embeddings = top.boolean_or("tie_word_embeddings", false);
  const char* dtype_key = top.has("dtype") ? "dtype" : "torch_dtype";
  const std::string dtype = top.string_or(dtype_key, "bfloat16");
  if (dtype == "float32") {
    config.dtype = DType::f32;
  } else if (dtype == "float16") {
    config.dtype = DType::f16;
  } else if (dtype != "bfloat16") {
    top.unsupported(dtype_key, " is ", printable(dtype), "; supported are bfloat16, float16, float32");
  }
  config.eos_ids = top.integers("eos_token_id", 0, kMaxTokenId, kMaxEosIds);

  if (is_deepseek) {
    parse_deepseek(top, config);
  } else {
    parse_grouped_query(top, config, defaults);
  }
  parse_rope(top, config.rope, config.max_positions);
  parse_quantization(top, config);
  return config;
}

}  // namespace helix::decode
