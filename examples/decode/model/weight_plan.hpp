// SPDX-License-Identifier: Apache-2.0
// WeightPlan: which slices of a checkpoint one rank takes, and where they go in its memory.
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

/// The purpose of a loaded matrix.
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

/// A rectangle of one tensor of the checkpoint, or a run of equal rectangles, and its row and column in the
/// target. A 1-D tensor is one row.
struct WeightSlice {
  Checkpoint::Entry source;
  Checkpoint::Entry scale;  ///< fp8: the block scales; otherwise null.
  Range rows;
  Range cols;
  std::int64_t target_row = 0;
  std::int64_t target_col = 0;
  bool is_transposed = false;  ///< target[target_row + c, target_col + r] = source[r, c]
  std::int64_t repeats = 1;    ///< Number of rectangles of this size: one for each head of a run.
  std::int64_t row_stride =
      0;  ///< Source rows from one rectangle to the next; target rows: see target_rows().

  /// Target rows that one rectangle fills; the next rectangle begins that many rows further down.
  std::int64_t target_rows() const { return is_transposed ? cols.size() : rows.size(); }
  /// Columns of the target that one rectangle fills.
  std::int64_t target_cols() const { return is_transposed ? rows.size() : cols.size(); }
  /// Source rows of rectangle `index`.
  Range rows_of(std::int64_t index) const {
    return {rows.begin + index * row_stride, rows.end + index * row_stride};
  }

  const std::string& tensor() const { return source.tensor->name; }
};

/// Bytes [begin, begin + size) of a checkpoint file.
struct FileBytes {
  const SafetensorsFile* file = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;

  /// These bytes in the mapped file.
  std::span<const std::byte> data() const {
    return file->mapping()->bytes().subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size));
  }
};

/// Where a rank's weights may lie.
enum class WeightHome : std::uint8_t {
  buffers,  ///< All in buffers of the backend.
  /// In the mapping of a file if the weights lie there exactly as they are used; otherwise in buffers.
  files
};

/// A matrix that the rank holds: contiguous and row-major, either in place in a file or at `offset` of buffer
/// `buffer`.
struct WeightTarget {
  WeightRole role = WeightRole::embedding;
  std::int64_t layer = -1;   ///< -1: belongs to no layer.
  std::int64_t expert = -1;  ///< Global id; -1: none.
  DType dtype = DType::f32;  ///< The checkpoint's type; f32 if fp8 or mixed types are widened.
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::size_t buffer = 0;   ///< Index of the buffer, if not in place.
  std::int64_t offset = 0;  ///< Byte offset, a multiple of 256, if not in place.
  /// Columns of zeros before all slices, which no tensor has; only used with one row.
  std::int64_t zero_cols = 0;
  std::vector<WeightSlice> slices;
  std::optional<FileBytes> in_place;

  std::int64_t size_bytes() const {
    return rows * cols * static_cast<std::int64_t>(helix::size_bytes(dtype));
  }
};

/// Everything that one rank takes from a checkpoint, and where it goes. Borrows from the Checkpoint.
struct WeightPlan {
  Range layers;                       ///< Layers of this rank's stage.
  Range experts;                      ///< Global ids of this rank's routed experts.
  bool has_tied_head = false;         ///< The LM head is the embedding.
  Range combined_heads;               ///< Heads of this rank's W_UV; with expand_v, W_UV is a part of it.
  std::vector<WeightTarget> targets;  ///< Targets in loading order.
  /// Sizes of the buffers: one per layer, and a last one for the rest.
  std::vector<std::int64_t> buffer_bytes;
  Fp8BlockConfig fp8_blocks;

  /// Total bytes of the buffers.
  std::int64_t allocated_bytes() const;
  /// Total bytes of the targets in place.
  std::int64_t in_place_bytes() const;
  /// Total bytes of all targets, without the alignment gaps between them.
  std::int64_t weight_bytes() const;
};

/// Which weights of latent attention a plan holds: those for absorbed attention, or those for expanded
/// attention too.
enum class LatentWeights : std::uint8_t { absorbed, both };

/// Plans every slice of `world_rank` and, with WeightHome::files, which targets lie in place: see
/// find_in_place(). Reads headers only.
/// @throws Error(invalid_file) listing the tensors that are missing or whose shape differs from the one that
/// the config implies (both shapes), Error(unsupported) for element types that this program cannot read,
/// Error(invalid_argument) if `topo` was built for another model.
WeightPlan plan_weights(const ModelConfig& config, const Checkpoint& checkpoint, const Topology& topo,
                        int world_rank, WeightHome home = WeightHome::buffers,
                        LatentWeights latent = LatentWeights::absorbed);
WeightPlan plan_weights(const ModelConfig&, const Checkpoint&&, const Topology&, int,
                        WeightHome = WeightHome::buffers,
                        LatentWeights = LatentWeights::absorbed) = delete;  // the plan borrows from it

/// The names of the tensors that no rank takes under any topology, in the order of the files. They mean that
/// config.json does not describe the model completely. Tensors that are known to be unneeded are left out:
/// rope buffers, the head of a tied pair and, in DeepSeek, the layers after the last that predict further
/// tokens.
/// @throws as plan_weights() does.
std::vector<std::string_view> unused_tensors(const ModelConfig& config, const Checkpoint& checkpoint);

/// The one run of a file that holds exactly the rows of `target`, in order and in its type: whole rows of a
/// tensor, or of several tensors that happen to be adjacent (HF sorts by name: gate_proj, up_proj). nullopt
/// if there is none, or if it does not begin at a multiple of the element size, which the format does not
/// promise. Looks at slices and headers only.
std::optional<FileBytes> find_in_place(const WeightTarget& target);

}  // namespace helix::decode
