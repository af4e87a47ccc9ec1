// SPDX-License-Identifier: Apache-2.0
// Every operation as one scalar loop in double precision, straight from its definition: the oracle of the
// suites.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include <helix/backend.hpp>
#include <helix/error.hpp>

/// The operations on host memory, at once.
namespace helix::contract::reference {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

inline double load(const void* data, DType dtype, std::int64_t index) {
  return dispatch(
      dtype, [&]<class T>(T*) -> double { return static_cast<float>(static_cast<const T*>(data)[index]); });
}

inline void store(void* data, DType dtype, std::int64_t index, double value) {
  dispatch(dtype, [&]<class T>(T*) { static_cast<T*>(data)[index] = T(static_cast<float>(value)); });
}

inline double load(const WeightView& weight, std::int64_t row, std::int64_t col) {
  return load(weight.data, weight.dtype, row * weight.cols + col);
}

inline double silu(double x) {
  return x / (1.0 + std::exp(-x));
}

inline void rms_norm(const RmsNormArgs<float>& args) {
  const auto& x = args.residual;
  for (std::int64_t r = 0; r < x.extent(0); ++r) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < x.extent(1); ++i) {
      if (args.delta.data() != nullptr) x(r, i) = static_cast<float>(double{x(r, i)} + args.delta(r, i));
      squares += double{x(r, i)} * x(r, i);
    }
    if (args.out.data() == nullptr) continue;
    const double rms = std::sqrt(squares / static_cast<double>(x.extent(1)) + double{args.epsilon});
    for (std::int64_t i = 0; i < x.extent(1); ++i)
      args.out(r, i) = static_cast<float>(x(r, i) / rms * load(args.weight, 0, i));
  }
}

inline void linear(const LinearArgs<float>& args) {
  for (std::int64_t r = 0; r < args.in.extent(0); ++r) {
    for (std::int64_t n = 0; n < args.weight.rows; ++n) {
      double sum = args.bias.empty() ? 0.0 : load(args.bias, 0, n);
      if (args.accumulate) sum += double{args.out(r, n)};
      for (std::int64_t k = 0; k < args.weight.cols; ++k) sum += args.in(r, k) * load(args.weight, n, k);
      args.out(r, n) = static_cast<float>(sum);
    }
  }
}

inline void head_linear(const HeadLinearArgs<float>& args) {
  const std::int64_t width = args.out.extent(2);
  for (std::int64_t t = 0; t < args.in.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.in.extent(1); ++h) {
      for (std::int64_t n = 0; n < width; ++n) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < args.in.extent(2); ++k)
          sum += args.in(t, h, k) * load(args.weight, h * width + n, k);
        args.out(t, h, n) = static_cast<float>(sum);
      }
    }
  }
}

inline void head_rms_norm(const HeadRmsNormArgs<float>& args) {
  const auto& x = args.x;
  for (std::int64_t t = 0; t < x.extent(0); ++t) {
    for (std::int64_t h = 0; h < x.extent(1); ++h) {
      double squares = 0.0;
      for (std::int64_t i = 0; i < x.extent(2); ++i) squares += double{x(t, h, i)} * x(t, h, i);
      const double rms = std::sqrt(squares / static_cast<double>(x.extent(2)) + double{args.epsilon});
      for (std::int64_t i = 0; i < x.extent(2); ++i)
        x(t, h, i) = static_cast<float>(x(t, h, i) / rms * load(args.weight, 0, i));
    }
  }
}

inline void rope(const RopeArgs<float>& args) {
  const std::int64_t pairs = args.rope.rotary_dim / 2;
  std::vector<double> head(static_cast<std::size_t>(args.in.extent(2)));
  for (std::int64_t t = 0; t < args.in.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.in.extent(1); ++h) {
      for (std::int64_t i = 0; i < args.in.extent(2); ++i)
        head[static_cast<std::size_t>(i)] = args.in(t, h, i);
      for (std::int64_t i = 0; i < pairs; ++i) {
        const auto a = static_cast<std::size_t>(args.rope.is_interleaved ? 2 * i : i);
        const auto b = static_cast<std::size_t>(args.rope.is_interleaved ? 2 * i + 1 : i + pairs);
        const double angle = static_cast<double>(args.positions[t]) * args.rope.inverse_frequency[i];
        const double cosine = std::cos(angle) * args.rope.magnitude;
        const double sine = std::sin(angle) * args.rope.magnitude;
        const double x = head[a];
        const double y = head[b];
        head[a] = x * cosine - y * sine;
        head[b] = y * cosine + x * sine;
      }
      for (std::int64_t i = 0; i < args.in.extent(2); ++i)
        args.out(t, h, i) = static_cast<float>(head[static_cast<std::size_t>(i)]);
    }
  }
}

