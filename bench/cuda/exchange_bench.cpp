// SPDX-License-Identifier: Apache-2.0
// The exchange of partial attention between GPUs with its combine, over NCCL and checked, in a graph of ten.
// 128 heads of 128 per rank: 33 KB per token. Also times partials that must be packed first ("packed_us"),
// and NCCL's all-to-all alone.
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "cases.hpp"
#include "exchange_work.hpp"
#include "timing.hpp"

namespace helix::bench {
namespace {

void bench_exchange(benchmark::State& state, int kvp, const ExchangeShape& shape) {
  constexpr int kPerGraph = 10;
  double us = 0.0;
  double packed_us = 0.0;
  double all_to_all_us = 0.0;
  std::vector<ExchangeResult> results(static_cast<std::size_t>(kvp));
  run_ranks<cuda::NcclComm>(kvp, 1, kvp, [&](Rank<cuda::NcclComm>& rank) {
    ExchangeWork<cuda::NcclComm> work(rank, shape);
    work.fill_messages();
    const double rank_us = time_together(rank, kPerGraph, [&] { work.queue(); });
    results[static_cast<std::size_t>(rank.index())] = work.result();
    const double rank_packed_us = time_together(rank, kPerGraph, [&] { work.queue_with_packing(); });
    const double rank_all_to_all_us = time_together(rank, kPerGraph, [&] { work.queue_all_to_all(); });
    if (rank.index() == 0) {
      us = rank_us;
      packed_us = rank_packed_us;
      all_to_all_us = rank_all_to_all_us;
    }
  });
  const double error = exchange_error(results, shape);
  state.counters["max_error"] = error;
  if (!(error < kExchangeTolerance)) state.SkipWithError("the result that was timed is wrong");
  for (auto _ : state) state.SetIterationTime(us * 1e-6);
  state.counters["us"] = us;
  state.counters["packed_us"] = packed_us;
  state.counters["all_to_all_us"] = all_to_all_us;
  state.counters["bytes"] = static_cast<double>(shape.bytes());
  state.counters["sent_bytes/s"] = static_cast<double>(shape.bytes()) * (kvp - 1) / kvp / us * 1e6;
}

}  // namespace

void register_exchanges(int num_gpus) {
  for (const int kvp : {2, 4}) {
    if (kvp > num_gpus) continue;
    for (const std::int64_t tokens : {1, 4, 16, 32, 64}) {
      const ExchangeShape shape{tokens, 128, 128};
      register_case(
          "exchange/kvp:" + std::to_string(kvp) + "/tokens:" + std::to_string(tokens) + "/heads:128/dim:128",
          [kvp, shape](benchmark::State& state) { bench_exchange(state, kvp, shape); });
    }
  }
}

}  // namespace helix::bench
