// SPDX-License-Identifier: Apache-2.0
// embed_tokens and VocabularyHead over vocabulary shards, compared with plain loops in double.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/embed_tokens.hpp>
#include <helix/vocabulary_head.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kVocab = 37;  // not divisible by any number of ranks below
constexpr std::int64_t kTokens = 5;

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

/// One rank's embedding and LM head, over shared whole weights.
struct Rank {
  Rank(const cpu::LocalComm& stage, const std::vector<float>& table, const std::vector<float>& norm)
      : topo({.kvp = stage.size()}, {.num_query_heads = 8,
                                     .num_kv_heads = 1,
                                     .head_dim = 4,
                                     .value_dim = 4,
                                     .hidden = kHidden,
                                     .vocab = kVocab}),
        backend(stage, stage),
        stream(backend.create_stream()),
        shard(topo.vocab(stage.rank())),
        rows{table.data() + shard.begin * kHidden, DType::f32, shard.size(), kHidden},
        head(backend, topo, {norm.data(), DType::f32, 1, kHidden}, rows, 1e-5f),
        workspace(backend.allocate(VocabularyHead<LocalBackend>::workspace_bytes(topo, kTokens))) {}

  VocabularyHead<LocalBackend>::Logits logits(std::vector<float>& hidden,
                                              const std::vector<std::int32_t>& selected,
                                              const std::vector<std::int64_t>& positions) {
    return head.logits({hidden.data(), {kTokens, kHidden}}, positions.data(), selected.data(),
                       std::ssize(selected), {workspace.data(), workspace.size_bytes()}, stream);
  }

  Topology topo;
  LocalBackend backend;
  LocalBackend::Stream stream;
  Range shard;
  WeightView rows;
  VocabularyHead<LocalBackend> head;
  LocalBackend::Buffer workspace;
};

}  // namespace

TEST_CASE("embedding over shards of the vocabulary equals the table's rows") {
  const auto table = random_values(kVocab * kHidden, 1);
  const auto norm = random_values(kHidden, 2);
  const std::vector<std::int32_t> ids = {0, 36, 17, 18, 19};
  for (int ranks : {1, 2, 4, 8}) {
    run_ranks_or_throw(ranks, [&](cpu::LocalComm stage) {
      Rank rank(stage, table, norm);
      std::vector<float> out(kTokens * kHidden, NAN);
      embed_tokens(rank.backend, rank.topo, ids.data(), rank.rows,
                   TensorView<float, 2>(out.data(), {kTokens, kHidden}), rank.stream);
      rank.backend.synchronize(rank.stream);
      for (std::int64_t t = 0; t < kTokens; ++t)
        for (std::int64_t i = 0; i < kHidden; ++i)
          if (out[static_cast<std::size_t>(t * kHidden + i)] !=
              table[static_cast<std::size_t>(ids[static_cast<std::size_t>(t)] * kHidden + i)])
            throw Error(ErrorCode::internal, "token ", t, ", element ", i, " differs");
    });
  }
}

