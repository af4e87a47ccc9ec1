// SPDX-License-Identifier: Apache-2.0
// AttentionWorld: one layer of paged attention with random contents, run on a GPU and compared with a naive
// reference in double precision. Everything that must not be read is poisoned.
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
#include "cuda/attention_case.hpp"
#include "cuda/attention_operators.hpp"
#include "cuda/host_page_lists.hpp"
#include "cuda/kv_pools.hpp"
#include "cuda/mixed_rows.hpp"
#include "support/catch.hpp"

namespace helix::test {

/// Largest relative error of a row of out, in the 2-norm: bf16 and f16 keep 8 and 11 bits of each weight.
template <class T>
constexpr double kOutTolerance = 2e-5;
template <>
inline constexpr double kOutTolerance<bf16> = 1e-2;
template <>
inline constexpr double kOutTolerance<f16> = 2e-3;
template <class T>
constexpr double kLseTolerance = sizeof(T) == 2 ? 1e-3 : 1e-5;

/// One layer of one model: the contents of every token and the queries. T is the type of q and out.
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
        q_[at(row * q_stride() + i)] =
            static_cast<float>(T(std::ldexp(2.0f * uniform(), q_power(row % heads() / c.group))));
    for (std::int64_t h = 0; h < c.kv_heads; ++h)
      scales_.push_back(std::ldexp(0.5f + 0.25f * static_cast<float>(h), -q_power(h)));
    for (std::int64_t h = 0; h < c.kv_heads; ++h) scales_.push_back(1.5f - 0.25f * static_cast<float>(h));
    for (const Sequence& s : c.sequences) {
      std::vector<float>& stored = stored_.emplace_back(at(s.length * row_elements()));
      if (c.is_mixed()) {
        mixed_rows_.push_back(random_mixed_rows(stored, [&] { return uniform(); }));
        continue;
      }
      dispatch(c.kv_dtype, [&]<class S>(S*) {
        for (float& x : stored) x = static_cast<float>(S(2.0f * uniform()));
      });
    }
    if (c.loudness > 0.0f) make_first_tokens_loud();
    if (c.root_score > 0.0f) make_scores_alike();
  }

  const AttentionCase& what() const { return case_; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  std::int64_t heads() const { return case_.group * case_.kv_heads; }

  /// The whole output buffers, including guards and gaps.
  struct Result {
    std::vector<std::uint8_t> out;
    std::vector<std::uint8_t> lse;

    friend bool operator==(const Result&, const Result&) = default;
  };

  /// Runs the code under test on the shard of `kvp_rank`, for sequences [first, first + count) (-1: all).
  /// Rows that no token needs, unused pages, the workspace and the outputs are NaN.
  Result run(const cuda::Operators<T>& operators, std::int64_t kvp_rank = 0, std::int64_t first = 0,
             std::int64_t count = -1) const;

  /// Describes what is wrong with the results of all ranks (of `only_rank` if that is not -1) for the tokens
  /// of sequences [first, first + count), or with writes elsewhere. Empty if nothing is wrong.
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

  /// Checks every query on every rank, and the merge of all ranks, against the reference.
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
  int q_power(std::int64_t kv_head) const { return kv_head % 2 == 0 ? case_.q_power : -case_.q_power; }
  bool is_scaled() const { return case_.kv_dtype == DType::fp8_e4m3 && case_.is_scaled; }
  float scale() const { return case_.sharpness / std::sqrt(static_cast<float>(case_.d)); }
  float uniform() { return static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f; }

  /// Makes all queries use only the last column of the keys, times `x`.
  void ask_last_column(float x) {
    for (std::size_t i = 0; i < q_.size(); ++i) {
      const auto column = static_cast<std::int64_t>(i) % q_stride();
      if (column < case_.d) q_[i] = column == case_.d - 1 ? x : 0.0f;
    }
  }
  /// Whether element `i` of a stored token is in the last column of a key.
  bool is_asked(std::size_t i) const {
    const auto column = static_cast<std::int64_t>(i) % row_elements();
    const std::int64_t keys = case_.is_latent() ? case_.d : case_.kv_heads * case_.d;
    return column < keys && column % case_.d == case_.d - 1;
  }

  /// Makes the first token of each sequence loud. The values of all other tokens are 1, so that they add up.
  void make_first_tokens_loud() {
    ask_last_column(1.0f);
    const float loud = case_.loudness * std::log(2.0f) / scale();
    for (std::vector<float>& stored : stored_) {
      for (std::size_t i = 0; i < stored.size(); ++i) {
        const bool is_first = static_cast<std::int64_t>(i) < row_elements();
        if (is_asked(i)) stored[i] = is_first ? static_cast<float>(T(loud)) : 0.0f;
        if (!is_asked(i) && !is_first) stored[i] = 1.0f;
      }
    }
  }

  void make_scores_alike() {
    const auto root = static_cast<float>(T(case_.root_score));
    ask_last_column(root);
    for (std::vector<float>& stored : stored_) {
      for (std::size_t i = 0; i < stored.size(); ++i) {
        if (is_asked(i)) stored[i] = root;
      }
    }
  }

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

  /// The shard's pages in random order, and page lists that lead to a page of NaN where there is no page.
  /// Everything that belongs to no sequence is NaN: other layers, gaps between pools, columns after a row.
  Shard shard_of(std::int64_t kvp_rank) const;

  /// Describes bytes outside the rows of tokens [begin, end) that are no longer 0xff.
  std::string stray_write(const Result& result, std::int64_t begin, std::int64_t end) const;

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

  /// Describes what is wrong with one row of the results; empty if nothing is.
  std::string row_problem(const std::vector<Result>& results, std::int64_t only_rank, std::int64_t token,
                          std::int64_t head) const;

  static double norm(const std::vector<double>& values) {
    return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
  }

  std::string describe(std::int64_t token, std::int64_t head, std::int64_t rank) const {
    std::ostringstream text;
    text << "token " << token << " of sequence " << sequence_of_[at(token)] << " at position "
         << positions_[at(token)] << ", head " << head << ", rank " << rank << " (-1: all merged): ";
    return text.str();
  }

  /// `scale` is the minimum to which the error is relative.
  static std::string mismatch(const std::vector<double>& out, double lse, const std::vector<double>& expected,
                              double expected_lse, double scale);

  AttentionCase case_;
  std::mt19937 random_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int64_t> positions_;
  std::vector<std::size_t> sequence_of_;  // for each token
  std::vector<float> q_;                  // as rounded to T
  std::vector<float> scales_;             // of K, then of V
  std::vector<std::vector<float>> stored_;
  std::vector<std::vector<std::uint8_t>> mixed_rows_;  // for fp8_ds_mla: the bytes of all tokens
};

/// Checks on all ranks that attention which prefetches KV gives correct results, with the bits of one that
/// waits.
template <class T>
void check_reading_ahead(AttentionCase c, const cuda::Operators<T>& operators) {
  c.follows_prepare = false;
  const AttentionWorld<T> waits(c);
  c.follows_prepare = true;
  const AttentionWorld<T> ahead(c);
  for (std::int64_t rank = 0; rank < c.kvp; ++rank)
    CHECK(ahead.run(operators, rank) == waits.run(operators, rank));
  CHECK(ahead.check(operators) == "");
}

}  // namespace helix::test

#include "cuda/attention_world-inl.hpp"
