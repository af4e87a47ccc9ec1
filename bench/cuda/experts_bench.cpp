// SPDX-License-Identifier: Apache-2.0
// Routed experts on one GPU in bf16, compared with a read of the weights of the chosen experts.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/backend.hpp>

#include "cases.hpp"
#include "device_data.hpp"
#include "operator_timing.hpp"

namespace helix::bench {
namespace {

using Operators = cuda::Operators<bf16>;

/// The experts of one of `ranks` ranks that share experts of DeepSeek-V3's sizes.
struct ExpertCase {
  std::int64_t tokens;
  std::int64_t ranks;
};

constexpr ExpertCase kExpertCases[] = {{1, 1},    {4, 1},    {8, 1},  {16, 1}, {32, 1},  {64, 1},  {256, 1},
                                       {1024, 1}, {4096, 1}, {32, 8}, {64, 8}, {512, 8}, {4096, 8}};

void bench_expert_ffn(benchmark::State& state, const ExpertCase& c) {
  constexpr std::int64_t kExperts = 32;  // experts of the rank
  constexpr std::int64_t kTopK = 8;
  constexpr std::int64_t kHidden = 7168;
  constexpr std::int64_t kFfn = 2048;
  constexpr std::int64_t kElements = kHidden * kFfn;
  const Operators operators;
  const cuda::Buffer weights_at = random_bf16(3 * kElements * kExperts, kSeed);
  std::vector<ExpertWeights> local;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const auto* first = reinterpret_cast<const bf16*>(weights_at.data()) + 3 * kElements * e;
    local.push_back(
        {{first, DType::bf16, 2 * kFfn, kHidden}, {first + 2 * kElements, DType::bf16, kHidden, kFfn}});
  }
  std::mt19937 random(1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kExperts * c.ranks));
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<std::int32_t> chosen;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    std::shuffle(ids.begin(), ids.end(), random);
    chosen.insert(chosen.end(), ids.begin(), ids.begin() + kTopK);
  }
  std::vector<std::int64_t> pairs(static_cast<std::size_t>(kExperts), 0);
  for (const std::int32_t id : chosen)
    if (id < kExperts) ++pairs[static_cast<std::size_t>(id)];
  const auto read =
      static_cast<double>(std::count_if(pairs.begin(), pairs.end(), [](auto n) { return n > 0; }));
  const auto multiplied = static_cast<double>(std::accumulate(pairs.begin(), pairs.end(), std::int64_t{0}));

  const cuda::Buffer in = random_bf16(c.tokens * kHidden, kSeed + 1);
  const cuda::Buffer out = operators.allocate(static_cast<std::size_t>(c.tokens * kHidden) * kBf16Bytes);
  const cuda::Buffer experts = on_device(operators, chosen);
  const cuda::Buffer shares = on_device(operators, random_floats(c.tokens * kTopK, 1.0f, 2));
  const auto arguments = [&]<class T>(const T* from, T* to, const cuda::Buffer& workspace) {
    ExpertFfnArgs<T> args;
    args.in = {from, {c.tokens, kHidden}};
    args.experts = {reinterpret_cast<const std::int32_t*>(experts.data()), {c.tokens, kTopK}};
    args.weights = {reinterpret_cast<const float*>(shares.data()), {c.tokens, kTopK}};
    args.local_experts = local;
    args.out = {to, {c.tokens, kHidden}};
    args.workspace = {workspace.data(), workspace.size_bytes()};
    return args;
  };
  const std::size_t workspace_bytes = operators.expert_ffn_workspace_bytes(c.tokens, kTopK, kHidden, kFfn);
  const cuda::Buffer workspace = operators.allocate(workspace_bytes);
  const auto* from = reinterpret_cast<const bf16*>(in.data());
  auto* to = reinterpret_cast<bf16*>(out.data());
  measure(
      state, operators, 6.0 * static_cast<double>(kElements) * read, 2,
      [&](int, cuda::Stream stream) { operators.expert_ffn(arguments(from, to, workspace), stream); },
      [&](cuda::Stream stream) {
        operators.fill_zero(out.data(), out.size_bytes(), stream);
        operators.expert_ffn(arguments(from, to, workspace), stream);
        operators.synchronize(stream);
        const cuda::Operators<float> exact;
        const cuda::Buffer exact_in =
            on_device(exact, as_floats(on_host<bf16>(operators, in.data(), c.tokens * kHidden)));
        const cuda::Buffer exact_out =
            exact.allocate(static_cast<std::size_t>(c.tokens * kHidden) * sizeof(float));
        const cuda::Buffer exact_workspace = exact.allocate(workspace_bytes);
        exact.fill_zero(exact_out.data(), exact_out.size_bytes(), stream);
        exact.expert_ffn(arguments(reinterpret_cast<const float*>(exact_in.data()),
                                   reinterpret_cast<float*>(exact_out.data()), exact_workspace),
                         stream);
        exact.synchronize(stream);
        return relative_error(on_host<bf16>(operators, out.data(), c.tokens * kHidden),
                              on_host<float>(exact, exact_out.data(), c.tokens * kHidden));
      });
  state.counters["flop/s"] = 6.0 * static_cast<double>(kElements) * multiplied / state.counters["us"] * 1e6;
}

}  // namespace

void register_experts() {
  for (const ExpertCase& c : kExpertCases) {
    register_case(
        "expert_ffn/experts:32/ranks:" + std::to_string(c.ranks) + "/tokens:" + std::to_string(c.tokens),
        [c](benchmark::State& state) { bench_expert_ffn(state, c); });
  }
}

}  // namespace helix::bench
