// SPDX-License-Identifier: Apache-2.0
// Plans which slices of a checkpoint one rank takes.
#include "model/weight_plan.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::size_t kMaxProblems = 12;

/// One piece of a target before its tensor is looked up: a rectangle of a named tensor with known full size.
struct Piece {
  std::string tensor;
  std::int64_t full_rows = 0;
  std::int64_t full_cols = 0;
  Range rows;
  Range cols;
  std::int64_t target_row = 0;
  std::int64_t target_col = 0;
  bool is_transposed = false;
  std::int64_t repeats = 1;
  std::int64_t row_stride = 0;
};

class PlanBuilder {
 public:
  PlanBuilder(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo, int world_rank,
              WeightHome home, LatentWeights latent)
      : config_(config),
        checkpoint_(checkpoint),
        topo_(topo),
        at_(topo.coordinates(world_rank)),
        home_(home),
        latent_(latent) {
    plan_.layers = topo.layers(at_.stage);
    plan_.combined_heads = topo.combined_heads(at_.stage_rank);
    plan_.experts = topo.experts(at_.stage_rank);
    plan_.fp8_blocks = config.fp8_blocks.value_or(Fp8BlockConfig{});
  }

  WeightPlan build() {
    for (std::int64_t layer = plan_.layers.begin; layer < plan_.layers.end; ++layer) {
      layer_ = layer;
      prefix_ = "model.layers." + std::to_string(layer) + ".";
      plan_.buffer_bytes.push_back(0);
      add_layer();
    }
    layer_ = -1;
    plan_.buffer_bytes.push_back(0);
    add_ends();
    throw_problems();
    return std::move(plan_);
  }

 private:
  static Range all(std::int64_t size) { return {0, size}; }

  static Piece whole(std::string tensor, std::int64_t rows, std::int64_t cols) {
    return {std::move(tensor), rows, cols, all(rows), all(cols)};
  }
  static Piece some_rows(std::string tensor, std::int64_t full_rows, std::int64_t cols, Range rows) {
    return {std::move(tensor), full_rows, cols, rows, all(cols)};
  }
  static Piece some_cols(std::string tensor, std::int64_t rows, std::int64_t full_cols, Range cols) {
    return {std::move(tensor), rows, full_cols, all(rows), cols};
  }

  std::string name(const char* rest) const { return prefix_ + rest; }

  void add_layer() {
    const std::int64_t hidden = config_.shape.hidden;
    add(WeightRole::input_norm, {whole(name("input_layernorm.weight"), 1, hidden)});
    add(WeightRole::post_attention_norm, {whole(name("post_attention_layernorm.weight"), 1, hidden)});
    if (config_.shape.mla) {
      add_latent_attention(*config_.shape.mla);
    } else {
      add_grouped_query_attention();
    }
    if (config_.shape.is_moe_layer(layer_)) {
      add_experts(*config_.shape.moe);
    } else {
      const FfnRoles roles = {WeightRole::gate_up, WeightRole::gate_up_bias, WeightRole::down,
                              WeightRole::down_bias};
      add_ffn(name("mlp."), config_.shape.ffn, topo_.ffn(at_.stage_rank), roles, config_.has_mlp_bias);
    }
  }

  void add_grouped_query_attention() {
    const std::int64_t dim = config_.shape.head_dim;
    const std::int64_t q_rows = config_.shape.num_query_heads * dim;
    const std::int64_t kv_rows = config_.shape.num_kv_heads * dim;
    const auto scaled = [&](Range heads) { return Range{heads.begin * dim, heads.end * dim}; };
    const Range q = scaled(topo_.query_heads(at_.stage_rank));
    const Range kv = scaled(topo_.kv_heads(at_.stage_rank));
    add_stacked(WeightRole::qkv,
                {some_rows(name("self_attn.q_proj.weight"), q_rows, config_.shape.hidden, q),
                 some_rows(name("self_attn.k_proj.weight"), kv_rows, config_.shape.hidden, kv),
                 some_rows(name("self_attn.v_proj.weight"), kv_rows, config_.shape.hidden, kv)});
    if (config_.has_qkv_bias) {
      add_joined(WeightRole::qkv_bias, {some_cols(name("self_attn.q_proj.bias"), 1, q_rows, q),
                                        some_cols(name("self_attn.k_proj.bias"), 1, kv_rows, kv),
                                        some_cols(name("self_attn.v_proj.bias"), 1, kv_rows, kv)});
    }
    if (config_.has_qk_norm) {
      add(WeightRole::q_norm, {whole(name("self_attn.q_norm.weight"), 1, dim)});
      add(WeightRole::k_norm, {whole(name("self_attn.k_norm.weight"), 1, dim)});
    }
    add_output_projection(dim);
  }

