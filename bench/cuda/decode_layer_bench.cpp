// SPDX-License-Identifier: Apache-2.0
// A whole decode step through 8 layers shaped like Llama-3.1-405B's, with bf16 weights and KV and 8 sequences
// of one query token, on 1, 2 and 4 GPUs, captured once and replayed.
//
// "floor_us" is the minimum time of the step if nothing overlaps: the bytes of each weight matrix and of the
// KV at the rate that reads of that size reach, and the collectives as measured alone, all in the same run.
// HOP-B hides exchanges, so it may fall below its share of the floor.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <helix/batch_buffer.hpp>
#include <helix/decode_layer.hpp>
#include <helix/hop_b.hpp>
#include <helix/plan/model.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "cases.hpp"
#include "exchange_work.hpp"
#include "timing.hpp"

namespace helix::bench {
namespace {

constexpr std::int64_t kLayers = 8;
constexpr std::int64_t kBatch = 8;
constexpr std::int64_t kContext = 524288;
constexpr std::int64_t kPageTokens = 64;
constexpr std::int64_t kChunk = 16;
constexpr int kMaxSlices = 8;
constexpr int kTimedSteps = 24;
constexpr std::int64_t kSpareSteps = 5 * kTimedSteps;  // limit on the cache's growth
constexpr float kNormWeight =
    1.0f / 64;  // keeps the magnitude of an input in products with uniform weights in (-1, 1)

const ModelShape kModel = plan::model_preset("llama-3.1-405b").shape;

/// The first `layers` layers of the model.
ModelShape model_of(std::int64_t layers) {
  ModelShape shape = kModel;
  shape.num_layers = layers;
  return shape;
}

/// The part of the model that is measured.
struct Plan {
  std::int64_t layers = kLayers;
  std::int64_t batch = kBatch;
  std::int64_t context = kContext;
  /// Layers that have weights of their own; the other layers reuse these in turn.
  std::int64_t weight_sets = kLayers;

  /// As many layers as fit at `context`; if not even one fits, the longest context at which one does.
  static Plan of(int kvp, int tpa, std::int64_t batch, std::int64_t context, std::size_t budget);
  /// `layers` layers of KVP ranks regardless of what fits, to measure the cost of a step apart from its
  /// bytes.
  static Plan of_layers(int kvp, std::int64_t layers, std::int64_t batch, std::int64_t context,
                        std::size_t budget);
};

/// Bytes that one rank reads in a step from one layer.
struct LayerBytes {
  std::size_t qkv;
  std::size_t o;
  std::size_t gate_up;
  std::size_t down;
  std::size_t kv;

  LayerBytes(const Topology& topo, int rank, const Plan& plan)
      : qkv(bytes((topo.query_heads(rank).size() + 2 * topo.kv_heads(rank).size()) * kModel.head_dim *
                  kModel.hidden)),
        o(bytes(kModel.hidden * topo.combined_heads(rank).size() * kModel.head_dim)),
        gate_up(bytes(2 * topo.ffn(rank).size() * kModel.hidden)),
        down(bytes(kModel.hidden * topo.ffn(rank).size())),
        kv(bytes(plan.batch * plan.context / topo.kvp() * 2 * topo.kv_heads(rank).size() * kModel.head_dim)) {
  }

  std::size_t weights() const { return qkv + o + gate_up + down; }

