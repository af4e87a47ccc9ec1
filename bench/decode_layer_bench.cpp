// SPDX-License-Identifier: Apache-2.0
// decode_layer on the CPU: one layer shaped like Llama-3.1-8B's at half its width, bf16 weights and KV, one
// query token, on 1 and 4 ranks of one process.
//
// A step reads this layer's weights and the KV once; the counters compare that with a streaming read by all
// cores. KVP replicates the query, key and value projection: 13 MB more of weights for each further KVP rank.
// One host thread drives all ranks, because calls only queue work.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <helix/batch_buffer.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/decode_layer.hpp>
#include <helix/plan/model.hpp>
#include <helix/rank_shape.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/splitmix64.hpp>

#include "ceilings.hpp"
#include "support/worse.hpp"

namespace {

using Backend = helix::cpu::Backend<helix::cpu::LocalComm>;

/// One layer of Llama-3.1-8B at half its width: half as many heads, of the same size.
const helix::ModelShape kModel = [] {
  helix::ModelShape shape = helix::plan::model_preset("llama-3.1-8b").shape;
  shape.num_query_heads /= 2;
  shape.num_kv_heads /= 2;
  shape.hidden /= 2;
  shape.ffn /= 2;
  shape.num_layers = 1;
  return shape;
}();

constexpr std::int64_t kPageTokens = 64;
constexpr std::int64_t kChunk = 16;
constexpr float kWeightScale = 1.0f / 64;  // approximately keeps the magnitude of what it multiplies

/// A number in [-1, 1) that depends only on `place`, so that every topology sees the same model and cache.
float number(std::uint64_t place) {
  const std::uint64_t mixed = helix::detail::splitmix64_mix(place);
  return static_cast<float>(static_cast<std::int64_t>(mixed >> 40)) * 0x1p-23f - 1.0f;
}

/// A whole weight matrix of the model: its index and its shape.
struct Matrix {
  std::uint64_t id;
  std::int64_t rows;
  std::int64_t cols;
};

const Matrix kQuery{1, kModel.num_query_heads* kModel.head_dim, kModel.hidden};
const Matrix kKey{2, kModel.num_kv_heads* kModel.head_dim, kModel.hidden};
const Matrix kValue{3, kModel.num_kv_heads* kModel.head_dim, kModel.hidden};
const Matrix kOutput{4, kModel.hidden, kModel.num_query_heads* kModel.head_dim};
const Matrix kGate{5, kModel.ffn, kModel.hidden};
const Matrix kUp{6, kModel.ffn, kModel.hidden};
const Matrix kDown{7, kModel.hidden, kModel.ffn};

/// A weight slice under construction: rows of whole matrices, or columns of them.
class Slice {
 public:
  void add(const Matrix& m, helix::Range rows, helix::Range cols) {
    cols_ = cols.size();
    for (std::int64_t r = rows.begin; r < rows.end; ++r)
      for (std::int64_t c = cols.begin; c < cols.end; ++c)
        values_.push_back(
            helix::bf16(kWeightScale * number(m.id << 40 | static_cast<std::uint64_t>(r * m.cols + c))));
  }
  helix::WeightView view() const {
    return {values_.data(), helix::DType::bf16, static_cast<std::int64_t>(values_.size()) / cols_, cols_};
  }
  std::size_t size_bytes() const { return values_.size() * sizeof(helix::bf16); }