  /// `dim` is the number of values of a head.
  void add_output_projection(std::int64_t dim) {
    const std::int64_t hidden = config_.shape.hidden;
    add(WeightRole::attention_out,
        {some_cols(name("self_attn.o_proj.weight"), hidden, config_.shape.num_query_heads * dim,
                   topo_.output_projection_columns(at_.stage_rank, dim))});
    if (config_.has_output_bias && at_.stage_rank == 0)
      add(WeightRole::attention_out_bias, {whole(name("self_attn.o_proj.bias"), 1, hidden)});
  }

  void add_latent_attention(const MlaShape& mla) {
    const std::int64_t heads = config_.shape.num_query_heads;
    const std::int64_t q_rows = heads * mla.qk_head_dim();
    const std::int64_t hidden = config_.shape.hidden;
    const Piece latents = whole(name("self_attn.kv_a_proj_with_mqa.weight"), mla.latent_dim(), hidden);
    if (mla.q_lora_rank > 0) {
      add_stacked(WeightRole::qkv_a,
                  {whole(name("self_attn.q_a_proj.weight"), mla.q_lora_rank, hidden), latents});
      add(WeightRole::q_a_norm, {whole(name("self_attn.q_a_layernorm.weight"), 1, mla.q_lora_rank)});
      add(WeightRole::q_b, {whole(name("self_attn.q_b_proj.weight"), q_rows, mla.q_lora_rank)});
    } else {
      add_stacked(WeightRole::qkv_a, {whole(name("self_attn.q_proj.weight"), q_rows, hidden), latents});
    }
    if (config_.has_qkv_bias) {
      const Piece of_latents = whole(name("self_attn.kv_a_proj_with_mqa.bias"), 1, mla.latent_dim());
      if (mla.q_lora_rank > 0) {
        add_joined(WeightRole::qkv_a_bias,
                   {whole(name("self_attn.q_a_proj.bias"), 1, mla.q_lora_rank), of_latents});
      } else {
        add_joined(WeightRole::qkv_a_bias, {of_latents}, q_rows);  // q_proj has no bias
      }
    }
    const std::int64_t latent = mla.kv_lora_rank;
    add(WeightRole::kv_a_norm, {whole(name("self_attn.kv_a_layernorm.weight"), 1, latent)});

    // For each head, kv_b_proj stacks the rows that make keys (W_UK), then the rows that make values (W_UV).
    const std::string kv_b = name("self_attn.kv_b_proj.weight");
    const std::int64_t stride = mla.qk_nope_head_dim + mla.v_head_dim;
    // A run of heads is one piece. One piece per head would be 16,000 for 128 heads in 61 layers, and
    // millions for a hostile config.
    Piece uk = some_rows(kv_b, heads * stride, latent, {0, mla.qk_nope_head_dim});
    uk.is_transposed = true;
    uk.repeats = heads;
    uk.row_stride = stride;
    add(WeightRole::w_uk, {std::move(uk)});
    const auto rows_of_heads = [&](Range of_heads, std::int64_t row, std::int64_t rows) {
      const std::int64_t first = of_heads.begin * stride + row;
      Piece piece = some_rows(kv_b, heads * stride, latent, {first, first + rows});
      piece.repeats = of_heads.size();
      piece.row_stride = stride;
      return piece;
    };
    if (latent_ == LatentWeights::both) {
      add(WeightRole::expand_k, {rows_of_heads(all(heads), 0, mla.qk_nope_head_dim)});
      add(WeightRole::expand_v, {rows_of_heads(all(heads), mla.qk_nope_head_dim, mla.v_head_dim)});
    } else {
      add(WeightRole::w_uv, {rows_of_heads(plan_.combined_heads, mla.qk_nope_head_dim, mla.v_head_dim)});
    }
    add_output_projection(mla.v_head_dim);
  }

