// SPDX-License-Identifier: Apache-2.0
// World: runs the code under test and computes the reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "cpu/attention_world.hpp"

namespace helix::test::attention {

inline World::Result World::run(std::int64_t kvp_rank, int num_threads, std::int64_t slice,
                                unsigned page_seed) const {
  const Case& c = case_;
  const helix::KvLayout layout(c.kvp, c.chunk);
  std::int64_t needed = 0;
  std::int64_t max_pages = 1;
  for (const Sequence& s : c.sequences) {
    const std::int64_t pages = (layout.length(s.length, kvp_rank) + c.page_tokens - 1) / c.page_tokens;
    needed += pages;
    max_pages = std::max(max_pages, pages + 1);
  }
  const helix::KvFormat format =
      c.is_mla ? helix::KvFormat::latent(c.dtype, c.d, c.dv, c.page_tokens)
               : helix::KvFormat::head_major(c.dtype, c.kv_heads, c.d, c.dv, c.page_tokens);
  const std::int64_t num_pages = needed + 2;
  std::vector<std::int32_t> free_pages(at(num_pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  std::mt19937 shuffle(page_seed);
  std::shuffle(free_pages.begin(), free_pages.end(), shuffle);
  std::vector<std::int32_t> table(c.sequences.size() * at(max_pages), kWildPage);
  const std::size_t bytes = helix::size_bytes(c.dtype);
  std::vector<std::byte> pages(at(num_pages * format.page_elements()) * bytes);
  helix::dispatch(c.dtype, [&]<class T>(T*) {
    for (std::size_t i = 0; i < pages.size() / sizeof(T); ++i) {
      const T nan{kNaN};
      std::memcpy(pages.data() + i * sizeof(T), &nan, sizeof(T));
    }
  });
  for (std::size_t b = 0; b < c.sequences.size(); ++b) {
    for (std::int64_t token = 0; token < c.sequences[b].length; ++token) {
      if (layout.owner(token) != kvp_rank) continue;
      const std::int64_t local = layout.local(token);
      auto& page = table[at(slots_[b] * max_pages + local / c.page_tokens)];
      if (page == kWildPage) {
        page = free_pages.back();
        free_pages.pop_back();
      }
      for (std::int64_t part = 0; part < (c.is_mla ? 1 : 2 * c.kv_heads); ++part) {
        const std::int64_t to =
            page * format.page_elements() + (part * c.page_tokens + local % c.page_tokens) * c.d;
        const std::int64_t from = token * row_elements() + part * c.d;
        std::memcpy(pages.data() + at(to) * bytes, stored_[b].data() + at(from) * bytes, at(c.d) * bytes);
      }
    }
  }
  helix::KvView kv = helix::KvView::of_pool(pages.data(), format, num_pages);
  kv.page_table = table.data();
  kv.max_pages = max_pages;
  kv.layout = layout;
  kv.kvp_rank = kvp_rank;
  if (c.dtype == DType::fp8_e4m3) {
    kv.k_scale = k_scale_.data();
    if (!c.is_mla) kv.v_scale = v_scale_.data();
  }

  Result result;
  result.out.assign(at(num_tokens() * c.query_heads * c.dv), kNaN);
  result.lse.assign(at(num_tokens() * c.query_heads), kNaN);
  helix::cpu::Operators operators(num_threads);
  helix::cpu::Stream stream = operators.create_stream();
  std::vector<std::byte> workspace(
      operators.partial_attention_workspace_bytes(num_tokens(), c.query_heads, c.d, c.dv) + 1);
  helix::PartialAttentionArgs<float> args;
  args.q = {q_.data(), {num_tokens(), c.query_heads, c.d}};
  args.kv = kv;
  args.target.out = {result.out.data(), {num_tokens(), c.query_heads, c.dv}};
  args.target.lse = {result.lse.data(), {num_tokens(), c.query_heads}};
  args.scale = scale();
  args.window = c.window;
  args.soft_cap = c.soft_cap;
  args.workspace = std::span(workspace).subspan(1);  // the kernel must not rely on the alignment
  const helix::Batch batch{offsets_, offsets_.data(), positions_.data(), slots_.data()};
  const std::int64_t step = slice == 0 ? batch.num_sequences() : slice;
  for (std::int64_t first = 0; first < batch.num_sequences(); first += step) {
    args.batch = batch.slice(first, std::min(step, batch.num_sequences() - first));
    operators.partial_attention(args, stream);
  }
  operators.synchronize(stream);
  return result;
}

inline void World::reference(std::int64_t t, std::int64_t head, std::int64_t kvp_rank,
                             std::vector<double>& out, double& lse) const {
  const Case& c = case_;
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), static_cast<std::int32_t>(t));
  const auto b = static_cast<std::size_t>(after - offsets_.begin() - 1);
  const std::int64_t kv_head = head / (c.query_heads / c.kv_heads);
  const std::int64_t position = positions_[at(t)];
  const bool is_fp8 = c.dtype == DType::fp8_e4m3;
  const double k_scale = is_fp8 ? k_scale_[at(kv_head)] : 1.0;
  const double v_scale = c.is_mla ? k_scale : (is_fp8 ? v_scale_[at(kv_head)] : 1.0);
  std::vector<double> scores;
  std::vector<std::int64_t> tokens;
  for (std::int64_t token = 0; token <= position; ++token) {
    if (c.window > 0 && token <= position - c.window) continue;
    if (kvp_rank >= 0 && (token / c.chunk) % c.kvp != kvp_rank) continue;
    double score = 0.0;
    for (std::int64_t i = 0; i < c.d; ++i) {
      const double q = q_[at((t * c.query_heads + head) * c.d + i)];
      score += q * value(b, token * row_elements() + (c.is_mla ? 0 : kv_head * c.d) + i) * k_scale;
    }
    score *= scale();
    if (c.soft_cap > 0.0f) score = c.soft_cap * std::tanh(score / c.soft_cap);
    scores.push_back(score);
    tokens.push_back(token);
  }
  out.assign(at(c.dv), 0.0);
  lse = -kInfinity;
  if (scores.empty()) return;
  const double highest = *std::max_element(scores.begin(), scores.end());
  double total = 0.0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double weight = std::exp(scores[j] - highest);
    total += weight;
    const std::int64_t row = tokens[j] * row_elements() + (c.is_mla ? 0 : (c.kv_heads + kv_head) * c.d);
    for (std::int64_t i = 0; i < c.dv; ++i) out[at(i)] += weight * value(b, row + i) * v_scale;
  }
  for (double& x : out) x /= total;
  lse = highest + std::log(total);
}

