// SPDX-License-Identifier: Apache-2.0
// Synthetic KV: a cache from a counter-based generator, so that every topology fills its shards alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <helix/cpu/thread_pool.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "generate/progress.hpp"
#include "generate/synthetic_rows.hpp"
#include "model/decoder_backend.hpp"

namespace helix::decode {

/// What a sequence of synthetic context decodes first.
inline constexpr std::int32_t kSyntheticFirstToken = 0;

/// Writes positions [0, tokens) of the sequence in `slot` to the pages of the model's layer `layer`, which
/// lie in host memory: the heads from the model's `first_head` on, and what kv.kvp_rank owns of the
/// positions.
void fill_synthetic_layer(const KvView& kv, std::int32_t slot, std::int64_t tokens, std::int64_t layer,
                          std::int64_t first_head, cpu::ThreadPool& threads);

/// Writes positions [0, tokens) of `sequence` in the model's layers `layers` and KV heads `heads`: what this
/// rank owns of them. The sequence must have been grown to `tokens`. Waits for the stream.
template <DecoderBackend B>
void fill_synthetic_kv(B& backend, ShardedKVCache<B>& cache, const SequenceId& sequence, std::int64_t tokens,
                       Range layers, Range heads, typename B::Stream stream, bool show_progress) {
  using T = typename B::Activation;
  constexpr std::int64_t kBlock = 16384;  // tokens a write: bounds the staging
  const KvView view = cache.layer(0);
  const KvFormat& format = view.format;
  const std::int64_t v_dim = format.is_latent ? 0 : format.value_dim;  // a latent row is K and V
  const std::int64_t rows_a_block = std::min(kBlock, tokens) * heads.size();
  std::vector<T> k(static_cast<std::size_t>(rows_a_block * format.head_dim));
  std::vector<T> v(static_cast<std::size_t>(rows_a_block * v_dim));
  auto k_device = backend.allocate(k.size() * sizeof(T));
  auto v_device = backend.allocate(v.size() * sizeof(T));
  const auto fill_row = [&](std::vector<T>& rows, std::int64_t row, std::int64_t dim, std::uint32_t key) {
    T* out = rows.data() + row * dim;
    for (std::int64_t d = 0; d < dim; ++d) out[d] = T(synthetic_element(key, static_cast<std::uint32_t>(d)));
  };
  // Rows of other ranks travel too: write() takes a run of positions and drops them.
  const auto upload = [&](auto& device, const std::vector<T>& rows, std::int64_t num_rows, std::int64_t dim) {
    backend.upload(device.data(), rows.data(), static_cast<std::size_t>(num_rows * dim) * sizeof(T), stream);
  };

  Progress progress("synthetic KV", tokens * layers.size(), show_progress);
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
    for (std::int64_t begin = 0; begin < tokens; begin += kBlock) {
      const TokenRange block{begin, std::min(begin + kBlock, tokens)};
      view.layout.for_each_owned_range(block, view.kvp_rank, [&](TokenRange owned, std::int64_t) {
        for (std::int64_t position = owned.begin; position < owned.end; ++position) {
          for (std::int64_t head = heads.begin; head < heads.end; ++head) {
            const std::int64_t row = (position - begin) * heads.size() + head - heads.begin;
            fill_row(k, row, format.head_dim, synthetic_row_key(layer, head, position, false));
            if (v_dim > 0) fill_row(v, row, v_dim, synthetic_row_key(layer, head, position, true));
          }
        }
      });
      upload(k_device, k, block.size() * heads.size(), format.head_dim);
      upload(v_device, v, block.size() * heads.size(), v_dim);
      const TensorView<const T, 3> k_view(reinterpret_cast<const T*>(k_device.data()),
                                          {block.size(), heads.size(), format.head_dim});
      const TensorView<const T, 3> v_view(reinterpret_cast<const T*>(v_device.data()),
                                          {v_dim == 0 ? 0 : block.size(), heads.size(), v_dim});
      cache.write(sequence, static_cast<int>(layer - layers.begin), begin, k_view, v_view, stream);
      backend.synchronize(stream);  // the staging is re-used
      progress.update((layer - layers.begin) * tokens + block.end);
    }
  }
}

/// The same in host memory: all threads of the rank write to the pages.
template <DecoderBackend B>
requires HostMemoryBackend<B>
void fill_synthetic_kv(B& backend, ShardedKVCache<B>& cache, const SequenceId& sequence, std::int64_t tokens,
                       Range layers, Range heads, typename B::Stream stream, bool show_progress) {
  backend.synchronize(stream);  // which brings the page table up to date
  Progress progress("synthetic KV", tokens * layers.size(), show_progress);
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
    fill_synthetic_layer(cache.layer(static_cast<int>(layer - layers.begin)), cache.slot(sequence), tokens,
                         layer, heads.begin, backend.thread_pool());
    progress.update((layer + 1 - layers.begin) * tokens);
  }
}

}  // namespace helix::decode
