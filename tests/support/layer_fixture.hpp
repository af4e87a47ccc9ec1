// SPDX-License-Identifier: Apache-2.0
// One random layer, cut up for the ranks of a topology and run over several steps on a thread a rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include <helix/backend.hpp>
#include <helix/batch_buffer.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/decode_layer.hpp>
#include <helix/hop_b.hpp>
#include <helix/job_comms.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/layer_weights.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "support/oracle.hpp"
#include "support/ranks.hpp"

namespace helix::test {

/// Sizes and features of a random layer.
struct LayerSpec {
  std::int64_t hidden = 32;
  std::int64_t query_heads = 8;
  std::int64_t kv_heads = 4;
  std::int64_t head_dim = 16;
  std::int64_t ffn = 48;
  bool has_biases = false;
  bool has_head_norms = false;
  bool has_sinks = false;
  std::int64_t window = 0;
  double soft_cap = 0.0;
  bool is_interleaved = false;
  std::int64_t rotary_dim = 16;
  double magnitude = 1.0;

  bool is_mla = false;  // then head_dim is kv_lora + rope
  std::int64_t q_lora = 24;
  std::int64_t kv_lora = 16;
  std::int64_t nope = 8;
  std::int64_t rope = 8;
  std::int64_t value = 12;

  std::int64_t experts = 0;  // 0: a dense layer
  std::int64_t expert_ffn = 16;
  std::int64_t shared_ffn = 0;
  std::int64_t top_k = 2;
  std::int64_t groups = 1;
  std::int64_t groups_kept = 1;
  bool is_sigmoid = false;
  bool normalize = false;
  double routed_scale = 1.0;

  /// The experts of DeepSeek-V3, or else V2, in small.
  void add_deepseek_experts(bool is_v3) {
    experts = 8;
    shared_ffn = 24;
    groups = 4;
    groups_kept = 2;
    top_k = 3;
    is_sigmoid = is_v3;
    normalize = is_v3;
    routed_scale = is_v3 ? 2.5 : 1.0;
  }
};

/// Random weights, exact in bf16 too, so that narrower copies hold the same numbers.
class RandomMatrices {
 public:
  explicit RandomMatrices(std::uint32_t seed) : generator_(seed) {}

  oracle::Matrix operator()(std::int64_t rows, std::int64_t cols, double spread, double centre = 0.0) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    oracle::Matrix m{rows, cols, std::vector<float>(static_cast<std::size_t>(rows * cols))};
    for (float& x : m.values)
      x = static_cast<float>(bf16(static_cast<float>(centre + spread * 1.7 * uniform(generator_))));
    return m;
  }

  /// Keeps the size of what it multiplies: spread 1 / sqrt(cols).
  oracle::Matrix projection(std::int64_t rows, std::int64_t cols) {
    return (*this)(rows, cols, 1.0 / std::sqrt(static_cast<double>(cols)));
  }
  oracle::Matrix norm(std::int64_t cols) { return (*this)(1, cols, 0.2, 1.0); }
  std::vector<float> vector(std::int64_t count, double spread) { return (*this)(1, count, spread).values; }

  oracle::FeedForward feed_forward(std::int64_t hidden, std::int64_t ffn, bool has_biases) {
    oracle::FeedForward f{
        projection(ffn, hidden), projection(ffn, hidden), projection(hidden, ffn), {}, {}, {}};
    if (has_biases) {
      f.gate_bias = (*this)(1, ffn, 0.5);
      f.up_bias = (*this)(1, ffn, 0.5);
      f.down_bias = (*this)(1, hidden, 0.5);
    }
    return f;
  }

 private:
  std::mt19937 generator_;
};

