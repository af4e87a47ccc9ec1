// SPDX-License-Identifier: Apache-2.0
// TwinBench: compares the operations of 16-bit activations with those of f32 on equal inputs. Other tests
// check the f32 operations against the backend contract.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/at.hpp"
#include "support/catch.hpp"

namespace helix::test {

inline constexpr std::array kWeightTypes{DType::f32, DType::f16, DType::bf16};

/// Elements between rows: none, rows that stay aligned to 16 bytes, rows that are not aligned.
inline constexpr std::array<std::int64_t, 3> kPads{0, 8, 3};

/// Two units in the last place of a number near the top of its binade.
template <class T>
constexpr double kTolerance = std::is_same_v<T, bf16> ? 2.0 / 256 : 2.0 / 2048;

/// Two units for numbers near zero, whose precision is lower: f16 ends at 2^-24.
template <class T>
constexpr double kSmallest = std::is_same_v<T, bf16> ? 0.0 : 0x1p-23;

/// Identifies activations of a TwinBench.
struct Activations {
  std::size_t index = 0;
};
/// Identifies another array of a TwinBench.
template <class X>
struct Array {
  std::size_t index = 0;
};

/// The operations of T and of f32 side by side. Each activation array exists twice with equal values; other
/// arrays exist twice with equal bytes.
template <class T>
class TwinBench {
 public:
  /// Resolves arrays to device pointers of the side whose activation type is E.
  template <class E>
  class Side {
   public:
    using Element = E;

    E* operator()(Activations array) const { return reinterpret_cast<E*>(pointers_[array.index]); }
    template <class X>
    X* operator()(Array<X> array) const {
      return reinterpret_cast<X*>(pointers_[array.index]);
    }
    WeightView weight(Array<std::uint8_t> array, DType dtype, std::int64_t rows, std::int64_t cols) const {
      return {pointers_[array.index], dtype, rows, cols};
    }
    /// A two-dimensional view with `pad` elements between rows.
    TensorView<E, 2> view(Activations array, std::int64_t rows, std::int64_t cols,
                          std::int64_t pad = 0) const {
      return {(*this)(array), {rows, cols}, {cols + pad, 1}};
    }
    /// A three-dimensional view with `pad` elements between the rows of heads.
    TensorView<E, 3> view(Activations array, std::int64_t tokens, std::int64_t heads, std::int64_t cols,
                          std::int64_t pad) const {
      return {(*this)(array), {tokens, heads, cols}, {heads * (cols + pad), cols + pad, 1}};
    }

   private:
    friend class TwinBench;
    std::vector<std::byte*> pointers_;
  };

  TwinBench() : stream_(narrow_.create_stream()) {}

  cuda::Operators<T>& narrow() { return narrow_; }
  cuda::Stream stream() const { return stream_; }

  /// Forgets all arrays.
  void clear() { entries_.clear(); }

  /// Creates activations: rows of `width` elements, rounded to T on both sides.
  Activations activations(std::vector<float> values, std::int64_t width) {
    Entry entry;
    entry.width = std::max<std::int64_t>(1, width);
    entry.narrow.resize(values.size() * sizeof(T));
    entry.wide.resize(values.size() * sizeof(float));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T x(values[i]);
      const auto back = static_cast<float>(x);
      std::memcpy(entry.narrow.data() + i * sizeof(T), &x, sizeof(T));
      std::memcpy(entry.wide.data() + i * sizeof(float), &back, sizeof(float));
    }
    return {add(std::move(entry))};
  }
  Activations random(std::int64_t rows, std::int64_t width, double spread = 1.0) {
    return activations(numbers(rows * width, spread), width);
  }
  /// Creates activations of NaN, which must be written or left unchanged.
  Activations poison(std::int64_t rows, std::int64_t width) {
    return activations(std::vector<float>(at(rows * width), std::nanf("")), width);
  }
  /// Creates arrays with equal bytes on both sides. Afterwards floats may differ by 1e-5 of the largest;
  /// other types must be equal.
  template <class X>
  Array<X> same(const std::vector<X>& values) {
    Entry entry;
    entry.is_float = std::is_same_v<X, float>;
    entry.narrow.resize(values.size() * sizeof(X));
    if (!values.empty()) std::memcpy(entry.narrow.data(), values.data(), entry.narrow.size());
    entry.wide = entry.narrow;
    return {add(std::move(entry))};
  }
  Array<std::uint8_t> weights(std::int64_t count, DType dtype) {
    std::vector<std::uint8_t> bytes(at(count) * size_bytes(dtype));
    dispatch(dtype, [&]<class W>(W*) {
      for (std::int64_t i = 0; i < count; ++i) {
        const W x(number());
        std::memcpy(bytes.data() + at(i) * sizeof(W), &x, sizeof(W));
      }
    });
    return same(bytes);
  }

  float number() { return static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f; }
  std::vector<float> numbers(std::int64_t count, double spread = 1.0) {
    std::vector<float> values(at(count));
    for (float& x : values) x = static_cast<float>(spread) * number();
    return values;
  }

