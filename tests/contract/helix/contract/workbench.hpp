// SPDX-License-Identifier: Apache-2.0
// Workbench: arrays in host and device memory, and the comparison of an operation with its reference.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <helix/backend.hpp>
#include <helix/contract/catch.hpp>
#include <helix/contract/reference.hpp>

namespace helix::contract {

/// A backend whose results the suites can read back with download().
template <class B>
concept TestableBackend = Backend<B> &&
    requires(B& backend, void* target, const void* source, std::size_t bytes, typename B::Stream stream) {
  backend.download(target, source, bytes, stream);  // device -> host; waits for the stream
};

/// How the contract creates a single rank. Specialise it for a backend that is not default-constructible.
template <Backend B>
struct LoneRank {
  static B make() { return B(); }
};

/// Identifies an array of a Workbench.
template <class T>
struct Array {
  std::size_t index = 0;
};

/// Arrays that exist twice: in host memory for the reference, and in device memory for the backend. Device
/// memory is only uploaded to and downloaded from.
template <TestableBackend B>
class Workbench {
 public:
  /// Resolves arrays to pointers on one of the two sides.
  class Side {
   public:
    template <class T>
    T* operator()(Array<T> array) const {
      return reinterpret_cast<T*>(pointers_[array.index]);
    }
    template <class T, class... Extent>
    TensorView<T, int{sizeof...(Extent)}> view(Array<T> array, Extent... extents) const {
      return {(*this)(array), {extents...}};
    }

   private:
    friend class Workbench;
    std::vector<std::byte*> pointers_;
  };

  Workbench() : backend_(LoneRank<B>::make()), stream_(backend_.create_stream()) {}

  B& backend() { return backend_; }
  typename B::Stream stream() const { return stream_; }

  template <class T>
  Array<T> array(std::vector<T> values, bool holds_floats = std::is_same_v<T, float>) {
    Entry entry;
    entry.is_float = holds_floats;
    entry.bytes = values.size() * sizeof(T);
    entry.host.assign(entry.bytes + 2 * kGuard, std::byte{0xff});  // NaN as floats, -1 as integers
    if (!values.empty()) std::memcpy(entry.host.data() + kGuard, values.data(), entry.bytes);
    entry.device = backend_.allocate(entry.host.size());
    entries_.push_back(std::move(entry));
    return {entries_.size() - 1};
  }

  /// Random values, uniform in [-spread, spread].
  Array<float> random(std::int64_t count, double spread = 1.0) { return array(random_values(count, spread)); }
  /// An array of NaN, which must be written before it is read.
  Array<float> poison(std::int64_t count) {
    return array(std::vector<float>(static_cast<std::size_t>(count), std::nanf("")));
  }
  std::vector<float> random_values(std::int64_t count, double spread = 1.0) {
    std::uniform_real_distribution<float> uniform(static_cast<float>(-spread), static_cast<float>(spread));
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = uniform(generator_);
    return values;
  }

  struct Weight {
    Array<std::byte> bytes;
    DType dtype = DType::f32;
    std::int64_t rows = 0;
    std::int64_t cols = 0;

    WeightView on(const Side& side) const { return {side(bytes), dtype, rows, cols}; }
  };
  Weight weight(std::int64_t rows, std::int64_t cols, DType dtype = DType::f32) {
    const std::vector<float> values = random_values(rows * cols);
    std::vector<std::byte> bytes(values.size() * size_bytes(dtype));
    for (std::size_t i = 0; i < values.size(); ++i)
      reference::store(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
    return {array(std::move(bytes)), dtype, rows, cols};
  }

  /// Runs `operation(args, stream)` on the device and `expected(args)` on the host, where args = make(side),
  /// and compares every array. Values written by the reference must agree within `tolerance` of the scale of
  /// their array (relative); everything else, including guards, must agree bit for bit. Describes the first
  /// difference; empty if there is none.
  template <class Make, class Expected, class Operation>
  std::string difference(Make make, Expected expected, Operation operation, double tolerance = 1e-5) {
    upload();
    operation(make(device_side()), stream_);
    const std::vector<std::vector<std::byte>> got = download();
    std::vector<std::vector<std::byte>> before;
    for (const Entry& entry : entries_) before.push_back(entry.host);
    expected(make(host_side()));
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::string found = compare(i, before[i], got[i], tolerance);
      if (!found.empty()) return found;
    }
    return "";
  }

