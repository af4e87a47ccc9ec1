// SPDX-License-Identifier: Apache-2.0
// Loaded weights: every view on every rank holds the elements that its layer reads, also from fp8 blocks.
#include "model/stage_weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/cpu/thread_pool.hpp>
#include <helix/topology.hpp>

#include "decode/model_on_disk.hpp"
#include "support/catch.hpp"
#include "support/resident_memory.hpp"
#include "support/sanitizers.hpp"
#include "support/skipped.hpp"
#include "support/worse.hpp"

using namespace helix;
using namespace helix::decode;
using namespace helix::decode::test;
using helix::test::ResidentMemory;
using nlohmann::json;

namespace {

/// Memory that starts as NaN, so that missing elements show.
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

/// The same with threads that write to its memory, so that weights are used in place.
struct ThreadedHostBackend : HostBackend {
  cpu::ThreadPool& thread_pool() const { return *pool_; }

 private:
  std::shared_ptr<cpu::ThreadPool> pool_ = std::make_shared<cpu::ThreadPool>(3);
};

float at(const WeightView& view, std::int64_t row, std::int64_t col) {
  return dispatch(view.dtype, [&]<class T>(T*) {
    return static_cast<float>(static_cast<const T*>(view.data)[row * view.cols + col]);
  });
}

/// Checks that every element of `view` equals expected(row, col).
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

/// Part `index` of `parts` parts; longer parts come first.
struct Part {
  std::int64_t begin = 0;
  std::int64_t count = 0;

  Part(std::int64_t total, std::int64_t parts, std::int64_t index) : count(total / parts) {
    for (std::int64_t i = 0; i < index; ++i) begin += total / parts + (i < total % parts ? 1 : 0);
    if (index < total % parts) ++count;
  }
};

/// Checks everything that one rank loaded against the layout of LayerWeights, using only the rank's
/// coordinates.
class RankCheck {
 public:
  RankCheck(const ModelOnDisk& model, const Topology& topo, int world_rank,
            LatentWeights latent = LatentWeights::absorbed)
      : model_(model),
        topo_(topo),
        config_(model.config()),
        n_(topo.kvp() * topo.tpa()),
        stage_(world_rank / n_ % topo.pp()),
        rank_(world_rank % n_),
        tpa_rank_(rank_ % topo.tpa()),
        hidden_(config_.shape.hidden),
        combined_(config_.shape.num_query_heads / n_),
        first_combined_(tpa_rank_ * (config_.shape.num_query_heads / topo.tpa()) +
                        rank_ / topo.tpa() * combined_),
        latent_(latent) {}

  void check(const StageWeightViews& weights) const {
    const Part layers(config_.shape.num_layers, topo_.pp(), stage_);
    REQUIRE(std::ssize(weights.layers) == layers.count);
    for (std::int64_t i = 0; i < layers.count; ++i)
      check_layer(layers.begin + i, weights.layers[static_cast<std::size_t>(i)]);
    check_ends(weights);
  }

 private:
  using Expected = std::function<float(std::int64_t, std::int64_t)>;

  /// The elements of `tensor` from [row, col] on.
  Expected from(const std::string& tensor, std::int64_t row, std::int64_t col = 0) const {
    return [this, tensor, row, col](std::int64_t r, std::int64_t c) {
      return model_.value(tensor, row + r, col + c);
    };
  }

  void check_layer(std::int64_t index, const LayerWeights& layer) const {
    const std::string prefix = "model.layers." + std::to_string(index) + ".";
    check_view("input_norm", layer.input_norm, 1, hidden_, from(prefix + "input_layernorm.weight", 0));
    check_view("post_norm", layer.post_attention_norm, 1, hidden_,
               from(prefix + "post_attention_layernorm.weight", 0));
    if (config_.shape.mla) {
      check_mla(prefix + "self_attn.", std::get<MlaWeights>(layer.attention));
    } else {
      check_gqa(prefix + "self_attn.", std::get<GqaWeights>(layer.attention));
    }
    if (config_.shape.is_moe_layer(index)) {
      check_moe(prefix + "mlp.", std::get<MoeWeights>(layer.ffn));
    } else {
      check_dense(prefix + "mlp.", std::get<DenseFfnWeights>(layer.ffn));
    }
  }

