// SPDX-License-Identifier: Apache-2.0
// AttentionBackend: tokens into the KV cache and attention over a shard of it, and the arguments of each.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <helix/backend/batch.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/backend/queue.hpp>
#include <helix/kv_format.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

/// Stores each token whose owner is kv.kvp_rank (the test runs on the device); drops the others and padding.
template <class T>
struct AppendKvArgs {
  TensorView<const T, 3> k;  ///< [tokens, Hkv/TPA, D]; MLA: the latent rows [tokens, 1, 576].
  TensorView<const T, 3> v;  ///< [tokens, Hkv/TPA, Dv]; MLA: empty.
  Batch batch;
  KvView kv;
};

/// Stores those tokens of one sequence that kv.kvp_rank owns; row i is the token at global position
/// first_position + i. Converts as append_kv does: rounds value / scale to the nearest stored value.
template <class T>
struct WriteKvArgs {
  TensorView<const T, 3> k;  ///< [tokens, Hkv/TPA, D], last stride 1.
  TensorView<const T, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1; MLA: empty.
  std::int64_t first_position = 0;
  std::int32_t sequence_slot = 0;
  KvView kv;
};

/// Reads local tokens [first_local, + rows of k) of one sequence back as values, stored * scale.
struct ReadKvArgs {
  KvView kv;
  std::int32_t sequence_slot = 0;
  std::int64_t first_local = 0;
  TensorView<float, 3> k;  ///< [tokens, Hkv/TPA, D], last stride 1, written.
  TensorView<float, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1, written; MLA: empty.
};

/// Attention of each query over this rank's shard: out = softmax(scale * q k) v, lse = log(sum(exp(scale * q
/// k))). Query at global position p reads local tokens KvLayout::visible(p, window, kvp_rank).
template <class T>
struct PartialAttentionArgs {
  TensorView<const T, 3> q;  ///< [tokens of the step, Hq/TPA, D], last stride 1.
  Batch batch;               ///< The whole step or a slice; only its tokens' rows of the sink are written.
  KvView kv;
  PartialSink<T> sink;             ///< Result, written.
  float scale = 0.0f;              ///< Factor on q k, above 0.
  std::int64_t window = 0;         ///< Tokens that a query sees, itself included; 0 is all of them.
  float soft_cap = 0.0f;           ///< Score = cap * tanh(score / cap) before the softmax; 0 is none.
  std::span<std::byte> workspace;  ///< partial_attention_workspace_bytes().
};

/// What attention over a sharded cache asks of a machine.
template <class B>
concept AttentionBackend = QueueBackend<B> && requires(B& backend, typename B::Stream stream, std::int64_t n,
                                                       const void* source, void* target, std::size_t bytes) {
  backend.copy(target, source, bytes, stream);  // device -> device; the two do not overlap
  backend.append_kv(AppendKvArgs<typename B::Activation>{}, stream);
  backend.write_kv(WriteKvArgs<typename B::Activation>{}, stream);
  backend.read_kv(ReadKvArgs{}, stream);
  backend.partial_attention(PartialAttentionArgs<typename B::Activation>{}, stream);
  // (tokens, query heads, D, Dv): an upper bound over any positions for the caller's workspace.
  { backend.partial_attention_workspace_bytes(n, n, n, n) } -> std::same_as<std::size_t>;
};

}  // namespace helix
