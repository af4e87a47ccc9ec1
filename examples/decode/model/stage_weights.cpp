// SPDX-License-Identifier: Apache-2.0
// Maps weight roles to the weight views of a layer.
#include "model/stage_weights.hpp"

#include <algorithm>
#include <iterator>
#include <variant>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

/// The member of a weights struct that holds the view of one role.
template <class Weights>
struct Place {
  WeightRole role;
  WeightView Weights::*view;
};

constexpr Place<StageWeightViews> kEnds[] = {{WeightRole::embedding, &StageWeightViews::embedding},
                                             {WeightRole::final_norm, &StageWeightViews::final_norm},
                                             {WeightRole::lm_head, &StageWeightViews::lm_head}};
constexpr Place<LayerWeights> kNorms[] = {
    {WeightRole::input_norm, &LayerWeights::input_norm},
    {WeightRole::post_attention_norm, &LayerWeights::post_attention_norm}};
constexpr Place<GqaWeights> kGqa[] = {
    {WeightRole::qkv, &GqaWeights::qkv},         {WeightRole::qkv_bias, &GqaWeights::qkv_bias},
    {WeightRole::q_norm, &GqaWeights::q_norm},   {WeightRole::k_norm, &GqaWeights::k_norm},
    {WeightRole::attention_out, &GqaWeights::o}, {WeightRole::attention_out_bias, &GqaWeights::o_bias}};
constexpr Place<MlaWeights> kMla[] = {{WeightRole::qkv_a, &MlaWeights::qkv_a},
                                      {WeightRole::qkv_a_bias, &MlaWeights::qkv_a_bias},
                                      {WeightRole::q_a_norm, &MlaWeights::q_a_norm},
                                      {WeightRole::q_b, &MlaWeights::q_b},
                                      {WeightRole::kv_a_norm, &MlaWeights::kv_a_norm},
                                      {WeightRole::w_uk, &MlaWeights::w_uk},
                                      {WeightRole::w_uv, &MlaWeights::w_uv},
                                      {WeightRole::expand_k, &MlaWeights::expand_k},
                                      {WeightRole::expand_v, &MlaWeights::expand_v},
                                      {WeightRole::attention_out, &MlaWeights::o},
                                      {WeightRole::attention_out_bias, &MlaWeights::o_bias}};
constexpr Place<DenseFfnWeights> kDense[] = {{WeightRole::gate_up, &DenseFfnWeights::gate_up},
                                             {WeightRole::gate_up_bias, &DenseFfnWeights::gate_up_bias},
                                             {WeightRole::down, &DenseFfnWeights::down},
                                             {WeightRole::down_bias, &DenseFfnWeights::down_bias}};
constexpr Place<DenseFfnWeights> kShared[] = {
    {WeightRole::shared_gate_up, &DenseFfnWeights::gate_up},
    {WeightRole::shared_gate_up_bias, &DenseFfnWeights::gate_up_bias},
    {WeightRole::shared_down, &DenseFfnWeights::down},
    {WeightRole::shared_down_bias, &DenseFfnWeights::down_bias}};
constexpr Place<MoeWeights> kRouter[] = {{WeightRole::router, &MoeWeights::router}};
constexpr Place<ExpertWeights> kExpert[] = {{WeightRole::expert_gate_up, &ExpertWeights::gate_up},
                                            {WeightRole::expert_down, &ExpertWeights::down}};

/// Stores the view in the member that the table gives for the role. Returns false if the table lacks the
/// role.
template <class Weights, std::size_t N>
bool place(Weights& weights, const Place<Weights> (&table)[N], WeightRole role, const WeightView& view) {
  const auto found =
      std::find_if(std::begin(table), std::end(table), [&](const auto& at) { return at.role == role; });
  if (found == std::end(table)) return false;
  weights.*(found->view) = view;
  return true;
}

bool place_attention(GqaWeights& weights, WeightRole role, const WeightView& view) {
  return place(weights, kGqa, role, view);
}
bool place_attention(MlaWeights& weights, WeightRole role, const WeightView& view) {
  return place(weights, kMla, role, view);
}

