// SPDX-License-Identifier: Apache-2.0
// The attention of one tile of queries over one range of one KV head, on one thread: the SIMD heart of
// partial_attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/kv_layout.hpp>

namespace helix::cpu {

/// Where the rows of one head lie in a paged pool.
struct StoredRows {
  const std::byte* first = nullptr;  ///< Token 0 of page 0.
  std::int64_t page_bytes = 0;
  std::int64_t token_bytes = 0;

  /// Row of token `slot` of page `page`; the page's next tokens follow, token_bytes apart.
  const std::byte* at(std::int64_t page, std::int64_t slot) const {
    return first + page * page_bytes + slot * token_bytes;
  }
};

/// What is asked for while rows are read.
enum class Ahead {
  none,
  across,    ///< Values while keys are multiplied, the next tile's keys while values are.
  straight,  ///< The rows in the order in which they are read, one head's tile further on.
  along      ///< The same, some KiB further on.
};

/// In which order and how far ahead the kernel of few rows reads memory. No bit of a result depends on it.
struct AttentionVariant {
  /// KV heads that a task takes at once, at most: a tile's keys of all of them, then their values.
  int heads = 1;
  /// Keys in several runs of the tile in turn, as sums take them; otherwise as they lie, a page of one head
  /// and then that page of the next.
  bool is_interleaved = true;
  Ahead ahead = Ahead::across;
  /// A block whose sums do not fit registers reads a tile's values once a group of columns: all of the tile,
  /// or a few at a time, which later groups find in L1.
  bool has_short_passes = false;
  /// Scores of 8 rows of bf16 in vectors of 256 bits where there are wider ones.
  bool is_narrow = false;
};

inline constexpr int kMaxTaskHeads = 8;
inline constexpr std::int64_t kTaskRows = 64;  ///< Rows of several heads that a task takes, in whole blocks.

/// What one thread computes in one go. Row t * group + g is query head g of the KV head's group, at query
/// token t.
struct AttentionTask {
  const float* q = nullptr;  ///< First query head of the group at the first token.
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  std::int64_t num_tokens = 0;
  std::int64_t group = 0;  ///< Query heads that share the KV head.
  const TokenRange* visible =
      nullptr;  ///< [num_tokens], local positions that each token reads; may be empty.

  StoredRows keys;  ///< Key rows, head_dim wide; where the parts of a latent lie apart, the first value_dim.
  StoredRows values;  ///< Value rows; latent: equal to keys.
  StoredRows rope;    ///< Columns [value_dim, head_dim) of a latent whose parts lie apart, or have
                      ///< types of their own; else first is null.
  DType dtype = DType::f32;
  std::int64_t page_tokens = 0;
  const std::int32_t* page_table = nullptr;  ///< This sequence's page ids.
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;

  float key_scale = 1.0f;  ///< Softmax scale times the scale of the stored keys.
  float value_scale = 1.0f;
  float soft_cap = 0.0f;

  AttentionVariant variant;

  float* out = nullptr;  ///< Row (t, g) lies at out + t * out_token_stride + g * out_head_stride.
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 0;

  bool is_split_latent() const { return rope.first != nullptr; }
  bool is_latent() const { return values.first == keys.first; }
  /// Whether a token's value row lies the same distance behind its key row for every token.
  bool has_constant_distance() const {
    return !is_split_latent() && keys.page_bytes == values.page_bytes &&
           keys.token_bytes == values.token_bytes;
  }
};

/// Floats of scratch that attend() needs for tasks of at most `rows` rows, all heads together.
std::int64_t attention_scratch_floats(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim);

/// out = softmax(key_scale * q k) v * value_scale over each token's visible range, lse natural; (0, -inf) if
/// it is empty. Reads no K or V row and no page table entry outside a visible range, and lets a row that only
/// some tokens see touch those alone. `scratch` is aligned to 64 bytes. Allocates nothing.
///
/// Takes `num_tasks` KV heads of the same tokens at once, up to kMaxTaskHeads, of one query token if there
/// are several; together they have at most kTaskRows rows.
void attend(const AttentionTask* tasks, int num_tasks, float* scratch);

}  // namespace helix::cpu