  struct FfnRoles {
    WeightRole gate_up;
    WeightRole gate_up_bias;
    WeightRole down;
    WeightRole down_bias;
  };

  void add_ffn(const std::string& prefix, std::int64_t full, Range part, const FfnRoles& roles,
               bool has_bias) {
    const std::int64_t hidden = config_.shape.hidden;
    add_stacked(roles.gate_up, {some_rows(prefix + "gate_proj.weight", full, hidden, part),
                                some_rows(prefix + "up_proj.weight", full, hidden, part)});
    add(roles.down, {some_cols(prefix + "down_proj.weight", hidden, full, part)});
    if (!has_bias) return;
    add_joined(roles.gate_up_bias, {some_cols(prefix + "gate_proj.bias", 1, full, part),
                                    some_cols(prefix + "up_proj.bias", 1, full, part)});
    if (at_.stage_rank == 0) add(roles.down_bias, {whole(prefix + "down_proj.bias", 1, hidden)});
  }

  void add_experts(const MoeShape& moe) {
    add(WeightRole::router, {whole(name("mlp.gate.weight"), moe.num_experts, config_.shape.hidden)});
    if (config_.has_router_bias) {
      add(WeightRole::router_bias, {whole(name("mlp.gate.e_score_correction_bias"), 1, moe.num_experts)});
    }
    const Range part = topo_.expert_ffn(at_.stage_rank);
    const FfnRoles expert_roles = {WeightRole::expert_gate_up, {}, WeightRole::expert_down, {}};
    for (expert_ = plan_.experts.begin; expert_ < plan_.experts.end; ++expert_) {
      add_ffn(name("mlp.experts.") + std::to_string(expert_) + ".", moe.expert_ffn, part, expert_roles,
              false);
    }
    expert_ = -1;
    if (moe.shared_ffn > 0) {
      const FfnRoles roles = {WeightRole::shared_gate_up, WeightRole::shared_gate_up_bias,
                              WeightRole::shared_down, WeightRole::shared_down_bias};
      add_ffn(name("mlp.shared_experts."), moe.shared_ffn, topo_.shared_expert_ffn(at_.stage_rank), roles,
              config_.has_mlp_bias);
    }
  }

  /// A tied embedding and LM head may be stored under either name.
  const char* embedding_name() const {
    const auto has = [&](const char* tensor) { return checkpoint_.find(tensor).tensor != nullptr; };
    const bool is_head = config_.tie_word_embeddings && !has("model.embed_tokens.weight");
    return is_head && has("lm_head.weight") ? "lm_head.weight" : "model.embed_tokens.weight";
  }

  void add_ends() {
    const bool is_first = at_.stage == 0;
    const bool is_last = at_.stage == topo_.pp() - 1;
    const Range vocab = topo_.vocab(at_.stage_rank);
    plan_.has_tied_head = is_last && config_.tie_word_embeddings;
    if (is_first || plan_.has_tied_head) {
      add(WeightRole::embedding,
          {some_rows(embedding_name(), config_.shape.vocab, config_.shape.hidden, vocab)});
    }
    if (!is_last) return;
    add(WeightRole::final_norm, {whole("model.norm.weight", 1, config_.shape.hidden)});
    if (!config_.tie_word_embeddings) {
      add(WeightRole::lm_head,
          {some_rows("lm_head.weight", config_.shape.vocab, config_.shape.hidden, vocab)});
    }
  }

