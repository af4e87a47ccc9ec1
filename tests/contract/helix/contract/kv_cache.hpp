// SPDX-License-Identifier: Apache-2.0
// The KV cache and attention over it, in every layout, against their definitions in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include <helix/contract/workbench.hpp>
#include <helix/partial_attention.hpp>
#include <helix/prepare_qkv.hpp>

namespace helix::contract {

/// A cache of several sequences on one KVP rank. Page ids are scattered; entries that no token needs, and
/// page 0, lead to NaN.
template <TestableBackend B>
class KvBench : public Workbench<B> {
 public:
  struct Spec {
    DType dtype = DType::f32;
    bool is_mla = false;
    bool is_foreign = false;  // token-major pools of K and V, or of latents and rope, and page lists as CSR
    std::int64_t heads = 2;
    std::int64_t head_dim = 8;
    std::int64_t value_dim = 8;
    std::int64_t page_tokens = 4;
    std::int64_t kvp = 1;
    std::int64_t kvp_rank = 0;
    std::int64_t chunk = 1;
    std::vector<std::int64_t> lengths;  // of each sequence, global, the new tokens included
    bool is_scaled = false;
    bool is_filled = true;     // else every row is NaN until stored
    bool is_computed = false;  // f32 rows that are stored may differ by rounding
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
    auto next = static_cast<std::int32_t>(used_pages);  // from the last page down
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
            for (std::size_t i = 0; i < numbers.size(); ++i)
              store(reference::kv_element(host, slot, local, h, is_value, static_cast<std::int64_t>(i)),
                    numbers[i]);
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
      format.k = {tokens * value_dim, 0, value_dim};
      format.rope = {tokens * (dim - value_dim), 0, dim - value_dim};
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
    for (std::int64_t i = 0; i < elements; ++i) reference::store(pool.data(), spec_.dtype, i, std::nan(""));
    return pool;
  }

  void store(const reference::KvElement& at, float value) const {
    reference::store(at.pool, spec_.dtype, at.index, value);
  }

  Spec spec_;
  KvLayout layout_;
  KvView view_;
  Array<std::byte> k_pool_;
  Array<std::byte> v_pool_;  // foreign only: V, or the rope parts of latents
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

/// The arrays of a step, and the batch on either side.
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

template <TestableBackend B>
void append_kv() {
  for (const DType dtype : kKvTypes) {
    for (const bool is_mla : {false, true}) {
      for (const std::int64_t kvp : {1, 2, 3}) {
        for (const std::int64_t chunk : {1, 3}) {
          for (std::int64_t kvp_rank = 0; kvp_rank < kvp; ++kvp_rank) {
            const bool is_foreign = (kvp + chunk + kvp_rank) % 2 != 0;
            CAPTURE(to_string(dtype), is_mla, is_foreign, kvp, chunk, kvp_rank);
            const std::vector<std::int64_t> lengths{9, 14, 1, 0};
            typename KvBench<B>::Spec spec;
            spec.dtype = dtype;
            spec.is_mla = is_mla;
            spec.is_foreign = is_foreign;
            spec.heads = is_mla ? 1 : 2;
            spec.value_dim = 6;
            spec.kvp = kvp;
            spec.kvp_rank = kvp_rank;
            spec.chunk = chunk;
            spec.lengths = lengths;
            spec.is_filled = false;
            spec.is_scaled = dtype == DType::fp8_e4m3;
            KvBench<B> bench(spec);
            RaggedStep step(lengths, {9, 4, 1, 0});
            step.positions[2] = -1;  // padding is dropped
            const StepArrays<B> batch(bench, step);
            const std::int64_t tokens = step.num_tokens();
            const auto k = bench.random(tokens * (spec.heads * spec.head_dim + 2));
            const auto v = bench.random(tokens * spec.heads * spec.value_dim);
            HELIX_CHECK_OPERATION(bench, append_kv, ([&](const auto& side) {
                                    AppendKvArgs<float> args;
                                    args.k = TensorView<const float, 3>(
                                        side(k), {tokens, spec.heads, spec.head_dim},
                                        {spec.heads * spec.head_dim + 2, spec.head_dim, 1});
                                    if (!is_mla) args.v = side.view(v, tokens, spec.heads, spec.value_dim);
                                    args.batch = batch.on(side);
                                    args.kv = bench.view(side);
                                    return args;
                                  }));
          }
        }
      }
    }
  }
}

template <TestableBackend B>
void write_and_read_kv() {
  for (const DType dtype : kKvTypes) {
    for (const bool is_mla : {false, true}) {
      for (const std::int64_t kvp : {1, 3}) {
        for (const std::int64_t first : {0, 5}) {
          const bool is_foreign = first > 0;
          CAPTURE(to_string(dtype), is_mla, is_foreign, kvp, first);
          typename KvBench<B>::Spec spec;
          spec.dtype = dtype;
          spec.is_mla = is_mla;
          spec.is_foreign = is_foreign;
          spec.heads = is_mla ? 1 : 2;
          spec.kvp = kvp;
          spec.kvp_rank = kvp - 1;
          spec.chunk = 2;
          spec.lengths = {3, 19};
          spec.is_scaled = dtype == DType::fp8_e4m3;
          KvBench<B> bench(spec);
          const std::int64_t tokens = 19 - first;
          const auto k = bench.random(tokens * spec.heads * spec.head_dim);
          const auto v = bench.random(tokens * spec.heads * spec.value_dim);
          HELIX_CHECK_OPERATION(bench, write_kv, ([&](const auto& side) {
                                  WriteKvArgs<float> args;
                                  args.k = side.view(k, tokens, spec.heads, spec.head_dim);
                                  if (!is_mla) args.v = side.view(v, tokens, spec.heads, spec.value_dim);
                                  args.first_position = first;
                                  args.sequence_slot = 1;
                                  args.kv = bench.view(side);
                                  return args;
                                }));
          const std::int64_t local = bench.local_length(1);
          const std::int64_t begin = local / 2;
          const std::int64_t count = local - begin;
          const auto k_out = bench.poison(count * spec.heads * spec.head_dim);
          const auto v_out = bench.poison(count * spec.heads * spec.value_dim);
          HELIX_CHECK_OPERATION(bench, read_kv, ([&](const auto& side) {
                                  ReadKvArgs args;
                                  args.kv = bench.view(side);
                                  args.sequence_slot = 1;
                                  args.first_local = begin;
                                  args.k = side.view(k_out, count, spec.heads, spec.head_dim);
                                  if (!is_mla) args.v = side.view(v_out, count, spec.heads, spec.value_dim);
                                  return args;
                                }));
        }
      }
    }
  }
}

/// One partial_attention of a ragged step, or of sequences [begin, begin + count) of it.
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
  const auto out = bench.poison(tokens * heads * spec.value_dim);
  const auto lse = bench.poison(tokens * heads);
  // Slices leave their results, and headers, where the first row is their first token's.
  const Batch part = batch.on(bench.host_side()).slice(begin, count);
  const std::int64_t first_out_token = begin > 0 ? part.first_token() : 0;
  const auto headers = bench.array(std::vector<std::byte>(3 * 24, std::byte{7}));
  const auto epoch = bench.array(std::vector<std::uint64_t>{3});
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
        .sink = {.out = side.view(out, tokens, heads, spec.value_dim),
                 .lse = side.view(lse, tokens, heads),
                 .first_token = first_out_token,
                 .headers = begin == 0 ? StampArgs{}
                                       : StampArgs{side(headers), part_tokens, 7, side(epoch),
                                                   batch.on(side).positions + first_out_token, 3, 24}},
        .scale = 0.3f,
        .window = window,
        .soft_cap = soft_cap,
        .workspace = {workspace.data(), workspace_bytes}};
  };
  bench.check(
      make, [](const auto& args) { reference::partial_attention(args); },
      [&](const auto& args, auto stream) { helix::partial_attention(bench.backend(), args, stream); });
}

