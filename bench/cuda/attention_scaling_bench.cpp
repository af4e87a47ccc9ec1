// SPDX-License-Identifier: Apache-2.0
// Attention of one layer over a KVP shard, with its exchange and combine, compared with attention over the
// whole cache and with ranks that divide the heads instead.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/integers.hpp>
#include <helix/kv_format.hpp>
#include <helix/partial_attention.hpp>

#include "cases.hpp"
#include "device_data.hpp"
#include "exchange_work.hpp"
#include "rank_threads.hpp"
#include "timing.hpp"

namespace helix::bench {
namespace {

constexpr std::int64_t kPageTokens = 64;
constexpr std::int64_t kChunk = 16;

/// The attention heads of a layer.
struct Heads {
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t head_dim;
  std::int64_t value_dim;
  bool is_mla = false;

  KvFormat format() const {
    return is_mla ? KvFormat::latent(DType::bf16, head_dim, value_dim, kPageTokens)
                  : KvFormat::head_major(DType::bf16, kv_heads, head_dim, value_dim, kPageTokens);
  }
  /// The heads of one of `ranks` ranks that divide them.
  Heads divided(std::int64_t ranks) const {
    Heads part = *this;
    part.query_heads /= ranks;
    part.kv_heads = std::max<std::int64_t>(kv_heads / ranks, 1);
    return part;
  }
};

constexpr Heads kGqa{128, 8, 128, 128};        // Llama-3.1-405B
constexpr Heads kMla{128, 1, 576, 512, true};  // DeepSeek-R1

/// Attention of one query token per sequence over the shard of one KVP rank, with KV in permuted pages.
template <class Comm>
class ShardAttention {
 public:
  ShardAttention(Rank<Comm>& rank, const Heads& heads, std::int64_t kvp, std::int64_t kvp_rank,
                 std::int64_t batch, std::int64_t context)
      : rank_(&rank),
        positions_(static_cast<std::size_t>(batch), context - 1),
        offsets_(static_cast<std::size_t>(batch + 1)) {
    const KvLayout layout(kvp, kChunk);
    const std::int64_t sequence_pages = ceil_div(layout.length(context, kvp_rank), kPageTokens);
    const std::int64_t pages = batch * sequence_pages;
    const KvFormat format = heads.format();
    pool_ = random_bf16(pages * format.page_elements(), static_cast<std::uint64_t>(kvp_rank) << 40);
    std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    table_at_ = on_device(rank.backend, table);
    std::iota(offsets_.begin(), offsets_.end(), 0);
    offsets_at_ = on_device(rank.backend, offsets_);
    positions_at_ = on_device(rank.backend, positions_);
    q_ = random_bf16(batch * heads.query_heads * heads.head_dim, 5);
    out_ = cuda::Buffer(static_cast<std::size_t>(batch * heads.query_heads * heads.value_dim) * kBf16Bytes);
    lse_ = cuda::Buffer(static_cast<std::size_t>(batch * heads.query_heads) * sizeof(float));
    own_target_ = {{reinterpret_cast<bf16*>(out_.data()), {batch, heads.query_heads, heads.value_dim}},
                   {reinterpret_cast<float*>(lse_.data()), {batch, heads.query_heads}}};
    workspace_ = rank.backend.allocate(rank.backend.partial_attention_workspace_bytes(
        batch, heads.query_heads, heads.head_dim, heads.value_dim));
    args_.q = {reinterpret_cast<const bf16*>(q_.data()), {batch, heads.query_heads, heads.head_dim}};
    const auto* offsets = reinterpret_cast<const std::int32_t*>(offsets_at_.data());
    args_.batch = {offsets_, offsets, reinterpret_cast<const std::int64_t*>(positions_at_.data()), offsets};
    args_.kv = KvView::of_pool(pool_.data(), format, pages);
    args_.kv.max_pages = sequence_pages;
    args_.kv.page_table = reinterpret_cast<const std::int32_t*>(table_at_.data());
    args_.kv.layout = layout;
    args_.kv.kvp_rank = kvp_rank;
    args_.scale = 1.0f / std::sqrt(static_cast<float>(heads.head_dim));
    args_.workspace = {workspace_.data(), workspace_.size_bytes()};
  }

  void queue(const PartialTarget<bf16>& result) {
    args_.target = result;
    partial_attention(rank_->backend, args_, rank_->stream);
  }

  PartialTarget<bf16> own_target() const { return own_target_; }

  double bytes() const { return static_cast<double>(pool_.size_bytes()); }

