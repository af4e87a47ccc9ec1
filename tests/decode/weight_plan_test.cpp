// SPDX-License-Identifier: Apache-2.0
// Weight plans: the slices of all ranks partition the tensors, and checkpoints that do not fit are refused.
#include "model/weight_plan.hpp"

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>
#include <helix/topology.hpp>

#include "decode/model_on_disk.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

using namespace helix;
using namespace helix::decode;
using namespace helix::decode::test;
using helix::test::required_failure;
using nlohmann::json;

namespace {

/// For each tensor, how many ranks of one replica hold each of its elements.
using Coverage = std::map<std::string, std::vector<int>>;

Coverage coverage(const ModelOnDisk& model, const Topology& topo) {
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
        filled_elements += slice.repeats * slice.rows.size() * slice.cols.size();
        std::vector<int>& count = counts.at(slice.tensor());
        for (std::int64_t repeat = 0; repeat < slice.repeats; ++repeat) {
          const Range rows = slice.rows_of(repeat);
          for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            for (std::int64_t col = slice.cols.begin; col < slice.cols.end; ++col) {
              ++count.at(static_cast<std::size_t>(row * slice.source.tensor->cols() + col));
            }
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

/// Number of ranks of a stage that hold each element of `name`; not for kv_b_proj.
int holders(const std::string& name, const ModelConfig& config, const Topology& topo) {
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
  if (ends_with_any(name, everywhere)) return topo.stage_size();
  if (config.shape.is_mla() && name.ends_with("q_proj.weight")) return topo.stage_size();
  if (ends_with_any(name, {"q_proj.weight", "q_proj.bias"})) return topo.kvp();
  if (ends_with_any(name, {"k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"})) {
    return topo.kvp() * topo.kv_copies();
  }
  return name == "model.embed_tokens.weight" && config.tie_word_embeddings && topo.pp() > 1 ? 2 : 1;
}

/// Checks that every element is held exactly once, except what every rank needs whole, and QKV, which each
/// KVP rank holds once. In kv_b_proj, W_UK's rows are held by all ranks and W_UV's by one.
void check_partition(const ModelOnDisk& model, const TopologySpec& spec) {
  const ModelConfig config = model.config();
  const Topology topo(spec, config.shape);
  CAPTURE(topo.to_string());
  for (const auto& [name, counts] : coverage(model, topo)) {
    if (name.ends_with("_scale_inv")) continue;
    CAPTURE(name);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      int expected = holders(name, config, topo);
      if (name.ends_with("kv_b_proj.weight")) {
        const MlaShape& mla = *config.shape.mla;
        const auto row =
            static_cast<std::int64_t>(i) / mla.kv_lora_rank % (mla.qk_nope_head_dim + mla.v_head_dim);
        expected = row < mla.qk_nope_head_dim ? topo.stage_size() : 1;
      }
      if (counts[i] != expected)
        FAIL("element " << i << " is held " << counts[i] << " times, expected " << expected);
    }
  }
}

std::string failure_of_plan(const ModelOnDisk& model, ErrorCode code) {
  const auto failure = required_failure([&] {
    const ModelConfig config = model.config();
    const Checkpoint checkpoint = model.checkpoint();
    plan_weights(config, checkpoint, Topology({}, config.shape), 0);
  });
  CHECK(failure.code == code);
  return failure.what;
}

}  // namespace

TEST_CASE("the ranks of a stage hold a partition, QKV once in every KVP rank") {
  json config = llama();
  config["attention_bias"] = config["mlp_bias"] = true;
  const ModelOnDisk biased(config);
  for (const auto& [kvp, tpa] :
       {std::pair(1, 1), std::pair(4, 1), std::pair(2, 2), std::pair(1, 4), std::pair(2, 4)}) {
    check_partition(biased, {.kvp = kvp, .tpa = tpa});
    check_partition(biased, {.kvp = kvp, .tpa = tpa, .pp = 2});
  }
  check_partition(biased, {.kvp = 1, .tpa = 8, .allow_kv_duplication = true});
  config["tie_word_embeddings"] = true;
  check_partition(ModelOnDisk(config), {.kvp = 2, .tpa = 2});
  check_partition(ModelOnDisk(config), {.kvp = 2, .tpa = 2, .pp = 2});
  config["intermediate_size"] = 13;  // uneven, and fewer rows than 8 ranks times 2
  check_partition(ModelOnDisk(config), {.kvp = 4, .tpa = 2, .allow_uneven_ffn = true});

  const ModelOnDisk mixture(deepseek());
  check_partition(mixture, {});
  check_partition(mixture, {.kvp = 4, .ep = 2});
  check_partition(mixture, {.kvp = 8, .ep = 4});
  check_partition(mixture, {.kvp = 4, .ep = 4, .pp = 2});
  json uneven = deepseek("deepseek_v2");
  uneven["moe_intermediate_size"] = 11;
  uneven["intermediate_size"] = 5;  // some ranks hold no part
  uneven["q_lora_rank"] = nullptr;
  check_partition(ModelOnDisk(uneven), {.kvp = 8, .ep = 2, .allow_uneven_ffn = true});
}

TEST_CASE("replicas of a stage take the same slices") {
  const ModelOnDisk model(llama());
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  const Topology topo({.kvp = 2, .tpa = 2, .pp = 2, .dp = 2}, config.shape);
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

TEST_CASE("the reference checkpoints fit their configs on every legal topology of 1, 2, 4 and 8 ranks") {
  for (const std::string name :
       {"llama-tiny", "llama-tiny-16q8kv", "deepseek-tiny", "deepseek-tiny-fp8", "deepseek-v2-tiny"}) {
    CAPTURE(name);
    const Checkpoint checkpoint(std::string(HELIX_TEST_DATA "/") + name);
    const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
    std::int64_t alone = 0;
    for (const int size : {1, 2, 4, 8}) {
      for (const TopologySpec& spec : Topology::legal_topologies(config.shape, size)) {
        const Topology topo(spec, config.shape);
        std::int64_t all = 0;
        for (int rank = 0; rank < size; ++rank)
          all += plan_weights(config, checkpoint, topo, rank).allocated_bytes();
        if (size == 1) alone = all;
        // Ranks share out what is sharded; norms and a few others lie on all of them.
        CHECK(all >= alone);
        if (size > 1) CHECK(all < size * alone * 7 / 8);
      }
    }
    CHECK(alone > 0);
    CHECK(unused_tensors(config, checkpoint).empty());
  }
}

TEST_CASE("layers beyond num_hidden_layers and tensors that no config key asks for are skipped") {
  json longer = deepseek();
  longer["num_hidden_layers"] = 3;
  const ModelOnDisk model(longer);
  json shorter = longer;
  shorter["num_hidden_layers"] = 2;
  const ModelConfig config = parse_model_config(shorter.dump(), "config.json");
  const Checkpoint checkpoint = model.checkpoint();
  const WeightPlan plan = plan_weights(config, checkpoint, Topology({}, config.shape), 0);
  for (const WeightTarget& target : plan.targets) {
    for (const WeightSlice& slice : target.slices)
      CHECK(slice.tensor().find("layers.2.") == std::string::npos);
  }
  // These layers predict further tokens, as in DeepSeek's checkpoints.
  CHECK(unused_tensors(config, checkpoint).empty());
  shorter["num_nextn_predict_layers"] = 0;
  CHECK_FALSE(unused_tensors(parse_model_config(shorter.dump(), "config.json"), checkpoint).empty());
  shorter["num_nextn_predict_layers"] = 1;
  shorter["num_hidden_layers"] = 1;  // one of the two layers after it predicts no token
  const auto unused = unused_tensors(parse_model_config(shorter.dump(), "config.json"), checkpoint);
  REQUIRE_FALSE(unused.empty());
  for (const std::string_view name : unused) CHECK(name.starts_with("model.layers.2."));
}

TEST_CASE("tensors that a config has no use for are named") {
  const Checkpoint checkpoint(HELIX_TEST_DATA "/llama-tiny");
  json shorter = json::parse(checkpoint.config_json());
  shorter["num_hidden_layers"] = 1;
  const auto unused =
      unused_tensors(parse_model_config(shorter.dump(), checkpoint.config_path()), checkpoint);
  REQUIRE(unused.size() == 9);
  for (const std::string_view name : unused) CHECK(name.substr(0, 15) == "model.layers.1.");
  json tied = json::parse(checkpoint.config_json());
  tied["tie_word_embeddings"] = true;
  CHECK(unused_tensors(parse_model_config(tied.dump(), checkpoint.config_path()), checkpoint).empty());
}

namespace {

/// Names of the tensors that a rank takes for a role.
std::vector<std::string> sources(const WeightPlan& plan, WeightRole role) {
  std::vector<std::string> names;
  for (const WeightTarget& target : plan.targets) {
    if (target.role != role) continue;
    for (const WeightSlice& slice : target.slices) names.push_back(slice.tensor());
  }
  return names;
}

}  // namespace

TEST_CASE("a stored LM head is used, also where the config ties it, and stands for an absent embedding") {
  using Names = std::vector<std::string>;
  json config = llama();
  config["tie_word_embeddings"] = false;
  const ModelOnDisk model(config);
  config["tie_word_embeddings"] = true;
  model.directory().write("config.json", config.dump());
  const auto rewrite_without = [&](const std::string& left_out) {
    std::vector<TensorContent> tensors;
    for (const TensorContent& tensor : model.tensors()) {
      if (tensor.name != left_out) tensors.push_back(tensor);
    }
    model.directory().write("model.safetensors", safetensors_of(tensors));
  };
  const auto check = [&](const Names& first, const Names& last, const Names& head, bool is_tied) {
    const Checkpoint checkpoint = model.checkpoint();
    const ModelConfig read = read_model_config(checkpoint);
    CHECK(read.tie_word_embeddings == is_tied);  // what the planner counts
    const Topology one({}, read.shape);
    const Topology stages({.pp = 2}, read.shape);
    const WeightPlan whole = plan_weights(read, checkpoint, one, 0);
    CHECK(whole.has_tied_head == is_tied);
    CHECK(sources(whole, WeightRole::embedding) == first);
    CHECK(sources(whole, WeightRole::lm_head) == head);
    const WeightPlan end = plan_weights(read, checkpoint, stages, 1);
    CHECK(sources(plan_weights(read, checkpoint, stages, 0), WeightRole::embedding) == first);
    CHECK(sources(end, WeightRole::embedding) == last);
    CHECK(sources(end, WeightRole::lm_head) == head);
  };
  const std::string embedding = "model.embed_tokens.weight";
  const std::string head = "lm_head.weight";
  check({embedding}, {}, {head}, false);
  rewrite_without(head);
  check({embedding}, {embedding}, {}, true);
  rewrite_without(embedding);
  check({head}, {head}, {}, true);
}

TEST_CASE("a config without a dtype has that of the embedding") {
  for (const DType stored : {DType::f32, DType::f16, DType::bf16}) {
    json config = llama();
    for (const char* key : {"dtype", "torch_dtype"}) config.erase(key);
    const ModelOnDisk model(config, stored);
    CHECK(read_model_config(model.checkpoint()).dtype == stored);
    for (const char* key : {"dtype", "torch_dtype"}) {
      const auto given_as = [&](const json& value) {
        json given = config;
        given[key] = value;
        model.directory().write("config.json", given.dump());
        return read_model_config(model.checkpoint()).dtype;
      };
      CHECK(given_as(nullptr) == stored);
      CHECK(given_as("auto") == stored);
      CHECK(given_as("float16") == DType::f16);
      CHECK(given_as("torch.float16") == DType::f16);
    }
  }
}

TEST_CASE("missing and misshapen tensors are listed with both shapes") {
  ModelOnDisk model(llama());
  std::vector<TensorContent> tensors;
  for (const TensorContent& tensor : model.tensors()) {
    if (tensor.name == "model.layers.1.self_attn.k_proj.weight" || tensor.name == "lm_head.weight") continue;
    tensors.push_back(tensor);
    if (tensor.name == "model.norm.weight") tensors.back() = filled(tensor.name, 0, 23);
    if (tensor.name == "model.layers.0.mlp.down_proj.weight") tensors.back() = filled(tensor.name, 24, 47);
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  const std::string message = failure_of_plan(model, ErrorCode::invalid_file);
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring(model.directory().path().string()));
  CHECK_THAT(message,
             Catch::Matchers::ContainsSubstring("model.layers.1.self_attn.k_proj.weight is missing"));
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring("lm_head.weight is missing"));
  CHECK_THAT(message,
             Catch::Matchers::ContainsSubstring("model.norm.weight is [23], the config implies [24]"));
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring(
                          "model.layers.0.mlp.down_proj.weight is [24, 47], the config implies [24, 48]"));