  /// Adds pieces stacked on top of each other.
  void add_stacked(WeightRole role, std::vector<Piece> pieces) {
    std::int64_t row = 0;
    for (Piece& piece : pieces) {
      piece.target_row = row;
      row += piece.rows.size();
    }
    add(role, std::move(pieces));
  }

  /// Adds pieces side by side, after `zero_cols` columns of zeros.
  void add_joined(WeightRole role, std::vector<Piece> pieces, std::int64_t zero_cols = 0) {
    std::int64_t col = zero_cols;
    for (Piece& piece : pieces) {
      piece.target_col = col;
      col += piece.cols.size();
    }
    add(role, std::move(pieces), zero_cols);
  }

  void add(WeightRole role, std::vector<Piece> pieces, std::int64_t zero_cols = 0) {
    WeightTarget target;
    target.zero_cols = zero_cols;
    target.role = role;
    target.layer = layer_;
    target.expert = expert_;
    std::optional<DType> common;
    bool is_uniform = role != WeightRole::router_bias;  // route() reads the bias as f32
    for (const Piece& piece : pieces) {
      const std::int64_t rows = piece.is_transposed ? piece.cols.size() : piece.rows.size();
      const std::int64_t cols = piece.is_transposed ? piece.rows.size() : piece.cols.size();
      target.rows = std::max(target.rows, piece.target_row + piece.repeats * rows);
      target.cols = std::max(target.cols, piece.target_col + cols);
      const std::optional<WeightSlice> slice = look_up(piece);
      if (!slice) continue;
      const DType dtype = *slice->source.tensor->dtype;
      if (dtype == DType::fp8_e4m3 || (common && *common != dtype)) is_uniform = false;
      common = dtype;
      target.slices.push_back(*slice);
    }
    if (!problems_.empty()) return;  // sizes are unreliable if no file confirms them
    target.dtype = is_uniform ? common.value_or(DType::f32) : DType::f32;
    if (home_ == WeightHome::files) target.in_place = find_in_place(target);
    if (!target.in_place) {
      target.buffer = plan_.buffer_bytes.size() - 1;
      target.offset = plan_.buffer_bytes.back();
      plan_.buffer_bytes.back() += round_up(target.size_bytes(), kAlignment);
    }
    plan_.targets.push_back(std::move(target));
  }

  /// Returns nullopt after noting what is wrong with the tensor.
  std::optional<WeightSlice> look_up(const Piece& piece) {
    WeightSlice slice;
    slice.source = find(piece.tensor, piece.full_rows, piece.full_cols);
    if (slice.source.tensor == nullptr) return std::nullopt;
    const TensorInfo& tensor = *slice.source.tensor;
    if (!tensor.dtype) {
      throw Error(ErrorCode::unsupported, slice.source.file->path(), ": tensor ", printable(tensor.name),
                  " has type ", tensor.dtype_name, "; weights may be F32, F16, BF16 or F8_E4M3");
    }
    if (*tensor.dtype == DType::fp8_e4m3) {
      HELIX_EXPECTS(config_.fp8_blocks.has_value(), ErrorCode::invalid_file, slice.source.file->path(),
                    ": tensor ", printable(tensor.name), " is F8_E4M3, but ", checkpoint_.config_path(),
                    " has no quantization_config with weight_block_size");
      slice.scale =
          find(piece.tensor + "_scale_inv", ceil_div(piece.full_rows, config_.fp8_blocks->block_rows),
               ceil_div(piece.full_cols, config_.fp8_blocks->block_cols));
      if (slice.scale.tensor == nullptr) return std::nullopt;
      HELIX_EXPECTS(slice.scale.tensor->dtype && *slice.scale.tensor->dtype != DType::fp8_e4m3,
                    ErrorCode::unsupported, slice.scale.file->path(), ": tensor ",
                    printable(slice.scale.tensor->name), " has type ", slice.scale.tensor->dtype_name,
                    "; block scales may be F32, F16 or BF16");
    }
    slice.rows = piece.rows;
    slice.cols = piece.cols;
    slice.target_row = piece.target_row;
    slice.target_col = piece.target_col;
    slice.is_transposed = piece.is_transposed;
    slice.repeats = piece.repeats;
    slice.row_stride = piece.row_stride;
    return slice;
  }

