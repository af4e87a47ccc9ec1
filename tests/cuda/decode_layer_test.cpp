// SPDX-License-Identifier: Apache-2.0
// decode_layer on ranks that share a GPU against one CPU rank, on every legal topology of up to four ranks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/decode_layer.hpp>

#include "cuda/gpu.hpp"
#include "support/catch.hpp"
#include "support/layer_fixture.hpp"

namespace helix::test {
namespace {

using CudaBackend = cuda::Backend<cuda::LocalComm, float>;

constexpr double kTolerance = 1e-4;  // f32, relative to the largest value

/// Largest difference relative to the largest value of `expected`. NaN and other sizes give infinity.
double difference(const std::vector<float>& got, const std::vector<float>& expected) {
  if (got.size() != expected.size()) return HUGE_VAL;
  double worst = 0.0;
  double scale = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(double{got[i]} - double{expected[i]});
    if (std::isnan(error)) return HUGE_VAL;
    worst = std::max(worst, error);
    scale = std::max(scale, std::abs(double{expected[i]}));
  }
  return worst == 0.0 ? 0.0 : worst / scale;
}

/// The part of a sequence that a rank must hold, in the order of LayerRank::read_kv, cut from the whole
/// cache.
std::vector<float> shard_of(const std::vector<float>& whole, const ModelShape& shape, const RankResult& rank,
                            const KvLayout& layout) {
  const std::int64_t planes = shape.is_mla() ? 1 : 2;
  const std::int64_t token = shape.num_kv_heads * shape.head_dim;
  const std::int64_t tokens = static_cast<std::int64_t>(whole.size()) / (planes * token);
  std::vector<float> shard;
  for (std::int64_t plane = 0; plane < planes; ++plane) {
    for (std::int64_t p = 0; p < tokens; ++p) {
      if (layout.owner(p) != rank.kvp_rank) continue;
      const auto row = whole.begin() + (plane * tokens + p) * token;
      shard.insert(shard.end(), row + rank.kv_heads.begin * shape.head_dim,
                   row + rank.kv_heads.end * shape.head_dim);
    }
  }
  return shard;
}

/// Checks the layer on all topologies of 1, 2 and 4 ranks, with 1, 2 and 4 slices of the batch.
void check_all_topologies(const LayerSpec& spec, std::uint32_t seed = 20, const MlaPrefill& prefill = {}) {
  const oracle::Layer layer = random_layer(spec, seed);
  const Script script = ragged_script(5, spec.hidden, seed + 1);
  // Otherwise f32 may legitimately choose other experts: use another seed.
  REQUIRE(run_oracle(layer, script).routing_margin > 1e-5);
  const ModelShape shape = shape_of(layer);
  const RankResult alone = run_script(Topology({}, shape), layer, script, {}).front();
  int topologies_run = 0;
  for (const int stage_size : {1, 2, 4}) {
    for (const TopologySpec& topology : Topology::legal_topologies(shape, stage_size)) {
      const Topology topo(topology, shape);
      for (const int slices : {1, 2, 4}) {
        LayerRunOptions options;
        options.chunk = slices == 4 ? 16 : slices == 2 ? 1 : 3;
        options.page_tokens = slices == 1 ? 2 : 4;
        options.hop_b_slices = slices;
        options.mla_prefill = prefill;
        CAPTURE(topo.kvp(), topo.tpa(), topo.tpf(), topo.ep(), options.chunk, slices);
        const auto ranks = run_script<CudaBackend, cuda::LocalComm>(topo, layer, script, options);
        for (const RankResult& rank : ranks) {
          CHECK(rank.hidden == ranks.front().hidden);  // invariant 12
          for (std::size_t b = 0; b < alone.kv.size(); ++b) {
            const KvLayout layout(topo.kvp(), options.chunk);
            CHECK(difference(rank.kv[b], shard_of(alone.kv[b], shape, rank, layout)) <= kTolerance);
          }
        }
        for (std::size_t step = 0; step < alone.hidden.size(); ++step) {
          CAPTURE(step);
          CHECK(difference(ranks.front().hidden[step], alone.hidden[step]) <= kTolerance);
        }
      }
      ++topologies_run;
    }
  }
  CHECK(topologies_run >= 3);
}

LayerSpec mla_spec() {
  LayerSpec spec;
  spec.is_mla = true;
  spec.is_interleaved = true;
  spec.magnitude = 1.1;
  return spec;
}

LayerSpec mla_moe_spec(bool is_v3) {
  LayerSpec spec = mla_spec();
  spec.magnitude = 1.0;
  spec.add_deepseek_experts(is_v3);
  return spec;
}

TEST_CASE("grouped-query attention on a GPU equals a CPU rank on every legal topology") {
  HELIX_REQUIRE_GPUS(1);
  check_all_topologies({});
}

TEST_CASE("biases, head norms, a window, a soft cap and sinks on a GPU equal a CPU rank") {
  HELIX_REQUIRE_GPUS(1);
  LayerSpec spec;
  spec.has_biases = true;
  spec.has_head_norms = true;
  spec.window = 5;
  spec.soft_cap = 1.5;
  spec.has_sinks = true;
  spec.rotary_dim = 8;
  spec.magnitude = 1.2;
  check_all_topologies(spec);
}

TEST_CASE("experts behind grouped-query attention on a GPU equal a CPU rank on every legal topology") {
  HELIX_REQUIRE_GPUS(1);
  LayerSpec spec;
  spec.experts = 8;
  spec.top_k = 2;
  spec.normalize = true;
  check_all_topologies(spec);
}

TEST_CASE("latent attention on a GPU equals a CPU rank on every legal topology") {
  HELIX_REQUIRE_GPUS(1);
  check_all_topologies(mla_spec());
}

TEST_CASE("latent attention without a query latent on a GPU equals a CPU rank") {
  HELIX_REQUIRE_GPUS(1);
  LayerSpec spec = mla_spec();
  spec.q_lora = 0;
  check_all_topologies(spec);
}

TEST_CASE("latent attention with biases on a GPU equals a CPU rank") {
  HELIX_REQUIRE_GPUS(1);
  LayerSpec spec = mla_spec();
  spec.has_biases = true;
  check_all_topologies(spec);
}

TEST_CASE("latents that begin and end between two vectors on a GPU equal a CPU rank") {
  HELIX_REQUIRE_GPUS(1);
  LayerSpec spec = mla_spec();
  spec.q_lora = 21;
  check_all_topologies(spec);
}

TEST_CASE("latent attention with expanded keys and values on a GPU equals an absorbed CPU rank") {
  HELIX_REQUIRE_GPUS(1);
  const MlaPrefill expanded{.form = MlaForm::expanded, .max_tokens = 64};
  check_all_topologies(mla_spec(), 20, expanded);
  LayerSpec deepseek = mla_spec();  // the sizes that the kernels support
  deepseek.kv_lora = 512;
  deepseek.nope = deepseek.value = 128;
  deepseek.rope = 64;
  check_all_topologies(deepseek, 20, expanded);
}

TEST_CASE("DeepSeek-V2's experts on a GPU equal a CPU rank on every legal topology") {
  HELIX_REQUIRE_GPUS(1);
  check_all_topologies(mla_moe_spec(false));
}

TEST_CASE("DeepSeek-V3's experts on a GPU equal a CPU rank on every legal topology") {
  HELIX_REQUIRE_GPUS(1);
  check_all_topologies(mla_moe_spec(true));
}

TEST_CASE("a rank on a GPU that leaves out a step is out of step, not a wrong result") {
  HELIX_REQUIRE_GPUS(1);
  const oracle::Layer layer = random_layer({}, 8);
  Script script;  // decode steps of equal sizes: only positions distinguish them
  script.sequences = 3;
  for (std::uint32_t s = 0; s < 5; ++s)
    script.steps.push_back({{1, 1, 1}, {0, 0, 0}, RandomMatrices(s).vector(3 * layer.hidden, 1.0)});
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  const RankOutcomes outcomes = run_ranks(cuda::LocalComm::create_group(4), [&](cuda::LocalComm& comm) {
    auto backend = make_backend<CudaBackend>(topo, comm);
    LayerRank<CudaBackend> rank(backend, topo, layer, script, {.hop_b_slices = 3});
    for (std::size_t s = 0; s < script.steps.size(); ++s) {
      rank.prepare(script.steps[s]);
      if (comm.rank() == 3 && s == 2) continue;  // the cache grows, but the layer does not run
      rank.launch();
      rank.finish(script.steps[s]);
    }
  });
  int out_of_step = 0;
  for (int r = 0; r < 4; ++r) {
    CAPTURE(r, outcomes.message(r));
    REQUIRE(outcomes.code(r).has_value());
    CHECK((outcomes.code(r) == ErrorCode::out_of_step || outcomes.code(r) == ErrorCode::peer_failed));
    out_of_step += outcomes.code(r) == ErrorCode::out_of_step ? 1 : 0;
  }
  CHECK(out_of_step >= 1);
}

}  // namespace
}  // namespace helix::test
