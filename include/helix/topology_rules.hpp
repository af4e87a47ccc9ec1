// SPDX-License-Identifier: Apache-2.0
// The rules of a grid of ranks, each with its message, and the search for legal grids, behind Topology.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/model_shape.hpp>
#include <helix/topology_spec.hpp>

namespace helix::detail {

/// N = KVP * TPA, which may exceed an int.
inline std::int64_t stage_size_of(const TopologySpec& spec) {
  return std::int64_t{spec.kvp} * spec.tpa;
}

/// TPF as given, or N / EP; 0 if neither is a positive integer.
inline std::int64_t tpf_of(const TopologySpec& spec) {
  if (spec.tpf != 0) return spec.tpf;
  if (spec.ep < 1 || stage_size_of(spec) % spec.ep != 0) return 0;
  return stage_size_of(spec) / spec.ep;
}

/// What is wrong with the model alone, whatever the topology.
inline std::vector<std::string> shape_violations(const ModelShape& shape) {
  struct Size {
    std::string_view name;
    std::int64_t value;
    std::int64_t smallest;
    std::int64_t largest;
  };
  const MoeShape moe = shape.moe.value_or(MoeShape{});
  const MlaShape mla = shape.mla.value_or(MlaShape{});
  const Size sizes[] = {{"num_query_heads", shape.num_query_heads, 1, kMaxCount},
                        {"num_kv_heads", shape.num_kv_heads, 1, kMaxCount},
                        {"head_dim", shape.head_dim, 1, 2 * kMaxWidth},
                        {"value_dim", shape.value_dim, 1, kMaxWidth},
                        {"hidden", shape.hidden, 1, kMaxWidth},
                        {"ffn", shape.ffn, 0, kMaxWidth},
                        {"expert_ffn", shape.expert_ffn(), 0, kMaxWidth},
                        {"shared_ffn", shape.shared_ffn(), 0, kMaxWidth},
                        {"num_experts", shape.num_experts(), 0, kMaxCount},
                        {"top_k", moe.top_k, 1, kMaxTopK},
                        {"first_dense_layers", moe.first_dense_layers, 0, kMaxCount},
                        {"layer_stride", moe.layer_stride, 1, kMaxCount},
                        {"q_lora_rank", mla.q_lora_rank, 0, kMaxWidth},
                        {"kv_lora_rank", mla.kv_lora_rank, shape.is_mla() ? 1 : 0, kMaxWidth},
                        {"qk_nope_head_dim", mla.qk_nope_head_dim, 0, kMaxWidth},
                        {"qk_rope_head_dim", mla.qk_rope_head_dim, 0, kMaxWidth},
                        {"v_head_dim", mla.v_head_dim, 0, kMaxWidth},
                        {"vocab", shape.vocab, 0, kMaxVocabulary},
                        {"num_layers", shape.num_layers, 0, kMaxCount}};
  std::vector<std::string> found;
  for (const Size& size : sizes) {
    if (size.value >= size.smallest && size.value <= size.largest) continue;
    found.push_back(message({"the model's ", size.name, " is ", size.value, "; it must be in [",
                             size.smallest, ", ", size.largest, "]"}));
  }
  if (!found.empty()) return found;
  const std::int64_t row = shape.num_query_heads * (shape.head_dim + shape.value_dim);
  if (row > kMaxRowElements) {
    found.push_back(
        message({"the model's num_query_heads ", shape.num_query_heads, " * (head_dim ", shape.head_dim,
                 " + value_dim ", shape.value_dim, ") is ", row, "; it must be at most ", kMaxRowElements}));
  }
  if (shape.num_query_heads % shape.num_kv_heads != 0) {
    found.push_back(message({"the model's num_query_heads ", shape.num_query_heads,
                             " is not a multiple of its num_kv_heads ", shape.num_kv_heads}));
  }
  if (shape.is_mla() && shape.num_kv_heads != 1) {
    found.push_back(message({"the model is MLA with num_kv_heads ", shape.num_kv_heads,
                             "; the latent is one KV head: set it to 1"}));
  }
  if (shape.is_mla() && (shape.head_dim != mla.latent_dim() || shape.value_dim != mla.kv_lora_rank)) {
    found.push_back(
        message({"the model has latent attention with head_dim ", shape.head_dim, " and value_dim ",
                 shape.value_dim, "; they must be kv_lora_rank + qk_rope_head_dim = ", mla.latent_dim(),
                 " and kv_lora_rank = ", mla.kv_lora_rank}));
  }
  if (shape.num_experts() > 0 && moe.top_k > moe.num_experts) {
    found.push_back(message({"the model's top_k is ", moe.top_k, "; it has ", moe.num_experts, " experts"}));
  }
  if (shape.num_experts() > 0 && shape.expert_ffn() == 0) {
    found.push_back(message({"the model has ", shape.num_experts(), " experts but expert_ffn is 0"}));
  }
  return found;
}

/// Adds widths below 1 to `found`. Returns whether there are none: products of widths have a meaning only
/// then.
inline bool widths_are_sound(const TopologySpec& spec, std::vector<std::string>& found) {
  bool is_sound = true;
  const auto at_least_one = [&](std::string_view name, int width) {
    if (width >= 1) return;
    found.push_back(message({name, " is ", width, "; it must be at least 1"}));
    is_sound = false;
  };
  at_least_one("KVP", spec.kvp);
  at_least_one("TPA", spec.tpa);
  at_least_one("EP", spec.ep);
  if (spec.tpf != 0) at_least_one("TPF", spec.tpf);
  at_least_one("PP", spec.pp);
  at_least_one("DP", spec.dp);
  if (spec.attn_dp != 1) {
    found.push_back(message({"attn_dp is ", spec.attn_dp, "; data-parallel attention is not built: use 1"}));
  }
  return is_sound;
}

/// Adds what is wrong with the number of ranks, of a stage and of the job, to `found`.
inline void add_size_violations(const TopologySpec& spec, std::vector<std::string>& found) {
  const std::int64_t n = stage_size_of(spec);
  if (n > kMaxRanks || n * spec.pp > kMaxRanks / spec.dp) {
    found.push_back(message({"KVP ", spec.kvp, " * TPA ", spec.tpa, " * PP ", spec.pp, " * DP ", spec.dp,
                             " exceeds ", kMaxRanks, " ranks, the most of a job"}));
  }
  if (spec.tpf == 0 && n % spec.ep != 0) {
    found.push_back(message(
        {"N = KVP * TPA = ", n, " is not a multiple of EP ", spec.ep, ", so no TPF gives TPF * EP == N"}));
  } else if (const std::int64_t ffn_ranks = tpf_of(spec) * spec.ep; ffn_ranks != n) {
    found.push_back(message({"KVP ", spec.kvp, " * TPA ", spec.tpa, " = ", n, " differs from TPF ", spec.tpf,
                             " * EP ", spec.ep, " = ", ffn_ranks, "; attention and FFN use the same ranks"}));
  }
}

/// Adds what keeps the heads from being split over KVP x TPA to `found`.
inline void add_attention_violations(const TopologySpec& spec, const ModelShape& shape,
                                     std::vector<std::string>& found) {
  const auto violated = [&](std::initializer_list<MessagePart> parts) { found.push_back(message(parts)); };
  if (shape.is_mla() && spec.tpa != 1) {
    violated({"TPA is ", spec.tpa, " but MLA's latent cannot be split by heads; use TPA 1 and a larger KVP"});
  } else if (spec.tpa > shape.num_kv_heads) {
    if (!spec.allow_kv_duplication) {
      violated({"TPA ", spec.tpa, " exceeds the ", shape.num_kv_heads,
                " KV heads, which would store each more than once; use a larger KVP instead, or "
                "allow_kv_duplication"});
    } else if (spec.tpa % shape.num_kv_heads != 0) {
      violated({"TPA ", spec.tpa, " is not a multiple of the ", shape.num_kv_heads,
                " KV heads, which allow_kv_duplication requires"});
    }
  } else if (shape.num_kv_heads % spec.tpa != 0) {
    violated({"num_kv_heads ", shape.num_kv_heads, " is not a multiple of TPA ", spec.tpa});
  }
  if (const std::int64_t n = stage_size_of(spec); shape.num_query_heads % n != 0)
    violated({"num_query_heads ", shape.num_query_heads, " is not a multiple of N = KVP * TPA = ", n});
}

/// Adds what keeps the FFN and the experts from being split over TPF x EP to `found`.
inline void add_ffn_violations(const TopologySpec& spec, const ModelShape& shape,
                               std::vector<std::string>& found) {
  const auto violated = [&](std::initializer_list<MessagePart> parts) { found.push_back(message(parts)); };
  const std::int64_t n = stage_size_of(spec);
  const std::string_view uneven_hint = "; choose widths that divide it, or allow_uneven_ffn";
  if (!spec.allow_uneven_ffn) {
    if (shape.ffn % n != 0)
      violated({"ffn ", shape.ffn, " is not a multiple of N = KVP * TPA = ", n, uneven_hint});
    if (shape.shared_ffn() % n != 0) {
      violated({"shared_ffn ", shape.shared_ffn(), " is not a multiple of N = KVP * TPA = ", n, uneven_hint});
    }
    const std::int64_t tpf = tpf_of(spec);
    if (shape.num_experts() > 0 && tpf > 0 && shape.expert_ffn() % tpf != 0) {
      violated({"expert_ffn ", shape.expert_ffn(), " is not a multiple of TPF ", tpf, uneven_hint});
    }
  }
  if (spec.ep > 1 && shape.num_experts() == 0) {
    violated({"EP is ", spec.ep, " but the model has no routed experts; use EP 1"});
  } else if (shape.num_experts() % spec.ep != 0) {
    violated({"num_experts ", shape.num_experts(), " is not a multiple of EP ", spec.ep});
  }
}

/// Each violated rule of a grid with its values; empty if it is legal.
inline std::vector<std::string> grid_violations(const TopologySpec& spec, const ModelShape& shape) {
  std::vector<std::string> found = shape_violations(shape);
  const bool shape_is_sound = found.empty();
  if (!widths_are_sound(spec, found)) return found;
  add_size_violations(spec, found);
  // From here on rules divide by sizes of the model.
  if (!shape_is_sound) return found;
  add_attention_violations(spec, shape, found);
  add_ffn_violations(spec, shape, found);
  if (shape.num_layers > 0 && spec.pp > shape.num_layers) {
    found.push_back(message({"PP ", spec.pp, " exceeds num_layers ", shape.num_layers,
                             ", which would leave stages without a layer"}));
  }
  return found;
}

/// The divisors of n >= 1, in ascending order.
inline std::vector<std::int64_t> divisors(std::int64_t n) {
  std::vector<std::int64_t> found;
  for (std::int64_t d = 1; d * d <= n; ++d) {
    if (n % d == 0) found.push_back(d);
  }
  for (std::size_t i = found.size(); i-- > 0;) {
    if (found[i] * found[i] != n) found.push_back(n / found[i]);
  }
  return found;
}

/// Legal grids of `stage_size` ranks under the permissions of `permissions`. Walks divisors only: short for
/// any size.
inline std::vector<TopologySpec> legal_grids(const ModelShape& shape, std::int64_t stage_size,
                                             const TopologySpec& permissions) {
  std::vector<TopologySpec> legal;
  if (stage_size < 1 || !shape_violations(shape).empty() || shape.num_query_heads % stage_size != 0)
    return legal;
  const std::vector<std::int64_t> widths = divisors(stage_size);
  for (std::int64_t tpa : widths) {
    if (shape.num_kv_heads % tpa != 0 && !(permissions.allow_kv_duplication && tpa % shape.num_kv_heads == 0))
      continue;
    for (std::int64_t ep : widths) {
      if (ep > 1 && (shape.num_experts() == 0 || shape.num_experts() % ep != 0)) continue;
      TopologySpec spec;
      spec.kvp = static_cast<int>(stage_size / tpa);
      spec.tpa = static_cast<int>(tpa);
      spec.tpf = static_cast<int>(stage_size / ep);
      spec.ep = static_cast<int>(ep);
      spec.allow_kv_duplication = permissions.allow_kv_duplication;
      spec.allow_uneven_ffn = permissions.allow_uneven_ffn;
      if (grid_violations(spec, shape).empty()) legal.push_back(spec);
    }
  }
  return legal;
}

/// The widths of a stage as messages name them: "KVP 4 x TPA 2, TPF 8 x EP 1".
inline std::string grid_name(const TopologySpec& spec) {
  return message({"KVP ", spec.kvp, " x TPA ", spec.tpa, ", TPF ", tpf_of(spec), " x EP ", spec.ep});
}

/// Takes the element of least distance out, the first on ties.
template <class T, class Distance>
T take_nearest(std::vector<T>& candidates, const Distance& distance) {
  std::size_t nearest = 0;
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    if (distance(candidates[i]) < distance(candidates[nearest])) nearest = i;
  }
  const T taken = candidates[nearest];
  for (std::size_t i = nearest + 1; i < candidates.size(); ++i) candidates[i - 1] = candidates[i];
  candidates.pop_back();
  return taken;
}

