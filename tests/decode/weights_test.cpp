// SPDX-License-Identifier: Apache-2.0
// Weight slices: which rectangle of which tensor each rank takes, and that loading puts exactly that there.
#include "weights.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>
#include <helix/topology.hpp>

#include "checkpoint.hpp"
#include "decode/checkpoint_files.hpp"
#include "model_config.hpp"
#include "support/catch.hpp"

using namespace helix;
using namespace helix::decode;
using namespace helix::decode::test;
using nlohmann::json;

namespace {

/// Memory that starts as NaN, so that what is not loaded shows.
struct HostBackend {
  using Stream = int;
  class Buffer {
   public:
    explicit Buffer(std::size_t bytes) : bytes_(bytes, std::byte{0xff}) {}
    std::byte* data() { return bytes_.data(); }
    std::size_t size_bytes() const { return bytes_.size(); }

   private:
    std::vector<std::byte> bytes_;
  };

  Buffer allocate(std::size_t bytes) const { return Buffer(bytes); }
  void upload(void* target, const void* source, std::size_t bytes, int) const {
    std::memcpy(target, source, bytes);
  }
  void synchronize(int) const {}
};

/// A model on disk, tiny and with every tensor filled by element().
class Model {
 public:
  explicit Model(json config, DType dtype = DType::bf16) : config_json_(std::move(config)), dtype_(dtype) {
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
  const TemporaryDirectory& directory() const { return directory_; }

  /// What a loaded element must be, from name and indices alone.
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
    const std::string attention = prefix + "self_attn.";
    const std::int64_t heads = size("num_attention_heads");
    vector(prefix + "input_layernorm.weight", hidden_);
    vector(prefix + "post_attention_layernorm.weight", hidden_);
    const bool is_mla = config_json_.contains("kv_lora_rank");
    if (is_mla) {
      const std::int64_t nope = size("qk_nope_head_dim");
      const std::int64_t rope = size("qk_rope_head_dim");
      const std::int64_t value_dim = size("v_head_dim");
      const std::int64_t latent = size("kv_lora_rank");
      if (config_json_.at("q_lora_rank").is_null()) {
        linear(attention + "q_proj.weight", heads * (nope + rope), hidden_);
      } else {
        const std::int64_t q_lora = size("q_lora_rank");
        linear(attention + "q_a_proj.weight", q_lora, hidden_);
        vector(attention + "q_a_layernorm.weight", q_lora);
        linear(attention + "q_b_proj.weight", heads * (nope + rope), q_lora);
      }
      linear(attention + "kv_a_proj_with_mqa.weight", latent + rope, hidden_);
      vector(attention + "kv_a_layernorm.weight", latent);
      linear(attention + "kv_b_proj.weight", heads * (nope + value_dim), latent);
      linear(attention + "o_proj.weight", hidden_, heads * value_dim);
    } else {
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
    const bool mlp_bias = config_json_.value("mlp_bias", false);
    if (!is_mla || layer < size("first_k_dense_replace")) {
      ffn(prefix + "mlp.", size("intermediate_size"), mlp_bias);
      return;
    }
    const std::int64_t experts = size("n_routed_experts");
    linear(prefix + "mlp.gate.weight", experts, hidden_, false);
    if (config_json_.at("model_type") == "deepseek_v3")
      vector(prefix + "mlp.gate.e_score_correction_bias", experts);
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      ffn(prefix + "mlp.experts." + std::to_string(expert) + ".", size("moe_intermediate_size"), false);
    }
    if (size("n_shared_experts") > 0) {
      ffn(prefix + "mlp.shared_experts.", size("n_shared_experts") * size("moe_intermediate_size"), mlp_bias);
    }
  }

  json config_json_;
  DType dtype_;
  std::int64_t hidden_ = 0;
  std::vector<TensorContent> tensors_;
  std::set<std::string> is_fp8_;
  TemporaryDirectory directory_;
};

json llama() {
  return {{"model_type", "llama"},  {"hidden_size", 24},        {"intermediate_size", 48},
          {"num_hidden_layers", 2}, {"num_attention_heads", 8}, {"num_key_value_heads", 4},
          {"head_dim", 6},          {"vocab_size", 37}};
}

json deepseek(const std::string& type = "deepseek_v3") {
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

const json kFp8 = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};

float at(const WeightView& view, std::int64_t row, std::int64_t col) {
  return dispatch(view.dtype, [&]<class T>(T*) {
    return static_cast<float>(static_cast<const T*>(view.data)[row * view.cols + col]);
  });
}

/// Every element of `view` equals expected(row, col).
void check_view(const std::string& what, const WeightView& view, std::int64_t rows, std::int64_t cols,
                const std::function<float(std::int64_t, std::int64_t)>& expected) {
  CAPTURE(what);
  REQUIRE_FALSE(view.empty());
  REQUIRE(view.rows == rows);
  REQUIRE(view.cols == cols);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      if (at(view, row, col) != expected(row, col)) {
        FAIL(what << "[" << row << ", " << col << "] is " << at(view, row, col) << ", expected "
                  << expected(row, col));
      }
    }
  }
  SUCCEED();
}

