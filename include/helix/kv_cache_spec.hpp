// SPDX-License-Identifier: Apache-2.0
// KvCacheSpec: the sizes of a sharded KV cache, and their checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/topology.hpp>

namespace helix {

/// Sizes of a cache, fixed for its life. They must be equal on all KVP ranks of a stage, which do not compare
/// them: if page_tokens or chunk differ on one rank, tokens are stored twice or nowhere.
struct KvCacheSpec {
  DType dtype = DType::bf16;      ///< Element type of keys, values and latents as stored.
  std::int64_t num_layers = 0;    ///< Layers of this stage.
  std::int64_t page_tokens = 64;  ///< Local tokens a page
  std::int64_t num_pages = 0;  ///< Pages of each rank; a page holds every layer. See PageLedger::pages_needed
  std::int64_t chunk = 16;     ///< Chunk C of KvLayout, in tokens
  std::int64_t max_sequences = 64;
  /// Most global tokens of a sequence; 0: as many as fit into the pages. The page table has room for the
  /// pages of max_sequences such sequences, on the device and on the host.
  std::int64_t max_tokens = 0;
  /// Scales of keys, fp8_e4m3 only (stored * scale = value): empty (all 1), one value, [Hkv of the whole
  /// model] or [num_layers, Hkv]. With MLA they scale the whole latent row.
  std::vector<float> k_scales{};
  std::vector<float> v_scales{};  ///< Scales of values, in the forms of k_scales; MLA: empty.
  std::uint32_t tag = 0;          ///< Makes the ids of caches of equal sizes differ; equal on all ranks
};

namespace detail {

/// Throws Error(invalid_argument) unless the scales (called `name`) are of a form that KvCacheSpec allows.
inline void check_scales(std::string_view name, const std::vector<float>& scales, const KvCacheSpec& spec,
                         const ModelShape& shape) {
  if (scales.empty()) return;
  HELIX_EXPECTS(spec.dtype == DType::fp8_e4m3, ErrorCode::invalid_argument, "the KV cache has ", name,
                " but its dtype is ", to_string(spec.dtype), "; only fp8_e4m3 is scaled");
  const auto count = static_cast<std::int64_t>(scales.size());
  HELIX_EXPECTS(count == 1 || count == shape.num_kv_heads || count == spec.num_layers * shape.num_kv_heads,
                ErrorCode::invalid_argument, "the KV cache has ", count, " ", name,
                "; give 1, one for each of the ", shape.num_kv_heads, " KV heads, or ", spec.num_layers,
                " * ", shape.num_kv_heads, " for each layer");
  for (const float scale : scales) {
    HELIX_EXPECTS(scale > 0.0f && scale <= std::numeric_limits<float>::max(), ErrorCode::invalid_argument,
                  "the KV cache's ", name, " hold ", scale, "; scales are finite and above 0");
  }
}

/// Returns the spec if it fits the topology. @throws Error(invalid_argument) naming the size that is out of
/// range.
inline const KvCacheSpec& checked(const KvCacheSpec& spec, const Topology& topology) {
  const ModelShape& shape = topology.shape();
  HELIX_EXPECTS(spec.num_layers >= 1 && spec.num_layers <= std::numeric_limits<int>::max(),
                ErrorCode::invalid_argument, "the KV cache's num_layers is ", spec.num_layers,
                "; give the number of layers of this stage");
  HELIX_EXPECTS(size_bytes(spec.dtype) != 0, ErrorCode::invalid_argument, "the KV cache's dtype is ",
                static_cast<int>(spec.dtype),
                ", which names no DType; give f32, f16, bf16, fp8_e4m3 or fp8_ds_mla");
  HELIX_EXPECTS(shape.value_dim <= shape.head_dim, ErrorCode::invalid_argument, "value_dim ", shape.value_dim,
                " exceeds head_dim ", shape.head_dim, "; rows of K and V lie head_dim apart");
  HELIX_EXPECTS(
      spec.dtype != DType::fp8_ds_mla || (shape.is_mla() && fits_mixed_rows(shape.head_dim, shape.value_dim)),
      ErrorCode::invalid_argument, "the KV cache's dtype is fp8_ds_mla, but the model has ",
      shape.is_mla() ? "latents" : "no latents", " of ", shape.value_dim, " of ", shape.head_dim,
      " columns; it takes MLA's, of a multiple of 4 and an even number of rope columns");
  check_scales("k_scales", spec.k_scales, spec, shape);
  check_scales("v_scales", spec.v_scales, spec, shape);
  HELIX_EXPECTS(!shape.is_mla() || spec.v_scales.empty(), ErrorCode::invalid_argument, "the KV cache has ",
                spec.v_scales.size(), " v_scales, but MLA's V is part of the K row: give k_scales only");
  return spec;
}

/// The scales of a rank's heads in every layer, [layers, heads of the rank]; empty if there are none.
inline std::vector<float> expanded_scales(const std::vector<float>& scales, std::int64_t layers, Range heads,
                                          std::int64_t num_kv_heads) {
  std::vector<float> expanded;
  for (std::int64_t layer = 0; layer < layers && !scales.empty(); ++layer) {
    for (std::int64_t head = heads.begin; head < heads.end; ++head) {
      std::int64_t at = layer * num_kv_heads + head;
      if (scales.size() == 1) {
        at = 0;
      } else if (static_cast<std::int64_t>(scales.size()) == num_kv_heads) {
        at = head;
      }
      expanded.push_back(scales[static_cast<std::size_t>(at)]);
    }
  }
  return expanded;
}

/// Returns count * bytes. @throws Error(capacity) if that exceeds the address space.
inline std::size_t bytes_of(const KvCacheSpec& spec, std::size_t count, std::size_t bytes) {
  HELIX_EXPECTS(bytes == 0 || count <= std::numeric_limits<std::ptrdiff_t>::max() / bytes,
                ErrorCode::capacity, "the KV cache of ", spec.num_pages, " pages in ", spec.num_layers,
                " layers exceeds the address space");
  return count * bytes;
}

}  // namespace detail
}  // namespace helix
