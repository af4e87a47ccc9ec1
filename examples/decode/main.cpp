// SPDX-License-Identifier: Apache-2.0
// helix-decode: a Llama or DeepSeek checkpoint under a Helix topology, on rank threads or under mpirun.
#include <cstdio>
#include <exception>
#include <memory>

#include <fmt/format.h>

#include "checkpoint.hpp"
#include "launch.hpp"
#include "model_config.hpp"
#include "options.hpp"
#include "report.hpp"

namespace helix::decode {
namespace {

Topology one_rank_topology(const Topology& topo) {
  return Topology(TopologySpec{}, topo.shape());
}

void run(Options& options, MpiLaunch* mpi) {
  const bool is_root = mpi == nullptr || mpi->rank() == 0;
  HELIX_EXPECTS(options.device != "cuda", ErrorCode::unsupported,
                "--device cuda: this build has no CUDA backend; use --device cpu or auto");
  const Checkpoint checkpoint(options.model);
  const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
  GenerationRequest& request = options.request;
  request.kv_dtype = options.kv_dtype_name.empty() ? config.dtype : *parse_dtype(options.kv_dtype_name);
  const Topology topo = mpi != nullptr ? Topology(options.topology, config.shape(), mpi->size())
                                       : Topology(options.topology, config.shape());
  const LaunchOptions launch{.num_threads = options.num_threads, .show_progress = true};
  const std::vector<RankMemory> plan = plan_memory(checkpoint, config, topo, request, launch);
  if (is_root) {
    if (request.synthetic_context > config.max_positions) {
      fmt::print(
          "note: {} tokens of synthetic context exceed the model's {} positions; the limit is lifted for "
          "this run\n",
          request.synthetic_context, config.max_positions);
    }
    fmt::print("{}\n{}", topo.to_string(), format_memory(plan, topo));
    std::fflush(stdout);
  }
  if (options.is_plan_only) return;

  const GenerationResult result = mpi != nullptr ? mpi->run(checkpoint, config, topo, request, launch)
                                                 : run_local(checkpoint, config, topo, request, launch);
  if (!is_root) return;
  fmt::print("{}", format_result(result));
  if (!options.json.empty()) write_json(options.json, topo, request, result);
  if (options.verify) {
    const GenerationResult alone = run_local(checkpoint, config, one_rank_topology(topo), request, launch);
    check_same_tokens(result, alone);
    fmt::print("verified: {} ranks give the tokens of one rank\n", topo.world_size());
  }
}

}  // namespace
}  // namespace helix::decode

int main(int argc, char** argv) {
  using namespace helix::decode;
  std::unique_ptr<MpiLaunch> mpi;
  try {
    if (is_mpi_process()) mpi = std::make_unique<MpiLaunch>();
    if (auto options = parse_options(argc, argv)) run(*options, mpi.get());
    return 0;
  } catch (const std::exception& error) {
    if (mpi != nullptr) mpi->abort(error.what());
    fmt::print(stderr, "helix-decode: {}\n", error.what());
    return 1;
  }
}