/// Part `index` of `parts`, longer ones first.
std::pair<std::int64_t, std::int64_t> part(std::int64_t total, std::int64_t parts, std::int64_t index) {
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < index; ++i) begin += total / parts + (i < total % parts ? 1 : 0);
  return {begin, begin + total / parts + (index < total % parts ? 1 : 0)};
}

/// Everything that one rank loaded, against the layout of LayerWeights, from the ranks' coordinates alone.
void check_rank(const Model& model, const Topology& topo, int world_rank) {
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  HostBackend backend;
  std::int64_t last_done = -1;
  std::int64_t total = 0;
  const auto progress = [&](std::int64_t done, std::int64_t all) {
    CHECK(done >= last_done);
    last_done = done;
    total = all;
  };
  const auto weights = load_stage_weights(backend, config, checkpoint, topo, world_rank, 0, progress);
  CHECK(last_done == total);
  CHECK(total > 0);
  CHECK(weights.bytes() == plan_weight_bytes(config, checkpoint, topo, world_rank));

  const int n = topo.kvp() * topo.tpa();
  const int stage = world_rank / n % topo.pp();
  const int rank = world_rank % n;
  const int kvp_rank = rank / topo.tpa();
  const int tpa_rank = rank % topo.tpa();
  const int tpf_rank = rank % topo.tpf();
  const int ep_rank = rank / topo.tpf();
  const std::int64_t hidden = config.hidden;
  const auto from = [&](const std::string& tensor, std::int64_t row, std::int64_t col = 0) {
    return [&model, tensor, row, col](std::int64_t r, std::int64_t c) {
      return model.value(tensor, row + r, col + c);
    };
  };
  const auto check_ffn = [&](const std::string& prefix, const WeightView& gate_up, const WeightView& down,
                             std::pair<std::int64_t, std::int64_t> slice) {
    const std::int64_t begin = slice.first;
    const std::int64_t count = slice.second - slice.first;
    check_view(prefix + "gate_up", gate_up, 2 * count, hidden,
               [&, begin, count](std::int64_t r, std::int64_t c) {
                 return r < count ? model.value(prefix + "gate_proj.weight", begin + r, c)
                                  : model.value(prefix + "up_proj.weight", begin + r - count, c);
               });
    check_view(prefix + "down", down, hidden, count, from(prefix + "down_proj.weight", 0, begin));
  };

  const std::int64_t heads = config.num_query_heads;
  const std::int64_t combined = heads / n;
  const std::int64_t first_combined = tpa_rank * (heads / topo.tpa()) + kvp_rank * combined;
  const auto layers = part(config.num_layers, topo.pp(), stage);
  REQUIRE(static_cast<std::int64_t>(weights.layers.size()) == layers.second - layers.first);
  for (std::int64_t index = layers.first; index < layers.second; ++index) {
    const LayerWeights& layer = weights.layers[static_cast<std::size_t>(index - layers.first)];
    const std::string prefix = "model.layers." + std::to_string(index) + ".";
    const std::string attention = prefix + "self_attn.";
    check_view("input_norm", layer.input_norm, 1, hidden, from(prefix + "input_layernorm.weight", 0));
    check_view("post_norm", layer.post_attention_norm, 1, hidden,
               from(prefix + "post_attention_layernorm.weight", 0));
    if (config.mla) {
      const MlaConfig& m = *config.mla;
      const auto& w = std::get<MlaWeights>(layer.attention);
      if (m.q_lora_rank > 0) {
        check_view("q_a", w.q_a, m.q_lora_rank, hidden, from(attention + "q_a_proj.weight", 0));
        check_view("q_a_norm", w.q_a_norm, 1, m.q_lora_rank, from(attention + "q_a_layernorm.weight", 0));
        check_view("q_b", w.q_b, heads * m.qk_head_dim(), m.q_lora_rank,
                   from(attention + "q_b_proj.weight", 0));
      } else {
        CHECK(w.q_a.empty());
        CHECK(w.q_a_norm.empty());
        check_view("q", w.q_b, heads * m.qk_head_dim(), hidden, from(attention + "q_proj.weight", 0));
      }
      check_view("kv_a", w.kv_a, m.kv_lora_rank + m.qk_rope_head_dim, hidden,
                 from(attention + "kv_a_proj_with_mqa.weight", 0));
      check_view("kv_a_norm", w.kv_a_norm, 1, m.kv_lora_rank, from(attention + "kv_a_layernorm.weight", 0));
      const std::int64_t stride = m.qk_nope_head_dim + m.v_head_dim;
      check_view("w_uk", w.w_uk, heads * m.kv_lora_rank, m.qk_nope_head_dim,
                 [&](std::int64_t r, std::int64_t c) {
                   return model.value(attention + "kv_b_proj.weight", r / m.kv_lora_rank * stride + c,
                                      r % m.kv_lora_rank);
                 });
      check_view("w_uv", w.w_uv, combined * m.v_head_dim, m.kv_lora_rank,
                 [&](std::int64_t r, std::int64_t c) {
                   const std::int64_t head = first_combined + r / m.v_head_dim;
                   return model.value(attention + "kv_b_proj.weight",
                                      head * stride + m.qk_nope_head_dim + r % m.v_head_dim, c);
                 });
      check_view("o", w.o, hidden, combined * m.v_head_dim,
                 from(attention + "o_proj.weight", 0, first_combined * m.v_head_dim));
    } else {
      const auto& w = std::get<GqaWeights>(layer.attention);
      const std::int64_t dim = config.head_dim;
      const std::int64_t q_rows = heads / topo.tpa() * dim;
      const std::int64_t kv_rows = std::max<std::int64_t>(1, config.num_kv_heads / topo.tpa()) * dim;
      const std::int64_t kv_begin = tpa_rank * config.num_kv_heads / topo.tpa() * dim;
      const auto qkv = [&](const std::string& suffix, std::int64_t r, std::int64_t c, bool is_bias) {
        const auto pick = [&](const char* name, std::int64_t row) {
          return is_bias ? model.value(attention + name + suffix, 0, row)
                         : model.value(attention + name + suffix, row, c);
        };
        if (r < q_rows) return pick("q_proj", tpa_rank * q_rows + r);
        if (r < q_rows + kv_rows) return pick("k_proj", kv_begin + r - q_rows);
        return pick("v_proj", kv_begin + r - q_rows - kv_rows);
      };
      check_view("qkv", w.qkv, q_rows + 2 * kv_rows, hidden,
                 [&](std::int64_t r, std::int64_t c) { return qkv(".weight", r, c, false); });
      CHECK(w.qkv_bias.empty() != config.has_qkv_bias);
      if (config.has_qkv_bias) {
        check_view("qkv_bias", w.qkv_bias, 1, q_rows + 2 * kv_rows,
                   [&](std::int64_t, std::int64_t c) { return qkv(".bias", c, 0, true); });
      }
      CHECK(w.q_norm.empty() != config.has_qk_norm);
      if (config.has_qk_norm) {
        check_view("q_norm", w.q_norm, 1, dim, from(attention + "q_norm.weight", 0));
        check_view("k_norm", w.k_norm, 1, dim, from(attention + "k_norm.weight", 0));
      }
      check_view("o", w.o, hidden, combined * dim,
                 from(attention + "o_proj.weight", 0, first_combined * dim));
      CHECK(w.o_bias.empty() == !(config.has_output_bias && rank == 0));
      if (!w.o_bias.empty()) check_view("o_bias", w.o_bias, 1, hidden, from(attention + "o_proj.bias", 0));
    }

    if (const auto* w = std::get_if<DenseFfnWeights>(&layer.ffn)) {
      CHECK_FALSE(config.is_moe_layer(index));
      const auto slice = part(config.ffn, n, rank);
      check_ffn(prefix + "mlp.", w->gate_up, w->down, slice);
      CHECK(w->gate_up_bias.empty() != config.has_mlp_bias);
      CHECK(w->down_bias.empty() == !(config.has_mlp_bias && rank == 0));
      if (config.has_mlp_bias) {
        const std::int64_t count = slice.second - slice.first;
        check_view("gate_up_bias", w->gate_up_bias, 1, 2 * count, [&](std::int64_t, std::int64_t c) {
          return c < count ? model.value(prefix + "mlp.gate_proj.bias", 0, slice.first + c)
                           : model.value(prefix + "mlp.up_proj.bias", 0, slice.first + c - count);
        });
        if (rank == 0)
          check_view("down_bias", w->down_bias, 1, hidden, from(prefix + "mlp.down_proj.bias", 0));
      }
    } else {
      const auto& m = std::get<MoeWeights>(layer.ffn);
      CHECK(config.is_moe_layer(index));
      check_view("router", m.router, config.moe->num_experts, hidden, from(prefix + "mlp.gate.weight", 0));
      CHECK((m.router_bias != nullptr) == config.moe->has_router_bias);
      for (std::int64_t expert = 0; m.router_bias != nullptr && expert < config.moe->num_experts; ++expert) {
        CHECK(m.router_bias[expert] == model.value(prefix + "mlp.gate.e_score_correction_bias", 0, expert));
      }
      const auto experts = part(config.moe->num_experts, topo.ep(), ep_rank);
      REQUIRE(static_cast<std::int64_t>(m.experts.size()) == experts.second - experts.first);
      for (std::int64_t expert = experts.first; expert < experts.second; ++expert) {
        const ExpertWeights& w = m.experts[static_cast<std::size_t>(expert - experts.first)];
        check_ffn(prefix + "mlp.experts." + std::to_string(expert) + ".", w.gate_up, w.down,
                  part(config.moe->expert_ffn, topo.tpf(), tpf_rank));
      }
      CHECK(m.shared.gate_up.empty() == (config.moe->num_shared_experts == 0));
      if (config.moe->num_shared_experts > 0) {
        check_ffn(prefix + "mlp.shared_experts.", m.shared.gate_up, m.shared.down,
                  part(config.moe->shared_ffn(), n, rank));
      }
    }
  }

  const bool is_last = stage == topo.pp() - 1;
  const auto vocab = part(config.vocab, n, rank);
  const std::int64_t ids = vocab.second - vocab.first;
  if (stage == 0 || (is_last && config.tie_word_embeddings)) {
    check_view("embedding", weights.embedding, ids, hidden, from("model.embed_tokens.weight", vocab.first));
  } else {
    CHECK(weights.embedding.empty());
  }
  CHECK(weights.final_norm.empty() == !is_last);
  CHECK(weights.lm_head.empty() == !is_last);
  if (!is_last) return;
  check_view("final_norm", weights.final_norm, 1, hidden, from("model.norm.weight", 0));
  if (config.tie_word_embeddings) {
    CHECK(weights.lm_head.data == weights.embedding.data);
    CHECK(weights.lm_head.rows == ids);
  } else {
    check_view("lm_head", weights.lm_head, ids, hidden, from("lm_head.weight", vocab.first));
  }
}