inline oracle::Layer random_layer(const LayerSpec& spec, std::uint32_t seed) {
  RandomMatrices random(seed);
  oracle::Layer layer;
  const std::int64_t m = spec.hidden;
  layer.hidden = m;
  layer.query_heads = spec.query_heads;
  layer.kv_heads = spec.is_mla ? 1 : spec.kv_heads;
  layer.head_dim = spec.is_mla ? spec.kv_lora + spec.rope : spec.head_dim;
  layer.window = spec.window;
  layer.soft_cap = spec.soft_cap;
  layer.is_interleaved = spec.is_interleaved;
  layer.magnitude = spec.magnitude;
  layer.softmax_scale =
      1.0 / std::sqrt(static_cast<double>(spec.is_mla ? spec.nope + spec.rope : spec.head_dim));
  const std::int64_t pairs = (spec.is_mla ? spec.rope : spec.rotary_dim) / 2;
  for (std::int64_t i = 0; i < pairs; ++i)
    layer.inverse_frequency.push_back(
        static_cast<float>(std::pow(10.0, -4.0 * static_cast<double>(i) / static_cast<double>(pairs))));
  layer.input_norm = random.norm(m);
  layer.post_attention_norm = random.norm(m);

  if (spec.is_mla) {
    layer.q_lora = spec.q_lora;
    layer.kv_lora = spec.kv_lora;
    layer.nope = spec.nope;
    layer.rope = spec.rope;
    layer.value = spec.value;
    oracle::LatentAttention a;
    if (spec.q_lora > 0) {
      a.q_a = random.projection(spec.q_lora, m);
      a.q_a_norm = random.norm(spec.q_lora);
    }
    a.q_b = random.projection(spec.query_heads * (spec.nope + spec.rope), spec.q_lora > 0 ? spec.q_lora : m);
    a.kv_a = random.projection(spec.kv_lora + spec.rope, m);
    a.kv_a_norm = random.norm(spec.kv_lora);
    a.k_b = random.projection(spec.query_heads * spec.nope, spec.kv_lora);
    a.v_b = random.projection(spec.query_heads * spec.value, spec.kv_lora);
    a.o = random.projection(m, spec.query_heads * spec.value);
    layer.latent = std::move(a);
  } else {
    const std::int64_t q_rows = spec.query_heads * spec.head_dim;
    const std::int64_t kv_rows = spec.kv_heads * spec.head_dim;
    oracle::Attention a;
    a.q = random.projection(q_rows, m);
    a.k = random.projection(kv_rows, m);
    a.v = random.projection(kv_rows, m);
    a.o = random.projection(m, q_rows);
    if (spec.has_biases) {
      a.q_bias = random(1, q_rows, 0.5);
      a.k_bias = random(1, kv_rows, 0.5);
      a.v_bias = random(1, kv_rows, 0.5);
      a.o_bias = random(1, m, 0.5);
    }
    if (spec.has_head_norms) {
      a.q_norm = random.norm(spec.head_dim);
      a.k_norm = random.norm(spec.head_dim);
    }
    if (spec.has_sinks) a.sinks = random.vector(spec.query_heads, 1.0);
    layer.attention = std::move(a);
  }

  if (spec.experts == 0) {
    layer.dense = random.feed_forward(m, spec.ffn, spec.has_biases);
  } else {
    oracle::Experts e;
    e.router = random.projection(spec.experts, m);
    if (spec.is_sigmoid) e.router_bias = random.vector(spec.experts, 0.3);
    for (std::int64_t i = 0; i < spec.experts; ++i)
      e.routed.push_back(random.feed_forward(m, spec.expert_ffn, false));
    if (spec.shared_ffn > 0) e.shared = random.feed_forward(m, spec.shared_ffn, false);
    e.is_sigmoid = spec.is_sigmoid;
    e.top_k = spec.top_k;
    e.num_groups = spec.groups;
    e.groups_kept = spec.groups_kept;
    e.normalize = spec.normalize;
    e.scale = spec.routed_scale;
    layer.experts = std::move(e);
  }
  return layer;
}

inline ModelShape shape_of(const oracle::Layer& layer) {
  ModelShape shape;
  shape.num_query_heads = layer.query_heads;
  shape.num_kv_heads = layer.kv_heads;
  shape.head_dim = layer.head_dim;
  shape.value_dim = layer.latent ? layer.kv_lora : layer.head_dim;
  shape.hidden = layer.hidden;
  shape.num_layers = 1;
  if (layer.latent) {
    shape.mla = MlaShape{.q_lora_rank = layer.q_lora,
                         .kv_lora_rank = layer.kv_lora,
                         .qk_nope_head_dim = layer.nope,
                         .qk_rope_head_dim = layer.rope,
                         .v_head_dim = layer.value};
  }
  if (layer.dense) shape.ffn = layer.dense->down.cols;
  if (layer.experts) {
    const oracle::Experts& e = *layer.experts;
    shape.moe = MoeShape{.num_experts = static_cast<std::int64_t>(e.routed.size()),
                         .top_k = e.top_k,
                         .expert_ffn = e.routed.front().down.cols,
                         .shared_ffn = e.shared ? e.shared->down.cols : 0};
  }
  return shape;
}

