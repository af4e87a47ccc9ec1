// SPDX-License-Identifier: Apache-2.0
// Tiny checkpoints on disk. Each element follows from its tensor's name and its indices.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.hpp"
#include "decode/checkpoint_files.hpp"
#include "model/parse_config.hpp"

namespace helix::decode::test {

/// A tiny model on disk, with every tensor filled by element().
class ModelOnDisk {
 public:
  explicit ModelOnDisk(nlohmann::json config, DType dtype = DType::bf16)
      : config_json_(std::move(config)), dtype_(dtype) {
    hidden_ = config_json_.at("hidden_size");
    const std::int64_t layers = config_json_.at("num_hidden_layers");
    const std::int64_t vocab = config_json_.at("vocab_size");
    linear("model.embed_tokens.weight", vocab, hidden_, false);
    if (!config_json_.value("tie_word_embeddings", false)) linear("lm_head.weight", vocab, hidden_, false);
    vector("model.norm.weight", hidden_);
    for (std::int64_t layer = 0; layer < layers; ++layer) add_layer(layer);
    directory_.write("config.json", config_json_.dump());
    directory_.write("model.safetensors", safetensors_of(tensors_, 3));
  }

  ModelConfig config() const { return parse_model_config(config_json_.dump(), "config.json"); }
  Checkpoint checkpoint() const { return Checkpoint(directory_.path()); }
  const std::vector<TensorContent>& tensors() const { return tensors_; }
  /// Writes another file with tensors of the same names.
  void replace(std::vector<TensorContent> tensors) {
    tensors_ = std::move(tensors);
    align(3);
  }
  /// Rewrites the file so that its data begins `remainder` bytes after a multiple of 64.
  void align(std::size_t remainder) const {
    directory_.write("model.safetensors", safetensors_at(remainder, tensors_));
  }
  const ScratchDirectory& directory() const { return directory_; }

  /// The expected value of a loaded element, computed from its name and indices.
  float value(const std::string& tensor, std::int64_t row, std::int64_t col) const {
    const auto plain = static_cast<float>(element(tensor, row, col));
    return is_fp8_.contains(tensor) ? plain * scale(row / 128, col / 128) : plain;
  }

 private:
  static float scale(std::int64_t block_row, std::int64_t block_col) {
    return 0.375f + static_cast<float>(block_row) + 0.0625f * static_cast<float>(block_col);
  }

  std::int64_t size(const char* key) const { return config_json_.at(key); }

  void vector(const std::string& name, std::int64_t size) {
    tensors_.push_back(filled(name, 0, size, dtype_));
  }

  void linear(const std::string& name, std::int64_t rows, std::int64_t cols, bool may_be_fp8 = true) {
    if (!may_be_fp8 || !config_json_.contains("quantization_config")) {
      tensors_.push_back(filled(name, rows, cols, dtype_));
      return;
    }
    is_fp8_.insert(name);
    tensors_.push_back(filled(name, rows, cols, DType::fp8_e4m3));
    TensorContent scales{name + "_scale_inv", "F32", {(rows + 127) / 128, (cols + 127) / 128}, ""};
    for (std::int64_t row = 0; row < scales.shape[0]; ++row) {
      for (std::int64_t col = 0; col < scales.shape[1]; ++col) {
        const float factor = scale(row, col);
        scales.data.append(reinterpret_cast<const char*>(&factor), sizeof(factor));
      }
    }
    tensors_.push_back(std::move(scales));
  }

  void ffn(const std::string& prefix, std::int64_t width, bool has_bias) {
    linear(prefix + "gate_proj.weight", width, hidden_);
    linear(prefix + "up_proj.weight", width, hidden_);
    linear(prefix + "down_proj.weight", hidden_, width);
    if (!has_bias) return;
    vector(prefix + "gate_proj.bias", width);
    vector(prefix + "up_proj.bias", width);
    vector(prefix + "down_proj.bias", hidden_);
  }

  void add_layer(std::int64_t layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    vector(prefix + "input_layernorm.weight", hidden_);
    vector(prefix + "post_attention_layernorm.weight", hidden_);
    const bool is_mla = config_json_.contains("kv_lora_rank");
    if (is_mla) {
      add_latent_attention(prefix + "self_attn.");
    } else {
      add_grouped_query_attention(prefix + "self_attn.");
    }
    if (is_mla && layer >= size("first_k_dense_replace")) {
      add_experts(prefix + "mlp.");
    } else {
      ffn(prefix + "mlp.", size("intermediate_size"), config_json_.value("mlp_bias", false));
    }
  }

