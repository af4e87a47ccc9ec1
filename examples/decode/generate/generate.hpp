// SPDX-License-Identifier: Apache-2.0
// generate(): one rank's whole generation, from loading its weights to the collected result.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>

#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "files/reason.hpp"
#include "generate/generation.hpp"
#include "generate/generation_loop.hpp"
#include "generate/measure.hpp"
#include "generate/progress.hpp"
#include "generate/request_plan.hpp"
#include "generate/roll_call.hpp"
#include "model/stage_model.hpp"
#include "model/stage_weights.hpp"
#include "serve/serve_loop.hpp"

namespace helix::decode {

/// Loads this rank's weights, then generates. `pipeline` holds the ranks of its replica with the same
/// stage_rank, ordered by stage. Collective over `world`; every rank passes the same request, and every rank
/// gets the complete result. A serving decoder returns an empty result when its client is done. A failure
/// aborts the world, so that no rank waits for this one, and is rethrown.
template <DecoderBackend B>
GenerationResult generate(B& backend, typename B::Comm& world, typename B::Comm& pipeline,
                          const Topology& topo, const Checkpoint& checkpoint, const ModelConfig& config,
                          const GenerationRequest& request, const RootIo& io) {
  check_request(request, config, topo);
  const RankCoordinates at = topo.coordinates(world.rank());
  const bool show_progress = io.show_progress && at.world_rank == 0;
  try {
    const auto load_start = std::chrono::steady_clock::now();
    StageWeights<B> weights = [&] {
      const typename B::Stream stream = backend.create_stream();
      RollCall<B> roll_call(backend, world, stream, at.world_rank, /*team_size=*/1, io.meeting_interval);
      Progress progress("weights", 1000, show_progress);
      StageWeights<B> loaded = load_stage_weights(
          backend, config, checkpoint, topo, at.world_rank, stream,
          [&](std::int64_t done, std::int64_t total) {
            progress.update(total > 0 ? done * 1000 / total : 1000);
            roll_call.work_goes_on();
          },
          latent_weights(plan_mla_prefill(request, topo)));
      roll_call.finish();
      return loaded;
    }();
    StageModel<B> model(
        backend, topo, at.stage, config, std::move(weights), plan_cache(request, topo, at.stage, at.replica),
        plan_limits(request, topo, at.replica),
        {.hop_b_slices = request.hop_b_slices,
         .has_logit_norms = !request.serving && at.stage == topo.pp() - 1 && at.stage_rank == 0,
         .captures = request.cuda_graphs},
        pipeline);
    try {
      if constexpr (CapturingBackend<B>) model.warm_up(plan_warm_up(request, topo, at.replica));
      const double load_ms = milliseconds_since(load_start);
      if (request.serving) {
        ServeLoop<B>(backend, world, topo, config, request, model, io).run();
        return {};
      }
      GenerationResult result = GenerationLoop<B>(backend, world, topo, config, request, model, io).run();
      result.timing.load_ms = load_ms;
      return result;
    } catch (const std::exception& error) {
      model.drop_captured_steps();
      // Before the model's streams drain: they may wait for other ranks.
      world.abort(reason_of(error));
      throw;
    }
  } catch (const std::exception& error) {
    world.abort(reason_of(error));
    throw;
  }
}

}  // namespace helix::decode
