// SPDX-License-Identifier: Apache-2.0
// AttentionWorld: one layer of paged attention with random contents, run on a GPU, against a naive reference
// in double precision, with everything poisoned that must not be read.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/at.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"

namespace helix::test {

/// One sequence of the batch.
struct Sequence {
  std::int64_t length = 0;   ///< Global tokens, the query tokens included.
  std::int64_t queries = 1;  ///< Query tokens, the last ones; 0: none in this step.
};

/// A shape of attention: sizes, pool, split over KVP ranks, batch.
struct AttentionCase {
  DType kv_dtype = DType::f32;
  std::int64_t kv_heads = 2;
  std::int64_t group = 4;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  MakeKvPool pool = helix_pool;
  bool is_csr = false;
  std::int64_t page_tokens = 64;
  std::int64_t kvp = 1;
  std::int64_t chunk = 16;
  std::int64_t window = 0;
  float soft_cap = 0.0f;
  std::int64_t q_pad = 0;  // elements between heads, which are NaN
  std::int64_t out_pad = 0;
  bool forgets = false;  // what no window reaches any more is NaN
  std::vector<Sequence> sequences = {{40, 1}};
  std::vector<std::int64_t> padding;  // query tokens whose position is -1

  bool is_latent() const { return pool == latent_pool || pool == split_latent_pools; }
};

/// Largest relative error of a row of out, in the 2-norm: bf16 and f16 keep 8 and 11 bits of each weight.
template <class T>
constexpr double kOutTolerance = 2e-5;
template <>
inline constexpr double kOutTolerance<bf16> = 1e-2;
template <>
inline constexpr double kOutTolerance<f16> = 2e-3;
template <class T>
constexpr double kLseTolerance = sizeof(T) == 2 ? 1e-3 : 1e-5;

/// One layer of one model: what every token holds, what each query asks. T: of q and out.
template <class T>
class AttentionWorld {
 public:
  explicit AttentionWorld(const AttentionCase& c, unsigned seed = 1) : case_(c), random_(seed) {
    const auto sequences = static_cast<std::int64_t>(c.sequences.size());
    offsets_.push_back(0);
    for (std::int64_t b = 0; b < sequences; ++b) {
      const Sequence& s = c.sequences[at(b)];
      for (std::int64_t t = 0; t < s.queries; ++t) {
        positions_.push_back(s.length - s.queries + t);
        sequence_of_.push_back(at(b));
      }
      offsets_.push_back(static_cast<std::int32_t>(positions_.size()));
      slots_.push_back(static_cast<std::int32_t>(sequences - 1 - b));
    }
    for (const std::int64_t token : c.padding) positions_[at(token)] = -1;
    q_.assign(at(num_tokens() * heads() * q_stride()), kNaN);
    for (std::int64_t row = 0; row < num_tokens() * heads(); ++row)
      for (std::int64_t i = 0; i < c.d; ++i)
        q_[at(row * q_stride() + i)] = static_cast<float>(T(2.0f * uniform()));
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      scales_.push_back(0.5f + 0.25f * static_cast<float>(h));
      scales_.push_back(1.5f - 0.25f * static_cast<float>(h));
    }
    for (const Sequence& s : c.sequences) {
      std::vector<float>& stored = stored_.emplace_back(at(s.length * row_elements()));
      dispatch(c.kv_dtype, [&]<class S>(S*) {
        for (float& x : stored) x = static_cast<float>(S(2.0f * uniform()));
      });
    }
  }

