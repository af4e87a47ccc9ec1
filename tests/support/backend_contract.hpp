// SPDX-License-Identifier: Apache-2.0
// What every Backend owes: each operation against its definition in double, at edge sizes, touching nothing
// else.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <helix/backend.hpp>
#include <helix/error.hpp>
#include <helix/partial_attention.hpp>

#include "support/catch.hpp"
#include "support/reference_backend.hpp"

namespace helix::test {

/// How the contract makes one rank alone. Specialise it for a backend that is not default-constructible.
template <Backend B>
struct LoneRank {
  static B make() { return B(); }
};

namespace contract {

/// Names an array of a Workbench.
template <class T>
struct Array {
  std::size_t index = 0;
};

/// Arrays that exist twice: in host memory for the reference, in device memory for the backend. Device memory
/// is only ever uploaded and downloaded.
template <Backend B>
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
  Array<T> array(std::vector<T> values) {
    Entry entry;
    entry.is_float = std::is_same_v<T, float>;
    entry.bytes = values.size() * sizeof(T);
    entry.host.assign(entry.bytes + 2 * kGuard, std::byte{0xff});  // NaN as floats, -1 as integers
    if (!values.empty()) std::memcpy(entry.host.data() + kGuard, values.data(), entry.bytes);
    entry.device = backend_.allocate(entry.host.size());
    entries_.push_back(std::move(entry));
    return {entries_.size() - 1};
  }

  /// Uniform in [-spread, spread].
  Array<float> random(std::int64_t count, double spread = 1.0) { return array(random_values(count, spread)); }
  /// What must be written before it is read.
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
  /// and compares every array: what the reference wrote within `tolerance` of its array's scale (relative),
  /// all else, guards included, bit for bit. Describes the first difference; empty if there is none.
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
  /// Waits. Every array with its guards.
  std::vector<std::vector<std::byte>> download() {
    std::vector<std::vector<std::byte>> all;
    for (Entry& entry : entries_) all.emplace_back(entry.host.size());
    for (std::size_t i = 0; i < entries_.size(); ++i)
      backend_.download(all[i].data(), entries_[i].device.data(), all[i].size(), stream_);
    backend_.synchronize(stream_);
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
  static constexpr std::size_t kGuard = 256;  // keeps what lies between as aligned as a buffer

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

// Calls operation `name` of the backend and compares it with reference::name.
#define HELIX_CHECK_OPERATION(bench, name, make, ...)                                                       \
  (bench).check((make), [](const auto& args) { reference::name(args); },                                    \
                [&](const auto& args, auto stream) { (bench).backend().name(args, stream); } __VA_OPT__(, ) \
                    __VA_ARGS__)

inline constexpr std::array kWeightTypes{DType::f32, DType::f16, DType::bf16};
inline constexpr std::array kKvTypes{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3};

// --- norms, projections, activations --------------------------------------------------------------------

template <Backend B>
void rms_norm() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t rows : {0, 1, 3}) {
      for (const std::int64_t width : {1, 7, 8, 16, 33, 130}) {
        for (const bool adds : {false, true}) {
          for (const bool normalizes : {true, false}) {
            if (!adds && !normalizes) continue;
            CAPTURE(to_string(dtype), rows, width, adds, normalizes);
            Workbench<B> bench;
            const auto delta = bench.random(rows * width);
            const auto residual = bench.random(rows * (width + 5));
            const auto weight = bench.weight(1, width, dtype);
            const auto out = bench.poison(rows * width);
            HELIX_CHECK_OPERATION(bench, rms_norm, ([&](const auto& side) {
                                    RmsNormArgs<float> args;
                                    if (adds) args.delta = side.view(delta, rows, width);
                                    args.residual = {side(residual), {rows, width}, {width + 5, 1}};
                                    if (normalizes) {
                                      args.weight = weight.on(side);
                                      args.out = side.view(out, rows, width);
                                    }
                                    args.epsilon = 1e-3f;
                                    return args;
                                  }));
          }
        }
      }
    }
  }
  Workbench<B> bench;
  const auto x = bench.random(2 * 24);
  const auto weight = bench.weight(1, 24);
  HELIX_CHECK_OPERATION(bench, rms_norm, ([&](const auto& side) {
                          const auto view = side.view(x, 2, 24);
                          return RmsNormArgs<float>{{}, view, weight.on(side), view, 1e-5f};
                        }));
}

template <Backend B>
void linear() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t rows : {0, 1, 2, 4, 5, 17}) {
      for (const std::int64_t k : {0, 1, 7, 8, 16, 17, 65}) {
        for (const std::int64_t n : {0, 1, 3, 16, 33}) {
          const bool has_bias = (rows + k + n) % 2 == 0;
          const bool accumulates = (rows + k) % 3 == 0;
          CAPTURE(to_string(dtype), rows, k, n, has_bias, accumulates);
          Workbench<B> bench;
          const auto in = bench.random(rows * (k + 3));
          const auto weight = bench.weight(n, k, dtype);
          const auto bias = bench.weight(1, n, dtype);
          const auto out = accumulates ? bench.random(rows * (n + 2)) : bench.poison(rows * (n + 2));
          HELIX_CHECK_OPERATION(bench, linear, ([&](const auto& side) {
                                  return LinearArgs<float>{{side(in), {rows, k}, {k + 3, 1}},
                                                           weight.on(side),
                                                           has_bias ? bias.on(side) : WeightView{},
                                                           {side(out), {rows, n}, {n + 2, 1}},
                                                           accumulates};
                                }));
        }
      }
    }
  }
}

template <Backend B>
void head_linear() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {0, 1, 5, 9}) {
      for (const std::int64_t heads : {1, 3}) {
        for (const std::int64_t k : {1, 8, 17}) {
          for (const std::int64_t n : {1, 16, 35}) {
            CAPTURE(to_string(dtype), tokens, heads, k, n);
            Workbench<B> bench;
            const auto in = bench.random(tokens * heads * (k + 4));
            const auto weight = bench.weight(heads * n, k, dtype);
            const auto out = bench.poison(tokens * heads * (n + 6));
            HELIX_CHECK_OPERATION(bench, head_linear, ([&](const auto& side) {
                                    return HeadLinearArgs<float>{
                                        {side(in), {tokens, heads, k}, {heads * (k + 4), k + 4, 1}},
                                        weight.on(side),
                                        {side(out), {tokens, heads, n}, {heads * (n + 6), n + 6, 1}}};
                                  }));
          }
        }
      }
    }
  }
}

