// SPDX-License-Identifier: Apache-2.0
// AttentionBuffers: the intermediate tensors of an attention block, measured and carved by one function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <helix/backend/layer.hpp>
#include <helix/rank_shape.hpp>
#include <helix/workspace.hpp>

namespace helix {

/// What an attention block writes besides its result and the cache. T is the activation type.
template <class T>
struct AttentionBuffers {
  TensorView<T, 2> qkv;       ///< GQA: [tokens, RankShape::qkv_columns()].
  TensorView<T, 2> q_lora;    ///< MLA: [tokens, q_lora_rank].
  TensorView<T, 3> q_heads;   ///< MLA: [tokens, Hq, nope + rope].
  TensorView<T, 3> q;         ///< MLA: [tokens, Hq, kv_lora_rank + rope], absorbed.
  TensorView<T, 2> latent;    ///< MLA: [tokens, kv_lora_rank + rope].
  TensorView<T, 3> values;    ///< MLA: [tokens, Hq/N, v], after W_UV.
  Partial<T> alone;           ///< KVP = 1: [tokens, Hq/TPA, Dv], where there is no message.
  TensorView<T, 3> combined;  ///< [tokens, Hq/N, Dv].
  std::span<std::byte> workspace;

  /// Takes them from `arena`, or measures them.
  template <LayerBackend B>
  static AttentionBuffers carve(B& backend, const RankShape& shape, std::int64_t tokens,
                                WorkspaceArena& arena) {
    AttentionBuffers buffers;
    if (shape.mla) {
      buffers.q_lora = arena.take<T, 2>({tokens, shape.mla->q_lora_rank});
      buffers.q_heads = arena.take<T, 3>({tokens, shape.query_heads, shape.mla->qk_head_dim()});
      buffers.q = arena.take<T, 3>({tokens, shape.query_heads, shape.head_dim});
      buffers.latent = arena.take<T, 2>({tokens, shape.head_dim});
      buffers.values = arena.take<T, 3>({tokens, shape.combined_heads, shape.mla->v_head_dim});
    } else {
      buffers.qkv = arena.take<T, 2>({tokens, shape.qkv_columns()});
    }
    if (shape.kvp == 1) {
      buffers.alone.out = arena.take<T, 3>({tokens, shape.query_heads, shape.value_dim});
      buffers.alone.lse = arena.take<float, 2>({tokens, shape.query_heads});
    }
    buffers.combined = arena.take<T, 3>({tokens, shape.combined_heads, shape.value_dim});
    buffers.workspace = arena.take_bytes(backend.partial_attention_workspace_bytes(
        tokens, shape.query_heads, shape.head_dim, shape.value_dim));
    return buffers;
  }
};

}  // namespace helix