/// The legal grids nearest to `wanted`, in words: of as many ranks if there are any, else of the nearest
/// number.
inline std::string nearest_legal(const TopologySpec& wanted, const ModelShape& shape) {
  constexpr std::size_t kShown = 3;
  if (!shape_violations(shape).empty())
    return "No topology is legal for this model until its sizes are corrected.";
  const std::int64_t wanted_size = larger<std::int64_t>(1, stage_size_of(wanted));

  // N divides the number of query heads, so these are all candidates.
  std::vector<std::int64_t> stage_sizes = divisors(shape.num_query_heads);
  const auto size_distance = [&](std::int64_t size) {
    return static_cast<double>(size < wanted_size ? wanted_size - size : size - wanted_size);
  };
  while (!stage_sizes.empty()) {
    const std::int64_t stage_size = take_nearest(stage_sizes, size_distance);
    std::vector<TopologySpec> legal = legal_grids(shape, stage_size, wanted);
    if (legal.empty()) continue;
    const auto distance = [&](const TopologySpec& spec) {
      const auto ratio = [](double a, double b) { return a > b ? a / b : b / a; };
      return ratio(spec.kvp, wanted.kvp < 1 ? 1 : wanted.kvp) *
             ratio(spec.tpa, wanted.tpa < 1 ? 1 : wanted.tpa) * ratio(spec.ep, wanted.ep < 1 ? 1 : wanted.ep);
    };
    std::string text = message({"Nearest legal with N = ", stage_size, ": "});
    for (std::size_t i = 0; i < kShown && !legal.empty(); ++i) {
      text += message({i == 0 ? "" : "; ", grid_name(take_nearest(legal, distance))});
    }
    if (!legal.empty()) text += message({"; and ", legal.size(), " more"});
    return text + ".";
  }
  return "No topology is legal for this model.";
}

