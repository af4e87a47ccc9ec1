// SPDX-License-Identifier: Apache-2.0
// Tokens with known elements, written to a stage's caches and checked there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/sharded_kv_cache.hpp>

#include "support/cache_stage.hpp"
#include "support/catch.hpp"

namespace helix::test::cache {

/// Tokens of [0, length) that `kvp_rank` owns, dealt out chunk by chunk without the library's formula.
inline std::vector<std::int64_t> owned_positions(std::int64_t length, std::int64_t kvp, std::int64_t chunk,
                                                 std::int64_t kvp_rank) {
  std::vector<std::int64_t> owned;
  std::int64_t rank = 0;
  for (std::int64_t p = 0; p < length; ++p) {
    if (rank == kvp_rank) owned.push_back(p);
    if ((p + 1) % chunk == 0) rank = (rank + 1) % kvp;
  }
  return owned;
}

inline std::int64_t owned_count(std::int64_t length, std::int64_t kvp, std::int64_t chunk,
                                std::int64_t kvp_rank) {
  return static_cast<std::int64_t>(owned_positions(length, kvp, chunk, kvp_rank).size());
}

// ---------------------------------------------------------------------------------------------------------------
// The whole stage in one thread: each rank has its own backend, cache and stream.
// ---------------------------------------------------------------------------------------------------------------

/// Element d of the K (or V) row of `token` in one head of one layer: arbitrary, but different everywhere.
inline float element(std::int64_t token, std::int64_t layer, std::int64_t head, bool is_value,
                     std::int64_t d) {
  const std::int64_t mix =
      (token * 7919 + layer * 104729 + head * 1299709 + (is_value ? 15485863 : 0) + d * 31) % 1000003;
  return static_cast<float>(mix % 2001 - 1000) / 97.0f;
}

inline float through_format(DType format, float value, float scale) {
  return helix::dispatch(format, [&]<class T>(T*) { return static_cast<float>(T(value / scale)) * scale; });
}

/// Column d of a latent row of DType::fp8_ds_mla after storing and reading back: 128 columns share a scale.
inline float through_mixed_row(std::int64_t token, std::int64_t layer, std::int64_t value_dim,
                               std::int64_t d) {
  const float value = element(token, layer, 0, false, d);
  if (d >= value_dim) return static_cast<float>(helix::bf16(value));
  float most = 0.0f;
  const std::int64_t first = d / 128 * 128;
  for (std::int64_t i = first; i < std::min(first + 128, value_dim); ++i)
    most = std::max(most, std::abs(element(token, layer, 0, false, i)));
  return through_format(DType::fp8_e4m3, value, most / 448.0f);
}

struct Scales {
  std::vector<float> k;
  std::vector<float> v;
};

inline float scale_at(const std::vector<float>& scales, std::int64_t layer, std::int64_t head,
                      std::int64_t kv_heads) {
  if (scales.empty()) return 1.0f;
  if (scales.size() == 1) return scales.front();
  if (static_cast<std::int64_t>(scales.size()) == kv_heads) return scales[static_cast<std::size_t>(head)];
  return scales[static_cast<std::size_t>(layer * kv_heads + head)];
}

/// Writes tokens[first ..] of a sequence at those positions in every layer of every rank. Each rank gets all
/// rows of its heads and keeps those that it owns.
inline void write_tokens(Stage& stage, SequenceId id, const std::vector<std::int64_t>& tokens,
                         std::int64_t first) {
  const auto count = static_cast<std::int64_t>(tokens.size()) - first;
  for (int rank = 0; rank < stage.size(); ++rank) {
    Cache& cache = stage.cache(rank);
    const KvView view = cache.layer(0);
    const helix::Range heads = stage.topology().kv_heads(rank);
    const std::int64_t v_dim = view.format.is_latent ? 0 : view.format.value_dim;
    for (int layer = 0; layer < cache.spec().num_layers; ++layer) {
      std::vector<float> k;
      std::vector<float> v;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t token = tokens[static_cast<std::size_t>(first + i)];
        for (std::int64_t h = heads.begin; h < heads.end; ++h) {
          for (std::int64_t d = 0; d < view.format.head_dim; ++d)
            k.push_back(element(token, layer, h, false, d));
          for (std::int64_t d = 0; d < v_dim; ++d) v.push_back(element(token, layer, h, true, d));
        }
      }
      cache.write(
          id, layer, first, TensorView<const float, 3>(k.data(), {count, heads.size(), view.format.head_dim}),
          TensorView<const float, 3>(v.data(), {view.format.is_latent ? 0 : count, heads.size(), v_dim}),
          stage.stream(rank));
      stage.stream(rank).synchronize();  // k and v are destroyed here
    }
  }
}