  void check_mla(const std::string& attention, const MlaWeights& w) const {
    const MlaShape& m = *config_.shape.mla;
    const std::int64_t heads = config_.shape.num_query_heads;
    const bool has_query_lora = m.q_lora_rank > 0;
    const std::int64_t q_rows = has_query_lora ? m.q_lora_rank : heads * m.qk_head_dim();
    const std::string q_a = attention + (has_query_lora ? "q_a_proj.weight" : "q_proj.weight");
    check_view("qkv_a", w.qkv_a, q_rows + m.kv_lora_rank + m.qk_rope_head_dim, hidden_,
               [&](std::int64_t r, std::int64_t c) {
                 return r < q_rows ? model_.value(q_a, r, c)
                                   : model_.value(attention + "kv_a_proj_with_mqa.weight", r - q_rows, c);
               });
    CHECK(w.qkv_a_bias.empty() != config_.has_qkv_bias);
    if (config_.has_qkv_bias) {
      check_view("qkv_a_bias", w.qkv_a_bias, 1, w.qkv_a.rows, [&](std::int64_t, std::int64_t c) {
        if (c >= q_rows) return model_.value(attention + "kv_a_proj_with_mqa.bias", 0, c - q_rows);
        return has_query_lora ? model_.value(attention + "q_a_proj.bias", 0, c) : 0.0f;
      });
    }
    if (has_query_lora) {
      check_view("q_a_norm", w.q_a_norm, 1, m.q_lora_rank, from(attention + "q_a_layernorm.weight", 0));
      check_view("q_b", w.q_b, heads * m.qk_head_dim(), m.q_lora_rank,
                 from(attention + "q_b_proj.weight", 0));
    } else {
      CHECK(w.q_a_norm.empty());
      CHECK(w.q_b.empty());
    }
    check_view("kv_a_norm", w.kv_a_norm, 1, m.kv_lora_rank, from(attention + "kv_a_layernorm.weight", 0));
    const std::string kv_b = attention + "kv_b_proj.weight";
    const std::int64_t stride = m.qk_nope_head_dim + m.v_head_dim;
    check_view("w_uk", w.w_uk, heads * m.kv_lora_rank, m.qk_nope_head_dim,
               [&](std::int64_t r, std::int64_t c) {
                 return model_.value(kv_b, r / m.kv_lora_rank * stride + c, r % m.kv_lora_rank);
               });
    check_view("w_uv", w.w_uv, combined_ * m.v_head_dim, m.kv_lora_rank, [&](std::int64_t r, std::int64_t c) {
      const std::int64_t head = first_combined_ + r / m.v_head_dim;
      return model_.value(kv_b, head * stride + m.qk_nope_head_dim + r % m.v_head_dim, c);
    });
    check_view("o", w.o, hidden_, combined_ * m.v_head_dim,
               from(attention + "o_proj.weight", 0, first_combined_ * m.v_head_dim));
    check_output_bias(attention, w.o_bias);
    CHECK(w.expand_k.empty() == (latent_ == LatentWeights::absorbed));
    CHECK(w.expand_v.empty() == (latent_ == LatentWeights::absorbed));
    if (latent_ == LatentWeights::absorbed) return;
    check_view("expand_k", w.expand_k, heads * m.qk_nope_head_dim, m.kv_lora_rank,
               [&](std::int64_t r, std::int64_t c) {
                 return model_.value(kv_b, r / m.qk_nope_head_dim * stride + r % m.qk_nope_head_dim, c);
               });
    check_view(
        "expand_v", w.expand_v, heads * m.v_head_dim, m.kv_lora_rank, [&](std::int64_t r, std::int64_t c) {
          return model_.value(kv_b, r / m.v_head_dim * stride + m.qk_nope_head_dim + r % m.v_head_dim, c);
        });
  }