  Checkpoint::Entry find(const std::string& tensor, std::int64_t rows, std::int64_t cols) {
    const Checkpoint::Entry entry = checkpoint_.find(tensor);
    if (entry.tensor == nullptr) {
      const SafetensorsFile* file = checkpoint_.file_of_unlisted(tensor);
      note(tensor + " is missing" +
           (file == nullptr ? "" : " from model.safetensors.index.json, though " + file->path() + " has it"));
      return {};
    }
    // Vectors are 1-D in the file, but a single-row matrix (block scales of a thin weight) is 2-D.
    const std::vector<std::int64_t>& shape = entry.tensor->shape;
    const bool fits = (shape.size() == 2 && shape[0] == rows && shape[1] == cols) ||
                      (shape.size() == 1 && rows == 1 && shape[0] == cols);
    if (fits) return entry;
    const std::array<std::int64_t, 2> expected = {rows, cols};
    const std::span<const std::int64_t> wanted(expected);
    const std::string vector = rows == 1 ? shape_string(wanted.last(1)) : "";
    const std::string matrix = shape_string(wanted);
    note(tensor + " is " + shape_string(shape) + ", the config implies " +
         (rows != 1           ? matrix
          : shape.size() == 2 ? vector + " or " + matrix
                              : vector));
    return {};
  }

  void note(std::string problem) {
    if (std::find(problems_.begin(), problems_.end(), problem) != problems_.end()) return;
    problems_.push_back(std::move(problem));
    // Stop here: a hostile config may imply billions of problems.
    if (problems_.size() == kMaxProblems) throw_problems();
  }

  void throw_problems() const {
    if (problems_.empty()) return;
    std::string list;
    for (const std::string& problem : problems_) list.append(list.empty() ? "" : "; ").append(problem);
    if (problems_.size() == kMaxProblems) list += "; and perhaps more";
    list += advice();
    throw Error(ErrorCode::invalid_file, checkpoint_.directory().string(),
                ": tensors do not fit config.json: ", list);
  }

  /// Advice for known kinds of checkpoints that use other tensor names.
  const char* advice() const {
    if (checkpoint_.find("embed_tokens.weight").tensor != nullptr)
      return ". These are the names of a model without its head: save it as a causal LM, whose tensors begin "
             "with \"model.\"";
    const std::string experts = fmt::format("model.layers.{}.mlp.experts.gate_up_proj",
                                            config_.shape.moe ? config_.shape.moe->first_dense_layers : 0);
    if (checkpoint_.find(experts).tensor != nullptr)
      return ". Its experts are fused: save it with transformers' save_original_format=True";
    return "";
  }

  const ModelConfig& config_;
  const Checkpoint& checkpoint_;
  const Topology& topo_;
  RankCoordinates at_;
  WeightHome home_;
  LatentWeights latent_;
  std::int64_t layer_ = -1;
  std::int64_t expert_ = -1;
  std::string prefix_;
  WeightPlan plan_;
  std::vector<std::string> problems_;
};

/// Whether a topology built for one shape divides the tensors of the other.
bool is_same_model(const ModelShape& a, const ModelShape& b) {
  const auto sizes = [](const ModelShape& shape) {
    return std::array{shape.hidden,       shape.num_query_heads, shape.num_kv_heads,
                      shape.head_dim,     shape.value_dim,       shape.ffn,
                      shape.vocab,        shape.num_layers,      shape.num_experts(),
                      shape.expert_ffn(), shape.shared_ffn()};
  };
  return sizes(a) == sizes(b);
}

}  // namespace

std::int64_t WeightPlan::allocated_bytes() const {
  std::int64_t total = 0;
  for (const std::int64_t bytes : buffer_bytes) total += bytes;
  return total;
}

std::int64_t WeightPlan::in_place_bytes() const {
  std::int64_t total = 0;
  for (const WeightTarget& target : targets) total += target.in_place ? target.size_bytes() : 0;
  return total;
}