TEST_CASE("logits over shards equal the whole product, and every rank draws the largest") {
  const auto table = random_values(kVocab * kHidden, 3);
  const auto norm = random_values(kHidden, 4);
  const std::vector<std::int32_t> selected = {4, 0, 2};
  const std::vector<std::int64_t> positions = {3, 0, 7, 8, 9};
  for (int ranks : {1, 2, 4, 8}) {
    run_ranks_or_throw(ranks, [&](cpu::LocalComm stage) {
      Rank rank(stage, table, norm);
      auto hidden = random_values(kTokens * kHidden, 5);
      const auto logits = rank.logits(hidden, selected, positions);
      if (logits.stride(1) % 4 != 0 || logits.stride(0) % 4 != 0)
        throw Error(ErrorCode::internal, "rows of logits are not whole vectors of 16 bytes apart");
      std::vector<std::int32_t> drawn(selected.size(), -1);
      const std::vector<SamplingConfig> greedy(selected.size());
      const std::vector<std::uint64_t> counters(selected.size());
      rank.head.sample(logits, greedy.data(), counters.data(), drawn.data(), rank.stream);
      rank.backend.synchronize(rank.stream);
      for (std::size_t r = 0; r < selected.size(); ++r) {
        const float* x = hidden.data() + selected[r] * kHidden;
        double square = 0.0;
        for (std::int64_t i = 0; i < kHidden; ++i) square += double{x[i]} * x[i];
        const double scale = 1.0 / std::sqrt(square / kHidden + 1e-5);
        double best = -1e30;
        std::int32_t best_id = -1;
        for (int shard = 0; shard < ranks; ++shard) {
          for (std::int64_t id = rank.topo.vocab(shard).begin; id < rank.topo.vocab(shard).end; ++id) {
            double expected = 0.0;
            for (std::int64_t i = 0; i < kHidden; ++i) {
              expected += x[i] * scale * norm[static_cast<std::size_t>(i)] *
                          table[static_cast<std::size_t>(id * kHidden + i)];
            }
            const double got = logits(shard, static_cast<std::int64_t>(r), id - rank.topo.vocab(shard).begin);
            if (!(std::abs(got - expected) < 1e-4))
              throw Error(ErrorCode::internal, "logit ", id, ": ", got, ", expected ", expected);
            if (expected > best) {
              best = expected;
              best_id = static_cast<std::int32_t>(id);
            }
          }
        }
        if (drawn[r] != best_id)
          throw Error(ErrorCode::internal, "row ", r, ": drawn ", drawn[r], ", largest ", best_id);
      }
      std::vector<float> norms(selected.size()), at_once_norms(selected.size());
      rank.head.norms(logits, norms.data(), rank.stream);
      rank.backend.synchronize(rank.stream);
      std::vector<std::int32_t> at_once(selected.size(), -1);
      const auto own =
          rank.head.draw_greedy({hidden.data(), {kTokens, kHidden}}, positions.data(), selected.data(),
                                std::ssize(selected), {rank.workspace.data(), rank.workspace.size_bytes()},
                                at_once.data(), at_once_norms.data(), rank.stream);
      rank.backend.synchronize(rank.stream);
      if (at_once != drawn || at_once_norms != norms || own.extent(2) != rank.shard.size())
        throw Error(ErrorCode::internal, "draw_greedy() differs from logits() and sample()");
    });
  }
}

TEST_CASE("a rank that left out a step is out of step, not a wrong token") {
  const auto table = random_values(kVocab * kHidden, 6);
  const auto norm = random_values(kHidden, 7);
  for (const bool is_greedy : {false, true}) {
    const auto outcomes = run_ranks(2, [&](cpu::LocalComm stage) {
      Rank rank(stage, table, norm);
      auto hidden = random_values(kTokens * kHidden, 8);
      const std::vector<std::int32_t> selected = {0};
      // Rank 1 skips position 10 of the first sequence.
      const std::vector<std::int64_t> positions = {stage.rank() == 0 ? 10 : 11, 4, -1, -1, -1};
      std::int32_t drawn = -1;
      if (is_greedy) {
        rank.head.draw_greedy({hidden.data(), {kTokens, kHidden}}, positions.data(), selected.data(), 1,
                              {rank.workspace.data(), rank.workspace.size_bytes()}, &drawn, nullptr,
                              rank.stream);
      } else {
        rank.logits(hidden, selected, positions);
      }
      rank.backend.synchronize(rank.stream);
    });
    INFO(outcomes.all_messages());
    const bool is_out_of_step =
        outcomes.code(0) == ErrorCode::out_of_step || outcomes.code(1) == ErrorCode::out_of_step;
    CHECK(is_out_of_step);
  }
}

TEST_CASE("a shard that is not this rank's is refused") {
  const auto table = random_values(kVocab * kHidden, 9);
  LocalBackend backend;
  const Topology topo({}, {.num_query_heads = 8,
                           .num_kv_heads = 1,
                           .head_dim = 4,
                           .value_dim = 4,
                           .hidden = kHidden,
                           .vocab = kVocab});
  const WeightView norm{table.data(), DType::f32, 1, kHidden};
  const WeightView half{table.data(), DType::f32, kVocab / 2, kHidden};
  CHECK_THROWS_AS((VocabularyHead<LocalBackend>(backend, topo, norm, half, 1e-5f)), Error);
  std::vector<float> out(kHidden);
  const std::int32_t id = 0;
  CHECK_THROWS_AS(embed_tokens(backend, topo, &id, half, TensorView<float, 2>(out.data(), {1, kHidden}),
                               backend.create_stream()),
                  Error);
}

