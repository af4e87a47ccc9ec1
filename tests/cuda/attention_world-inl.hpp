// SPDX-License-Identifier: Apache-2.0
// How an AttentionWorld lays out a rank's pool, runs the code under test, and computes the expected results.
#pragma once

#include "cuda/attention_world.hpp"

namespace helix::test {

template <class T>
typename AttentionWorld<T>::Result AttentionWorld<T>::run(const cuda::Operators<T>& operators,
                                                          std::int64_t kvp_rank, std::int64_t first,
                                                          std::int64_t count) const {
  const AttentionCase& c = case_;
  const Shard shard = shard_of(kvp_rank);
  std::vector<std::uint8_t> bytes_of_q = narrowed(q_);
  const std::int64_t q_token = heads() * q_stride() + c.q_token_pad;
  if (c.is_q_reversed || c.q_token_pad > 0) {
    const auto token_bytes = heads() * q_stride() * static_cast<std::int64_t>(sizeof(T));
    std::vector<std::uint8_t> stored;
    for (std::int64_t i = 0; i < num_tokens(); ++i) {
      const std::int64_t token = c.is_q_reversed ? num_tokens() - 1 - i : i;
      const auto from = bytes_of_q.begin() + token * token_bytes;
      stored.insert(stored.end(), from, from + token_bytes);
      stored.insert(stored.end(), at(c.q_token_pad) * sizeof(T), 0xff);
    }
    bytes_of_q = stored;
  }
  cuda::Stream stream = operators.create_stream();
  std::vector<cuda::Buffer> memory;
  const auto upload = [&]<class X>(const std::vector<X>& values) {
    memory.push_back(operators.allocate(values.size() * sizeof(X) + 1));
    operators.upload(memory.back().data(), values.data(), values.size() * sizeof(X), stream);
    return reinterpret_cast<X*>(memory.back().data());
  };
  KvView kv = shard.pool.view(upload(shard.bytes));
  kv.layout = KvLayout(c.kvp, c.chunk);
  kv.kvp_rank = kvp_rank;
  kv.page_table = upload(shard.lists.pages);
  kv.max_pages = shard.lists.max_pages;
  const bool has_pages = std::any_of(c.sequences.begin(), c.sequences.end(), [&](const Sequence& sequence) {
    return kv.layout.length(sequence.length, kvp_rank) > 0;
  });
  if (!has_pages) {
    kv.page_table = reinterpret_cast<const std::int32_t*>(alignof(std::int32_t));  // must not be read
    kv.max_pages = 1;
  }
  if (c.is_csr) kv.page_begins = upload(shard.lists.begins);
  if (is_scaled()) {
    const float* scales = upload(scales_);
    kv.k_scale = scales;
    kv.v_scale = c.is_latent() ? nullptr : scales + c.kv_heads;
  }
  Result result;
  result.out.assign(at(num_tokens() * heads() * out_stride()) * sizeof(T) + kGuard, 0xff);
  result.lse.assign(at(num_tokens() * lse_stride()) * sizeof(float) + kGuard, 0xff);
  auto* out = reinterpret_cast<T*>(upload(result.out));
  auto* lse = reinterpret_cast<float*>(upload(result.lse));

  Batch batch{offsets_, upload(offsets_), upload(positions_), upload(slots_)};
  if (count >= 0) batch = batch.slice(first, count);
  const std::size_t workspace_bytes =
      operators.partial_attention_workspace_bytes(batch.num_tokens(), heads(), c.d, c.dv);
  // The kernel must not rely on the alignment of the workspace.
  std::vector<std::uint8_t> workspace(1 + workspace_bytes + kGuard, 0xff);
  auto* const scratch = reinterpret_cast<std::byte*>(upload(workspace));

  PartialAttentionArgs<T> args;
  const T* q = reinterpret_cast<const T*>(upload(bytes_of_q));
  args.q = TensorView<const T, 3>(c.is_q_reversed ? q + (num_tokens() - 1) * q_token : q,
                                  {num_tokens(), heads(), c.d},
                                  {c.is_q_reversed ? -q_token : q_token, q_stride(), 1});
  args.batch = batch;
  args.kv = kv;
  args.target.out = {out, {num_tokens(), heads(), c.dv}, {heads() * out_stride(), out_stride(), 1}};
  args.target.lse = {lse, {num_tokens(), heads()}, {lse_stride(), 1}};
  args.scale = scale();
  args.window = c.window;
  args.soft_cap = c.soft_cap;
  args.workspace = {scratch + 1, workspace_bytes};
  args.follows_prepare = c.follows_prepare;
  operators.partial_attention(args, stream);

  operators.download(result.out.data(), out, result.out.size(), stream);
  operators.download(result.lse.data(), lse, result.lse.size(), stream);
  operators.download(workspace.data(), scratch, workspace.size(), stream);
  operators.synchronize(stream);
  CHECK(std::all_of(workspace.end() - kGuard, workspace.end(), [](std::uint8_t x) { return x == 0xff; }));
  return result;
}

template <class T>
typename AttentionWorld<T>::Shard AttentionWorld<T>::shard_of(std::int64_t kvp_rank) const {
  const AttentionCase& c = case_;
  const KvLayout layout(c.kvp, c.chunk);
  std::vector<std::int64_t> counts(c.sequences.size());
  std::int64_t num_pages = 1;
  for (std::size_t b = 0; b < c.sequences.size(); ++b) {
    const std::int64_t length = layout.length(c.sequences[b].length, kvp_rank);
    num_pages += counts[at(slots_[b])] = (length + c.page_tokens - 1) / c.page_tokens;
  }
  std::vector<std::int32_t> free_pages(at(num_pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  std::mt19937 shuffle(5);
  std::shuffle(free_pages.begin(), free_pages.end(), shuffle);
  Shard shard{c.pool({c.kv_dtype, c.kv_heads, c.d, c.dv, c.page_tokens, num_pages}),
              {},
              HostPageLists(counts, c.is_csr, free_pages.front())};
  const KvPool& pool = shard.pool;
  // For fp8_ds_mla this is NaN throughout.
  shard.bytes.assign(at(pool.num_elements) * size_bytes(c.kv_dtype), 0xff);
  const auto fill = [&]<class S>(S*) {
    const auto put = [&](std::int64_t i, float value) {
      const S x(value);
      std::memcpy(shard.bytes.data() + at(i) * sizeof(S), &x, sizeof(S));
    };
    for (std::int64_t i = 0; i < pool.num_elements && !c.is_mixed(); ++i) put(i, kNaN);
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
      const Sequence& s = c.sequences[b];
      const std::int64_t forgotten =
          c.forgets ? std::max<std::int64_t>(0, s.length - s.queries + 1 - c.window) : c.nan_tokens;
      for (std::int64_t local = 0; local < layout.length(s.length, kvp_rank); ++local) {
        std::int32_t& page = shard.lists.at(slots_[b], local / c.page_tokens);
        const std::int64_t in_page = local % c.page_tokens;
        if (in_page == 0) {
          page = free_pages.back();
          free_pages.pop_back();
        }
        const std::int64_t token = layout.global(kvp_rank, local);
        if (token < forgotten) continue;
        if (c.is_mixed()) {
          const std::int64_t row_bytes = pool.format.k.token;
          std::memcpy(shard.bytes.data() + pool.key(page, 0, in_page, 0),
                      mixed_rows_[b].data() + token * row_bytes, at(row_bytes));
          continue;
        }
        const float* row = stored_[b].data() + token * row_elements();
        for (std::int64_t head = 0; head < c.kv_heads; ++head) {
          for (std::int64_t i = 0; i < c.d; ++i) put(pool.key(page, head, in_page, i), row[head * c.d + i]);
          for (std::int64_t i = 0; i < c.dv && !c.is_latent(); ++i)
            put(pool.value(page, head, in_page, i), row[(c.kv_heads + head) * c.d + i]);
        }
      }
    }
  };
  if (c.is_mixed()) {
    fill(static_cast<fp8_e4m3*>(nullptr));
  } else {
    dispatch(c.kv_dtype, fill);
  }
  return shard;
}

template <class T>
std::string AttentionWorld<T>::stray_write(const Result& result, std::int64_t begin, std::int64_t end) const {
  const auto look = [&](const std::vector<std::uint8_t>& bytes, std::int64_t row_bytes,
                        std::int64_t used_bytes, std::int64_t first_row, std::int64_t last_row) {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes.size()); ++i) {
      const std::int64_t row = i / row_bytes;
      const bool is_used = row >= first_row && row < last_row && i % row_bytes < used_bytes;
      if (!is_used && bytes[at(i)] != 0xff) return i;
    }
    return std::int64_t{-1};
  };
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t in_out =
      look(result.out, out_stride() * kBytes, case_.dv * kBytes, begin * heads(), end * heads());
  const std::int64_t in_lse = look(result.lse, lse_stride() * 4, heads() * 4, begin, end);
  if (in_out < 0 && in_lse < 0) return "";
  std::ostringstream text;
  text << "byte " << in_out << " of out or " << in_lse << " of lse was written and must not be";
  return text.str();
}