void check_all_ranks(const Model& model, const TopologySpec& spec) {
  const Topology topo(spec, model.config().shape());
  for (int rank = 0; rank < topo.world_size(); ++rank) {
    CAPTURE(rank, topo.to_string());
    check_rank(model, topo, rank);
  }
}

/// How often the ranks of one replica hold each element of each tensor.
using Coverage = std::map<std::string, std::vector<int>>;

Coverage coverage(const Model& model, const Topology& topo) {
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  Coverage counts;
  for (const TensorContent& tensor : model.tensors()) {
    std::size_t size = 1;
    for (const std::int64_t extent : tensor.shape) size *= static_cast<std::size_t>(extent);
    counts[tensor.name].assign(size, 0);
  }
  for (int rank = 0; rank < topo.stage_size() * topo.pp(); ++rank) {
    const WeightPlan plan = plan_weights(config, checkpoint, topo, rank);
    for (const WeightTarget& target : plan.targets) {
      std::int64_t filled_elements = 0;
      for (const WeightSlice& slice : target.slices) {
        filled_elements += slice.rows.size() * slice.cols.size();
        std::vector<int>& count = counts.at(slice.tensor());
        for (std::int64_t row = slice.rows.begin; row < slice.rows.end; ++row) {
          for (std::int64_t col = slice.cols.begin; col < slice.cols.end; ++col) {
            ++count.at(static_cast<std::size_t>(row * slice.source.tensor->cols() + col));
          }
        }
      }
      CHECK(filled_elements == target.rows * target.cols);
    }
  }
  return counts;
}