std::int64_t WeightPlan::weight_bytes() const {
  std::int64_t total = 0;
  for (const WeightTarget& target : targets) total += target.size_bytes();
  return total;
}

WeightPlan plan_weights(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                        int world_rank, WeightHome home, LatentWeights latent) {
  const ModelShape& shape = config.shape;
  const ModelShape& built = topo.shape();
  HELIX_EXPECTS(is_same_model(shape, built), ErrorCode::invalid_argument,
                "the topology was built for another model (hidden ", built.hidden, ", ", built.num_layers,
                " layers) than config.json describes (hidden ", shape.hidden, ", ", shape.num_layers,
                " layers); build it from ModelConfig::shape");
  return PlanBuilder(config, checkpoint, topo, world_rank, home, latent).build();
}

std::vector<std::string_view> unused_tensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  const Topology alone({}, config.shape);
  const WeightPlan plan = plan_weights(config, checkpoint, alone, 0);
  std::set<const TensorInfo*> used;
  for (const WeightTarget& target : plan.targets) {
    for (const WeightSlice& slice : target.slices) used.insert({slice.source.tensor, slice.scale.tensor});
  }
  const auto is_known = [&](const TensorInfo& tensor) {
    constexpr std::string_view kLayers = "model.layers.";
    const std::string_view name = tensor.name;
    if (tensor.begin == tensor.end) return true;  // shared experts of width 0
    if (name.ends_with("rotary_emb.inv_freq")) return true;
    if (plan.has_tied_head && (name == "lm_head.weight" || name == "model.embed_tokens.weight")) return true;
    if (!name.starts_with(kLayers)) return false;
    std::int64_t layer = -1;
    std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
    return layer >= config.shape.num_layers && layer < config.shape.num_layers + config.num_mtp_layers;
  };
  std::vector<std::string_view> unused;
  for (const SafetensorsFile& file : checkpoint.files()) {
    for (const TensorInfo& tensor : file.tensors()) {
      // With an index, a tensor that the index does not name, or places in another file, is not part of the
      // checkpoint.
      const bool is_there = checkpoint.find(tensor.name).tensor == &tensor;
      if (is_there && !used.contains(&tensor) && !is_known(tensor)) unused.push_back(tensor.name);
    }
  }
  return unused;
}

std::optional<FileBytes> find_in_place(const WeightTarget& target) {
  if (target.zero_cols > 0) return std::nullopt;
  const auto element = static_cast<std::uint64_t>(size_bytes(target.dtype));
  std::optional<FileBytes> found;
  for (const WeightSlice& slice : target.slices) {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::int64_t rows = slice.repeats * slice.rows.size();
    if (rows == 0 || slice.cols.size() == 0) continue;
    const bool is_as_stored =
        tensor.dtype == target.dtype && slice.scale.tensor == nullptr && !slice.is_transposed;
    // Contiguous in both the file and the target: whole rows, or part of the only row.
    const bool is_run = (slice.repeats == 1 || slice.row_stride == slice.rows.size()) &&
                        (rows == 1 || slice.cols.size() == tensor.cols()) &&
                        (rows == 1 || slice.cols.size() == target.cols);
    if (!is_as_stored || !is_run) return std::nullopt;
    const std::uint64_t begin =
        slice.source.file->offset(tensor) +
        static_cast<std::uint64_t>(slice.rows.begin * tensor.cols() + slice.cols.begin) * element;
    if (!found) found = FileBytes{slice.source.file, begin, 0};
    const auto place =
        static_cast<std::uint64_t>(slice.target_row * target.cols + slice.target_col) * element;
    const bool follows = slice.source.file == found->file && begin == found->begin + found->size;
    if (!follows || place != found->size) return std::nullopt;
    found->size += static_cast<std::uint64_t>(rows * slice.cols.size()) * element;
  }
  const bool is_whole = found && found->size == static_cast<std::uint64_t>(target.size_bytes());
  return is_whole && found->begin % element == 0 ? found : std::nullopt;
}

}  // namespace helix::decode
