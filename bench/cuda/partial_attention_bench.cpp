// SPDX-License-Identifier: Apache-2.0
// partial_attention on a GPU: bf16, head size 128, out and log-sum-exp, KV in permuted pages, cold caches, in
// Helix's layout and in a token-major one as other engines keep it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/backend.hpp>

#include "timing.hpp"

namespace helix::bench {
namespace {

/// How a pool of K and V lies.
enum class Layout {
  head_major,  ///< [page][K, V][head][token][D]: Helix's own.
  token_major  ///< [K, V][page][token][head][D]: vLLM's, in pages of one token SGLang's.
};

struct Case {
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t batch;
  std::int64_t tokens;  ///< of each sequence; ragged: at most
  std::int64_t page_tokens;
  std::int64_t queries;  ///< tokens a sequence
  bool is_ragged;
  Layout layout = Layout::head_major;

  std::string name() const {
    return "partial_attention/heads:" + std::to_string(query_heads) + ":" + std::to_string(kv_heads) +
           "/batch:" + std::to_string(batch) + "/tokens:" + std::to_string(tokens) +
           "/page:" + std::to_string(page_tokens) + "/queries:" + std::to_string(queries) +
           (is_ragged ? "/ragged" : "") + (layout == Layout::token_major ? "/layout:token_major" : "");
  }
};

constexpr Case kCases[] = {
    {64, 8, 64, 131072, 64, 1, false},
    {64, 8, 64, 131072, 16, 1, false},
    {64, 8, 8, 131072, 64, 1, false},
    {64, 8, 8, 131072, 16, 1, false},
    {64, 8, 1, 1048576, 64, 1, false},
    {64, 8, 1, 131072, 64, 1, false},
    {64, 8, 64, 131072, 64, 1, true},
    {64, 8, 8, 131072, 64, 4, false},
    {64, 8, 8, 8192, 64, 1, false},
    {64, 8, 1, 8192, 64, 1, false},
    {64, 8, 64, 8192, 64, 1, false},
    {32, 8, 8, 131072, 64, 1, false},
    {128, 8, 8, 131072, 64, 1, false},
    {64, 8, 64, 131072, 64, 1, false, Layout::token_major},
    {64, 8, 64, 131072, 16, 1, false, Layout::token_major},
    {64, 8, 8, 131072, 64, 1, false, Layout::token_major},
    {64, 8, 8, 131072, 16, 1, false, Layout::token_major},
    {64, 8, 8, 131072, 1, 1, false, Layout::token_major},
    {64, 8, 1, 131072, 16, 1, false, Layout::token_major},
    {64, 8, 64, 131072, 16, 1, true, Layout::token_major},
    {64, 8, 8, 131072, 16, 4, false, Layout::token_major},
    {64, 8, 8, 8192, 16, 1, false, Layout::token_major},
    {64, 8, 1, 8192, 16, 1, false, Layout::token_major},
};

constexpr std::int64_t kDim = 128;
constexpr std::size_t kColdBytes = std::size_t{2} << 30;  ///< read between two readings of the same page

template <class T>
cuda::Buffer on_device(const std::vector<T>& values) {
  cuda::Buffer buffer(values.size() * sizeof(T));
  const cuda::Stream stream = cuda::Stream::create();
  const cuda::Operators<bf16> operators;
  operators.upload(buffer.data(), values.data(), buffer.size_bytes(), stream);
  operators.synchronize(stream);
  return buffer;
}

template <class T>
std::vector<T> on_host(const cuda::Buffer& buffer) {
  std::vector<T> values(buffer.size_bytes() / sizeof(T));
  const cuda::Stream stream = cuda::Stream::create();
  const cuda::Operators<bf16> operators;
  operators.download(values.data(), buffer.data(), buffer.size_bytes(), stream);
  operators.synchronize(stream);
  return values;
}

/// A view of the pool, without a page table.
KvView view_of(const cuda::Buffer& pool, const Case& c, std::int64_t pages) {
  if (c.layout == Layout::head_major)
    return KvView::of_pool(pool.data(),
                           KvFormat::head_major(DType::bf16, c.kv_heads, kDim, kDim, c.page_tokens), pages);
  KvView kv;
  kv.format = KvFormat::token_major(DType::bf16, c.kv_heads, kDim, kDim, c.page_tokens);
  kv.num_pages = pages;
  kv.k = pool.data();
  kv.v = pool.data() + pool.size_bytes() / 2;
  return kv;
}

void bench_partial_attention(benchmark::State& state, const Case& c) {
  std::mt19937 random(std::random_device{}());
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(c.batch), c.tokens);
  if (c.is_ragged) {
    for (auto& length : lengths) length = std::uniform_int_distribution<std::int64_t>(1, c.tokens)(random);
  }
  const std::int64_t max_pages = (c.tokens + c.page_tokens - 1) / c.page_tokens;
  const std::int64_t page_elements = 2 * c.kv_heads * c.page_tokens * kDim;
  std::int64_t bytes = 0;
  std::int64_t batch_pages = 0;
  for (const std::int64_t length : lengths) {
    bytes += length * 2 * c.kv_heads * kDim * 2;
    batch_pages += (length + c.page_tokens - 1) / c.page_tokens;
  }
  // Several batches of sequences take turns, so that none finds its KV in the L2 cache.
  const std::int64_t turns = 1 + static_cast<std::int64_t>(kColdBytes) / bytes;
  const std::int64_t pages = turns * batch_pages;
  const cuda::Operators<bf16> operators;
  const cuda::Stream stream = operators.create_stream();
  cuda::Buffer pool(static_cast<std::size_t>(pages * page_elements) * 2);
  cuda::bench::launch_fill_bf16(pool.data(), pool.size_bytes() / 2, random(), stream.handle());

  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::int32_t> table(static_cast<std::size_t>(turns * c.batch * max_pages), 0);
  std::size_t next = 0;
  for (std::int64_t turn = 0; turn < turns; ++turn) {
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const std::int64_t count = (lengths[static_cast<std::size_t>(b)] + c.page_tokens - 1) / c.page_tokens;
      for (std::int64_t i = 0; i < count; ++i)
        table[static_cast<std::size_t>((turn * c.batch + b) * max_pages + i)] = order[next++];
    }
  }
  std::vector<std::int32_t> slots(static_cast<std::size_t>(turns * c.batch));
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int64_t> positions;
  for (const std::int64_t length : lengths) {
    for (std::int64_t q = 0; q < c.queries; ++q)
      positions.push_back(std::max<std::int64_t>(0, length - c.queries + q));
    offsets.push_back(static_cast<std::int32_t>(positions.size()));
  }
  const auto tokens = static_cast<std::int64_t>(positions.size());
  const cuda::Buffer table_at = on_device(table);
  const cuda::Buffer slots_at = on_device(slots);
  const cuda::Buffer offsets_at = on_device(offsets);
  const cuda::Buffer positions_at = on_device(positions);
  cuda::Buffer q(static_cast<std::size_t>(tokens * c.query_heads * kDim) * 2);
  cuda::bench::launch_fill_bf16(q.data(), q.size_bytes() / 2, random(), stream.handle());
  cuda::Buffer out(q.size_bytes());
  cuda::Buffer lse(static_cast<std::size_t>(tokens * c.query_heads) * sizeof(float));
  cuda::Buffer workspace(operators.partial_attention_workspace_bytes(tokens, c.query_heads, kDim, kDim));