 private:
  std::vector<helix::bf16> values_;
  std::int64_t cols_ = 1;
};

helix::Range heads_to_elements(helix::Range heads) {
  return {heads.begin * kModel.head_dim, heads.end * kModel.head_dim};
}

/// One rank of the stage, with its slices and its share of the cache.
class Rank {
 public:
  Rank(Backend backend, const helix::Topology& topo, std::int64_t context)
      : backend_(std::move(backend)),
        stream_(backend_.create_stream()),
        shape_(topo.rank_shape(backend_.comms().stage->rank())),
        cache_(backend_, topo,
               {.num_layers = 1,
                .page_tokens = kPageTokens,
                .num_pages = context / topo.kvp() / kPageTokens + 1,
                .chunk = kChunk,
                .max_sequences = 1}),
        batch_(backend_, 1, 1),
        exchange_(backend_, helix::KvpAllToAllSpec::of_layers(shape_, 1)),
        hop_b_(backend_, 1),
        hidden_(static_cast<std::size_t>(kModel.hidden)) {
    fill_weights(topo);
    for (std::int64_t pair = 0; pair < kModel.head_dim / 2; ++pair)
      inverse_frequency_.push_back(
          static_cast<float>(std::pow(500000.0, -2.0 * static_cast<double>(pair) / kModel.head_dim)));
    config_.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kModel.head_dim));
    config_.rope = {inverse_frequency_.data(), kModel.head_dim};
    workspace_ = backend_.allocate(helix::decode_layer_workspace_bytes(backend_, shape_, 1));
    fill_cache(topo, context);
    const std::int32_t offsets[] = {0, 1};
    const std::int64_t position = context - 1;
    const std::int32_t slot = 0;
    batch_.set(offsets, {&position, 1}, {&slot, 1}, stream_);
    backend_.synchronize(stream_);
  }

  /// Every step starts from the same hidden state and rewrites the last token of the context.
  void queue_step() {
    for (std::size_t i = 0; i < hidden_.size(); ++i) hidden_[i] = number(i);
    helix::decode_layer(backend_, shape_, config_, weights_, cache_.layer(0), batch_.batch(),
                        {hidden_.data(), {1, kModel.hidden}},
                        {.exchange = &exchange_,
                         .hop_b = &hop_b_,
                         .hop_b_slices = 1,
                         .workspace = {workspace_.data(), workspace_.size_bytes()}},
                        stream_);
  }
  void wait() { backend_.synchronize(stream_); }

  const std::vector<float>& hidden() const { return hidden_; }
  std::size_t weight_bytes() const {
    return qkv_.size_bytes() + o_.size_bytes() + gate_up_.size_bytes() + down_.size_bytes();
  }

 private:
  void fill_weights(const helix::Topology& topo) {
    const int rank = backend_.comms().stage->rank();
    const helix::Range all{0, kModel.hidden};
    const helix::Range kv = heads_to_elements(topo.kv_heads(rank));
    qkv_.add(kQuery, heads_to_elements(topo.query_heads(rank)), all);
    qkv_.add(kKey, kv, all);
    qkv_.add(kValue, kv, all);
    o_.add(kOutput, all, heads_to_elements(topo.combined_heads(rank)));
    gate_up_.add(kGate, topo.ffn(rank), all);
    gate_up_.add(kUp, topo.ffn(rank), all);
    down_.add(kDown, all, topo.ffn(rank));
    norm_.assign(static_cast<std::size_t>(kModel.hidden), helix::bf16(1.0f));
    const helix::WeightView norm{norm_.data(), helix::DType::bf16, 1, kModel.hidden};
    helix::GqaWeights attention;
    attention.qkv = qkv_.view();
    attention.o = o_.view();
    helix::DenseFfnWeights ffn;
    ffn.gate_up = gate_up_.view();
    ffn.down = down_.view();
    weights_ = {norm, norm, attention, ffn};
  }

  void fill_cache(const helix::Topology& topo, std::int64_t context) {
    constexpr std::int64_t kRows = 1024;
    const helix::Range heads = topo.kv_heads(backend_.comms().stage->rank());
    const helix::SequenceId sequence = cache_.add();
    cache_.append(sequence, context, stream_);
    std::vector<float> k(static_cast<std::size_t>(kRows * heads.size() * kModel.head_dim));
    std::vector<float> v(k.size());
    for (std::int64_t first = 0; first < context; first += kRows) {
      const std::int64_t rows = std::min(kRows, context - first);
      std::size_t at = 0;
      for (std::int64_t token = first; token < first + rows; ++token)
        for (std::int64_t i = heads.begin * kModel.head_dim; i < heads.end * kModel.head_dim; ++i, ++at) {
          const auto place = static_cast<std::uint64_t>(token * kModel.num_kv_heads * kModel.head_dim + i);
          k[at] = number(std::uint64_t{8} << 40 | place);
          v[at] = number(std::uint64_t{9} << 40 | place);
        }
      cache_.write(sequence, 0, first, {k.data(), {rows, heads.size(), kModel.head_dim}},
                   {v.data(), {rows, heads.size(), kModel.head_dim}}, stream_);
      backend_.synchronize(stream_);
    }
  }

  Backend backend_;
  Backend::Stream stream_;
  helix::RankShape shape_;
  helix::ShardedKVCache<Backend> cache_;
  helix::BatchBuffer<Backend> batch_;
  helix::KvpAllToAll<Backend> exchange_;
  helix::HopB<Backend> hop_b_;
  Slice qkv_, o_, gate_up_, down_;
  std::vector<helix::bf16> norm_;
  std::vector<float> inverse_frequency_;
  helix::LayerConfig config_;
  helix::LayerWeights weights_;
  helix::cpu::Buffer workspace_;
  std::vector<float> hidden_;
};

