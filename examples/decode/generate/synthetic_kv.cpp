// SPDX-License-Identifier: Apache-2.0
// Writes synthetic KV straight into pages in host memory.
#include "generate/synthetic_kv.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <helix/integers.hpp>
#include <helix/mixed_row.hpp>

namespace helix::decode {
namespace {

/// A range of columns of the K or V rows: their addresses and indices.
struct Columns {
  void* pool = nullptr;
  KvStrides strides;
  const float* scales = nullptr;
  bool is_value = false;
  Range columns;
};

/// Fills the rows of one head in one page.
class PageFill {
 public:
  PageFill(const KvView& kv, std::int32_t slot, std::int64_t tokens, std::int64_t layer,
           std::int64_t first_head)
      : kv_(kv),
        slot_(slot),
        local_tokens_(kv.layout.length(tokens, kv.kvp_rank)),
        layer_(layer),
        first_head_(first_head) {}

  std::int64_t num_pages() const { return ceil_div(local_tokens_, kv_.format.page_tokens); }

  void fill(std::int64_t index, std::int64_t head) const {
    const KvFormat& format = kv_.format;
    if (format.is_mixed()) return fill_mixed(index);
    fill({kv_.k, format.k, kv_.k_scale, false, {0, format.k_columns()}}, index, head);
    if (format.is_latent) {
      fill({kv_.rope, format.rope, kv_.k_scale, false, {format.value_dim, format.head_dim}}, index, head);
    } else {
      fill({kv_.v, format.v, kv_.v_scale, true, {0, format.value_dim}}, index, head);
    }
  }

 private:
  void fill(const Columns& kind, std::int64_t index, std::int64_t head) const {
    const std::int64_t page_tokens = kv_.format.page_tokens;
    const std::int64_t page = kv_.page_table[kv_.first_page_of(slot_) + index];
    const std::int64_t end = std::min((index + 1) * page_tokens, local_tokens_);
    for (std::int64_t local = index * page_tokens; local < end;) {
      // Positions are consecutive up to the end of a chunk, or without limit if there is one rank.
      const std::int64_t chunk = kv_.layout.chunk();
      const std::int64_t run_end = kv_.layout.kvp() == 1 ? end : std::min(end, (local / chunk + 1) * chunk);
      const SyntheticRows rows = {.layer = layer_,
                                  .head = first_head_ + head,
                                  .first_position = kv_.layout.global(kv_.kvp_rank, local),
                                  .num_rows = run_end - local,
                                  .is_value = kind.is_value,
                                  .first_column = kind.columns.begin,
                                  .num_columns = kind.columns.size(),
                                  .scale = kind.scales == nullptr ? 1.0f : kind.scales[head]};
      const std::int64_t first = kind.strides.at(page, head, local - index * page_tokens);
      fill_synthetic_rows(rows, kv_.format.dtype,
                          static_cast<std::byte*>(kind.pool) + first * kv_.format.element_bytes(),
                          kind.strides.token);
      local = run_end;
    }
  }

  /// Fills rows of type DType::fp8_ds_mla.
  void fill_mixed(std::int64_t index) const {
    const KvFormat& format = kv_.format;
    const std::int64_t page = kv_.page_table[kv_.first_page_of(slot_) + index];
    const std::int64_t end = std::min((index + 1) * format.page_tokens, local_tokens_);
    std::vector<float> row(static_cast<std::size_t>(format.head_dim));
    for (std::int64_t local = index * format.page_tokens; local < end; ++local) {
      const std::int64_t in_page = local - index * format.page_tokens;
      fill_synthetic_rows({.layer = layer_,
                           .head = first_head_,
                           .first_position = kv_.layout.global(kv_.kvp_rank, local),
                           .num_rows = 1,
                           .num_columns = format.head_dim},
                          DType::f32, row.data(), format.head_dim);
      store_mixed_row(row.data(), format.head_dim, format.value_dim,
                      static_cast<std::byte*>(kv_.k) + format.k.at(page, 0, in_page),
                      static_cast<std::byte*>(kv_.rope) + format.rope.at(page, 0, in_page));
    }
  }

  const KvView& kv_;
  std::int32_t slot_;
  std::int64_t local_tokens_;
  std::int64_t layer_;
  std::int64_t first_head_;
};

}  // namespace

void fill_synthetic_layer(const KvView& kv, std::int32_t slot, std::int64_t tokens, std::int64_t layer,
                          std::int64_t first_head, cpu::ThreadPool& threads) {
  const PageFill pages(kv, slot, tokens, layer, first_head);
  threads.parallel_for(pages.num_pages() * kv.format.num_heads, [&](std::int64_t index, int) {
    pages.fill(index / kv.format.num_heads, index % kv.format.num_heads);
  });
}

}  // namespace helix::decode