bool ends_with_any(const std::string& name, const std::vector<std::string>& endings) {
  for (const std::string& ending : endings) {
    if (name.ends_with(ending)) return true;
  }
  return false;
}

/// Everything exactly once, except what every rank needs whole, and QKV once in every KVP rank.
void check_partition(const Model& model, const TopologySpec& spec) {
  const Topology topo(spec, model.config().shape());
  CAPTURE(topo.to_string());
  const std::vector<std::string> everywhere = {"norm.weight",
                                               "gate.weight",
                                               "e_score_correction_bias",
                                               "q_a_proj.weight",
                                               "q_b_proj.weight",
                                               "kv_a_proj_with_mqa.weight",
                                               "q_a_layernorm.weight",
                                               "input_layernorm.weight",
                                               "kv_a_layernorm.weight",
                                               "post_attention_layernorm.weight"};
  const bool is_mla = model.config().mla.has_value();
  for (const auto& [name, counts] : coverage(model, topo)) {
    if (name.ends_with("_scale_inv")) continue;
    CAPTURE(name);
    int expected = 1;
    if (ends_with_any(name, everywhere) && !ends_with_any(name, {"model.norm.weight"}))
      expected = topo.stage_size();
    if (name == "model.norm.weight") expected = topo.stage_size();
    if (is_mla && name.ends_with("q_proj.weight")) expected = topo.stage_size();
    if (!is_mla && ends_with_any(name, {"q_proj.weight", "q_proj.bias"})) expected = topo.kvp();
    if (!is_mla && ends_with_any(name, {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"})) {
      expected = topo.kvp() * topo.kv_copies();
    }
    if (name == "model.embed_tokens.weight" && model.config().tie_word_embeddings && topo.pp() > 1)
      expected = 2;
    if (name.ends_with("kv_b_proj.weight")) {
      const MlaConfig m = *model.config().mla;
      for (std::size_t i = 0; i < counts.size(); ++i) {
        const auto row = static_cast<std::int64_t>(i) / m.kv_lora_rank % (m.qk_nope_head_dim + m.v_head_dim);
        if (counts[i] != (row < m.qk_nope_head_dim ? topo.stage_size() : 1))
          FAIL("row " << row << " is held " << counts[i] << " times");
      }
      continue;
    }
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] != expected)
        FAIL("element " << i << " is held " << counts[i] << " times, expected " << expected);
    }
  }
}