/// A stage whose ranks share the cores.
class Stage {
 public:
  Stage(int kvp, int tpa, std::int64_t context) : topo_({.kvp = kvp, .tpa = tpa}, kModel) {
    const int size = topo_.stage_size();
    const auto stage = helix::cpu::LocalComm::create_group(size);
    std::vector<std::vector<helix::cpu::LocalComm>> groups;
    for (int t = 0; t < tpa; ++t) groups.push_back(helix::cpu::LocalComm::create_group(kvp));
    const int threads = std::max(1, helix::bench::num_cores() / size);
    for (int rank = 0; rank < size; ++rank) {
      const helix::RankCoordinates at = topo_.stage_coordinates(rank);
      const auto& group = groups[static_cast<std::size_t>(at.tpa_rank)];
      Backend backend(stage[static_cast<std::size_t>(rank)], group[static_cast<std::size_t>(at.kvp_rank)],
                      threads);
      ranks_.push_back(std::make_unique<Rank>(std::move(backend), topo_, context));
    }
  }

  void step() {
    for (const auto& rank : ranks_) rank->queue_step();
    for (const auto& rank : ranks_) rank->wait();
  }

  const std::vector<float>& hidden() const { return ranks_.front()->hidden(); }
  bool ranks_agree() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [&](const auto& rank) { return rank->hidden() == hidden(); });
  }
  std::size_t weight_bytes() const {
    return std::accumulate(ranks_.begin(), ranks_.end(), std::size_t{0},
                           [](std::size_t sum, const auto& rank) { return sum + rank->weight_bytes(); });
  }

 private:
  helix::Topology topo_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

/// The hidden state after a step on one rank. Other topologies must reproduce it.
const std::vector<float>& hidden_of_one_rank(std::int64_t context) {
  static std::map<std::int64_t, std::vector<float>> known;
  std::vector<float>& hidden = known[context];
  if (hidden.empty()) {
    Stage alone(1, 1, context);
    alone.step();
    hidden = alone.hidden();
  }
  return hidden;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double worst = 0.0;
  double scale = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    worst = helix::test::worse(worst, static_cast<double>(std::abs(got[i] - expected[i])));
    scale = std::max(scale, static_cast<double>(std::abs(expected[i])));
  }
  return worst / scale;
}

void bench_decode_layer(benchmark::State& state, int kvp, int tpa, std::int64_t context) {
  const std::vector<float>& expected = hidden_of_one_rank(context);
  Stage stage(kvp, tpa, context);
  const double kv_bytes = 2.0 * 2.0 * static_cast<double>(context * kModel.num_kv_heads * kModel.head_dim);
  const double bytes = kv_bytes + static_cast<double>(stage.weight_bytes());
  const double flops = static_cast<double>(stage.weight_bytes()) +
                       4.0 * static_cast<double>(context * kModel.num_query_heads * kModel.head_dim);
  helix::bench::choose_kernels({"attention.bf16.rows4", "linear.bf16.rows1"}, [&] { stage.step(); });
  helix::bench::run_beside_ceilings(state, helix::bench::num_cores(), bytes, flops,
                                    helix::bench::random_bf16(std::size_t{256} << 20), [&] { stage.step(); });
  state.counters["kv_MB"] = 1e-6 * kv_bytes;
  state.counters["weights_MB"] = 1e-6 * static_cast<double>(stage.weight_bytes());
  const double error = relative_error(stage.hidden(), expected);
  state.counters["max_error"] = error;
  if (!stage.ranks_agree()) state.SkipWithError("ranks hold different hidden states");
  if (!(error < 1e-4)) state.SkipWithError("the result that was timed differs from one rank's");
}

const int kRegistered = [] {
  struct Grid {
    int kvp;
    int tpa;
  };
  for (const Grid grid : {Grid{1, 1}, Grid{4, 1}, Grid{2, 2}}) {
    for (const std::int64_t context : {1 << 10, 1 << 13, 1 << 15, 1 << 17}) {
      const std::string name = "decode_layer/kvp:" + std::to_string(grid.kvp) +
                               "/tpa:" + std::to_string(grid.tpa) + "/context:" + std::to_string(context);
      benchmark::RegisterBenchmark(name.c_str(),
                                   [grid, context](benchmark::State& state) {
                                     bench_decode_layer(state, grid.kvp, grid.tpa, context);
                                   })
          ->UseManualTime()
          ->Iterations(9)
          ->Unit(benchmark::kMillisecond);
    }
  }
  return 0;
}();

}  // namespace