  void check_gqa(const std::string& attention, const GqaWeights& w) const {
    const ModelShape& shape = config_.shape;
    const std::int64_t dim = shape.head_dim;
    const std::int64_t q_rows = shape.num_query_heads / topo_.tpa() * dim;
    const std::int64_t kv_rows = std::max<std::int64_t>(1, shape.num_kv_heads / topo_.tpa()) * dim;
    const std::int64_t kv_begin = tpa_rank_ * shape.num_kv_heads / topo_.tpa() * dim;
    const auto qkv = [&](const std::string& suffix, std::int64_t r, std::int64_t c, bool is_bias) {
      const auto pick = [&](const char* name, std::int64_t row) {
        return is_bias ? model_.value(attention + name + suffix, 0, row)
                       : model_.value(attention + name + suffix, row, c);
      };
      if (r < q_rows) return pick("q_proj", tpa_rank_ * q_rows + r);
      if (r < q_rows + kv_rows) return pick("k_proj", kv_begin + r - q_rows);
      return pick("v_proj", kv_begin + r - q_rows - kv_rows);
    };
    check_view("qkv", w.qkv, q_rows + 2 * kv_rows, hidden_,
               [&](std::int64_t r, std::int64_t c) { return qkv(".weight", r, c, false); });
    CHECK(w.qkv_bias.empty() != config_.has_qkv_bias);
    if (config_.has_qkv_bias) {
      check_view("qkv_bias", w.qkv_bias, 1, q_rows + 2 * kv_rows,
                 [&](std::int64_t, std::int64_t c) { return qkv(".bias", c, 0, true); });
    }
    CHECK(w.q_norm.empty() != config_.has_qk_norm);
    if (config_.has_qk_norm) {
      check_view("q_norm", w.q_norm, 1, dim, from(attention + "q_norm.weight", 0));
      check_view("k_norm", w.k_norm, 1, dim, from(attention + "k_norm.weight", 0));
    }
    check_view("o", w.o, hidden_, combined_ * dim,
               from(attention + "o_proj.weight", 0, first_combined_ * dim));
    check_output_bias(attention, w.o_bias);
  }

  void check_output_bias(const std::string& attention, const WeightView& bias) const {
    CHECK(bias.empty() == !(config_.has_output_bias && rank_ == 0));
    if (!bias.empty()) check_view("o_bias", bias, 1, hidden_, from(attention + "o_proj.bias", 0));
  }

  void check_ffn(const std::string& prefix, const WeightView& gate_up, const WeightView& down,
                 Part slice) const {
    check_view(prefix + "gate_up", gate_up, 2 * slice.count, hidden_, [&](std::int64_t r, std::int64_t c) {
      return r < slice.count ? model_.value(prefix + "gate_proj.weight", slice.begin + r, c)
                             : model_.value(prefix + "up_proj.weight", slice.begin + r - slice.count, c);
    });
    check_view(prefix + "down", down, hidden_, slice.count,
               from(prefix + "down_proj.weight", 0, slice.begin));
  }

  void check_dense(const std::string& mlp, const DenseFfnWeights& w) const {
    const Part slice(config_.shape.ffn, n_, rank_);
    check_ffn(mlp, w.gate_up, w.down, slice);
    CHECK(w.gate_up_bias.empty() != config_.has_mlp_bias);
    CHECK(w.down_bias.empty() == !(config_.has_mlp_bias && rank_ == 0));
    if (!config_.has_mlp_bias) return;
    check_view("gate_up_bias", w.gate_up_bias, 1, 2 * slice.count, [&](std::int64_t, std::int64_t c) {
      return c < slice.count ? model_.value(mlp + "gate_proj.bias", 0, slice.begin + c)
                             : model_.value(mlp + "up_proj.bias", 0, slice.begin + c - slice.count);
    });
    if (rank_ == 0) check_view("down_bias", w.down_bias, 1, hidden_, from(mlp + "down_proj.bias", 0));
  }