/// What to do about a topology that is refused, as a sentence; empty if the broken rule already says it. If
/// the grid of a stage is legal it names the limit of PP or DP, else the nearest legal grids.
inline std::string advice(const TopologySpec& wanted, const ModelShape& shape) {
  TopologySpec grid = wanted;
  grid.pp = grid.dp = grid.attn_dp = 1;
  if (!grid_violations(grid, shape).empty()) return nearest_legal(wanted, shape);
  std::int64_t most_stages = kMaxRanks / stage_size_of(wanted);
  if (shape.num_layers > 0) most_stages = smaller(most_stages, shape.num_layers);
  if (wanted.pp > most_stages) return message({"Use PP at most ", most_stages, "."});
  const std::int64_t most_replicas = kMaxRanks / (stage_size_of(wanted) * larger(1, wanted.pp));
  if (wanted.dp > most_replicas) return message({"Use DP at most ", most_replicas, "."});
  return "";
}

/// @throws Error(invalid_topology) that lists `found`, the violated rules, with advice, if there are any.
inline void expect_no_violations(const std::vector<std::string>& found, const TopologySpec& spec,
                                 const ModelShape& shape) {
  if (found.empty()) return;
  std::string text = message(
      {"topology ", grid_name(spec), " breaks ", found.size(), found.size() == 1 ? " rule" : " rules"});
  for (std::size_t i = 0; i < found.size(); ++i)
    text += message({i == 0 ? ": " : "; ", "(", i + 1, ") ", found[i]});
  const std::string sentence = advice(spec, shape);
  if (!sentence.empty()) text += message({". ", sentence});
  throw Error(ErrorCode::invalid_topology, {text});
}

}  // namespace helix::detail