/// The numbers that are not weights; `inverse_frequency` is the device's copy.
inline LayerConfig config_of(const oracle::Layer& layer, const float* inverse_frequency) {
  LayerConfig config;
  config.norm_epsilon = static_cast<float>(layer.norm_epsilon);
  config.softmax_scale = static_cast<float>(layer.softmax_scale);
  config.window = layer.window;
  config.soft_cap = static_cast<float>(layer.soft_cap);
  config.rope = {inverse_frequency, static_cast<std::int64_t>(layer.inverse_frequency.size()) * 2,
                 layer.is_interleaved, static_cast<float>(layer.magnitude)};
  config.latent_norm_epsilon = static_cast<float>(layer.mla_norm_epsilon);
  if (layer.experts) {
    const oracle::Experts& e = *layer.experts;
    config.router = {e.is_sigmoid ? RouterScoring::sigmoid : RouterScoring::softmax, e.num_groups,
                     e.groups_kept, e.normalize, static_cast<float>(e.scale)};
  }
  return config;
}

inline oracle::Matrix rows_of(const oracle::Matrix& m, Range range) {
  if (m.empty()) return {};
  return {range.size(), m.cols, std::vector<float>(m.row(range.begin), m.row(range.end))};
}

inline oracle::Matrix columns_of(const oracle::Matrix& m, Range range) {
  if (m.empty()) return {};
  oracle::Matrix out{m.rows, range.size(), {}};
  for (std::int64_t r = 0; r < m.rows; ++r)
    out.values.insert(out.values.end(), m.row(r) + range.begin, m.row(r) + range.end);
  return out;
}

/// One below the other; of biases ([1, n]) one behind the other.
inline oracle::Matrix stacked(std::initializer_list<oracle::Matrix> parts, bool is_bias = false) {
  oracle::Matrix out;
  for (const oracle::Matrix& part : parts) {
    out.rows = is_bias ? part.rows : out.rows + part.rows;
    out.cols = is_bias ? out.cols + part.cols : part.cols;
    out.values.insert(out.values.end(), part.values.begin(), part.values.end());
  }
  return out;
}

inline Range scaled(Range range, std::int64_t width) {
  return {range.begin * width, range.end * width};
}

/// How W_o's columns are dealt out. The wrong way is for the negative control of invariant 1.
enum class OutputShard { by_combined_heads, by_stage_rank };

/// One rank's slices of a layer in the backend's memory.
template <Backend B>
class DeviceLayer {
 public:
  DeviceLayer(B& backend, const Topology& topo, const oracle::Layer& layer, DType dtype, OutputShard o_shard)
      : backend_(&backend), stream_(backend.create_stream()), dtype_(dtype) {
    const int rank = backend.comms().stage->rank();
    Range combined = topo.combined_heads(rank);
    if (o_shard == OutputShard::by_stage_rank)
      combined = {rank * combined.size(), (rank + 1) * combined.size()};
    weights_.input_norm = put(layer.input_norm);
    weights_.post_attention_norm = put(layer.post_attention_norm);
    if (layer.latent) {
      weights_.attention = latent(layer, *layer.latent, combined);
    } else {
      weights_.attention = grouped(topo, rank, layer, *layer.attention, combined);
    }
    if (layer.experts) {
      const oracle::Experts& experts = *layer.experts;
      MoeWeights moe;
      moe.router = put(experts.router);
      moe.router_bias = put_floats(experts.router_bias);
      const Range mine = topo.experts(rank);
      for (std::int64_t e = mine.begin; e < mine.end; ++e) {
        const DenseFfnWeights slice =
            feed_forward(experts.routed[static_cast<std::size_t>(e)], topo.expert_ffn(rank), false);
        moe.experts.push_back({slice.gate_up, slice.down});
      }
      if (experts.shared) moe.shared = feed_forward(*experts.shared, topo.shared_expert_ffn(rank), false);
      weights_.ffn = std::move(moe);
    } else {
      weights_.ffn = feed_forward(*layer.dense, topo.ffn(rank), rank == 0);
    }
    config_ = config_of(layer, put_floats(layer.inverse_frequency));
    backend.synchronize(stream_);
  }