TEST_CASE("the ends of the stack are refused a stage, a shape or an address that does not fit") {
  const ModelShape shape{.num_query_heads = 8,
                         .num_kv_heads = 1,
                         .head_dim = 4,
                         .value_dim = 4,
                         .hidden = kHidden,
                         .vocab = kVocab};
  const auto table = random_values(kVocab * kHidden, 10);
  const WeightView whole{table.data(), DType::f32, kVocab, kHidden};
  const WeightView missing{nullptr, DType::f32, kVocab, kHidden};
  const WeightView norm{table.data(), DType::f32, 1, kHidden};
  const WeightView narrow{table.data(), DType::f32, 1, kHidden - 1};
  const Topology topo({}, shape), of_two({.kvp = 2}, shape);
  LocalBackend backend;
  const auto stream = backend.create_stream();
  const auto says = [](const auto& act, std::string_view words) {
    const auto failure = failure_of(act);
    REQUIRE(failure);
    CAPTURE(failure->what);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(failure->says(words));
  };
  std::vector<float> hidden(kTokens * kHidden);
  const TensorView<float, 2> out(hidden.data(), {1, kHidden});
  const std::int32_t id = 0;
  says([&] { embed_tokens(backend, of_two, &id, whole, out, stream); },
       "embed_tokens: the stage communicator has 1 ranks; the topology's stage has 2");
  says([&] { embed_tokens(backend, topo, &id, missing, out, stream); }, "embed_tokens: the table is null");
  says([&] { embed_tokens(backend, topo, nullptr, whole, out, stream); }, "embed_tokens: ids is null");
  says(
      [&] {
        embed_tokens(backend, topo, &id, whole, TensorView<float, 2>(nullptr, {1, kHidden}), stream);
      },
      "embed_tokens: out is null");
  says(
      [&] {
        embed_tokens(backend, topo, &id, whole,
                     TensorView<float, 2>(hidden.data(), {2, kHidden}, {kHidden + 1, 1}), stream);
      },
      "embed_tokens: out is [2, 24] with strides [25, 1]");
  using Head = VocabularyHead<LocalBackend>;
  says([&] { Head(backend, of_two, norm, whole, 1e-5f); },
       "VocabularyHead: the stage communicator has 1 ranks");
  says([&] { Head(backend, topo, norm, missing, 1e-5f); }, "VocabularyHead: lm_head is null");
  says([&] { Head(backend, topo, narrow, whole, 1e-5f); }, "VocabularyHead: final_norm is [1, 23]");
  Head head(backend, topo, norm, whole, 1e-5f);
  const auto workspace = backend.allocate(Head::workspace_bytes(topo, kTokens));
  const auto logits = [&](const TensorView<float, 2>& of, const std::int32_t* rows, std::int64_t num_rows) {
    head.logits(of, nullptr, rows, num_rows, {workspace.data(), workspace.size_bytes()}, stream);
  };
  says(
      [&] {
        logits({hidden.data(), {1, kHidden - 1}}, &id, 1);
      },
      "VocabularyHead: hidden is [1, 23] with a last stride of 1 for 1 rows");
  says(
      [&] {
        logits({hidden.data(), {1, kHidden}, {1, 2}}, &id, 1);
      },
      "VocabularyHead: hidden is [1, 24] with a last stride of 2");
  says([&] { logits(out, &id, -1); }, "VocabularyHead: -1 rows; they must be in [0, 1048576]");
  says([&] { logits(out, &id, std::int64_t{1} << 34); }, "VocabularyHead: 17179869184 rows");
  says([&] { Head::workspace_bytes(topo, std::int64_t{1} << 34); }, "VocabularyHead: 17179869184 rows");
  says([&] { logits(out, nullptr, 1); }, "VocabularyHead: rows is null");
  says([&] { logits({nullptr, {1, kHidden}}, &id, 1); }, "VocabularyHead: hidden is null");
  says(
      [&] {
        head.logits(out, nullptr, &id, 1, {workspace.data() + 1, workspace.size_bytes() - 1}, stream);
      },
      "VocabularyHead: workspace begins at ");
  says(
      [&] {
        head.draw_greedy(out, nullptr, &id, 1, {workspace.data(), workspace.size_bytes()}, nullptr, nullptr,
                         stream);
      },
      "VocabularyHead: tokens is null");
  const auto all = head.logits(out, nullptr, &id, 1, {workspace.data(), workspace.size_bytes()}, stream);
  std::int32_t token = 0;
  float number = 0.0f;
  says([&] { head.sample(all.slice(2, 0, 3), nullptr, nullptr, &token, stream); },
       "VocabularyHead::sample: the logits are [1, 1, 3]; they must be [1, rows, ");
  says([&] { head.sample(all, nullptr, nullptr, nullptr, stream); },
       "VocabularyHead::sample: tokens is null");
  const SamplingConfig random{.temperature = 1.0f};
  says([&] { head.sample(all, &random, nullptr, &token, stream); },
       "VocabularyHead::sample: counters is null");
  const auto small = failure_of([&] {
    head.logits(out, nullptr, &id, 1, {workspace.data(), Head::workspace_bytes(topo, 1) - 1}, stream);
  });
  REQUIRE(small);
  CHECK(small->code == ErrorCode::capacity);
  CHECK(small->says("size it with VocabularyHead::workspace_bytes()"));
  const VocabularyHead<LocalBackend>::Logits nothing(nullptr, {all.extent(0), all.extent(1), all.extent(2)});
  says([&] { head.sample(nothing, nullptr, nullptr, &token, stream); }, "VocabularyHead: the logits is null");
  says([&] { head.norms(all, nullptr, stream); }, "VocabularyHead::norms: norms is null");
  says([&] { head.penalize(all, nullptr, 1, stream); }, "VocabularyHead::penalize: penalties is null");
  says([&] { head.penalize(all, nullptr, -1, stream); }, "VocabularyHead::penalize: count is -1");
  says([&] { head.log_probs(all, &token, -1, &number, nullptr, nullptr, stream); },
       "VocabularyHead::log_probs: num_best is -1");
  WeightView askew = whole;
  askew.data = reinterpret_cast<const std::byte*>(table.data()) + 1;
  says([&] { Head(backend, topo, norm, askew, 1e-5f); }, "which is no multiple of the 4 bytes of its f32");
  says([&] { head.log_probs(all, &token, std::int64_t{1} << 32, &number, nullptr, nullptr, stream); },
       "num_best is 4294967296; it must be in [0, 268435456]");
  says([&] { head.log_probs(all, &token, 2, &number, nullptr, &number, stream); },
       "VocabularyHead::log_probs: best_ids is null");
  says([&] { head.log_probs(all, nullptr, 0, &number, nullptr, nullptr, stream); },
       "VocabularyHead::log_probs: tokens is null");
  const WeightView mixed{table.data(), DType::fp8_ds_mla, kVocab, kHidden};
  says([&] { Head(backend, topo, norm, mixed, 1e-5f); },
       "VocabularyHead: lm_head is fp8_ds_mla; weights are f32");
  says(
      [&] {
        Head(backend, topo, {table.data(), DType::fp8_e4m3, 1, kHidden}, whole, 1e-5f);
      },
      "VocabularyHead: final_norm is fp8_e4m3");
  says([&] { Head(backend, topo, norm, whole, -1.0f); }, "VocabularyHead: norm_epsilon is -1");
  says([&] { embed_tokens(backend, topo, &id, mixed, out, stream); },
       "embed_tokens: the table is fp8_ds_mla");
  CHECK_NOTHROW(logits(out, &id, 1));
  CHECK_NOTHROW(logits({}, nullptr, 0));
  backend.synchronize(stream);
  const Head kept(std::move(head));
  says([&] { logits(out, &id, 1); }, "VocabularyHead: this object was moved from");
  says([&] { head.sample(all, nullptr, nullptr, &token, stream); },
       "VocabularyHead: this object was moved from");
}

