// SPDX-License-Identifier: Apache-2.0
// partial_attention on the CPU. The cases of this program: one sequence, one query token, bf16 KV in permuted
// pages of 64 tokens. Eight KV heads of 1M tokens would take 4 GB, so that length has two, of groups as
// large.
#include "partial_attention_bench.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/foreign_kv.hpp>

#include "ceilings.hpp"
#include "exact_attention.hpp"
#include "support/worse.hpp"

namespace helix::bench {
namespace {

/// So much KV is read between two reads of the same, so that caches do not hold it.
constexpr std::int64_t kColdBytes = std::int64_t{128} << 20;
/// Operations after which products, and not memory, bound an iteration.
constexpr double kManyFlops = 5e9;

/// A case of this program, named for what it is.
struct NamedCase {
  const char* name;
  AttentionCase shape;
  int iterations;
  /// Whether KV lies in pools of FlashInfer's: NHD for K and V, latents and rope columns apart.
  bool is_foreign = false;
};

constexpr AttentionCase mha(std::int64_t tokens, std::int64_t kv_heads, std::int64_t group = 1) {
  return {.query_heads = kv_heads * group, .kv_heads = kv_heads, .tokens = tokens};
}

constexpr AttentionCase mla(std::int64_t query_heads, std::int64_t tokens) {
  return {.query_heads = query_heads,
          .kv_heads = 1,
          .tokens = tokens,
          .layout = AttentionLayout::latent,
          .head_dim = 576,
          .value_dim = 512};
}

constexpr std::int64_t kLong = 1 << 17;
constexpr std::int64_t kLongest = 1 << 20;
constexpr NamedCase kCases[] = {
    {"mha", mha(kLong, 8), 9},
    {"mha", mha(kLongest, 2), 7},
    {"gqa4", mha(kLong, 8, 4), 9},
    {"gqa4", mha(kLongest, 2, 4), 7},
    {"gqa8", mha(kLong, 8, 8), 9},
    {"gqa8", mha(kLongest, 2, 8), 7},
    {"mla128", mla(128, kLong), 5},
    {"mla128", mla(128, kLongest), 3},
    {"mla16", mla(16, kLong), 9},
    {"mha_nhd", mha(kLong, 8), 9, true},
    {"gqa8_nhd", mha(kLong, 8, 8), 9, true},
    {"mla16_split", mla(16, kLong), 9, true},
    {"mla128_split", mla(128, kLong), 5, true},
};

KvView flashinfer_view(const AttentionCase& c, std::byte* pool, std::int64_t num_pages) {
  if (c.layout == AttentionLayout::latent) {
    const std::int64_t latents = num_pages * c.page_tokens * c.value_dim;
    return flashinfer_mla_kv({.ckv = pool,
                              .kpe = pool + latents * static_cast<std::int64_t>(size_bytes(c.kv_dtype)),
                              .dtype = c.kv_dtype,
                              .num_pages = num_pages,
                              .page_size = c.page_tokens,
                              .head_dim_ckv = c.value_dim,
                              .head_dim_kpe = c.head_dim - c.value_dim});
  }
  return flashinfer_nhd_kv({.pool = pool,
                            .dtype = c.kv_dtype,
                            .num_pages = num_pages,
                            .page_size = c.page_tokens,
                            .num_kv_heads = c.kv_heads,
                            .head_dim = c.head_dim});
}

/// The kernel whose variants take turns before anything is timed; empty if the case has none, as rows that
/// are joined first.
std::string_view kernel_of(const AttentionCase& c, bool is_foreign) {
  const std::int64_t rows = c.query_heads / c.kv_heads;
  const bool are_joined =
      c.kv_dtype == DType::fp8_ds_mla || (is_foreign && c.layout == AttentionLayout::latent);
  if (c.queries > 1 || c.prompt > 1 || rows > 16 || are_joined) return "";
  switch (c.kv_dtype) {
    case DType::f32:
      return "attention.f32";
    case DType::f16:
      return "attention.f16";
    case DType::fp8_e4m3:
      return "attention.fp8";
    case DType::fp8_ds_mla:
    case DType::bf16:
      break;
  }
  return rows == 1 ? "attention.bf16.rows1" : rows <= 4 ? "attention.bf16.rows4" : "attention.bf16.rows8";
}

/// A case in memory: queries and, as sequences that take turns, several copies of a batch that would stay in
/// caches.
class Workload {
 public:
  Workload(const AttentionCase& c, bool is_foreign, int num_threads)
      : operators_(num_threads),
        stream_(operators_.create_stream()),
        batch_(c.draw(random_)),
        turns_(
            std::min(c.turns(batch_, kColdBytes), 1 + static_cast<std::int64_t>(kManyFlops / batch_.flops))),
        table_(c.page_tables(batch_, turns_, random_)) {
    const std::int64_t num_pages = turns_ * batch_.num_pages;
    slots_.resize(static_cast<std::size_t>(turns_ * c.batch));
    std::iota(slots_.begin(), slots_.end(), 0);
    pool_ = operators_.allocate(static_cast<std::size_t>(num_pages * c.page_bytes()));
    scales_.assign(static_cast<std::size_t>(c.kv_heads), 1.0f / 256);
    const auto tokens = std::ssize(batch_.positions);
    q_.resize(static_cast<std::size_t>(tokens * c.query_heads * c.head_dim));
    std::normal_distribution<float> normal;
    for (float& x : q_) x = normal(random_);
    out_.resize(static_cast<std::size_t>(tokens * c.query_heads * c.value_dim));
    lse_.resize(static_cast<std::size_t>(tokens * c.query_heads));
    workspace_.resize(
        operators_.partial_attention_workspace_bytes(tokens, c.query_heads, c.head_dim, c.value_dim));
    args_.q = {q_.data(), {tokens, c.query_heads, c.head_dim}};
    args_.kv =
        is_foreign ? flashinfer_view(c, pool_.data(), num_pages).whole() : c.view(pool_.data(), num_pages);
    args_.kv.page_table = table_.data();
    args_.kv.max_pages = c.max_pages();
    if (c.kv_dtype == DType::fp8_e4m3) {
      args_.kv.k_scale = scales_.data();
      if (c.layout != AttentionLayout::latent) args_.kv.v_scale = scales_.data();
    }
    args_.target.out = {out_.data(), {tokens, c.query_heads, c.value_dim}};
    args_.target.lse = {lse_.data(), {tokens, c.query_heads}};
    args_.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    args_.workspace = workspace_;
    for (const std::int32_t slot : slots_)
      fill(slot, batch_.lengths[static_cast<std::size_t>(slot % c.batch)]);
  }