  void check_moe(const std::string& mlp, const MoeWeights& w) const {
    const MoeShape& moe = *config_.shape.moe;
    check_view("router", w.router, moe.num_experts, hidden_, from(mlp + "gate.weight", 0));
    CHECK((w.router_bias != nullptr) == config_.has_router_bias);
    for (std::int64_t expert = 0; w.router_bias != nullptr && expert < moe.num_experts; ++expert)
      CHECK(w.router_bias[expert] == model_.value(mlp + "gate.e_score_correction_bias", 0, expert));
    const Part experts(moe.num_experts, topo_.ep(), rank_ / topo_.tpf());
    REQUIRE(std::ssize(w.experts) == experts.count);
    for (std::int64_t i = 0; i < experts.count; ++i) {
      const ExpertWeights& expert = w.experts[static_cast<std::size_t>(i)];
      check_ffn(mlp + "experts." + std::to_string(experts.begin + i) + ".", expert.gate_up, expert.down,
                Part(moe.expert_ffn, topo_.tpf(), rank_ % topo_.tpf()));
    }
    CHECK(w.shared.gate_up.empty() == (moe.shared_ffn == 0));
    if (moe.shared_ffn > 0) {
      check_ffn(mlp + "shared_experts.", w.shared.gate_up, w.shared.down, Part(moe.shared_ffn, n_, rank_));
    }
  }

  void check_ends(const StageWeightViews& weights) const {
    const bool is_last = stage_ == topo_.pp() - 1;
    const Part vocab(config_.shape.vocab, n_, rank_);
    if (stage_ == 0 || (is_last && config_.tie_word_embeddings)) {
      check_view("embedding", weights.embedding, vocab.count, hidden_,
                 from("model.embed_tokens.weight", vocab.begin));
    } else {
      CHECK(weights.embedding.empty());
    }
    CHECK(weights.final_norm.empty() == !is_last);
    CHECK(weights.lm_head.empty() == !is_last);
    if (!is_last) return;
    check_view("final_norm", weights.final_norm, 1, hidden_, from("model.norm.weight", 0));
    if (config_.tie_word_embeddings) {
      CHECK(weights.lm_head.data == weights.embedding.data);
      CHECK(weights.lm_head.rows == vocab.count);
    } else {
      check_view("lm_head", weights.lm_head, vocab.count, hidden_, from("lm_head.weight", vocab.begin));
    }
  }

  const ModelOnDisk& model_;
  const Topology& topo_;
  ModelConfig config_;
  int n_;
  int stage_;
  int rank_;
  int tpa_rank_;
  std::int64_t hidden_;
  std::int64_t combined_;  // number of query heads after the exchange, from first_combined_ on
  std::int64_t first_combined_;
  LatentWeights latent_;
};

/// @returns the bytes used in place.
template <class B>
std::int64_t check_rank(const ModelOnDisk& model, const Topology& topo, int world_rank,
                        LatentWeights latent = LatentWeights::absorbed) {
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  B backend;
  std::int64_t last_done = -1;
  std::int64_t total = 0;
  const auto progress = [&](std::int64_t done, std::int64_t all) {
    CHECK(done >= last_done);
    last_done = done;
    total = all;
  };
  const auto weights = load_stage_weights(backend, config, checkpoint, topo, world_rank, 0, progress, latent);
  CHECK(last_done == total);
  CHECK(total > 0);
  const WeightPlan plan = plan_weights(config, checkpoint, topo, world_rank, kWeightHome<B>, latent);
  CHECK(weights.buffer_bytes() == plan.allocated_bytes());
  CHECK(weights.in_place_bytes() == plan.in_place_bytes());
  CHECK(weights.buffer_bytes() + weights.in_place_bytes() >= plan.weight_bytes());
  CHECK(total == plan.weight_bytes());
  RankCheck(model, topo, world_rank, latent).check(weights);
  return weights.in_place_bytes();
}

void check_all_ranks(const ModelOnDisk& model, const TopologySpec& spec) {
  const Topology topo(spec, model.config().shape);
  for (int rank = 0; rank < topo.world_size(); ++rank) {
    CAPTURE(rank, topo.to_string());
    CHECK(check_rank<HostBackend>(model, topo, rank) == 0);
    model.align(0);
    CHECK(check_rank<ThreadedHostBackend>(model, topo, rank) > 0);
    model.align(1);
    const std::int64_t odd = check_rank<ThreadedHostBackend>(model, topo, rank);
    CHECK(odd == 0);
    if (topo.shape().is_mla()) check_rank<HostBackend>(model, topo, rank, LatentWeights::both);
  }
}

}  // namespace

