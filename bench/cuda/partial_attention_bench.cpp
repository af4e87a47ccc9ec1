// SPDX-License-Identifier: Apache-2.0
// partial_attention on a GPU: out and log-sum-exp for decoding, draft tokens and prefill. KV has several
// types and head sizes, in permuted pages and with cold caches, in Helix's layouts and in a token-major
// layout as in other engines.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/backend.hpp>

#include "attention_case.hpp"
#include "cases.hpp"
#include "cuda/ceilings/exact_attention.hpp"
#include "device_data.hpp"
#include "timing.hpp"

namespace helix::bench {
namespace {

using Case = AttentionCase;
using Layout = AttentionLayout;

/// Whether the case is bound by products rather than memory, so that its rate is in FLOP/s.
bool is_prefill(const Case& c) {
  return c.queries > 64;
}

constexpr Case mla(Case c) {
  c.kv_heads = 1;
  c.layout = Layout::latent;
  c.head_dim = 576;
  c.value_dim = 512;
  return c;
}

constexpr Case prefill(std::int64_t query_heads, std::int64_t chunk, std::int64_t context,
                       std::int64_t dim = 128) {
  return {.query_heads = query_heads, .tokens = context + chunk, .queries = chunk, .head_dim = dim};
}

/// The same case with the kernels that run on every GPU.
constexpr Case portable(Case c) {
  c.is_portable = true;
  return c;
}

constexpr DType kFp8 = DType::fp8_e4m3;
constexpr DType kMixed = DType::fp8_ds_mla;

/// The same case over e4m3.
constexpr Case e4m3(Case c) {
  c.kv_dtype = kFp8;
  return c;
}

constexpr Layout kTokenMajor = Layout::token_major;

constexpr Case kCases[] = {
    // Decoding.
    {.batch = 64, .tokens = 131072},
    {.batch = 64, .tokens = 131072, .page_tokens = 16},
    {.batch = 8, .tokens = 131072},
    {.batch = 8, .tokens = 131072, .page_tokens = 16},
    {.tokens = 1048576},
    {.tokens = 131072},
    {.batch = 64, .tokens = 131072, .is_ragged = true},
    {.batch = 8, .tokens = 8192},
    {.tokens = 8192},
    {.tokens = 8192, .page_tokens = 16},
    {.batch = 64, .tokens = 8192},
    {.query_heads = 32, .batch = 8, .tokens = 131072},
    {.query_heads = 128, .batch = 8, .tokens = 131072},
    // Many short sequences.
    {.query_heads = 32, .batch = 256, .tokens = 64},
    {.query_heads = 32, .batch = 256, .tokens = 256},
    {.query_heads = 8, .kv_heads = 1, .batch = 256, .tokens = 64},
    {.query_heads = 8, .kv_heads = 1, .batch = 256, .tokens = 256},
    e4m3({.query_heads = 32, .batch = 256, .tokens = 64}),
    e4m3({.query_heads = 32, .batch = 256, .tokens = 256}),
    e4m3({.query_heads = 8, .kv_heads = 1, .batch = 256, .tokens = 64}),
    e4m3({.query_heads = 8, .kv_heads = 1, .batch = 256, .tokens = 256}),
    // Token-major pages.
    {.batch = 64, .tokens = 131072, .layout = kTokenMajor},
    {.batch = 64, .tokens = 131072, .page_tokens = 16, .layout = kTokenMajor},
    {.batch = 8, .tokens = 131072, .layout = kTokenMajor},
    {.batch = 8, .tokens = 131072, .page_tokens = 16, .layout = kTokenMajor},
    {.batch = 8, .tokens = 131072, .page_tokens = 1, .layout = kTokenMajor},
    {.tokens = 131072, .page_tokens = 16, .layout = kTokenMajor},
    {.batch = 64, .tokens = 131072, .page_tokens = 16, .is_ragged = true, .layout = kTokenMajor},
    {.batch = 8, .tokens = 131072, .page_tokens = 16, .queries = 4, .layout = kTokenMajor},
    {.batch = 8, .tokens = 8192, .page_tokens = 16, .layout = kTokenMajor},
    {.tokens = 8192, .layout = kTokenMajor},
    {.tokens = 8192, .page_tokens = 16, .layout = kTokenMajor},
    {.tokens = 8192, .page_tokens = 1, .layout = kTokenMajor},
    // Other types and head sizes.
    {.batch = 64, .tokens = 131072, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .kv_dtype = kFp8},
    {.tokens = 1048576, .kv_dtype = kFp8},
    {.tokens = 131072, .kv_dtype = kFp8},
    {.batch = 64, .tokens = 131072, .is_ragged = true, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 8192, .kv_dtype = kFp8},
    {.tokens = 8192, .kv_dtype = kFp8},
    {.batch = 64, .tokens = 8192, .kv_dtype = kFp8},
    {.query_heads = 32, .batch = 8, .tokens = 131072, .kv_dtype = kFp8},
    {.query_heads = 8, .batch = 8, .tokens = 131072, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .head_dim = 64, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .head_dim = 256, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .page_tokens = 16, .layout = kTokenMajor, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .queries = 4, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .queries = 8, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .queries = 16, .kv_dtype = kFp8},
    {.batch = 8, .tokens = 131072, .kv_dtype = DType::f16},
    {.batch = 8, .tokens = 65536, .head_dim = 64},
    {.batch = 8, .tokens = 65536, .head_dim = 80},
    {.batch = 8, .tokens = 65536, .head_dim = 96},
    {.batch = 8, .tokens = 65536, .head_dim = 112},
    {.batch = 8, .tokens = 65536, .head_dim = 256},
    {.batch = 8, .tokens = 65536, .head_dim = 192, .value_dim = 128},
    // More MLA cases, besides those of kLatentCases.
    mla({.query_heads = 128, .tokens = 1048576}),
    mla({.query_heads = 128, .batch = 64, .tokens = 131072, .is_ragged = true}),
    mla({.query_heads = 128, .batch = 8, .tokens = 131072, .kv_dtype = kFp8}),
    mla({.query_heads = 128, .batch = 8, .tokens = 8192, .kv_dtype = kFp8}),
    mla({.query_heads = 64, .batch = 8, .tokens = 131072, .kv_dtype = kFp8}),
    mla({.query_heads = 16, .batch = 64, .tokens = 131072, .kv_dtype = kFp8}),
    mla({.query_heads = 128, .batch = 8, .tokens = 131072, .kv_dtype = kMixed}),
    mla({.query_heads = 128, .batch = 8, .tokens = 8192, .kv_dtype = kMixed}),
    mla({.query_heads = 16, .batch = 64, .tokens = 131072, .kv_dtype = kMixed}),
    mla({.query_heads = 16, .batch = 1, .tokens = 512}),
    mla({.query_heads = 16, .batch = 8, .tokens = 512}),
    mla({.query_heads = 16, .batch = 64, .tokens = 512}),
    mla({.query_heads = 16, .batch = 1, .tokens = 2048}),
    mla({.query_heads = 16, .batch = 8, .tokens = 2048}),
    mla({.query_heads = 128, .batch = 8, .tokens = 131072, .page_tokens = 1}),
    mla({.query_heads = 16, .batch = 64, .tokens = 32768, .page_tokens = 1}),
    mla({.query_heads = 16, .tokens = 8192, .page_tokens = 1}),
    // Draft tokens.
    {.batch = 1, .tokens = 8192, .queries = 4},
    {.batch = 8, .tokens = 8192, .queries = 4},
    {.batch = 8, .tokens = 131072, .queries = 4},
    {.batch = 8, .tokens = 131072, .queries = 8},
    {.batch = 8, .tokens = 131072, .queries = 16},
    // Prefill of a chunk after a context.
    prefill(32, 4096, 0),
    prefill(32, 4096, 28672),
    prefill(32, 4096, 126976),
    prefill(32, 512, 32768),
    prefill(32, 2048, 30720),
    prefill(64, 4096, 0),
    prefill(64, 4096, 28672),
    prefill(64, 4096, 126976),
    prefill(64, 512, 32768),
    prefill(64, 2048, 30720),
    e4m3(prefill(32, 4096, 0)),
    e4m3(prefill(32, 4096, 28672)),
    e4m3(prefill(32, 512, 32768)),
    e4m3(prefill(64, 4096, 28672)),
    e4m3(prefill(32, 4096, 28672, 64)),
    e4m3(prefill(32, 4096, 28672, 256)),
    prefill(32, 4096, 0, 64),
    prefill(32, 4096, 28672, 64),
    prefill(64, 4096, 0, 64),
    prefill(64, 4096, 28672, 64),
    {.query_heads = 16, .kv_heads = 16, .tokens = 4096, .queries = 4096, .head_dim = 192, .value_dim = 128},
    {.query_heads = 16, .kv_heads = 16, .tokens = 32768, .queries = 4096, .head_dim = 192, .value_dim = 128},
    prefill(32, 4096, 28672, 80),
    {.query_heads = 32, .kv_heads = 32, .tokens = 32768, .queries = 4096, .head_dim = 96},
    prefill(32, 4096, 28672, 112),
    {.query_heads = 16, .kv_heads = 8, .tokens = 32768, .queries = 4096, .head_dim = 256},
    // Batches of prompts, and a prompt's chunk beside sequences that decode.
    {.query_heads = 32, .batch = 8, .tokens = 1024, .queries = 1024},
    {.query_heads = 32, .batch = 16, .tokens = 256, .queries = 256},
    {.query_heads = 32, .batch = 8, .tokens = 4096, .queries = 4096, .is_ragged = true},
    {.query_heads = 32, .batch = 64, .tokens = 4096, .prompt = 512},
    e4m3({.query_heads = 32, .batch = 8, .tokens = 1024, .queries = 1024}),
    e4m3({.query_heads = 32, .batch = 64, .tokens = 4096, .prompt = 512}),
    // Kernels that run on every GPU.
    portable({.batch = 64, .tokens = 8192}),
    portable({.batch = 8, .tokens = 131072}),
    portable({.tokens = 131072}),
    portable({.tokens = 8192}),
    portable({.batch = 8, .tokens = 131072, .page_tokens = 16, .layout = kTokenMajor}),
    portable({.batch = 8, .tokens = 131072, .kv_dtype = kFp8}),
    portable({.batch = 8, .tokens = 131072, .kv_dtype = DType::f16}),
    portable({.batch = 8, .tokens = 65536, .head_dim = 64}),
    portable({.batch = 8, .tokens = 65536, .head_dim = 256}),
    portable({.batch = 8, .tokens = 65536, .head_dim = 192, .value_dim = 128}),
    portable({.batch = 8, .tokens = 131072, .queries = 4}),
    portable(prefill(32, 4096, 0)),
    portable(prefill(32, 4096, 28672)),
    portable(prefill(32, 512, 32768)),
    portable(prefill(32, 4096, 28672, 64)),
    portable(prefill(32, 4096, 28672, 256)),
    portable(mla({.query_heads = 128, .batch = 8, .tokens = 8192})),
    portable(mla({.query_heads = 128, .batch = 8, .tokens = 131072})),
    portable(mla({.query_heads = 16, .batch = 64, .tokens = 32768})),
    portable(mla({.query_heads = 128, .batch = 8, .tokens = 131072, .kv_dtype = kFp8})),
};

/// MLA over bf16 latents, for several numbers of query heads, sequences, lengths and query tokens.
constexpr std::array<Case, 36> latent_cases() {
  std::array<Case, 36> cases{};
  std::size_t next = 0;
  for (const std::int64_t query_heads : {128, 64, 16})
    for (const std::int64_t batch : {1, 8, 64})
      for (const std::int64_t tokens : {8192, 131072})
        for (const std::int64_t queries : {1, 2})
          cases[next++] =
              mla({.query_heads = query_heads, .batch = batch, .tokens = tokens, .queries = queries});
  return cases;
}

constexpr auto kLatentCases = latent_cases();

/// Size of the pool, whose parts launches read in turn.
constexpr std::int64_t kColdBytes = std::int64_t{2} << 30;

/// Random K and V. Rows that contain scales are those of DType::fp8_ds_mla.
cuda::Buffer random_pool(const Case& c, std::int64_t pages, std::mt19937::result_type seed) {
  const std::int64_t bytes = pages * c.page_bytes();
  if (c.kv_dtype != DType::fp8_ds_mla)
    return random_elements(c.kv_dtype, bytes / static_cast<std::int64_t>(size_bytes(c.kv_dtype)), seed);
  const std::int64_t rows = pages * c.page_tokens;
  cuda::Buffer pool(static_cast<std::size_t>(bytes));
  cuda::bench::fill_mixed_rows(pool.data(), rows, c.head_dim, c.value_dim, seed);
  return pool;
}

/// One case on the device: queries, a page table, and a pool for several batches of sequences that take
/// turns, so that none finds its KV in the L2 cache. T is the type of q and out.
template <class T>
class Workload {
 public:
  Workload(const Case& c, std::mt19937& random)
      : case_(c),
        batch_(c.draw(random)),
        turns_(c.turns(batch_, kColdBytes)),
        pages_(turns_ * batch_.num_pages),
        pool_(random_pool(c, pages_, random())),
        table_at_(on_device(operators_, c.page_tables(batch_, turns_, random))),
        scales_at_(on_device(operators_, scales(random))) {
    if (c.is_portable) operators_.set_kernel_target(cuda::KernelTarget::any_gpu);
    std::vector<std::int32_t> slots(static_cast<std::size_t>(turns_ * c.batch));
    std::iota(slots.begin(), slots.end(), 0);
    tokens_ = std::ssize(batch_.positions);
    slots_at_ = on_device(operators_, slots);
    offsets_at_ = on_device(operators_, batch_.query_offsets);
    positions_at_ = on_device(operators_, batch_.positions);
    q_ = random_elements(kDTypeOf<T>, tokens_ * c.query_heads * c.head_dim, random());
    workspace_ = operators_.allocate(
        operators_.partial_attention_workspace_bytes(tokens_, c.query_heads, c.head_dim, c.value_dim));
    out_ = cuda::Buffer(static_cast<std::size_t>(out_elements()) * sizeof(T));
    lse_ = cuda::Buffer(static_cast<std::size_t>(rows()) * sizeof(float));
  }

