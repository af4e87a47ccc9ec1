// SPDX-License-Identifier: Apache-2.0
// One row of logits, divided into shards of the vocabulary.
#pragma once

#include <cstdint>

namespace helix::cpu {

/// Calls visit(logit, id) for each id of one row, in increasing id. Args: any type with `logits` and
/// `shard_begins` as in SampleArgs.
template <class Args, class Visit>
void for_each_logit(const Args& args, std::int64_t row, const Visit& visit) {
  for (std::int64_t shard = 0; shard < args.logits.extent(0); ++shard) {
    const std::int64_t begin = args.shard_begins[shard];
    const std::int64_t end = args.shard_begins[shard + 1];
    if (begin == end) continue;
    const float* logits = &args.logits(shard, row, 0);
    const std::int64_t stride = args.logits.stride(2);
    for (std::int64_t id = begin; id < end; ++id)
      visit(logits[(id - begin) * stride], static_cast<std::int32_t>(id));
  }
}

/// The logit of `id` in one row; nullptr if no shard has it.
template <class Args>
auto* find_logit(const Args& args, std::int64_t row, std::int64_t id) {
  for (std::int64_t shard = 0; shard < args.logits.extent(0); ++shard) {
    if (id >= args.shard_begins[shard] && id < args.shard_begins[shard + 1])
      return &args.logits(shard, row, id - args.shard_begins[shard]);
  }
  return static_cast<decltype(&args.logits(0, row, 0))>(nullptr);
}

}  // namespace helix::cpu