  const AttentionCase& what() const { return case_; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  std::int64_t heads() const { return case_.group * case_.kv_heads; }

  /// The whole buffers, guards and gaps included.
  struct Result {
    std::vector<std::uint8_t> out;
    std::vector<std::uint8_t> lse;

    friend bool operator==(const Result&, const Result&) = default;
  };

  /// The code under test on the shard of `kvp_rank`, on sequences [first, first + count) (-1: all). Rows that
  /// no token needs, unused pages, the workspace and the outputs are NaN.
  Result run(const cuda::Operators<T>& operators, std::int64_t kvp_rank = 0, std::int64_t first = 0,
             std::int64_t count = -1) const {
    const AttentionCase& c = case_;
    const Shard shard = shard_of(kvp_rank);
    const std::vector<std::uint8_t> bytes_of_q = narrowed(q_);
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
    if (c.is_csr) kv.page_begins = upload(shard.lists.begins);
    if (c.kv_dtype == DType::fp8_e4m3) {
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
    // The kernel owes nothing to the alignment of the workspace.
    std::vector<std::uint8_t> workspace(1 + workspace_bytes + kGuard, 0xff);
    auto* const scratch = reinterpret_cast<std::byte*>(upload(workspace));

    PartialAttentionArgs<T> args;
    args.q = TensorView<const T, 3>(reinterpret_cast<const T*>(upload(bytes_of_q)),
                                    {num_tokens(), heads(), c.d}, {heads() * q_stride(), q_stride(), 1});
    args.batch = batch;
    args.kv = kv;
    args.sink.out = {out, {num_tokens(), heads(), c.dv}, {heads() * out_stride(), out_stride(), 1}};
    args.sink.lse = {lse, {num_tokens(), heads()}, {lse_stride(), 1}};
    args.scale = scale();
    args.window = c.window;
    args.soft_cap = c.soft_cap;
    args.workspace = {scratch + 1, workspace_bytes};
    operators.partial_attention(args, stream);

    operators.download(result.out.data(), out, result.out.size(), stream);
    operators.download(result.lse.data(), lse, result.lse.size(), stream);
    operators.download(workspace.data(), scratch, workspace.size(), stream);
    operators.synchronize(stream);
    CHECK(std::all_of(workspace.end() - kGuard, workspace.end(), [](std::uint8_t x) { return x == 0xff; }));
    return result;
  }

  /// What is wrong with the results of all ranks (of `only_rank` if that is not -1) for the tokens of
  /// sequences [first, first + count), or with what is written elsewhere. Empty: nothing.
  std::string problem(const std::vector<Result>& results, std::int64_t only_rank = -1, std::int64_t first = 0,
                      std::int64_t count = -1) const {
    const std::int64_t begin = offsets_[at(first)];
    const std::int64_t end = count < 0 ? num_tokens() : offsets_[at(first + count)];
    for (const Result& result : results) {
      const std::string stray = stray_write(result, begin, end);
      if (!stray.empty()) return stray;
    }
    std::string found;
    std::mutex mutex;
    std::atomic<std::int64_t> next = begin * heads();
    const auto work = [&] {
      for (std::int64_t row = next++; row < end * heads(); row = next++) {
        const std::string text = row_problem(results, only_rank, row / heads(), row % heads());
        if (text.empty()) continue;
        const std::lock_guard lock(mutex);
        if (found.empty()) found = text;
        next = end * heads();
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < std::min(16u, std::thread::hardware_concurrency()); ++i)
      threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return found;
  }

  /// Every query of every rank, and the merge of all ranks, against the reference.
  std::string check(const cuda::Operators<T>& operators) const {
    std::vector<Result> results;
    for (std::int64_t rank = 0; rank < case_.kvp; ++rank) results.push_back(run(operators, rank));
    return problem(results);
  }

 private:
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr std::int64_t kGuard = 256;

  /// Elements of a token: [K of every head, V of every head], or the latent row.
  std::int64_t row_elements() const { return (case_.is_latent() ? 1 : 2 * case_.kv_heads) * case_.d; }
  std::int64_t q_stride() const { return case_.d + case_.q_pad; }
  std::int64_t out_stride() const { return case_.dv + case_.out_pad; }
  std::int64_t lse_stride() const { return heads() + case_.out_pad; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.d)); }
  float uniform() { return static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f; }

  static std::vector<std::uint8_t> narrowed(const std::vector<float>& values) {
    std::vector<std::uint8_t> bytes(values.size() * sizeof(T));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T x(values[i]);
      std::memcpy(bytes.data() + i * sizeof(T), &x, sizeof(T));
    }
    return bytes;
  }

  /// One rank's pool and the pages of its sequences.
  struct Shard {
    KvPool pool;
    std::vector<std::uint8_t> bytes;
    HostPageLists lists;
  };

