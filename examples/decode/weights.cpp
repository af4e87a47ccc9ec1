// SPDX-License-Identifier: Apache-2.0
// Slicing a checkpoint for one rank, and copying, widening and dequantising the slices.
#include "weights.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <variant>

#include <helix/error.hpp>

#include "strict_json.hpp"

namespace helix::decode {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kChunkBytes = std::int64_t{8}
                                     << 20;  // staged at a time; bounds the pages that stay resident
constexpr std::size_t kMaxProblems = 12;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t bytes_of(DType dtype) {
  return static_cast<std::int64_t>(size_bytes(dtype));
}

/// One piece of a target before it is looked up: a rectangle of a named tensor of known full size.
struct Piece {
  std::string tensor;
  std::int64_t full_rows = 0;
  std::int64_t full_cols = 0;
  Range rows;
  Range cols;
  std::int64_t target_row = 0;
  std::int64_t target_col = 0;
  bool is_transposed = false;
};

class PlanBuilder {
 public:
  PlanBuilder(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo, int world_rank)
      : config_(config), checkpoint_(checkpoint), topo_(topo), at_(topo.coordinates(world_rank)) {
    plan_.layers = topo.layers(at_.stage);
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
    const std::int64_t hidden = config_.hidden;
    add(WeightRole::input_norm, {whole(name("input_layernorm.weight"), 1, hidden)});
    add(WeightRole::post_attention_norm, {whole(name("post_attention_layernorm.weight"), 1, hidden)});
    if (config_.mla) {
      add_latent_attention(*config_.mla);
    } else {
      add_grouped_query_attention();
    }
    if (config_.is_moe_layer(layer_)) {
      add_experts(*config_.moe);
    } else {
      const FfnRoles roles = {WeightRole::gate_up, WeightRole::gate_up_bias, WeightRole::down,
                              WeightRole::down_bias};
      add_ffn(name("mlp."), config_.ffn, topo_.ffn(at_.stage_rank), roles, config_.has_mlp_bias);
    }
  }

  void add_grouped_query_attention() {
    const std::int64_t dim = config_.head_dim;
    const std::int64_t q_rows = config_.num_query_heads * dim;
    const std::int64_t kv_rows = config_.num_kv_heads * dim;
    const auto scaled = [&](Range heads) { return Range{heads.begin * dim, heads.end * dim}; };
    const Range q = scaled(topo_.query_heads(at_.stage_rank));
    const Range kv = scaled(topo_.kv_heads(at_.stage_rank));
    add_stacked(WeightRole::qkv, {some_rows(name("self_attn.q_proj.weight"), q_rows, config_.hidden, q),
                                  some_rows(name("self_attn.k_proj.weight"), kv_rows, config_.hidden, kv),
                                  some_rows(name("self_attn.v_proj.weight"), kv_rows, config_.hidden, kv)});
    if (config_.has_qkv_bias) {
      add_joined(WeightRole::qkv_bias, {some_cols(name("self_attn.q_proj.bias"), 1, q_rows, q),
                                        some_cols(name("self_attn.k_proj.bias"), 1, kv_rows, kv),
                                        some_cols(name("self_attn.v_proj.bias"), 1, kv_rows, kv)});
    }
    if (config_.has_qk_norm) {
      add(WeightRole::q_norm, {whole(name("self_attn.q_norm.weight"), 1, dim)});
      add(WeightRole::k_norm, {whole(name("self_attn.k_norm.weight"), 1, dim)});
    }
    add(WeightRole::attention_out, {some_cols(name("self_attn.o_proj.weight"), config_.hidden, q_rows,
                                              topo_.output_projection_rows(at_.stage_rank, dim))});
    if (config_.has_output_bias && at_.stage_rank == 0) {
      add(WeightRole::attention_out_bias, {whole(name("self_attn.o_proj.bias"), 1, config_.hidden)});
    }
  }