template <Backend B>
void head_rms_norm() {
  for (const std::int64_t tokens : {0, 1, 3}) {
    for (const std::int64_t heads : {1, 5}) {
      for (const std::int64_t width : {1, 16, 33}) {
        CAPTURE(tokens, heads, width);
        Workbench<B> bench;
        const std::int64_t row = heads * width + 7;
        const auto x = bench.random(tokens * row);
        const auto weight = bench.weight(1, width, width == 16 ? DType::bf16 : DType::f32);
        HELIX_CHECK_OPERATION(
            bench, head_rms_norm, ([&](const auto& side) {
              return HeadRmsNormArgs<float>{
                  {side(x), {tokens, heads, width}, {row, width, 1}}, weight.on(side), 1e-4f};
            }));
      }
    }
  }
}

template <Backend B>
void rope() {
  for (const bool is_interleaved : {false, true}) {
    for (const bool in_place : {false, true}) {
      for (const std::int64_t rotary : {0, 2, 8, 22}) {
        for (const std::int64_t width : {rotary, rotary + 5}) {
          if (width == 0) continue;
          CAPTURE(is_interleaved, in_place, rotary, width);
          Workbench<B> bench;
          const std::vector<std::int64_t> position_values{0, 1, 77, 5000, 3};
          const auto tokens = static_cast<std::int64_t>(position_values.size());
          const std::int64_t heads = 3;
          const std::int64_t row = heads * width + 1;
          const auto in = bench.random(tokens * row);
          const auto out = bench.poison(tokens * heads * width);
          const auto positions = bench.array(position_values);
          std::vector<float> frequencies;
          for (std::int64_t i = 0; i < rotary / 2; ++i)
            frequencies.push_back(static_cast<float>(
                std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(rotary))));
          const auto inverse_frequency = bench.array(frequencies);
          // An angle of 5000 radians is known to 3e-4 in f32: whoever computes it so is not wrong.
          HELIX_CHECK_OPERATION(
              bench, rope, ([&](const auto& side) {
                const TensorView<float, 3> x(side(in), {tokens, heads, width}, {row, width, 1});
                return RopeArgs<float>{x,
                                       in_place ? x : side.view(out, tokens, heads, width),
                                       side(positions),
                                       {side(inverse_frequency), rotary, is_interleaved, 1.25f}};
              }),
              1e-3);
        }
      }
    }
  }
}

template <Backend B>
void swiglu() {
  for (const std::int64_t rows : {0, 1, 5}) {
    for (const std::int64_t width : {0, 1, 8, 33}) {
      CAPTURE(rows, width);
      Workbench<B> bench;
      const auto gate_up = bench.random(rows * 2 * width, 8.0);
      const auto out = bench.poison(rows * width);
      HELIX_CHECK_OPERATION(
          bench, swiglu, ([&](const auto& side) {
            return SwigluArgs<float>{side.view(gate_up, rows, 2 * width), side.view(out, rows, width)};
          }));
    }
  }
  Workbench<B> bench;  // no overflow far from zero
  const auto gate_up = bench.array(std::vector<float>{-200.0f, 200.0f, 3.0f, 2.0f});
  const auto out = bench.poison(2);
  HELIX_CHECK_OPERATION(bench, swiglu, ([&](const auto& side) {
                          return SwigluArgs<float>{side.view(gate_up, 1, 4), side.view(out, 1, 2)};
                        }));
}

// --- KV cache and attention -----------------------------------------------------------------------------

/// A cache of several sequences on one KVP rank. Page ids are scattered; entries that no token needs, and
/// page 0, lead to NaN.
template <Backend B>
class KvBench : public Workbench<B> {
 public:
  struct Spec {
    DType dtype = DType::f32;
    bool is_mla = false;
    std::int64_t heads = 2;
    std::int64_t head_dim = 8;
    std::int64_t value_dim = 8;
    std::int64_t page_tokens = 4;
    std::int64_t kvp = 1;
    std::int64_t kvp_rank = 0;
    std::int64_t chunk = 1;
    std::vector<std::int64_t> lengths;  // of each sequence, global, the new tokens included
    bool is_scaled = false;
    bool is_filled = true;  // else every row is NaN until stored
  };

  explicit KvBench(const Spec& spec) : spec_(spec), layout_(spec.kvp, spec.chunk) {
    view_.dtype = spec.dtype;
    view_.num_heads = spec.heads;
    view_.head_dim = spec.head_dim;
    view_.value_dim = spec.value_dim;
    view_.page_tokens = spec.page_tokens;
    view_.is_mla = spec.is_mla;
    view_.layout = layout_;
    view_.kvp_rank = spec.kvp_rank;
    std::int64_t used_pages = 0;
    for (const std::int64_t length : spec.lengths) {
      const std::int64_t pages = pages_of(length);
      view_.max_pages = std::max(view_.max_pages, pages + 1);
      used_pages += pages;
    }
    view_.num_pages = used_pages + 1;
    const auto sequences = static_cast<std::int64_t>(spec.lengths.size());
    std::vector<std::int32_t> table(static_cast<std::size_t>(sequences * view_.max_pages), 0);
    auto next = static_cast<std::int32_t>(used_pages);  // from the last page down
    std::vector<std::byte> pages(static_cast<std::size_t>(view_.num_pages * view_.page_elements()) *
                                 size_bytes(spec.dtype));
    for (std::int64_t i = 0; i < view_.num_pages * view_.page_elements(); ++i)
      reference::store(pages.data(), spec.dtype, i, std::nan(""));
    KvView host = view_;
    host.pages = pages.data();
    host.page_table = table.data();
    for (std::size_t b = 0; b < spec.lengths.size(); ++b) {
      const auto slot = static_cast<std::int64_t>(b);
      for (std::int64_t p = 0; p < pages_of(spec.lengths[b]); ++p)
        table[static_cast<std::size_t>(slot * view_.max_pages + p)] = next--;
      if (!spec.is_filled) continue;
      for (std::int64_t local = 0; local < layout_.length(spec.lengths[b], spec.kvp_rank); ++local) {
        for (std::int64_t h = 0; h < spec.heads; ++h) {
          for (const bool is_value : {false, true}) {
            if (is_value && spec.is_mla) continue;
            const std::int64_t row = reference::kv_row(host, slot, local, h, is_value);
            const std::vector<float> numbers =
                this->random_values(is_value ? spec.value_dim : spec.head_dim, 2.0);
            for (std::size_t i = 0; i < numbers.size(); ++i)
              reference::store(pages.data(), spec.dtype, row + static_cast<std::int64_t>(i), numbers[i]);
          }
        }
      }
    }
    pages_ = this->array(std::move(pages));
    table_ = this->array(std::move(table));
    std::vector<float> scales;
    for (std::int64_t h = 0; h < 2 * spec.heads; ++h) scales.push_back(0.25f + 0.37f * static_cast<float>(h));
    scales_ = this->array(std::move(scales));
  }

