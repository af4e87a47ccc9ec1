// SPDX-License-Identifier: Apache-2.0
// AttentionBuffers: the intermediate tensors of an attention block, measured and carved by one function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <helix/backend/layer.hpp>
#include <helix/integers.hpp>
#include <helix/rank_shape.hpp>
#include <helix/workspace.hpp>

namespace helix {

/// Buffers for the latents of one sequence after another, expanded to keys and values. Empty if no chunk is
/// expanded (MlaPrefill).
template <class T>
struct ExpandedBuffers {
  TensorView<T, 2> latents;  ///< [page_tokens(seen), kv_lora_rank + rope].
  TensorView<T, 3> keys;     ///< [page_tokens(seen), Hq, nope + rope].
  TensorView<T, 3> values;   ///< [page_tokens(seen), Hq, v].
  /// [1], zero: the page table of the expanded page, and the slot of its sequence.
  TensorView<std::int32_t, 1> zero;

  /// Tokens of the page that holds `seen` tokens, a multiple of 64: kernels copy boxes of rows only if boxes
  /// divide the page.
  static constexpr std::int64_t page_tokens(std::int64_t seen) {
    constexpr std::int64_t kBoxTokens = 64;
    return round_up(larger<std::int64_t>(1, seen), kBoxTokens);
  }

  /// Takes the buffers for `seen` tokens from `arena`.
  static ExpandedBuffers carve(const RankShape& shape, std::int64_t seen, WorkspaceArena& arena) {
    const std::int64_t rows = page_tokens(seen);
    return {.latents = arena.take<T, 2>({rows, shape.head_dim}),
            .keys = arena.take<T, 3>({rows, shape.query_heads, shape.mla->qk_head_dim()}),
            .values = arena.take<T, 3>({rows, shape.query_heads, shape.mla->v_head_dim}),
            .zero = arena.take<std::int32_t, 1>({1})};
  }
};

/// What an attention block writes besides its result and the cache. T is the activation type.
template <class T>
struct AttentionBuffers {
  TensorView<T, 2> qkv;      ///< GQA: [tokens, RankShape::qkv_columns()].
  TensorView<T, 2> qkv_a;    ///< MLA: [tokens, RankShape::qkv_a_columns()].
  TensorView<T, 2> q_lora;   ///< MLA: [tokens, q_lora_rank], columns of qkv_a; empty without a query LoRA.
  TensorView<T, 2> latent;   ///< MLA: [tokens, kv_lora_rank + rope], the last columns of qkv_a.
  TensorView<T, 3> q_heads;  ///< MLA: [tokens, Hq, nope + rope], columns of qkv_a without a query LoRA.
  TensorView<T, 3> q;        ///< MLA: [tokens, Hq, kv_lora_rank + rope], absorbed.
  TensorView<T, 3> values;   ///< MLA: [tokens, Hq/N, v], after W_UV.
  ExpandedBuffers<T> expanded;
  Partial<T> alone;           ///< KVP = 1: [tokens, Hq/TPA, Dv], as there is no message.
  TensorView<T, 3> combined;  ///< [tokens, Hq/N, Dv].
  std::span<std::byte> workspace;

  /// Takes the buffers from `arena`, or measures them. `expanded_tokens`: most tokens that an expanded chunk
  /// of the step sees on a rank; 0: no chunk is expanded.
  template <LayerBackend B>
  static AttentionBuffers carve(B& backend, const RankShape& shape, std::int64_t tokens,
                                std::int64_t expanded_tokens, WorkspaceArena& arena) {
    AttentionBuffers buffers;
    if (shape.mla) {
      const std::int64_t columns = shape.qkv_a_columns();
      const std::int64_t q_columns = shape.q_a_columns();
      const typename TensorView<T, 3>::extents_type heads{tokens, shape.query_heads,
                                                          shape.mla->qk_head_dim()};
      buffers.qkv_a = arena.take<T, 2>({tokens, columns});
      buffers.latent = buffers.qkv_a.slice(1, q_columns, columns - q_columns);
      if (shape.mla->q_lora_rank > 0) {
        buffers.q_lora = buffers.qkv_a.slice(1, 0, q_columns);
        buffers.q_heads = arena.take<T, 3>(heads);
      } else {
        buffers.q_heads = TensorView<T, 3>(buffers.qkv_a.data(), heads, {columns, heads[2], 1});
      }
      buffers.q = arena.take<T, 3>({tokens, shape.query_heads, shape.head_dim});
      buffers.values = arena.take<T, 3>({tokens, shape.combined_heads, shape.mla->v_head_dim});
    } else {
      buffers.qkv = arena.take<T, 2>({tokens, shape.qkv_columns()});
    }
    if (shape.kvp == 1) {
      buffers.alone.out = arena.take<T, 3>({tokens, shape.query_heads, shape.value_dim});
      buffers.alone.lse = arena.take<float, 2>({tokens, shape.query_heads});
    }
    buffers.combined = arena.take<T, 3>({tokens, shape.combined_heads, shape.value_dim});
    std::size_t workspace =
        backend.partial_attention_workspace_bytes(tokens, shape.query_heads, shape.head_dim, shape.value_dim);
    if (shape.mla && expanded_tokens > 0) {
      buffers.expanded = ExpandedBuffers<T>::carve(shape, expanded_tokens, arena);
      workspace =
          larger(workspace, backend.partial_attention_workspace_bytes(
                                tokens, shape.query_heads, shape.mla->qk_head_dim(), shape.mla->v_head_dim));
    }
    buffers.workspace = arena.take_bytes(workspace);
    return buffers;
  }
};

}  // namespace helix
