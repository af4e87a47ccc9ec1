// SPDX-License-Identifier: Apache-2.0
// lse_combine and the log-sum-exp conventions: published values, shapes, empty shards, sinks, strides and
// error messages.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/lse.hpp>
#include <helix/lse_combine.hpp>

#include "support/catch.hpp"
#include "support/worse.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

constexpr double kTolerance = 1.5e-6;  // four times the largest error that was seen

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Partials of R shards and the combined result.
struct Partials {
  std::int64_t ranks = 0, tokens = 0, heads = 0, dim = 0;
  std::vector<float> out;  // [R, tokens, heads, dim]
  std::vector<float> lse;  // [R, tokens, heads]

  std::int64_t rows() const { return tokens * heads; }
  float& lse_at(std::int64_t rank, std::int64_t row) {
    return lse[static_cast<std::size_t>(rank * rows() + row)];
  }
  float* out_at(std::int64_t rank, std::int64_t row) { return out.data() + (rank * rows() + row) * dim; }
};

Partials random_partials(std::int64_t ranks, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                         std::uint32_t seed = 1) {
  Partials p{ranks, tokens, heads, dim, {}, {}};
  std::mt19937 generator(seed);
  p.out.resize(static_cast<std::size_t>(ranks * tokens * heads * dim));
  p.lse.resize(static_cast<std::size_t>(ranks * tokens * heads));
  // Cheap uniform numbers, because the largest case has eight million.
  for (float& value : p.out) value = static_cast<float>(generator() >> 8) * 0x1p-23f - 1.0f;
  for (float& value : p.lse) value = static_cast<float>(generator() >> 8) * 0x1p-20f - 8.0f;
  return p;
}

struct Combined {
  std::vector<float> out;
  std::vector<float> lse;
};

Combined combine(const Partials& p, const std::vector<float>& sink = {}, int threads = 1,
                 LseConvention convention = LseConvention::natural) {
  CpuBackend backend(threads);
  const auto stream = backend.create_stream();
  Combined result{std::vector<float>(static_cast<std::size_t>(p.tokens * p.heads * p.dim), std::nanf("")),
                  std::vector<float>(static_cast<std::size_t>(p.tokens * p.heads), std::nanf(""))};
  LseCombineArgs<float> args;
  args.partial_out = {p.out.data(), {p.ranks, p.tokens, p.heads, p.dim}};
  args.partial_lse = {p.lse.data(), {p.ranks, p.tokens, p.heads}};
  args.sinks = sink.empty() ? nullptr : sink.data();
  args.convention = convention;
  args.out = {result.out.data(), {p.tokens, p.heads, p.dim}};
  args.lse = {result.lse.data(), {p.tokens, p.heads}};
  lse_combine(backend, args, stream);
  backend.synchronize(stream);
  return result;
}

/// The largest error compared with the definition in double, relative to the scale of the reference; infinite
/// if an infinity or NaN is in a wrong place.
double error_of(Partials p, const Combined& got, const std::vector<float>& sink = {}) {
  double worst = 0.0;
  const auto compare = [&](double have, double want) {
    if (std::isfinite(want) ? !std::isfinite(have) : have != want) worst = HUGE_VAL;
    if (std::isfinite(want)) worst = worse(worst, std::abs(have - want) / std::max(1.0, std::abs(want)));
  };
  for (std::int64_t row = 0; row < p.rows(); ++row) {
    double max = sink.empty() ? -HUGE_VAL : sink[static_cast<std::size_t>(row % p.heads)];
    for (std::int64_t r = 0; r < p.ranks; ++r) max = std::max(max, double{p.lse_at(r, row)});
    double total = sink.empty() || max == -HUGE_VAL
                       ? 0.0
                       : std::exp(sink[static_cast<std::size_t>(row % p.heads)] - max);
    std::vector<double> sum(static_cast<std::size_t>(p.dim), 0.0);
    for (std::int64_t r = 0; r < p.ranks; ++r) {
      if (p.lse_at(r, row) == -kInf) continue;
      const double weight = std::exp(p.lse_at(r, row) - max);
      total += weight;
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += weight * p.out_at(r, row)[d];
    }
    for (std::size_t d = 0; d < sum.size(); ++d)
      compare(got.out[static_cast<std::size_t>(row * p.dim) + d], total == 0.0 ? 0.0 : sum[d] / total);
    compare(got.lse[static_cast<std::size_t>(row)], total == 0.0 ? -HUGE_VAL : max + std::log(total));
  }
  return worst;
}