/// Column `i` of the key (is_value false) or value row of a local token: its address in the pools.
struct KvElement {
  void* pool;
  std::int64_t index;
};
inline KvElement kv_element(const KvView& kv, std::int64_t slot, std::int64_t local, std::int64_t head,
                            bool is_value, std::int64_t i) {
  const KvFormat& format = kv.format;
  const std::int64_t row = kv.page_begins != nullptr ? kv.page_begins[slot] : slot * kv.max_pages;
  const std::int64_t page = kv.page_table[row + local / format.page_tokens];
  const auto at = [&](void* pool, const KvStrides& strides, std::int64_t column) {
    return KvElement{pool, page * strides.page + head * strides.head +
                               local % format.page_tokens * strides.token + column};
  };
  if (is_value && !format.is_latent) return at(kv.v, format.v, i);
  if (format.is_latent && i >= format.value_dim) return at(kv.rope, format.rope, i - format.value_dim);
  return at(kv.k, format.k, i);
}

inline double kv_scale(const KvView& kv, std::int64_t head, bool is_value) {
  const float* scales = is_value && !kv.format.is_latent ? kv.v_scale : kv.k_scale;
  return scales == nullptr ? 1.0 : double{scales[head]};
}

inline double kv_value(const KvView& kv, std::int64_t slot, std::int64_t local, std::int64_t head,
                       bool is_value, std::int64_t i) {
  const KvElement at = kv_element(kv, slot, local, head, is_value, i);
  return load(at.pool, kv.format.dtype, at.index) * kv_scale(kv, head, is_value);
}

/// Stores row `row` of k and v as the token at global `position`, if this rank owns it.
inline void store_token(const KvView& kv, std::int64_t slot, std::int64_t position,
                        const TensorView<const float, 3>& k, const TensorView<const float, 3>& v,
                        std::int64_t row) {
  if (position < 0 || (position / kv.layout.chunk()) % kv.layout.kvp() != kv.kvp_rank) return;
  const std::int64_t period = kv.layout.chunk() * kv.layout.kvp();
  const std::int64_t local = position / period * kv.layout.chunk() + position % kv.layout.chunk();
  const auto store_row = [&](std::int64_t h, bool is_value, std::int64_t columns,
                             const TensorView<const float, 3>& values) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const KvElement at = kv_element(kv, slot, local, h, is_value, i);
      store(at.pool, kv.format.dtype, at.index, values(row, h, i) / kv_scale(kv, h, is_value));
    }
  };
  for (std::int64_t h = 0; h < kv.format.num_heads; ++h) {
    store_row(h, false, kv.format.head_dim, k);
    if (!kv.format.is_latent) store_row(h, true, kv.format.value_dim, v);
  }
}

inline void append_kv(const AppendKvArgs<float>& args) {
  for (std::int64_t b = 0; b < args.batch.num_sequences(); ++b)
    for (std::int64_t t = args.batch.query_offsets[b]; t < args.batch.query_offsets[b + 1]; ++t)
      store_token(args.kv, args.batch.sequence_slots[b], args.batch.positions[t], args.k, args.v, t);
}

inline void write_kv(const WriteKvArgs<float>& args) {
  for (std::int64_t row = 0; row < args.k.extent(0); ++row)
    store_token(args.kv, args.sequence_slot, args.first_position + row, args.k, args.v, row);
}

inline void read_kv(const ReadKvArgs& args) {
  for (std::int64_t row = 0; row < args.k.extent(0); ++row) {
    for (std::int64_t h = 0; h < args.kv.format.num_heads; ++h) {
      const std::int64_t local = args.first_local + row;
      for (std::int64_t i = 0; i < args.kv.format.head_dim; ++i)
        args.k(row, h, i) = static_cast<float>(kv_value(args.kv, args.sequence_slot, local, h, false, i));
      if (args.kv.format.is_latent) continue;
      for (std::int64_t i = 0; i < args.kv.format.value_dim; ++i)
        args.v(row, h, i) = static_cast<float>(kv_value(args.kv, args.sequence_slot, local, h, true, i));
    }
  }
}

inline void stamp(const StampArgs& args) {
  *args.epoch += 1;
  const ExchangeHeader header{exchange_epoch(*args.epoch, args.positions, args.tokens),
                              static_cast<std::uint32_t>(args.tokens),
                              static_cast<std::uint32_t>(args.sender)};
  for (std::int64_t i = 0; i < args.count; ++i)
    std::memcpy(args.message + i * args.message_bytes, &header, sizeof(header));
}