template <TestableBackend B>
void partial_attention() {
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
  typename KvBench<B>::Spec spec;  // a long sequence, where implementations split the keys
  spec.heads = 1;
  spec.head_dim = spec.value_dim = 32;
  spec.page_tokens = 16;
  spec.lengths = {2500, 1};
  check_attention<B>(spec, {3, 1}, 2, 0, 0.0f, 0, 2);
  check_attention<B>(spec, {1, 1}, 2, 2100, 0.0f, 0, 2);
}

/// Norm of q and k, rope and append, as one operation or as three.
template <TestableBackend B>
void prepare_qkv() {
  for (const bool has_norm : {false, true}) {
    for (const std::int64_t rotary : {0, 4, 8}) {
      CAPTURE(has_norm, rotary);
      typename KvBench<B>::Spec spec;
      spec.kvp = 2;
      spec.chunk = 3;
      spec.lengths = {9, 14, 1};
      spec.is_filled = false;
      spec.is_computed = true;
      KvBench<B> bench(spec);
      const RaggedStep step(spec.lengths, {4, 1, 1});
      const StepArrays<B> batch(bench, step);
      const std::int64_t tokens = step.num_tokens();
      const std::int64_t q_heads = 4;
      const std::int64_t row = (q_heads + 2 * spec.heads) * spec.head_dim;
      const auto qkv = bench.random(tokens * row);
      const auto q_norm = bench.weight(1, spec.head_dim);
      const auto k_norm = bench.weight(1, spec.head_dim, DType::bf16);
      const auto frequencies = bench.random(4);
      const auto make = [&](const auto& side) {
        const auto heads_from = [&](std::int64_t head, std::int64_t heads) {
          return TensorView<float, 3>(side(qkv) + head * spec.head_dim, {tokens, heads, spec.head_dim},
                                      {row, spec.head_dim, 1});
        };
        return PrepareQkvArgs<float>{.q = heads_from(0, q_heads),
                                     .k = heads_from(q_heads, spec.heads),
                                     .v = heads_from(q_heads + spec.heads, spec.heads),
                                     .q_norm = has_norm ? q_norm.on(side) : WeightView{},
                                     .k_norm = has_norm ? k_norm.on(side) : WeightView{},
                                     .epsilon = 1e-6f,
                                     .rope = {.inverse_frequency = side(frequencies), .rotary_dim = rotary},
                                     .batch = batch.on(side),
                                     .kv = bench.view(side)};
      };
      bench.check(
          make,
          [](const PrepareQkvArgs<float>& args) {
            if (!args.q_norm.empty()) reference::head_rms_norm({args.q, args.q_norm, args.epsilon});
            if (!args.k_norm.empty()) reference::head_rms_norm({args.k, args.k_norm, args.epsilon});
            reference::rope({args.q, args.q, args.batch.positions, args.rope});
            reference::rope({args.k, args.k, args.batch.positions, args.rope});
            reference::append_kv({args.k, args.v, args.batch, args.kv});
          },
          [&](const auto& args, auto stream) { helix::prepare_qkv(bench.backend(), args, stream); });
    }
  }
}

}  // namespace helix::contract