  void add_latent_attention(const MlaConfig& mla) {
    const std::int64_t heads = config_.num_query_heads;
    const std::int64_t q_rows = heads * mla.qk_head_dim();
    if (mla.q_lora_rank > 0) {
      add(WeightRole::q_a, {whole(name("self_attn.q_a_proj.weight"), mla.q_lora_rank, config_.hidden)});
      add(WeightRole::q_a_norm, {whole(name("self_attn.q_a_layernorm.weight"), 1, mla.q_lora_rank)});
      add(WeightRole::q_b, {whole(name("self_attn.q_b_proj.weight"), q_rows, mla.q_lora_rank)});
    } else {
      add(WeightRole::q_b, {whole(name("self_attn.q_proj.weight"), q_rows, config_.hidden)});
    }
    const std::int64_t latent = mla.kv_lora_rank;
    add(WeightRole::kv_a,
        {whole(name("self_attn.kv_a_proj_with_mqa.weight"), latent + mla.qk_rope_head_dim, config_.hidden)});
    add(WeightRole::kv_a_norm, {whole(name("self_attn.kv_a_layernorm.weight"), 1, latent)});

    // kv_b_proj stacks, head by head, the rows that make keys (W_UK) and the rows that make values (W_UV).
    const std::string kv_b = name("self_attn.kv_b_proj.weight");
    const std::int64_t stride = mla.qk_nope_head_dim + mla.v_head_dim;
    std::vector<Piece> uk;
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t row = head * stride;
      uk.push_back({kv_b,
                    heads * stride,
                    latent,
                    {row, row + mla.qk_nope_head_dim},
                    all(latent),
                    head * latent,
                    0,
                    true});
    }
    add(WeightRole::w_uk, std::move(uk));
    std::vector<Piece> uv;
    const Range combined = topo_.combined_heads(at_.stage_rank);
    for (std::int64_t head = combined.begin; head < combined.end; ++head) {
      const std::int64_t row = head * stride + mla.qk_nope_head_dim;
      uv.push_back(some_rows(kv_b, heads * stride, latent, {row, row + mla.v_head_dim}));
    }
    add_stacked(WeightRole::w_uv, std::move(uv));
    add(WeightRole::attention_out,
        {some_cols(name("self_attn.o_proj.weight"), config_.hidden, heads * mla.v_head_dim,
                   topo_.output_projection_rows(at_.stage_rank, mla.v_head_dim))});
  }

  struct FfnRoles {
    WeightRole gate_up;
    WeightRole gate_up_bias;
    WeightRole down;
    WeightRole down_bias;
  };

  void add_ffn(const std::string& prefix, std::int64_t full, Range part, const FfnRoles& roles,
               bool has_bias) {
    const std::int64_t hidden = config_.hidden;
    add_stacked(roles.gate_up, {some_rows(prefix + "gate_proj.weight", full, hidden, part),
                                some_rows(prefix + "up_proj.weight", full, hidden, part)});
    add(roles.down, {some_cols(prefix + "down_proj.weight", hidden, full, part)});
    if (!has_bias) return;
    add_joined(roles.gate_up_bias, {some_cols(prefix + "gate_proj.bias", 1, full, part),
                                    some_cols(prefix + "up_proj.bias", 1, full, part)});
    if (at_.stage_rank == 0) add(roles.down_bias, {whole(prefix + "down_proj.bias", 1, hidden)});
  }

  void add_experts(const MoeConfig& moe) {
    add(WeightRole::router, {whole(name("mlp.gate.weight"), moe.num_experts, config_.hidden)});
    if (moe.has_router_bias) {
      add(WeightRole::router_bias, {whole(name("mlp.gate.e_score_correction_bias"), 1, moe.num_experts)});
    }
    const Range part = topo_.expert_ffn(at_.stage_rank);
    const FfnRoles expert_roles = {WeightRole::expert_gate_up, {}, WeightRole::expert_down, {}};
    for (expert_ = plan_.experts.begin; expert_ < plan_.experts.end; ++expert_) {
      add_ffn(name("mlp.experts.") + std::to_string(expert_) + ".", moe.expert_ffn, part, expert_roles,
              false);
    }
    expert_ = -1;
    if (moe.num_shared_experts > 0) {
      const FfnRoles roles = {WeightRole::shared_gate_up, WeightRole::shared_gate_up_bias,
                              WeightRole::shared_down, WeightRole::shared_down_bias};
      add_ffn(name("mlp.shared_experts."), moe.shared_ffn(), topo_.shared_expert_ffn(at_.stage_rank), roles,
              config_.has_mlp_bias);
    }
  }

