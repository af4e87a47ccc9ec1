// SPDX-License-Identifier: Apache-2.0
// Generates many tokens with one model, truncating the cache to the prompt in between. Each round must give
// the tokens of the first, and memory must not grow.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <helix/error.hpp>
#include <helix/job_comms.hpp>

#include "decode/golden.hpp"
#include "generate/request_plan.hpp"
#include "generate/step_builder.hpp"
#include "model/stage_model.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace helix::test {

/// One rank that decodes one sequence, round after round.
template <class Backend>
class Soak {
 public:
  using Comm = typename Backend::Comm;

  template <class MakeBackend>
  Soak(const ReferenceModel& model, const Topology& topo, const decode::GenerationRequest& request,
       Comm& world, const MakeBackend& make_backend)
      : comms_(split_world(world, topo)),
        backend_(make_backend(comms_, world.rank())),
        stage_(backend_, topo, 0, model.config,
               decode::load_stage_weights(backend_, model.config, model.checkpoint, topo, world.rank(),
                                          backend_.create_stream()),
               decode::plan_cache(request, topo, 0, 0), decode::plan_limits(request, topo, 0), {},
               comms_.pipeline) {
    sequence_.id = stage_.cache().add();
    run(request.prompts.front(), /*is_decode=*/false);
    first_ = sequence_.pending;
    prompt_tokens_ = stage_.cache().length(sequence_.id);
  }

  /// Generates `count` tokens after the prompt.
  decode::TokenIds round(std::int64_t count) {
    stage_.cache().truncate(sequence_.id, prompt_tokens_);
    sequence_.pending = first_;
    decode::TokenIds tokens;
    for (std::int64_t i = 0; i < count; ++i) {
      tokens.push_back(sequence_.pending);
      run({sequence_.pending}, /*is_decode=*/true);
    }
    return tokens;
  }

 private:
  void run(const decode::TokenIds& tokens, bool is_decode) {
    step_.begin(is_decode);
    step_.add_tokens(sequence_, tokens, stage_.cache().length(sequence_.id));
    step_.add_logit_row(sequence_, step_.num_tokens() - 1, {});
    stage_.cache().append(step_.step().sequences, step_.counts(), stage_.stream());
    stage_.forward(step_.step());
    sequence_.pending = stage_.finish().tokens.front();
  }

  JobComms<Comm> comms_;
  Backend backend_;
  decode::StageModel<Backend> stage_;
  decode::StepBuilder step_;
  decode::SequenceProgress sequence_;
  std::int64_t prompt_tokens_ = 0;
  std::int32_t first_ = 0;
};

/// Runs rounds on the ranks of `world`, with backends from make_backend(comms, rank). `used_bytes()` must not
/// grow by more than `growth_bytes` from the second round on.
template <class Backend, class MakeBackend, class UsedBytes>
void soak(const TopologySpec& spec, int rounds, std::int64_t tokens_a_round,
          std::vector<typename Backend::Comm> world, const MakeBackend& make_backend,
          const UsedBytes& used_bytes, std::int64_t growth_bytes) {
  const ReferenceModel model("llama-tiny");
  const Topology topo(spec, model.config.shape);
  decode::GenerationRequest request = golden_request(model.golden());
  request.prompts.resize(1);
  request.max_new_tokens = tokens_a_round;
  std::int64_t before = 0;
  std::int64_t after = 0;
  run_ranks_or_throw(
      std::move(world),
      [&](typename Backend::Comm& comm) {
        Soak<Backend> rank(model, topo, request, comm, make_backend);
        const decode::TokenIds expected = rank.round(tokens_a_round);
        if (comm.rank() == 0) before = used_bytes();
        for (int i = 1; i < rounds; ++i) {
          HELIX_EXPECTS(rank.round(tokens_a_round) == expected, ErrorCode::internal, "round ", i,
                        " differs from the first");
        }
        if (comm.rank() == 0) after = used_bytes();
      },
      std::chrono::hours(3));
  CAPTURE(before, after);
  CHECK(after - before < growth_bytes);
}

}  // namespace helix::test