TEST_CASE(
    "a sampling config is refused for a number out of range or NaN, and taken at the ends of the range") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  for (const SamplingConfig& config :
       {SamplingConfig{}, SamplingConfig{.temperature = std::numeric_limits<float>::max()},
        SamplingConfig{.top_p = 1e-30f}, SamplingConfig{.top_p = 1.0f}, SamplingConfig{.min_p = 0.0f},
        SamplingConfig{.min_p = 1.0f}, SamplingConfig{.top_k = 0}})
    CHECK_NOTHROW(check_sampling(config));
  for (const float wrong : {-1e-30f, kInfinity, nan})
    CHECK_THROWS_WITH(check_sampling({.temperature = wrong}), Catch::Matchers::StartsWith("temperature is "));
  for (const float wrong : {0.0f, -1.0f, 1.0000001f, nan})
    CHECK_THROWS_WITH(check_sampling({.top_p = wrong}), Catch::Matchers::StartsWith("top_p is "));
  for (const float wrong : {-1e-30f, 1.0000001f, nan})
    CHECK_THROWS_WITH(check_sampling({.min_p = wrong}), Catch::Matchers::StartsWith("min_p is "));
  CHECK_THROWS_WITH(check_sampling({.top_k = -1}), Catch::Matchers::StartsWith("top_k is -1"));
}

}  // namespace helix::test