std::string failure_of(const Model& model, ErrorCode code) {
  try {
    const ModelConfig config = model.config();
    const Checkpoint checkpoint = model.checkpoint();
    plan_weights(config, checkpoint, Topology({}, config.shape()), 0);
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  FAIL("nothing was thrown");
  return {};
}

}  // namespace

TEST_CASE("the ranks of a stage hold a partition, QKV once in every KVP rank") {
  json config = llama();
  config["attention_bias"] = config["mlp_bias"] = true;
  const Model biased(config);
  for (const auto& [kvp, tpa] :
       {std::pair(1, 1), std::pair(4, 1), std::pair(2, 2), std::pair(1, 4), std::pair(2, 4)}) {
    check_partition(biased, {.kvp = kvp, .tpa = tpa});
    check_partition(biased, {.kvp = kvp, .tpa = tpa, .pp = 2});
  }
  check_partition(biased, {.kvp = 1, .tpa = 8, .allow_kv_duplication = true});
  config["tie_word_embeddings"] = true;
  check_partition(Model(config), {.kvp = 2, .tpa = 2});
  check_partition(Model(config), {.kvp = 2, .tpa = 2, .pp = 2});
  config["intermediate_size"] = 13;  // uneven, and fewer rows than 8 ranks times 2
  check_partition(Model(config), {.kvp = 4, .tpa = 2, .allow_uneven_ffn = true});

  const Model mixture(deepseek());
  check_partition(mixture, {});
  check_partition(mixture, {.kvp = 4, .ep = 2});
  check_partition(mixture, {.kvp = 8, .ep = 4});
  check_partition(mixture, {.kvp = 4, .ep = 4, .pp = 2});
  json uneven = deepseek("deepseek_v2");
  uneven["moe_intermediate_size"] = 11;
  uneven["intermediate_size"] = 5;  // some ranks hold none of it
  uneven["q_lora_rank"] = nullptr;
  check_partition(Model(uneven), {.kvp = 8, .ep = 2, .allow_uneven_ffn = true});
}

TEST_CASE("replicas of a stage take the same slices") {
  const Model model(llama());
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  const Topology topo({.kvp = 2, .tpa = 2, .pp = 2, .dp = 2}, config.shape());
  for (int rank = 0; rank < 8; ++rank) {
    const WeightPlan a = plan_weights(config, checkpoint, topo, rank);
    const WeightPlan b = plan_weights(config, checkpoint, topo, rank + 8);
    REQUIRE(a.targets.size() == b.targets.size());
    for (std::size_t i = 0; i < a.targets.size(); ++i) {
      REQUIRE(a.targets[i].slices.size() == b.targets[i].slices.size());
      for (std::size_t s = 0; s < a.targets[i].slices.size(); ++s) {
        CHECK(a.targets[i].slices[s].tensor() == b.targets[i].slices[s].tensor());
        CHECK(a.targets[i].slices[s].rows == b.targets[i].slices[s].rows);
        CHECK(a.targets[i].slices[s].cols == b.targets[i].slices[s].cols);
      }
    }
  }
}

