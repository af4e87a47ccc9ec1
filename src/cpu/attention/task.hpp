// SPDX-License-Identifier: Apache-2.0
// The attention of one tile of queries over one range of one KV head, on one thread: the SIMD heart of
// partial_attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/kv_layout.hpp>

namespace helix::cpu {

/// What one thread computes in one go. Row t * group + g is query head g of the KV head's group, at query
/// token t.
struct AttentionTask {
  const float* q = nullptr;  ///< first query head of the group at the first token
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  std::int64_t num_tokens = 0;
  std::int64_t group = 0;  ///< query heads that share the KV head
  const TokenRange* visible =
      nullptr;  ///< [num_tokens], local positions that each token reads here; may be empty

  const std::byte* keys = nullptr;  ///< this head's first row in page 0
  const std::byte* values = nullptr;
  DType dtype = DType::f32;
  std::int64_t page_bytes = 0;
  std::int64_t page_tokens = 0;
  std::int64_t row_bytes = 0;
  const std::int32_t* page_table = nullptr;  ///< this sequence's row
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;

  float key_scale = 1.0f;  ///< softmax scale times the scale of the stored keys
  float value_scale = 1.0f;
  float soft_cap = 0.0f;

  float* out = nullptr;  ///< row (t, g) at out + t * out_token_stride + g * out_head_stride
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 0;
};

/// Floats of scratch that attend() needs for tasks of at most `rows` rows.
std::int64_t attention_scratch_floats(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim);

/// out = softmax(key_scale * q k) v * value_scale over each token's visible range, lse natural; (0, -inf) if
/// it is empty. Reads no K or V row and no page table entry outside a visible range, and lets a row that only
/// some tokens see touch those alone. `scratch` is aligned to 64 bytes. Allocates nothing.
void attend(const AttentionTask& task, float* scratch);

}  // namespace helix::cpu