inline void World::check(int num_threads) const {
  const Case& c = case_;
  std::vector<Result> results;
  for (std::int64_t rank = 0; rank < c.kvp; ++rank) results.push_back(run(rank, num_threads));
  std::vector<double> expected;
  double expected_lse = 0.0;
  for (std::int64_t t = 0; t < num_tokens(); ++t) {
    for (std::int64_t head = 0; head < c.query_heads; ++head) {
      std::vector<double> merged(at(c.dv), 0.0);
      double total = 0.0;
      for (std::int64_t rank = 0; rank < c.kvp; ++rank) {
        reference(t, head, rank, expected, expected_lse);
        const float lse = results[at(rank)].lse[at(t * c.query_heads + head)];
        const float* out = results[at(rank)].out.data() + (t * c.query_heads + head) * c.dv;
        INFO("token " << t << " head " << head << " rank " << rank << " position " << positions_[at(t)]);
        compare(out, lse, expected, expected_lse);
        for (std::int64_t i = 0; i < c.dv; ++i) merged[at(i)] += std::exp(static_cast<double>(lse)) * out[i];
        total += std::exp(static_cast<double>(lse));
      }
      if (c.kvp == 1 || total == 0.0) continue;
      reference(t, head, -1, expected, expected_lse);
      INFO("token " << t << " head " << head << ", all ranks merged");
      std::vector<float> out(at(c.dv));
      for (std::int64_t i = 0; i < c.dv; ++i) out[at(i)] = static_cast<float>(merged[at(i)] / total);
      compare(out.data(), static_cast<float>(std::log(total)), expected, expected_lse);
    }
  }
}

}  // namespace helix::test::attention