  for (auto& tensor : tensors) {
    if (tensor.name == "model.norm.weight") tensor = filled(tensor.name, 24, 1);
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(
      failure_of_plan(model, ErrorCode::invalid_file),
      Catch::Matchers::ContainsSubstring("model.norm.weight is [24, 1], the config implies [24] or [1, 24]"));
}

TEST_CASE("a config of a million layers over a small file fails fast") {
  json config = llama();
  const ModelOnDisk model(config);
  config["num_hidden_layers"] = 1 << 20;
  const ModelConfig parsed = parse_model_config(config.dump(), "config.json");
  const Checkpoint checkpoint = model.checkpoint();
  const auto begin = std::chrono::steady_clock::now();
  const auto failure =
      required_failure([&] { plan_weights(parsed, checkpoint, Topology({}, parsed.shape), 0); });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  CHECK(failure.code == ErrorCode::invalid_file);
  CHECK_THAT(failure.what, Catch::Matchers::ContainsSubstring("is missing"));
}

TEST_CASE("a tensor that the index omits, but its file has, is told of the index") {
  ModelOnDisk model(llama());
  std::filesystem::rename(model.directory().path() / "model.safetensors",
                          model.directory().path() / "model-1.safetensors");
  model.directory().write("model.safetensors.index.json",
                          R"({"weight_map":{"model.norm.weight":"model-1.safetensors"}})");
  CHECK_THAT(failure_of_plan(model, ErrorCode::invalid_file),
             Catch::Matchers::ContainsSubstring("is missing from model.safetensors.index.json, though") &&
                 Catch::Matchers::ContainsSubstring("model-1.safetensors has it"));
}

TEST_CASE("types that nothing reads, fp8 without scales and foreign topologies are refused") {
  ModelOnDisk model(llama());
  std::vector<TensorContent> tensors = model.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name == "model.norm.weight") tensor = {tensor.name, "F64", {24}, std::string(192, 'x')};
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of_plan(model, ErrorCode::unsupported),
             Catch::Matchers::ContainsSubstring("'model.norm.weight' has type F64"));

  tensors = model.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name == "model.layers.0.mlp.up_proj.weight")
      tensor = filled(tensor.name, 48, 24, DType::fp8_e4m3);
  }
  model.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of_plan(model, ErrorCode::invalid_file),
             Catch::Matchers::ContainsSubstring("is F8_E4M3, but") &&
                 Catch::Matchers::ContainsSubstring("no quantization_config"));

  json fp8 = llama();
  fp8["quantization_config"] = kFp8;
  ModelOnDisk quantized(fp8);
  tensors = quantized.tensors();
  std::erase_if(tensors, [](const TensorContent& t) {
    return t.name == "model.layers.1.mlp.up_proj.weight_scale_inv";
  });
  quantized.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of_plan(quantized, ErrorCode::invalid_file),
             Catch::Matchers::ContainsSubstring("up_proj.weight_scale_inv is missing"));
  tensors = quantized.tensors();
  for (TensorContent& tensor : tensors) {
    if (tensor.name != "model.layers.1.mlp.up_proj.weight_scale_inv") continue;
    REQUIRE(tensor.shape.size() == 2);
    tensor = filled(tensor.name, tensor.shape[0], tensor.shape[1], DType::fp8_e4m3);
  }
  quantized.directory().write("model.safetensors", safetensors_of(tensors));
  CHECK_THAT(failure_of_plan(quantized, ErrorCode::unsupported),
             Catch::Matchers::ContainsSubstring("block scales may be F32, F16 or BF16"));

  const ModelOnDisk other(deepseek());
  const Checkpoint checkpoint = other.checkpoint();
  CHECK_THROWS_WITH(plan_weights(other.config(), checkpoint, Topology({}, model.config().shape), 0),
                    Catch::Matchers::ContainsSubstring("built for another model"));
}

