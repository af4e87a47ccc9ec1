// SPDX-License-Identifier: Apache-2.0
// lse_combine on the CPU: partials of 2 to 16 KV shards, compared with the streaming read of the same
// machine.
//
// In a decode step the partials have just arrived and are still in the cache (small cases). The large cases,
// up to 256 MiB of partials, are bound by memory.
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/lse_combine.hpp>

#include "ceilings.hpp"
#include "support/worse.hpp"

namespace {

using Backend = helix::cpu::Backend<helix::cpu::LocalComm>;

struct Case {
  const char* name;
  std::int64_t ranks;
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t dim;
  int iterations;
};

constexpr Case kCases[] = {
    {"decode", 4, 8, 8, 128, 200},  {"decode", 8, 64, 4, 128, 100}, {"mla", 8, 16, 16, 512, 100},
    {"large", 2, 4096, 8, 128, 15}, {"large", 8, 4096, 16, 128, 7}, {"large", 16, 2048, 16, 512, 7},
};

/// The largest error of one token and head, compared with a naive double computation.
double error_of_head(const helix::LseCombineArgs<float>& args, std::int64_t token, std::int64_t head) {
  double total = 0.0;  // lse are small enough for exp without a shift
  std::vector<double> sums(static_cast<std::size_t>(args.out.extent(2)), 0.0);
  for (std::int64_t rank = 0; rank < args.partial_lse.extent(0); ++rank) {
    const double weight = std::exp(static_cast<double>(args.partial_lse(rank, token, head)));
    total += weight;
    for (std::size_t i = 0; i < sums.size(); ++i)
      sums[i] += weight * args.partial_out(rank, token, head, static_cast<std::int64_t>(i));
  }
  double worst = std::abs(std::log(total) - args.lse(token, head));
  for (std::size_t i = 0; i < sums.size(); ++i)
    worst = helix::test::worse(
        worst, std::abs(sums[i] / total - args.out(token, head, static_cast<std::int64_t>(i))));
  return worst;
}

void bench_lse_combine(benchmark::State& state, const Case& c, int num_threads) {
  const std::int64_t rows = c.tokens * c.heads;
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> partial_out(static_cast<std::size_t>(c.ranks * rows * c.dim));
  std::vector<float> partial_lse(static_cast<std::size_t>(c.ranks * rows));
  std::vector<float> out(static_cast<std::size_t>(rows * c.dim));
  std::vector<float> lse(static_cast<std::size_t>(rows));
  for (float& x : partial_out) x = uniform(random);
  for (float& x : partial_lse) x = 5.0f * uniform(random);

  Backend backend(num_threads);
  Backend::Stream stream = backend.create_stream();
  helix::LseCombineArgs<float> args;
  args.partial_out = {partial_out.data(), {c.ranks, c.tokens, c.heads, c.dim}};
  args.partial_lse = {partial_lse.data(), {c.ranks, c.tokens, c.heads}};
  args.out = {out.data(), {c.tokens, c.heads, c.dim}};
  args.lse = {lse.data(), {c.tokens, c.heads}};

  const double bytes = 4.0 * static_cast<double>((c.ranks + 1) * rows * (c.dim + 1));
  const double flops = 2.0 * static_cast<double>(c.ranks * rows * c.dim);
  const auto streamed = helix::bench::random_bf16(std::size_t{256} << 20);
  helix::bench::run_beside_ceilings(state, num_threads, bytes, flops, streamed, [&] {
    helix::lse_combine(backend, args, stream);
    backend.synchronize(stream);
  });
  const double error =
      helix::test::worse(error_of_head(args, 0, 0), error_of_head(args, c.tokens - 1, c.heads - 1));
  state.counters["max_error"] = error;
  if (!(error < 1e-5)) state.SkipWithError("the result that was timed is wrong");
}

const int kRegistered = [] {
  for (const Case& c : kCases) {
    for (int num_threads : {1, 2}) {
      const std::string name = std::string("lse_combine/") + c.name + "/ranks:" + std::to_string(c.ranks) +
                               "/tokens:" + std::to_string(c.tokens) + "/heads:" + std::to_string(c.heads) +
                               "/dim:" + std::to_string(c.dim) + "/threads:" + std::to_string(num_threads);
      benchmark::RegisterBenchmark(
          name.c_str(),
          [&c, num_threads](benchmark::State& state) { bench_lse_combine(state, c, num_threads); })
          ->UseManualTime()
          ->Iterations(c.iterations)
          ->Unit(benchmark::kMicrosecond);
    }
  }
  return 0;
}();

}  // namespace