  void add_latent_attention(const std::string& attention) {
    const std::int64_t heads = size("num_attention_heads");
    const std::int64_t nope = size("qk_nope_head_dim");
    const std::int64_t rope = size("qk_rope_head_dim");
    const std::int64_t value_dim = size("v_head_dim");
    const std::int64_t latent = size("kv_lora_rank");
    const bool bias = config_json_.value("attention_bias", false);
    if (config_json_.at("q_lora_rank").is_null()) {
      linear(attention + "q_proj.weight", heads * (nope + rope), hidden_);
    } else {
      const std::int64_t q_lora = size("q_lora_rank");
      linear(attention + "q_a_proj.weight", q_lora, hidden_);
      if (bias) vector(attention + "q_a_proj.bias", q_lora);
      vector(attention + "q_a_layernorm.weight", q_lora);
      linear(attention + "q_b_proj.weight", heads * (nope + rope), q_lora);
    }
    linear(attention + "kv_a_proj_with_mqa.weight", latent + rope, hidden_);
    if (bias) vector(attention + "kv_a_proj_with_mqa.bias", latent + rope);
    vector(attention + "kv_a_layernorm.weight", latent);
    linear(attention + "kv_b_proj.weight", heads * (nope + value_dim), latent);
    linear(attention + "o_proj.weight", hidden_, heads * value_dim);
    if (bias) vector(attention + "o_proj.bias", hidden_);
  }

  void add_grouped_query_attention(const std::string& attention) {
    const std::int64_t heads = size("num_attention_heads");
    const std::int64_t dim = size("head_dim");
    const std::int64_t kv_heads = size("num_key_value_heads");
    const std::string type = config_json_.at("model_type");
    const bool bias = config_json_.value("attention_bias", false);
    for (const auto& [name, count] :
         {std::pair("q_proj", heads), std::pair("k_proj", kv_heads), std::pair("v_proj", kv_heads)}) {
      linear(attention + name + ".weight", count * dim, hidden_);
      if (bias || type == "qwen2") vector(attention + name + ".bias", count * dim);
    }
    linear(attention + "o_proj.weight", hidden_, heads * dim);
    if (bias) vector(attention + "o_proj.bias", hidden_);
    if (type == "qwen3") {
      vector(attention + "q_norm.weight", dim);
      vector(attention + "k_norm.weight", dim);
    }
  }

  void add_experts(const std::string& mlp) {
    const std::int64_t experts = size("n_routed_experts");
    const std::int64_t expert_ffn = size("moe_intermediate_size");
    linear(mlp + "gate.weight", experts, hidden_, false);
    if (config_json_.at("model_type") == "deepseek_v3") vector(mlp + "gate.e_score_correction_bias", experts);
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      ffn(mlp + "experts." + std::to_string(expert) + ".", expert_ffn, false);
    }
    if (size("n_shared_experts") > 0) {
      ffn(mlp + "shared_experts.", size("n_shared_experts") * expert_ffn,
          config_json_.value("mlp_bias", false));
    }
  }

  nlohmann::json config_json_;
  DType dtype_;
  std::int64_t hidden_ = 0;
  std::vector<TensorContent> tensors_;
  std::set<std::string> is_fp8_;
  ScratchDirectory directory_;
};

inline nlohmann::json llama() {
  return {{"model_type", "llama"},  {"hidden_size", 24},        {"intermediate_size", 48},
          {"num_hidden_layers", 2}, {"num_attention_heads", 8}, {"num_key_value_heads", 4},
          {"head_dim", 6},          {"vocab_size", 37}};
}

inline nlohmann::json deepseek(const std::string& type = "deepseek_v3") {
  return {{"model_type", type},
          {"hidden_size", 24},
          {"intermediate_size", 48},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 8},
          {"vocab_size", 37},
          {"q_lora_rank", 10},
          {"kv_lora_rank", 12},
          {"qk_nope_head_dim", 5},
          {"qk_rope_head_dim", 4},
          {"v_head_dim", 7},
          {"n_routed_experts", 4},
          {"n_shared_experts", 2},
          {"moe_intermediate_size", 16},
          {"num_experts_per_tok", 2},
          {"n_group", 1},
          {"topk_group", 1},
          {"first_k_dense_replace", 1},
          {"topk_method", type == "deepseek_v3" ? "noaux_tc" : "greedy"}};
}

inline const nlohmann::json kFp8 = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};

}  // namespace helix::decode::test