TEST_CASE("log-sum-exps 1 and 2 weigh .26894 and .73106 and combine to 2.31326") {
  const Combined natural = combine({2, 1, 1, 2, {1, 0, 0, 1}, {1, 2}});
  CHECK(natural.out[0] == Approx(.26894).epsilon(1e-5));
  CHECK(natural.out[1] == Approx(.73106).epsilon(1e-5));
  CHECK(natural.lse[0] == Approx(2.31326).epsilon(1e-5));
}

TEST_CASE("the same numbers in base 2 weigh 1/3 and 2/3 and combine to 2.58496, by the named conversion") {
  const Combined converted = combine({2, 1, 1, 2, {1, 0, 0, 1}, {1, 2}}, {}, 1, LseConvention::base2);
  CHECK(converted.out[0] == Approx(1.0 / 3.0));
  CHECK(converted.out[1] == Approx(2.0 / 3.0));
  CHECK(converted.lse[0] / std::log(2.0) == Approx(2.58496).epsilon(1e-5));
}

TEST_CASE("exponentials 2 and 8 weigh 0 and 10 to 8, and read as base 2 they give 7.2330317") {
  const std::vector<float> lse{std::log(2.0f), std::log(8.0f)};
  CHECK(combine({2, 1, 1, 1, {0, 10}, lse}).out[0] == Approx(8.0));
  // Wrong on purpose: the values are natural.
  CHECK(combine({2, 1, 1, 1, {0, 10}, lse}, {}, 1, LseConvention::base2).out[0] == Approx(7.2330317));
}

TEST_CASE("conversions keep empty shards empty, and only the named one turns +inf into -inf") {
  CHECK(to_natural(1.5f, LseConvention::natural) == 1.5f);
  CHECK(to_natural(-kInf, LseConvention::natural) == -kInf);
  CHECK(to_natural(kInf, LseConvention::natural) == kInf);
  CHECK(to_natural(-kInf, LseConvention::base2) == -kInf);
  CHECK(to_natural(10.0f, LseConvention::base2) == Approx(10.0 * std::log(2.0)));
  CHECK(to_natural(kInf, LseConvention::natural_positive_inf_if_empty) == -kInf);
  CHECK(to_natural(-2.0f, LseConvention::natural_positive_inf_if_empty) == -2.0f);
  CHECK(std::isnan(to_natural(std::nanf(""), LseConvention::natural_positive_inf_if_empty)));
}

TEST_CASE("the larger of two log-sum-exps is NaN if either is") {
  const float nan = std::nanf("");
  CHECK(larger_lse(1.0f, 2.0f) == 2.0f);
  CHECK(larger_lse(2.0f, 1.0f) == 2.0f);
  CHECK(larger_lse(-kInf, -kInf) == -kInf);
  CHECK(larger_lse(-kInf, -3.0f) == -3.0f);
  CHECK(std::isnan(larger_lse(nan, kInf)));
  CHECK(std::isnan(larger_lse(-kInf, nan)));
}

TEST_CASE("combining equals its definition in double for the published shapes") {
  struct Shape {
    std::int64_t ranks, tokens, heads, dim;
  };
  for (const Shape s : {Shape{4, 8, 2, 64}, Shape{8, 16, 4, 128}, Shape{16, 32, 8, 256}, Shape{1, 1, 1, 16},
                        Shape{128, 1, 1, 16}, Shape{256, 1, 1, 16}, Shape{4, 8, 1, 16}, Shape{4, 8, 2, 2048},
                        Shape{16, 16, 64, 512}}) {
    CAPTURE(s.ranks, s.tokens, s.heads, s.dim);
    const Partials partials = random_partials(s.ranks, s.tokens, s.heads, s.dim);
    CHECK(error_of(partials, combine(partials, {}, 2)) < kTolerance);
  }
  for (std::int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (const std::int64_t dim : {1, 64, 127, 128, 129, 512}) {
      CAPTURE(ranks, dim);
      const Partials partials = random_partials(ranks, 3, 5, dim, static_cast<std::uint32_t>(dim));
      CHECK(error_of(partials, combine(partials)) < kTolerance);
    }
  }
}

TEST_CASE("log-sum-exps far beyond the range of exp combine without overflow") {
  Partials p = random_partials(4, 2, 3, 8);
  for (const float offset : {-5000.0f, 5000.0f}) {
    Partials moved = p;
    for (float& lse : moved.lse) lse += offset;
    CHECK(error_of(moved, combine(moved)) < kTolerance);
  }
  for (std::int64_t row = 0; row < p.rows(); ++row)
    p.lse_at(row % 4, row) = -3000.0f;  // the weight underflows to 0
  CHECK(error_of(p, combine(p)) < kTolerance);
}

