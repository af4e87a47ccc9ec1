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
#include <helix/reduce_norm.hpp>

#include "cases.hpp"
#include "device_data.hpp"
#include "exchange_work.hpp"
#include "rank_threads.hpp"
#include "timing.hpp"

namespace helix::bench {
namespace {

constexpr int kPerGraph = 10;
constexpr std::int64_t kHeads = 128;
constexpr std::int64_t kDim = 128;

template <class Comm>
TimesByProtocol time_exchanges(int size, int num_gpus, std::int64_t tokens) {
  TimesByProtocol times;
  run_ranks<Comm>(size, 1, num_gpus, [&](Rank<Comm>& rank) {
    const TimesByProtocol of_rank = time_exchanges(rank, {tokens, kHeads, kDim}, kPerGraph);
    if (rank.index() == 0) times = of_rank;
  });
  return times;
}

template <class Comm>
double time_reduce_norm(int size, int num_gpus, std::int64_t rows, std::int64_t width) {
  double us = 0.0;
  run_ranks<Comm>(size, 1, num_gpus, [&](Rank<Comm>& rank) {
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

/// Cases of `size` ranks, which share a GPU where there are fewer than that.
void register_group(int size, int num_gpus) {
  const int gpus = num_gpus >= size ? size : 1;
  const std::string where = gpus == size ? "" : "/one_gpu";
  for (const std::int64_t tokens : {1, 4, 32, 64, 256, 1024}) {
    register_case(
        "window_exchange/kvp:" + std::to_string(size) + "/tokens:" + std::to_string(tokens) +
            "/heads:128/dim:128" + where,
        [=](benchmark::State& state) {
          run_case(state, [&] {
            const auto times = time_exchanges<cuda::PeerComm>(size, gpus, tokens);
            state.counters["pushed_us"] = times.taken.pushed_us;
            state.counters["headers_us"] = times.headers.us;
            state.counters["headers_pushed_us"] = times.headers.pushed_us;
            state.counters["bytes"] = static_cast<double>(ExchangeShape{tokens, kHeads, kDim}.bytes());
            if (gpus == size) {
              const auto nccl = time_exchanges<cuda::NcclComm>(size, gpus, tokens);
              state.counters["nccl_us"] = nccl.headers.us;
              state.counters["nccl_packed_us"] = nccl.headers.pushed_us;
            }
            return times.taken.us;
          });
        });
  }
  for (const std::int64_t rows : {1, 2, 8, 16, 64, 128}) {
    constexpr std::int64_t kWidth = 8192;
    register_case(
        "reduce_norm/ranks:" + std::to_string(size) + "/rows:" + std::to_string(rows) + "/width:8192" + where,
        [=](benchmark::State& state) {
          run_case(state, [&] {
            state.counters["bytes"] = static_cast<double>(rows * kWidth * 2);
            const double us = time_reduce_norm<cuda::PeerComm>(size, gpus, rows, kWidth);
            if (gpus == size)
              state.counters["nccl_us"] = time_reduce_norm<cuda::NcclComm>(size, gpus, rows, kWidth);
            return us;
          });
        });
  }
}

}  // namespace

void register_peers(int num_gpus) {
  register_group(2, num_gpus);
  if (num_gpus >= 4) register_group(4, num_gpus);
}

}  // namespace helix::bench
