// SPDX-License-Identifier: Apache-2.0
// Runs one transformer layer on four ranks (KVP 2 x TPA 2), which are threads of this process, and compares
// the result with that of one rank.
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <thread>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/helix.hpp>

namespace {

using Backend = helix::cpu::Backend<helix::cpu::LocalComm>;
using Matrix = std::vector<float>;  // row-major, one row per output feature

constexpr std::int64_t kHeadDim = 32, kHidden = 128, kFfn = 256;
constexpr helix::ModelShape kShape{.num_query_heads = 8,
                                   .num_kv_heads = 2,
                                   .head_dim = kHeadDim,
                                   .value_dim = kHeadDim,
                                   .hidden = kHidden,
                                   .ffn = kFfn};
constexpr std::int64_t kQueryRows = kShape.num_query_heads * kHeadDim;
constexpr std::int64_t kKvRows = kShape.num_kv_heads * kHeadDim;
constexpr int kPrompt = 50;
constexpr int kSteps = 8;

/// The weights of the whole layer, as a checkpoint holds them, and the input tokens.
struct Model {
  std::mt19937 generator{7};
  Matrix norm = random(1, kHidden), q = random(kQueryRows, kHidden), k = random(kKvRows, kHidden),
         v = random(kKvRows, kHidden), o = random(kHidden, kQueryRows), gate = random(kFfn, kHidden),
         up = random(kFfn, kHidden), down = random(kHidden, kFfn), tokens = random(kPrompt + kSteps, kHidden),
         frequency = random(1, kHeadDim / 2);

  Matrix random(std::int64_t rows, std::int64_t cols) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(cols)));
    Matrix m(static_cast<std::size_t>(rows * cols));
    for (float& x : m) x = normal(generator);
    return m;
  }
};

Matrix rows(const Matrix& m, std::int64_t cols, helix::Range r) {
  return {m.begin() + r.begin * cols, m.begin() + r.end * cols};
}
Matrix columns(const Matrix& m, std::int64_t cols, helix::Range r) {
  Matrix out;
  for (auto row = m.begin(); row != m.end(); row += cols) out.insert(out.end(), row + r.begin, row + r.end);
  return out;
}
Matrix operator+(Matrix a, const Matrix& b) {
  return a.insert(a.end(), b.begin(), b.end()), a;
}
helix::WeightView view(const Matrix& m, std::int64_t cols) {
  return {m.data(), helix::DType::f32, static_cast<std::int64_t>(m.size()) / cols, cols};
}

/// Runs one rank. Returns the hidden state of the last token.
Matrix run_rank(const Model& model, const helix::Topology& topo, helix::cpu::LocalComm stage) {
  const int rank = stage.rank();
  Backend backend(stage, helix::split_kvp(stage, topo));
  Backend::Stream stream = backend.create_stream();

  // Take this rank's slices of the weights; the topology says which. W_o is sliced by combined_heads, not by
  // the rank number: the exchange decides which heads a rank holds afterwards.
  const auto heads = [](helix::Range r) { return helix::Range{r.begin * kHeadDim, r.end * kHeadDim}; };
  const helix::Range q = heads(topo.query_heads(rank)), kv = heads(topo.kv_heads(rank));
  const Matrix qkv = rows(model.q, kHidden, q) + rows(model.k, kHidden, kv) + rows(model.v, kHidden, kv);
  const Matrix o = columns(model.o, kQueryRows, heads(topo.combined_heads(rank)));
  const Matrix gate_up = rows(model.gate, kHidden, topo.ffn(rank)) + rows(model.up, kHidden, topo.ffn(rank));
  const Matrix down = columns(model.down, kFfn, topo.ffn(rank));
  const helix::GqaWeights attention{.qkv = view(qkv, kHidden),
                                    .o = view(o, topo.combined_heads(rank).size() * kHeadDim)};
  const helix::DenseFfnWeights ffn{.gate_up = view(gate_up, kHidden),
                                   .down = view(down, topo.ffn(rank).size())};
  const helix::LayerWeights weights{.input_norm = view(model.norm, kHidden),
                                    .post_attention_norm = view(model.norm, kHidden),
                                    .attention = attention,
                                    .ffn = ffn};
  const helix::LayerConfig config{
      .softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim)),
      .rope = {.inverse_frequency = model.frequency.data(), .rotary_dim = kHeadDim}};

  // All memory is allocated once, before the first step.
  helix::ShardedKVCache<Backend> cache(backend, topo,
                                       {.dtype = helix::DType::f32, .num_layers = 1, .num_pages = 16});
  const helix::RankShape shape = topo.rank_shape(rank);
  helix::HopB<Backend> hop_b(backend, /*max_slices=*/4);
  helix::KvpAllToAll<Backend> exchange(backend,
                                       helix::KvpAllToAllSpec::of_layers(shape, kPrompt, hop_b.max_slices()));
  helix::BatchBuffer<Backend> batch(backend, 1, kPrompt);
  Backend::Buffer workspace = backend.allocate(helix::decode_layer_workspace_bytes(backend, shape, kPrompt));
  const helix::SequenceId sequence = cache.add(kPrompt + kSteps);

  Matrix hidden;
  // The prompt runs as one chunk, then each step runs one token.
  for (int step = 0; step <= kSteps; ++step) {
    const int first = step == 0 ? 0 : kPrompt + step - 1;
    const int count = step == 0 ? kPrompt : 1;
    std::vector<std::int64_t> positions;
    for (int t = 0; t < count; ++t) positions.push_back(first + t);
    hidden = rows(model.tokens, kHidden, {first, first + count});
    cache.append(sequence, count, stream);
    batch.set(std::vector<std::int32_t>{0, count}, positions, std::vector{cache.slot(sequence)}, stream);
    helix::decode_layer(
        backend, shape, config, weights, cache.layer(0), batch.batch(), {hidden.data(), {count, kHidden}},
        {.exchange = &exchange, .hop_b = &hop_b, .workspace = {workspace.data(), workspace.size_bytes()}},
        stream);
    backend.synchronize(stream);
  }
  std::printf("rank %d of %d: %lld of %d tokens stored here\n", rank, topo.stage_size(),
              static_cast<long long>(cache.local_length(sequence)), kPrompt + kSteps);
  return hidden;
}

}  // namespace

int main() {
  const Model model;
  const Matrix alone =
      run_rank(model, helix::Topology({}, kShape), helix::cpu::LocalComm::create_group(1)[0]);

  const helix::Topology topo({.kvp = 2, .tpa = 2}, kShape);
  std::vector<Matrix> results(static_cast<std::size_t>(topo.stage_size()));
  std::vector<std::exception_ptr> failures(results.size());
  std::vector<std::thread> ranks;
  for (helix::cpu::LocalComm& comm : helix::cpu::LocalComm::create_group(topo.stage_size())) {
    ranks.emplace_back([&, comm]() mutable {
      const auto rank = static_cast<std::size_t>(comm.rank());
      try {
        results[rank] = run_rank(model, topo, comm);
      } catch (const std::exception& error) {
        comm.abort(error.what());  // wakes the other ranks
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }

  float worst = 0.0f;
  for (const Matrix& result : results) {
    for (std::size_t i = 0; i < alone.size(); ++i) {
      const float difference = std::abs(result[i] - alone[i]);
      if (std::isnan(difference)) return 1;
      worst = std::max(worst, difference);
    }
  }
  std::printf("largest difference between %d ranks and one: %.1e\n", topo.stage_size(), worst);
  return worst < 1e-5f ? 0 : 1;
}
