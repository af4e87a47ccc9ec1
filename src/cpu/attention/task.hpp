// SPDX-License-Identifier: Apache-2.0
// The attention of one tile of queries over one range of one KV head, on one thread: the SIMD heart of
// partial_attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/kv_layout.hpp>

#include "cpu/attention/sum_order.hpp"

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

/// Which rows are prefetched while others are read.
enum class Prefetch {
  none,
  across,       ///< Values while keys are multiplied, the next tile's keys while values are.
  straight,     ///< Rows in the order in which they are read, one head's tile ahead, into L2.
  straight_l1,  ///< The same into L1.
  along,        ///< Rows in the order in which they are read, some KiB ahead.
  linear        ///< What lies some KiB further on in memory, whatever is read next.
};

/// The order in which the kernel for few rows reads memory, and how far ahead. No bit of a result depends on
/// it.
struct AttentionVariant {
  /// KV heads that a task takes at once, at most: a tile's keys of all of them, then their values.
  int heads = 1;
  /// Whether a tile's keys are read head by head, in the order in which its values are summed (SumOrder).
  /// Otherwise they are read as they lie: a page of one head and then that page of the next.
  bool follows_sums = true;
  /// Whether a tile's values are read as they lie too, where tokens are summed in order (SumOrder), each head
  /// has one block of rows, and the sums of all heads fit in the scratch. Otherwise they are read head by
  /// head.
  bool has_stored_values = false;
  Prefetch prefetch = Prefetch::across;
  /// Whether a block whose sums do not fit in registers reads a few of a tile's values at a time through all
  /// groups of columns, so that later groups find them in L1. Otherwise each group reads the whole tile's
  /// values.
  bool has_short_passes = false;
  /// Whether scores of 8 rows with bf16 keys use vectors of 256 bits where there are wider ones.
  bool is_narrow = false;
};

/// Most query rows of a KV head for which the direct kernel reads keys and values.
inline constexpr std::int64_t kDirectRows = 16;
inline constexpr int kMaxTaskHeads = 8;
inline constexpr std::int64_t kTaskRows = 64;  ///< Most rows of a task of several heads, in whole blocks.

/// What one thread computes in one go. Row t * group + g is query head g of the KV head's group, at query
/// token t.
struct AttentionTask {
  const float* q = nullptr;  ///< First query head of the group at the first token.
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  std::int64_t num_tokens = 0;
  std::int64_t group = 0;  ///< Query heads that share the KV head.
  /// [num_tokens], local positions that each token reads; may be empty.
  const TokenRange* visible = nullptr;

  StoredRows keys;  ///< Key rows, head_dim wide; if a latent's parts lie apart, its first value_dim columns.
  StoredRows values;  ///< Value rows; latent: equal to keys.
  /// Columns [value_dim, head_dim) of a latent whose parts lie apart or have different types; else first is
  /// null.
  StoredRows rope;
  DType dtype = DType::f32;
  std::int64_t page_tokens = 0;
  const std::int32_t* page_table = nullptr;  ///< This sequence's page ids.
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;

  float key_scale = 1.0f;  ///< Softmax scale times the scale of the stored keys.
  float value_scale = 1.0f;
  float soft_cap = 0.0f;

  AttentionVariant variant;
  SumOrder sum_order = SumOrder::interleaved;

  float* out = nullptr;  ///< Row (t, g) lies at out + t * out_token_stride + g * out_head_stride.
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 0;

  bool is_split_latent() const { return rope.first != nullptr; }
  bool is_latent() const { return values.first == keys.first; }
  /// Whether every token's value row lies at the same distance from its key row.
  bool has_constant_distance() const {
    return !is_split_latent() && keys.page_bytes == values.page_bytes &&
           keys.token_bytes == values.token_bytes;
  }
};

/// Floats of scratch that attend() needs for tasks of at most `rows` rows, all heads together.
std::int64_t attention_scratch_floats(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim);

/// out = softmax(key_scale * q k) v * value_scale over each token's visible range, lse natural; (0, -inf) if
/// it is empty. Reads no K or V row and no page table entry outside a visible range, and a row that only some
/// tokens see affects only those. `scratch` is aligned to 64 bytes. Allocates nothing.
///
/// Takes `num_tasks` KV heads of the same tokens at once, up to kMaxTaskHeads. Several heads have one query
/// token, and together at most kTaskRows rows.
void attend(const AttentionTask* tasks, int num_tasks, float* scratch);

}  // namespace helix::cpu