TEST_CASE("every rank of a Llama loads its slices") {
  const Model model(llama());
  check_all_ranks(model, {});
  check_all_ranks(model, {.kvp = 2, .tpa = 2});
  check_all_ranks(model, {.kvp = 2, .tpa = 4});
  check_all_ranks(model, {.kvp = 4, .tpa = 1, .pp = 2});
  check_all_ranks(model, {.kvp = 1, .tpa = 8, .allow_kv_duplication = true});
  check_all_ranks(Model(llama(), DType::f32), {.kvp = 2, .tpa = 2});
  check_all_ranks(Model(llama(), DType::f16), {.kvp = 2, .tpa = 2});
}

TEST_CASE("every rank loads biases, query and key norms, and tied embeddings") {
  json config = llama();
  config["attention_bias"] = config["mlp_bias"] = config["tie_word_embeddings"] = true;
  check_all_ranks(Model(config), {.kvp = 2, .tpa = 2});
  check_all_ranks(Model(config), {.kvp = 2, .tpa = 1, .pp = 2});
  config["model_type"] = "qwen2";
  config["attention_bias"] = config["mlp_bias"] = false;
  check_all_ranks(Model(config), {.kvp = 2, .tpa = 2});
  config["model_type"] = "qwen3";
  check_all_ranks(Model(config), {.kvp = 2, .tpa = 2});
}

TEST_CASE("every rank of a DeepSeek loads its slices") {
  const Model v3(deepseek());
  check_all_ranks(v3, {});
  check_all_ranks(v3, {.kvp = 4, .ep = 2});
  check_all_ranks(v3, {.kvp = 8, .ep = 4, .pp = 2});
  json v2 = deepseek("deepseek_v2");
  v2["q_lora_rank"] = nullptr;
  v2["n_shared_experts"] = 0;
  check_all_ranks(Model(v2), {.kvp = 4, .ep = 4});
  v2["intermediate_size"] = 5;
  v2["moe_intermediate_size"] = 7;
  check_all_ranks(Model(v2), {.kvp = 8, .ep = 2, .allow_uneven_ffn = true});
}

TEST_CASE("fp8 blocks are dequantised with the scale of their block, also where a shard cuts one") {
  json config = deepseek();
  config["quantization_config"] = kFp8;
  config["hidden_size"] = 136;
  config["intermediate_size"] = 272;  // 68 rows a rank: blocks of 128 are cut
  config["kv_lora_rank"] = 132;
  config["v_head_dim"] = 20;
  const Model model(config);
  check_all_ranks(model, {});
  check_all_ranks(model, {.kvp = 4, .ep = 2});
  const Checkpoint checkpoint = model.checkpoint();
  const WeightPlan plan = plan_weights(model.config(), checkpoint, Topology({}, model.config().shape()), 0);
  for (const WeightTarget& target : plan.targets) {
    const bool stays =
        target.slices.front().scale.tensor == nullptr && target.role != WeightRole::router_bias;
    CHECK(target.dtype == (stays ? DType::bf16 : DType::f32));
  }
}

TEST_CASE("the fp8 reference checkpoint dequantises to its bf16 twin") {
  const auto load = [](const std::string& name) {
    const Checkpoint checkpoint(std::string(HELIX_TEST_DATA "/") + name);
    const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
    HostBackend backend;
    return load_stage_weights(backend, config, checkpoint, Topology({.kvp = 4, .ep = 2}, config.shape()), 3,
                              0);
  };
  const auto full = load("deepseek-tiny");
  const auto quantized = load("deepseek-tiny-fp8");
  const auto check_close = [](const WeightView& a, const WeightView& b) {
    REQUIRE(a.rows == b.rows);
    REQUIRE(a.cols == b.cols);
    double largest = 0.0;
    double error = 0.0;
    for (std::int64_t row = 0; row < a.rows; ++row) {
      for (std::int64_t col = 0; col < a.cols; ++col) {
        largest = std::max(largest, std::abs(static_cast<double>(at(a, row, col))));
        error = std::max(error, std::abs(static_cast<double>(at(a, row, col)) - at(b, row, col)));
      }
    }
    CHECK(largest > 0.0);
    CHECK(error <= largest / 16.0);  // e4m3 keeps 3 bits after the leading one
    CHECK(error > 0.0);
  };
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& a = std::get<MlaWeights>(full.layers[i].attention);
    const auto& b = std::get<MlaWeights>(quantized.layers[i].attention);
    for (const auto member : {&MlaWeights::q_a, &MlaWeights::q_b, &MlaWeights::kv_a, &MlaWeights::w_uk,
                              &MlaWeights::w_uv, &MlaWeights::o}) {
      check_close(a.*member, b.*member);
    }
  }
  check_close(std::get<DenseFfnWeights>(full.layers[0].ffn).gate_up,
              std::get<DenseFfnWeights>(quantized.layers[0].ffn).gate_up);
  check_close(std::get<DenseFfnWeights>(full.layers[0].ffn).down,
              std::get<DenseFfnWeights>(quantized.layers[0].ffn).down);
  const auto& a = std::get<MoeWeights>(full.layers[1].ffn);
  const auto& b = std::get<MoeWeights>(quantized.layers[1].ffn);
  for (std::size_t e = 0; e < a.experts.size(); ++e) {
    check_close(a.experts[e].gate_up, b.experts[e].gate_up);
    check_close(a.experts[e].down, b.experts[e].down);
  }
  check_close(a.shared.gate_up, b.shared.gate_up);
}

