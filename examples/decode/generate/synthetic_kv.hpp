// SPDX-License-Identifier: Apache-2.0
// Synthetic KV: cache contents from a counter-based generator, so that every topology fills its shards with
// the same values.
#pragma once

#include <cstdint>

#include <helix/cpu/thread_pool.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "generate/progress.hpp"
#include "generate/synthetic_rows.hpp"
#include "model/decoder_backend.hpp"

namespace helix::decode {

/// First token that a sequence with synthetic context decodes.
inline constexpr std::int32_t kSyntheticFirstToken = 0;

/// Writes positions [0, tokens) of the sequence in `slot` to the pages of layer `layer` of the model, which
/// must be in host memory. Writes the heads from the model's `first_head` on, and only the positions that
/// kv.kvp_rank owns.
void fill_synthetic_layer(const KvView& kv, std::int32_t slot, std::int64_t tokens, std::int64_t layer,
                          std::int64_t first_head, cpu::ThreadPool& threads);

/// Backends that can generate synthetic KV in their own memory.
template <class B>
concept SyntheticKvBackend = requires(B& backend, const SyntheticKvArgs& args, typename B::Stream stream) {
  backend.fill_synthetic_kv(args, stream);
};

/// Writes positions [0, tokens) of `sequence` in layers `layers` and KV heads `heads` of the model, only the
/// part that this rank owns. The sequence must already have `tokens` tokens. Calls after_layer() for each
/// layer. Waits for the stream.
template <DecoderBackend B, class Call>
requires SyntheticKvBackend<B>
void fill_synthetic_kv(B& backend, ShardedKVCache<B>& cache, const SequenceId& sequence, std::int64_t tokens,
                       Range layers, Range heads, typename B::Stream stream, bool /*show_progress*/,
                       const Call& after_layer) {
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
    backend.fill_synthetic_kv({.kv = cache.layer(static_cast<int>(layer - layers.begin)),
                               .sequence_slot = cache.slot(sequence),
                               .tokens = tokens,
                               .layer = layer,
                               .first_head = heads.begin},
                              stream);
    after_layer();
  }
  backend.synchronize(stream);
}

/// The same for backends in host memory: all threads of the rank write to the pages.
template <DecoderBackend B, class Call>
requires HostMemoryBackend<B>
void fill_synthetic_kv(B& backend, ShardedKVCache<B>& cache, const SequenceId& sequence, std::int64_t tokens,
                       Range layers, Range heads, typename B::Stream stream, bool show_progress,
                       const Call& after_layer) {
  backend.synchronize(stream);  // brings the page table up to date
  Progress progress("synthetic KV", tokens * layers.size(), show_progress);
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
    fill_synthetic_layer(cache.layer(static_cast<int>(layer - layers.begin)), cache.slot(sequence), tokens,
                         layer, heads.begin, backend.thread_pool());
    progress.update((layer + 1 - layers.begin) * tokens);
    after_layer();
  }
}

}  // namespace helix::decode