  void add_ends() {
    const bool is_first = at_.stage == 0;
    const bool is_last = at_.stage == topo_.pp() - 1;
    const Range vocab = topo_.vocab(at_.stage_rank);
    plan_.has_tied_head = is_last && config_.tie_word_embeddings;
    if (is_first || plan_.has_tied_head) {
      add(WeightRole::embedding,
          {some_rows("model.embed_tokens.weight", config_.vocab, config_.hidden, vocab)});
    }
    if (!is_last) return;
    add(WeightRole::final_norm, {whole("model.norm.weight", 1, config_.hidden)});
    if (!config_.tie_word_embeddings) {
      add(WeightRole::lm_head, {some_rows("lm_head.weight", config_.vocab, config_.hidden, vocab)});
    }
  }

  /// Pieces below each other.
  void add_stacked(WeightRole role, std::vector<Piece> pieces) {
    std::int64_t row = 0;
    for (Piece& piece : pieces) {
      piece.target_row = row;
      row += piece.rows.size();
    }
    add(role, std::move(pieces));
  }

  /// Pieces beside each other.
  void add_joined(WeightRole role, std::vector<Piece> pieces) {
    std::int64_t col = 0;
    for (Piece& piece : pieces) {
      piece.target_col = col;
      col += piece.cols.size();
    }
    add(role, std::move(pieces));
  }

  void add(WeightRole role, std::vector<Piece> pieces) {
    WeightTarget target;
    target.role = role;
    target.layer = layer_;
    target.expert = expert_;
    std::optional<DType> common;
    bool is_uniform = role != WeightRole::router_bias;  // which route() reads as f32
    for (const Piece& piece : pieces) {
      const std::int64_t rows = piece.is_transposed ? piece.cols.size() : piece.rows.size();
      const std::int64_t cols = piece.is_transposed ? piece.rows.size() : piece.cols.size();
      target.rows = std::max(target.rows, piece.target_row + rows);
      target.cols = std::max(target.cols, piece.target_col + cols);
      const std::optional<WeightSlice> slice = look_up(piece);
      if (!slice) continue;
      const DType dtype = *slice->source.tensor->dtype;
      if (dtype == DType::fp8_e4m3 || (common && *common != dtype)) is_uniform = false;
      common = dtype;
      target.slices.push_back(*slice);
    }
    target.dtype = is_uniform ? common.value_or(DType::f32) : DType::f32;
    target.buffer = plan_.buffer_bytes.size() - 1;
    target.offset = plan_.buffer_bytes.back();
    plan_.buffer_bytes.back() += round_up(target.size_bytes(), kAlignment);
    plan_.targets.push_back(std::move(target));
  }

  /// nullopt after noting what is wrong with the tensor.
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
      const auto blocks = [](std::int64_t size, std::int64_t block) { return (size + block - 1) / block; };
      slice.scale = find(piece.tensor + "_scale_inv", blocks(piece.full_rows, config_.fp8_blocks->block_rows),
                         blocks(piece.full_cols, config_.fp8_blocks->block_cols));
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
    return slice;
  }

  Checkpoint::Entry find(const std::string& tensor, std::int64_t rows, std::int64_t cols) {
    const Checkpoint::Entry entry = checkpoint_.find(tensor);
    if (entry.tensor == nullptr) {
      note(tensor + " is missing");
      return {};
    }
    // Vectors are 1-D in the file; a single-row matrix (block scales of a thin weight) is 2-D.
    const std::vector<std::int64_t>& shape = entry.tensor->shape;
    const bool fits = (shape.size() == 2 && shape[0] == rows && shape[1] == cols) ||
                      (shape.size() == 1 && rows == 1 && shape[0] == cols);
    if (fits) return entry;
    const std::array<std::int64_t, 2> expected = {rows, cols};
    const std::span<const std::int64_t> wanted(expected);
    note(tensor + " is " + shape_string(shape) + ", the config implies " +
         shape_string(rows == 1 && shape.size() != 2 ? wanted.last(1) : wanted));
    return {};
  }

  void note(std::string problem) {
    if (std::find(problems_.begin(), problems_.end(), problem) != problems_.end()) return;
    problems_.push_back(std::move(problem));
    // Not more: a hostile config may ask for billions.
    if (problems_.size() == kMaxProblems) throw_problems();
  }

  void throw_problems() const {
    if (problems_.empty()) return;
    std::string list;
    for (const std::string& problem : problems_) list.append(list.empty() ? "" : "; ").append(problem);
    if (problems_.size() == kMaxProblems) list += "; and perhaps more";
    throw Error(ErrorCode::invalid_file, checkpoint_.directory().string(),
                ": tensors do not fit config.json: ", list);
  }

  const ModelConfig& config_;
  const Checkpoint& checkpoint_;
  const Topology& topo_;
  RankCoordinates at_;
  std::int64_t layer_ = -1;
  std::int64_t expert_ = -1;
  std::string prefix_;
  WeightPlan plan_;
  std::vector<std::string> problems_;
};

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));  // tensors need not be aligned
  return value;
}