 private:
  static std::size_t bytes(std::int64_t elements) { return static_cast<std::size_t>(elements) * kBf16Bytes; }
};

Plan Plan::of(int kvp, int tpa, std::int64_t batch, std::int64_t context, std::size_t budget) {
  Plan plan{.batch = batch, .context = context};
  const Topology topo({.kvp = kvp, .tpa = tpa}, model_of(kLayers));
  for (; plan.context > kPageTokens * kvp; plan.context /= 2) {
    const LayerBytes layer(topo, 0, plan);
    plan.layers = std::min(kLayers, static_cast<std::int64_t>(budget / (layer.weights() + layer.kv)));
    if (plan.layers >= 1) break;
  }
  plan.weight_sets = plan.layers;
  return plan;
}

Plan Plan::of_layers(int kvp, std::int64_t layers, std::int64_t batch, std::int64_t context,
                     std::size_t budget) {
  Plan plan{.layers = layers, .batch = batch, .context = context};
  const LayerBytes layer(Topology({.kvp = kvp}, model_of(layers)), 0, plan);
  const std::size_t sets =
      (budget - std::min(budget, static_cast<std::size_t>(layers) * layer.kv)) / layer.weights();
  plan.weight_sets = std::clamp(static_cast<std::int64_t>(sets), std::int64_t{1}, layers);
  return plan;
}

/// One rank's layers, its KV and its captured step.
template <class Comm>
class DecodeRank {
 public:
  DecodeRank(Rank<Comm>& rank, const Topology& topo, const Plan& plan, int slices)
      : rank_(&rank),
        topo_(&topo),
        plan_(plan),
        slices_(slices),
        layer_bytes_(topo, rank.index(), plan),
        cache_(rank.backend, topo, cache_spec()),
        batch_(rank.backend, plan_.batch, plan_.batch),
        shape_(topo.rank_shape(rank.index())),
        exchange_(rank.backend, KvpAllToAllSpec::of_layers(shape_, plan_.batch, kMaxSlices)),
        hop_b_(rank.backend, kMaxSlices),
        weights_at_(
            random_bf16(static_cast<std::int64_t>(layer_bytes_.weights() / kBf16Bytes) * plan_.weight_sets,
                        random_seed())),
        norm_at_(on_device(rank.backend,
                           std::vector<bf16>(static_cast<std::size_t>(kModel.hidden), bf16(kNormWeight)))),
        first_hidden_(random_bf16(plan_.batch * kModel.hidden, 7)),
        hidden_(first_hidden_.size_bytes()),
        reduced_(first_hidden_.size_bytes()) {
    std::vector<std::int32_t> rows(static_cast<std::size_t>(plan.batch));
    std::iota(rows.begin(), rows.end(), 0);
    rows_ = on_device(rank.backend, rows);
    std::vector<float> frequencies;
    for (std::int64_t pair = 0; pair < kModel.head_dim / 2; ++pair)
      frequencies.push_back(
          static_cast<float>(std::pow(500000.0, -2.0 * static_cast<double>(pair) / kModel.head_dim)));
    frequencies_ = on_device(rank.backend, frequencies);
    config_.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kModel.head_dim));
    config_.rope = {reinterpret_cast<const float*>(frequencies_.data()), kModel.head_dim};
    workspace_ = rank.backend.allocate(decode_layer_workspace_bytes(rank.backend, shape_, plan_.batch));
    for (std::int64_t layer = 0; layer < plan_.layers; ++layer) add_layer(layer);
    fill_cache();
    rewind();
  }

  std::int64_t num_layers() const { return static_cast<std::int64_t>(layers_.size()); }

  /// Gives each sequence room for its next token; this rarely needs a new page.
  void grow() { cache_.append(sequences_, one_each_, rank_->stream); }

  /// Like grow(), but the first sequence also gets a new page on every rank, which queues an update of the
  /// page table.
  void grow_by_page() { cache_.append(sequences_, with_page_, rank_->stream); }

  /// Goes back to the first token after the context.
  void rewind() {
    const std::vector<std::int64_t> positions(static_cast<std::size_t>(plan_.batch), plan_.context);
    batch_.set(offsets_, positions, slots_, rank_->stream);
  }

