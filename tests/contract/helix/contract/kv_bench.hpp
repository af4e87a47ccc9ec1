// SPDX-License-Identifier: Apache-2.0
// A cache under test on one KVP rank, and steps over its sequences.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include <helix/contract/workbench.hpp>

namespace helix::contract {

/// A cache of several sequences on one KVP rank. Page ids are scattered; unneeded entries, and page 0, lead
/// to NaN.
template <TestableBackend B>
class KvBench : public Workbench<B> {
 public:
  struct Spec {
    DType dtype = DType::f32;
    bool is_mla = false;
    // Token-major pools of K and V, or of latents and rope, with page lists as CSR.
    bool is_foreign = false;
    std::int64_t heads = 2;
    std::int64_t head_dim = 8;
    std::int64_t value_dim = 8;
    std::int64_t page_tokens = 4;
    std::int64_t kvp = 1;
    std::int64_t kvp_rank = 0;
    std::int64_t chunk = 1;
    std::vector<std::int64_t> lengths;  // global length of each sequence, including the new tokens
    bool is_scaled = false;
    bool is_filled = true;     // otherwise every row is NaN until it is stored
    bool is_computed = false;  // stored f32 rows may differ by rounding
  };

  explicit KvBench(const Spec& spec) : spec_(spec), layout_(spec.kvp, spec.chunk) {
    view_.format = format_of(spec);
    view_.layout = layout_;
    view_.kvp_rank = spec.kvp_rank;
    std::int64_t used_pages = 0;
    for (const std::int64_t length : spec.lengths) {
      const std::int64_t pages = pages_of(length);
      view_.max_pages = std::max(view_.max_pages, pages + 1);
      used_pages += pages;
    }
    view_.num_pages = used_pages + 1;
    const auto sequences = static_cast<std::int64_t>(spec.lengths.size());
    std::vector<std::int32_t> table(static_cast<std::size_t>(sequences * view_.max_pages), 0);
    auto next = static_cast<std::int32_t>(used_pages);  // counts down from the last page
    const KvFormat& format = view_.format;
    const auto pool_elements = [&](const KvStrides& strides) { return view_.num_pages * strides.page; };
    std::vector<std::byte> k_pool = poisoned(pool_elements(format.k));
    std::vector<std::byte> v_pool = poisoned(!spec.is_foreign ? 0
                                             : spec.is_mla    ? pool_elements(format.rope)
                                                              : pool_elements(format.v));
    KvView host = with_pools(k_pool.data(), v_pool.data());
    host.page_table = table.data();
    for (std::size_t b = 0; b < spec.lengths.size(); ++b) {
      const auto slot = static_cast<std::int64_t>(b);
      for (std::int64_t p = 0; p < pages_of(spec.lengths[b]); ++p)
        table[static_cast<std::size_t>(slot * view_.max_pages + p)] = next--;
      if (!spec.is_filled) continue;
      for (std::int64_t local = 0; local < layout_.length(spec.lengths[b], spec.kvp_rank); ++local) {
        for (std::int64_t h = 0; h < spec.heads; ++h) {
          for (const bool is_value : {false, true}) {
            if (is_value && spec.is_mla) continue;
            const std::vector<float> numbers =
                this->random_values(is_value ? spec.value_dim : spec.head_dim, 2.0);
            const bool is_mixed = spec.dtype == DType::fp8_ds_mla;
            if (is_mixed) reference::store_mixed_scales(host, slot, local, numbers.data());
            for (std::size_t i = 0; i < numbers.size(); ++i) {
              const auto to =
                  reference::kv_element(host, slot, local, h, is_value, static_cast<std::int64_t>(i));
              reference::store(to.pool, to.dtype, to.index,
                               to.scale != nullptr ? numbers[i] / *to.scale : numbers[i]);
            }
          }
        }
      }
    }
    k_pool_ = this->array(std::move(k_pool), spec.is_computed);
    v_pool_ = this->array(std::move(v_pool), spec.is_computed);
    table_ = this->array(std::move(table));
    std::vector<std::int32_t> begins;
    for (std::int64_t slot = 0; slot <= sequences; ++slot)
      begins.push_back(static_cast<std::int32_t>(slot * view_.max_pages));
    begins_ = this->array(std::move(begins));
    std::vector<float> scales;
    for (std::int64_t h = 0; h < 2 * spec.heads; ++h) scales.push_back(0.25f + 0.37f * static_cast<float>(h));
    scales_ = this->array(std::move(scales));
  }

