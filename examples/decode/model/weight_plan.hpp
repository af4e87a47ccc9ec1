// SPDX-License-Identifier: Apache-2.0
// WeightPlan: which slices of a checkpoint one rank takes, and where in its memory they go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

/// What a loaded matrix is for.
enum class WeightRole : std::uint8_t {
  embedding,
  final_norm,
  lm_head,
  input_norm,
  post_attention_norm,
  qkv,
  qkv_bias,
  q_norm,
  k_norm,
  attention_out,
  attention_out_bias,
  qkv_a,
  qkv_a_bias,
  q_a_norm,
  q_b,
  kv_a_norm,
  w_uk,
  w_uv,
  expand_k,
  expand_v,
  gate_up,
  gate_up_bias,
  down,
  down_bias,
  router,
  router_bias,
  expert_gate_up,
  expert_down,
  shared_gate_up,
  shared_gate_up_bias,
  shared_down,
  shared_down_bias
};

/// A rectangle of one tensor of the checkpoint, or a run of equal ones, and the row or column of the target
/// where it goes. 1-D tensors are one row.
struct WeightSlice {
  Checkpoint::Entry source;
  Checkpoint::Entry scale;  ///< fp8: the block scales to multiply with; else null.
  Range rows;
  Range cols;
  std::int64_t target_row = 0;
  std::int64_t target_col = 0;
  bool is_transposed = false;  ///< target[target_row + c, target_col + r] = source[r, c]
  std::int64_t repeats = 1;    ///< Rectangles of this size: one each of a run of heads.
  std::int64_t row_stride =
      0;  ///< Source rows from one rectangle to the next; target rows: see target_rows().

  /// Rows of the target that one rectangle fills, and by which the next lies below it.
  std::int64_t target_rows() const { return is_transposed ? cols.size() : rows.size(); }
  /// Columns of the target that one rectangle fills.
  std::int64_t target_cols() const { return is_transposed ? rows.size() : cols.size(); }
  /// Source rows of rectangle `index`.
  Range rows_of(std::int64_t index) const {
    return {rows.begin + index * row_stride, rows.end + index * row_stride};
  }

  const std::string& tensor() const { return source.tensor->name; }
};

/// Bytes [begin, begin + size) of a file of the checkpoint.
struct FileBytes {
  const SafetensorsFile* file = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;

  /// The bytes in the mapped file.
  std::span<const std::byte> data() const {
    return file->mapping()->bytes().subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size));
  }
};

/// Where a rank's weights may lie.
enum class WeightHome : std::uint8_t {
  buffers,  ///< All in buffers of the backend.
  files     ///< Those that lie in a file as they are used there, in its mapping; the others in buffers.
};

/// A matrix that the rank holds: contiguous and row-major, in place in a file or at `offset` of buffer
/// `buffer`.
struct WeightTarget {
  WeightRole role = WeightRole::embedding;
  std::int64_t layer = -1;   ///< -1: belongs to no layer.
  std::int64_t expert = -1;  ///< Global id; -1: none.
  DType dtype = DType::f32;  ///< The checkpoint's type; f32 where fp8 or unlike types are widened.
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::size_t buffer = 0;      ///< Not in place: the buffer.
  std::int64_t offset = 0;     ///< Not in place: bytes, a multiple of 256.
  std::int64_t zero_cols = 0;  ///< Columns in front of all slices, which no tensor has; only with one row.
  std::vector<WeightSlice> slices;
  std::optional<FileBytes> in_place;

  std::int64_t size_bytes() const {
    return rows * cols * static_cast<std::int64_t>(helix::size_bytes(dtype));
  }
};

/// Everything that one rank takes from a checkpoint, and where it goes. Borrows from the Checkpoint.
struct WeightPlan {
  Range layers;                ///< Layers of this rank's stage.
  Range experts;               ///< Global ids of this rank's routed experts.
  bool has_tied_head = false;  ///< The LM head is the embedding.
  Range combined_heads;        ///< Heads of this rank's W_UV, which is a part of expand_v where there is one.
  std::vector<WeightTarget> targets;  ///< Targets in loading order.
  std::vector<std::int64_t>
      buffer_bytes;  ///< Sizes of the buffers: one a layer, and a last one for the rest.
  Fp8BlockConfig fp8_blocks;

  /// Bytes of all buffers.
  std::int64_t allocated_bytes() const;
  /// Bytes of all targets in place.
  std::int64_t in_place_bytes() const;
  /// Bytes of all targets: without the alignment between them.
  std::int64_t weight_bytes() const;
};

/// What a plan holds of latent attention: what absorbed attention needs, or what expanded does too.
enum class LatentWeights : std::uint8_t { absorbed, both };

/// Decides every slice of `world_rank`, and with WeightHome::files which targets lie in place: see
/// find_in_place(). Reads headers only.
/// @throws Error(invalid_file) listing the tensors that are missing or have another shape than the config
/// implies (both shapes), Error(unsupported) for element types that nothing here reads,
/// Error(invalid_argument) if `topo` was built for another model.
WeightPlan plan_weights(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                        int world_rank, WeightHome home = WeightHome::buffers,
                        LatentWeights latent = LatentWeights::absorbed);
WeightPlan plan_weights(const ModelConfig&, const Checkpoint&&, const Topology&, int,
                        WeightHome = WeightHome::buffers,
                        LatentWeights = LatentWeights::absorbed) = delete;  // it borrows

/// The names of the tensors that no rank takes under any topology, in the order of the files: those of a
/// config.json that says too little of its model. But for what a model is known to do without: the buffers of
/// rope, the head of a tied pair and, behind the layers of DeepSeek, those that predict more than one token.
/// @throws as plan_weights().
std::vector<std::string_view> unused_tensors(const ModelConfig& config, const Checkpoint& checkpoint);

/// The one run of a file that holds exactly the rows of `target`, in order and in its type: whole rows of a
/// tensor, or several tensors' that happen to lie behind each other (HF sorts by name: gate_proj, up_proj).
/// nullopt where there is none, or where it does not begin at a multiple of the element size, which the
/// format does not promise. Looks at slices and headers only.
std::optional<FileBytes> find_in_place(const WeightTarget& target);

}  // namespace helix::decode