  KvView view(const typename Workbench<B>::Side& side) const {
    KvView view = view_;
    view.pages = side(pages_);
    view.page_table = side(table_);
    if (spec_.is_scaled) {
      view.k_scale = side(scales_);
      if (!spec_.is_mla) view.v_scale = side(scales_) + spec_.heads;
    }
    return view;
  }

  std::int64_t local_length(std::size_t sequence) const {
    return layout_.length(spec_.lengths[sequence], spec_.kvp_rank);
  }

 private:
  std::int64_t pages_of(std::int64_t length) const {
    return (layout_.length(length, spec_.kvp_rank) + spec_.page_tokens - 1) / spec_.page_tokens;
  }

  Spec spec_;
  KvLayout layout_;
  KvView view_;
  Array<std::byte> pages_;
  Array<std::int32_t> table_;
  Array<float> scales_;
};

/// A step in which sequence b adds the last counts[b] of its tokens.
struct RaggedStep {
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> slots;
  std::vector<std::int64_t> positions;

  RaggedStep(const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& counts) {
    for (std::size_t b = counts.size(); b-- > 0;) {  // slots are not in batch order
      for (std::int64_t t = 0; t < counts[b]; ++t) positions.push_back(lengths[b] - counts[b] + t);
      offsets.push_back(static_cast<std::int32_t>(positions.size()));
      slots.push_back(static_cast<std::int32_t>(b));
    }
  }
  std::int64_t num_tokens() const { return offsets.back(); }
};

/// The arrays of a step, and the batch on either side.
template <Backend B>
struct StepArrays {
  Array<std::int32_t> offsets;
  Array<std::int32_t> slots;
  Array<std::int64_t> positions;
  std::vector<std::int32_t> host_offsets;

  StepArrays(Workbench<B>& bench, const RaggedStep& step)
      : offsets(bench.array(step.offsets)),
        slots(bench.array(step.slots)),
        positions(bench.array(step.positions)),
        host_offsets(step.offsets) {}

  Batch on(const typename Workbench<B>::Side& side) const {
    return {host_offsets, side(offsets), side(positions), side(slots)};
  }
};

template <Backend B>
void append_kv() {
  for (const DType dtype : kKvTypes) {
    for (const bool is_mla : {false, true}) {
      for (const std::int64_t kvp : {1, 2, 3}) {
        for (const std::int64_t chunk : {1, 3}) {
          for (std::int64_t kvp_rank = 0; kvp_rank < kvp; ++kvp_rank) {
            CAPTURE(to_string(dtype), is_mla, kvp, chunk, kvp_rank);
            const std::vector<std::int64_t> lengths{9, 14, 1, 0};
            typename KvBench<B>::Spec spec;
            spec.dtype = dtype;
            spec.is_mla = is_mla;
            spec.heads = is_mla ? 1 : 2;
            spec.value_dim = 6;
            spec.kvp = kvp;
            spec.kvp_rank = kvp_rank;
            spec.chunk = chunk;
            spec.lengths = lengths;
            spec.is_filled = false;
            spec.is_scaled = dtype == DType::fp8_e4m3;
            KvBench<B> bench(spec);
            RaggedStep step(lengths, {9, 4, 1, 0});
            step.positions[2] = -1;  // padding is dropped
            const StepArrays<B> batch(bench, step);
            const std::int64_t tokens = step.num_tokens();
            const auto k = bench.random(tokens * (spec.heads * spec.head_dim + 2));
            const auto v = bench.random(tokens * spec.heads * spec.value_dim);
            HELIX_CHECK_OPERATION(bench, append_kv, ([&](const auto& side) {
                                    AppendKvArgs<float> args;
                                    args.k = TensorView<const float, 3>(
                                        side(k), {tokens, spec.heads, spec.head_dim},
                                        {spec.heads * spec.head_dim + 2, spec.head_dim, 1});
                                    if (!is_mla) args.v = side.view(v, tokens, spec.heads, spec.value_dim);
                                    args.batch = batch.on(side);
                                    args.kv = bench.view(side);
                                    return args;
                                  }));
          }
        }
      }
    }
  }
}

