// SPDX-License-Identifier: Apache-2.0
// error_of_row(): compares attention with sums in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/contract/reference/attention.hpp>
#include <helix/partial_attention.hpp>

#include "support/worse.hpp"

namespace helix::bench {

/// The largest error of out and lse of query token `t` and `query_head`, compared with their definition in
/// double over the tokens of this rank that `t` sees. No window and no soft cap.
inline double error_of_row(const PartialAttentionArgs<float>& args, std::int64_t t, std::int64_t query_head) {
  const KvView& kv = args.kv;
  const std::int64_t head = query_head / (args.q.extent(1) / kv.format.num_heads);
  const auto& offsets = args.batch.query_offsets_host;
  const auto sequence = std::upper_bound(offsets.begin(), offsets.end(), t) - offsets.begin() - 1;
  const std::int64_t slot = args.batch.sequence_slots[sequence];
  const std::int64_t tokens = kv.layout.length(args.batch.positions[t] + 1, kv.kvp_rank);
  std::vector<double> out(static_cast<std::size_t>(kv.format.value_dim), 0.0);
  double total = 0.0;  // scores are small enough for exp without a shift
  for (std::int64_t token = 0; token < tokens; ++token) {
    double score = 0.0;
    for (std::int64_t i = 0; i < kv.format.head_dim; ++i)
      score += static_cast<double>(args.q(t, query_head, i)) *
               contract::reference::kv_value(kv, slot, token, head, false, i);
    const double weight = std::exp(score * args.scale);
    total += weight;
    for (std::int64_t i = 0; i < kv.format.value_dim; ++i)
      out[static_cast<std::size_t>(i)] +=
          weight * contract::reference::kv_value(kv, slot, token, head, true, i);
  }
  double worst = std::abs(static_cast<double>(args.target.lse(t, query_head)) - std::log(total));
  for (std::int64_t i = 0; i < kv.format.value_dim; ++i) {
    const double exact = out[static_cast<std::size_t>(i)] / total;
    worst = test::worse(worst, std::abs(exact - args.target.out(t, query_head, i)));
  }
  return worst;
}

}  // namespace helix::bench
