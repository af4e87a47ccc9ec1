// SPDX-License-Identifier: Apache-2.0
// partial_attention on a GPU: bf16, head size 128, out and log-sum-exp, KV in permuted pages, cold caches, in
// Helix's layout and in a token-major one as other engines keep it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/backend.hpp>

#include "device_data.hpp"
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
  std::int64_t tokens;  ///< Length of each sequence; ragged: at most.
  std::int64_t page_tokens;
  std::int64_t queries;  ///< Query tokens a sequence.
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

/// Tokens of each sequence.
std::vector<std::int64_t> lengths_of(const Case& c, std::mt19937& random) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(c.batch), c.tokens);
  if (c.is_ragged) {
    for (auto& length : lengths) length = std::uniform_int_distribution<std::int64_t>(1, c.tokens)(random);
  }
  return lengths;
}

/// Pages of sequences with these lengths.
std::int64_t pages_of(const Case& c, const std::vector<std::int64_t>& lengths) {
  std::int64_t pages = 0;
  for (const std::int64_t length : lengths) pages += (length + c.page_tokens - 1) / c.page_tokens;
  return pages;
}

/// One case on the device: queries, a pool of several batches of sequences that take turns, so that none
/// finds its KV in the L2 cache, and its page table.
class Workload {
 public:
  Workload(const Case& c, std::mt19937& random)
      : case_(c),
        lengths_(lengths_of(c, random)),
        kv_bytes_(std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0}) * 2 * c.kv_heads * kDim *
                  2),
        turns_(1 + static_cast<std::int64_t>(kColdBytes) / kv_bytes_),
        pages_(turns_ * pages_of(c, lengths_)),
        pool_(random_bf16(pages_ * 2 * c.kv_heads * c.page_tokens * kDim, random())),
        table_at_(on_device(operators_, page_table(random))) {
    std::vector<std::int32_t> slots(static_cast<std::size_t>(turns_ * c.batch));
    std::iota(slots.begin(), slots.end(), 0);
    std::vector<std::int64_t> positions;
    for (const std::int64_t length : lengths_) {
      for (std::int64_t q = 0; q < c.queries; ++q)
        positions.push_back(std::max<std::int64_t>(0, length - c.queries + q));
      offsets_.push_back(static_cast<std::int32_t>(positions.size()));
    }
    tokens_ = std::ssize(positions);
    slots_at_ = on_device(operators_, slots);
    offsets_at_ = on_device(operators_, offsets_);
    positions_at_ = on_device(operators_, positions);
    q_ = random_bf16(tokens_ * c.query_heads * kDim, random());
    workspace_ =
        operators_.allocate(operators_.partial_attention_workspace_bytes(tokens_, c.query_heads, kDim, kDim));
  }

  const cuda::Operators<bf16>& operators() const { return operators_; }
  const cuda::Buffer& pool() const { return pool_; }
  const cuda::Buffer& q() const { return q_; }
  std::int64_t turns() const { return turns_; }
  /// Elements of q and of out, of all turns alike.
  std::int64_t out_elements() const { return tokens_ * case_.query_heads * kDim; }
  std::int64_t lse_elements() const { return tokens_ * case_.query_heads; }
  /// Bytes of K and V that one launch reads.
  double kv_bytes() const { return static_cast<double>(kv_bytes_); }

  /// One launch over the sequences of `turn`; T: the type of q and out.
  template <class T>
  PartialAttentionArgs<T> arguments(const cuda::Buffer& q, const cuda::Buffer& out, const cuda::Buffer& lse,
                                    std::int64_t turn) const {
    PartialAttentionArgs<T> args;
    args.q = {reinterpret_cast<const T*>(q.data()), {tokens_, case_.query_heads, kDim}};
    args.batch = {offsets_, reinterpret_cast<const std::int32_t*>(offsets_at_.data()),
                  reinterpret_cast<const std::int64_t*>(positions_at_.data()),
                  reinterpret_cast<const std::int32_t*>(slots_at_.data()) + turn * case_.batch};
    args.kv = view_of(pool_, case_, pages_);
    args.kv.max_pages = max_pages();
    args.kv.page_table = reinterpret_cast<const std::int32_t*>(table_at_.data());
    args.sink.out = {reinterpret_cast<T*>(out.data()), {tokens_, case_.query_heads, kDim}};
    args.sink.lse = {reinterpret_cast<float*>(lse.data()), {tokens_, case_.query_heads}};
    args.scale = 1.0f / std::sqrt(static_cast<float>(kDim)) * 4.0f;
    args.workspace = {workspace_.data(), workspace_.size_bytes()};
    return args;
  }

 private:
  std::int64_t max_pages() const { return (case_.tokens + case_.page_tokens - 1) / case_.page_tokens; }

  /// [turns * batch, max_pages]: pages in random order.
  std::vector<std::int32_t> page_table(std::mt19937& random) const {
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::int32_t> table(static_cast<std::size_t>(turns_ * case_.batch * max_pages()), 0);
    auto next = order.begin();
    for (std::int64_t row = 0; row < turns_ * case_.batch; ++row) {
      const std::int64_t length = lengths_[static_cast<std::size_t>(row % case_.batch)];
      const std::int64_t count = (length + case_.page_tokens - 1) / case_.page_tokens;
      std::copy_n(next, count, table.begin() + row * max_pages());
      next += count;
    }
    return table;
  }

  cuda::Operators<bf16> operators_;
  Case case_;
  std::vector<std::int64_t> lengths_;
  std::int64_t kv_bytes_;
  std::int64_t turns_;
  std::int64_t pages_;
  std::int64_t tokens_ = 0;
  std::vector<std::int32_t> offsets_{0};
  cuda::Buffer pool_, table_at_, slots_at_, offsets_at_, positions_at_, q_, workspace_;
};