  const LayerWeights& weights() const { return weights_; }
  const LayerConfig& config() const { return config_; }

 private:
  GqaWeights grouped(const Topology& topo, int rank, const oracle::Layer& layer, const oracle::Attention& a,
                     Range combined) {
    const std::int64_t d = layer.head_dim;
    const Range q = scaled(topo.query_heads(rank), d);
    const Range kv = scaled(topo.kv_heads(rank), d);
    GqaWeights w;
    w.qkv = put(stacked({rows_of(a.q, q), rows_of(a.k, kv), rows_of(a.v, kv)}));
    w.qkv_bias =
        put(stacked({columns_of(a.q_bias, q), columns_of(a.k_bias, kv), columns_of(a.v_bias, kv)}, true));
    w.q_norm = put(a.q_norm);
    w.k_norm = put(a.k_norm);
    w.o = put(columns_of(a.o, scaled(combined, d)));
    if (rank == 0) w.o_bias = put(a.o_bias);
    if (!a.sinks.empty())
      w.sinks = put_floats({a.sinks.begin() + combined.begin, a.sinks.begin() + combined.end});
    return w;
  }

  MlaWeights latent(const oracle::Layer& layer, const oracle::LatentAttention& a, Range combined) {
    MlaWeights w;
    w.q_a = put(a.q_a);
    w.q_a_norm = put(a.q_a_norm);
    w.q_b = put(a.q_b);
    w.kv_a = put(a.kv_a);
    w.kv_a_norm = put(a.kv_a_norm);
    oracle::Matrix absorb{layer.query_heads * layer.kv_lora, layer.nope, {}};  // k_b, transposed head by head
    for (std::int64_t h = 0; h < layer.query_heads; ++h)
      for (std::int64_t l = 0; l < layer.kv_lora; ++l)
        for (std::int64_t n = 0; n < layer.nope; ++n)
          absorb.values.push_back(a.k_b.row(h * layer.nope + n)[l]);
    w.w_uk = put(absorb);
    w.w_uv = put(rows_of(a.v_b, scaled(combined, layer.value)));
    w.o = put(columns_of(a.o, scaled(combined, layer.value)));
    return w;
  }

  DenseFfnWeights feed_forward(const oracle::FeedForward& f, Range part, bool adds_down_bias) {
    DenseFfnWeights w;
    w.gate_up = put(stacked({rows_of(f.gate, part), rows_of(f.up, part)}));
    w.gate_up_bias = put(stacked({columns_of(f.gate_bias, part), columns_of(f.up_bias, part)}, true));
    w.down = put(columns_of(f.down, part));
    if (adds_down_bias) w.down_bias = put(f.down_bias);
    return w;
  }

  /// An absent matrix gives an empty view; a slice without rows or columns a view of its sizes.
  WeightView put(const oracle::Matrix& m) {
    if (m.rows == 0 && m.cols == 0) return {};
    const std::size_t bytes = m.values.size() * size_bytes(dtype_);
    std::vector<std::byte> host(bytes);
    dispatch(dtype_, [&]<class T>(T*) {
      for (std::size_t i = 0; i < m.values.size(); ++i) {
        const T value(m.values[i]);
        std::memcpy(host.data() + i * sizeof(T), &value, sizeof(T));
      }
    });
    return {put_bytes(host.data(), bytes), dtype_, m.rows, m.cols};
  }

  const float* put_floats(const std::vector<float>& values) {
    if (values.empty()) return nullptr;
    return reinterpret_cast<const float*>(put_bytes(values.data(), values.size() * sizeof(float)));
  }

