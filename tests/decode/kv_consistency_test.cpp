// SPDX-License-Identifier: Apache-2.0
// After a generation, the shards of all ranks in global order equal the cache of a single rank.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/job_comms.hpp>

#include "decode/golden.hpp"
#include "generate/generate.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/worse.hpp"

namespace helix::test {
namespace {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

/// K, then V, of the first sequence: [layers][stored tokens][Hkv][D] in global order.
struct GlobalCache {
  std::vector<float> k;
  std::vector<float> v;
};

/// Generates on all ranks of `topo` and joins their shards.
GlobalCache generate_and_gather(const ReferenceModel& model, const Topology& topo,
                                const decode::GenerationRequest& request) {
  const ModelShape& shape = topo.shape();
  const std::int64_t stored =
      std::ssize(request.prompts[0]) + request.max_new_tokens - 1;  // the last token is not fed
  const std::int64_t v_dim = shape.is_mla() ? 0 : shape.value_dim;
  const auto elements = [&](std::int64_t dim) {
    return static_cast<std::size_t>(shape.num_layers * stored * shape.num_kv_heads * dim);
  };
  GlobalCache global{std::vector<float>(elements(shape.head_dim), NAN),
                     std::vector<float>(elements(v_dim), NAN)};

  run_ranks_or_throw(topo.world_size(), [&](cpu::LocalComm world) {
    JobComms<cpu::LocalComm> comms = split_world(world, topo);
    LocalBackend backend(comms.stage, comms.kvp);
    auto weights = decode::load_stage_weights(backend, model.config, model.checkpoint, topo, world.rank(),
                                              backend.create_stream());
    decode::StageModel<LocalBackend> stage(backend, topo, 0, model.config, std::move(weights),
                                           decode::plan_cache(request, topo, 0, 0),
                                           decode::plan_limits(request, topo, 0), {}, comms.pipeline);
    decode::GenerationLoop<LocalBackend>(backend, world, topo, model.config, request, stage, {}).run();

    const Range heads = topo.kv_heads(comms.stage.rank());
    const KvView first = stage.cache().layer(0);
    const std::int64_t local = first.layout.length(stored, first.kvp_rank);
    std::vector<float> k(static_cast<std::size_t>(local * heads.size() * shape.head_dim));
    std::vector<float> v(static_cast<std::size_t>(local * heads.size() * v_dim));
    for (std::int64_t layer = 0; layer < shape.num_layers; ++layer) {
      backend.read_kv(ReadKvArgs{.kv = stage.cache().layer(static_cast<int>(layer)),
                                 .sequence_slot = 0,
                                 .first_local = 0,
                                 .k = {k.data(), {local, heads.size(), shape.head_dim}},
                                 .v = {v.data(), {v_dim == 0 ? 0 : local, heads.size(), v_dim}}},
                      stage.stream());
      backend.synchronize(stage.stream());
      const auto place = [&](const std::vector<float>& rows, std::int64_t dim, std::vector<float>& target) {
        for (std::int64_t l = 0; l < local; ++l) {
          const std::int64_t position = first.layout.global(first.kvp_rank, l);
          for (std::int64_t h = 0; h < heads.size(); ++h) {
            const auto row = rows.begin() + (l * heads.size() + h) * dim;
            const std::int64_t to = (layer * stored + position) * shape.num_kv_heads + heads.begin + h;
            std::copy(row, row + dim, target.begin() + to * dim);
          }
        }
      };
      place(k, shape.head_dim, global.k);
      if (v_dim > 0) place(v, v_dim, global.v);
    }
  });
  return global;
}

/// Largest difference divided by the largest magnitude; infinity if a token is missing, which shows as NaN.
double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0.0;
  double scale = 1e-30;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = worse(worst, std::abs(double{a[i]} - b[i]));
    scale = std::max(scale, std::abs(double{b[i]}));
  }
  return worst / scale;
}

}  // namespace

TEST_CASE("after 100 decoded tokens the gathered KV equals the cache of one rank") {
  for (const char* name : {"llama-tiny", "llama-tiny-16q8kv", "deepseek-tiny"}) {
    const ReferenceModel model(name);
    decode::GenerationRequest request;
    request.prompts = {model.golden().prompts[0]};
    request.max_new_tokens = 101;
    request.ignore_eos = true;
    request.kv_dtype = DType::f32;
    request.chunk = 3;
    const GlobalCache alone = generate_and_gather(model, Topology({}, model.config.shape), request);
    for (int ranks : {2, 4, 8}) {
      for (const TopologySpec& spec : Topology::legal_topologies(model.config.shape, ranks)) {
        INFO(name << " kvp " << spec.kvp << " tpa " << spec.tpa << " ep " << spec.ep);
        const GlobalCache sharded = generate_and_gather(model, Topology(spec, model.config.shape), request);
        CHECK(relative_difference(sharded.k, alone.k) < 1e-5);
        if (!alone.v.empty()) CHECK(relative_difference(sharded.v, alone.v) < 1e-5);
      }
    }
  }
}

}  // namespace helix::test