  KvView view(const typename Workbench<B>::Side& side) const {
    KvView view = with_pools(side(k_pool_), side(v_pool_));
    view.page_table = side(table_);
    if (spec_.is_foreign) {
      view.page_begins = side(begins_);
      view.max_pages = 0;
    }
    if (spec_.is_scaled) {
      view.k_scale = side(scales_);
      if (!spec_.is_mla) view.v_scale = side(scales_) + spec_.heads;
    }
    return view;
  }

  std::int64_t local_length(std::size_t sequence) const {
    return layout_.length(spec_.lengths[sequence], spec_.kvp_rank);
  }

 private:
  std::int64_t pages_of(std::int64_t length) const {
    return (layout_.length(length, spec_.kvp_rank) + spec_.page_tokens - 1) / spec_.page_tokens;
  }

  static KvFormat format_of(const Spec& spec) {
    const auto& [dtype, heads, dim, value_dim, tokens] =
        std::tie(spec.dtype, spec.heads, spec.head_dim, spec.value_dim, spec.page_tokens);
    if (!spec.is_mla && !spec.is_foreign) return KvFormat::head_major(dtype, heads, dim, value_dim, tokens);
    if (!spec.is_mla) return KvFormat::token_major(dtype, heads, dim, value_dim, tokens);
    KvFormat format = KvFormat::latent(dtype, dim, value_dim, tokens);
    if (spec.is_foreign) {
      const std::int64_t latent = format.k_extent();
      const std::int64_t rope = format.rope_extent();
      format.k = {tokens * latent, 0, latent};
      format.rope = {tokens * rope, 0, rope};
    }
    return format;
  }

  KvView with_pools(std::byte* k_pool, std::byte* v_pool) const {
    KvView view = view_;
    if (!spec_.is_foreign) {
      const KvView pool = KvView::of_pool(k_pool, view_.format, view_.num_pages);
      view.k = pool.k;
      view.v = pool.v;
      view.rope = pool.rope;
    } else {
      view.k = k_pool;
      (spec_.is_mla ? view.rope : view.v) = v_pool;
    }
    return view;
  }

  std::vector<std::byte> poisoned(std::int64_t elements) const {
    std::vector<std::byte> pool(static_cast<std::size_t>(elements) * size_bytes(spec_.dtype));
    if (spec_.dtype == DType::fp8_ds_mla) {
      std::fill(pool.begin(), pool.end(), std::byte{0xff});  // NaN of each of its types
      return pool;
    }
    for (std::int64_t i = 0; i < elements; ++i) reference::store(pool.data(), spec_.dtype, i, std::nan(""));
    return pool;
  }

  Spec spec_;
  KvLayout layout_;
  KvView view_;
  Array<std::byte> k_pool_;
  Array<std::byte> v_pool_;  // foreign only: V, or the rope part of latents
  Array<std::int32_t> begins_;
  Array<std::int32_t> table_;
  Array<float> scales_;
};

/// A step in which sequence b adds the last counts[b] of its tokens.
struct RaggedStep {
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> positions;

  RaggedStep(const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& counts) {
    for (std::size_t b = counts.size(); b-- > 0;) {  // slots are not in batch order
      for (std::int64_t t = 0; t < counts[b]; ++t) positions.push_back(lengths[b] - counts[b] + t);
      offsets.push_back(static_cast<std::int32_t>(positions.size()));
      slots.push_back(static_cast<std::int32_t>(b));
    }
  }
  std::int64_t num_tokens() const { return offsets.back(); }
};

/// The arrays of a step, and its batch on either side.
template <TestableBackend B>
struct StepArrays {
  Array<std::int32_t> offsets;
  Array<std::int32_t> slots;
  Array<std::int64_t> positions;
  std::vector<std::int32_t> host_offsets;

  StepArrays(Workbench<B>& bench, const RaggedStep& step)
      : offsets(bench.array(step.offsets)),
        slots(bench.array(step.slots)),
        positions(bench.array(step.positions)),
        host_offsets(step.offsets) {}

  Batch on(const typename Workbench<B>::Side& side) const {
    return {host_offsets, side(offsets), side(positions), side(slots)};
  }
};

}  // namespace helix::contract