template <Backend B>
void write_and_read_kv() {
  for (const DType dtype : kKvTypes) {
    for (const bool is_mla : {false, true}) {
      for (const std::int64_t kvp : {1, 3}) {
        for (const std::int64_t first : {0, 5}) {
          CAPTURE(to_string(dtype), is_mla, kvp, first);
          typename KvBench<B>::Spec spec;
          spec.dtype = dtype;
          spec.is_mla = is_mla;
          spec.heads = is_mla ? 1 : 2;
          spec.kvp = kvp;
          spec.kvp_rank = kvp - 1;
          spec.chunk = 2;
          spec.lengths = {3, 19};
          spec.is_scaled = dtype == DType::fp8_e4m3;
          KvBench<B> bench(spec);
          const std::int64_t tokens = 19 - first;
          const auto k = bench.random(tokens * spec.heads * spec.head_dim);
          const auto v = bench.random(tokens * spec.heads * spec.value_dim);
          HELIX_CHECK_OPERATION(bench, write_kv, ([&](const auto& side) {
                                  WriteKvArgs<float> args;
                                  args.k = side.view(k, tokens, spec.heads, spec.head_dim);
                                  if (!is_mla) args.v = side.view(v, tokens, spec.heads, spec.value_dim);
                                  args.first_position = first;
                                  args.sequence_slot = 1;
                                  args.kv = bench.view(side);
                                  return args;
                                }));
          const std::int64_t local = bench.local_length(1);
          const std::int64_t begin = local / 2;
          const std::int64_t count = local - begin;
          const auto k_out = bench.poison(count * spec.heads * spec.head_dim);
          const auto v_out = bench.poison(count * spec.heads * spec.value_dim);
          HELIX_CHECK_OPERATION(bench, read_kv, ([&](const auto& side) {
                                  ReadKvArgs args;
                                  args.kv = bench.view(side);
                                  args.sequence_slot = 1;
                                  args.first_local = begin;
                                  args.k = side.view(k_out, count, spec.heads, spec.head_dim);
                                  if (!is_mla) args.v = side.view(v_out, count, spec.heads, spec.value_dim);
                                  return args;
                                }));
        }
      }
    }
  }
}

/// One partial_attention of a ragged step, or of sequences [begin, begin + count) of it.
template <Backend B>
void check_attention(const typename KvBench<B>::Spec& spec, const std::vector<std::int64_t>& counts,
                     std::int64_t group, std::int64_t window, float soft_cap, std::int64_t begin,
                     std::int64_t count) {
  KvBench<B> bench(spec);
  RaggedStep step(spec.lengths, counts);
  if (step.positions.size() > 6) step.positions[5] = -1;
  const StepArrays<B> batch(bench, step);
  const std::int64_t tokens = step.num_tokens();
  const std::int64_t heads = spec.heads * group;
  const auto q = bench.random(tokens * heads * (spec.head_dim + 2), 1.5);
  const auto out = bench.poison(tokens * heads * spec.value_dim);
  const auto lse = bench.poison(tokens * heads);
  // Slices leave their results, and headers, where the first row is their first token's.
  const Batch part = batch.on(bench.host_side()).slice(begin, count);
  const std::int64_t first_out_token = begin > 0 ? part.first_token() : 0;
  const auto headers = bench.array(std::vector<std::byte>(3 * 24, std::byte{7}));
  const auto epoch = bench.array(std::vector<std::uint64_t>{3});
  const std::int64_t part_tokens = part.num_tokens();
  const std::size_t workspace_bytes =
      bench.backend().partial_attention_workspace_bytes(part_tokens, heads, spec.head_dim, spec.value_dim);
  typename B::Buffer workspace = bench.backend().allocate(std::max<std::size_t>(1, workspace_bytes));
  const auto make = [&](const auto& side) {
    return PartialAttentionArgs<float>{
        TensorView<const float, 3>(side(q), {tokens, heads, spec.head_dim},
                                   {heads * (spec.head_dim + 2), spec.head_dim + 2, 1}),
        batch.on(side).slice(begin, count),
        bench.view(side),
        side.view(out, tokens, heads, spec.value_dim),
        side.view(lse, tokens, heads),
        0.3f,
        window,
        soft_cap,
        {workspace.data(), workspace_bytes},
        first_out_token,
        begin == 0 ? StampArgs{}
                   : StampArgs{side(headers), part_tokens, 7, side(epoch),
                               batch.on(side).positions + first_out_token, 3, 24}};
  };
  bench.check(
      make, [](const auto& args) { reference::partial_attention(args); },
      [&](const auto& args, auto stream) { helix::partial_attention(bench.backend(), args, stream); });
}

template <Backend B>
void partial_attention() {
  const std::vector<std::int64_t> lengths{11, 1, 40, 4};
  for (const bool is_mla : {false, true}) {
    for (const std::int64_t kvp : {1, 2, 3}) {
      for (const std::int64_t chunk : {1, 3, 16}) {
        for (std::int64_t kvp_rank = 0; kvp_rank < kvp; ++kvp_rank) {
          typename KvBench<B>::Spec spec;
          spec.is_mla = is_mla;
          spec.heads = is_mla ? 1 : 2;
          spec.head_dim = is_mla ? 24 : 16;
          spec.value_dim = 16;
          spec.page_tokens = chunk == 3 ? 5 : 4;
          spec.kvp = kvp;
          spec.kvp_rank = kvp_rank;
          spec.chunk = chunk;
          spec.lengths = lengths;
          spec.dtype = kvp == 1 ? DType::f32 : kvp == 2 ? DType::bf16 : DType::fp8_e4m3;
          spec.is_scaled = spec.dtype == DType::fp8_e4m3;
          const std::int64_t group = is_mla ? 5 : 4;
          CAPTURE(is_mla, kvp, chunk, kvp_rank);
          check_attention<B>(spec, {1, 1, 1, 1}, group, 0, 0.0f, 0, 4);
          check_attention<B>(spec, {4, 1, 8, 0}, group, 0, 0.0f, 0, 4);
          check_attention<B>(spec, {11, 1, 40, 4}, group, 0, 0.0f, 0, 4);
          check_attention<B>(spec, {11, 1, 33, 2}, group, 7, 0.0f, 0, 4);
          check_attention<B>(spec, {2, 1, 9, 2}, group, 0, 1.5f, 0, 4);
          check_attention<B>(spec, {2, 1, 9, 2}, group, 1, 1.5f, 1, 2);
          check_attention<B>(spec, {2, 1, 9, 2}, 1, 0, 0.0f, 3, 1);
          check_attention<B>(spec, {2, 1, 9, 2}, 1, 0, 0.0f, 2, 0);
        }
      }
    }
  }
  typename KvBench<B>::Spec spec;  // a long sequence, where implementations split the keys
  spec.heads = 1;
  spec.head_dim = spec.value_dim = 32;
  spec.page_tokens = 16;
  spec.lengths = {2500, 1};
  check_attention<B>(spec, {3, 1}, 2, 0, 0.0f, 0, 2);
  check_attention<B>(spec, {1, 1}, 2, 2100, 0.0f, 0, 2);
}

