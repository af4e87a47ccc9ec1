// SPDX-License-Identifier: Apache-2.0
// error_of_head(): compares attention over bf16 pages with sums in double.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <helix/partial_attention.hpp>

#include "support/worse.hpp"

namespace helix::bench {

inline float bf16_element(const std::byte* pages, std::int64_t index) {
  bf16 x;
  std::memcpy(&x, pages + index * 2, sizeof(x));
  return static_cast<float>(x);
}

/// The largest error of one query head of the batch's first row, compared with a naive double computation
/// over the whole of its sequence. All pages of the sequence are bf16 and in the first row of the page table.
inline double error_of_head(const PartialAttentionArgs<float>& args, std::int64_t query_head) {
  const KvView& kv = args.kv;
  const KvFormat& format = kv.format;
  const auto* keys = static_cast<const std::byte*>(kv.k);
  const auto* values = static_cast<const std::byte*>(format.is_latent ? kv.k : kv.v);
  const std::int64_t head = query_head / (args.q.extent(1) / format.num_heads);
  std::vector<double> out(static_cast<std::size_t>(format.value_dim), 0.0);
  double total = 0.0;  // scores are small enough for exp without a shift
  for (std::int64_t token = 0; token < kv.max_pages * format.page_tokens; ++token) {
    const std::int32_t page = kv.page_table[token / format.page_tokens];
    const std::int64_t row = format.k.at(page, head, token % format.page_tokens);
    const std::int64_t rope = format.rope.at(page, head, token % format.page_tokens) - format.k_columns();
    double score = 0.0;
    for (std::int64_t i = 0; i < format.head_dim; ++i) {
      const float key = i < format.k_columns()
                            ? bf16_element(keys, row + i)
                            : bf16_element(static_cast<const std::byte*>(kv.rope), rope + i);
      score += static_cast<double>(args.q(0, query_head, i)) * key;
    }
    const double weight = std::exp(score * args.scale);
    total += weight;
    for (std::int64_t i = 0; i < format.value_dim; ++i) {
      out[static_cast<std::size_t>(i)] += weight * bf16_element(values, row + i);
    }
  }
  double worst = std::abs(static_cast<double>(args.target.lse(0, query_head)) - std::log(total));
  for (std::int64_t i = 0; i < format.value_dim; ++i) {
    const double exact = out[static_cast<std::size_t>(i)] / total;
    worst = test::worse(worst, std::abs(exact - args.target.out(0, query_head, i)));
  }
  return worst;
}

}  // namespace helix::bench
