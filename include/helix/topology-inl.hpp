// SPDX-License-Identifier: Apache-2.0
// Topology: the rules of a grid of ranks, the search for legal ones, the mapping to groups and ranges.
#pragma once

#include <cstddef>
#include <limits>
#include <string_view>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/topology.hpp>

namespace helix {
namespace detail {

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

/// In ascending order.
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
      if (Topology::violations(spec, shape).empty()) legal.push_back(spec);
    }
  }
  return legal;
}

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

inline void throw_if_any(const std::vector<std::string>& found, const TopologySpec& spec,
                         const ModelShape& shape) {
  if (found.empty()) return;
  std::string text = message(
      {"topology ", grid_name(spec), " breaks ", found.size(), found.size() == 1 ? " rule" : " rules"});
  for (std::size_t i = 0; i < found.size(); ++i)
    text += message({i == 0 ? ": " : "; ", "(", i + 1, ") ", found[i]});
  throw Error(ErrorCode::invalid_topology, {text, ". ", nearest_legal(spec, shape)});
}

inline std::string range_name(const Range& range) {
  return range.size() == 0 ? std::string("-") : message({"[", range.begin, ", ", range.end, ")"});
}

}  // namespace detail

inline std::vector<std::string> Topology::violations(const TopologySpec& spec, const ModelShape& shape) {
  std::vector<std::string> found = detail::shape_violations(shape);
  const bool shape_is_sound = found.empty();
  const auto violated = [&](std::initializer_list<MessagePart> parts) { found.push_back(message(parts)); };

  bool widths_are_sound = true;
  const auto at_least_one = [&](std::string_view name, int width) {
    if (width >= 1) return;
    violated({name, " is ", width, "; it must be at least 1"});
    widths_are_sound = false;
  };
  at_least_one("KVP", spec.kvp);
  at_least_one("TPA", spec.tpa);
  at_least_one("EP", spec.ep);
  if (spec.tpf != 0) at_least_one("TPF", spec.tpf);
  at_least_one("PP", spec.pp);
  at_least_one("DP", spec.dp);
  if (spec.attn_dp != 1)
    violated({"attn_dp is ", spec.attn_dp, "; data-parallel attention is not built: use 1"});
  if (!widths_are_sound) return found;

  const std::int64_t n = detail::stage_size_of(spec);
  if (n > kMaxRanks || n * spec.pp > kMaxRanks || n * spec.pp > kMaxRanks / spec.dp) {
    violated({"KVP ", spec.kvp, " * TPA ", spec.tpa, " * PP ", spec.pp, " * DP ", spec.dp, " exceeds ",
              kMaxRanks, " ranks, the most of a job"});
  }
  if (spec.tpf == 0 && n % spec.ep != 0) {
    violated(
        {"N = KVP * TPA = ", n, " is not a multiple of EP ", spec.ep, ", so no TPF gives TPF * EP == N"});
  } else if (const std::int64_t ffn_ranks = detail::tpf_of(spec) * spec.ep; ffn_ranks != n) {
    violated({"KVP ", spec.kvp, " * TPA ", spec.tpa, " = ", n, " differs from TPF ", spec.tpf, " * EP ",
              spec.ep, " = ", ffn_ranks, "; attention and FFN use the same ranks"});
  }

  // From here on rules divide by sizes of the model.
  if (!shape_is_sound) return found;

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
  if (shape.num_query_heads % n != 0) {
    violated({"num_query_heads ", shape.num_query_heads, " is not a multiple of N = KVP * TPA = ", n});
  }
  const std::string_view uneven_hint = "; choose widths that divide it, or allow_uneven_ffn";
  if (!spec.allow_uneven_ffn) {
    if (shape.ffn % n != 0)
      violated({"ffn ", shape.ffn, " is not a multiple of N = KVP * TPA = ", n, uneven_hint});
    if (shape.shared_ffn() % n != 0) {
      violated({"shared_ffn ", shape.shared_ffn(), " is not a multiple of N = KVP * TPA = ", n, uneven_hint});
    }
    const std::int64_t tpf = detail::tpf_of(spec);
    if (shape.num_experts() > 0 && tpf > 0 && shape.expert_ffn() % tpf != 0) {
      violated({"expert_ffn ", shape.expert_ffn(), " is not a multiple of TPF ", tpf, uneven_hint});
    }
  }
  if (spec.ep > 1 && shape.num_experts() == 0) {
    violated({"EP is ", spec.ep, " but the model has no routed experts; use EP 1"});
  } else if (shape.num_experts() % spec.ep != 0) {
    violated({"num_experts ", shape.num_experts(), " is not a multiple of EP ", spec.ep});
  }
  if (shape.num_layers > 0 && spec.pp > shape.num_layers) {
    violated({"PP ", spec.pp, " exceeds num_layers ", shape.num_layers,
              ", which would leave stages without a layer"});
  }
  return found;
}