TEST_CASE("every rank of a Llama loads its slices") {
  const ModelOnDisk model(llama());
  check_all_ranks(model, {});
  check_all_ranks(model, {.kvp = 2, .tpa = 2});
  check_all_ranks(model, {.kvp = 2, .tpa = 4});
  check_all_ranks(model, {.kvp = 4, .tpa = 1, .pp = 2});
  check_all_ranks(model, {.kvp = 1, .tpa = 8, .allow_kv_duplication = true});
  check_all_ranks(ModelOnDisk(llama(), DType::f32), {.kvp = 2, .tpa = 2});
  check_all_ranks(ModelOnDisk(llama(), DType::f16), {.kvp = 2, .tpa = 2});
}

TEST_CASE("every rank loads biases, query and key norms, and tied embeddings") {
  json config = llama();
  config["attention_bias"] = config["mlp_bias"] = config["tie_word_embeddings"] = true;
  check_all_ranks(ModelOnDisk(config), {.kvp = 2, .tpa = 2});
  check_all_ranks(ModelOnDisk(config), {.kvp = 2, .tpa = 1, .pp = 2});
  config["model_type"] = "qwen2";
  config["attention_bias"] = config["mlp_bias"] = false;
  check_all_ranks(ModelOnDisk(config), {.kvp = 2, .tpa = 2});
  config["model_type"] = "qwen3";
  check_all_ranks(ModelOnDisk(config), {.kvp = 2, .tpa = 2});
}

TEST_CASE("every rank of a DeepSeek loads its slices") {
  const ModelOnDisk v3(deepseek());
  check_all_ranks(v3, {});
  check_all_ranks(v3, {.kvp = 4, .ep = 2});
  check_all_ranks(v3, {.kvp = 8, .ep = 4, .pp = 2});
  json with_biases = deepseek();
  with_biases["attention_bias"] = true;
  check_all_ranks(ModelOnDisk(with_biases), {.kvp = 2, .ep = 2});
  with_biases["q_lora_rank"] = nullptr;
  check_all_ranks(ModelOnDisk(with_biases), {.kvp = 2, .ep = 2});
  json v2 = deepseek("deepseek_v2");
  v2["q_lora_rank"] = nullptr;
  v2["n_shared_experts"] = 0;
  check_all_ranks(ModelOnDisk(v2), {.kvp = 4, .ep = 4});
  v2["intermediate_size"] = 5;
  v2["moe_intermediate_size"] = 7;
  check_all_ranks(ModelOnDisk(v2), {.kvp = 8, .ep = 2, .allow_uneven_ffn = true});
}

TEST_CASE("fp8 blocks are dequantised with the scale of their block, also where a shard cuts one") {
  json config = deepseek();
  config["quantization_config"] = kFp8;
  config["hidden_size"] = 136;
  config["intermediate_size"] = 272;  // 68 rows per rank, which cuts blocks of 128
  config["kv_lora_rank"] = 132;
  config["v_head_dim"] = 20;
  const ModelOnDisk model(config);
  check_all_ranks(model, {});
  check_all_ranks(model, {.kvp = 4, .ep = 2});
  const Checkpoint checkpoint = model.checkpoint();
  const WeightPlan plan = plan_weights(model.config(), checkpoint, Topology({}, model.config().shape), 0);
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
    return load_stage_weights(backend, config, checkpoint, Topology({.kvp = 4, .ep = 2}, config.shape), 3, 0);
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
        error = helix::test::worse(error, std::abs(static_cast<double>(at(a, row, col)) - at(b, row, col)));
      }
    }
    CHECK(largest > 0.0);
    CHECK(error <= largest / 16.0);  // e4m3 keeps 3 bits after the leading one
    CHECK(error > 0.0);
  };
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& a = std::get<MlaWeights>(full.layers[i].attention);
    const auto& b = std::get<MlaWeights>(quantized.layers[i].attention);
    for (const auto member :
         {&MlaWeights::qkv_a, &MlaWeights::q_b, &MlaWeights::w_uk, &MlaWeights::w_uv, &MlaWeights::o}) {
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

TEST_CASE("a fused target of unlike types is widened to f32") {
  ModelOnDisk model(llama());
  std::vector<TensorContent> tensors = model.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name == "model.layers.0.self_attn.k_proj.weight")
      tensor = filled(tensor.name, 24, 24, DType::f32);
    if (tensor.name == "model.layers.0.self_attn.q_proj.weight")
      tensor = filled(tensor.name, 48, 24, DType::f16);
  }
  model.replace(std::move(tensors));
  check_all_ranks(model, {.kvp = 2, .tpa = 2});
}

