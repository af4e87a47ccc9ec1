// SPDX-License-Identifier: Apache-2.0
// helix-bench-cuda: Google Benchmark over cuda::Backend, with the cases that fit the GPUs of this machine.
#include <iostream>
#include <string>

#include <benchmark/benchmark.h>

#include <helix/cuda/runtime.hpp>

#include "cases.hpp"
#include "examples/decode/cli/nccl_environment.hpp"

int main(int argc, char** argv) {
  helix::turn_nccl_multicast_off();
  helix::let_ranks_share_a_gpu();
  helix::promise_nccl_one_graph_at_a_time();
  const int num_gpus = helix::cuda::device_count();
  if (num_gpus == 0) {
    std::cerr << "helix-bench-cuda: no GPU can be used (" << helix::cuda::no_device_reason()
              << "); nothing is measured\n";
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("gpus", std::to_string(num_gpus));
  if (num_gpus < 4)
    std::cerr << "helix-bench-cuda: " << num_gpus << (num_gpus == 1 ? " GPU" : " GPUs")
              << "; cases that need more, up to 4, are left out\n";
  helix::bench::register_operators();
  helix::bench::register_exchanges(num_gpus);
  helix::bench::register_peers(num_gpus);
  helix::bench::register_decode_layers(num_gpus);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
