// SPDX-License-Identifier: Apache-2.0
// A step allocates nothing, neither on the host thread that queues it nor on the threads that run it
// (invariant 10).
#include <barrier>
#include <cstdint>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/decode_layer.hpp>

#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/layer_fixture.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

TEST_CASE("the counter sees an allocation on another thread") {
  cpu::Stream stream;
  std::vector<int> numbers;
  CHECK(allocations_in([&] {
          stream.enqueue([&] { numbers.resize(100); });
          stream.synchronize();
        }) == 1);
}

/// Allocations in the second of two equal steps of a layer, all ranks together.
std::int64_t allocations_of_layer(const LayerSpec& spec, const TopologySpec& grid, int hop_b_slices,
                                  int threads, const MlaPrefill& mla_prefill = {}) {
  constexpr std::int64_t kSequences = 5;
  const oracle::Layer layer = random_layer(spec, 4);
  const Topology topo(grid, shape_of(layer));
  Script script;
  script.sequences = kSequences;
  for (const std::int64_t tokens : {7, 2, 2}) {
    Step step;
    step.counts.assign(kSequences, tokens);
    step.rejected.assign(kSequences, 0);
    step.hidden = RandomMatrices(9).vector(kSequences * tokens * layer.hidden, 1.0);
    script.steps.push_back(std::move(step));
  }
  LayerRunOptions options;
  options.hop_b_slices = hop_b_slices;
  options.mla_prefill = mla_prefill;
  options.weight_dtype = options.kv_dtype = DType::bf16;

  std::int64_t counted = -1;
  std::barrier all_ranks(topo.stage_size());
  run_ranks_or_throw(topo.stage_size(), [&](cpu::LocalComm& comm) {
    const RankCoordinates at = topo.stage_coordinates(comm.rank());
    CpuBackend backend(comm, comm.split(at.tpa_rank, at.kvp_rank), threads);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, options);
    for (std::size_t i = 0; i + 1 < script.steps.size(); ++i) rank.run(script.steps[i]);
    rank.prepare(script.steps.back());
    backend.synchronize(rank.stream());
    all_ranks.arrive_and_wait();
    if (comm.rank() == 0) start_counting_allocations();
    all_ranks.arrive_and_wait();
    rank.launch();
    backend.synchronize(rank.stream());
    all_ranks.arrive_and_wait();
    if (comm.rank() == 0) counted = stop_counting_allocations();
    all_ranks.arrive_and_wait();
  });
  return counted;
}

TEST_CASE("decode_layer allocates nothing on any rank") {
  LayerSpec dense;
  dense.has_biases = dense.has_head_norms = dense.has_sinks = true;
  LayerSpec latent;
  latent.is_mla = true;
  latent.experts = 8;
  latent.shared_ffn = 32;
  latent.groups = 4;
  latent.groups_kept = 2;
  latent.is_sigmoid = latent.normalize = true;
  for (const int slices : {1, 3}) {
    for (const int threads : {1, 2}) {
      CAPTURE(slices, threads);
      CHECK(allocations_of_layer(dense, {.kvp = 2, .tpa = 2}, slices, threads) == 0);
      CHECK(allocations_of_layer(dense, {}, slices, threads) == 0);
      CHECK(allocations_of_layer(latent, {.kvp = 2, .ep = 2}, slices, threads) == 0);
      const MlaPrefill expanded{.form = MlaForm::expanded, .max_tokens = 16};
      CHECK(allocations_of_layer(latent, {.kvp = 2, .ep = 2}, slices, threads, expanded) == 0);
    }
  }
}

TEST_CASE("sampling allocates nothing, greedy or not, from its first call on") {
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kVocab = 5000;
  std::mt19937 generator(6);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<std::size_t>(kRows * kVocab));
  for (float& logit : logits) logit = normal(generator);
  const std::vector<std::int64_t> begins{0, kVocab};
  const std::vector<std::uint64_t> counters{1, 2, 3};
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(kRows));
  for (const int threads : {1, 2}) {
    for (const float temperature : {0.0f, 0.8f}) {
      for (const float top_p : {0.9f, 1.0f}) {
        CAPTURE(threads, temperature, top_p);
        const cpu::Operators operators(threads);
        const cpu::Stream stream = operators.create_stream();
        const std::vector<SamplingConfig> configs(
            static_cast<std::size_t>(kRows),
            {.temperature = temperature, .top_p = top_p, .min_p = 1e-3f, .top_k = 40, .seed = 1});
        CHECK(allocations_in([&] {
                operators.sample({{logits.data(), {1, kRows, kVocab}},
                                  begins.data(),
                                  configs.data(),
                                  counters.data(),
                                  tokens.data()},
                                 stream);
                stream.synchronize();
              }) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace helix::test
