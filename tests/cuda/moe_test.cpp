// SPDX-License-Identifier: Apache-2.0
// Router logits, routing and experts of 16-bit activations on a GPU, compared with those of f32.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <type_traits>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/runtime.hpp>

#include "cuda/at.hpp"
#include "cuda/gpu.hpp"
#include "cuda/twin_bench.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

/// `count` experts whose weights are adjacent, except that the last one's come `gap` bytes later.
std::vector<ExpertWeights> experts_of(const WeightView& gate_up, const WeightView& down, std::int64_t count,
                                      std::int64_t gap) {
  const auto part = [count, gap](const WeightView& all, std::int64_t e) {
    const std::int64_t rows = all.rows / count;
    const auto bytes =
        e * rows * all.cols * static_cast<std::int64_t>(size_bytes(all.dtype)) + (e == count - 1 ? gap : 0);
    return WeightView{static_cast<const std::byte*>(all.data) + bytes, all.dtype, rows, all.cols};
  };
  std::vector<ExpertWeights> experts;
  for (std::int64_t e = 0; e < count; ++e) experts.push_back({part(gate_up, e), part(down, e)});
  return experts;
}

/// The experts of a rank, of which the first is the model's expert `first`.
struct ExpertSizes {
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int64_t count = 0;
  std::int64_t first = 0;
};

/// Random experts of a rank, and what their products need beside the tokens. Lives until the calls that it
/// queues have run.
template <class T>
class RandomExperts {
 public:
  RandomExperts(TwinBench<T>& bench, const ExpertSizes& sizes, DType dtype = kDTypeOf<T>,
                std::int64_t gap = 0)
      : sizes_(sizes),
        dtype_(dtype),
        gap_(gap),
        gate_up_(bench.weights(sizes.count * 2 * sizes.ffn * sizes.hidden + gap, dtype)),
        down_(bench.weights(sizes.count * sizes.hidden * sizes.ffn + gap, dtype)) {}

  template <class Side>
  std::vector<ExpertWeights> of(const Side& side) const {
    const auto& [hidden, ffn, count, first] = sizes_;
    return experts_of(side.weight(gate_up_, dtype_, count * 2 * ffn, hidden),
                      side.weight(down_, dtype_, count * hidden, ffn), count, gap_);
  }

  /// Queues their products with a workspace full of NaN. `experts` and `weights`: [tokens, top_k], what each
  /// token chose.
  template <class Operators, class Side, class E = ElementOf<Side>>
  void queue(Operators& operators, const Side& side, const cuda::Stream& stream,
             const std::type_identity_t<TensorView<const E, 2>>& in, Array<std::int32_t> experts,
             Array<float> weights, std::int64_t top_k, const TensorView<E, 2>& out) {
    const std::int64_t tokens = in.extent(0);
    const std::vector<ExpertWeights> local = of(side);
    const std::size_t bytes = operators.expert_ffn_workspace_bytes(tokens, top_k, sizes_.hidden, sizes_.ffn);
    const cuda::Buffer& workspace = workspaces_.emplace_back(operators.allocate(bytes));
    HELIX_CUDA_CHECK(cudaMemsetAsync(workspace.data(), 0xff, bytes, stream.handle()));
    operators.expert_ffn(ExpertFfnArgs<E>{in,
                                          TensorView<const std::int32_t, 2>(side(experts), {tokens, top_k}),
                                          TensorView<const float, 2>(side(weights), {tokens, top_k}),
                                          local,
                                          sizes_.first,
                                          out,
                                          {workspace.data(), bytes}},
                         stream);
  }

 private:
  ExpertSizes sizes_;
  DType dtype_;
  std::int64_t gap_;  // bytes before the last expert
  Array<std::uint8_t> gate_up_;
  Array<std::uint8_t> down_;
  std::deque<cuda::Buffer> workspaces_;
};

}  // namespace

