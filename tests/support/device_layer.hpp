// SPDX-License-Identifier: Apache-2.0
// One rank's slices of a layer in a backend's memory, cut by the test's own arithmetic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include <helix/backend.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/topology.hpp>

#include "support/oracle.hpp"
#include "support/random_layer.hpp"

namespace helix::test {

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

/// Stacks matrices on top of each other; joins biases ([1, n]) end to end.
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

/// How W_o's columns are distributed. The wrong way is for the negative control of invariant 1.
enum class OutputShard { by_combined_heads, by_stage_rank };

/// One rank's slices of a layer in the backend's memory.
template <Backend B>
class DeviceLayer {
 public:
  DeviceLayer(B& backend, const Topology& topo, const oracle::Layer& layer, DType dtype, OutputShard o_shard,
              const MlaPrefill& mla_prefill = {})
      : backend_(&backend), stream_(backend.create_stream()), dtype_(dtype) {
    const int rank = backend.comms().stage->rank();
    Range combined = topo.combined_heads(rank);
    if (o_shard == OutputShard::by_stage_rank)
      combined = {rank * combined.size(), (rank + 1) * combined.size()};
    weights_.input_norm = put(layer.input_norm);
    weights_.post_attention_norm = put(layer.post_attention_norm);
    if (layer.latent) {
      weights_.attention = latent(rank, layer, *layer.latent, combined);
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
    config_.mla_prefill = mla_prefill;
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

  MlaWeights latent(int rank, const oracle::Layer& layer, const oracle::LatentAttention& a, Range combined) {
    MlaWeights w;
    const bool has_query_lora = !a.q_a.empty();
    w.qkv_a = put(stacked({has_query_lora ? a.q_a : a.q_b, a.kv_a}));
    w.qkv_a_bias = put(stacked({a.q_a_bias, a.kv_a_bias}, true));
    w.q_a_norm = put(a.q_a_norm);
    if (has_query_lora) w.q_b = put(a.q_b);
    w.kv_a_norm = put(a.kv_a_norm);
    oracle::Matrix absorb{layer.query_heads * layer.kv_lora, layer.nope, {}};  // k_b, transposed per head
    for (std::int64_t h = 0; h < layer.query_heads; ++h)
      for (std::int64_t l = 0; l < layer.kv_lora; ++l)
        for (std::int64_t n = 0; n < layer.nope; ++n)
          absorb.values.push_back(a.k_b.row(h * layer.nope + n)[l]);
    w.w_uk = put(absorb);
    w.w_uv = put(rows_of(a.v_b, scaled(combined, layer.value)));
    w.expand_k = put(a.k_b);
    w.expand_v = put(a.v_b);
    w.o = put(columns_of(a.o, scaled(combined, layer.value)));
    if (rank == 0) w.o_bias = put(a.o_bias);
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

  /// An absent matrix gives an empty view; a slice without rows or columns gives a view with its sizes.
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

}  // namespace helix::test
