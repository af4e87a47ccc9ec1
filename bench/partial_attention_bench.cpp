// SPDX-License-Identifier: Apache-2.0
// partial_attention on the CPU: one sequence, one query token, bf16 KV in permuted pages of 64 tokens.
//
// Eight KV heads of 1M tokens would take 4 GB, so that length uses two KV heads with the same group size.
// Eight KV heads run at 131072 tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/foreign_kv.hpp>

#include "ceilings.hpp"
#include "exact_attention.hpp"
#include "support/worse.hpp"

namespace {

/// The memory layout: Helix's own pool, or foreign ones: FlashInfer's NHD for K and V, its two pools for
/// latents.
enum class Layout { own, foreign };

struct Case {
  const char* name;
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
  std::int64_t value_dim;
  bool is_latent;
  std::int64_t tokens;
  int iterations;
  Layout layout = Layout::own;
  const char* kernel = nullptr;  ///< Kernel whose variants take turns before anything is timed.
};

constexpr const char* kRows1 = "attention.bf16.rows1";
constexpr const char* kRows4 = "attention.bf16.rows4";
constexpr const char* kRows8 = "attention.bf16.rows8";

constexpr Case kCases[] = {
    {"mha", 8, 8, 128, 128, false, 1 << 17, 9, Layout::own, kRows1},
    {"mha", 2, 2, 128, 128, false, 1 << 20, 7, Layout::own, kRows1},
    {"gqa4", 32, 8, 128, 128, false, 1 << 17, 9, Layout::own, kRows4},
    {"gqa4", 8, 2, 128, 128, false, 1 << 20, 7, Layout::own, kRows4},
    {"gqa8", 64, 8, 128, 128, false, 1 << 17, 9, Layout::own, kRows8},
    {"gqa8", 16, 2, 128, 128, false, 1 << 20, 7, Layout::own, kRows8},
    {"mla128", 128, 1, 576, 512, true, 1 << 17, 5},
    {"mla128", 128, 1, 576, 512, true, 1 << 20, 3},
    {"mla16", 16, 1, 576, 512, true, 1 << 17, 9, Layout::own, kRows8},
    {"mha_nhd", 8, 8, 128, 128, false, 1 << 17, 9, Layout::foreign, kRows1},
    {"gqa8_nhd", 64, 8, 128, 128, false, 1 << 17, 9, Layout::foreign, kRows8},
    {"mla16_split", 16, 1, 576, 512, true, 1 << 17, 9, Layout::foreign},
    {"mla128_split", 128, 1, 576, 512, true, 1 << 17, 5, Layout::foreign},
};

constexpr std::int64_t kPageTokens = 64;

helix::KvView pool_of(const Case& c, std::byte* memory) {
  const std::int64_t num_pages = c.tokens / kPageTokens;
  constexpr helix::DType kType = helix::DType::bf16;
  if (c.layout == Layout::own) {
    const helix::KvFormat format =
        c.is_latent ? helix::KvFormat::latent(kType, c.head_dim, c.value_dim, kPageTokens)
                    : helix::KvFormat::head_major(kType, c.kv_heads, c.head_dim, c.value_dim, kPageTokens);
    return helix::KvView::of_pool(memory, format, num_pages);
  }
  if (c.is_latent) {
    return helix::flashinfer_mla_kv({.ckv = memory,
                                     .kpe = memory + 2 * c.tokens * c.value_dim,
                                     .dtype = kType,
                                     .num_pages = num_pages,
                                     .page_size = kPageTokens,
                                     .head_dim_ckv = c.value_dim,
                                     .head_dim_kpe = c.head_dim - c.value_dim});
  }
  return helix::flashinfer_nhd_kv({.pool = memory,
                                   .dtype = kType,
                                   .num_pages = num_pages,
                                   .page_size = kPageTokens,
                                   .num_kv_heads = c.kv_heads,
                                   .head_dim = c.head_dim});
}

void bench_partial_attention(benchmark::State& state, const Case& c, int num_threads) {
  const std::int64_t kv_elements = (c.is_latent ? 1 : 2 * c.kv_heads) * c.tokens * c.head_dim;
  const auto memory = helix::bench::random_bf16(static_cast<std::size_t>(kv_elements) * 2);
  std::mt19937 random(std::random_device{}());
  std::vector<std::int32_t> table(static_cast<std::size_t>(c.tokens / kPageTokens));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<float> q(static_cast<std::size_t>(c.query_heads * c.head_dim));
  std::normal_distribution<float> normal;
  for (float& x : q) x = normal(random);
  std::vector<float> out(static_cast<std::size_t>(c.query_heads * c.value_dim));
  std::vector<float> lse(static_cast<std::size_t>(c.query_heads));
  const std::vector<std::int32_t> offsets = {0, 1};
  const std::int32_t slot = 0;
  const std::int64_t position = c.tokens - 1;

  helix::cpu::Operators operators(num_threads);
  helix::cpu::Stream stream = operators.create_stream();
  std::vector<std::byte> workspace(
      operators.partial_attention_workspace_bytes(1, c.query_heads, c.head_dim, c.value_dim));
  helix::PartialAttentionArgs<float> args;
  args.q = {q.data(), {1, c.query_heads, c.head_dim}};
  args.batch = {offsets, offsets.data(), &position, &slot};
  args.kv = pool_of(c, memory.data()).whole();
  args.kv.page_table = table.data();
  args.kv.max_pages = args.kv.num_pages;
  args.target.out = {out.data(), {1, c.query_heads, c.value_dim}};
  args.target.lse = {lse.data(), {1, c.query_heads}};
  args.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  args.workspace = workspace;

  const double flops = 2.0 * static_cast<double>(c.query_heads * (c.head_dim + c.value_dim) * c.tokens);
  const auto work = [&] {
    operators.partial_attention(args, stream);
    operators.synchronize(stream);
  };
  if (c.kernel != nullptr) helix::bench::choose_kernels({c.kernel}, work);
  helix::bench::run_beside_ceilings(state, num_threads, 2.0 * static_cast<double>(kv_elements), flops, memory,
                                    work);
  const double error = helix::test::worse(helix::bench::error_of_head(args, 0),
                                          helix::bench::error_of_head(args, c.query_heads - 1));
  state.counters["max_error"] = error;
  if (!(error < 1e-5)) state.SkipWithError("the result that was timed is wrong");
}

const int kRegistered = [] {
  for (const Case& c : kCases) {
    for (int num_threads : {1, 2}) {
      const std::string name = std::string("partial_attention/") + c.name + "/" + std::to_string(c.tokens) +
                               "/threads:" + std::to_string(num_threads);
      benchmark::RegisterBenchmark(
          name.c_str(),
          [&c, num_threads](benchmark::State& state) { bench_partial_attention(state, c, num_threads); })
          ->UseManualTime()
          ->Iterations(c.iterations)
          ->Unit(benchmark::kMillisecond);
    }
  }
  return 0;
}();

}  // namespace