TEST_CASE("weights in place outlive the checkpoint that they come from") {
  const ModelOnDisk model(llama());
  model.align(0);
  const ModelConfig config = model.config();
  const Topology topo({}, config.shape);
  auto checkpoint = std::make_unique<Checkpoint>(model.directory().path());
  ThreadedHostBackend backend;
  const auto weights = load_stage_weights(backend, config, *checkpoint, topo, 0, 0);
  checkpoint.reset();
  std::filesystem::remove(model.directory().path() / "model.safetensors");
  // A single rank needs no slices by columns and no joins, and qkv lies in the file's order, so everything is
  // in place.
  CHECK(weights.buffer_bytes() == 0);
  RankCheck(model, topo, 0).check(weights);
}

TEST_CASE("several ranks of a process use one mapping") {
  const ModelOnDisk model(llama());
  model.align(0);
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  const Topology topo({.kvp = 2, .tpa = 2}, config.shape);
  ThreadedHostBackend backend;
  const auto a = load_stage_weights(backend, config, checkpoint, topo, 0, 0);
  const auto b = load_stage_weights(backend, config, checkpoint, topo, 3, 0);
  CHECK(a.layers[0].input_norm.data == b.layers[0].input_norm.data);
  // The file's mapping, two ranks' copies, and this one.
  CHECK(checkpoint.files().front().mapping().use_count() == 4);
}

TEST_CASE("loading keeps resident memory to the rank's share") {
  if (!ResidentMemory::if_told()) return helix::test::skip("no /proc/self/statm");
  // 2 x 64 MiB of vocabulary. down_proj is cut by columns, so loading touches all of its pages.
  json config = llama();
  config["hidden_size"] = 1024;
  config["vocab_size"] = 32768;
  config["intermediate_size"] = 16384;
  config["num_hidden_layers"] = 1;
  const ScratchDirectory directory;
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
  header += "}";
  header.append((64 - header.size() % 64) % 64, ' ');
  const std::string path = directory.write("model.safetensors", safetensors_bytes(header, ""));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + static_cast<std::uintmax_t>(end));

  const Checkpoint checkpoint(directory.path());
  const ModelConfig parsed = parse_model_config(config.dump(), "config.json");
  const WeightPlan plan = plan_weights(parsed, checkpoint, Topology({.kvp = 2, .tpa = 2}, parsed.shape), 1);
  const std::int64_t before = ResidentMemory::now().files;
  std::int64_t peak = before;
  std::int64_t received = 0;
  stream_weights(plan,
                 [&](std::size_t, std::int64_t, const std::byte* data, std::size_t bytes) {
                   for (std::size_t i = 0; i < bytes; i += 512) received += data[i] == std::byte{0} ? 1 : 0;
                   peak = std::max(peak, ResidentMemory::now().files);
                 },
                 {});
  CHECK(received > 0);
  CHECK(plan.weight_bytes() > std::int64_t{50} << 20);
  CHECK(peak - before < std::int64_t{20} << 20);

  // In place, only the file's pages count, and no copy of them.
  const ResidentMemory start = ResidentMemory::now();
  ThreadedHostBackend backend;
  const WeightPlan planned =
      plan_weights(parsed, checkpoint, Topology({.kvp = 2, .tpa = 2}, parsed.shape), 1, WeightHome::files);
  const auto weights =
      load_stage_weights(backend, parsed, checkpoint, Topology({.kvp = 2, .tpa = 2}, parsed.shape), 1, 0);
  const ResidentMemory after = ResidentMemory::now();
  const std::int64_t slack = std::int64_t{20} << 20;
  CHECK(planned.in_place_bytes() > std::int64_t{30} << 20);
  CHECK(std::abs(after.files - start.files - planned.in_place_bytes()) < slack);
  // ThreadSanitizer records writes in memory that counts as the process's own.
  if (!helix::test::kHasThreadSanitizer)
    CHECK(std::abs(after.own - start.own - planned.allocated_bytes()) < slack);
}