TEST_CASE("a rank without KV counts nothing whatever its output holds: poison and wild numbers") {
  for (const std::int64_t tokens : {17, 96}) {
    for (std::int64_t empty = 0; empty < 4; ++empty) {
      for (const float poison : {std::nanf(""), kInf, -kInf, 3e38f}) {
        Partials p = random_partials(4, tokens, 6, 512, 9);
        for (std::int64_t row = 0; row < p.rows(); ++row) {
          std::fill_n(p.out_at(empty, row), p.dim, poison);
          p.lse_at(empty, row) = -kInf;
        }
        const Combined combined = combine(p);
        CAPTURE(tokens, empty, poison);
        CHECK(
            std::all_of(combined.out.begin(), combined.out.end(), [](float x) { return std::isfinite(x); }));
        CHECK(error_of(p, combined) < kTolerance);
      }
    }
  }
}

TEST_CASE("with the -inf mask withheld the same poison shows: the check above is not blind") {
  for (std::int64_t empty = 0; empty < 4; ++empty) {
    Partials p = random_partials(4, 17, 6, 512, 9);
    for (std::int64_t row = 0; row < p.rows(); ++row) {
      std::fill_n(p.out_at(empty, row), p.dim, std::nanf(""));
      p.lse_at(empty, row) = 0.0f;
    }
    const Combined combined = combine(p);
    CHECK(std::all_of(combined.out.begin(), combined.out.end(), [](float x) { return std::isnan(x); }));
  }
}

TEST_CASE("shards that are empty for some tokens, and tokens that no shard sees") {
  Partials p = random_partials(5, 12, 3, 33, 3);
  for (std::int64_t row = 0; row < p.rows(); ++row) {
    for (std::int64_t rank = 0; rank < p.ranks; ++rank) {
      const std::int64_t token = row / p.heads;
      // Token 0: all ranks are empty.
      if (token != 0 && (token >> (rank % 4) & 1) == 0 && token != 11) continue;
      p.lse_at(rank, row) = -kInf;
      std::fill_n(p.out_at(rank, row), p.dim, std::nanf(""));
    }
  }
  const Combined combined = combine(p);
  CHECK(error_of(p, combined) < kTolerance);
  for (std::int64_t head = 0; head < p.heads; ++head)
    CHECK(combined.lse[static_cast<std::size_t>(head)] == -kInf);
  for (std::int64_t i = 0; i < p.heads * p.dim; ++i) CHECK(combined.out[static_cast<std::size_t>(i)] == 0.0f);
}

TEST_CASE("a sink joins the denominator once, however many shards there are") {
  // Two equal scores of value 1 and a sink with the same score give 2 / 3, also if each shard holds one of
  // them.
  const std::vector<float> sink{0.0f};
  CHECK(combine({1, 1, 1, 1, {1}, {std::log(2.0f)}}, sink).out[0] == Approx(2.0 / 3.0));
  const Combined two = combine({2, 1, 1, 1, {1, 1}, {0, 0}}, sink);
  CHECK(two.out[0] == Approx(2.0 / 3.0));
  CHECK(two.lse[0] == Approx(std::log(3.0)));
  const Partials p = random_partials(6, 4, 3, 40);
  const std::vector<float> sinks{-4.0f, 0.5f, 30.0f};
  CHECK(error_of(p, combine(p, sinks), sinks) < kTolerance);
  CHECK(error_of(p, combine(p, sinks)) > 1e-3);  // control: the sink has an effect
}

TEST_CASE("strided partials, as they lie in a receive buffer, combine to the same bits as dense ones") {
  const Partials p = random_partials(3, 5, 4, 24);
  const Combined dense = combine(p);
  const std::int64_t head = p.dim + 3, token = p.heads * head + 1, rank = p.tokens * token + 7;
  std::vector<float> out(static_cast<std::size_t>(3 * rank), std::nanf(""));
  std::vector<float> lse(3 * 100, std::nanf(""));
  for (std::int64_t r = 0; r < 3; ++r)
    for (std::int64_t t = 0; t < 5; ++t)
      for (std::int64_t h = 0; h < 4; ++h) {
        const std::int64_t row = (r * 5 + t) * 4 + h;
        lse[static_cast<std::size_t>(r * 100 + t + h * 10)] = p.lse[static_cast<std::size_t>(row)];
        std::copy_n(p.out.begin() + row * p.dim, p.dim, out.begin() + r * rank + t * token + h * head);
      }
  CpuBackend backend;
  const auto stream = backend.create_stream();
  std::vector<float> result(dense.out.size());
  LseCombineArgs<float> args;
  args.partial_out = {out.data(), {3, 5, 4, p.dim}, {rank, token, head, 1}};
  args.partial_lse = {lse.data(), {3, 5, 4}, {100, 1, 10}};
  args.out = {result.data(), {5, 4, p.dim}};
  lse_combine(backend, args, stream);
  backend.synchronize(stream);
  CHECK(result == dense.out);
}