  const auto arguments = [&]<class T>(const cuda::Buffer& queries, const cuda::Buffer& result,
                                      const cuda::Buffer& result_lse, std::int64_t turn, T*) {
    PartialAttentionArgs<T> args;
    args.q = {reinterpret_cast<const T*>(queries.data()), {tokens, c.query_heads, kDim}};
    args.batch = {offsets, reinterpret_cast<const std::int32_t*>(offsets_at.data()),
                  reinterpret_cast<const std::int64_t*>(positions_at.data()),
                  reinterpret_cast<const std::int32_t*>(slots_at.data()) + turn * c.batch};
    args.kv = view_of(pool, c, pages);
    args.kv.max_pages = max_pages;
    args.kv.page_table = reinterpret_cast<const std::int32_t*>(table_at.data());
    args.sink.out = {reinterpret_cast<T*>(result.data()), {tokens, c.query_heads, kDim}};
    args.sink.lse = {reinterpret_cast<float*>(result_lse.data()), {tokens, c.query_heads}};
    args.scale = 1.0f / std::sqrt(static_cast<float>(kDim)) * 4.0f;
    args.workspace = {workspace.data(), workspace.size_bytes()};
    return args;
  };
  const int launches = static_cast<int>(std::clamp<std::int64_t>(turns, 1, 20));
  double read = 0.0;
  double us = 0.0;
  for (auto _ : state) {
    const std::size_t read_bytes = std::min(pool.size_bytes() / 16 * 16, std::size_t{8} << 30);
    warm_up(pool.data(), read_bytes, stream);
    read = measure_read(pool.data(), read_bytes, stream);
    us = time_launches(stream, launches, 15, [&](int i) {
      operators.partial_attention(arguments(q, out, lse, i % turns, static_cast<bf16*>(nullptr)), stream);
    });
    state.SetIterationTime(us * 1e-6);
  }

  // The portable f32 kernel over the same cache.
  operators.partial_attention(arguments(q, out, lse, 0, static_cast<bf16*>(nullptr)), stream);
  operators.synchronize(stream);
  const cuda::Operators<float> exact;
  std::vector<float> q_values;
  for (const bf16 x : on_host<bf16>(q)) q_values.push_back(static_cast<float>(x));
  const cuda::Buffer q_exact = on_device(q_values);
  const cuda::Buffer out_exact(q_exact.size_bytes());
  const cuda::Buffer lse_exact(lse.size_bytes());
  exact.partial_attention(arguments(q_exact, out_exact, lse_exact, 0, static_cast<float*>(nullptr)), stream);
  exact.synchronize(stream);
  const auto expected = on_host<float>(out_exact);
  const auto got = on_host<bf16>(out);
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(static_cast<float>(got[i])) - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  const double error = std::sqrt(difference / norm);
  double lse_error = 0.0;
  const auto expected_lse = on_host<float>(lse_exact);
  const auto got_lse = on_host<float>(lse);
  for (std::size_t i = 0; i < expected_lse.size(); ++i)
    lse_error = std::max(lse_error, std::abs(double{expected_lse[i]} - got_lse[i]));
  state.counters["us"] = us;
  state.counters["bytes/s"] = static_cast<double>(bytes) / us * 1e6;
  state.counters["read_bytes/s"] = read;
  state.counters["%_of_read"] = 100.0 * static_cast<double>(bytes) / us * 1e6 / read;
  state.counters["error"] = error;
  state.counters["lse_error"] = lse_error;
  if (!(error < 1e-2 && lse_error < 1e-3)) {
    state.SkipWithError(
        ("the result is wrong by " + std::to_string(error) + ", lse by " + std::to_string(lse_error))
            .c_str());
  }
}

const int kRegistered = [] {
  for (const Case& c : kCases) {
    benchmark::RegisterBenchmark(c.name().c_str(),
                                 [&c](benchmark::State& state) { bench_partial_attention(state, c); })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMicrosecond);
  }
  return 0;
}();

}  // namespace
}  // namespace helix::bench