  /// Batches that take turns; kv_bytes() and flops() are those of one.
  std::int64_t turns() const { return turns_; }
  double kv_bytes() const { return static_cast<double>(batch_.kv_bytes); }
  double flops() const { return batch_.flops; }
  std::span<const std::byte> pool() const { return {pool_.data(), pool_.size_bytes()}; }

  PartialAttentionArgs<float> arguments(std::int64_t turn) const {
    PartialAttentionArgs<float> args = args_;
    args.batch = {batch_.query_offsets, batch_.query_offsets.data(), batch_.positions.data(),
                  slots_.data() + turn * std::ssize(batch_.lengths)};
    return args;
  }
  void run(std::int64_t turn) const {
    operators_.partial_attention(arguments(turn), stream_);
    operators_.synchronize(stream_);
  }
  /// The largest error of the last result, which was that of `turn`, in the first and the last row.
  double error(std::int64_t turn) const {
    const PartialAttentionArgs<float> args = arguments(turn);
    return test::worse(error_of_row(args, 0, 0),
                       error_of_row(args, args.q.extent(0) - 1, args.q.extent(1) - 1));
  }

 private:
  /// Stores random K and V, uniform in (-1, 1), as the tokens of a sequence.
  void fill(std::int32_t slot, std::int64_t length) {
    constexpr std::int64_t kPiece = 4096;  // tokens
    const KvFormat& format = args_.kv.format;
    const auto random_rows = [&](std::int64_t columns) {
      std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
      std::vector<float> rows(
          static_cast<std::size_t>(std::min(kPiece, length) * format.num_heads * columns));
      for (float& x : rows) x = uniform(random_);
      return rows;
    };
    const std::vector<float> k = random_rows(format.head_dim);
    const std::vector<float> v = random_rows(format.is_latent ? 0 : format.value_dim);
    for (std::int64_t first = 0; first < length; first += kPiece) {
      const std::int64_t tokens = std::min(kPiece, length - first);
      WriteKvArgs<float> rows;
      rows.first_position = first;
      rows.sequence_slot = slot;
      rows.kv = args_.kv;
      rows.k = {k.data(), {tokens, format.num_heads, format.head_dim}};
      if (!format.is_latent) rows.v = {v.data(), {tokens, format.num_heads, format.value_dim}};
      operators_.write_kv(rows, stream_);
    }
    operators_.synchronize(stream_);
  }