  /// Queues a step, including the positions of the next one.
  void queue_step() {
    const std::array<std::int64_t, 2> hidden{plan_.batch, kModel.hidden};
    // Copied by a kernel, because copies in a graph make its launch slower.
    rank_->backend.gather_rows(
        GatherRowsArgs<bf16>{{reinterpret_cast<const bf16*>(first_hidden_.data()), hidden},
                             reinterpret_cast<const std::int32_t*>(rows_.data()),
                             {reinterpret_cast<bf16*>(hidden_.data()), hidden}},
        rank_->stream);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      decode_layer(rank_->backend, shape_, config_, layers_[layer], cache_.layer(static_cast<int>(layer)),
                   batch_.batch(), {reinterpret_cast<bf16*>(hidden_.data()), {plan_.batch, kModel.hidden}},
                   {.exchange = &exchange_,
                    .hop_b = &hop_b_,
                    .hop_b_slices = slices_,
                    .workspace = {workspace_.data(), workspace_.size_bytes()},
                    .follows_layer = layer > 0},
                   rank_->stream);
    }
    batch_.advance(rank_->stream);
  }

  void queue_all_reduce() {
    rank_->backend.comms().stage->all_reduce(first_hidden_.data(), reduced_.data(),
                                             plan_.batch * kModel.hidden, DType::bf16, rank_->stream);
  }

  /// Microseconds of cold reads that are as large as each matrix of a layer and its KV.
  double read_us() const {
    const auto us = [&](const std::byte* pool, std::size_t pool_bytes, std::size_t bytes) {
      return 1e6 * static_cast<double>(bytes) /
             measure_cold_read(pool, pool_bytes, bytes, rank_->stream).best();
    };
    double sum = 0.0;
    for (const std::size_t bytes :
         {layer_bytes_.qkv, layer_bytes_.o, layer_bytes_.gate_up, layer_bytes_.down})
      sum += us(weights_at_.data(), weights_at_.size_bytes(), bytes);
    return sum +
           us(static_cast<const std::byte*>(cache_.layer(0).k), cache_.capacity_bytes(), layer_bytes_.kv);
  }

  void warm() const {
    warm_up(weights_at_.data(), std::min(weights_at_.size_bytes(), std::size_t{8} << 30), rank_->stream);
  }

  /// The hidden state after the last step. Waits.
  std::vector<bf16> hidden() const {
    rank_->backend.synchronize(rank_->stream);
    return on_host<bf16>(rank_->backend, hidden_.data(), plan_.batch * kModel.hidden);
  }

 private:
  KvCacheSpec cache_spec() const {
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(plan_.batch), plan_.context + kSpareSteps);
    lengths[0] = plan_.context + kSpareSteps * kPageTokens * topo_->kvp();
    KvCacheSpec spec;
    spec.num_layers = plan_.layers;
    spec.page_tokens = kPageTokens;
    spec.chunk = kChunk;
    spec.num_pages = PageLedger::pages_needed(KvLayout(topo_->kvp(), kChunk), kPageTokens, lengths);
    spec.max_sequences = plan_.batch;
    spec.max_tokens = lengths[0];
    return spec;
  }

  std::uint64_t random_seed() const { return static_cast<std::uint64_t>(rank_->index() + 1) << 40; }

  void add_layer(std::int64_t layer) {
    const Topology& topo = *topo_;
    const int rank = rank_->index();
    const std::byte* next =
        weights_at_.data() + static_cast<std::size_t>(layer % plan_.weight_sets) * layer_bytes_.weights();
    const auto take = [&](std::size_t bytes, std::int64_t cols) {
      const WeightView view{next, DType::bf16, static_cast<std::int64_t>(bytes / kBf16Bytes) / cols, cols};
      next += bytes;
      return view;
    };
    GqaWeights attention;
    attention.qkv = take(layer_bytes_.qkv, kModel.hidden);
    attention.o = take(layer_bytes_.o, topo.combined_heads(rank).size() * kModel.head_dim);
    DenseFfnWeights ffn;
    ffn.gate_up = take(layer_bytes_.gate_up, kModel.hidden);
    ffn.down = take(layer_bytes_.down, topo.ffn(rank).size());
    const WeightView norm{norm_at_.data(), DType::bf16, 1, kModel.hidden};
    layers_.push_back({norm, norm, attention, ffn});
  }

  /// Sequences and ranks get pages in turn, so that the pages of one sequence are not adjacent.
  void fill_cache() {
    for (std::int64_t b = 0; b < plan_.batch; ++b) {
      sequences_.push_back(cache_.add());
      slots_.push_back(cache_.slot(sequences_.back()));
      offsets_.push_back(static_cast<std::int32_t>(b + 1));
    }
    const std::int64_t turn = kPageTokens * topo_->kvp();
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(plan_.batch), turn);
    with_page_ = one_each_;
    with_page_[0] = turn;
    for (std::int64_t length = 0; length < plan_.context; length += turn)
      cache_.append(sequences_, counts, rank_->stream);
    for (int layer = 0; layer < static_cast<int>(plan_.layers); ++layer) {
      const KvView kv = cache_.layer(layer);
      cuda::bench::launch_fill(
          kv.k, DType::bf16, static_cast<std::size_t>(kv.num_pages * kv.format.page_elements()),
          random_seed() + (static_cast<std::uint64_t>(layer + 1) << 52), rank_->stream.handle());
    }
    rank_->backend.synchronize(rank_->stream);
  }

  Rank<Comm>* rank_;
  const Topology* topo_;
  Plan plan_;
  int slices_;
  LayerBytes layer_bytes_;
  ShardedKVCache<RankBackend<Comm>> cache_;
  BatchBuffer<RankBackend<Comm>> batch_;
  RankShape shape_;
  KvpAllToAll<RankBackend<Comm>> exchange_;
  HopB<RankBackend<Comm>> hop_b_;
  cuda::Buffer weights_at_;
  cuda::Buffer norm_at_;
  cuda::Buffer first_hidden_;
  cuda::Buffer hidden_;
  cuda::Buffer reduced_;
  cuda::Buffer rows_;
  cuda::Buffer frequencies_;
  cuda::Buffer workspace_;
  LayerConfig config_;
  std::vector<LayerWeights> layers_;
  std::vector<SequenceId> sequences_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int32_t> offsets_{0};
  std::vector<std::int64_t> one_each_ = std::vector<std::int64_t>(static_cast<std::size_t>(plan_.batch), 1);
  std::vector<std::int64_t> with_page_;
};

