// SPDX-License-Identifier: Apache-2.0
// helix-bench-cuda: Google Benchmark over cuda::Backend, with the cases that fit the GPUs of this machine, or
// with the caller's cases of attention. It can list cases without a GPU too.
#include <algorithm>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

#include "attention_case.hpp"
#include "cases.hpp"
#include "examples/nccl_environment.hpp"

namespace {

/// Registers every case of this program that `num_gpus` GPUs have room for.
void register_all(int num_gpus, bool is_listing) {
  if (num_gpus < 4 && !is_listing)
    std::cerr << "helix-bench-cuda: " << num_gpus << (num_gpus == 1 ? " GPU" : " GPUs")
              << "; cases that need more, up to 4, are left out\n";
  helix::bench::register_attention();
  helix::bench::register_operators();
  helix::bench::register_experts();
  helix::bench::register_exchanges(num_gpus);
  helix::bench::register_peers(num_gpus);
  if (num_gpus > 0) helix::bench::register_decode_layers(num_gpus);  // sized by the GPUs' memory
  helix::bench::register_attention_scaling(num_gpus);
}

/// Adds the versions of the CUDA runtime and of NCCL to the results.
void report_versions() {
  int version = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess)
    benchmark::AddCustomContext("cuda",
                                std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10));
  if (ncclGetVersion(&version) == ncclSuccess)  // as of NCCL 2.9: major * 10000 + minor * 100 + patch
    benchmark::AddCustomContext("nccl", std::to_string(version / 10000) + "." +
                                            std::to_string(version / 100 % 100) + "." +
                                            std::to_string(version % 100));
}

}  // namespace

int main(int argc, char** argv) {
  helix::turn_nccl_multicast_off();
  helix::let_ranks_share_a_gpu();
  helix::promise_nccl_one_graph_at_a_time();
  std::vector<helix::bench::AttentionCase> cases;
  try {
    cases = helix::bench::take_cases(argc, argv);
  } catch (const helix::Error& error) {
    std::cerr << "helix-bench-cuda: --case: " << error.what() << '\n';
    return 1;
  }
  const int num_gpus = helix::cuda::device_count();
  const bool is_listing = std::any_of(argv + 1, argv + argc, [](const char* argument) {
    return std::string_view(argument) == "--benchmark_list_tests";
  });
  if (num_gpus == 0 && !is_listing) {
    std::cerr << "helix-bench-cuda: no GPU can be used (" << helix::cuda::no_device_reason()
              << "); nothing is measured\n";
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("gpus", std::to_string(num_gpus));
  report_versions();
  if (cases.empty()) {
    register_all(num_gpus, is_listing);
  } else {
    helix::bench::register_attention(cases);
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