float load_float(DType dtype, const std::byte* bytes) {
  return dispatch(dtype, [&]<class T>(T*) { return static_cast<float>(load<T>(bytes)); });
}

/// `count` elements of type From at `source` to float.
template <class From>
void widen(const std::byte* source, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(load<From>(source + i * static_cast<std::int64_t>(sizeof(From))));
  }
}

const std::array<float, 256>& fp8_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (unsigned i = 0; i < 256; ++i) {
      table[i] = static_cast<float>(fp8_e4m3::from_bits(static_cast<std::uint8_t>(i)));
    }
    return table;
  }();
  return values;
}

/// Copies slices, one chunk of source rows at a time, through a staging buffer.
class SliceStreamer {
 public:
  SliceStreamer(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress)
      : plan_(plan), sink_(sink), progress_(progress), total_(plan.weight_bytes()) {}

  void run() {
    report(0);
    for (const WeightTarget& target : plan_.targets) {
      for (const WeightSlice& slice : target.slices) stream(target, slice);
    }
  }

 private:
  void stream(const WeightTarget& target, const WeightSlice& slice) {
    if (slice.rows.size() == 0 || slice.cols.size() == 0) return;
    const TensorInfo& tensor = *slice.source.tensor;
    const std::int64_t source_row_bytes = tensor.cols() * bytes_of(*tensor.dtype);
    if (slice.is_transposed) {
      write_transposed(target, slice);
      release_rows(slice, slice.rows, source_row_bytes);
      return;
    }
    const std::int64_t rows_a_chunk = std::max<std::int64_t>(
        1, kChunkBytes / std::max(source_row_bytes, slice.cols.size() * bytes_of(target.dtype)));
    for (std::int64_t row = slice.rows.begin; row < slice.rows.end; row += rows_a_chunk) {
      const Range rows = {row, std::min(row + rows_a_chunk, slice.rows.end)};
      write_rows(target, slice, rows);
      release_rows(slice, rows, source_row_bytes);
    }
  }

  void release_rows(const WeightSlice& slice, Range rows, std::int64_t row_bytes) const {
    const std::span<const std::byte> data = slice.source.file->data(*slice.source.tensor);
    slice.source.file->release(data.subspan(static_cast<std::size_t>(rows.begin * row_bytes),
                                            static_cast<std::size_t>(rows.size() * row_bytes)));
  }

