// SPDX-License-Identifier: Apache-2.0
// The exchange of partial attention between the KVP ranks of one process, alone and under HOP-B.
//
// "exchange" packs, exchanges, checks and combines; its bytes are the payload that travels between ranks,
// which does not depend on the context. "hop_b" runs attention over bf16 KV, exchange and combine in 1 to 8
// slices; its bytes are the KV read by all ranks. One host thread drives all ranks, because calls only queue
// work.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <helix/batch_buffer.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/hop_b.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>
#include <helix/topology.hpp>

#include "ceilings.hpp"
#include "exact_attention.hpp"
#include "support/worse.hpp"

namespace {

using Backend = helix::cpu::Backend<helix::cpu::LocalComm>;
using Exchange = helix::KvpAllToAll<Backend>;

/// Ranks that share the cores.
std::vector<Backend> create_ranks(int kvp) {
  std::vector<Backend> ranks;
  const auto stage = helix::cpu::LocalComm::create_group(kvp);
  const auto group = helix::cpu::LocalComm::create_group(kvp);
  const int threads = std::max(1, helix::bench::num_cores() / kvp);
  for (std::size_t rank = 0; rank < stage.size(); ++rank)
    ranks.emplace_back(stage[rank], group[rank], threads);
  return ranks;
}

/// One rank's inputs, messages and result. Every rank draws the same queries and partials of its own.
struct Rank {
  Backend* backend;
  Backend::Stream stream;
  Exchange exchange;
  std::vector<float> out;       // [tokens, heads, dim], partial
  std::vector<float> lse;       // [tokens, heads]
  std::vector<float> combined;  // [tokens, heads / kvp, dim]