inline void partial_attention(const PartialAttentionArgs<float>& args) {
  if (args.sink.headers.message != nullptr && args.batch.num_tokens() > 0) stamp(args.sink.headers);
  const KvView& kv = args.kv;
  const std::int64_t group = args.q.extent(1) / kv.format.num_heads;
  for (std::int64_t b = 0; b < args.batch.num_sequences(); ++b) {
    const std::int64_t slot = args.batch.sequence_slots[b];
    for (std::int64_t t = args.batch.query_offsets[b]; t < args.batch.query_offsets[b + 1]; ++t) {
      // Token by token over global positions, so that the closed forms of KvLayout are not taken for granted.
      std::vector<std::int64_t> visible;
      const std::int64_t last = args.batch.positions[t];
      for (std::int64_t p = args.window > 0 ? std::max<std::int64_t>(0, last + 1 - args.window) : 0;
           p <= last; ++p) {
        const std::int64_t chunk = p / kv.layout.chunk();
        if (chunk % kv.layout.kvp() == kv.kvp_rank)
          visible.push_back(chunk / kv.layout.kvp() * kv.layout.chunk() + p % kv.layout.chunk());
      }
      for (std::int64_t h = 0; h < args.q.extent(1); ++h) {
        std::vector<double> scores;
        for (std::int64_t local : visible) {
          double score = 0.0;
          for (std::int64_t i = 0; i < kv.format.head_dim; ++i)
            score += args.q(t, h, i) * kv_value(kv, slot, local, h / group, false, i);
          score *= args.scale;
          if (args.soft_cap > 0.0f) score = args.soft_cap * std::tanh(score / args.soft_cap);
          scores.push_back(score);
        }
        const double highest =
            scores.empty() ? kMinusInfinity : *std::max_element(scores.begin(), scores.end());
        double total = 0.0;
        for (double& score : scores) total += score = std::exp(score - highest);
        for (std::int64_t i = 0; i < kv.format.value_dim; ++i) {
          double sum = 0.0;
          for (std::size_t j = 0; j < visible.size(); ++j)
            sum += scores[j] * kv_value(kv, slot, visible[j], h / group, true, i);
          args.sink.out(t - args.sink.first_token, h, i) =
              visible.empty() ? 0.0f : static_cast<float>(sum / total);
        }
        args.sink.lse(t - args.sink.first_token, h) =
            static_cast<float>(visible.empty() ? kMinusInfinity : highest + std::log(total));
      }
    }
  }
}

/// The natural logarithm by its definition.
inline double natural_lse(double lse, LseConvention convention) {
  if (convention == LseConvention::base2) return std::isinf(lse) ? kMinusInfinity : std::log(std::exp2(lse));
  if (convention == LseConvention::natural_positive_inf_if_empty && std::isinf(lse)) return kMinusInfinity;
  return lse;
}

inline void pack_partial(const PackPartialArgs<float>& args) {
  for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.out.extent(1); ++h) {
      args.packed_lse(t, h) = static_cast<float>(natural_lse(args.lse(t, h), args.convention));
      for (std::int64_t i = 0; i < args.out.extent(2); ++i) args.packed_out(t, h, i) = args.out(t, h, i);
    }
  }
  stamp(args.headers);
}

inline void check_exchange(const CheckExchangeArgs& args) {
  ExchangeHeader own;
  std::memcpy(&own, args.sent, sizeof(own));
  const std::uint64_t epoch = own.epoch;
  for (std::int64_t peer = 0; peer < args.peers; ++peer) {
    ExchangeHeader header;
    std::memcpy(&header, args.messages + peer * args.message_bytes, sizeof(header));
    HELIX_EXPECTS(header.epoch == epoch && header.tokens == args.tokens && header.sender == peer,
                  ErrorCode::out_of_step, "message of peer ", peer, " carries epoch ", header.epoch, ", ",
                  header.tokens, " tokens, sender ", header.sender, "; expected ", epoch, ", ", args.tokens,
                  ", ", peer);
  }
}

