// SPDX-License-Identifier: Apache-2.0
// What ranks do through each other's memory, in a graph of ten: the exchange of partials with its combine,
// and the all-reduce with residual and norm. "pushed_us" includes a kernel that writes the partials into the
// messages; "us" is without the time of that kernel, as after attention; "headers_..." use messages with
// headers where others travel as lines. The same is timed over NCCL if each rank has a GPU. On one GPU two
// ranks share it, which shows that it works, not how fast a link is.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/peer_comm.hpp>
#include <helix/error.hpp>
#include <helix/reduce_norm.hpp>

#include "cases.hpp"
#include "device_data.hpp"
#include "exchange_work.hpp"
#include "rank_threads.hpp"
#include "support/worse.hpp"
#include "timing.hpp"

namespace helix::bench {
namespace {

constexpr int kPerGraph = 10;
constexpr std::int64_t kHeads = 128;
constexpr std::int64_t kDim = 128;

void expect_right(const char* what, double error, double tolerance) {
  HELIX_EXPECTS(error < tolerance, ErrorCode::internal, what, ": what was timed has an error of ", error,
                ", more than ", tolerance);
}

/// Returns rank 0's times.
/// @throws Error if the result of any rank is not the merge of all ranks' partials.
template <class Comm>
TimesByProtocol time_exchanges(int size, int num_gpus, std::int64_t tokens) {
  const ExchangeShape shape{tokens, kHeads, kDim};
  std::vector<TimesByProtocol> times(static_cast<std::size_t>(size));
  run_ranks<Comm>(size, 1, num_gpus, [&](Rank<Comm>& rank) {
    times[static_cast<std::size_t>(rank.index())] = time_exchanges(rank, shape, kPerGraph);
  });
  for (std::size_t protocol = 0; protocol < times[0].results.size(); ++protocol) {
    std::vector<ExchangeResult> results;
    for (const TimesByProtocol& of_rank : times) results.push_back(of_rank.results.at(protocol));
    expect_right("combined partials", exchange_error(results, shape), kExchangeTolerance);
  }
  return times[0];
}

/// One rank's input and output of reduce_norm, on the host.
struct NormResult {
  std::vector<bf16> summand;
  std::vector<bf16> out;
};

/// The largest error of the ranks' results, compared with sums in double.
double reduce_norm_error(const std::vector<NormResult>& ranks, const std::vector<bf16>& residual,
                         const std::vector<bf16>& weight, double epsilon) {
  std::vector<double> sums;
  for (std::size_t i = 0; i < residual.size(); ++i) {
    sums.push_back(to_double(residual[i]));
    for (const NormResult& rank : ranks) sums.back() += to_double(rank.summand[i]);
  }
  const std::vector<double> expected = normed_rows(std::move(sums), weight, epsilon);
  double worst = 0.0;
  for (const NormResult& rank : ranks) worst = test::worse(worst, relative_error(rank.out, expected));
  return worst;
}

/// Returns rank 0's time of one reduce_norm, in microseconds.
/// @throws Error if the result of any rank is wrong.
template <class Comm>
double time_reduce_norm(int size, int num_gpus, std::int64_t rows, std::int64_t width) {
  constexpr double kTolerance = 1e-2;  // Euclidean
  double us = 0.0;
  std::vector<NormResult> results(static_cast<std::size_t>(size));
  std::vector<bf16> residual_values;
  std::vector<bf16> weight_values;
  double epsilon = 0.0;
  run_ranks<Comm>(size, 1, num_gpus, [&](Rank<Comm>& rank) {
    const auto seed = static_cast<std::uint64_t>(rank.index());
    const cuda::Buffer summand = random_bf16(rows * width, 3 + seed);
    const cuda::Buffer residual = random_bf16(rows * width, 1005);
    const cuda::Buffer weight = random_bf16(width, 1009);
    const cuda::Buffer out(static_cast<std::size_t>(rows * width) * kBf16Bytes);
    const auto view = [&](const cuda::Buffer& buffer) {
      return TensorView<bf16, 2>(reinterpret_cast<bf16*>(buffer.data()), {rows, width});
    };
    const ReduceNormArgs<bf16> args{.summand = view(summand),
                                    .residual = view(residual),
                                    .weight = {weight.data(), DType::bf16, 1, width},
                                    .out = view(out)};
    const auto queue = [&] { reduce_norm(rank.backend, args, rank.stream); };
    const auto values_of = [&](const cuda::Buffer& buffer) {
      return on_host<bf16>(rank.backend, buffer.data(), static_cast<std::int64_t>(buffer.size_bytes()) / 2);
    };
    NormResult& result = results[static_cast<std::size_t>(rank.index())];
    result.summand = values_of(summand);
    const std::vector<bf16> residual_before = values_of(residual);
    const double rank_us = time_together(rank, kPerGraph, queue);
    // Each call adds to the residual, and over NCCL to the summands: restore the inputs and make one more
    // call.
    rank.backend.upload(summand.data(), result.summand.data(), summand.size_bytes(), rank.stream);
    rank.backend.upload(residual.data(), residual_before.data(), residual.size_bytes(), rank.stream);
    queue();
    rank.backend.synchronize(rank.stream);
    result.out = values_of(out);
    if (rank.index() != 0) return;
    us = rank_us;
    residual_values = residual_before;
    weight_values = values_of(weight);
    epsilon = double{args.epsilon};
  });
  expect_right("reduce_norm", reduce_norm_error(results, residual_values, weight_values, epsilon),
               kTolerance);
  return us;
}

/// Runs `measure`, which returns microseconds and sets counters.
template <class Measure>
void run_case(benchmark::State& state, const Measure& measure) {
  const double us = measure();
  for (auto _ : state) state.SetIterationTime(us * 1e-6);
  state.counters["us"] = us;
}

/// Registers cases of `size` ranks, which share a GPU if there are fewer GPUs than ranks.
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