/// How exchanges overlap attention.
struct Overlap {
  int slices = 1;            ///< 1: no overlap; 0: chosen automatically
  int attention_blocks = 0;  ///< Maximum number of blocks; 0: all that fit.
};

/// Time that a step takes on a rank's thread, counted from the end of its wait for the previous step.
struct HostTimes {
  double step_us = 0.0;    ///< appending one token per sequence, and the launch
  double growth_us = 0.0;  ///< the same for a step in which a sequence gets a page
  double launch_us = 0.0;  ///< Part of growth_us spent in the launch.
  /// CUDA's part of growth_us: a copy of 256 bytes and the launch of a graph of one kernel.
  double bare_us = 0.0;
  double wall_us = 0.0;  ///< until the thread knows that the step has ended
};

template <class Comm>
HostTimes measure_host(Rank<Comm>& rank, DecodeRank<Comm>& decode, const cuda::Graph& graph) {
  const std::vector<std::int64_t> values(32);
  const cuda::Buffer target = on_device(rank.backend, values);
  const auto advance = [&] {
    rank.backend.advance({reinterpret_cast<std::int64_t*>(target.data()), std::ssize(values)}, rank.stream);
  };
  advance();
  const auto one_kernel = cuda::Graph::capture(rank.stream, advance);

  using Clock = std::chrono::steady_clock;
  const auto us_since = [](Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  };
  std::vector<double> step, growth, launch, bare, wall;
  for (int i = 0; i < kTimedSteps; ++i) {
    auto start = Clock::now();
    decode.grow();
    graph.replay(rank.stream);
    step.push_back(us_since(start));
    rank.backend.synchronize(rank.stream);
    wall.push_back(us_since(start));

    start = Clock::now();
    decode.grow_by_page();
    const auto grown = Clock::now();
    graph.replay(rank.stream);
    launch.push_back(us_since(grown));
    growth.push_back(us_since(start));
    rank.backend.synchronize(rank.stream);

    start = Clock::now();
    rank.backend.upload(target.data(), values.data(), target.size_bytes(), rank.stream);
    one_kernel.replay(rank.stream);
    bare.push_back(us_since(start));
    decode.grow();
    graph.replay(rank.stream);
    rank.backend.synchronize(rank.stream);
  }
  return {median(step), median(growth), median(launch), median(bare), median(wall)};
}

