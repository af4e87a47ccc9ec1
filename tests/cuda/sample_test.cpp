// SPDX-License-Identifier: Apache-2.0
// Sampling on a GPU compared with sampling on the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cuda/backend.hpp>

#include "cuda/at.hpp"
#include "cuda/gpu.hpp"
#include "cuda/twin_bench.hpp"
#include "support/catch.hpp"

namespace helix::test {

using cuda::Operators;

TEMPLATE_TEST_CASE("a GPU draws the tokens that the CPU draws", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using T = TestType;
  const Operators<T> gpu;
  const cpu::Operators cpu(2);
  const cuda::Stream stream = gpu.create_stream();
  cpu::Stream cpu_stream = cpu.create_stream();
  std::mt19937 random(99);
  const auto pick = [&](auto... values) {
    const std::array choices{values...};
    return choices[random() % choices.size()];
  };
  for (int round = 0; round < 200; ++round) {
    const std::int64_t vocab = pick(1, 2, 50, 1000, 8192, 32003);
    const std::int64_t shards = pick(1, 2, 4, 8);
    const std::int64_t rows = pick(1, 2, 5);
    const std::int64_t pad = pick(0, 8, 3);
    const double spread = pick(0.1, 3.0, 15.0);
    const std::int64_t width = (vocab + shards - 1) / shards + pad;
    CAPTURE(round, vocab, shards, rows, pad, spread);

    std::vector<std::int64_t> begins;
    for (std::int64_t s = 0; s <= shards; ++s) begins.push_back(std::min(vocab, s * (width - pad)));
    std::vector<T> logits(at(shards * rows * width));
    std::vector<float> wide;
    std::normal_distribution<double> normal(0.0, spread);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const std::size_t shard = i / at(rows * width);
      const bool is_padding = static_cast<std::int64_t>(i) % width >= begins[shard + 1] - begins[shard];
      logits[i] = T(is_padding ? std::nanf("") : static_cast<float>(normal(random)));
      wide.push_back(static_cast<float>(logits[i]));
    }
    std::vector<std::uint64_t> counters;
    std::vector<SamplingConfig> configs;
    for (std::int64_t r = 0; r < rows; ++r) {
      counters.push_back(random());
      configs.push_back({.temperature = pick(0.0f, 0.05f, 0.7f, 1.0f, 3.0f),
                         .top_p = pick(1.0f, 0.95f, 0.9f, 0.5f, 0.01f),
                         .min_p = pick(0.0f, 0.0f, 0.02f, 0.3f, 1.0f),
                         .top_k = pick(0, 0, 1, 3, 50, 100'000),
                         .seed = random()});
    }

    std::vector<std::int32_t> expected(at(rows), -5);
    const TensorView<const float, 3> view(wide.data(), {shards, rows, width});
    cpu.sample(SampleArgs<float>{view, begins.data(), configs.data(), counters.data(), expected.data()},
               cpu_stream);
    cpu.synchronize(cpu_stream);

    std::deque<cuda::Buffer> memory;
    const auto upload = [&]<class X>(const std::vector<X>& values) {
      cuda::Buffer& buffer = memory.emplace_back(gpu.allocate(values.size() * sizeof(X)));
      gpu.upload(buffer.data(), values.data(), values.size() * sizeof(X), stream);
      return reinterpret_cast<X*>(buffer.data());
    };
    std::vector<std::int32_t> drawn(at(rows), -7);
    std::int32_t* tokens = upload(drawn);
    const TensorView<const T, 3> device_view(upload(logits), {shards, rows, width});
    gpu.sample(SampleArgs<T>{device_view, upload(begins), upload(configs), upload(counters), tokens}, stream);
    gpu.download(drawn.data(), tokens, drawn.size() * sizeof(std::int32_t), stream);
    gpu.synchronize(stream);
    CHECK(drawn == expected);
  }
}

TEMPLATE_TEST_CASE("16-bit logits on a GPU are penalized, and their log-probabilities found, as f32 ones", "",
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kShards = 3;
  constexpr std::int64_t kRows = 4;
  for (const std::int64_t width : {5, 1000, 40000}) {
    const std::int64_t vocab = kShards * width - 2;  // the last shard is shorter
    for (const std::int64_t num_best : {0, 1, 5}) {
      CAPTURE(width, num_best);
      bench.clear();
      // Rows of 16 bits have ties among the best.
      const auto logits = bench.random(kShards * kRows, width, 20.0);
      const auto begins = bench.same(std::vector<std::int64_t>{0, width, 2 * width, vocab});
      std::vector<LogitPenalty> named;
      for (std::int32_t row = 0; row < kRows; ++row) {
        for (const std::int64_t id : {std::int64_t{0}, width - 1, width, vocab - 1, vocab + 3})
          named.push_back({row, static_cast<std::int32_t>(id), 1.0f + 0.25f * static_cast<float>(row), 0.5f});
      }
      const auto penalties = bench.same(named);
      const auto tokens =
          bench.same(std::vector<std::int32_t>{0, static_cast<std::int32_t>(vocab - 1), -1, 3});
      const auto log_probs = bench.same(std::vector<float>(at(kRows), std::nanf("")));
      const auto best_ids = bench.same(std::vector<std::int32_t>(at(kRows * num_best), -9));
      const auto best_log_probs = bench.same(std::vector<float>(at(kRows * num_best), std::nanf("")));
      const auto find = [&](auto& operators, const auto& side, const auto& stream) {
        using E = ElementOf<decltype(side)>;
        operators.log_probs(LogProbsArgs<E>{{side(logits), {kShards, kRows, width}},
                                            side(begins),
                                            side(tokens),
                                            num_best,
                                            side(log_probs),
                                            side(best_ids),
                                            side(best_log_probs)},
                            stream);
      };
      CHECK(bench.difference(find) == "");
      HELIX_CHECK_TWINS(bench, {
        operators.penalize(PenalizeArgs<E>{{side(logits), {kShards, kRows, width}},
                                           side(begins),
                                           side(penalties),
                                           static_cast<std::int64_t>(named.size())},
                           stream);
      });
    }
  }
}

}  // namespace helix::test