 private:
  Rank<Comm>* rank_;
  std::vector<std::int64_t> positions_;
  std::vector<std::int32_t> offsets_;
  cuda::Buffer pool_, table_at_, offsets_at_, positions_at_, q_, workspace_, out_, lse_;
  PartialTarget<bf16> own_target_;
  PartialAttentionArgs<bf16> args_;
};

/// Times attention over a shard and over the whole cache: alone, written into the messages of an exchange
/// ("sent_us"), and with exchange and combine. "over_us" is the time of exchange and combine without the
/// bytes that the combine reads at 4 TB/s. "tp_us" is the time of one of as many ranks that divide the heads
/// instead: each reads the whole context, and for MLA the whole cache.
template <class Comm>
void bench_attention_scaling(benchmark::State& state, const Heads& heads, int kvp, std::int64_t batch,
                             std::int64_t context) {
  const ExchangeShape shape{batch, heads.query_heads, heads.value_dim};
  std::vector<double> shard_us(static_cast<std::size_t>(kvp));
  std::vector<double> sent_us(static_cast<std::size_t>(kvp));
  std::vector<double> exchanged_us(static_cast<std::size_t>(kvp));
  std::vector<ExchangeResult> results(static_cast<std::size_t>(kvp));
  double whole_us = 0.0;
  double tp_us = 0.0;
  double whole_bytes = 0.0;
  double tp_bytes = 0.0;
  run_ranks<Comm>(kvp, 1, kvp, [&](Rank<Comm>& rank) {
    const auto r = static_cast<std::size_t>(rank.index());
    ExchangeWork<Comm> exchange(rank, shape);
    {
      ShardAttention<Comm> shard(rank, heads, kvp, rank.index(), batch, context);
      const auto times = time_in_turn(
          rank, {[&] { shard.queue(exchange.target()); }, [&] { shard.queue(exchange.messages().target); },
                 [&] {
                   shard.queue(exchange.messages().target);
                   exchange.queue();
                 }});
      shard_us[r] = times[0];
      sent_us[r] = times[1];
      exchanged_us[r] = times[2];
      shard.queue(exchange.target());  // the expected result
      results[r] = exchange.result();
    }
    rank.meeting.arrive_and_wait();
    if (rank.index() != 0) return;
    const auto time_whole = [&](const Heads& of_rank, double& bytes) {
      ShardAttention<Comm> whole(rank, of_rank, 1, 0, batch, context);
      bytes = whole.bytes();
      return time_launches(rank.stream, 1, 50, [&](int) { whole.queue(whole.own_target()); });
    };
    whole_us = time_whole(heads, whole_bytes);
    tp_us = time_whole(heads.divided(kvp), tp_bytes);
  });
  const double error = exchange_error(results, shape);
  state.counters["max_error"] = error;
  if (!(error < 1.0 / 128)) state.SkipWithError("the result that was timed is wrong");
  const double slowest = *std::max_element(shard_us.begin(), shard_us.end());
  // Reads this rank's heads from all ranks.
  const double combine_us = static_cast<double>(shape.bytes()) / 4e6;
  for (auto _ : state) state.SetIterationTime(slowest * 1e-6);
  state.counters["us"] = slowest;
  state.counters["sent_us"] = *std::max_element(sent_us.begin(), sent_us.end());
  state.counters["with_exchange_us"] = exchanged_us[0];
  state.counters["over_us"] = exchanged_us[0] - slowest - combine_us;
  state.counters["one_gpu_us"] = whole_us;
  state.counters["one_gpu_bytes/s"] = whole_bytes / whole_us * 1e6;
  state.counters["tp_us"] = tp_us;
  state.counters["tp_bytes/s"] = tp_bytes / tp_us * 1e6;
  state.counters["ratio"] = slowest / whole_us;
  state.counters["ratio_with_exchange"] = exchanged_us[0] / whole_us;
  state.counters["ratio_aim"] = 1.08 / kvp;
}

}  // namespace

void register_attention_scaling(int num_gpus) {
  for (const int kvp : {2, 4}) {
    if (kvp > num_gpus) continue;
    // Cases over the whole cache or a shard: at most 34 GB.
    const auto add = [&]<class Comm>(const std::string& name, const Heads& heads, std::int64_t batch,
                                     std::int64_t tokens, Comm*) {
      register_case(
          name + "/kvp:" + std::to_string(kvp) + "/batch:" + std::to_string(batch) +
              "/tokens:" + std::to_string(tokens) + over<Comm>(),
          [=](benchmark::State& state) { bench_attention_scaling<Comm>(state, heads, kvp, batch, tokens); });
    };
    constexpr cuda::NcclComm* kNccl = nullptr;
    constexpr cuda::PeerComm* kWindows = nullptr;
    add("attention_scaling", kGqa, 8, 1048576, kNccl);
    for (const std::int64_t batch : {8, 256, 1024}) {
      add("attention_scaling", kGqa, batch, 4194304 / batch, kNccl);
      add("attention_scaling", kGqa, batch, 4194304 / batch, kWindows);
    }
    add("mla_attention_scaling", kMla, 8, 1048576, kNccl);
    for (const std::int64_t batch : {8, 256})
      add("mla_attention_scaling", kMla, batch, 4194304 / batch, kWindows);
  }
}

}  // namespace helix::bench
