// SPDX-License-Identifier: Apache-2.0
// Any sizes of a request and a topology give helix::Error, or a plan with valid sizes. The sanitizer detects
// overflow.
#include <array>
#include <cstdint>
#include <cstring>

#include <helix/error.hpp>

#include "fuzz.hpp"
#include "generate/request_plan.hpp"

namespace {

using helix::fuzz::require;

helix::decode::ModelConfig model(std::int64_t layers, std::int64_t heads, std::int64_t dim) {
  helix::decode::ModelConfig config;
  config.shape = {.num_query_heads = heads,
                  .num_kv_heads = heads,
                  .head_dim = dim,
                  .value_dim = dim,
                  .hidden = 64,
                  .ffn = 64,
                  .vocab = 100,
                  .num_layers = layers};
  config.max_positions = std::int64_t{1} << 40;
  return config;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace helix;
  std::array<std::int64_t, 16> numbers{};
  std::memcpy(numbers.data(), data, std::min(size, sizeof(numbers)));
  const auto width = [&](std::size_t i) { return static_cast<int>(numbers[i]); };
  decode::GenerationRequest request;
  request.max_new_tokens = numbers[0];
  request.draft_tokens = numbers[1];
  request.synthetic_context = numbers[2];
  request.chunk = numbers[3];
  request.page_tokens = numbers[4];
  request.prefill_tokens = numbers[5];
  for (int i = 0; i < (numbers[6] & 7); ++i) request.prompts.push_back({1, 2, 3});
  if (request.draft_tokens != 1)
    request.teacher.assign(static_cast<std::size_t>(request.num_sequences()), {1});
  const TopologySpec spec{.kvp = width(7), .tpa = width(8), .pp = width(9), .dp = width(10)};
  const decode::ModelConfig config = model(numbers[11], numbers[12], numbers[13]);
  try {
    const Topology topo(spec, config.shape);
    decode::check_request(request, config, topo);
    const RankCoordinates last = topo.coordinates(topo.world_size() - 1);
    const KvCacheSpec cache = decode::plan_cache(request, topo, last.stage, last.replica);
    require(cache.num_pages >= 1 && cache.max_tokens >= 1);
    const decode::StageLimits limits = decode::plan_limits(request, topo, 0);
    require(limits.max_step_tokens >= 1 && limits.max_logit_rows >= 1);
    for (std::int64_t sequence = 0; sequence < request.num_sequences(); ++sequence) {
      require(decode::planned_kv_bytes(request, topo, last, sequence) >= 0);
    }
  } catch (const Error& error) {
    require(error.code() != ErrorCode::internal);
  }
  return 0;
}