TEST_CASE("nothing to combine is no error and touches nothing") {
  CpuBackend backend;
  const auto stream = backend.create_stream();
  LseCombineArgs<float> args;
  args.partial_out = {nullptr, {4, 0, 6, 16}};
  args.partial_lse = {nullptr, {4, 0, 6}};
  args.out = {nullptr, {0, 6, 16}};
  CHECK_NOTHROW(lse_combine(backend, args, stream));
  args.partial_out = {nullptr, {4, 6, 0, 16}};
  args.partial_lse = {nullptr, {4, 6, 0}};
  args.out = {nullptr, {6, 0, 16}};
  CHECK_NOTHROW(lse_combine(backend, args, stream));
  CHECK_NOTHROW(backend.synchronize(stream));
}

TEST_CASE("shapes that contradict each other are refused with both values") {
  CpuBackend backend;
  const auto stream = backend.create_stream();
  std::vector<float> memory(4096);
  float* data = memory.data();
  LseCombineArgs<float> good;
  good.partial_out = TensorView<const float, 4>(data, {2, 3, 4, 5});
  good.partial_lse = TensorView<const float, 3>(data, {2, 3, 4});
  good.out = {data + 2048, {3, 4, 5}};
  good.lse = {data + 3000, {3, 4}};
  const auto message = [&](LseCombineArgs<float> args) -> std::string {
    try {
      lse_combine(backend, args, stream);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message(good) == "");
  LseCombineArgs<float> bad = good;
  bad.partial_lse = TensorView<const float, 3>(data, {7, 3, 4});
  CHECK(message(bad).find("2 partial outputs and 7 partial lse") != std::string::npos);
  bad = good;
  bad.partial_lse = TensorView<const float, 3>(data, {2, 3, 6});
  CHECK(message(bad).find("4 heads, partial lse of 3 and 6") != std::string::npos);
  bad = good;
  bad.out = {data, {3, 4, 6}};
  CHECK(message(bad).find("out is [3, 4, 6]; the partials are [3, 4, 5]") != std::string::npos);
  bad = good;
  bad.lse = {data, {3, 5}};
  CHECK(message(bad).find("lse is [3, 5]") != std::string::npos);
  bad = good;
  bad.out = {data, {3, 4, 5}, {1, 3, 12}};
  CHECK(message(bad).find("last strides must be 1") != std::string::npos);
  bad = good;
  bad.out = {data + 2048, {3, 4, 5}, {0, 5, 1}};
  CHECK(message(bad).find("dimension 0 of out has extent 3 and stride 0") != std::string::npos);
  bad = good;
  bad.lse = {data + 3000, {3, 4}, {1, 1}};
  CHECK(message(bad).find("dimension 1 of lse has extent 4 and stride 1") != std::string::npos);
  bad = good;
  bad.partial_out = TensorView<const float, 4>(data, {0, 3, 4, 5});
  bad.partial_lse = TensorView<const float, 3>(data, {0, 3, 4});
  CHECK(message(bad).find("give at least one") != std::string::npos);
  bad = good;
  bad.partial_out = TensorView<const float, 4>(nullptr, {2, 3, 4, 5});
  CHECK(message(bad).find("partial_out is null") != std::string::npos);
  bad = good;
  bad.partial_lse = TensorView<const float, 3>(nullptr, {2, 3, 4});
  CHECK(message(bad).find("partial_lse is null") != std::string::npos);
  bad = good;
  bad.out = {nullptr, {3, 4, 5}};
  CHECK(message(bad).find("combine: out is null") != std::string::npos);
  bad = good;
  bad.convention = static_cast<LseConvention>(9);
  CHECK(message(bad).find("convention is 9; it must be natural (0)") != std::string::npos);
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1} << 33, std::int64_t{1} << 62}) {
    for (std::size_t axis = 0; axis < 4; ++axis) {
      CAPTURE(size, axis);
      std::array<std::int64_t, 4> extents{2, 3, 4, 5};
      extents[axis] = size;
      const auto [ranks, tokens, heads, columns] = extents;
      bad = good;
      bad.partial_out = TensorView<const float, 4>(data, extents, {60, 20, 5, 1});
      bad.partial_lse = TensorView<const float, 3>(data, {ranks, tokens, heads}, {12, 4, 1});
      bad.out = {data, {tokens, heads, columns}, {20, 5, 1}};
      bad.lse = {data, {tokens, heads}, {4, 1}};
      CHECK(message(bad).find(std::to_string(size)) != std::string::npos);
    }
  }
  CHECK_NOTHROW(backend.synchronize(stream));
}

}  // namespace
}  // namespace helix::test
