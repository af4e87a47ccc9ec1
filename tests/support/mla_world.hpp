// SPDX-License-Identifier: Apache-2.0
// Sequences of latent rows that are a function of their position, and naive attention over them in double
// precision.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <helix/dtype.hpp>

namespace helix::test {

struct MlaSequence {
  std::int64_t length = 0;   // global tokens, including the query tokens
  std::int64_t queries = 1;  // query tokens, which are the last ones
};

struct MlaSpec {
  std::int64_t heads = 8;
  DType kv_dtype = DType::f32;
  std::vector<MlaSequence> sequences{};
  std::vector<std::int64_t> padding{};  // query tokens whose position is -1
};

struct MlaSharding {
  int kvp = 1;
  std::int64_t chunk = 16;
  std::int64_t page_tokens = 64;
};

/// Sequences of unequal lengths up to `longest`. Sequences of one or a few tokens leave some ranks without
/// any.
inline std::vector<MlaSequence> unequal_sequences(std::int64_t count, std::int64_t longest) {
  std::vector<MlaSequence> sequences{{longest}};
  for (std::int64_t b = 1; b < count; ++b) {
    const std::int64_t part = longest * (b * 5 % 17 + 1) / 19 + 1;
    sequences.push_back({b == 1 ? 1 : b == 2 ? 7 : part});
  }
  return sequences;
}

/// out [tokens, heads, 512] and lse [tokens, heads], natural log.
template <class X>
struct MlaOutput {
  std::vector<X> out;
  std::vector<X> lse;
};

/// The contents of every token of every sequence, and the queries. Values are a function of their position,
/// so that ranks and the reference generate the rows that they need instead of storing 1M of them. T is the
/// type of activations.
///
/// About 200 tokens of each sequence, including those at the edges of shards, share half of the weight,
/// whatever the context length. Otherwise no tolerance could detect one missing token of 1M.
template <class T>
class MlaWorld {
 public:
  static constexpr std::int64_t kValueDim = 512;        // kv_lora
  static constexpr std::int64_t kDim = kValueDim + 64;  // and the rotated part
  static constexpr float kScale = 0.0721687836f;        // 1 / sqrt(128 + 64), DeepSeek's before absorption
  static constexpr std::int64_t kBlock = 4096;          // tokens generated at once

  explicit MlaWorld(MlaSpec spec, std::uint64_t seed = 1) : spec_(std::move(spec)), seed_(seed) {
    offsets_.push_back(0);
    for (const MlaSequence& s : spec_.sequences) {
      for (std::int64_t t = 0; t < s.queries; ++t) positions_.push_back(s.length - s.queries + t);
      offsets_.push_back(static_cast<std::int32_t>(positions_.size()));
    }
    for (const std::int64_t token : spec_.padding) positions_[at(token)] = -1;
    q_.resize(at(num_tokens() * heads() * kDim));
    fill_random(q_.data(), static_cast<std::int64_t>(q_.size()), kNumRandomRows * kDim / 2);
    for (std::int64_t row = 1; row <= num_tokens() * heads(); ++row) q_[at(row * kDim - 1)] = T(1.0f);
  }

  const MlaSpec& spec() const { return spec_; }
  std::int64_t heads() const { return spec_.heads; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  const std::vector<std::int32_t>& offsets() const { return offsets_; }
  const std::vector<std::int64_t>& positions() const { return positions_; }
  const std::vector<T>& q() const { return q_; }  // [tokens, heads, 576], absorbed
  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> all;
    for (const MlaSequence& s : spec_.sequences) all.push_back(s.length);
    return all;
  }

  /// Writes the latent row [576] of the token at global `position`.
  void make_row(std::size_t sequence, std::int64_t position, T* row) const {
    const auto b = static_cast<std::int64_t>(sequence);
    fill_random(row, kDim, (b * kMaxTokens + position) * kDim / 2);
    const std::int64_t length = spec_.sequences[sequence].length;
    row[kDim - 1] = T(0.0f);  // meets the 1 at the end of each query
    if (length > kLoud && is_loud(position, length))
      row[kDim - 1] = T(std::log(static_cast<float>(length) / static_cast<float>(kLoud)) / kScale);
  }