  template <class Make, class Expected, class Operation>
  void check(Make make, Expected expected, Operation operation, double tolerance = 1e-5) {
    CHECK(difference(make, expected, operation, tolerance) == "");
  }

  void upload() {
    for (Entry& entry : entries_)
      backend_.upload(entry.device.data(), entry.host.data(), entry.host.size(), stream_);
  }
  /// Downloads every array with its guards. Waits.
  std::vector<std::vector<std::byte>> download() {
    std::vector<std::vector<std::byte>> all;
    for (Entry& entry : entries_) all.emplace_back(entry.host.size());
    for (std::size_t i = 0; i < entries_.size(); ++i)
      backend_.download(all[i].data(), entries_[i].device.data(), all[i].size(), stream_);
    return all;
  }
  template <class T>
  std::vector<T> values(const std::vector<std::vector<std::byte>>& all, Array<T> array) const {
    std::vector<T> out(entries_[array.index].bytes / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), all[array.index].data() + kGuard, entries_[array.index].bytes);
    return out;
  }

  Side host_side() {
    Side side;
    for (Entry& entry : entries_) side.pointers_.push_back(entry.host.data() + kGuard);
    return side;
  }
  Side device_side() {
    Side side;
    for (Entry& entry : entries_) side.pointers_.push_back(entry.device.data() + kGuard);
    return side;
  }

 private:
  static constexpr std::size_t kGuard = 256;  // keeps arrays as aligned as a buffer

  struct Entry {
    bool is_float = false;
    std::size_t bytes = 0;
    std::vector<std::byte> host;
    typename B::Buffer device;
  };

  std::string compare(std::size_t index, const std::vector<std::byte>& before,
                      const std::vector<std::byte>& got, double tolerance) const {
    const Entry& entry = entries_[index];
    std::ostringstream text;
    if (!entry.is_float) {
      const auto different = std::mismatch(got.begin(), got.end(), entry.host.begin());
      if (different.first == got.end()) return "";
      text << "array " << index << " differs at byte "
           << different.first - got.begin() - static_cast<std::ptrdiff_t>(kGuard) << " of " << entry.bytes;
      return text.str();
    }
    const auto at = [](const std::vector<std::byte>& bytes, std::size_t i) {
      float value;
      std::memcpy(&value, bytes.data() + i * sizeof(float), sizeof(float));
      return value;
    };
    double scale = 0.0;
    for (std::size_t i = kGuard / sizeof(float); i < (kGuard + entry.bytes) / sizeof(float); ++i)
      if (std::isfinite(at(entry.host, i))) scale = std::max(scale, std::abs(double{at(entry.host, i)}));
    for (std::size_t i = 0; i < got.size() / sizeof(float); ++i) {
      const std::size_t byte = i * sizeof(float);
      if (std::memcmp(&got[byte], &entry.host[byte], sizeof(float)) == 0) continue;
      const bool is_written = std::memcmp(&before[byte], &entry.host[byte], sizeof(float)) != 0;
      const float want = at(entry.host, i);
      const float have = at(got, i);
      if (is_written && std::abs(double{have} - want) <= tolerance * scale) continue;
      text << "array " << index << ", element "
           << static_cast<std::ptrdiff_t>(i) - static_cast<std::ptrdiff_t>(kGuard / sizeof(float)) << " of "
           << entry.bytes / sizeof(float) << ": " << have << ", expected " << want
           << (is_written ? "" : " (must not be written)") << ", scale " << scale;
      return text.str();
    }
    return "";
  }

  B backend_;
  typename B::Stream stream_;
  std::mt19937 generator_{20250705};
  std::deque<Entry> entries_;
};

// Runs operation `name` of the backend and compares it with reference::name.
#define HELIX_CHECK_OPERATION(bench, name, make, ...)                                                       \
  (bench).check((make), [](const auto& args) { reference::name(args); },                                    \
                [&](const auto& args, auto stream) { (bench).backend().name(args, stream); } __VA_OPT__(, ) \
                    __VA_ARGS__)

inline constexpr std::array kWeightTypes{DType::f32, DType::f16, DType::bf16};
inline constexpr std::array kKvTypes{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_ds_mla};

}  // namespace helix::contract
