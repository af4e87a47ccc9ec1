// SPDX-License-Identifier: Apache-2.0
// The KV cache and attention over it, by their definitions in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/backend/attention.hpp>
#include <helix/contract/reference/elements.hpp>
#include <helix/contract/reference/exchange.hpp>

namespace helix::contract::reference {

/// Column `i` of a local token's key (is_value false) or value row: its address in the pools and its factor.
struct KvElement {
  void* pool;
  std::int64_t index;
  DType dtype;
  const float* scale = nullptr;  // null: 1
};
/// A latent column of DType::fp8_ds_mla uses its row's scale for 128 columns, stored after the row; a rope
/// column is bf16.
inline KvElement mixed_element(const KvView& kv, std::int64_t page, std::int64_t in_page, std::int64_t i) {
  const KvFormat& format = kv.format;
  if (i >= format.value_dim) {
    const std::int64_t row = page * format.rope.page + in_page * format.rope.token;
    return {kv.rope, row / 2 + i - format.value_dim, DType::bf16};
  }
  const std::int64_t row = page * format.k.page + in_page * format.k.token;
  const std::byte* scale = static_cast<const std::byte*>(kv.k) + row + format.value_dim + i / 128 * 4;
  return {kv.k, row + i, DType::fp8_e4m3, reinterpret_cast<const float*>(scale)};
}
inline KvElement kv_element(const KvView& kv, std::int64_t slot, std::int64_t local, std::int64_t head,
                            bool is_value, std::int64_t i) {
  const KvFormat& format = kv.format;
  const std::int64_t row = kv.page_begins != nullptr ? kv.page_begins[slot] : slot * kv.max_pages;
  const std::int64_t page = kv.page_table[row + local / format.page_tokens];
  const auto at = [&](void* pool, const KvStrides& strides, std::int64_t column) {
    return KvElement{
        pool, page * strides.page + head * strides.head + local % format.page_tokens * strides.token + column,
        format.dtype};
  };
  if (format.dtype == DType::fp8_ds_mla) return mixed_element(kv, page, local % format.page_tokens, i);
  if (is_value && !format.is_latent) return at(kv.v, format.v, i);
  if (format.is_latent && i >= format.value_dim) return at(kv.rope, format.rope, i - format.value_dim);
  return at(kv.k, format.k, i);
}

inline double kv_scale(const KvView& kv, std::int64_t head, bool is_value) {
  const float* scales = is_value && !kv.format.is_latent ? kv.v_scale : kv.k_scale;
  return scales == nullptr ? 1.0 : double{scales[head]};
}

inline double kv_value(const KvView& kv, std::int64_t slot, std::int64_t local, std::int64_t head,
                       bool is_value, std::int64_t i) {
  const KvElement at = kv_element(kv, slot, local, head, is_value, i);
  return load(at.pool, at.dtype, at.index) *
         (at.scale != nullptr ? double{*at.scale} : kv_scale(kv, head, is_value));
}

/// Stores the scales of a row of DType::fp8_ds_mla that will hold `values`.
inline void store_mixed_scales(const KvView& kv, std::int64_t slot, std::int64_t local, const float* values) {
  for (std::int64_t first = 0; first < kv.format.value_dim; first += 128) {
    double most = 0.0;
    for (std::int64_t i = first; i < std::min(first + 128, kv.format.value_dim); ++i)
      if (std::isfinite(values[i])) most = std::max(most, std::abs(double{values[i]}));
    *const_cast<float*>(kv_element(kv, slot, local, 0, false, first).scale) =
        most == 0.0 ? 1.0f : static_cast<float>(most / 448.0);
  }
}

/// Stores row `row` of k and v as the token at global `position`, if this rank owns it.
inline void store_token(const KvView& kv, std::int64_t slot, std::int64_t position,
                        const TensorView<const float, 3>& k, const TensorView<const float, 3>& v,
                        std::int64_t row) {
  if (position < 0 || (position / kv.layout.chunk()) % kv.layout.kvp() != kv.kvp_rank) return;
  const std::int64_t period = kv.layout.chunk() * kv.layout.kvp();
  const std::int64_t local = position / period * kv.layout.chunk() + position % kv.layout.chunk();
  const auto store_row = [&](std::int64_t h, bool is_value, std::int64_t columns,
                             const TensorView<const float, 3>& values) {
    if (kv.format.dtype == DType::fp8_ds_mla) store_mixed_scales(kv, slot, local, &values(row, h, 0));
    for (std::int64_t i = 0; i < columns; ++i) {
      const KvElement at = kv_element(kv, slot, local, h, is_value, i);
      store(at.pool, at.dtype, at.index,
            values(row, h, i) / (at.scale != nullptr ? double{*at.scale} : kv_scale(kv, h, is_value)));
    }
  };
  for (std::int64_t h = 0; h < kv.format.num_heads; ++h) {
    store_row(h, false, kv.format.head_dim, k);
    if (!kv.format.is_latent) store_row(h, true, kv.format.value_dim, v);
  }
}

inline void append_kv(const AppendKvArgs<float>& args) {
  for (std::int64_t b = 0; b < args.batch.num_sequences(); ++b)
    for (std::int64_t t = args.batch.query_offsets[b]; t < args.batch.query_offsets[b + 1]; ++t)
      store_token(args.kv, args.batch.sequence_slots[b], args.batch.positions[t], args.k, args.v, t);
}

inline void write_kv(const WriteKvArgs<float>& args) {
  for (std::int64_t row = 0; row < args.k.extent(0); ++row)
    store_token(args.kv, args.sequence_slot, args.first_position + row, args.k, args.v, row);
}

inline void read_kv(const ReadKvArgs& args) {
  for (std::int64_t row = 0; row < args.k.extent(0); ++row) {
    for (std::int64_t h = 0; h < args.kv.format.num_heads; ++h) {
      const std::int64_t local = args.first_local + row;
      for (std::int64_t i = 0; i < args.kv.format.head_dim; ++i)
        args.k(row, h, i) = static_cast<float>(kv_value(args.kv, args.sequence_slot, local, h, false, i));
      if (args.kv.format.is_latent) continue;
      for (std::int64_t i = 0; i < args.kv.format.value_dim; ++i)
        args.v(row, h, i) = static_cast<float>(kv_value(args.kv, args.sequence_slot, local, h, true, i));
    }
  }
}

inline void read_latents(const ReadLatentsArgs<float>& args) {
  for (std::int64_t row = 0; row < args.rows.extent(0); ++row)
    for (std::int64_t i = 0; i < args.kv.format.head_dim; ++i)
      args.rows(row, i) =
          static_cast<float>(kv_value(args.kv, *args.sequence_slot, args.first_local + row, 0, false, i));
}

inline void partial_attention(const PartialAttentionArgs<float>& args) {
  if (args.target.headers.message != nullptr && args.batch.num_tokens() > 0) stamp(args.target.headers);
  const PartialTarget<float> target = in_slot(args.target);
  const KvView& kv = args.kv;
  const std::int64_t group = args.q.extent(1) / kv.format.num_heads;
  for (std::int64_t b = 0; b < args.batch.num_sequences(); ++b) {
    const std::int64_t slot = args.batch.sequence_slots[b];
    for (std::int64_t t = args.batch.query_offsets[b]; t < args.batch.query_offsets[b + 1]; ++t) {
      // Goes through global positions token by token, so that it does not rely on the closed forms of
      // KvLayout.
      std::vector<std::int64_t> visible;
      const std::int64_t last = args.batch.positions[t];
      for (std::int64_t p = args.window > 0 ? std::max<std::int64_t>(0, last + 1 - args.window) : 0;
           p <= last; ++p) {
        const std::int64_t chunk = p / kv.layout.chunk();
        if (chunk % kv.layout.kvp() == kv.kvp_rank)
          visible.push_back(chunk / kv.layout.kvp() * kv.layout.chunk() + p % kv.layout.chunk());
      }
      for (std::int64_t h = 0; h < args.q.extent(1); ++h) {
        std::vector<double> scores;
        for (std::int64_t local : visible) {
          double score = 0.0;
          for (std::int64_t i = 0; i < kv.format.head_dim; ++i)
            score += args.q(t, h, i) * kv_value(kv, slot, local, h / group, false, i);
          score *= args.scale;
          if (args.soft_cap > 0.0f) score = args.soft_cap * std::tanh(score / args.soft_cap);
          scores.push_back(score);
        }
        const double highest =
            scores.empty() ? kMinusInfinity : *std::max_element(scores.begin(), scores.end());
        double total = 0.0;
        for (double& score : scores) total += score = std::exp(score - highest);
        for (std::int64_t i = 0; i < kv.format.value_dim; ++i) {
          double sum = 0.0;
          for (std::size_t j = 0; j < visible.size(); ++j)
            sum += scores[j] * kv_value(kv, slot, visible[j], h / group, true, i);
          target.out(t - target.first_token, h, i) = visible.empty() ? 0.0f : static_cast<float>(sum / total);
        }
        target.lse(t - target.first_token, h) =
            static_cast<float>(visible.empty() ? kMinusInfinity : highest + std::log(total));
      }
    }
  }
}

}  // namespace helix::contract::reference
