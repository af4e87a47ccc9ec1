// SPDX-License-Identifier: Apache-2.0
// The smallest program that uses an installed helix: a few steps of one transformer layer with random
// weights, on one rank.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/helix.hpp>

using Backend = helix::cpu::Backend<helix::cpu::LocalComm>;

namespace {

constexpr std::int64_t kHidden = 64, kFfn = 128, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kSteps = 40;

/// Owns the memory that WeightViews borrow.
class RandomWeights {
 public:
  helix::WeightView matrix(std::int64_t rows, std::int64_t cols) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(cols)));
    return store(rows, cols, [&] { return normal(generator_); });
  }
  helix::WeightView ones(std::int64_t cols) {
    return store(1, cols, [] { return 1.0f; });
  }

 private:
  template <class Draw>
  helix::WeightView store(std::int64_t rows, std::int64_t cols, Draw draw) {
    std::vector<float>& values = matrices_.emplace_back(static_cast<std::size_t>(rows * cols));
    for (float& value : values) value = draw();
    return {values.data(), helix::DType::f32, rows, cols};
  }

  std::mt19937 generator_{1};
  std::vector<std::vector<float>> matrices_;  // data stays in place when the outer vector grows
};

}  // namespace

int main() {
  const helix::Topology topo({.kvp = 1, .tpa = 1}, {.num_query_heads = kHeads,
                                                    .num_kv_heads = kKvHeads,
                                                    .head_dim = kHeadDim,
                                                    .value_dim = kHeadDim,
                                                    .hidden = kHidden,
                                                    .ffn = kFfn,
                                                    .num_layers = 1});
  Backend backend;
  Backend::Stream stream = backend.create_stream();

  RandomWeights random;
  helix::LayerWeights weights;
  weights.input_norm = random.ones(kHidden);
  weights.post_attention_norm = random.ones(kHidden);
  weights.attention = helix::GqaWeights{.qkv = random.matrix((kHeads + 2 * kKvHeads) * kHeadDim, kHidden),
                                        .o = random.matrix(kHidden, kHeads * kHeadDim)};
  weights.ffn = helix::DenseFfnWeights{.gate_up = random.matrix(2 * kFfn, kHidden),
                                       .down = random.matrix(kHidden, kFfn)};

  std::vector<float> inverse_frequency;
  for (int i = 0; i < kHeadDim; i += 2)
    inverse_frequency.push_back(std::pow(10000.0f, -static_cast<float>(i) / kHeadDim));
  helix::LayerConfig config;
  config.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  config.rope = {.inverse_frequency = inverse_frequency.data(), .rotary_dim = kHeadDim};

  constexpr std::int64_t kPageTokens = 16;
  helix::ShardedKVCache<Backend> cache(
      backend, topo,
      {.num_layers = 1, .page_tokens = kPageTokens, .num_pages = (kSteps + kPageTokens - 1) / kPageTokens});
  const helix::RankShape shape = topo.rank_shape(/*stage_rank=*/0);
  helix::KvpAllToAll<Backend> exchange(backend, helix::KvpAllToAllSpec::of_layers(shape, /*max_tokens=*/1));
  helix::HopB<Backend> hop_b(backend, /*max_slices=*/1);
  helix::BatchBuffer<Backend> batch(backend, /*max_sequences=*/1, /*max_tokens=*/1);
  Backend::Buffer workspace =
      backend.allocate(helix::decode_layer_workspace_bytes(backend, shape, /*max_tokens=*/1));
  const helix::DecodeLayerOptions<Backend> options{
      .exchange = &exchange, .hop_b = &hop_b, .workspace = {workspace.data(), workspace.size_bytes()}};

  std::vector<float> hidden(kHidden, 1.0f);
  const helix::SequenceId sequence = cache.add();
  for (std::int64_t position = 0; position < kSteps; ++position) {
    cache.append(sequence, 1, stream);
    const std::int32_t offsets[] = {0, 1};
    const std::int32_t slots[] = {cache.slot(sequence)};
    batch.set(offsets, {&position, 1}, slots, stream);
    helix::decode_layer(backend, shape, config, weights, cache.layer(0), batch.batch(),
                        {hidden.data(), {1, kHidden}}, options, stream);
    backend.synchronize(stream);
    for (float& value : hidden) value /= 1.0f + std::abs(value);  // stands in for the rest of the model
  }

  double checksum = 0.0;
  for (float value : hidden) checksum += std::abs(static_cast<double>(value));
  std::printf("helix: %d decode steps, checksum %.6f\n", static_cast<int>(kSteps), checksum);
  return std::isfinite(checksum) && checksum > 0.0 ? 0 : 1;
}