// --- exchange and combine -------------------------------------------------------------------------------

template <Backend B>
void pack_partial_and_stamp() {
  for (const std::int64_t kvp : {1, 2, 5}) {
    for (const std::int64_t tokens : {0, 1, 3}) {
      for (const std::int64_t heads : {1, 3}) {
        for (const std::int64_t width : {1, 16}) {
          CAPTURE(kvp, tokens, heads, width);
          Workbench<B> bench;
          const std::int64_t all_heads = kvp * heads;
          const auto out = bench.random(tokens * all_heads * (width + 3));
          const auto lse = bench.random(tokens * all_heads);
          const auto epoch = bench.array(std::vector<std::uint64_t>{41});
          const auto positions = bench.array(std::vector<std::int64_t>{100, -1, 7});
          // A block a head: header, lse, outputs, and some that nobody writes.
          const std::int64_t block = 4 + tokens + tokens * width + 8;
          const auto messages = bench.array(
              std::vector<std::byte>(static_cast<std::size_t>(all_heads * block * 4), std::byte{7}));
          HELIX_CHECK_OPERATION(
              bench, pack_partial, ([&](const auto& side) {
                PackPartialArgs<float> args;
                args.out = TensorView<const float, 3>(side(out), {tokens, all_heads, width},
                                                      {all_heads * (width + 3), width + 3, 1});
                args.lse = side.view(lse, tokens, all_heads);
                auto* first = reinterpret_cast<float*>(side(messages));
                args.packed_lse = {first + 4, {tokens, all_heads}, {1, block}};
                args.packed_out = {first + 4 + tokens, {tokens, all_heads, width}, {width, block, 1}};
                args.headers.message = side(messages);
                args.headers.tokens = tokens;
                args.headers.sender = kvp - 1;
                args.headers.epoch = side(epoch);
                if (kvp != 2) args.headers.positions = side(positions);
                args.headers.count = kvp;
                args.headers.message_bytes = heads * block * 4;
                return args;
              }));
        }
      }
    }
  }
  for (const bool has_positions : {false, true}) {
    CAPTURE(has_positions);
    Workbench<B> bench;
    const auto epoch = bench.array(std::vector<std::uint64_t>{6});
    const auto positions = bench.array(std::vector<std::int64_t>{5, 6, 7, 1000000});
    const auto message = bench.array(std::vector<std::byte>(40, std::byte{9}));
    HELIX_CHECK_OPERATION(
        bench, stamp, ([&](const auto& side) {
          return StampArgs{side(message), 4, 3, side(epoch), has_positions ? side(positions) : nullptr};
        }));
  }
}