namespace {

/// Targets over the tensors of a file, to test where they lie in place.
class InPlace {
 public:
  explicit InPlace(std::size_t remainder = 0) {
    directory_.write("config.json", "{}");
    directory_.write("a.safetensors", safetensors_at(remainder, {filled("norm", 0, 4), filled("gate", 6, 4),
                                                                 filled("up", 6, 4), filled("wide", 6, 8),
                                                                 filled("f32", 2, 4, DType::f32)}));
    directory_.write("b.safetensors", safetensors_at(0, {filled("other", 6, 4)}));
    directory_.write("model.safetensors.index.json",
                     R"({"weight_map":{"norm":"a.safetensors","gate":"a.safetensors","up":"a.safetensors",)"
                     R"("wide":"a.safetensors","f32":"a.safetensors","other":"b.safetensors"}})");
    checkpoint_ = std::make_unique<Checkpoint>(directory_.path());
  }

  /// Rows of a tensor, placed at row `target_row` of the target.
  WeightSlice rows(const std::string& tensor, Range rows, std::int64_t target_row = 0) const {
    WeightSlice slice;
    slice.source = checkpoint_->find(tensor);
    slice.rows = rows;
    slice.cols = {0, slice.source.tensor->cols()};
    slice.target_row = target_row;
    return slice;
  }