  /// Runs use(operators, side, stream) on both sides and describes the first difference between them; empty
  /// if there is none. Restores the arrays afterwards.
  template <class Use>
  std::string difference(const Use& use) {
    const auto narrow = run(narrow_, &Entry::narrow, use);
    const auto wide = run(wide_, &Entry::wide, use);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::string text = compare(entries_[i], narrow[i], wide[i]);
      if (!text.empty()) return "array " + std::to_string(i) + ", " + text;
    }
    return "";
  }

 private:
  static constexpr std::size_t kGuard = 256;
  using Bytes = std::vector<std::uint8_t>;

  struct Entry {
    std::int64_t width = 0;  // row width of activations; 0 for arrays of equal bytes
    bool is_float = false;
    Bytes narrow;
    Bytes wide;
  };

  std::size_t add(Entry entry) {
    entries_.push_back(std::move(entry));
    return entries_.size() - 1;
  }

  template <class E, class Use>
  std::vector<Bytes> run(cuda::Operators<E>& operators, Bytes Entry::*bytes, const Use& use) {
    std::vector<cuda::Buffer> memory;
    std::vector<Bytes> all;
    Side<E> side;
    for (const Entry& entry : entries_) {
      Bytes& image = all.emplace_back((entry.*bytes).size() + 2 * kGuard, std::uint8_t{0xff});
      std::copy((entry.*bytes).begin(), (entry.*bytes).end(), image.begin() + kGuard);
      memory.push_back(operators.allocate(image.size()));
      operators.upload(memory.back().data(), image.data(), image.size(), stream_);
      side.pointers_.push_back(memory.back().data() + kGuard);
    }
    use(operators, side, stream_);
    for (std::size_t i = 0; i < all.size(); ++i)
      operators.download(all[i].data(), memory[i].data(), all[i].size(), stream_);
    operators.synchronize(stream_);
    return all;
  }

  template <class X>
  static double value(const Bytes& bytes, std::int64_t i) {
    X x;
    std::memcpy(&x, bytes.data() + kGuard + at(i) * sizeof(X), sizeof(X));
    return static_cast<double>(static_cast<float>(x));
  }

  static std::string compare(const Entry& entry, const Bytes& narrow, const Bytes& wide) {
    std::ostringstream text;
    for (const Bytes* bytes : {&narrow, &wide}) {
      const auto is_guard = [](std::uint8_t x) { return x == 0xff; };
      if (!std::all_of(bytes->begin(), bytes->begin() + kGuard, is_guard) ||
          !std::all_of(bytes->end() - kGuard, bytes->end(), is_guard))
        return "a guard was overwritten";
    }
    if (entry.width == 0 && !entry.is_float) {
      const auto different = std::mismatch(narrow.begin(), narrow.end(), wide.begin()).first;
      if (different == narrow.end()) return "";
      text << "byte " << different - narrow.begin() - static_cast<std::ptrdiff_t>(kGuard) << " differs";
      return text.str();
    }
    const auto count = static_cast<std::int64_t>(entry.wide.size() / sizeof(float));
    const std::int64_t width = entry.width == 0 ? std::max<std::int64_t>(1, count) : entry.width;
    for (std::int64_t row = 0; row < count; row += width) {
      double scale = 0.0;
      for (std::int64_t i = row; i < std::min(count, row + width); ++i)
        if (std::isfinite(value<float>(wide, i))) scale = std::max(scale, std::abs(value<float>(wide, i)));
      const double allowed = entry.width == 0 ? 1e-5 * scale : kTolerance<T> * scale + kSmallest<T>;
      for (std::int64_t i = row; i < std::min(count, row + width); ++i) {
        const double want = value<float>(wide, i);
        const double have = entry.width == 0 ? value<float>(narrow, i) : value<T>(narrow, i);
        if (std::isnan(want) && std::isnan(have)) continue;
        if (have == want || std::abs(have - want) <= allowed) continue;
        text << "row " << row / width << ", element " << i - row << " of " << width << ": " << have
             << ", f32 gives " << want << ", scale " << scale;
        return text.str();
      }
    }
    return "";
  }

  cuda::Operators<T> narrow_;
  cuda::Operators<float> wide_;
  cuda::Stream stream_;
  std::mt19937 random_{20250705};
  std::deque<Entry> entries_;
};

/// The activation type of a Side.
template <class Side>
using ElementOf = typename std::remove_cvref_t<Side>::Element;

/// Runs the statements, which refer to `operators`, `side` and `stream`, and checks that both sides agree. E
/// is the side's activation type.
#define HELIX_CHECK_TWINS(bench, ...)                                                   \
  CHECK((bench).difference([&](auto& operators, const auto& side, const auto& stream) { \
    using E [[maybe_unused]] = ElementOf<decltype(side)>;                               \
    __VA_ARGS__                                                                         \
  }) == "")

}  // namespace helix::test