inline Topology::Topology(const TopologySpec& spec, const ModelShape& shape) : spec_(spec), shape_(shape) {
  detail::throw_if_any(violations(spec, shape), spec, shape);
  spec_.tpf = static_cast<int>(detail::tpf_of(spec));
}

inline Topology::Topology(const TopologySpec& spec, const ModelShape& shape, int world_size)
    : spec_(spec), shape_(shape) {
  std::vector<std::string> found = violations(spec, shape);
  // Without these the product means nothing, and the widths themselves are already reported.
  const bool has_product = spec.kvp >= 1 && spec.tpa >= 1 && spec.pp >= 1 && spec.dp >= 1 &&
                           detail::stage_size_of(spec) <= std::numeric_limits<int>::max();
  const std::int64_t pipeline = has_product ? detail::stage_size_of(spec) * spec.pp : 0;
  if (has_product && (world_size % pipeline != 0 || world_size / pipeline != spec.dp)) {
    std::string advice = message({"start DP * PP * N ranks, or change the widths"});
    if (world_size > 0 && world_size % pipeline == 0) advice = message({"set DP to ", world_size / pipeline});
    found.push_back(message({"the world has ", world_size, " ranks but DP ", spec.dp, " * PP ", spec.pp,
                             " * N ", detail::stage_size_of(spec), " needs another number; ", advice}));
  }
  detail::throw_if_any(found, spec, shape);
  spec_.tpf = static_cast<int>(detail::tpf_of(spec));
}

inline RankCoordinates Topology::coordinates(int world_rank) const {
  HELIX_EXPECTS(world_rank >= 0 && world_rank < world_size(), ErrorCode::invalid_argument, "world_rank ",
                world_rank, " is outside [0, ", world_size(), ")");
  RankCoordinates at;
  at.world_rank = world_rank;
  at.stage_rank = world_rank % stage_size();
  at.stage = world_rank / stage_size() % pp();
  at.replica = world_rank / stage_size() / pp();
  at.kvp_rank = at.stage_rank / tpa();
  at.tpa_rank = at.stage_rank % tpa();
  at.ep_rank = at.stage_rank / tpf();
  at.tpf_rank = at.stage_rank % tpf();
  at.head_shard = at.tpa_rank * kvp() + at.kvp_rank;
  return at;
}

inline int Topology::check_stage_rank(int stage_rank) const {
  HELIX_EXPECTS(stage_rank >= 0 && stage_rank < stage_size(), ErrorCode::invalid_argument, "stage_rank ",
                stage_rank, " is outside [0, ", stage_size(), ")");
  return stage_rank;
}

inline GroupSplit Topology::split(RankGroup group, int world_rank) const {
  const RankCoordinates at = coordinates(world_rank);
  const int stage = at.replica * pp() + at.stage;
  switch (group) {
    case RankGroup::stage:
      return {stage, at.stage_rank};
    case RankGroup::kvp:
      return {stage * tpa() + at.tpa_rank, at.kvp_rank};
    case RankGroup::tpa:
      return {stage * kvp() + at.kvp_rank, at.tpa_rank};
    case RankGroup::tpf:
      return {stage * ep() + at.ep_rank, at.tpf_rank};
    case RankGroup::ep:
      return {stage * tpf() + at.tpf_rank, at.ep_rank};
    case RankGroup::pipeline:
      return {at.replica * stage_size() + at.stage_rank, at.stage};
    case RankGroup::replica:
      return {at.replica, world_rank % (pp() * stage_size())};
    case RankGroup::data:
      return {at.stage * stage_size() + at.stage_rank, at.replica};
  }
  throw Error(ErrorCode::invalid_argument, {"RankGroup value ", static_cast<int>(group), " names no group"});
}

inline std::vector<int> Topology::group(RankGroup group, int world_rank) const {
  const int color = split(group, world_rank).color;
  std::vector<int> ranks;  // by key, which counts from 0
  for (int rank = 0; rank < world_size(); ++rank) {
    const GroupSplit at = split(group, rank);
    if (at.color != color) continue;
    if (static_cast<std::size_t>(at.key) >= ranks.size()) ranks.resize(static_cast<std::size_t>(at.key) + 1);
    ranks[static_cast<std::size_t>(at.key)] = rank;
  }
  return ranks;
}

inline Range Topology::query_heads(int stage_rank) const {
  const std::int64_t heads = shape_.num_query_heads / tpa();
  const std::int64_t begin = stage_coordinates(stage_rank).tpa_rank * heads;
  return {begin, begin + heads};
}

inline Range Topology::combined_heads(int stage_rank) const {
  const std::int64_t heads = shape_.num_query_heads / stage_size();
  const std::int64_t begin = stage_coordinates(stage_rank).head_shard * heads;
  return {begin, begin + heads};
}