/// Three messages of which peer `wrong` carries a field off by one; 3: none. Field 3 is a token's position.
template <Backend B>
void run_check_exchange(int wrong, int field) {
  Workbench<B> bench;
  const std::vector<std::int64_t> position_values{0, 1, 2, 3, 77, 5, 6, -1, 8};
  std::vector<std::byte> bytes(3 * 48, std::byte{1});
  for (int peer = 0; peer < 3; ++peer) {
    std::vector<std::int64_t> theirs = position_values;
    if (peer == wrong && field == 3) theirs[8] += 1;
    ExchangeHeader header{exchange_epoch(5, theirs.data(), 9), 9, static_cast<std::uint32_t>(peer)};
    if (peer == wrong && field == 0) header.epoch += 1;
    if (peer == wrong && field == 1) header.tokens += 1;
    if (peer == wrong && field == 2) header.sender += 1;
    std::memcpy(bytes.data() + peer * 48, &header, sizeof(header));
  }
  const auto messages = bench.array(bytes);
  std::vector<std::byte> own(16);
  const ExchangeHeader header{exchange_epoch(5, position_values.data(), 9), 9, 1};
  std::memcpy(own.data(), &header, sizeof(header));
  const auto sent = bench.array(own);
  bench.upload();
  const auto side = bench.device_side();
  bench.backend().check_exchange(CheckExchangeArgs{side(messages), 48, 3, 9, side(sent)}, bench.stream());
  const auto code = [&] {
    try {
      bench.backend().synchronize(bench.stream());
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;  // stands for none
  };
  if (wrong == 3) {
    CHECK(code() == ErrorCode::internal);
    return;
  }
  CHECK(code() == ErrorCode::out_of_step);
  // Sticky: whatever is queued next, the failure stays visible.
  bench.backend().fill_zero(side(messages), 16, bench.stream());
  CHECK(code() == ErrorCode::out_of_step);
}

template <Backend B>
void check_exchange() {
  run_check_exchange<B>(3, 0);
  for (int peer = 0; peer < 3; ++peer) {
    for (int field = 0; field < 4; ++field) {
      CAPTURE(peer, field);
      run_check_exchange<B>(peer, field);
    }
  }
}

template <Backend B>
void lse_combine() {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (const std::int64_t ranks : {1, 2, 5}) {
    for (const std::int64_t tokens : {0, 1, 4}) {
      for (const std::int64_t heads : {1, 3}) {
        for (const std::int64_t width : {1, 16, 33}) {
          for (const bool has_sink : {false, true}) {
            for (const bool wants_lse : {false, true}) {
              CAPTURE(ranks, tokens, heads, width, has_sink, wants_lse);
              Workbench<B> bench;
              auto out_values = bench.random_values(ranks * tokens * heads * width);
              auto lse_values = bench.random_values(ranks * tokens * heads, 30.0);
              for (std::size_t i = 0; i < lse_values.size(); ++i) {
                // Every second token: no rank but the last sees anything; token 3: none at all.
                const auto token = static_cast<std::int64_t>(i) / heads % tokens;
                const auto rank = static_cast<std::int64_t>(i) / (heads * tokens);
                if ((token % 2 == 0 || rank == ranks - 1) && token != 3) continue;
                lse_values[i] = kNone;
                std::fill_n(out_values.begin() + static_cast<std::int64_t>(i) * width, width, std::nanf(""));
              }
              const auto partial_out = bench.array(out_values);
              const auto partial_lse = bench.array(lse_values);
              const auto sink = bench.random(heads, 20.0);
              const auto out = bench.poison(tokens * heads * (width + 1));
              const auto lse = bench.poison(tokens * heads);
              HELIX_CHECK_OPERATION(
                  bench, lse_combine, ([&](const auto& side) {
                    LseCombineArgs<float> args;
                    args.partial_out = side.view(partial_out, ranks, tokens, heads, width);
                    args.partial_lse = side.view(partial_lse, ranks, tokens, heads);
                    if (has_sink) args.sink = side(sink);
                    args.out = {side(out), {tokens, heads, width}, {heads * (width + 1), width + 1, 1}};
                    if (wants_lse) args.lse = side.view(lse, tokens, heads);
                    return args;
                  }));
            }
          }
        }
      }
    }
  }
}

/// What both do alone: the combine of partials inside messages, and the check of their headers.
template <Backend B>
void combine_exchange() {
  constexpr std::int64_t kPeers = 3, kTokens = 2, kHeads = 3, kWidth = 16;
  constexpr std::int64_t kBlock = 4 + 4 + kTokens * kWidth;  // floats of a head
  for (const std::int64_t wrong : {-1, 0, 2}) {
    CAPTURE(wrong);
    Workbench<B> bench;
    auto values = bench.random_values(kPeers * kHeads * kBlock, 3.0);
    const std::vector<std::int64_t> position_values{40, 41};
    for (std::int64_t peer = 0; peer < kPeers; ++peer) {
      const ExchangeHeader header{
          exchange_epoch(9, position_values.data(), kTokens) + (peer == wrong ? 1 : 0), kTokens,
          static_cast<std::uint32_t>(peer)};
      std::memcpy(values.data() + peer * kHeads * kBlock, &header, sizeof(header));
    }
    const auto messages = bench.array(values);
    std::vector<std::byte> own(16);
    const ExchangeHeader header{exchange_epoch(9, position_values.data(), kTokens), kTokens, 1};
    std::memcpy(own.data(), &header, sizeof(header));
    const auto sent = bench.array(own);
    const auto out = bench.poison(kTokens * kHeads * kWidth);
    const auto check_on = [&](const auto& side) {
      return CheckExchangeArgs{reinterpret_cast<const std::byte*>(side(messages)), kHeads * kBlock * 4,
                               kPeers, kTokens, side(sent)};
    };
    const auto combine_on = [&](const auto& side) {
      LseCombineArgs<float> args;
      args.partial_lse = {side(messages) + 4, {kPeers, kTokens, kHeads}, {kHeads * kBlock, 1, kBlock}};
      args.partial_out = {
          side(messages) + 8, {kPeers, kTokens, kHeads, kWidth}, {kHeads * kBlock, kWidth, kBlock, 1}};
      args.out = side.view(out, kTokens, kHeads, kWidth);
      return args;
    };
    if (wrong < 0) {
      bench.check(
          combine_on, [](const auto& args) { reference::lse_combine(args); },
          [&](const auto& args, auto stream) {
            bench.backend().combine_exchange(check_on(bench.device_side()), args, stream);
          });
      continue;
    }
    bench.upload();
    bench.backend().combine_exchange(check_on(bench.device_side()), combine_on(bench.device_side()),
                                     bench.stream());
    try {
      bench.backend().synchronize(bench.stream());
      FAIL("a message of another step went unseen");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::out_of_step);
    }
  }
}

// --- mixture of experts ---------------------------------------------------------------------------------

template <Backend B>
void route() {
  struct Case {
    std::int64_t experts, groups, kept, top_k;
  };
  for (const Case c : {Case{1, 1, 1, 1}, Case{8, 1, 1, 2}, Case{8, 4, 2, 3}, Case{64, 8, 3, 6}}) {
    for (const auto scoring : {RouterScoring::softmax, RouterScoring::sigmoid}) {
      for (const bool has_bias : {false, true}) {
        for (const bool normalize : {false, true}) {
          for (const std::int64_t tokens : {0, 1, 7}) {
            CAPTURE(c.experts, c.groups, c.kept, c.top_k, int(scoring), has_bias, normalize, tokens);
            Workbench<B> bench;
            const auto logits = bench.random(tokens * c.experts, 3.0);
            const auto bias = bench.random(c.experts, 0.4);
            const auto experts =
                bench.array(std::vector<std::int32_t>(static_cast<std::size_t>(tokens * c.top_k), -9));
            const auto weights = bench.poison(tokens * c.top_k);
            HELIX_CHECK_OPERATION(bench, route, ([&](const auto& side) {
                                    return RouteArgs<float>{side.view(logits, tokens, c.experts),
                                                            has_bias ? side(bias) : nullptr,
                                                            scoring,
                                                            c.groups,
                                                            c.kept,
                                                            normalize,
                                                            2.5f,
                                                            side.view(experts, tokens, c.top_k),
                                                            side.view(weights, tokens, c.top_k)};
                                  }));
          }
        }
      }
    }
  }
}

