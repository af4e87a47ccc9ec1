// SPDX-License-Identifier: Apache-2.0
// Hundreds of thousands of tokens from one model, the cache truncated to the prompt in between: each round
// gives the tokens of the first, and memory stays as it is.
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <unistd.h>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>
#include <helix/job_comms.hpp>

#include "decode/golden.hpp"
#include "generate/request_plan.hpp"
#include "generate/step_builder.hpp"
#include "model/stage_model.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

constexpr std::int64_t kGrowthBytes = 1 << 20;  // what the allocator may keep for itself

std::int64_t resident_bytes() {
  std::int64_t total = 0;
  std::int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

/// One rank that decodes one sequence, round after round.
class Soak {
 public:
  Soak(const ReferenceModel& model, const Topology& topo, const decode::GenerationRequest& request,
       cpu::LocalComm& world)
      : comms_(split_world(world, topo)),
        backend_(comms_.stage, comms_.kvp),
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

  /// `count` tokens behind the prompt.
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

  JobComms<cpu::LocalComm> comms_;
  LocalBackend backend_;
  decode::StageModel<LocalBackend> stage_;
  decode::StepBuilder step_;
  decode::SequenceProgress sequence_;
  std::int64_t prompt_tokens_ = 0;
  std::int32_t first_ = 0;
};

void soak(const TopologySpec& spec, int rounds, std::int64_t tokens_a_round) {
  const ReferenceModel model("llama-tiny");
  const Topology topo(spec, model.config.shape);
  decode::GenerationRequest request = golden_request(model.golden());
  request.prompts.resize(1);
  request.max_new_tokens = tokens_a_round;
  std::int64_t before = 0;
  std::int64_t after = 0;
  run_ranks_or_throw(
      cpu::LocalComm::create_group(topo.world_size()),
      [&](cpu::LocalComm& world) {
        Soak rank(model, topo, request, world);
        const decode::TokenIds expected = rank.round(tokens_a_round);
        if (world.rank() == 0) before = resident_bytes();
        for (int i = 1; i < rounds; ++i) {
          HELIX_EXPECTS(rank.round(tokens_a_round) == expected, ErrorCode::internal, "round ", i,
                        " differs from the first");
        }
        if (world.rank() == 0) after = resident_bytes();
      },
      std::chrono::hours(3));
  CAPTURE(before, after);
  CHECK(after - before < kGrowthBytes);
}

TEST_CASE("soak: rounds of one rank and of four give equal tokens in flat memory", "[quick]") {
  soak({}, 5, 100);
  soak({.kvp = 2, .tpa = 2}, 5, 100);
}

TEST_CASE("soak: 200000 tokens of one rank", "[full]") {
  soak({}, 25, 8000);
}

TEST_CASE("soak: 200000 tokens of four ranks", "[full]") {
  soak({.kvp = 2, .tpa = 2}, 25, 8000);
}

}  // namespace
}  // namespace helix::test
