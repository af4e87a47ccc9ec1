// SPDX-License-Identifier: Apache-2.0
// Topology: the mapping of ranks to groups and ranges.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/topology.hpp>
#include <helix/topology_rules.hpp>

namespace helix {
namespace detail {

inline std::string range_name(const Range& range) {
  return range.size() == 0 ? std::string("-") : message({"[", range.begin, ", ", range.end, ")"});
}

}  // namespace detail

inline std::vector<std::string> Topology::violations(const TopologySpec& spec, const ModelShape& shape) {
  return detail::grid_violations(spec, shape);
}

inline std::vector<TopologySpec> Topology::legal_topologies(const ModelShape& shape, int stage_size) {
  return detail::legal_grids(shape, stage_size, {});
}

inline Topology::Topology(const TopologySpec& spec, const ModelShape& shape) : spec_(spec), shape_(shape) {
  detail::expect_no_violations(violations(spec, shape), spec, shape);
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
  detail::expect_no_violations(found, spec, shape);
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

}  // namespace helix