TEST_CASE("the reference checkpoints fit their configs on every legal topology of 1, 2, 4 and 8 ranks") {
  for (const std::string name :
       {"llama-tiny", "llama-tiny-16q8kv", "deepseek-tiny", "deepseek-tiny-fp8", "deepseek-v2-tiny"}) {
    CAPTURE(name);
    const Checkpoint checkpoint(std::string(HELIX_TEST_DATA "/") + name);
    const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
    std::int64_t alone = 0;
    for (const int size : {1, 2, 4, 8}) {
      for (const TopologySpec& spec : Topology::legal_topologies(config.shape(), size)) {
        const Topology topo(spec, config.shape());
        std::int64_t all = 0;
        for (int rank = 0; rank < size; ++rank) all += plan_weight_bytes(config, checkpoint, topo, rank);
        if (size == 1) alone = all;
        CHECK(all >= alone);
        CHECK(all < size * alone + 1);
      }
    }
    CHECK(alone > 0);
  }
}

TEST_CASE("layers beyond num_hidden_layers and tensors that no config key asks for are skipped") {
  json longer = deepseek();
  longer["num_hidden_layers"] = 3;
  const Model model(longer);
  json shorter = longer;
  shorter["num_hidden_layers"] = 2;
  const ModelConfig config = parse_model_config(shorter.dump(), "config.json");
  const Checkpoint checkpoint = model.checkpoint();
  const WeightPlan plan = plan_weights(config, checkpoint, Topology({}, config.shape()), 0);
  for (const WeightTarget& target : plan.targets) {
    for (const WeightSlice& slice : target.slices)
      CHECK(slice.tensor().find("layers.2.") == std::string::npos);
  }
}

TEST_CASE("a fused target of unlike types is widened to f32") {
  Model model(llama());
  std::vector<TensorContent> tensors = model.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name == "model.layers.0.self_attn.k_proj.weight")
      tensor = filled(tensor.name, 24, 24, DType::f32);
    if (tensor.name == "model.layers.0.self_attn.q_proj.weight")
      tensor = filled(tensor.name, 48, 24, DType::f16);
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  check_all_ranks(model, {.kvp = 2, .tpa = 2});
}

TEST_CASE("missing and misshapen tensors are listed with both shapes") {
  Model model(llama());
  std::vector<TensorContent> tensors;
  for (const TensorContent& tensor : model.tensors()) {
    if (tensor.name == "model.layers.1.self_attn.k_proj.weight" || tensor.name == "lm_head.weight") continue;
    tensors.push_back(tensor);
    if (tensor.name == "model.norm.weight") tensors.back() = filled(tensor.name, 0, 23);
    if (tensor.name == "model.layers.0.mlp.down_proj.weight") tensors.back() = filled(tensor.name, 24, 47);
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  const std::string message = failure_of(model, ErrorCode::invalid_file);
  CHECK_THAT(message, Catch::Contains(model.directory().path().string()));
  CHECK_THAT(message, Catch::Contains("model.layers.1.self_attn.k_proj.weight is missing"));
  CHECK_THAT(message, Catch::Contains("lm_head.weight is missing"));
  CHECK_THAT(message, Catch::Contains("model.norm.weight is [23], the config implies [24]"));
  CHECK_THAT(message,
             Catch::Contains("model.layers.0.mlp.down_proj.weight is [24, 47], the config implies [24, 48]"));
}

TEST_CASE("a config of a million layers over a small file fails fast") {
  json config = llama();
  const Model model(config);
  config["num_hidden_layers"] = 1 << 20;
  const ModelConfig parsed = parse_model_config(config.dump(), "config.json");
  const Checkpoint checkpoint = model.checkpoint();
  CHECK_THROWS_AS(plan_weights(parsed, checkpoint, Topology({}, parsed.shape()), 0), Error);
}

TEST_CASE("types that nothing reads, fp8 without scales and foreign topologies are refused") {
  Model model(llama());
  std::vector<TensorContent> tensors = model.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name == "model.norm.weight") tensor = {tensor.name, "F64", {24}, std::string(192, 'x')};
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of(model, ErrorCode::unsupported), Catch::Contains("'model.norm.weight' has type F64"));

  tensors = model.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name == "model.layers.0.mlp.up_proj.weight")
      tensor = filled(tensor.name, 48, 24, DType::fp8_e4m3);
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of(model, ErrorCode::invalid_file),
             Catch::Contains("is F8_E4M3, but") && Catch::Contains("no quantization_config"));

  json fp8 = llama();
  fp8["quantization_config"] = kFp8;
  Model quantized(fp8);
  tensors = quantized.tensors();
  std::erase_if(tensors, [](const TensorContent& t) {
    return t.name == "model.layers.1.mlp.up_proj.weight_scale_inv";
  });
  quantized.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of(quantized, ErrorCode::invalid_file),
             Catch::Contains("up_proj.weight_scale_inv is missing"));

  const Model other(deepseek());
  const Checkpoint checkpoint = other.checkpoint();
  CHECK_THROWS_WITH(plan_weights(other.config(), checkpoint, Topology({}, model.config().shape()), 0),
                    Catch::Contains("built for another model"));
}