/// The measurements of one rank.
struct StepTimes {
  double step_us = 0.0;
  HostTimes host;
  double read_us = 0.0;  ///< Cold reads of a layer's bytes.
  double all_reduce_us = 0.0;
  double exchange_us = 0.0;
  std::size_t nodes = 0;
  double replay_error = 0.0;
  std::vector<bf16> hidden;  ///< after the last step
};

template <class Comm>
StepTimes measure_step(Rank<Comm>& rank, const Topology& topo, const Plan& plan, const Overlap& overlap) {
  StepTimes times;
  rank.backend.set_attention_blocks(overlap.attention_blocks);
  DecodeRank<Comm> decode(rank, topo, plan, overlap.slices);
  decode.warm();
  times.read_us = decode.read_us();
  if (topo.stage_size() > 1)
    times.all_reduce_us = time_together(rank, 20, [&] { decode.queue_all_reduce(); });
  if (topo.kvp() > 1) {
    const ExchangeShape shape{plan.batch, topo.query_heads(rank.index()).size(), kModel.head_dim};
    times.exchange_us = time_exchanges(rank, shape, 20).taken.us;
  }

  decode.grow();
  decode.queue_step();
  const std::vector<bf16> eager = decode.hidden();
  rank.meeting.arrive_and_wait();
  const auto graph = cuda::Graph::capture(rank.stream, [&] { decode.queue_step(); });
  times.nodes = graph.num_nodes();
  rank.meeting.arrive_and_wait();
  decode.rewind();
  graph.replay(rank.stream);
  times.replay_error = relative_error(decode.hidden(), eager);

  times.step_us = median(time_replays(rank, graph, kTimedSteps, [&] { decode.grow_by_page(); }));
  times.host = measure_host(rank, decode, graph);
  times.hidden = decode.hidden();
  rank.meeting.arrive_and_wait();
  return times;
}

template <class Comm>
void bench_decode_layer(benchmark::State& state, int kvp, int tpa, const Overlap& overlap, const Plan& plan) {
  std::vector<StepTimes> ranks(static_cast<std::size_t>(kvp * tpa));
  const Topology topo({.kvp = kvp, .tpa = tpa}, model_of(plan.layers));
  run_ranks<Comm>(kvp, tpa, kvp * tpa, [&](Rank<Comm>& rank) {
    ranks[static_cast<std::size_t>(rank.index())] = measure_step(rank, topo, plan, overlap);
  });
  if (!(ranks[0].replay_error < 2e-2))
    state.SkipWithError("a replayed step differs from the same step launched piece by piece");
  for (const StepTimes& rank : ranks) {
    // Invariant 12: the same bits on all ranks.
    if (!(relative_error(rank.hidden, ranks[0].hidden) == 0.0))
      state.SkipWithError("ranks hold different hidden states, or no numbers");
  }
  const StepTimes& times = ranks[0];
  for (auto _ : state) state.SetIterationTime(times.step_us * 1e-6);
  const double floor_us =
      static_cast<double>(plan.layers) * (times.read_us + 2.0 * times.all_reduce_us + times.exchange_us);
  state.counters["us"] = times.step_us;
  state.counters["us_per_layer"] = times.step_us / static_cast<double>(plan.layers);
  state.counters["floor_us"] = floor_us;
  state.counters["ratio"] = times.step_us / floor_us;
  state.counters["host_us"] = times.host.step_us;
  state.counters["host_growth_us"] = times.host.growth_us;
  state.counters["launch_us"] = times.host.launch_us;
  state.counters["bare_host_us"] = times.host.bare_us;
  state.counters["wall_us"] = times.host.wall_us;
  state.counters["read_us_per_layer"] = times.read_us;
  state.counters["all_reduce_us"] = times.all_reduce_us;
  state.counters["exchange_us"] = times.exchange_us;
  state.counters["layers"] = static_cast<double>(plan.layers);
  state.counters["context"] = static_cast<double>(plan.context);
  state.counters["nodes"] = static_cast<double>(times.nodes);
  state.counters["replay_error"] = times.replay_error;
}

}  // namespace

