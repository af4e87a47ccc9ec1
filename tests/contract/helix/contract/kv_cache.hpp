// SPDX-License-Identifier: Apache-2.0
// Tokens stored in the KV cache and read back, in every layout, compared with their definitions in double.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/contract/kv_bench.hpp>
#include <helix/prepare_latent.hpp>
#include <helix/prepare_qkv.hpp>

namespace helix::contract {

/// Rows of DType::fp8_ds_mla with more than one scale, the last of which has fewer columns.
template <class Spec>
void set_mixed_sizes(Spec& spec) {
  if (spec.dtype != DType::fp8_ds_mla) return;
  spec.value_dim = 132;
  spec.head_dim = 138;
}

template <TestableBackend B>
void append_kv() {
  for (const DType dtype : kKvTypes) {
    for (const bool is_mla : {false, true}) {
      if (dtype == DType::fp8_ds_mla && !is_mla) continue;
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
            set_mixed_sizes(spec);
            spec.kvp = kvp;
            spec.kvp_rank = kvp_rank;
            spec.chunk = chunk;
            spec.lengths = lengths;
            spec.is_filled = false;
            spec.is_scaled = dtype == DType::fp8_e4m3;
            KvBench<B> bench(spec);
            RaggedStep step(lengths, {9, 4, 1, 0});
            step.positions[2] = -1;  // padding must be dropped
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
      if (dtype == DType::fp8_ds_mla && !is_mla) continue;
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
          set_mixed_sizes(spec);
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

/// Only for backends that have this operation.
template <TestableBackend B>
requires LatentReader<B>
void read_latents() {
  for (const DType dtype : kKvTypes) {
    for (const bool is_foreign : {false, true}) {
      for (const std::int64_t page_tokens : {1, 4, 16}) {
        for (const std::int64_t padding : {0, 3}) {
          CAPTURE(to_string(dtype), is_foreign, page_tokens, padding);
          typename KvBench<B>::Spec spec;
          spec.dtype = dtype;
          spec.is_mla = true;
          spec.is_foreign = is_foreign;
          spec.heads = 1;
          spec.head_dim = 12;
          spec.page_tokens = page_tokens;
          spec.kvp = 3;
          spec.kvp_rank = 1;
          spec.chunk = 2;
          spec.lengths = {3, 40, 7};
          set_mixed_sizes(spec);
          spec.is_scaled = dtype == DType::fp8_e4m3;
          KvBench<B> bench(spec);
          const auto slots = bench.array(std::vector<std::int32_t>{0, 1});  // the second is read
          const std::int64_t local = bench.local_length(1);
          for (const auto& [first, count] : {std::pair{std::int64_t{0}, local}, {5, local - 6}, {local, 0}}) {
            CAPTURE(first, count);
            const auto rows = bench.poison(count * (spec.head_dim + padding));
            HELIX_CHECK_OPERATION(
                bench, read_latents, ([&, first = first, count = count](const auto& side) {
                  ReadLatentsArgs<float> args;
                  args.kv = bench.view(side);
                  args.sequence_slot = side(slots) + 1;
                  args.first_local = first;
                  args.rows = {side(rows), {count, spec.head_dim}, {spec.head_dim + padding, 1}};
                  return args;
                }));
          }
        }
      }
    }
  }
}

/// The cache of one of two ranks, whose rows are computed by a step.
template <TestableBackend B>
typename KvBench<B>::Spec computed_spec() {
  typename KvBench<B>::Spec spec;
  spec.kvp = 2;
  spec.chunk = 3;
  spec.lengths = {9, 14, 1};
  spec.is_filled = false;
  spec.is_computed = true;
  return spec;
}

/// Norm of latents, rope on them and on their queries, and append, as one operation or as four. Rows of any
/// width, and of widths that vectors divide.
template <TestableBackend B>
void prepare_latent() {
  for (const bool is_foreign : {false, true}) {
    for (const std::int64_t value_dim : {6, 64}) {
      for (const bool is_interleaved : {false, true}) {
        const std::int64_t rope = value_dim == 6 ? 4 : 16;
        CAPTURE(is_foreign, value_dim, is_interleaved);
        auto spec = computed_spec<B>();
        spec.is_mla = true;
        spec.is_foreign = is_foreign;
        spec.heads = 1;
        spec.value_dim = value_dim;
        spec.head_dim = value_dim + rope;
        KvBench<B> bench(spec);
        const RaggedStep step(spec.lengths, {4, 1, 1});
        const StepArrays<B> batch(bench, step);
        const std::int64_t tokens = step.num_tokens();
        constexpr std::int64_t kHeads = 19;
        const std::int64_t columns = spec.head_dim - spec.value_dim;
        const auto latents = bench.random(tokens * (spec.head_dim + 4));
        const auto q = bench.random(tokens * kHeads * columns);
        const auto q_out = bench.random(tokens * kHeads * (columns + 2));
        const auto norm = bench.weight(1, spec.value_dim, DType::bf16);
        const auto frequencies = bench.random(columns / 2);
        bench.check(
            [&](const auto& side) {
              return PrepareLatentArgs<float>{
                  .latents = {side(latents), {tokens, 1, spec.head_dim}, {spec.head_dim + 4, 0, 1}},
                  .norm = norm.on(side),
                  .epsilon = 1e-6f,
                  .q_in = side.view(q, tokens, kHeads, columns),
                  .q_out = {side(q_out), {tokens, kHeads, columns}, {kHeads * (columns + 2), columns + 2, 1}},
                  .rope = {.inverse_frequency = side(frequencies),
                           .rotary_dim = columns,
                           .is_interleaved = is_interleaved},
                  .batch = batch.on(side),
                  .kv = bench.view(side)};
            },
            [](const PrepareLatentArgs<float>& args) {
              const std::int64_t width = args.norm.cols;
              const TensorView<float, 2> compressed(args.latents.data(), {args.latents.extent(0), width},
                                                    {args.latents.stride(0), 1});
              const TensorView<float, 3> turned =
                  args.latents.slice(2, width, args.latents.extent(2) - width);
              reference::rms_norm({{}, compressed, args.norm, compressed, args.epsilon});
              reference::rope({turned, turned, args.batch.positions, args.rope});
              reference::rope({args.q_in, args.q_out, args.batch.positions, args.rope});
              reference::append_kv({args.latents, {}, args.batch, args.kv});
            },
            [&](const auto& args, auto stream) { helix::prepare_latent(bench.backend(), args, stream); });
      }
    }
  }
}

/// Norm of q and k, rope and append, as one operation or as three, and with the product before them.
template <TestableBackend B>
void prepare_qkv() {
  for (const bool has_norm : {false, true}) {
    for (const std::int64_t rotary : {0, 4, 8}) {
      CAPTURE(has_norm, rotary);
      const auto spec = computed_spec<B>();
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
      const auto prepare = [](const PrepareQkvArgs<float>& args) {
        if (!args.q_norm.empty()) reference::head_rms_norm({args.q, args.q_norm, args.epsilon});
        if (!args.k_norm.empty()) reference::head_rms_norm({args.k, args.k_norm, args.epsilon});
        reference::rope({args.q, args.q, args.batch.positions, args.rope});
        reference::rope({args.k, args.k, args.batch.positions, args.rope});
        reference::append_kv({args.k, args.v, args.batch, args.kv});
      };
      bench.check(make, prepare,
                  [&](const auto& args, auto stream) { helix::prepare_qkv(bench.backend(), args, stream); });
      const std::int64_t hidden = 12;
      const auto in = bench.random(tokens * hidden);
      const auto weight = bench.weight(row, hidden);
      bench.check(
          [&](const auto& side) {
            return ProjectQkvArgs<float>{.linear = {.in = {side(in), {tokens, hidden}},
                                                    .weight = weight.on(side),
                                                    .bias = {},
                                                    .out = {side(qkv), {tokens, row}}},
                                         .prepare = make(side)};
          },
          [&](const ProjectQkvArgs<float>& args) {
            reference::linear(args.linear);
            prepare(args.prepare);
          },
          [&](const auto& args, auto stream) { helix::project_qkv(bench.backend(), args, stream); });
    }
  }
}

}  // namespace helix::contract