TEST_CASE("loading keeps resident memory to the rank's share") {
  std::ifstream statm("/proc/self/statm");
  if (!statm) {
    WARN("skipped: no /proc/self/statm");
    return;
  }
  const auto resident_file_pages = [] {
    std::ifstream in("/proc/self/statm");
    std::int64_t size = 0;
    std::int64_t resident = 0;
    std::int64_t shared = 0;
    in >> size >> resident >> shared;
    return shared;
  };
  // 2 x 64 MiB of vocabulary; down_proj is cut by columns, which touches every page of it.
  json config = llama();
  config["hidden_size"] = 1024;
  config["vocab_size"] = 32768;
  config["intermediate_size"] = 16384;
  config["num_hidden_layers"] = 1;
  const TemporaryDirectory directory;
  std::string header = "{";
  std::int64_t end = 0;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
    std::int64_t bytes = 2;
    for (const std::int64_t extent : shape) bytes *= extent;
    header += (end == 0 ? "\"" : ",\"") + name + "\":{\"dtype\":\"BF16\",\"shape\":" + json(shape).dump() +
              ",\"data_offsets\":[" + std::to_string(end) + "," + std::to_string(end + bytes) + "]}";
    end += bytes;
  };
  add("model.embed_tokens.weight", {32768, 1024});
  add("lm_head.weight", {32768, 1024});
  add("model.norm.weight", {1024});
  add("model.layers.0.input_layernorm.weight", {1024});
  add("model.layers.0.post_attention_layernorm.weight", {1024});
  add("model.layers.0.self_attn.q_proj.weight", {48, 1024});
  add("model.layers.0.self_attn.k_proj.weight", {24, 1024});
  add("model.layers.0.self_attn.v_proj.weight", {24, 1024});
  add("model.layers.0.self_attn.o_proj.weight", {1024, 48});
  add("model.layers.0.mlp.gate_proj.weight", {16384, 1024});
  add("model.layers.0.mlp.up_proj.weight", {16384, 1024});
  add("model.layers.0.mlp.down_proj.weight", {1024, 16384});
  directory.write("config.json", config.dump());
  const std::string path = directory.write("model.safetensors", safetensors_bytes(header + "}", ""));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + static_cast<std::uintmax_t>(end));

  const Checkpoint checkpoint(directory.path());
  const ModelConfig parsed = parse_model_config(config.dump(), "config.json");
  const WeightPlan plan = plan_weights(parsed, checkpoint, Topology({.kvp = 2, .tpa = 2}, parsed.shape()), 1);
  const std::int64_t before = resident_file_pages();
  std::int64_t peak = before;
  std::int64_t received = 0;
  stream_weights(plan,
                 [&](std::size_t, std::int64_t, const std::byte* data, std::size_t bytes) {
                   for (std::size_t i = 0; i < bytes; i += 512) received += data[i] == std::byte{0} ? 1 : 0;
                   peak = std::max(peak, resident_file_pages());
                 },
                 {});
  CHECK(received > 0);
  CHECK(plan.weight_bytes() > std::int64_t{50} << 20);
  CHECK((peak - before) * 4096 < std::int64_t{20} << 20);
}