void register_decode_layers(int num_gpus) {
  struct Grid {
    int kvp;
    int tpa;
  };
  cudaDeviceProp properties;
  HELIX_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  // Budget for weights and KV per GPU; the rest is for workspaces, NCCL and the spare pages.
  const auto budget = std::min<std::size_t>(120'000'000'000, properties.totalGlobalMem / 100 * 85);
  const auto add_case = [&]<class Comm = cuda::NcclComm>(const Grid& grid, const Plan& plan,
                                                         const std::string& name, const Overlap& overlap) {
    register_case(
        "decode_layer/kvp:" + std::to_string(grid.kvp) + "/tpa:" + std::to_string(grid.tpa) +
            "/layers:" + std::to_string(plan.layers) + "/batch:" + std::to_string(plan.batch) +
            "/context:" + std::to_string(plan.context) + "/hop_b:" + name + over<Comm>(),
        [=](benchmark::State& state) { bench_decode_layer<Comm>(state, grid.kvp, grid.tpa, overlap, plan); });
  };
  for (const Grid grid : {Grid{1, 1}, Grid{2, 1}, Grid{1, 2}, Grid{4, 1}, Grid{2, 2}, Grid{1, 4}}) {
    if (grid.kvp * grid.tpa > num_gpus) continue;
    const Plan plan = Plan::of(grid.kvp, grid.tpa, kBatch, kContext, budget);
    add_case(grid, plan, "off", {.slices = 1});
    if (grid.kvp * grid.tpa > 1)  // with windows there are no slices
      add_case.template operator()<cuda::PeerComm>(grid, plan, "off", {.slices = 1});
    if (grid.kvp == 1) continue;  // nothing to exchange
    add_case(grid, plan, "2", {.slices = 2});
    add_case(grid, plan, "auto", {.slices = 0});
    // Leaves room for the exchange: 16 blocks fewer than the two per SM that attention would use.
    const int spare = 2 * properties.multiProcessorCount - 16;
    add_case(grid, plan, "auto/spare_blocks:16", {.slices = 0, .attention_blocks = spare});
    if (grid.tpa > 1) continue;
    // Cases with long exchanges: short contexts of many sequences.
    for (const std::int64_t batch : {256, 1024}) {
      const Plan many = Plan::of(grid.kvp, grid.tpa, batch, 4194304 / batch, budget);
      add_case(grid, many, "off", {.slices = 1});
      add_case(grid, many, "2", {.slices = 2});
      add_case(grid, many, "4", {.slices = 4});
      add_case(grid, many, "auto", {.slices = 0});
    }
  }
  if (num_gpus < 2) return;
  for (const std::int64_t layers : {1, 8, 80}) {  // one short sequence, to measure the host
    const Plan plan = Plan::of_layers(2, layers, 1, 8192, budget);
    add_case.template operator()<cuda::PeerComm>(Grid{2, 1}, plan, "off", {.slices = 1});
  }
}

}  // namespace helix::bench
