// SPDX-License-Identifier: Apache-2.0
// Derives the sizes of a serving job from its request.
#include "serve/serve_plan.hpp"

#include "generate/request_plan.hpp"

namespace helix::decode {

SchedulerSpec plan_scheduler(const GenerationRequest& request, const ModelConfig& config,
                             const Topology& topo) {
  const ServeLimits& limits = *request.serving;
  const KvCacheSpec cache = plan_cache(request, topo, /*stage=*/0, /*replica=*/0);
  SchedulerSpec spec;
  spec.num_replicas = topo.dp();
  spec.ledger = {.layout = KvLayout(topo.kvp(), cache.chunk),
                 .page_tokens = cache.page_tokens,
                 .num_pages = cache.num_pages,
                 .max_sequences = cache.max_sequences,
                 .max_tokens = cache.max_tokens,
                 .tag = cache.tag};
  spec.max_sequences = limits.max_sequences;
  spec.max_tokens = limits.max_tokens;
  spec.prefill_tokens = request.prefill_tokens;
  spec.vocab = topo.shape().vocab;
  spec.eos_ids = config.eos_ids;
  spec.default_max_tokens = request.max_new_tokens;
  spec.seed = request.sampling.seed;
  return spec;
}

ServeAbilities serve_abilities(const GenerationRequest& request, const ModelConfig& config,
                               const Topology& topo, const std::string& activation,
                               const RankMemory& memory) {
  return {.kvp = topo.kvp(),
          .tpa = topo.tpa(),
          .ep = topo.ep(),
          .pp = topo.pp(),
          .dp = topo.dp(),
          .activation = activation,
          .vocab = topo.shape().vocab,
          .eos_ids = config.eos_ids,
          .max_sequences = request.serving->max_sequences,
          .max_tokens = request.serving->max_tokens,
          .kv_tokens = request.serving->kv_tokens,
          .temperature = request.sampling.temperature,
          .memory = memory};
}

}  // namespace helix::decode