inline void lse_combine(const LseCombineArgs<float>& args) {
  const auto partials = [&](std::int64_t r, std::int64_t t, std::int64_t h) {
    return natural_lse(args.partial_lse(r, t, h), args.convention);
  };
  const std::int64_t ranks = args.partial_lse.extent(0);
  for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.out.extent(1); ++h) {
      double highest = args.sink != nullptr ? double{args.sink[h]} : kMinusInfinity;
      for (std::int64_t r = 0; r < ranks; ++r) highest = std::max(highest, partials(r, t, h));
      double total = args.sink != nullptr ? std::exp(args.sink[h] - highest) : 0.0;
      std::vector<double> sums(static_cast<std::size_t>(args.out.extent(2)), 0.0);
      for (std::int64_t r = 0; r < ranks; ++r) {
        if (std::isinf(partials(r, t, h))) continue;
        const double weight = std::exp(partials(r, t, h) - highest);
        total += weight;
        for (std::size_t i = 0; i < sums.size(); ++i)
          sums[i] += weight * args.partial_out(r, t, h, static_cast<std::int64_t>(i));
      }
      for (std::size_t i = 0; i < sums.size(); ++i)
        args.out(t, h, static_cast<std::int64_t>(i)) =
            total > 0.0 ? static_cast<float>(sums[i] / total) : 0.0f;
      if (args.lse.data() != nullptr)
        args.lse(t, h) = static_cast<float>(total > 0.0 ? highest + std::log(total) : kMinusInfinity);
    }
  }
}

inline void swiglu(const SwigluArgs<float>& args) {
  const std::int64_t width = args.out.extent(1);
  for (std::int64_t r = 0; r < args.out.extent(0); ++r)
    for (std::int64_t i = 0; i < width; ++i)
      args.out(r, i) = static_cast<float>(silu(args.gate_up(r, i)) * args.gate_up(r, width + i));
}

inline void router_logits(const RouterLogitsArgs<float>& args) {
  linear({.in = args.in, .weight = args.weight, .bias = {}, .out = args.out});
}

/// Indices of the `count` largest, best first, the smaller index on ties.
inline std::vector<std::int64_t> largest(const std::vector<double>& values, std::int64_t count) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

inline void route(const RouteArgs& args) {
  const std::int64_t experts = args.logits.extent(1);
  const std::int64_t group = experts / args.num_groups;
  for (std::int64_t t = 0; t < args.logits.extent(0); ++t) {
    std::vector<double> scores;
    double highest = kMinusInfinity;
    for (std::int64_t e = 0; e < experts; ++e) highest = std::max(highest, double{args.logits(t, e)});
    double total = 0.0;
    for (std::int64_t e = 0; e < experts; ++e) {
      const double logit = args.logits(t, e);
      const bool is_softmax = args.scoring == RouterScoring::softmax;
      scores.push_back(is_softmax ? std::exp(logit - highest) : 1.0 / (1.0 + std::exp(-logit)));
      total += scores.back();
    }
    if (args.scoring == RouterScoring::softmax)
      for (double& score : scores) score /= total;
    std::vector<double> choice = scores;
    if (args.bias != nullptr)
      for (std::size_t e = 0; e < choice.size(); ++e) choice[e] += args.bias[e];

    std::vector<double> group_scores;
    for (std::int64_t g = 0; g < args.num_groups; ++g) {
      std::vector<double> members(choice.begin() + g * group, choice.begin() + (g + 1) * group);
      std::sort(members.rbegin(), members.rend());
      const bool takes_two = args.scoring == RouterScoring::sigmoid && group > 1;
      group_scores.push_back(takes_two ? members[0] + members[1] : members[0]);
    }
    const std::vector<std::int64_t> kept = largest(group_scores, args.groups_kept);
    for (std::int64_t e = 0; e < experts; ++e)
      if (std::find(kept.begin(), kept.end(), e / group) == kept.end())
        choice[static_cast<std::size_t>(e)] = kMinusInfinity;

    const std::vector<std::int64_t> chosen = largest(choice, args.experts.extent(1));
    double sum = 0.0;
    for (std::int64_t e : chosen) sum += scores[static_cast<std::size_t>(e)];
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const auto k = static_cast<std::int64_t>(i);
      const double score = scores[static_cast<std::size_t>(chosen[i])];
      args.experts(t, k) = static_cast<std::int32_t>(chosen[i]);
      args.weights(t, k) = static_cast<float>(score / (args.normalize ? sum + 1e-20 : 1.0) * args.scale);
    }
  }
}

