// SPDX-License-Identifier: Apache-2.0
// World: one layer of paged attention with random contents, run by cpu::Operators and compared with a naive
// double-precision reference. Everything that must not be read is poisoned.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>

#include "support/catch.hpp"

namespace helix::test::attention {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr std::int32_t kWildPage = 0x7ffffff0;

struct Sequence {
  std::int64_t length = 0;   ///< global tokens, including the query tokens
  std::int64_t queries = 1;  ///< query tokens, which are the last ones
};

struct Case {
  std::int64_t query_heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t d = 32;
  std::int64_t dv = 32;
  bool is_mla = false;
  DType dtype = DType::f32;
  std::int64_t page_tokens = 16;
  std::int64_t kvp = 1;
  std::int64_t chunk = 1;
  std::int64_t window = 0;
  float soft_cap = 0.0f;
  std::vector<Sequence> sequences = {{40, 1}};
};

/// One layer of one model: the contents of every token and the queries.
class World {
 public:
  explicit World(const Case& c, unsigned seed = 1) : case_(c), random_(seed) {
    offsets_.push_back(0);
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
      const Sequence& s = c.sequences[b];
      for (std::int64_t t = 0; t < s.queries; ++t) positions_.push_back(s.length - s.queries + t);
      offsets_.push_back(static_cast<std::int32_t>(positions_.size()));
      slots_.push_back(static_cast<std::int32_t>((b * 7 + 3) % c.sequences.size()));
    }
    if (c.sequences.size() % 7 == 0) std::iota(slots_.begin(), slots_.end(), 0);
    q_.resize(positions_.size() * at(c.query_heads * c.d));
    for (float& x : q_) x = uniform();
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      k_scale_.push_back(0.5f + 0.25f * static_cast<float>(h));
      v_scale_.push_back(1.5f - 0.25f * static_cast<float>(h));
    }
    stored_.resize(c.sequences.size());
    for (std::size_t b = 0; b < stored_.size(); ++b) {
      stored_[b].resize(at(c.sequences[b].length * row_elements()) * helix::size_bytes(c.dtype));
      helix::dispatch(c.dtype, [&]<class T>(T*) {
        for (std::size_t i = 0; i < stored_[b].size() / sizeof(T); ++i) store<T>(b, i, T(2.0f * uniform()));
      });
    }
  }

  std::vector<std::int64_t>& positions() { return positions_; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.d)) * 2.0f; }

  /// Sets every element of a token's K and V to NaN, if the type has one.
  void poison(std::size_t b, std::int64_t token) {
    helix::dispatch(case_.dtype, [&]<class T>(T*) {
      for (std::int64_t i = 0; i < row_elements(); ++i) store<T>(b, at(token * row_elements() + i), T(kNaN));
    });
  }

  /// Fills the query of `token` of the step with NaN.
  void poison_query(std::int64_t token) {
    const auto begin = q_.begin() + token * case_.query_heads * case_.d;
    std::fill(begin, begin + case_.query_heads * case_.d, kNaN);
  }

  struct Result {
    std::vector<float> out;
    std::vector<float> lse;
  };

  /// Runs the code under test on the shard of `kvp_rank`. Unowned slots are NaN and unused page ids are wild.
  Result run(std::int64_t kvp_rank, int num_threads = 1, std::int64_t slice = 0,
             unsigned page_seed = 5) const;

  /// Attention of query token `t` and head `head` over the tokens that `kvp_rank` owns (-1: all), in double.
  void reference(std::int64_t t, std::int64_t head, std::int64_t kvp_rank, std::vector<double>& out,
                 double& lse) const;

  /// Checks every query on every rank, and the merge of all ranks, against the reference.
  void check(int num_threads = 2) const;

  static void compare(const float* out, float lse, const std::vector<double>& expected, double expected_lse) {
    if (expected_lse == -kInfinity) {
      if (lse != -std::numeric_limits<float>::infinity()) FAIL("lse is " << lse << ", expected -inf");
    } else if (!(std::abs(lse - expected_lse) <= 1e-5 * std::max(1.0, std::abs(expected_lse)))) {
      FAIL("lse is " << lse << ", expected " << expected_lse);
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (!(std::abs(out[i] - expected[i]) <= 1e-5)) {
        FAIL("out[" << i << "] is " << out[i] << ", expected " << expected[i]);
      }
    }
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

 private:
  /// Elements of a token: [K of every head, V of every head], or the latent row.
  std::int64_t row_elements() const { return (case_.is_mla ? 1 : 2 * case_.kv_heads) * case_.d; }
  float uniform() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_); }

  template <class T>
  void store(std::size_t b, std::size_t i, T x) {
    std::memcpy(stored_[b].data() + i * sizeof(T), &x, sizeof(T));
  }
  double value(std::size_t b, std::int64_t i) const {
    return helix::dispatch(case_.dtype, [&]<class T>(T*) {
      T x;
      std::memcpy(&x, stored_[b].data() + at(i) * sizeof(T), sizeof(T));
      return static_cast<double>(static_cast<float>(x));
    });
  }

  Case case_;
  std::mt19937 random_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int64_t> positions_;
  std::vector<float> q_;
  std::vector<float> k_scale_;
  std::vector<float> v_scale_;
  std::vector<std::vector<std::byte>> stored_;
};

}  // namespace helix::test::attention

#include "cpu/attention_world-inl.hpp"