template <Backend B>
void expert_ffn() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {0, 1, 6, 19}) {
      for (const std::int64_t width : {1, 8, 17}) {
        for (const std::int64_t first : {0, 4, 6}) {
          CAPTURE(to_string(dtype), tokens, width, first);
          constexpr std::int64_t kHidden = 24;
          constexpr std::int64_t kTopK = 3;
          Workbench<B> bench;
          const std::int64_t num_local = first == 6 ? 1 : 2;
          std::vector<std::int32_t> chosen;  // of 8 experts; some tokens choose none of this rank's
          for (std::int64_t t = 0; t < tokens; ++t)
            for (std::int64_t k = 0; k < kTopK; ++k)
              chosen.push_back(static_cast<std::int32_t>((t * 5 + k * 3) % 8));
          const auto experts = bench.array(chosen);
          const auto weights = bench.random(tokens * kTopK);
          const auto in = bench.random(tokens * kHidden);
          const auto out = bench.random(tokens * kHidden);
          std::vector<typename Workbench<B>::Weight> gate_up, down;
          for (std::int64_t e = 0; e < num_local; ++e) {
            gate_up.push_back(bench.weight(2 * width, kHidden, dtype));
            down.push_back(bench.weight(kHidden, width, dtype));
          }
          std::deque<std::vector<ExpertWeights>> kept;  // host arrays that the queued call still reads
          const std::size_t bytes = bench.backend().expert_ffn_workspace_bytes(tokens, kTopK, kHidden, width);
          typename B::Buffer workspace = bench.backend().allocate(std::max<std::size_t>(1, bytes));
          HELIX_CHECK_OPERATION(bench, expert_ffn, ([&](const auto& side) {
                                  std::vector<ExpertWeights>& local = kept.emplace_back();
                                  for (std::size_t e = 0; e < gate_up.size(); ++e)
                                    local.push_back({gate_up[e].on(side), down[e].on(side)});
                                  return ExpertFfnArgs<float>{side.view(in, tokens, kHidden),
                                                              side.view(experts, tokens, kTopK),
                                                              side.view(weights, tokens, kTopK),
                                                              local,
                                                              first,
                                                              side.view(out, tokens, kHidden),
                                                              {workspace.data(), bytes}};
                                }));
        }
      }
    }
  }
}

// --- the ends of the stack ------------------------------------------------------------------------------

template <Backend B>
void embed_and_gather() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t width : {1, 16, 33}) {
      CAPTURE(to_string(dtype), width);
      Workbench<B> bench;
      const auto table = bench.weight(5, width, dtype);
      const auto ids = bench.array(std::vector<std::int32_t>{10, 14, 9, 15, 12, 0, -1, 2147483647});
      const auto out = bench.poison(8 * width);
      HELIX_CHECK_OPERATION(
          bench, embed, ([&](const auto& side) {
            return EmbedArgs<float>{side(ids), table.on(side), 10, side.view(out, 8, width)};
          }));
      const auto in = bench.random(6 * width);
      const auto rows = bench.array(std::vector<std::int32_t>{5, 0, 3, 3});
      const auto gathered = bench.poison(4 * width);
      for (const std::int64_t count : {0, 4}) {
        HELIX_CHECK_OPERATION(bench, gather_rows, ([&](const auto& side) {
                                return GatherRowsArgs<float>{side.view(in, 6, width), side(rows),
                                                             side.view(gathered, count, width)};
                              }));
      }
    }
  }
}

template <Backend B>
void logit_norms() {
  // Shards of unequal width, one of them empty; what lies behind their ends is padding.
  constexpr std::int64_t kShards = 3;
  for (const std::int64_t width : {1, 40, 1500}) {
    for (const std::int64_t rows : {0, 1, 3}) {
      CAPTURE(width, rows);
      Workbench<B> bench;
      const std::vector<std::int64_t> begins{0, width, width, width + (width + 1) / 2};
      std::vector<float> values = bench.random_values(kShards * rows * width, 3.0);
      for (std::int64_t s = 0; s < kShards; ++s)
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t i = begins[static_cast<std::size_t>(s + 1)] - begins[static_cast<std::size_t>(s)];
               i < width; ++i)
            values[static_cast<std::size_t>((s * rows + r) * width + i)] = std::nanf("");
      const auto logits = bench.array(values);
      const auto shard_begins = bench.array(begins);
      const auto norms = bench.poison(rows + 1);
      HELIX_CHECK_OPERATION(bench, logit_norms, ([&](const auto& side) {
                              return LogitNormsArgs<float>{side.view(logits, kShards, rows, width),
                                                           side(shard_begins), side(norms)};
                            }));
    }
  }
}

template <Backend B>
void advance() {
  for (const std::int64_t count : {0, 1, 3, 700}) {
    CAPTURE(count);
    Workbench<B> bench;
    std::vector<std::int64_t> values{-1, 0, std::int64_t{1} << 40};
    for (std::int64_t i = std::ssize(values); i <= count; ++i) values.push_back(i % 7 - 1);
    const auto positions = bench.array(values);
    HELIX_CHECK_OPERATION(bench, advance, ([&](const auto& side) {
                            return AdvanceArgs{side(positions), count};
                          }));
  }
}

/// Draws for `rows` rows of equal logits, cut into shards of at most `width` ids; padding is NaN.
template <Backend B>
std::vector<std::int32_t> draw(const std::vector<float>& row_logits, std::int64_t rows, std::int64_t width,
                               float temperature, float top_p, std::uint64_t seed) {
  Workbench<B> bench;
  const auto vocab = static_cast<std::int64_t>(row_logits.size());
  const std::int64_t shards = (vocab + width - 1) / width;
  std::vector<float> values(static_cast<std::size_t>(shards * rows * width), std::nanf(""));
  std::vector<std::int64_t> begins;
  for (std::int64_t s = 0; s <= shards; ++s) begins.push_back(std::min(vocab, s * width));
  for (std::int64_t id = 0; id < vocab; ++id)
    for (std::int64_t r = 0; r < rows; ++r)
      values[static_cast<std::size_t>(((id / width) * rows + r) * width + id % width)] =
          row_logits[static_cast<std::size_t>(id)];
  std::vector<std::uint64_t> counter_values;
  for (std::int64_t r = 0; r < rows; ++r) counter_values.push_back(static_cast<std::uint64_t>(r));
  const auto logits = bench.array(values);
  const auto shard_begins = bench.array(begins);
  const auto counters = bench.array(counter_values);
  const auto tokens = bench.array(std::vector<std::int32_t>(static_cast<std::size_t>(rows), -5));
  bench.upload();
  const auto side = bench.device_side();
  bench.backend().sample(SampleArgs<float>{side.view(logits, shards, rows, width), side(shard_begins),
                                           temperature, top_p, seed, side(counters), side(tokens)},
                         bench.stream());
  return bench.values(bench.download(), tokens);
}

