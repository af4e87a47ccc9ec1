// SPDX-License-Identifier: Apache-2.0
// What ranks do through each other's memory, in a graph of ten: the exchange of partials and its combine
// ("pushed_us": with a kernel that writes them; "us": without what that kernel takes, so as behind attention;
// "headers_..." the same of messages with headers where others travel as lines), and the all-reduce with
// residual and norm. Beside them the same over NCCL, where each rank has a GPU. On one GPU two ranks share
// it, which shows that it works, not how fast a link is.
#include <exception>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/peer_comm.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/reduce_norm.hpp>

#include "cases.hpp"
#include "device_data.hpp"
#include "rank_threads.hpp"

namespace helix::bench {
namespace {

constexpr int kPerGraph = 10;

struct ExchangeTimes {
  double us = 0.0;  ///< Of messages with headers that lie there.
  double pushed_us = 0.0;
};

template <class Comm>
ExchangeTimes time_exchange(int num_gpus, std::int64_t tokens, bool has_lines) {
  constexpr std::int64_t kHeads = 128;
  constexpr std::int64_t kDim = 128;
  ExchangeTimes times;
  run_ranks<Comm>(2, 1, num_gpus, [&](Rank<Comm>& rank) {
    using Backend = RankBackend<Comm>;
    KvpAllToAll<Backend> exchange(
        rank.backend,
        {.max_tokens = tokens, .num_query_heads = kHeads, .value_dim = kDim, .has_lines = has_lines});
    const cuda::Buffer out =
        random_bf16(tokens * kHeads * kDim, 7 + static_cast<std::uint64_t>(rank.index()));
    const cuda::Buffer lse = on_device(
        rank.backend, random_floats(tokens * kHeads, 5.0f, static_cast<std::uint32_t>(rank.index())));
    const cuda::Buffer combined(static_cast<std::size_t>(tokens * kHeads / 2 * kDim) * kBf16Bytes);
    const cuda::Buffer positions =
        on_device(rank.backend, std::vector<std::int64_t>(static_cast<std::size_t>(tokens), 77));
    const auto messages =
        exchange.outgoing({.tokens = tokens}, reinterpret_cast<const std::int64_t*>(positions.data()));
    const auto combine = [&] {
      exchange.exchange_and_combine(messages, nullptr,
                                    {reinterpret_cast<bf16*>(combined.data()), {tokens, kHeads / 2, kDim}},
                                    rank.stream);
    };
    const auto push = [&] {
      rank.backend.pack_partial({.out = {reinterpret_cast<const bf16*>(out.data()), {tokens, kHeads, kDim}},
                                 .lse = {reinterpret_cast<const float*>(lse.data()), {tokens, kHeads}},
                                 .packed_out = messages.sink.out,
                                 .packed_lse = messages.sink.lse,
                                 .headers = messages.sink.headers,
                                 .slot = messages.sink.slot,
                                 .lines = messages.sink.lines},
                                rank.stream);
      combine();
    };
    const double pushed_us = time_together(rank, kPerGraph, push);
    const bool are_lines = messages.sink.lines.rows.out != nullptr;
    const double us = are_lines ? 0.0 : time_together(rank, kPerGraph, combine);
    if (rank.index() == 0) times = {us, pushed_us};
  });
  return times;
}

template <class Comm>
double time_reduce_norm(int num_gpus, std::int64_t rows, std::int64_t width) {
  double us = 0.0;
  run_ranks<Comm>(2, 1, num_gpus, [&](Rank<Comm>& rank) {
    const auto seed = static_cast<std::uint64_t>(rank.index());
    const cuda::Buffer partial = random_bf16(rows * width, 3 + seed);
    const cuda::Buffer residual = random_bf16(rows * width, 5);
    const cuda::Buffer weight = random_bf16(width, 9);
    const cuda::Buffer out(static_cast<std::size_t>(rows * width) * kBf16Bytes);
    const auto view = [&](const cuda::Buffer& buffer) {
      return TensorView<bf16, 2>(reinterpret_cast<bf16*>(buffer.data()), {rows, width});
    };
    const double rank_us = time_together(rank, kPerGraph, [&] {
      reduce_norm(rank.backend,
                  {.partial = view(partial),
                   .residual = view(residual),
                   .weight = {weight.data(), DType::bf16, 1, width},
                   .out = view(out)},
                  rank.stream);
    });
    if (rank.index() == 0) us = rank_us;
  });
  return us;
}

/// Runs `measure`, which returns microseconds and sets counters.
template <class Measure>
void run_case(benchmark::State& state, const Measure& measure) {
  double us = 0.0;
  try {
    us = measure();
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
  for (auto _ : state) state.SetIterationTime(us * 1e-6);
  state.counters["us"] = us;
}

void register_case(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

void register_peers(int num_gpus) {
  const int gpus = num_gpus >= 2 ? 2 : 1;
  const std::string where = gpus == 2 ? "" : "/one_gpu";
  for (const std::int64_t tokens : {1, 4, 32, 64, 256, 1024}) {
    register_case("window_exchange/kvp:2/tokens:" + std::to_string(tokens) + "/heads:128/dim:128" + where,
                  [=](benchmark::State& state) {
                    run_case(state, [&] {
                      const auto headers = time_exchange<cuda::PeerComm>(gpus, tokens, false);
                      auto times = time_exchange<cuda::PeerComm>(gpus, tokens, true);
                      if (times.us == 0.0) times.us = times.pushed_us - (headers.pushed_us - headers.us);
                      state.counters["pushed_us"] = times.pushed_us;
                      state.counters["headers_us"] = headers.us;
                      state.counters["headers_pushed_us"] = headers.pushed_us;
                      state.counters["bytes"] = static_cast<double>(tokens * 128 * 260);
                      if (gpus == 2) {
                        const auto nccl = time_exchange<cuda::NcclComm>(gpus, tokens, true);
                        state.counters["nccl_us"] = nccl.us;
                        state.counters["nccl_packed_us"] = nccl.pushed_us;
                      }
                      return times.us;
                    });
                  });
  }
  for (const std::int64_t rows : {1, 2, 8, 16, 64, 128}) {
    constexpr std::int64_t kWidth = 8192;
    register_case("reduce_norm/ranks:2/rows:" + std::to_string(rows) + "/width:8192" + where,
                  [=](benchmark::State& state) {
                    run_case(state, [&] {
                      state.counters["bytes"] = static_cast<double>(rows * kWidth * 2);
                      const double us = time_reduce_norm<cuda::PeerComm>(gpus, rows, kWidth);
                      if (gpus == 2)
                        state.counters["nccl_us"] = time_reduce_norm<cuda::NcclComm>(gpus, rows, kWidth);
                      return us;
                    });
                  });
  }
}

}  // namespace helix::bench