  std::mt19937 random_{std::random_device{}()};
  cpu::Operators operators_;
  cpu::Stream stream_;
  AttentionBatch batch_;
  std::int64_t turns_;
  cpu::Buffer pool_;
  std::vector<std::int32_t> table_, slots_;
  std::vector<float> scales_, q_, out_, lse_;
  std::vector<std::byte> workspace_;
  PartialAttentionArgs<float> args_;
};

void bench_attention(benchmark::State& state, const AttentionCase& c, bool is_foreign, int num_threads) {
  const Workload work(c, is_foreign, num_threads);
  if (const std::string_view kernel = kernel_of(c, is_foreign); !kernel.empty())
    choose_kernels({kernel}, [&, turn = std::int64_t{0}]() mutable { work.run(turn++ % work.turns()); });
  const auto turns = static_cast<double>(work.turns());
  run_beside_ceilings(state, num_threads, turns * work.kv_bytes(), turns * work.flops(), work.pool(), [&] {
    for (std::int64_t turn = 0; turn < work.turns(); ++turn) work.run(turn);
  });
  state.counters["us"] = work.kv_bytes() / state.counters["bytes/s"] * 1e6;
  const double error = work.error(work.turns() - 1);
  state.counters["max_error"] = error;
  if (!(error < 1e-5)) state.SkipWithError("the result that was timed is wrong");
}

void add(const std::string& name, const AttentionCase& c, bool is_foreign, int num_threads, int iterations) {
  const auto run = [=](benchmark::State& state) {
    try {
      bench_attention(state, c, is_foreign, num_threads);
    } catch (const std::exception& error) {
      state.SkipWithError(error.what());
    }
  };
  benchmark::RegisterBenchmark((name + "/threads:" + std::to_string(num_threads)).c_str(), run)
      ->UseManualTime()
      ->Iterations(iterations)
      ->Unit(benchmark::kMillisecond);
}

const int kRegistered = [] {
  for (const NamedCase& c : kCases) {
    for (const int num_threads : {1, 2})
      add(std::string("partial_attention/") + c.name + "/" + std::to_string(c.shape.tokens), c.shape,
          c.is_foreign, num_threads, c.iterations);
  }
  return 0;
}();

}  // namespace

void register_attention(const std::vector<AttentionCase>& cases) {
  constexpr int kIterations = 5;
  for (const AttentionCase& c : cases) {
    HELIX_EXPECTS(!c.is_portable, ErrorCode::invalid_argument, c.name(), " is for a GPU");
    add(c.name(), c, false, 1, kIterations);
    if (num_cores() > 1) add(c.name(), c, false, num_cores(), kIterations);
  }
}

}  // namespace helix::bench