template <Backend B>
void sample() {
  for (const std::int64_t vocab : {1, 7, 100}) {
    for (const std::int64_t width : {1, 8, 100}) {
      CAPTURE(vocab, width);
      Workbench<B> source;
      std::vector<float> logits = source.random_values(vocab, 4.0);
      const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      CHECK(draw<B>(logits, 2, width, 0.0f, 1.0f, 1) ==
            std::vector<std::int32_t>(2, static_cast<std::int32_t>(best)));
      logits.back() = logits[static_cast<std::size_t>(best)];  // a tie goes to the smaller id
      CHECK(draw<B>(logits, 1, width, 0.0f, 1.0f, 1).front() == best);
      // A tiny nucleus is greedy too.
      logits.back() -= 0.5f;
      CHECK(draw<B>(logits, 3, width, 0.7f, 1e-6f, 1) ==
            std::vector<std::int32_t>(3, static_cast<std::int32_t>(best)));
    }
  }
  // Frequencies follow softmax(logits / temperature) over the nucleus, whatever the shards.
  const std::vector<float> logits{0.0f, 1.0f, -1.0f, 0.5f, -20.0f, 0.9f};
  constexpr std::int64_t kRows = 4000;
  for (const float top_p : {1.0f, 0.7f}) {
    CAPTURE(top_p);
    constexpr float kTemperature = 0.8f;
    const auto tokens = draw<B>(logits, kRows, 6, kTemperature, top_p, 17);
    CHECK(tokens == draw<B>(logits, kRows, 6, kTemperature, top_p, 17));
    CHECK(tokens == draw<B>(logits, kRows, 4, kTemperature, top_p, 17));
    CHECK(tokens == draw<B>(logits, kRows, 1, kTemperature, top_p, 17));
    CHECK(tokens != draw<B>(logits, kRows, 6, kTemperature, top_p, 18));

    std::vector<double> likely;
    for (const float logit : logits) likely.push_back(std::exp(double{logit} / kTemperature));
    double total = 0.0;
    for (const double weight : likely) total += weight;
    for (double& weight : likely) weight /= total;
    const std::vector<std::int64_t> kept = reference::nucleus(likely, top_p);
    double kept_total = 0.0;
    for (const std::int64_t id : kept) kept_total += likely[static_cast<std::size_t>(id)];
    for (std::size_t id = 0; id < logits.size(); ++id) {
      const bool is_kept = std::find(kept.begin(), kept.end(), static_cast<std::int64_t>(id)) != kept.end();
      const double expected = is_kept ? likely[id] / kept_total : 0.0;
      const auto seen =
          static_cast<double>(std::count(tokens.begin(), tokens.end(), static_cast<std::int32_t>(id)));
      CAPTURE(id, expected, seen);
      CHECK(std::abs(seen / kRows - expected) <=
            5.0 * std::sqrt(expected * (1.0 - expected) / kRows) + 1e-12);
    }
  }
}

// --- memory, streams, events ----------------------------------------------------------------------------

template <Backend B>
void memory_and_streams() {
  B backend = LoneRank<B>::make();
  typename B::Stream first = backend.create_stream();
  typename B::Stream second = backend.create_stream();
  constexpr std::size_t kBytes = 3 << 20;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4}, std::size_t{1000}, kBytes}) {
    CAPTURE(bytes);
    typename B::Buffer a = backend.allocate(bytes);
    typename B::Buffer b = backend.allocate(bytes);
    CHECK(a.size_bytes() >= bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 256 == 0);
    std::vector<unsigned char> host(bytes, 77), back(bytes, 1);
    backend.download(back.data(), a.data(), bytes, first);
    backend.synchronize(first);
    CHECK(back == std::vector<unsigned char>(bytes, 0));  // zeroed

    backend.upload(a.data(), host.data(), bytes, first);
    std::fill(host.begin(), host.end(), static_cast<unsigned char>(11));  // re-used at once
    backend.copy(b.data(), a.data(), bytes, first);                       // in order: sees 77
    backend.upload(a.data(), host.data(), bytes, first);
    backend.fill_zero(a.data(), bytes / 2, first);
    // The other stream waits for all of it, not for the host.
    typename B::Event event = backend.create_event();
    backend.record(event, first);
    backend.wait(second, event);
    backend.download(host.data(), a.data(), bytes, second);
    backend.download(back.data(), b.data(), bytes, second);
    backend.synchronize(second);
    CHECK(back == std::vector<unsigned char>(bytes, 77));
    std::vector<unsigned char> expected(bytes, 11);
    std::fill_n(expected.begin(), bytes / 2, static_cast<unsigned char>(0));
    CHECK(host == expected);
    backend.synchronize(first);
  }

  // An event re-recorded: each wait is for the record before it. A token hops between the streams.
  typename B::Buffer cells = backend.allocate(64 * sizeof(std::int32_t));
  typename B::Event there = backend.create_event();
  typename B::Event back_again = backend.create_event();
  auto* cell = reinterpret_cast<std::int32_t*>(cells.data());
  const std::int32_t start = 4242;
  backend.upload(cell, &start, sizeof(start), first);
  for (int i = 0; i < 62; i += 2) {
    backend.record(there, first);
    backend.wait(second, there);
    backend.copy(cell + i + 1, cell + i, sizeof(std::int32_t), second);
    backend.record(back_again, second);
    backend.wait(first, back_again);
    backend.copy(cell + i + 2, cell + i + 1, sizeof(std::int32_t), first);
  }
  std::int32_t end = 0;
  backend.download(&end, cell + 62, sizeof(end), first);
  backend.synchronize(first);
  CHECK(end == start);

  // Nothing to do, nothing touched.
  backend.upload(nullptr, nullptr, 0, first);
  backend.download(nullptr, nullptr, 0, first);
  backend.copy(nullptr, nullptr, 0, first);
  backend.fill_zero(nullptr, 0, first);
  backend.synchronize(first);
}

}  // namespace contract
}  // namespace helix::test