inline void expert_ffn(const ExpertFfnArgs<float>& args) {
  const auto num_local = static_cast<std::int64_t>(args.local_experts.size());
  for (std::int64_t t = 0; t < args.in.extent(0); ++t) {
    std::vector<double> sums(static_cast<std::size_t>(args.out.extent(1)), 0.0);
    for (std::int64_t k = 0; k < args.experts.extent(1); ++k) {
      const std::int64_t local = args.experts(t, k) - args.first_expert;
      if (local < 0 || local >= num_local) continue;
      const ExpertWeights& weights = args.local_experts[static_cast<std::size_t>(local)];
      const std::int64_t width = weights.down.cols;
      for (std::int64_t f = 0; f < width; ++f) {
        double gate = 0.0;
        double up = 0.0;
        for (std::int64_t i = 0; i < args.in.extent(1); ++i) {
          gate += args.in(t, i) * load(weights.gate_up, f, i);
          up += args.in(t, i) * load(weights.gate_up, width + f, i);
        }
        const double activated = args.weights(t, k) * silu(gate) * up;
        for (std::size_t m = 0; m < sums.size(); ++m)
          sums[m] += activated * load(weights.down, static_cast<std::int64_t>(m), f);
      }
    }
    for (std::size_t m = 0; m < sums.size(); ++m) {
      float& out = args.out(t, static_cast<std::int64_t>(m));
      out = static_cast<float>(out + sums[m]);
    }
  }
}

inline void embed(const EmbedArgs<float>& args) {
  for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
    const std::int64_t row = args.ids[t] - args.first_id;
    const bool is_here = row >= 0 && row < args.table.rows;
    for (std::int64_t i = 0; i < args.out.extent(1); ++i)
      args.out(t, i) = is_here ? static_cast<float>(load(args.table, row, i)) : 0.0f;
  }
}

inline void gather_rows(const GatherRowsArgs<float>& args) {
  for (std::int64_t r = 0; r < args.out.extent(0); ++r)
    for (std::int64_t i = 0; i < args.out.extent(1); ++i) args.out(r, i) = args.in(args.rows[r], i);
}

inline void logit_norms(const LogitNormsArgs<float>& args) {
  for (std::int64_t row = 0; row < args.logits.extent(1); ++row) {
    double norm = 0.0;
    for (std::int64_t s = 0; s < args.logits.extent(0); ++s)
      for (std::int64_t i = 0; i < args.shard_begins[s + 1] - args.shard_begins[s]; ++i)
        norm = std::hypot(norm, double{args.logits(s, row, i)});
    args.norms[row] = static_cast<float>(norm);
  }
}

inline void advance(const AdvanceArgs& args) {
  for (std::int64_t i = 0; i < args.count; ++i)
    if (args.values[i] != -1) args.values[i] = args.values[i] + 1;
}

/// Probability of each id of one row, by softmax(logits / temperature); temperature 0: of the logits.
inline std::vector<double> probabilities(const SampleArgs<float>& args, std::int64_t row) {
  std::vector<double> values;
  for (std::int64_t s = 0; s < args.logits.extent(0); ++s)
    for (std::int64_t i = args.shard_begins[s]; i < args.shard_begins[s + 1]; ++i)
      values.push_back(args.logits(s, row, i - args.shard_begins[s]));
  const double highest = *std::max_element(values.begin(), values.end());
  const double temperature = args.temperature > 0.0f ? double{args.temperature} : 1.0;
  double total = 0.0;
  for (double& value : values) total += value = std::exp((value - highest) / temperature);
  for (double& value : values) value /= total;
  return values;
}

/// The ids that top_p keeps, likeliest first.
inline std::vector<std::int64_t> nucleus(const std::vector<double>& likely, double top_p) {
  std::vector<std::int64_t> order = largest(likely, static_cast<std::int64_t>(likely.size()));
  double reached = 0.0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    reached += likely[static_cast<std::size_t>(order[i])];
    if (reached >= top_p) {
      order.resize(i + 1);
      break;
    }
  }
  return order;
}

/// The concept fixes the distribution and not the generator; this draw is one of many legal ones.
inline void sample(const SampleArgs<float>& args) {
  for (std::int64_t row = 0; row < args.logits.extent(1); ++row) {
    const std::vector<double> likely = probabilities(args, row);
    const std::vector<std::int64_t> kept = nucleus(likely, args.temperature > 0.0f ? args.top_p : 0.0);
    std::int64_t drawn = kept.front();
    if (args.temperature > 0.0f) {
      std::uint64_t x = args.seed + 0x9e3779b97f4a7c15u * (args.counters[row] + 1);  // splitmix64
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      x ^= x >> 31;
      double total = 0.0;
      for (std::int64_t id : kept) total += likely[static_cast<std::size_t>(id)];
      double left = static_cast<double>(x >> 11) * 0x1p-53 * total;
      for (std::int64_t id : kept) {
        drawn = id;
        left -= likely[static_cast<std::size_t>(id)];
        if (left < 0.0) break;
      }
    }
    args.tokens[row] = static_cast<std::int32_t>(drawn);
  }
}

}  // namespace helix::contract::reference