template <class T>
std::string AttentionWorld<T>::row_problem(const std::vector<Result>& results, std::int64_t only_rank,
                                           std::int64_t token, std::int64_t head) const {
  const AttentionCase& c = case_;
  const std::vector<float>& stored = stored_[sequence_of_[at(token)]];
  const std::int64_t kv_head = head / c.group;
  const double k_scale = is_scaled() ? scales_[at(kv_head)] : 1.0;
  const double v_scale = c.is_latent() ? k_scale : is_scaled() ? scales_[at(c.kv_heads + kv_head)] : 1.0;
  const std::int64_t position = positions_[at(token)];
  const std::int64_t first = c.window > 0 ? std::max<std::int64_t>(0, position + 1 - c.window) : 0;
  const float* q = q_.data() + (token * heads() + head) * q_stride();
  std::vector<double> scores;
  for (std::int64_t p = first; p <= position; ++p) {
    const float* key = stored.data() + p * row_elements() + (c.is_latent() ? 0 : kv_head * c.d);
    double score = 0.0;
    for (std::int64_t i = 0; i < c.d; ++i) score += double{q[i]} * double{key[i]};
    score *= k_scale * double{scale()};
    if (c.soft_cap > 0.0f) score = double{c.soft_cap} * std::tanh(score / double{c.soft_cap});
    scores.push_back(score);
  }
  /// Over the tokens of one rank; -1: of all ranks.
  const auto expect = [&](std::int64_t rank, std::vector<double>& out) {
    out.assign(at(c.dv), 0.0);
    double highest = -kInfinity;
    const auto is_seen = [&](std::int64_t p) { return rank < 0 || (p / c.chunk) % c.kvp == rank; };
    for (std::int64_t p = first; p <= position; ++p)
      if (is_seen(p)) highest = std::max(highest, scores[at(p - first)]);
    if (highest == -kInfinity) return -kInfinity;
    double total = 0.0;
    for (std::int64_t p = first; p <= position; ++p) {
      if (!is_seen(p)) continue;
      const double weight = std::exp(scores[at(p - first)] - highest);
      const float* value =
          stored.data() + p * row_elements() + (c.is_latent() ? 0 : c.kv_heads + kv_head) * c.d;
      for (std::int64_t i = 0; i < c.dv; ++i) out[at(i)] += weight * double{value[i]};
      total += weight;
    }
    for (double& x : out) x *= v_scale / total;
    return highest + std::log(total);
  };

  std::vector<double> expected;
  std::vector<double> merged(at(c.dv), 0.0);
  double total = 0.0;
  double rounded = 0.0;  // norms to which the ranks' rounding errors are relative
  // A row of few elements may cancel to almost nothing.
  const double least_scale = 0.01 * std::sqrt(static_cast<double>(c.dv));
  for (std::int64_t rank = 0; rank < c.kvp; ++rank) {
    if (only_rank >= 0 && rank != only_rank) continue;
    const Result& result = results[only_rank >= 0 ? 0 : at(rank)];
    const double expected_lse = expect(rank, expected);
    const std::vector<double> out = out_row(result, token * heads() + head);
    const double lse = lse_of(result, token, head);
    const std::string text = mismatch(out, lse, expected, expected_lse, least_scale);
    if (!text.empty()) return describe(token, head, rank) + text;
    const double weight = std::exp(lse);
    total += weight;
    for (std::size_t i = 0; i < merged.size(); ++i) merged[i] += weight * out[i];
    rounded += weight * norm(out);
  }
  if (c.kvp == 1 || only_rank >= 0 || total == 0.0) return "";
  for (double& x : merged) x /= total;
  const double expected_lse = expect(-1, expected);
  const std::string text = mismatch(merged, std::log(total), expected, expected_lse, rounded / total);
  return text.empty() ? "" : describe(token, head, -1) + text;
}

template <class T>
std::string AttentionWorld<T>::mismatch(const std::vector<double>& out, double lse,
                                        const std::vector<double>& expected, double expected_lse,
                                        double scale) {
  std::ostringstream text;
  const double allowed =
      std::max(kLseTolerance<T> * (sizeof(T) == 2 ? 1.0 : std::max(1.0, std::abs(expected_lse))),
               0x1p-22 * std::abs(expected_lse));  // the limit of f32
  const bool is_empty = expected_lse == -kInfinity;
  if (is_empty ? lse != expected_lse : !(std::abs(lse - expected_lse) <= allowed))
    text << "lse is " << lse << ", expected " << expected_lse << ". ";
  std::vector<double> errors(out);
  for (std::size_t i = 0; i < errors.size(); ++i) errors[i] -= expected[i];
  if (!(norm(errors) <= kOutTolerance<T> * std::max(scale, norm(expected)))) {
    text << "out differs by " << norm(errors) << " from one of norm " << norm(expected) << ", first elements "
         << out[0] << " and " << expected[0];
  }
  return text.str();
}

}  // namespace helix::test