  void write_rows(const WeightTarget& target, const WeightSlice& slice, Range rows) {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::byte* source = slice.source.file->data(tensor).data();
    const std::int64_t element = bytes_of(*tensor.dtype);
    const std::int64_t part = slice.cols.size();
    const std::int64_t target_element = bytes_of(target.dtype);
    const std::int64_t target_row = slice.target_row + rows.begin - slice.rows.begin;
    const std::int64_t target_begin = (target_row * target.cols + slice.target_col) * target_element;

    const bool is_plain = *tensor.dtype == target.dtype;
    if (is_plain && part == tensor.cols() && part == target.cols) {
      emit(target, target_begin, source + rows.begin * part * element, rows.size() * part * element);
      return;
    }
    staging_.resize(static_cast<std::size_t>(rows.size() * part * target_element));
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const std::byte* from = source + (row * tensor.cols() + slice.cols.begin) * element;
      std::byte* to = staging_.data() + (row - rows.begin) * part * target_element;
      if (is_plain) {
        std::memcpy(to, from, static_cast<std::size_t>(part * element));
      } else {
        widen_row(slice, row, slice.cols, reinterpret_cast<float*>(to));
      }
    }
    if (part == target.cols) {
      emit(target, target_begin, staging_.data(), static_cast<std::int64_t>(staging_.size()));
      return;
    }
    for (std::int64_t row = 0; row < rows.size(); ++row) {  // joined biases: one row, beside another
      emit(target, target_begin + row * target.cols * target_element,
           staging_.data() + row * part * target_element, part * target_element);
    }
  }

  /// A head of W_UK: small enough to stage whole.
  void write_transposed(const WeightTarget& target, const WeightSlice& slice) {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::byte* source = slice.source.file->data(tensor).data();
    const std::int64_t element = bytes_of(*tensor.dtype);
    const std::int64_t target_element = bytes_of(target.dtype);
    const std::int64_t rows = slice.rows.size();
    const std::int64_t cols = slice.cols.size();
    const bool is_plain = *tensor.dtype == target.dtype;
    staging_.resize(static_cast<std::size_t>(rows * cols * target_element));
    row_.resize(static_cast<std::size_t>(cols));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::byte* from =
          source + ((slice.rows.begin + row) * tensor.cols() + slice.cols.begin) * element;
      if (!is_plain) {
        widen_row(slice, slice.rows.begin + row, slice.cols, row_.data());
        from = reinterpret_cast<const std::byte*>(row_.data());
      }
      for (std::int64_t col = 0; col < cols; ++col) {
        std::memcpy(staging_.data() + (col * rows + row) * target_element, from + col * target_element,
                    static_cast<std::size_t>(target_element));
      }
    }
    emit(target, (slice.target_row * target.cols + slice.target_col) * target_element, staging_.data(),
         static_cast<std::int64_t>(staging_.size()));
  }

  /// Columns `cols` of source row `row` as floats; fp8 times the scale of its block, found by the full
  /// tensor's indices.
  void widen_row(const WeightSlice& slice, std::int64_t row, Range cols, float* out) const {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::int64_t element = bytes_of(*tensor.dtype);
    const std::byte* from =
        slice.source.file->data(tensor).data() + (row * tensor.cols() + cols.begin) * element;
    switch (*tensor.dtype) {
      case DType::f32:
        return widen<float>(from, cols.size(), out);
      case DType::f16:
        return widen<f16>(from, cols.size(), out);
      case DType::bf16:
        return widen<bf16>(from, cols.size(), out);
      case DType::fp8_e4m3:
        break;
    }
    const std::array<float, 256>& values = fp8_values();
    const TensorInfo& scale = *slice.scale.tensor;
    const std::byte* scales = slice.scale.file->data(scale).data();
    const std::int64_t block_cols = plan_.fp8_blocks.block_cols;
    const std::int64_t scale_row = row / plan_.fp8_blocks.block_rows * scale.cols();
    for (std::int64_t col = cols.begin; col < cols.end;) {
      const std::int64_t end = std::min(cols.end, (col / block_cols + 1) * block_cols);
      const float factor =
          load_float(*scale.dtype, scales + (scale_row + col / block_cols) * bytes_of(*scale.dtype));
      for (; col < end; ++col) *out++ = values[static_cast<std::size_t>(*from++)] * factor;
    }
  }

  void emit(const WeightTarget& target, std::int64_t offset, const std::byte* data, std::int64_t bytes) {
    for (std::int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
      const std::int64_t count = std::min(kChunkBytes, bytes - begin);
      sink_(target.buffer, target.offset + offset + begin, data + begin, static_cast<std::size_t>(count));
      report(count);
    }
  }

  void report(std::int64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  const WeightPlan& plan_;
  const WeightSink& sink_;
  const WeightProgress& progress_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  std::vector<std::byte> staging_;
  std::vector<float> row_;
};

}  // namespace

std::int64_t WeightPlan::allocated_bytes() const {
  std::int64_t total = 0;
  for (const std::int64_t bytes : buffer_bytes) total += bytes;
  return total;
}

std::int64_t WeightPlan::weight_bytes() const {
  std::int64_t total = 0;
  for (const WeightTarget& target : targets) total += target.size_bytes();
  return total;
}

WeightPlan plan_weights(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                        int world_rank) {
  const ModelShape shape = config.shape();
  const ModelShape& built = topo.shape();
  HELIX_EXPECTS(shape.hidden == built.hidden && shape.num_query_heads == built.num_query_heads &&
                    shape.num_kv_heads == built.num_kv_heads && shape.head_dim == built.head_dim &&
                    shape.ffn == built.ffn && shape.expert_ffn == built.expert_ffn &&
                    shape.shared_expert_ffn == built.shared_expert_ffn &&
                    shape.num_experts == built.num_experts && shape.vocab == built.vocab &&
                    shape.num_layers == built.num_layers,
                ErrorCode::invalid_argument, "the topology was built for another model (hidden ",
                built.hidden, ", ", built.num_layers, " layers) than config.json describes (hidden ",
                shape.hidden, ", ", shape.num_layers, " layers); build it from ModelConfig::shape()");
  return PlanBuilder(config, checkpoint, topo, world_rank).build();
}

