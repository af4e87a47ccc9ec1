// SPDX-License-Identifier: Apache-2.0
// Memory of a rank: the pages of its KV cache exactly as ShardedKVCache::capacity_bytes() counts them,
// weights, workspace.
#pragma once

#include <cstdint>
#include <span>

#include <helix/export.hpp>
#include <helix/kv_layout.hpp>
#include <helix/plan/layout.hpp>
#include <helix/plan/model.hpp>
#include <helix/plan/units.hpp>
#include <helix/plan/workload.hpp>
#include <helix/topology.hpp>

namespace helix::plan {

/// The sizes of a cache that decide its bytes: those of KvCacheSpec, for formats of any number of bits.
struct KvPages {
  std::int64_t element_bits = 16;
  /// Bytes of a token in one layer if its elements are of several types; else 0.
  std::int64_t row_bytes = 0;
  std::int64_t num_layers = 0;    ///< Layers of the stage.
  std::int64_t page_tokens = 64;  ///< Local tokens a page
  std::int64_t chunk = 16;        ///< Chunk of KvLayout.
};

/// Cached elements of one token in one layer on `stage_rank`: 2 * its KV heads * D (rows of V take D columns,
/// however wide they are), or for MLA the latent row.
HELIX_API std::int64_t kv_row_elements(const Topology& topology, int stage_rank);

/// Bytes of one page in all layers of the stage, as ShardedKVCache::page_bytes().
HELIX_API std::int64_t kv_page_bytes(const Topology& topology, int stage_rank, const KvPages& pages);

/// Bytes of the pages that hold `lengths[i]` global tokens of sequence i on `stage_rank`, as
/// ShardedKVCache::allocated_bytes() after growing to them.
/// @throws Error(invalid_argument) for sizes below 1 or above those of helix/limits.hpp, Error(capacity) if
/// they come to 2^63 bytes.
HELIX_API std::int64_t kv_page_bytes_used(const Topology& topology, int stage_rank, const KvPages& pages,
                                          std::span<const std::int64_t> lengths);

/// Memory of the fullest rank.
struct RankMemoryPlan {
  Bytes weights{};  ///< Attention weights replicated over KVP, everything else once a stage
  Bytes kv{};
  Bytes workspace{};  ///< Activations of a step, messages included

  Bytes total() const { return weights + kv + workspace; }
};

/// Plans the memory of the fullest rank of the fullest stage. Windowed layers keep the whole context, as in
/// ShardedKVCache. Model::check() must pass and the layout be legal. No allocation.
/// @throws Error(invalid_argument) if a width is out of range; what Precision::check() and Workload::check()
/// throw.
HELIX_API RankMemoryPlan plan_memory(const Model& model, const Precision& precision, const Layout& layout,
                                     const Workload& workload);

}  // namespace helix::plan