  Rank(Backend& on, int kvp, std::int64_t tokens, std::int64_t heads, std::int64_t dim)
      : backend(&on),
        stream(on.create_stream()),
        exchange(on, {.max_tokens = tokens, .num_query_heads = heads, .value_dim = dim}),
        out(static_cast<std::size_t>(tokens * heads * dim)),
        lse(static_cast<std::size_t>(tokens * heads)),
        combined(static_cast<std::size_t>(tokens * heads / kvp * dim)) {
    std::mt19937 random(static_cast<std::uint32_t>(on.comms().kvp->rank()));
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (float& x : out) x = uniform(random);
    for (float& x : lse) x = 5.0f * uniform(random);
  }
};

/// The largest difference between the combined results of `ranks` and the exact merge of all partials, for
/// the first and the last token.
double error_of(const std::vector<std::unique_ptr<Rank>>& ranks, std::int64_t tokens, std::int64_t heads,
                std::int64_t dim) {
  const auto kvp = static_cast<std::int64_t>(ranks.size());
  double worst = 0.0;
  for (const std::int64_t token : {std::int64_t{0}, tokens - 1}) {
    for (std::int64_t head = 0; head < heads; ++head) {
      double total = 0.0;
      std::vector<double> sums(static_cast<std::size_t>(dim), 0.0);
      for (const auto& rank : ranks) {
        const double weight =
            std::exp(static_cast<double>(rank->lse[static_cast<std::size_t>(token * heads + head)]));
        total += weight;
        for (std::int64_t i = 0; i < dim; ++i)
          sums[static_cast<std::size_t>(i)] +=
              weight * rank->out[static_cast<std::size_t>((token * heads + head) * dim + i)];
      }
      const std::int64_t part = heads / kvp;
      const auto& got = ranks[static_cast<std::size_t>(head / part)]->combined;
      for (std::int64_t i = 0; i < dim; ++i) {
        const float value = got[static_cast<std::size_t>((token * part + head % part) * dim + i)];
        worst = helix::test::worse(worst, std::abs(sums[static_cast<std::size_t>(i)] / total - value));
      }
    }
  }
  return worst;
}

void exchange_and_combine(Rank& rank, std::int64_t first, std::int64_t tokens, std::int64_t heads,
                          std::int64_t dim, Backend::Stream on) {
  const std::int64_t part = heads / rank.backend->comms().kvp->size();
  const helix::Partial<float> partial{{rank.out.data() + first * heads * dim, {tokens, heads, dim}},
                                      {rank.lse.data() + first * heads, {tokens, heads}}};
  const auto received = rank.exchange.exchange(partial, nullptr, on);
  helix::LseCombineArgs<float> args;
  args.partial_out = received.out;
  args.partial_lse = received.lse;
  args.out = {rank.combined.data() + first * part * dim, {tokens, part, dim}};
  helix::lse_combine(*rank.backend, args, on);
}

void bench_exchange(benchmark::State& state, int kvp, std::int64_t tokens, std::int64_t heads,
                    std::int64_t dim) {
  std::vector<Backend> backends = create_ranks(kvp);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (Backend& backend : backends) ranks.push_back(std::make_unique<Rank>(backend, kvp, tokens, heads, dim));
  const auto step = [&] {
    for (const auto& rank : ranks) exchange_and_combine(*rank, 0, tokens, heads, dim, rank->stream);
    for (const auto& rank : ranks) rank->backend->synchronize(rank->stream);
  };
  step();
  const double payload =
      static_cast<double>(ranks.front()->exchange.sent_payload_bytes()) * static_cast<double>(kvp);
  const double flops = 2.0 * static_cast<double>(kvp * tokens * heads * dim);
  helix::bench::run_beside_ceilings(state, helix::bench::num_cores(), payload, flops,
                                    helix::bench::random_bf16(std::size_t{256} << 20), step);
  state.counters["payload_MB"] = payload * 1e-6;
  const double error = error_of(ranks, tokens, heads, dim);
  state.counters["max_error"] = error;
  if (!(error < 1e-5)) state.SkipWithError("the result that was timed is wrong");
}

/// A batch of equal sequences of `context` tokens each, over ranks that hold 1 / kvp of each sequence.
void bench_hop_b(benchmark::State& state, int kvp, std::int64_t batch, std::int64_t context, int slices) {
  constexpr std::int64_t kHeads = 32;
  constexpr std::int64_t kKvHeads = 8;
  constexpr std::int64_t kDim = 128;
  constexpr std::int64_t kPageTokens = 64;
  std::vector<Backend> backends = create_ranks(kvp);
  const std::int64_t pages = context / kvp / kPageTokens;  // per sequence and rank
  const std::int64_t rank_elements = batch * pages * kPageTokens * 2 * kKvHeads * kDim;
  const auto kv_bytes = static_cast<std::size_t>(rank_elements * kvp * 2);
  // The ceiling reads all of it; a few sequences alone would stay in caches.
  const auto memory = helix::bench::random_bf16(std::max(kv_bytes, std::size_t{256} << 20));

  std::vector<std::int32_t> table(static_cast<std::size_t>(batch * pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(std::random_device{}()));
  std::vector<float> q(static_cast<std::size_t>(batch * kHeads * kDim));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& x : q) x = normal(random);
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(batch) + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  const std::vector<std::int64_t> positions(static_cast<std::size_t>(batch), context - 1);
  const helix::Batch step{offsets, offsets.data(), positions.data(), offsets.data()};

  const helix::KvFormat format =
      helix::KvFormat::head_major(helix::DType::bf16, kKvHeads, kDim, kDim, kPageTokens);

  struct Attention {
    helix::HopB<Backend> hop_b;
    helix::PartialAttentionArgs<float> args;
    std::vector<std::byte> workspace;
  };
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Attention> attention;
  for (int r = 0; r < kvp; ++r) {
    Backend& backend = backends[static_cast<std::size_t>(r)];
    ranks.push_back(std::make_unique<Rank>(backend, kvp, batch, kHeads, kDim));
    Attention& a = attention.emplace_back(Attention{
        helix::HopB<Backend>(backend, slices),
        {},
        std::vector<std::byte>(backend.partial_attention_workspace_bytes(batch, kHeads, kDim, kDim))});
    a.args.q = {q.data(), {batch, kHeads, kDim}};
    a.args.kv = helix::KvView::of_pool(memory.data() + static_cast<std::int64_t>(r) * rank_elements * 2,
                                       format, batch * pages);
    a.args.kv.page_table = table.data();
    a.args.kv.max_pages = pages;
    a.args.kv.layout = helix::KvLayout(kvp, kPageTokens);
    a.args.kv.kvp_rank = r;
    a.args.target.out = {ranks.back()->out.data(), {batch, kHeads, kDim}};
    a.args.target.lse = {ranks.back()->lse.data(), {batch, kHeads}};
    a.args.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  }

  const auto queue_rank = [&](Rank& rank, Attention& a) {
    a.hop_b.run(
        slices,
        [&](int slice, Backend::Stream on) {
          const helix::Range part = helix::split_evenly(batch, slices, slice);
          helix::PartialAttentionArgs<float> args = a.args;
          args.batch = step.slice(part.begin, part.size());
          args.workspace = a.workspace;
          helix::partial_attention(*rank.backend, args, on);
        },
        [&](int slice, Backend::Stream on) {
          const helix::Range part = helix::split_evenly(batch, slices, slice);
          exchange_and_combine(rank, part.begin, part.size(), kHeads, kDim, on);
        },
        rank.stream);
  };
  const auto work = [&] {
    for (std::size_t r = 0; r < ranks.size(); ++r) queue_rank(*ranks[r], attention[r]);
    for (const auto& rank : ranks) rank->backend->synchronize(rank->stream);
  };
  helix::bench::choose_kernels({"attention.bf16.rows4"}, work);
  helix::bench::run_beside_ceilings(state, helix::bench::num_cores(), static_cast<double>(kv_bytes),
                                    4.0 * static_cast<double>(batch * kHeads * kDim * context), memory, work);
  double error = error_of(ranks, batch, kHeads, kDim);
  for (Attention& a : attention) {
    a.args.batch = step;
    error = helix::test::worse(error, helix::bench::error_of_row(a.args, 0, kHeads - 1));
  }
  state.counters["max_error"] = error;
  if (!(error < 1e-5)) state.SkipWithError("the result that was timed is wrong");
}

const int kRegistered = [] {
  for (const int kvp : {2, 4, 8}) {
    for (const std::int64_t tokens : {1, 8, 128}) {
      for (const std::int64_t dim : {128, 512}) {
        const std::string name = "exchange/kvp:" + std::to_string(kvp) + "/tokens:" + std::to_string(tokens) +
                                 "/heads:32/dim:" + std::to_string(dim);
        benchmark::RegisterBenchmark(
            name.c_str(),
            [kvp, tokens, dim](benchmark::State& state) { bench_exchange(state, kvp, tokens, 32, dim); })
            ->UseManualTime()
            ->Iterations(50)
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
  for (const int kvp : {2, 4}) {
    for (const std::int64_t batch : {8, 64}) {
      for (const std::int64_t context : {256, 2048, 16384}) {
        if (batch * context > 1 << 17) continue;
        for (const int slices : {1, 2, 4, 8}) {
          const std::string name = "hop_b/kvp:" + std::to_string(kvp) + "/batch:" + std::to_string(batch) +
                                   "/context:" + std::to_string(context) +
                                   "/slices:" + std::to_string(slices);
          benchmark::RegisterBenchmark(name.c_str(),
                                       [kvp, batch, context, slices](benchmark::State& state) {
                                         bench_hop_b(state, kvp, batch, context, slices);
                                       })
              ->UseManualTime()
              ->Iterations(context > 4096 ? 9 : 30)
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
  return 0;
}();

}  // namespace