TEMPLATE_TEST_CASE("router logits of 16-bit activations on a GPU are not rounded to 16 bits", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t k : {8, 128, 1024, 37}) {
      for (const std::int64_t experts : {1, 8, 37, 256}) {
        for (const std::int64_t tokens : {1, 3, 8, 9, 17, 200}) {
          for (const std::int64_t pad : kPads) {
            CAPTURE(to_string(dtype), k, experts, tokens, pad);
            bench.clear();
            const auto in = bench.random(tokens, k + pad);
            const auto weight = bench.weights(experts * k, dtype);
            // Compared as floats, to 1e-5 of the largest: an error from bf16 would be 4e-3.
            const auto logits = bench.same(std::vector<float>(at(tokens * experts), std::nanf("")));
            HELIX_CHECK_TWINS(bench, {
              operators.router_logits(RouterLogitsArgs<E>{side.view(in, tokens, k, pad),
                                                          side.weight(weight, dtype, experts, k),
                                                          {side(logits), {tokens, experts}}},
                                      stream);
            });
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("experts on a GPU are chosen alike by the operators of every type", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  struct Case {
    std::int64_t experts, groups, kept, top_k;
  };
  for (const Case c : {Case{1, 1, 1, 1}, Case{8, 4, 2, 3}, Case{64, 8, 3, 6}, Case{256, 8, 4, 8}}) {
    for (const auto scoring : {RouterScoring::softmax, RouterScoring::sigmoid}) {
      for (const bool has_bias : {false, true}) {
        for (const std::int64_t tokens : {1, 7, 70}) {
          for (const std::int64_t pad : kPads) {
            CAPTURE(c.experts, c.groups, c.kept, c.top_k, int(scoring), has_bias, tokens, pad);
            bench.clear();
            const auto logits = bench.same(bench.numbers(tokens * (c.experts + pad), 3.0));
            const auto bias = bench.same(bench.numbers(c.experts, 0.4));
            const auto experts = bench.same(std::vector<std::int32_t>(at(tokens * c.top_k), -9));
            const auto weights = bench.same(std::vector<float>(at(tokens * c.top_k), std::nanf("")));
            HELIX_CHECK_TWINS(bench, {
              operators.route(RouteArgs{TensorView<const float, 2>(side(logits), {tokens, c.experts},
                                                                   {c.experts + pad, 1}),
                                        has_bias ? side(bias) : nullptr,
                                        scoring,
                                        c.groups,
                                        c.kept,
                                        true,
                                        2.5f,
                                        {side(experts), {tokens, c.top_k}},
                                        {side(weights), {tokens, c.top_k}}},
                              stream);
            });
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("experts of 16-bit activations on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kTopK = 3;
  const auto target = GENERATE(cuda::KernelTarget::this_gpu, cuda::KernelTarget::any_gpu);
  static constexpr std::int64_t kGap = 16;  // no tensor map can describe such experts
  const std::int64_t gap = GENERATE(0, kGap);
  CAPTURE(int(target), gap);
  bench.narrow().set_kernel_target(target);
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {1, 7, 10, 40, 110, 430}) {
      for (const std::int64_t hidden : {40, 512}) {
        for (const std::int64_t ffn : {17, 72, 256}) {
          for (const std::int64_t pad : kPads) {
            CAPTURE(to_string(dtype), tokens, hidden, ffn, pad);
            constexpr std::int64_t kLocal = 4;  // experts 2 to 5 of 8
            bench.clear();
            std::vector<std::int32_t> chosen;
            for (std::int64_t t = 0; t < tokens; ++t)
              for (std::int64_t k = 0; k < kTopK; ++k)
                chosen.push_back(static_cast<std::int32_t>((t % 3 == 0   ? 2 + k
                                                            : t % 3 == 1 ? 3  // several times, as routers may
                                                                         : t * 5 + k * 3) %
                                                           8));
            const auto experts = bench.same(chosen);
            const auto weights = bench.same(bench.numbers(tokens * kTopK));
            const auto in = bench.random(tokens, hidden + pad);
            const auto out = bench.random(tokens, hidden + pad);
            RandomExperts<TestType> local(bench, {hidden, ffn, kLocal, 2}, dtype, gap);
            HELIX_CHECK_TWINS(bench, {
              local.queue(operators, side, stream, side.view(in, tokens, hidden, pad), experts, weights,
                          kTopK, side.view(out, tokens, hidden, pad));
            });
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("experts of a few tokens on a GPU agree with f32, whatever the tokens chose", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kHidden = 320;
  constexpr std::int64_t kFfn = 192;
  constexpr std::int64_t kFirst = 5;
  constexpr std::int64_t kLocal = 40;
  struct Case {
    std::int64_t tokens, top_k;
  };
  // 16 by 9 and 2 by 17 choices are more than their shapes support.
  for (const Case c : {Case{1, 32}, Case{2, 3}, Case{2, 16}, Case{2, 17}, Case{3, 1}, Case{5, 6}, Case{7, 9},
                       Case{8, 8}, Case{9, 7}, Case{13, 1}, Case{16, 8}, Case{16, 9}}) {
    // All experts, with few choices repeated by a token; one expert; only one of this rank's experts.
    for (const int spread : {0, 1, 2}) {
      for (const std::int64_t pad : kPads) {
        CAPTURE(c.tokens, c.top_k, spread, pad);
        bench.clear();
        std::vector<std::int32_t> chosen;
        for (std::int64_t pair = 0; pair < c.tokens * c.top_k; ++pair)
          chosen.push_back(static_cast<std::int32_t>(spread == 0   ? pair * pair * 7 % 53
                                                     : spread == 1 ? kFirst + kLocal - 1
                                                                   : pair % 6));
        const auto experts = bench.same(chosen);
        const auto weights = bench.same(bench.numbers(c.tokens * c.top_k));
        const auto in = bench.random(c.tokens, kHidden + pad);
        const auto out = bench.random(c.tokens, kHidden + pad);
        RandomExperts<TestType> local(bench, {kHidden, kFfn, kLocal, kFirst});
        HELIX_CHECK_TWINS(bench, {
          local.queue(operators, side, stream, side.view(in, c.tokens, kHidden, pad), experts, weights,
                      c.top_k, side.view(out, c.tokens, kHidden, pad));
        });
      }
    }
  }
}

TEMPLATE_TEST_CASE("experts on a GPU take more tokens than a grid holds", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kTokens = 70000;  // more than the 65535 that a grid has in its second dimension
  constexpr std::int64_t kTopK = 2;
  constexpr std::int64_t kHidden = 64;
  constexpr std::int64_t kFfn = 64;
  std::vector<std::int32_t> chosen;
  for (std::int32_t token = 0; token < kTokens; ++token) {
    chosen.push_back(token % 5);
    chosen.push_back((token + 1) % 5);
  }
  const auto experts = bench.same(chosen);
  const auto weights = bench.same(bench.numbers(kTokens * kTopK));
  const auto in = bench.random(kTokens, kHidden);
  const auto out = bench.random(kTokens, kHidden);
  RandomExperts<TestType> local(bench, {kHidden, kFfn, /*count=*/3, /*first=*/1});
  HELIX_CHECK_TWINS(bench, {
    local.queue(operators, side, stream, side.view(in, kTokens, kHidden), experts, weights, kTopK,
                side.view(out, kTokens, kHidden));
  });
}

TEMPLATE_TEST_CASE("experts on a GPU take rows of which the last lies first", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kHidden = 320;
  constexpr std::int64_t kFfn = 192;
  constexpr std::int64_t kTopK = 6;
  constexpr std::int64_t kLocal = 8;
  for (const std::int64_t tokens : {2, 9, 40, 150, 400}) {
    CAPTURE(tokens);
    bench.clear();
    std::vector<std::int32_t> chosen;
    for (std::int64_t pair = 0; pair < tokens * kTopK; ++pair)
      chosen.push_back(static_cast<std::int32_t>((pair / kTopK + pair % kTopK) % kLocal));
    const auto experts = bench.same(chosen);
    const auto weights = bench.same(bench.numbers(tokens * kTopK));
    const auto in = bench.random(tokens, kHidden);
    const auto out = bench.random(tokens, kHidden);
    RandomExperts<TestType> local(bench, {kHidden, kFfn, kLocal});
    HELIX_CHECK_TWINS(bench, {
      const auto reversed = [&](Activations array) {
        return TensorView<E, 2>(side(array) + (tokens - 1) * kHidden, {tokens, kHidden}, {-kHidden, 1});
      };
      local.queue(operators, side, stream, reversed(in), experts, weights, kTopK, reversed(out));
    });
  }
}

TEMPLATE_TEST_CASE("experts of layers one behind the other on a GPU are each layer's own", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kLayers = 24;
  constexpr std::int64_t kExperts = 16;
  constexpr std::int64_t kTopK = 3;
  constexpr std::int64_t kHidden = 1024;
  constexpr std::int64_t kFfn = 704;
  for (const std::int64_t tokens : {1, 2, 12}) {
    CAPTURE(tokens);
    bench.clear();
    const auto logits = bench.same(bench.numbers(kLayers * tokens * kExperts, 3.0));
    // Used by all layers in turn.
    const auto experts = bench.same(std::vector<std::int32_t>(at(tokens * kTopK)));
    const auto weights = bench.same(std::vector<float>(at(tokens * kTopK)));
    const auto in = bench.random(tokens, kHidden);
    const auto out = bench.random(kLayers * tokens, kHidden);
    const RandomExperts<TestType> random(bench, {kHidden, kFfn, kExperts});
    std::deque<cuda::Buffer> workspaces;  // one for all layers; kept until the queued calls have run
    HELIX_CHECK_TWINS(bench, {
      const std::vector<ExpertWeights> local = random.of(side);
      const std::size_t bytes = operators.expert_ffn_workspace_bytes(tokens, kTopK, kHidden, kFfn);
      workspaces.push_back(operators.allocate(bytes));
      const TensorView<std::int32_t, 2> chosen(side(experts), {tokens, kTopK});
      const TensorView<float, 2> shares(side(weights), {tokens, kTopK});
      for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        operators.route(RouteArgs{.logits = {side(logits) + layer * tokens * kExperts, {tokens, kExperts}},
                                  .experts = chosen,
                                  .weights = shares},
                        stream);
        operators.expert_ffn(
            ExpertFfnArgs<E>{side.view(in, tokens, kHidden),
                             chosen,
                             shares,
                             local,
                             0,
                             side.view(out, kLayers * tokens, kHidden).slice(0, layer * tokens, tokens),
                             {workspaces.back().data(), bytes}},
            stream);
        if constexpr (std::is_same_v<E, float>) operators.synchronize(stream);
      }
    });
  }
}

}  // namespace helix::test