inline Range Topology::kv_heads(int stage_rank) const {
  const std::int64_t tpa_rank = stage_coordinates(stage_rank).tpa_rank;
  const std::int64_t begin = tpa_rank * shape_.num_kv_heads / tpa();
  return {begin, begin + larger<std::int64_t>(1, shape_.num_kv_heads / tpa())};
}

inline Range Topology::output_projection_columns(int stage_rank, std::int64_t value_dim) const {
  const Range heads = combined_heads(stage_rank);
  return {heads.begin * value_dim, heads.end * value_dim};
}

inline Range Topology::ffn(int stage_rank) const {
  return split_evenly(shape_.ffn, stage_size(), check_stage_rank(stage_rank));
}

inline Range Topology::shared_expert_ffn(int stage_rank) const {
  return split_evenly(shape_.shared_ffn(), stage_size(), check_stage_rank(stage_rank));
}

inline Range Topology::expert_ffn(int stage_rank) const {
  return split_evenly(shape_.expert_ffn(), tpf(), stage_coordinates(stage_rank).tpf_rank);
}

inline Range Topology::experts(int stage_rank) const {
  return split_evenly(shape_.num_experts(), ep(), stage_coordinates(stage_rank).ep_rank);
}

inline Range Topology::vocab(int stage_rank) const {
  return split_evenly(shape_.vocab, stage_size(), check_stage_rank(stage_rank));
}

inline Range Topology::layers(int stage) const {
  HELIX_EXPECTS(stage >= 0 && stage < pp(), ErrorCode::invalid_argument, "pipeline stage ", stage,
                " is outside [0, ", pp(), ")");
  return split_evenly(shape_.num_layers, pp(), stage);
}

inline RankShape Topology::rank_shape(int stage_rank) const {
  return {.stage_rank = stage_rank,
          .stage_size = stage_size(),
          .kvp = kvp(),
          .kvp_rank = stage_coordinates(stage_rank).kvp_rank,
          .hidden = shape_.hidden,
          .query_heads = query_heads(stage_rank).size(),
          .kv_heads = kv_heads(stage_rank).size(),
          .combined_heads = combined_heads(stage_rank).size(),
          .head_dim = shape_.head_dim,
          .value_dim = shape_.value_dim,
          .mla = shape_.mla,
          .ffn = ffn(stage_rank).size(),
          .shared_ffn = shared_expert_ffn(stage_rank).size(),
          .expert_ffn = expert_ffn(stage_rank).size(),
          .num_experts = shape_.num_experts(),
          .top_k = shape_.moe ? shape_.moe->top_k : 0,
          .experts = experts(stage_rank)};
}

inline int Topology::kv_copies() const {
  return tpa() > shape_.num_kv_heads ? static_cast<int>(tpa() / shape_.num_kv_heads) : 1;
}

inline std::string Topology::to_string() const {
  const std::string copies = kv_copies() == 1 ? "once" : message({kv_copies(), " times"});
  std::string text =
      message({detail::grid_name(spec_), ", PP ", pp(), ", DP ", dp(), ": ", stage_size(), " ranks a stage, ",
               world_size(), " in the world; each KV head is stored ", copies, " a stage\n"});

  using Row = std::vector<std::string>;
  std::vector<Row> rows{{"stage_rank", "kvp", "tpa", "tpf", "ep", "query heads", "combined", "KV heads",
                         "ffn", "expert ffn", "experts", "vocab"}};
  for (int rank = 0; rank < stage_size(); ++rank) {
    const RankCoordinates at = stage_coordinates(rank);
    rows.push_back({message({rank}), message({at.kvp_rank}), message({at.tpa_rank}), message({at.tpf_rank}),
                    message({at.ep_rank}), detail::range_name(query_heads(rank)),
                    detail::range_name(combined_heads(rank)), detail::range_name(kv_heads(rank)),
                    detail::range_name(ffn(rank)), detail::range_name(expert_ffn(rank)),
                    detail::range_name(experts(rank)), detail::range_name(vocab(rank))});
  }
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = larger(widths[c], row[c].size());
  for (const Row& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      text.append(c == 0 ? 0 : 2, ' ').append(widths[c] - row[c].size(), ' ').append(row[c]);
    }
    text += '\n';
  }
  constexpr int kStagesShown = 64;
  const int num_stages = dp() * pp();
  for (int i = 0; i < smaller(num_stages, kStagesShown); ++i) {
    const int first = i * stage_size();
    text += message({"replica ", i / pp(), ", stage ", i % pp(), ": world ranks [", first, ", ",
                     first + stage_size(), "), layers ", detail::range_name(layers(i % pp())), "\n"});
  }
  if (num_stages > kStagesShown) text += message({"and ", num_stages - kStagesShown, " more stages\n"});
  return text;
}

inline std::vector<TopologySpec> Topology::legal_topologies(const ModelShape& shape, int stage_size) {
  return detail::legal_grids(shape, stage_size, {});
}

}  // namespace helix