  /// Softmax attention of all tokens, by definition. `left_out` is a position that is omitted from the first
  /// sequence, for negative controls. Scores stay below 20, so exp needs no maximum.
  MlaOutput<double> reference(std::int64_t left_out = -1) const {
    MlaOutput<double> sums = zeros();
    std::mutex mutex;
    std::vector<std::array<std::int64_t, 3>> blocks;  // sequence, [begin, end)
    for (std::size_t b = 0; b < spec_.sequences.size(); ++b)
      for (std::int64_t p = 0; p < spec_.sequences[b].length; p += 512)
        blocks.push_back({static_cast<std::int64_t>(b), p, std::min(p + 512, spec_.sequences[b].length)});
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      MlaOutput<double> mine = zeros();
      for (std::size_t i = next++; i < blocks.size(); i = next++) {
        const auto [b, begin, end] = blocks[i];
        for (std::int64_t p = begin; p < end; ++p)
          if (b != 0 || p != left_out) add_token(at(b), p, mine);
      }
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < sums.out.size(); ++i) sums.out[i] += mine.out[i];
      for (std::size_t i = 0; i < sums.lse.size(); ++i) sums.lse[i] += mine.lse[i];
    };
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < std::min(16u, std::thread::hardware_concurrency()); ++i)
      threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < sums.out.size(); ++i) {
      const double total = sums.lse[i / kValueDim];
      if (total > 0.0) sums.out[i] /= total;
    }
    for (double& x : sums.lse) x = std::log(x);  // -inf if a query sees no token
    return sums;
  }

  /// Describes the difference between `got` and `expected`; empty if there is none. Each row of out may err
  /// by `tolerance` times its largest expected value, and each lse by `lse_tolerance` times the larger of 1
  /// and its value. A query that sees no token must give exactly 0 and -inf.
  std::string problem(const MlaOutput<float>& got, const MlaOutput<double>& expected, double tolerance,
                      double lse_tolerance) const {
    const auto rows = num_tokens() * heads();
    for (std::int64_t row = 0; row < rows; ++row) {  // checks where NaN and infinities are
      const double lse = expected.lse[at(row)];
      const float got_lse = got.lse[at(row)];
      if (std::isfinite(lse) ? !std::isfinite(got_lse) : !(double{got_lse} == lse))
        return describe(row, -1, got_lse, lse);
      for (std::int64_t i = row * kValueDim; i < (row + 1) * kValueDim; ++i)
        if (!std::isfinite(got.out[at(i)]) || (!std::isfinite(lse) && got.out[at(i)] != 0.0f))
          return describe(row, i % kValueDim, got.out[at(i)], expected.out[at(i)]);
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const double lse = expected.lse[at(row)];
      if (!std::isfinite(lse)) continue;
      if (std::abs(double{got.lse[at(row)]} - lse) > lse_tolerance * std::max(1.0, std::abs(lse)))
        return describe(row, -1, got.lse[at(row)], lse);
      const auto begin = expected.out.begin() + row * kValueDim;
      double scale = 0.0;
      for (auto x = begin; x != begin + kValueDim; ++x) scale = std::max(scale, std::abs(*x));
      for (std::int64_t i = row * kValueDim; i < (row + 1) * kValueDim; ++i)
        if (std::abs(double{got.out[at(i)]} - expected.out[at(i)]) > tolerance * scale)
          return describe(row, i % kValueDim, got.out[at(i)], expected.out[at(i)]);
    }
    return "";
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

 private:
  static constexpr std::int64_t kLoud = 256;
  static constexpr std::int64_t kMaxTokens = std::int64_t{1} << 21;  // per sequence
  static constexpr std::int64_t kNumRandomRows = 64 * kMaxTokens;    // the queries come after them

  /// Whether the token is one of the first and last tokens of any rank's shard, for chunks of 1, 16 and 64
  /// over up to 8 ranks, or one of about 60 in between.
  static bool is_loud(std::int64_t position, std::int64_t length) {
    const std::int64_t edge = std::min(position, length - 1 - position);
    const bool is_chunk_edge = position % 16 == 0 || position % 16 == 15;
    return edge < 8 || (edge < 512 && is_chunk_edge) || position % (length / 64 + 1) == 7;
  }

  /// Writes `count` (even) values in [-1, 1) with 24 bits: the values from `pair` on of an endless row
  /// (splitmix64).
  void fill_random(T* out, std::int64_t count, std::int64_t pair) const {
    for (std::int64_t i = 0; i < count; i += 2, ++pair) {
      std::uint64_t x = (seed_ << 56) + static_cast<std::uint64_t>(pair + 1) * 0x9e3779b97f4a7c15u;
      x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
      x = (x ^ x >> 27) * 0x94d049bb133111ebu;
      x ^= x >> 31;
      out[i] = T(static_cast<float>(x >> 40) * 0x1p-23f - 1.0f);
      out[i + 1] = T(static_cast<float>(x & 0xffffffu) * 0x1p-23f - 1.0f);
    }
  }

  MlaOutput<double> zeros() const {
    const std::size_t rows = at(num_tokens() * heads());
    return {std::vector<double>(rows * kValueDim, 0.0), std::vector<double>(rows, 0.0)};
  }

  /// Adds one token, as the cache stores it, to the weighted sums (out) and the sums of weights (lse).
  void add_token(std::size_t b, std::int64_t position, MlaOutput<double>& sums) const {
    std::array<T, kDim> row;
    make_row(b, position, row.data());
    std::array<double, kDim> key;
    dispatch(spec_.kv_dtype, [&]<class Stored>(Stored*) {
      for (std::size_t i = 0; i < key.size(); ++i)
        key[i] = double{static_cast<float>(Stored(static_cast<float>(row[i])))};
    });
    for (std::int64_t t = offsets_[b]; t < offsets_[b + 1]; ++t) {
      if (position > positions_[at(t)]) continue;
      for (std::int64_t r = t * heads(); r < (t + 1) * heads(); ++r) {
        const T* q = q_.data() + r * kDim;
        std::array<double, 8> dots{};  // independent sums, for speed
        for (std::size_t i = 0; i < key.size(); i += dots.size())
          for (std::size_t j = 0; j < dots.size(); ++j)
            dots[j] += double{static_cast<float>(q[i + j])} * key[i + j];
        double dot = 0.0;
        for (const double x : dots) dot += x;
        const double weight = std::exp(double{kScale} * dot);
        double* out = sums.out.data() + r * kValueDim;
        for (std::size_t i = 0; i < at(kValueDim); ++i) out[i] += weight * key[i];
        sums.lse[at(r)] += weight;
      }
    }
  }

  std::string describe(std::int64_t row, std::int64_t element, double got, double expected) const {
    std::ostringstream text;
    text.precision(9);
    text << "token " << row / heads() << " at position " << positions_[at(row / heads())] << ", head "
         << row % heads() << ", ";
    if (element < 0) {
      text << "lse is ";
    } else {
      text << "out[" << element << "] is ";
    }
    text << got << ", expected " << expected;
    return text.str();
  }

  MlaSpec spec_;
  std::uint64_t seed_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int64_t> positions_;
  std::vector<T> q_;
};

}  // namespace helix::test