  /// The shard's pages in random order, and lists that lead to a page of NaN where there is none. All that no
  /// sequence holds is NaN: other layers, gaps between pools, columns after a row.
  Shard shard_of(std::int64_t kvp_rank) const {
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
    shard.bytes.resize(at(pool.num_elements) * size_bytes(c.kv_dtype));
    dispatch(c.kv_dtype, [&]<class S>(S*) {
      const auto put = [&](std::int64_t i, float value) {
        const S x(value);
        std::memcpy(shard.bytes.data() + at(i) * sizeof(S), &x, sizeof(S));
      };
      for (std::int64_t i = 0; i < pool.num_elements; ++i) put(i, kNaN);
      for (std::size_t b = 0; b < c.sequences.size(); ++b) {
        const Sequence& s = c.sequences[b];
        const std::int64_t forgotten =
            c.forgets ? std::max<std::int64_t>(0, s.length - s.queries + 1 - c.window) : 0;
        for (std::int64_t local = 0; local < layout.length(s.length, kvp_rank); ++local) {
          std::int32_t& page = shard.lists.at(slots_[b], local / c.page_tokens);
          const std::int64_t in_page = local % c.page_tokens;
          if (in_page == 0) {
            page = free_pages.back();
            free_pages.pop_back();
          }
          const std::int64_t token = layout.global(kvp_rank, local);
          if (token < forgotten) continue;
          const float* row = stored_[b].data() + token * row_elements();
          for (std::int64_t head = 0; head < c.kv_heads; ++head) {
            for (std::int64_t i = 0; i < c.d; ++i) put(pool.key(page, head, in_page, i), row[head * c.d + i]);
            for (std::int64_t i = 0; i < c.dv && !c.is_latent(); ++i)
              put(pool.value(page, head, in_page, i), row[(c.kv_heads + head) * c.d + i]);
          }
        }
      }
    });
    return shard;
  }

  /// Bytes outside of the rows of tokens [begin, end) that are no longer 0xff.
  std::string stray_write(const Result& result, std::int64_t begin, std::int64_t end) const {
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

  std::vector<double> out_row(const Result& result, std::int64_t row) const {
    std::vector<double> values;
    for (std::int64_t i = 0; i < case_.dv; ++i) {
      T x;
      std::memcpy(&x, result.out.data() + at(row * out_stride() + i) * sizeof(T), sizeof(T));
      values.push_back(static_cast<double>(static_cast<float>(x)));
    }
    return values;
  }
  double lse_of(const Result& result, std::int64_t token, std::int64_t head) const {
    float x;
    std::memcpy(&x, result.lse.data() + at(token * lse_stride() + head) * sizeof(float), sizeof(float));
    return x;
  }

  std::string row_problem(const std::vector<Result>& results, std::int64_t only_rank, std::int64_t token,
                          std::int64_t head) const {
    const AttentionCase& c = case_;
    const std::vector<float>& stored = stored_[sequence_of_[at(token)]];
    const std::int64_t kv_head = head / c.group;
    const bool is_scaled = c.kv_dtype == DType::fp8_e4m3;
    const double k_scale = is_scaled ? scales_[at(kv_head)] : 1.0;
    const double v_scale = c.is_latent() ? k_scale : is_scaled ? scales_[at(c.kv_heads + kv_head)] : 1.0;
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
    /// Over the tokens of one rank, -1: of all.
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
    double rounded = 0.0;  // norms that the ranks' roundings are relative to
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

  static double norm(const std::vector<double>& values) {
    return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
  }

  std::string describe(std::int64_t token, std::int64_t head, std::int64_t rank) const {
    std::ostringstream text;
    text << "token " << token << " of sequence " << sequence_of_[at(token)] << " at position "
         << positions_[at(token)] << ", head " << head << ", rank " << rank << " (-1: all merged): ";
    return text.str();
  }

  /// `scale`: the least that the error is measured by.
  static std::string mismatch(const std::vector<double>& out, double lse, const std::vector<double>& expected,
                              double expected_lse, double scale) {
    std::ostringstream text;
    const double allowed = kLseTolerance<T> * (sizeof(T) == 2 ? 1.0 : std::max(1.0, std::abs(expected_lse)));
    const bool is_empty = expected_lse == -kInfinity;
    if (is_empty ? lse != expected_lse : !(std::abs(lse - expected_lse) <= allowed))
      text << "lse is " << lse << ", expected " << expected_lse << ". ";
    std::vector<double> errors(out);
    for (std::size_t i = 0; i < errors.size(); ++i) errors[i] -= expected[i];
    if (!(norm(errors) <= kOutTolerance<T> * std::max(scale, norm(expected)))) {
      text << "out differs by " << norm(errors) << " from one of norm " << norm(expected)
           << ", first elements " << out[0] << " and " << expected[0];
    }
    return text.str();
  }

  AttentionCase case_;
  std::mt19937 random_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int64_t> positions_;
  std::vector<std::size_t> sequence_of_;  // of each token
  std::vector<float> q_;                  // as T holds them
  std::vector<float> scales_;             // of K, then of V
  std::vector<std::vector<float>> stored_;
};

/// A case for the kernel of T: on tensor cores if T is of 16 bits, as q and KV then have one type.
template <class T>
AttentionCase case_of(std::int64_t d = 64) {
  AttentionCase c;
  c.kv_dtype = kDTypeOf<T>;
  c.d = c.dv = d;
  return c;
}

}  // namespace helix::test