  /// The position of a target with these slices, relative to the beginning of `tensor`; nullopt if it is not
  /// in place.
  std::optional<std::int64_t> find(const std::string& tensor, std::int64_t num_rows, std::int64_t num_cols,
                                   std::vector<WeightSlice> slices, DType dtype = DType::bf16) const {
    WeightTarget target;
    target.dtype = dtype;
    target.rows = num_rows;
    target.cols = num_cols;
    target.slices = std::move(slices);
    const std::optional<FileBytes> found = find_in_place(target);
    if (!found) return std::nullopt;
    const Checkpoint::Entry entry = checkpoint_->find(tensor);
    CHECK(found->file == entry.file);
    CHECK(static_cast<std::int64_t>(found->size) == target.size_bytes());
    CHECK(found->data().size() == found->size);
    return static_cast<std::int64_t>(found->begin) -
           static_cast<std::int64_t>(entry.file->offset(*entry.tensor));
  }

 private:
  ScratchDirectory directory_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

}  // namespace

TEST_CASE("a target lies in place where its rows follow each other in one file, in order and type") {
  const InPlace at;
  CHECK(at.find("norm", 1, 4, {at.rows("norm", {0, 1})}) == 0);
  CHECK(at.find("gate", 6, 4, {at.rows("gate", {0, 6})}) == 0);
  CHECK(at.find("gate", 2, 4, {at.rows("gate", {3, 5})}) == 3 * 4 * 2);
  CHECK(at.find("gate", 12, 4, {at.rows("gate", {0, 6}), at.rows("up", {0, 6}, 6)}) == 0);
  CHECK(at.find("gate", 4, 4, {at.rows("gate", {4, 6}), at.rows("up", {0, 2}, 2)}) == 4 * 4 * 2);
  CHECK(at.find("f32", 2, 4, {at.rows("f32", {0, 2})}, DType::f32) == 0);
  // An empty slice needs no bytes and has no position.
  CHECK(at.find("up", 6, 4, {at.rows("other", {0, 0}), at.rows("up", {0, 6})}) == 0);

  CHECK_FALSE(at.find("gate", 12, 4, {at.rows("up", {0, 6}), at.rows("gate", {0, 6}, 6)}));  // wrong order
  CHECK_FALSE(at.find("gate", 12, 4, {at.rows("up", {0, 6}, 6), at.rows("gate", {0, 6})}));
  CHECK_FALSE(at.find("gate", 12, 4, {at.rows("gate", {0, 6}, 6), at.rows("up", {0, 6}, 0)}));
  CHECK_FALSE(at.find("gate", 6, 4, {at.rows("gate", {0, 3}), at.rows("up", {0, 3}, 3)}));    // a gap
  CHECK_FALSE(at.find("gate", 12, 4, {at.rows("up", {0, 6}), at.rows("other", {0, 6}, 6)}));  // two files
  CHECK_FALSE(at.find("gate", 6, 4, {at.rows("gate", {0, 6})}, DType::f32));                  // widened
  CHECK_FALSE(at.find("gate", 8, 4, {at.rows("gate", {0, 6})}));                              // only a part
  CHECK_FALSE(at.find("gate", 0, 4, {}));

  WeightSlice scaled = at.rows("gate", {0, 6});
  scaled.scale = scaled.source;
  CHECK_FALSE(at.find("gate", 6, 4, {scaled}));
  WeightSlice transposed = at.rows("gate", {0, 4});
  transposed.is_transposed = true;
  CHECK_FALSE(at.find("gate", 4, 4, {transposed}));
}

TEST_CASE("columns lie in place in a single row only, repeated rectangles without gaps only") {
  const InPlace at;
  WeightSlice columns = at.rows("wide", {0, 6});
  columns.cols = {0, 4};
  CHECK_FALSE(at.find("wide", 6, 4, {columns}));
  columns.rows = {2, 3};
  columns.cols = {4, 8};
  CHECK(at.find("wide", 1, 4, {columns}) == (2 * 8 + 4) * 2);

  WeightSlice beside = at.rows("norm", {0, 1});  // joined with columns in the same row
  beside.cols = {0, 2};
  WeightSlice rest = beside;
  rest.cols = {2, 4};
  rest.target_col = 2;
  CHECK(at.find("norm", 1, 4, {beside, rest}) == 0);
  rest.target_col = 1;
  CHECK_FALSE(at.find("norm", 1, 4, {beside, rest}));

  WeightSlice heads = at.rows("gate", {0, 2});
  heads.repeats = 3;
  heads.row_stride = 2;
  CHECK(at.find("gate", 6, 4, {heads}) == 0);
  heads.repeats = 2;
  heads.row_stride = 3;
  CHECK_FALSE(at.find("gate", 4, 4, {heads}));
}

TEST_CASE("a target that does not begin at a multiple of its elements is copied") {
  for (const std::size_t remainder : {1u, 3u, 63u}) {
    const InPlace at(remainder);
    CHECK_FALSE(at.find("gate", 6, 4, {at.rows("gate", {0, 6})}));
  }
  const InPlace even(2);
  CHECK(even.find("gate", 6, 4, {even.rows("gate", {0, 6})}) == 0);
  CHECK_FALSE(even.find("f32", 2, 4, {even.rows("f32", {0, 2})}, DType::f32));
}

TEST_CASE("a plan has buffers for what is copied, and none unless it is asked to use files") {
  const ModelOnDisk model(llama());
  model.align(0);
  const ModelConfig config = model.config();
  const Checkpoint checkpoint = model.checkpoint();
  for (const TopologySpec& spec : {TopologySpec{}, TopologySpec{.kvp = 2, .tpa = 2}}) {
    const Topology topo(spec, config.shape);
    const WeightPlan copied = plan_weights(config, checkpoint, topo, 0);
    const WeightPlan in_place = plan_weights(config, checkpoint, topo, 0, WeightHome::files);
    CHECK(copied.in_place_bytes() == 0);
    CHECK(copied.allocated_bytes() >= copied.weight_bytes());
    std::map<std::size_t, std::int64_t> ends;  // of each buffer's targets so far
    for (const WeightTarget& target : copied.targets) {
      std::int64_t& end = ends[target.buffer];
      CHECK(target.offset % 256 == 0);
      CHECK(target.offset >= end);
      end = target.offset + target.size_bytes();
      CHECK(end <= copied.buffer_bytes.at(target.buffer));
    }
    CHECK(in_place.weight_bytes() == copied.weight_bytes());
    CHECK(in_place.buffer_bytes.size() == copied.buffer_bytes.size());
    CHECK(in_place.allocated_bytes() < copied.allocated_bytes());
    for (const WeightTarget& target : in_place.targets) {
      const bool is_cut = target.role == WeightRole::attention_out || target.role == WeightRole::down ||
                          target.role == WeightRole::qkv || target.role == WeightRole::gate_up;
      CHECK(target.in_place.has_value() == (topo.world_size() == 1 || !is_cut));
    }
  }
}