std::int64_t plan_weight_bytes(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                               int world_rank) {
  return plan_weights(config, checkpoint, topo, world_rank).allocated_bytes();
}

void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress) {
  SliceStreamer(plan, sink, progress).run();
}

StageWeightViews view_weights(const ModelConfig& config, const WeightPlan& plan,
                              const std::vector<const std::byte*>& buffers) {
  StageWeightViews views;
  for (std::int64_t layer = plan.layers.begin; layer < plan.layers.end; ++layer) {
    LayerWeights& weights = views.layers.emplace_back();
    if (config.mla) weights.attention = MlaWeights{};
    if (config.is_moe_layer(layer)) {
      weights.ffn = MoeWeights{};
      std::get<MoeWeights>(weights.ffn).experts.resize(static_cast<std::size_t>(plan.experts.size()));
    }
  }
  for (const WeightTarget& target : plan.targets) {
    const WeightView view = {buffers.at(target.buffer) + target.offset, target.dtype, target.rows,
                             target.cols};
    LayerWeights* layer = target.layer < 0
                              ? nullptr
                              : &views.layers[static_cast<std::size_t>(target.layer - plan.layers.begin)];
    const auto gqa = [&]() -> GqaWeights& { return std::get<GqaWeights>(layer->attention); };
    const auto mla = [&]() -> MlaWeights& { return std::get<MlaWeights>(layer->attention); };
    const auto dense = [&]() -> DenseFfnWeights& { return std::get<DenseFfnWeights>(layer->ffn); };
    const auto moe = [&]() -> MoeWeights& { return std::get<MoeWeights>(layer->ffn); };
    const auto expert = [&]() -> ExpertWeights& {
      return moe().experts[static_cast<std::size_t>(target.expert - plan.experts.begin)];
    };
    switch (target.role) {
      case WeightRole::embedding:
        views.embedding = view;
        break;
      case WeightRole::final_norm:
        views.final_norm = view;
        break;
      case WeightRole::lm_head:
        views.lm_head = view;
        break;
      case WeightRole::input_norm:
        layer->input_norm = view;
        break;
      case WeightRole::post_attention_norm:
        layer->post_attention_norm = view;
        break;
      case WeightRole::qkv:
        gqa().qkv = view;
        break;
      case WeightRole::qkv_bias:
        gqa().qkv_bias = view;
        break;
      case WeightRole::q_norm:
        gqa().q_norm = view;
        break;
      case WeightRole::k_norm:
        gqa().k_norm = view;
        break;
      case WeightRole::attention_out:
        (config.mla ? mla().o : gqa().o) = view;
        break;
      case WeightRole::attention_out_bias:
        gqa().o_bias = view;
        break;
      case WeightRole::q_a:
        mla().q_a = view;
        break;
      case WeightRole::q_a_norm:
        mla().q_a_norm = view;
        break;
      case WeightRole::q_b:
        mla().q_b = view;
        break;
      case WeightRole::kv_a:
        mla().kv_a = view;
        break;
      case WeightRole::kv_a_norm:
        mla().kv_a_norm = view;
        break;
      case WeightRole::w_uk:
        mla().w_uk = view;
        break;
      case WeightRole::w_uv:
        mla().w_uv = view;
        break;
      case WeightRole::gate_up:
        dense().gate_up = view;
        break;
      case WeightRole::gate_up_bias:
        dense().gate_up_bias = view;
        break;
      case WeightRole::down:
        dense().down = view;
        break;
      case WeightRole::down_bias:
        dense().down_bias = view;
        break;
      case WeightRole::router:
        moe().router = view;
        break;
      case WeightRole::router_bias:
        moe().router_bias = static_cast<const float*>(view.data);
        break;
      case WeightRole::expert_gate_up:
        expert().gate_up = view;
        break;
      case WeightRole::expert_down:
        expert().down = view;
        break;
      case WeightRole::shared_gate_up:
        moe().shared.gate_up = view;
        break;
      case WeightRole::shared_gate_up_bias:
        moe().shared.gate_up_bias = view;
        break;
      case WeightRole::shared_down:
        moe().shared.down = view;
        break;
      case WeightRole::shared_down_bias:
        moe().shared.down_bias = view;
        break;
    }
  }
  if (plan.has_tied_head) views.lm_head = views.embedding;
  return views;
}

}  // namespace helix::decode