/// How far a result is from the portable f32 kernel's over the same cache.
struct Errors {
  double out;  ///< Relative, Euclidean.
  double lse;  ///< The largest difference.
};

/// Errors of `out` and `lse`, which the first turn must have left.
Errors errors_of(const Workload& work, const cuda::Buffer& out, const cuda::Buffer& lse) {
  const cuda::Operators<float> exact;
  const cuda::Stream stream = exact.create_stream();
  const auto q = on_host<bf16>(exact, work.q().data(), work.out_elements());
  const cuda::Buffer q_exact = on_device(exact, std::vector<float>(q.begin(), q.end()));
  const cuda::Buffer out_exact(q_exact.size_bytes());
  const cuda::Buffer lse_exact(lse.size_bytes());
  exact.partial_attention(work.arguments<float>(q_exact, out_exact, lse_exact, 0), stream);
  exact.synchronize(stream);
  const auto expected_lse = on_host<float>(exact, lse_exact.data(), work.lse_elements());
  const auto got_lse = on_host<float>(exact, lse.data(), work.lse_elements());
  Errors errors{relative_error(on_host<bf16>(exact, out.data(), work.out_elements()),
                               on_host<float>(exact, out_exact.data(), work.out_elements())),
                0.0};
  for (std::size_t i = 0; i < expected_lse.size(); ++i)
    errors.lse = std::max(errors.lse, std::abs(double{expected_lse[i]} - got_lse[i]));
  return errors;
}

void bench_partial_attention(benchmark::State& state, const Case& c) {
  std::mt19937 random(std::random_device{}());
  const Workload work(c, random);
  const cuda::Operators<bf16>& operators = work.operators();
  const cuda::Stream stream = operators.create_stream();
  const cuda::Buffer out(work.q().size_bytes());
  const cuda::Buffer lse(static_cast<std::size_t>(work.lse_elements()) * sizeof(float));
  const auto attend = [&](std::int64_t turn) {
    operators.partial_attention(work.arguments<bf16>(work.q(), out, lse, turn), stream);
  };
  const int launches = static_cast<int>(std::clamp<std::int64_t>(work.turns(), 1, 20));
  double read = 0.0;
  double us = 0.0;
  for (auto _ : state) {
    const std::size_t read_bytes = std::min(work.pool().size_bytes() / 16 * 16, std::size_t{8} << 30);
    warm_up(work.pool().data(), read_bytes, stream);
    read = measure_read(work.pool().data(), read_bytes, stream);
    us = time_launches(stream, launches, 15, [&](int i) { attend(i % work.turns()); });
    state.SetIterationTime(us * 1e-6);
  }
  attend(0);
  operators.synchronize(stream);
  const Errors errors = errors_of(work, out, lse);
  state.counters["us"] = us;
  state.counters["bytes/s"] = work.kv_bytes() / us * 1e6;
  state.counters["read_bytes/s"] = read;
  state.counters["%_of_read"] = 100.0 * work.kv_bytes() / us * 1e6 / read;
  state.counters["error"] = errors.out;
  state.counters["lse_error"] = errors.lse;
  if (!(errors.out < 1e-2 && errors.lse < 1e-3)) {
    state.SkipWithError(
        ("the result is wrong by " + std::to_string(errors.out) + ", lse by " + std::to_string(errors.lse))
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