  const cuda::Operators<T>& operators() const { return operators_; }
  const cuda::Buffer& pool() const { return pool_; }
  const cuda::Buffer& out() const { return out_; }
  const cuda::Buffer& lse() const { return lse_; }
  std::int64_t turns() const { return turns_; }
  /// Rows of q, equal in all turns: query tokens times query heads.
  std::int64_t rows() const { return tokens_ * case_.query_heads; }
  std::int64_t out_elements() const { return rows() * case_.value_dim; }
  /// Bytes of K and V that one launch reads.
  double kv_bytes() const { return static_cast<double>(batch_.kv_bytes); }
  double flops() const { return batch_.flops; }

  /// One launch over the sequences of `turn`.
  PartialAttentionArgs<T> arguments(std::int64_t turn) const {
    PartialAttentionArgs<T> args;
    args.q = {reinterpret_cast<const T*>(q_.data()), {tokens_, case_.query_heads, case_.head_dim}};
    args.batch = {batch_.query_offsets, reinterpret_cast<const std::int32_t*>(offsets_at_.data()),
                  reinterpret_cast<const std::int64_t*>(positions_at_.data()),
                  reinterpret_cast<const std::int32_t*>(slots_at_.data()) + turn * case_.batch};
    args.kv = case_.view(pool_.data(), pages_);
    args.kv.max_pages = case_.max_pages();
    args.kv.page_table = reinterpret_cast<const std::int32_t*>(table_at_.data());
    if (case_.kv_dtype == kFp8) {
      args.kv.k_scale = reinterpret_cast<const float*>(scales_at_.data());
      if (case_.layout != Layout::latent) args.kv.v_scale = args.kv.k_scale + case_.kv_heads;
    }
    args.target.out = {reinterpret_cast<T*>(out_.data()), {tokens_, case_.query_heads, case_.value_dim}};
    args.target.lse = {reinterpret_cast<float*>(lse_.data()), {tokens_, case_.query_heads}};
    args.scale = 1.0f / std::sqrt(static_cast<float>(case_.head_dim)) * 4.0f;
    args.workspace = {workspace_.data(), workspace_.size_bytes()};
    return args;
  }

