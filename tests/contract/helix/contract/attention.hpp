// SPDX-License-Identifier: Apache-2.0
// Attention over the KV cache in every layout, compared with its definition in double.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/contract/catch.hpp>
#include <helix/contract/kv_bench.hpp>
#include <helix/partial_attention.hpp>

namespace helix::contract {

/// One partial_attention of a ragged step, or of its sequences [begin, begin + count).
template <TestableBackend B>
void check_attention(const typename KvBench<B>::Spec& spec, const std::vector<std::int64_t>& counts,
                     std::int64_t group, std::int64_t window, float soft_cap, std::int64_t begin,
                     std::int64_t count) {
  KvBench<B> bench(spec);
  RaggedStep step(spec.lengths, counts);
  if (step.positions.size() > 6) step.positions[5] = -1;
  const StepArrays<B> batch(bench, step);
  const std::int64_t tokens = step.num_tokens();
  const std::int64_t heads = spec.heads * group;
  const auto q = bench.random(tokens * heads * (spec.head_dim + 2), 1.5);
  // The results of a whole step go to the slot given by the count of exchanges; the results of a slice go to
  // the first slot.
  const std::int64_t slot_floats = tokens * heads * spec.value_dim;
  const auto out = bench.poison(2 * slot_floats);
  const auto lse = bench.poison(slot_floats + tokens * heads);
  const auto ended = bench.array(std::vector<std::uint64_t>{static_cast<std::uint64_t>(spec.kvp_rank) + 6});
  // A slice leaves its results and headers as if its first token were row 0.
  const Batch part = batch.on(bench.host_side()).slice(begin, count);
  const std::int64_t first_out_token = begin > 0 ? part.first_token() : 0;
  const auto headers = bench.array(std::vector<std::byte>(3 * 24, std::byte{7}));
  const auto exchanges = bench.array(std::vector<std::uint64_t>{3});
  const std::int64_t part_tokens = part.num_tokens();
  const std::size_t workspace_bytes =
      bench.backend().partial_attention_workspace_bytes(part_tokens, heads, spec.head_dim, spec.value_dim);
  typename B::Buffer workspace = bench.backend().allocate(std::max<std::size_t>(1, workspace_bytes));
  const auto make = [&](const auto& side) {
    return PartialAttentionArgs<float>{
        .q = TensorView<const float, 3>(side(q), {tokens, heads, spec.head_dim},
                                        {heads * (spec.head_dim + 2), spec.head_dim + 2, 1}),
        .batch = batch.on(side).slice(begin, count),
        .kv = bench.view(side),
        .target = {.out = side.view(out, tokens, heads, spec.value_dim),
                   .lse = side.view(lse, tokens, heads),
                   .first_token = first_out_token,
                   .headers = begin == 0 ? StampArgs{}
                                         : StampArgs{side(headers), part_tokens, 7, side(exchanges),
                                                     batch.on(side).positions + first_out_token, 3, 24},
                   .slot = begin == 0 ? TargetSlot{side(ended), slot_floats * 4} : TargetSlot{}},
        .scale = 0.3f,
        .window = window,
        .soft_cap = soft_cap,
        .workspace = {workspace.data(), workspace_bytes}};
  };
  bench.check(
      make, [](const auto& args) { reference::partial_attention(args); },
      [&](const auto& args, auto stream) { helix::partial_attention(bench.backend(), args, stream); });
}

/// A workspace for many tokens is enough for fewer.
template <TestableBackend B>
void check_attention_workspaces() {
  Workbench<B> bench;
  for (const auto& [heads, head_dim, value_dim] :
       {std::array<std::int64_t, 3>{8, 64, 64}, {1, 24, 16}, {128, 576, 512}}) {
    std::size_t last = 0;
    for (std::int64_t tokens = 0; tokens <= 4096; tokens = tokens < 16 ? tokens + 1 : 2 * tokens) {
      const std::size_t bytes =
          bench.backend().partial_attention_workspace_bytes(tokens, heads, head_dim, value_dim);
      CAPTURE(tokens, heads, head_dim, value_dim);
      CHECK(bytes >= last);
      last = bytes;
    }
  }
}

template <TestableBackend B>
void partial_attention() {
  check_attention_workspaces<B>();
  const std::vector<std::int64_t> lengths{11, 1, 40, 4};
  for (const bool is_mla : {false, true}) {
    for (const std::int64_t kvp : {1, 2, 3}) {
      for (const std::int64_t chunk : {1, 3, 16}) {
        for (std::int64_t kvp_rank = 0; kvp_rank < kvp; ++kvp_rank) {
          typename KvBench<B>::Spec spec;
          spec.is_mla = is_mla;
          spec.heads = is_mla ? 1 : 2;
          spec.head_dim = is_mla ? 24 : 16;
          spec.value_dim = 16;
          spec.page_tokens = chunk == 3 ? 5 : 4;
          spec.kvp = kvp;
          spec.kvp_rank = kvp_rank;
          spec.chunk = chunk;
          spec.lengths = lengths;
          spec.dtype = kvp == 1 ? DType::f32 : kvp == 2 ? DType::bf16 : DType::fp8_e4m3;
          spec.is_scaled = spec.dtype == DType::fp8_e4m3;
          const std::int64_t group = is_mla ? 5 : 4;
          spec.is_foreign = (chunk + kvp_rank) % 2 == 0;
          CAPTURE(is_mla, spec.is_foreign, kvp, chunk, kvp_rank);
          check_attention<B>(spec, {1, 1, 1, 1}, group, 0, 0.0f, 0, 4);
          check_attention<B>(spec, {4, 1, 8, 0}, group, 0, 0.0f, 0, 4);
          check_attention<B>(spec, {11, 1, 40, 4}, group, 0, 0.0f, 0, 4);
          check_attention<B>(spec, {11, 1, 33, 2}, group, 7, 0.0f, 0, 4);
          check_attention<B>(spec, {2, 1, 9, 2}, group, 0, 1.5f, 0, 4);
          check_attention<B>(spec, {2, 1, 9, 2}, group, 1, 1.5f, 1, 2);
          check_attention<B>(spec, {2, 1, 9, 2}, 1, 0, 0.0f, 3, 1);
          check_attention<B>(spec, {2, 1, 9, 2}, 1, 0, 0.0f, 2, 0);
        }
      }
    }
  }
  for (const bool is_foreign : {false, true}) {  // rows that contain scales
    typename KvBench<B>::Spec mixed;
    mixed.dtype = DType::fp8_ds_mla;
    mixed.is_mla = true;
    mixed.is_foreign = is_foreign;
    mixed.heads = 1;
    mixed.head_dim = 292;
    mixed.value_dim = 260;
    mixed.kvp = 2;
    mixed.kvp_rank = is_foreign ? 1 : 0;
    mixed.chunk = 3;
    mixed.lengths = lengths;
    CAPTURE(is_foreign);
    check_attention<B>(mixed, {1, 1, 1, 1}, 5, 0, 0.0f, 0, 4);
    check_attention<B>(mixed, {11, 1, 33, 2}, 5, 7, 1.5f, 0, 4);
    check_attention<B>(mixed, {2, 1, 9, 2}, 20, 0, 0.0f, 1, 2);
  }
  typename KvBench<B>::Spec spec;  // a long sequence, whose keys implementations split
  spec.heads = 1;
  spec.head_dim = spec.value_dim = 32;
  spec.page_tokens = 16;
  spec.lengths = {2500, 1};
  check_attention<B>(spec, {3, 1}, 2, 0, 0.0f, 0, 2);
  check_attention<B>(spec, {1, 1}, 2, 2100, 0.0f, 0, 2);
}

}  // namespace helix::contract