/// `expert` is the index of a routed expert among this rank's experts, if the role belongs to one.
bool place_ffn(DenseFfnWeights& weights, WeightRole role, std::int64_t /*expert*/, const WeightView& view) {
  return place(weights, kDense, role, view);
}
bool place_ffn(MoeWeights& weights, WeightRole role, std::int64_t expert, const WeightView& view) {
  if (role == WeightRole::router_bias) {
    weights.router_bias = static_cast<const float*>(view.data);
    return true;
  }
  if (place(weights, kRouter, role, view) || place(weights.shared, kShared, role, view)) return true;
  return expert >= 0 && place(weights.experts[static_cast<std::size_t>(expert)], kExpert, role, view);
}

bool place_in_layer(LayerWeights& layer, WeightRole role, std::int64_t expert, const WeightView& view) {
  return place(layer, kNorms, role, view) ||
         std::visit([&](auto& attention) { return place_attention(attention, role, view); },
                    layer.attention) ||
         std::visit([&](auto& ffn) { return place_ffn(ffn, role, expert, view); }, layer.ffn);
}

/// A layer of the kind given by the config, without views.
LayerWeights empty_layer(const ModelShape& shape, std::int64_t layer, std::int64_t num_experts) {
  LayerWeights weights;
  if (shape.is_mla()) weights.attention = MlaWeights{};
  if (shape.is_moe_layer(layer)) {
    weights.ffn = MoeWeights{};
    std::get<MoeWeights>(weights.ffn).experts.resize(static_cast<std::size_t>(num_experts));
  }
  return weights;
}

/// W_UV is the part of expand_v for the heads that this rank combines.
void view_combined_heads(LayerWeights& layer, const ModelShape& shape, Range combined) {
  auto* const mla = std::get_if<MlaWeights>(&layer.attention);
  if (mla == nullptr || mla->expand_v.empty()) return;
  const std::int64_t head_rows = shape.mla->v_head_dim;
  const WeightView& all = mla->expand_v;
  mla->w_uv = all;
  mla->w_uv.rows = combined.size() * head_rows;
  mla->w_uv.data = static_cast<const std::byte*>(all.data) +
                   combined.begin * head_rows * all.cols * static_cast<std::int64_t>(size_bytes(all.dtype));
}

}  // namespace

FileMappings mappings_of(const WeightPlan& plan) {
  FileMappings mappings;
  for (const WeightTarget& target : plan.targets) {
    if (!target.in_place) continue;
    std::shared_ptr<const MappedFile> mapping = target.in_place->file->mapping();
    if (std::find(mappings.begin(), mappings.end(), mapping) == mappings.end())
      mappings.push_back(std::move(mapping));
  }
  return mappings;
}

StageWeightViews view_weights(const ModelConfig& config, const WeightPlan& plan,
                              const std::vector<const std::byte*>& buffers) {
  StageWeightViews views;
  for (std::int64_t layer = plan.layers.begin; layer < plan.layers.end; ++layer) {
    views.layers.push_back(empty_layer(config.shape, layer, plan.experts.size()));
  }
  for (const WeightTarget& target : plan.targets) {
    const std::byte* data =
        target.in_place ? target.in_place->data().data() : buffers.at(target.buffer) + target.offset;
    const WeightView view = {data, target.dtype, target.rows, target.cols};
    const std::int64_t expert = target.expert < 0 ? -1 : target.expert - plan.experts.begin;
    const bool is_placed =
        target.layer < 0
            ? place(views, kEnds, target.role, view)
            : place_in_layer(views.layers[static_cast<std::size_t>(target.layer - plan.layers.begin)],
                             target.role, expert, view);
    HELIX_EXPECTS(is_placed, ErrorCode::internal, "weight role ", static_cast<int>(target.role), " of layer ",
                  target.layer, " has no place");
  }
  for (LayerWeights& layer : views.layers) view_combined_heads(layer, config.shape, plan.combined_heads);
  if (plan.has_tied_head) views.lm_head = views.embedding;
  return views;
}

}  // namespace helix::decode