  const std::byte* put_bytes(const void* host, std::size_t bytes) {
    memory_.push_back(backend_->allocate(std::max<std::size_t>(bytes, 1)));
    backend_->upload(memory_.back().data(), host, bytes, stream_);
    return memory_.back().data();
  }

  B* backend_;
  typename B::Stream stream_;
  DType dtype_;
  std::vector<typename B::Buffer> memory_;
  LayerWeights weights_;
  LayerConfig config_;
};

/// What all ranks do in one step.
struct Step {
  std::vector<std::int64_t> counts;    // new tokens of each sequence, 0 included
  std::vector<std::int64_t> rejected;  // of each sequence, truncated after the step
  std::vector<float> hidden;           // [tokens, M]

  std::int64_t num_tokens() const {
    std::int64_t n = 0;
    for (std::int64_t count : counts) n += count;
    return n;
  }
};

struct Script {
  std::int64_t sequences = 0;
  std::vector<Step> steps;

  std::int64_t max_step_tokens() const {
    std::int64_t n = 0;
    for (const Step& step : steps) n = std::max(n, step.num_tokens());
    return n;
  }
  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> total(static_cast<std::size_t>(sequences), 0);
    for (const Step& step : steps)
      for (std::size_t b = 0; b < total.size(); ++b) total[b] += step.counts[b];
    return total;
  }
};

/// A ragged prefill, a decode step in which some sequences rest, four draft tokens of which some are
/// rejected, then one token a sequence and a prefill chunk of the last one.
inline Script ragged_script(std::int64_t sequences, std::int64_t hidden, std::uint32_t seed) {
  Script script;
  script.sequences = sequences;
  const auto add = [&](auto count_of, auto rejected_of) {
    Step step;
    for (std::int64_t b = 0; b < sequences; ++b) {
      step.counts.push_back(count_of(b));
      step.rejected.push_back(rejected_of(b));
    }
    step.hidden = RandomMatrices(seed + static_cast<std::uint32_t>(script.steps.size()))
                      .vector(step.num_tokens() * hidden, 1.0);
    script.steps.push_back(std::move(step));
  };
  const auto none = [](std::int64_t) { return 0; };
  add([](std::int64_t b) { return b % 5 == 1 ? 0 : 1 + b * 5 % 9 + (b == 0 ? 12 : 0); }, none);
  add([](std::int64_t b) { return b % 4 == 3 ? 0 : 1; }, none);
  add([](std::int64_t) { return 4; }, [](std::int64_t b) { return (b + 3) % 5; });
  add([&](std::int64_t b) { return b == sequences - 1 ? 6 : 1; }, none);
  return script;
}

/// The oracle's hidden states of every step, and its cache at the end.
struct Expected {
  std::vector<std::vector<double>> hidden;
  std::vector<oracle::History> histories;
  double routing_margin = 1e30;
};

inline Expected run_oracle(const oracle::Layer& layer, const Script& script) {
  Expected expected;
  expected.histories.resize(static_cast<std::size_t>(script.sequences));
  for (const Step& step : script.steps) {
    std::vector<double> all;
    std::size_t begin = 0;
    for (std::size_t b = 0; b < expected.histories.size(); ++b) {
      const auto count = static_cast<std::size_t>(step.counts[b] * layer.hidden);
      const std::vector<double> out =
          oracle::run_layer(layer, expected.histories[b], std::span(step.hidden).subspan(begin, count),
                            &expected.routing_margin);
      all.insert(all.end(), out.begin(), out.end());
      begin += count;
      auto& rows = expected.histories[b].rows;
      rows.resize(rows.size() - static_cast<std::size_t>(step.rejected[b]));
    }
    expected.hidden.push_back(std::move(all));
  }
  return expected;
}

struct LayerRunOptions {
  std::int64_t chunk = 1;
  std::int64_t page_tokens = 4;
  int hop_b_slices = 1;
  int max_slices = 4;
  DType weight_dtype = DType::f32;
  DType kv_dtype = DType::f32;
  OutputShard o_shard = OutputShard::by_combined_heads;
};