 private:
  /// Scales of an e4m3 cache: of K, then of V.
  std::vector<float> scales(std::mt19937& random) const {
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    std::vector<float> values(static_cast<std::size_t>(2 * case_.kv_heads));
    for (float& x : values) x = uniform(random);
    return values;
  }

  cuda::Operators<T> operators_;
  Case case_;
  AttentionBatch batch_;
  std::int64_t turns_;
  std::int64_t pages_;
  std::int64_t tokens_ = 0;
  cuda::Buffer pool_, table_at_, scales_at_, slots_at_, offsets_at_, positions_at_, q_, workspace_, out_,
      lse_;
};

/// Error of a result, compared with sums in double precision over the same cache.
struct Errors {
  double out;  ///< Relative, Euclidean, over all compared rows.
  double lse;  ///< The largest difference.
};

/// Rows that errors_of() compares: the first, the last, and random ones.
std::vector<std::int64_t> compared_rows(std::int64_t rows, std::mt19937& random) {
  constexpr std::size_t kCount = 24;
  std::vector<std::int64_t> compared{0, rows - 1};
  while (compared.size() < kCount)
    compared.push_back(std::uniform_int_distribution<std::int64_t>(0, rows - 1)(random));
  return compared;
}

/// Errors of the first turn's out and lse. Every element of them must have been written.
template <class T>
Errors errors_of(const Workload<T>& work, const Case& c, cuda::Stream stream, std::mt19937& random) {
  const cuda::Operators<T>& operators = work.operators();
  for (const cuda::Buffer* buffer : {&work.out(), &work.lse()}) {
    const std::vector<std::uint8_t> nan(buffer->size_bytes(), 0xff);
    operators.upload(buffer->data(), nan.data(), nan.size(), stream);
    operators.synchronize(stream);
  }
  operators.partial_attention(work.arguments(0), stream);
  const auto rows = compared_rows(work.rows(), random);
  const cuda::Buffer rows_at = on_device(operators, rows);
  const auto count = std::ssize(rows);
  const cuda::Buffer out_at(static_cast<std::size_t>(count * c.value_dim) * sizeof(double));
  const cuda::Buffer lse_at(static_cast<std::size_t>(count) * sizeof(double));
  cuda::bench::launch_exact_attention(
      work.arguments(0),
      {reinterpret_cast<const std::int64_t*>(rows_at.data()), static_cast<int>(count),
       reinterpret_cast<double*>(out_at.data()), reinterpret_cast<double*>(lse_at.data())},
      stream.handle());
  operators.synchronize(stream);
  const auto right_out = on_host<double>(operators, out_at.data(), count * c.value_dim);
  const auto right_lse = on_host<double>(operators, lse_at.data(), count);
  const auto got_out = on_host<T>(operators, work.out().data(), work.out_elements());
  const auto got_lse = on_host<float>(operators, work.lse().data(), work.rows());
  if (std::any_of(got_out.begin(), got_out.end(), [](T x) { return std::isnan(static_cast<float>(x)); }) ||
      std::any_of(got_lse.begin(), got_lse.end(), [](float x) { return std::isnan(x); }))
    return {HUGE_VAL, HUGE_VAL};
  Errors errors{0.0, 0.0};
  std::vector<T> compared_out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = got_out.begin() + rows[i] * c.value_dim;
    compared_out.insert(compared_out.end(), row, row + c.value_dim);
    errors.lse = std::max(errors.lse, std::abs(right_lse[i] - got_lse[static_cast<std::size_t>(rows[i])]));
  }
  errors.out = relative_error(compared_out, right_out);
  return errors;
}

/// Number of launches in a graph and of its replays: a quarter of a second in total if possible, and enough
/// launches that a replay finds cold caches.
struct Repeats {
  int launches;
  int replays;
};

template <class T>
Repeats repeats_of(const Workload<T>& work, cuda::Stream stream) {
  constexpr double kReplayUs = 20e3;
  const double us = time_launches(
      stream, 1, 3, [&](int) { work.operators().partial_attention(work.arguments(0), stream); });
  const auto most = std::min<std::int64_t>(
      work.turns(), std::max(20, cold_launches(static_cast<std::size_t>(work.kv_bytes()))));
  return {static_cast<int>(std::clamp<std::int64_t>(static_cast<std::int64_t>(kReplayUs / us), 1, most)),
          us > 2.0 * kReplayUs ? 5 : 15};
}

template <class T>
void bench_partial_attention(benchmark::State& state, const Case& c) {
  std::mt19937 random(kSeed);  // also for the lengths of ragged batches: equal in all runs
  const Workload<T> work(c, random);
  const cuda::Stream stream = work.operators().create_stream();
  ReadRates read;
  double us = 0.0;
  for (auto _ : state) {
    const std::size_t read_bytes = std::min(work.pool().size_bytes() / 16 * 16, std::size_t{8} << 30);
    warm_up(work.pool().data(), read_bytes, stream);
    read = measure_read(work.pool().data(), read_bytes, stream);
    const Repeats repeats = repeats_of(work, stream);
    us = time_launches(stream, repeats.launches, repeats.replays, [&](int i) {
      work.operators().partial_attention(work.arguments(i % work.turns()), stream);
    });
    state.SetIterationTime(us * 1e-6);
  }
  const Errors errors = errors_of(work, c, stream, random);
  state.counters["us"] = us;
  state.counters["flop/s"] = work.flops() / us * 1e6;
  report_reads(state, read);
  if (!is_prefill(c)) {
    state.counters["bytes/s"] = work.kv_bytes() / us * 1e6;
    state.counters["%_of_read"] = 100.0 * work.kv_bytes() / us * 1e6 / read.best();
  }
  state.counters["error"] = errors.out;
  state.counters["lse_error"] = errors.lse;
  if (!(errors.out < (c.kv_dtype == kFp8 || c.kv_dtype == kMixed ? 1.5e-2 : 3e-3) && errors.lse < 1e-3)) {
    state.SkipWithError(
        ("the result is wrong by " + std::to_string(errors.out) + ", lse by " + std::to_string(errors.lse))
            .c_str());
  }
}

void add(const Case& c) {
  register_case(c.name(), [c](benchmark::State& state) {
    if (c.kv_dtype == DType::f16) {
      bench_partial_attention<f16>(state, c);
    } else {
      bench_partial_attention<bf16>(state, c);
    }
  });
}

}  // namespace

void register_attention(const std::vector<AttentionCase>& cases) {
  for (const Case& c : cases) add(c);
}

void register_attention() {
  for (const Case& c : kCases) add(c);
  for (const Case& c : kLatentCases) add(c);
}

}  // namespace helix::bench