/// Checks that every rank stores exactly the tokens that it owns, with the right values in every layer, and
/// that all ranks together store the whole sequence.
inline void check_contents(Stage& stage, SequenceId id, const std::vector<std::int64_t>& tokens) {
  std::vector<std::int64_t> copies(tokens.size(), 0);
  std::int64_t mistakes = 0;
  for (int rank = 0; rank < stage.size(); ++rank) {
    Cache& cache = stage.cache(rank);
    const KvCacheSpec& spec = cache.spec();
    const KvView view = cache.layer(0);
    const helix::Range heads = stage.topology().kv_heads(rank);
    const auto owned = owned_positions(static_cast<std::int64_t>(tokens.size()), view.layout.kvp(),
                                       spec.chunk, view.kvp_rank);
    const auto count = static_cast<std::int64_t>(owned.size());
    REQUIRE(cache.length(id) == static_cast<std::int64_t>(tokens.size()));
    REQUIRE(cache.local_length(id) == count);
    const std::int64_t v_dim = view.format.is_latent ? 0 : view.format.value_dim;
    std::vector<float> k(static_cast<std::size_t>(count * heads.size() * view.format.head_dim), -777.0f);
    std::vector<float> v(static_cast<std::size_t>(count * heads.size() * v_dim), -777.0f);
    const TensorView<float, 3> k_out(k.data(), {count, heads.size(), view.format.head_dim});
    const TensorView<float, 3> v_out(v.data(), {view.format.is_latent ? 0 : count, heads.size(), v_dim});
    for (int layer = 0; layer < spec.num_layers; ++layer) {
      cache.read(id, layer, {0, count}, k_out, v_out, stage.stream(rank));
      stage.stream(rank).synchronize();
      for (std::int64_t i = 0; i < count; ++i) {
        const auto position = static_cast<std::size_t>(owned[static_cast<std::size_t>(i)]);
        if (layer == 0) copies[position] += heads.size();
        for (std::int64_t h = heads.begin; h < heads.end; ++h) {
          const float k_scale = scale_at(spec.k_scales, layer, h, stage.topology().shape().num_kv_heads);
          const float v_scale = scale_at(spec.v_scales, layer, h, stage.topology().shape().num_kv_heads);
          for (std::int64_t d = 0; d < view.format.head_dim; ++d) {
            const float value = element(tokens[position], layer, h, false, d);
            const float stored = view.format.is_mixed()
                                     ? through_mixed_row(tokens[position], layer, view.format.value_dim, d)
                                     : through_format(spec.dtype, value, k_scale);
            mistakes += k_out(i, h - heads.begin, d) != stored;
          }
          for (std::int64_t d = 0; d < v_dim; ++d) {
            const float value = element(tokens[position], layer, h, true, d);
            mistakes += v_out(i, h - heads.begin, d) != through_format(spec.dtype, value, v_scale);
          }
        }
      }
    }
    // The device's page table must agree with the ledger.
    const auto pages = cache.ledger().pages(id, view.kvp_rank);
    REQUIRE(static_cast<std::int64_t>(pages.size()) == (count + spec.page_tokens - 1) / spec.page_tokens);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      mistakes += view.page_table[cache.slot(id) * view.max_pages + static_cast<std::int64_t>(i)] != pages[i];
    }
  }
  CHECK(mistakes == 0);
  const std::int64_t kv_heads = stage.topology().shape().num_kv_heads;
  CHECK(std::all_of(copies.begin(), copies.end(),
                    [&](std::int64_t n) { return n == kv_heads; }));  // invariant 11
}

struct Tracked {
  SequenceId id;
  std::vector<std::int64_t> tokens;  // a unique number per token, which forks keep
};

}  // namespace helix::test::cache