/// One rank with everything that decode_layer takes.
template <Backend B>
class LayerRank {
 public:
  LayerRank(B& backend, const Topology& topo, const oracle::Layer& layer, const Script& script,
            const LayerRunOptions& options)
      : backend_(&backend),
        shape_(topo.rank_shape(backend.comms().stage->rank())),
        options_(options),
        stream_(backend.create_stream()),
        layer_(backend, topo, layer, options.weight_dtype, options.o_shard),
        cache_(backend, topo, cache_spec(topo, script, options)),
        exchange_(backend, {.max_tokens = std::max<std::int64_t>(1, script.max_step_tokens()),
                            .num_query_heads = shape_.query_heads,
                            .value_dim = shape_.value_dim,
                            .max_slices = options.max_slices}),
        hop_b_(backend, options.max_slices),
        batch_(backend, std::max<std::int64_t>(1, script.sequences),
               std::max<std::int64_t>(1, script.max_step_tokens())),
        workspace_(backend.allocate(decode_layer_workspace_bytes(backend, shape_, script.max_step_tokens()))),
        hidden_(backend.allocate(static_cast<std::size_t>(script.max_step_tokens() * layer.hidden) *
                                 sizeof(float))) {
    // What a layer reads of its workspace it has written itself: NaN would show otherwise.
    const std::vector<float> poison(workspace_.size_bytes() / sizeof(float), std::nanf(""));
    backend.upload(workspace_.data(), poison.data(), poison.size() * sizeof(float), stream_);
    for (std::int64_t b = 0; b < script.sequences; ++b) sequences_.push_back(cache_.add());
  }

  LayerRank(const LayerRank&) = delete;
  LayerRank& operator=(const LayerRank&) = delete;
  ~LayerRank() {
    try {
      backend_->synchronize(stream_);  // after a failure work may still be queued on the memory below
    } catch (...) {
    }
  }

  /// Uploads a step's inputs and makes room for its tokens.
  void prepare(const Step& step) {
    std::vector<std::int32_t> offsets{0};
    std::vector<std::int32_t> slots;
    std::vector<std::int64_t> positions;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      for (std::int64_t t = 0; t < step.counts[b]; ++t) positions.push_back(cache_.length(sequences_[b]) + t);
      offsets.push_back(static_cast<std::int32_t>(positions.size()));
      slots.push_back(cache_.slot(sequences_[b]));
    }
    cache_.append(sequences_, step.counts, stream_);
    batch_.set(offsets, positions, slots, stream_);
    tokens_ = step.num_tokens();
    backend_->upload(hidden_.data(), step.hidden.data(), step.hidden.size() * sizeof(float), stream_);
  }

  DecodeLayerOptions<B> layer_options() {
    return {.exchange = &exchange_,
            .hop_b = &hop_b_,
            .hop_b_slices = options_.hop_b_slices,
            .workspace = {workspace_.data(), workspace_.size_bytes()}};
  }
  TensorView<float, 2> hidden() const {
    return {reinterpret_cast<float*>(hidden_.data()), {tokens_, shape_.hidden}};
  }

  /// Queues the layer on what prepare() uploaded.
  void launch() {
    decode_layer(*backend_, shape_, layer_.config(), layer_.weights(), cache_.layer(0), batch_.batch(),
                 hidden(), layer_options(), stream_);
  }

  /// Waits for the hidden states, then forgets the rejected tokens.
  std::vector<float> finish(const Step& step) {
    std::vector<float> out(static_cast<std::size_t>(hidden().size()));
    backend_->download(out.data(), hidden_.data(), out.size() * sizeof(float), stream_);
    backend_->synchronize(stream_);
    for (std::size_t b = 0; b < sequences_.size(); ++b)
      if (step.rejected[b] > 0)
        cache_.truncate(sequences_[b], cache_.length(sequences_[b]) - step.rejected[b]);
    return out;
  }

  std::vector<float> run(const Step& step) {
    prepare(step);
    launch();
    return finish(step);
  }

  /// This rank's keys of one sequence [local tokens, heads, D] and, behind them, its values. MLA: the rows.
  std::vector<float> read_kv(std::size_t sequence) {
    const KvFormat format = cache_.layer(0).format;
    const std::int64_t tokens = cache_.local_length(sequences_[sequence]);
    const std::int64_t keys = tokens * format.num_heads * format.head_dim;
    const std::int64_t values = format.is_latent ? 0 : tokens * format.num_heads * format.value_dim;
    std::vector<float> out(static_cast<std::size_t>(keys + values));
    if (out.empty()) return out;
    auto device = backend_->allocate(out.size() * sizeof(float));
    auto* data = reinterpret_cast<float*>(device.data());
    TensorView<float, 3> v;
    if (!format.is_latent) v = {data + keys, {tokens, format.num_heads, format.value_dim}};
    cache_.read(sequences_[sequence], 0, {0, tokens}, {data, {tokens, format.num_heads, format.head_dim}}, v,
                stream_);
    backend_->download(out.data(), data, out.size() * sizeof(float), stream_);
    backend_->synchronize(stream_);
    return out;
  }

  const LayerConfig& config() const { return layer_.config(); }
  const LayerWeights& weights() const { return layer_.weights(); }
  ShardedKVCache<B>& cache() { return cache_; }
  BatchBuffer<B>& batch() { return batch_; }
  typename B::Stream stream() const { return stream_; }

 private:
  static KvCacheSpec cache_spec(const Topology& topo, const Script& script, const LayerRunOptions& options) {
    const std::vector<std::int64_t> lengths = script.lengths();
    KvCacheSpec spec;
    spec.format = options.kv_dtype;
    spec.layers = 1;
    spec.page_tokens = options.page_tokens;
    spec.chunk = options.chunk;
    spec.max_sequences = std::max<std::int64_t>(1, script.sequences);
    spec.pages = std::max<std::int64_t>(
        1, PageLedger::pages_needed(KvLayout(topo.kvp(), options.chunk), options.page_tokens, lengths));
    return spec;
  }

  B* backend_;
  RankShape shape_;
  LayerRunOptions options_;
  typename B::Stream stream_;
  DeviceLayer<B> layer_;
  ShardedKVCache<B> cache_;
  KvpAllToAll<B> exchange_;
  HopB<B> hop_b_;
  BatchBuffer<B> batch_;
  typename B::Buffer workspace_;
  typename B::Buffer hidden_;
  std::vector<SequenceId> sequences_;
  std::int64_t tokens_ = 0;
};

