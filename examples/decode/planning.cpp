// SPDX-License-Identifier: Apache-2.0
// Conversion to the planner's model, and --topology auto.
#include "planning.hpp"

#include <algorithm>

#include <unistd.h>

#include <helix/error.hpp>
#include <helix/plan/search.hpp>

namespace helix::decode {
namespace {

/// plan::Model::full_attention_stride of the config's windowed layers.
std::int64_t full_attention_stride(const ModelConfig& config) {
  const std::vector<bool>& windowed = config.is_window_layer;
  const auto first_full = std::find(windowed.begin(), windowed.end(), false);
  if (first_full == windowed.end()) return 0;
  const std::int64_t stride = first_full - windowed.begin() + 1;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    HELIX_EXPECTS(windowed[static_cast<std::size_t>(layer)] == ((layer + 1) % stride != 0),
                  ErrorCode::unsupported, "layer ", layer,
                  " breaks the period of the full-attention layers, every ", stride,
                  " by the first ones; the planner knows periods only");
  }
  return stride;
}

double bits(DType type) {
  return 8.0 * static_cast<double>(size_bytes(type));
}

/// The CPU's speeds are assumptions of the size of docs/performance.md's machine: they rank topologies, and
/// predict no time.
plan::Hardware host_hardware(int num_ranks) {
  plan::Hardware host;
  host.name = "this machine's CPU";
  host.source = "memory as installed, shared by the ranks; speeds assumed";
  const auto memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  host.memory = plan::bytes(memory / num_ranks);
  host.read = plan::BandwidthCurve(plan::gigabytes_per_second(16));
  host.peaks = {{64, plan::teraflops_per_second(0.24)}};
  host.nvlink_domain = num_ranks;
  host.inside = {plan::microseconds(5), plan::gigabytes_per_second(8)};
  host.outside = host.inside;
  return host;
}

plan::Hardware gpu_hardware() {
  plan::Hardware gpu = plan::hardware_preset("h200");
  gpu.peaks.push_back({32, plan::teraflops_per_second(67)});  // f32 activations; the vendor's figure
  return gpu;
}

}  // namespace

plan::Model planner_model(const ModelConfig& config) {
  plan::Model model;
  model.name = config.model_type;
  model.source = "config.json";
  model.hidden = config.hidden;
  model.num_layers = config.num_layers;
  model.num_query_heads = config.num_query_heads;
  model.num_kv_heads = config.num_kv_heads;
  model.head_dim = config.head_dim;
  model.value_dim = config.shape().value_dim;
  model.ffn = config.shape().ffn;
  model.vocab = config.vocab;
  model.tie_word_embeddings = config.tie_word_embeddings;
  model.has_qk_norm = config.has_qk_norm;
  const std::vector<bool>& windowed = config.is_window_layer;
  const bool has_window =
      config.sliding_window > 0 &&
      (windowed.empty() || std::find(windowed.begin(), windowed.end(), true) != windowed.end());
  if (has_window) {
    model.window = config.sliding_window;
    model.full_attention_stride = full_attention_stride(config);
  }
  if (config.mla) {
    const MlaConfig& mla = *config.mla;
    model.latent = {mla.q_lora_rank, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim,
                    mla.v_head_dim};
  }
  if (config.moe) {
    const MoeConfig& moe = *config.moe;
    // The config counts the period from layer 0, the planner from the first MoE layer.
    const std::int64_t first_moe =
        (moe.first_dense_layers + moe.layer_freq - 1) / moe.layer_freq * moe.layer_freq;
    model.experts = plan::Experts{.num_experts = moe.num_experts,
                                  .top_k = moe.top_k,
                                  .expert_ffn = moe.expert_ffn,
                                  .shared_ffn = moe.shared_ffn(),
                                  .first_dense_layers = std::min(first_moe, config.num_layers),
                                  .layer_stride = moe.layer_freq};
  }
  model.check();
  return model;
}

double weight_bits(const ModelConfig& config) {
  return config.fp8_blocks ? 8.0 : bits(config.dtype);
}

TopologySpec choose_topology(const ModelConfig& config, const GenerationRequest& request,
                             const LaunchOptions& launch, int num_ranks) {
  const plan::Precision precision{.weight_bits = weight_bits(config),
                                  .kv_bits = bits(request.kv_dtype),
                                  .activation_bits = bits(launch.activation)};
  const plan::StepModel model(planner_model(config), precision,
                              launch.device == Device::cuda ? gpu_hardware() : host_hardware(num_ranks));
  plan::Workload workload;
  workload.batch = std::max<std::int64_t>(1, request.num_sequences());
  workload.step_tokens = request.draft_tokens;
  workload.chunk = request.chunk;
  workload.page_tokens = request.page_tokens;
  std::int64_t longest = request.draft_tokens;
  for (std::int64_t sequence = 0; sequence < request.num_sequences(); ++sequence) {
    longest = std::max(longest, request.longest_length(sequence));
  }
  workload.context = plan::tokens(static_cast<double>(longest));
  plan::SearchSpace space;
  space.max_gpus = num_ranks;
  space.gpu_counts = {num_ranks};
  space.batches = {workload.batch};
  space.strategies = {plan::Strategy::helix};
  space.objective = plan::Objective::latency;
  const plan::SearchResult found = plan::search_or_throw(model, workload, space);
  return found.candidates[*found.best].layout.topology_spec();
}

}  // namespace helix::decode
