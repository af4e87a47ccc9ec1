// SPDX-License-Identifier: Apache-2.0
// Splits the KV sequence of one query into shards, attends to each shard alone, and merges the results
// exactly. This is the mathematics that Helix rests on, in one file.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/lse_combine.hpp>

namespace {

constexpr int kTokens = 1000;
constexpr int kDim = 64;
constexpr int kShards = 4;

/// Computes softmax(q k) v over tokens [begin, end). Returns the natural log of the softmax's denominator
/// (lse).
float attend(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v, int begin,
             int end, float* out) {
  double total = 0.0;
  std::vector<double> sums(kDim, 0.0);
  for (int t = begin; t < end; ++t) {
    double score = 0.0;
    for (int d = 0; d < kDim; ++d) score += q[d] * k[t * kDim + d] / std::sqrt(double{kDim});
    total += std::exp(score);
    for (int d = 0; d < kDim; ++d) sums[d] += std::exp(score) * v[t * kDim + d];
  }
  for (int d = 0; d < kDim; ++d) out[d] = static_cast<float>(sums[d] / total);
  return static_cast<float>(std::log(total));
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(kDim), k(kTokens * kDim), v(kTokens * kDim);
  for (auto* values : {&q, &k, &v}) {
    for (float& x : *values) x = normal(generator);
  }

  std::vector<float> whole(kDim);
  attend(q, k, v, 0, kTokens, whole.data());

  // Each shard is attended to without any knowledge of the others. The first shard is much shorter than the
  // rest: the combine weighs each partial result by its log-sum-exp (lse), not by its length.
  std::vector<float> partial_out(kShards * kDim), partial_lse(kShards), combined(kDim);
  const int begins[kShards + 1] = {0, 10, 400, 700, kTokens};
  for (int s = 0; s < kShards; ++s) {
    partial_lse[s] = attend(q, k, v, begins[s], begins[s + 1], &partial_out[s * kDim]);
  }

  helix::cpu::Backend<helix::cpu::LocalComm> backend;
  auto stream = backend.create_stream();
  const helix::LseCombineArgs<float> args{.partial_out = {partial_out.data(), {kShards, 1, 1, kDim}},
                                          .partial_lse = {partial_lse.data(), {kShards, 1, 1}},
                                          .out = {combined.data(), {1, 1, kDim}},
                                          .lse = {}};  // the combined lse is not needed
  helix::lse_combine(backend, args, stream);
  backend.synchronize(stream);

  float worst = 0.0f;
  for (int d = 0; d < kDim; ++d) {
    const float difference = std::abs(combined[d] - whole[d]);
    if (std::isnan(difference)) return 1;
    worst = std::max(worst, difference);
  }
  std::printf("%d tokens in %d shards: largest difference from unsplit attention %.1e\n", kTokens, kShards,
              worst);
  return worst < 1e-6f ? 0 : 1;
}