/// What one rank ended with.
struct RankResult {
  std::vector<std::vector<float>> hidden;  // of each step
  std::vector<std::vector<float>> kv;      // of each sequence, LayerRank::read_kv
  Range kv_heads;
  std::int64_t kvp_rank = 0;
  std::size_t kv_bytes = 0;  // of the pages that hold tokens
};

/// Makes a rank's backend of its communicators: `stage` by stage_rank, its KVP group split off.
template <Backend B, SplittableComm Comm>
B make_backend(const Topology& topo, Comm stage) {
  Comm kvp = split_kvp(stage, topo);
  return B(std::move(stage), std::move(kvp));
}

/// The script on a thread a rank, which has a communicator of LocalComm's kind. @throws with every rank's
/// message if any fails.
template <Backend B = cpu::Backend<cpu::LocalComm>, SplittableComm LocalComm = cpu::LocalComm>
std::vector<RankResult> run_script(const Topology& topo, const oracle::Layer& layer, const Script& script,
                                   const LayerRunOptions& options) {
  std::vector<RankResult> results(static_cast<std::size_t>(topo.stage_size()));
  run_ranks_or_throw(LocalComm::create_group(topo.stage_size()), [&](LocalComm& comm) {
    B backend = make_backend<B>(topo, comm);
    LayerRank<B> rank(backend, topo, layer, script, options);
    RankResult& result = results[static_cast<std::size_t>(comm.rank())];
    for (const Step& step : script.steps) result.hidden.push_back(rank.run(step));
    for (std::size_t b = 0; b < static_cast<std::size_t>(script.sequences); ++b)
      result.kv.push_back(rank.read_kv(b));
    result.kv_heads = topo.kv_heads(comm.rank());
    result.kvp_rank = topo.stage_coordinates(comm.rank()).kvp_rank;
    result.kv_bytes = rank.cache().allocated_bytes();
  });
  return results;
}

}  // namespace helix::test
