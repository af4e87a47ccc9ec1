// SPDX-License-Identifier: Apache-2.0
// cuda::Operators of f16 and bf16 against those of f32, which keep the backend contract, on equal inputs; and
// sampling against the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

using cuda::Operators;

constexpr std::array kWeightTypes{DType::f32, DType::f16, DType::bf16};
constexpr std::array kKvTypes{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3};

// Elements between rows: none, rows that stay aligned to 16 bytes, rows that do not.
constexpr std::array<std::int64_t, 3> kPads{0, 8, 3};

/// Two units in the last place of a number near the top of its binade.
template <class T>
constexpr double kTolerance = std::is_same_v<T, bf16> ? 2.0 / 256 : 2.0 / 2048;

/// Two units of numbers too small for the precision of others: f16 ends at 2^-24.
template <class T>
constexpr double kSmallest = std::is_same_v<T, bf16> ? 0.0 : 0x1p-23;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Names activations of a TwinBench.
struct Activations {
  std::size_t index = 0;
};
/// Names another of its arrays.
template <class X>
struct Array {
  std::size_t index = 0;
};

/// The operations of T and of f32 side by side. Activations exist twice, with the same values; other arrays
/// as equal bytes.
template <class T>
class TwinBench {
 public:
  /// Resolves arrays to device pointers of the side whose activations are E.
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
    /// Two dimensions, `pad` elements between rows.
    TensorView<E, 2> view(Activations array, std::int64_t rows, std::int64_t cols,
                          std::int64_t pad = 0) const {
      return {(*this)(array), {rows, cols}, {cols + pad, 1}};
    }
    /// Three dimensions, `pad` elements between the rows of heads.
    TensorView<E, 3> view(Activations array, std::int64_t tokens, std::int64_t heads, std::int64_t cols,
                          std::int64_t pad) const {
      return {(*this)(array), {tokens, heads, cols}, {heads * (cols + pad), cols + pad, 1}};
    }

   private:
    friend class TwinBench;
    std::vector<std::byte*> pointers_;
  };

  TwinBench() : stream_(narrow_.create_stream()) {}

  Operators<T>& narrow() { return narrow_; }
  cuda::Stream stream() const { return stream_; }

  /// Forgets all arrays.
  void clear() { entries_.clear(); }

  /// Activations: rows of `width` elements. Rounded to T on both sides.
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
  /// What must be written, or left as it is.
  Activations poison(std::int64_t rows, std::int64_t width) {
    return activations(std::vector<float>(at(rows * width), std::nanf("")), width);
  }
  /// Equal bytes on both sides. Afterwards floats may differ by 1e-5 of the largest, others not at all.
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

  /// Runs use(operators, side, stream) on both sides and describes the first difference between them;
  /// empty if there is none. Arrays are as before afterwards.
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
    std::int64_t width = 0;  // of activations; 0: of equal bytes
    bool is_float = false;
    Bytes narrow;
    Bytes wide;
  };

  std::size_t add(Entry entry) {
    entries_.push_back(std::move(entry));
    return entries_.size() - 1;
  }

  template <class E, class Use>
  std::vector<Bytes> run(Operators<E>& operators, Bytes Entry::*bytes, const Use& use) {
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

  Operators<T> narrow_;
  Operators<float> wide_;
  cuda::Stream stream_;
  std::mt19937 random_{20250705};
  std::deque<Entry> entries_;
};

/// The type of activations on a Side.
template <class Side>
using ElementOf = typename std::remove_cvref_t<Side>::Element;

/// A cache of three sequences with random pages, the same on both sides.
template <class T>
struct Cache {
  static constexpr std::int64_t kHeads = 2;
  static constexpr std::int64_t kPageTokens = 16;
  static constexpr std::int64_t kMaxPages = 5;
  static constexpr std::int64_t kSequences = 3;

  KvPool pool;
  KvLayout layout;
  std::int64_t kvp_rank;
  Array<std::uint8_t> pages;
  Array<std::int32_t> table;
  Array<float> scales;

  Cache(TwinBench<T>& bench, DType dtype, std::int64_t dim, std::int64_t kvp, std::int64_t rank,
        bool is_latent)
      : pool((is_latent ? latent_pool
                        : helix_pool)({dtype, is_latent ? 1 : kHeads, dim, is_latent ? dim - 8 : dim,
                                       kPageTokens, kSequences * kMaxPages})),
        layout(kvp, 3),
        kvp_rank(rank) {
    pages = bench.weights(pool.num_elements, dtype);
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < pool.num_pages; ++i)
      ids.push_back(static_cast<std::int32_t>(i * 7 % pool.num_pages));
    table = bench.same(ids);
    scales = bench.same(std::vector<float>{0.5f, 0.75f, 1.25f, 2.0f});
  }

  template <class Side>
  KvView on(const Side& side) const {
    KvView kv = pool.view(side(pages));
    kv.page_table = side(table);
    kv.max_pages = kMaxPages;
    kv.layout = layout;
    kv.kvp_rank = kvp_rank;
    if (pool.format.dtype == DType::fp8_e4m3) {
      kv.k_scale = side(scales);
      kv.v_scale = pool.format.is_latent ? nullptr : side(scales) + kHeads;
    }
    return kv;
  }
};

/// Calls body(dtype, head dim, KVP, rank, is latent, pad) for what the tests of the cache go through.
template <class Body>
void for_each_cache(const Body& body) {
  for (const DType dtype : kKvTypes) {
    for (const std::int64_t dim : {64, 20}) {
      for (const std::int64_t pad : kPads) {
        for (const bool is_latent : {false, true}) {
          CAPTURE(to_string(dtype), dim, pad, is_latent);
          body(dtype, dim, 1, 0, is_latent, pad);
          body(dtype, dim, 2, 1, is_latent, pad);
        }
      }
    }
  }
}

/// append_kv, write_kv and read_kv on one pool against what its name says, byte for byte. What no token owns
/// stays.
template <class T>
class PoolTraffic {
 public:
  PoolTraffic(const Operators<T>& operators, MakeKvPool make, const KvPoolSizes& sizes, bool is_csr,
              const KvLayout& layout, std::int64_t kvp_rank)
      : operators_(operators),
        stream_(operators.create_stream()),
        pool_(make(sizes)),
        layout_(layout),
        kvp_rank_(kvp_rank),
        lists_({kSlotPages, kSlotPages, kSlotPages}, is_csr, 0),
        bytes_(at(pool_.num_elements * pool_.format.element_bytes()), 0x7b) {
    for (std::int64_t slot = 0; slot < kSlots; ++slot)  // page 0 is nobody's
      for (std::int64_t i = 0; i < kSlotPages; ++i)
        lists_.at(slot, i) =
            static_cast<std::int32_t>(1 + (slot * kSlotPages + i) * 5 % (kSlots * kSlotPages));
    view_ = pool_.view(upload(bytes_));
    view_.page_table = upload(lists_.pages);
    view_.max_pages = lists_.max_pages;
    if (is_csr) view_.page_begins = upload(lists_.begins);
    view_.layout = layout;
    view_.kvp_rank = kvp_rank;
    if (pool_.format.dtype == DType::fp8_e4m3) {
      view_.k_scale = upload(std::vector<float>{0.5f, 2.0f, 4.0f});
      view_.v_scale = pool_.format.is_latent ? nullptr : upload(std::vector<float>{0.25f, 1.0f, 2.0f});
    }
  }

  static constexpr std::int64_t kSlots = 3;
  static constexpr std::int64_t kSlotPages = 4;
  /// Pages that a pool needs.
  static constexpr std::int64_t kPages = 1 + kSlots * kSlotPages;

  /// Appends tokens of two sequences and padding, writes a span of the third, reads that back. Empty: all is
  /// as it must be.
  std::string problem() {
    const std::vector<std::int64_t> positions{0, 1, -1, 2, 5, 6, 7, 8};
    const std::vector<std::int32_t> offsets{0, 3, 8};
    const std::vector<std::int32_t> slots{2, 0};
    const auto tokens = static_cast<std::int64_t>(positions.size());
    const std::vector<T> keys = numbers(tokens * heads() * d());
    const std::vector<T> values = numbers(tokens * heads() * dv());
    const TensorView<const T, 3> k(upload(keys), {tokens, heads(), d()});
    const TensorView<const T, 3> v = is_latent()
                                         ? TensorView<const T, 3>{}
                                         : TensorView<const T, 3>(upload(values), {tokens, heads(), dv()});
    operators_.append_kv({k, v, {offsets, upload(offsets), upload(positions), upload(slots)}, view_},
                         stream_);
    for (std::size_t t = 0; t < positions.size(); ++t) expect(t < 3 ? 2 : 0, positions[t], keys, values, t);
    constexpr std::int64_t kFirst = 3;
    operators_.write_kv({k, v, kFirst, 1, view_}, stream_);
    for (std::size_t t = 0; t < positions.size(); ++t)
      expect(1, kFirst + static_cast<std::int64_t>(t), keys, values, t);

    const std::int64_t first_local = layout_.length(kFirst, kvp_rank_);
    const std::int64_t count = layout_.length(kFirst + tokens, kvp_rank_) - first_local;
    float* read_k = upload(std::vector<float>(at(count * heads() * d() + 1), std::nanf("")));
    float* read_v = upload(std::vector<float>(at(count * heads() * dv() + 1), std::nanf("")));
    ReadKvArgs read{view_, 1, first_local, {read_k, {count, heads(), d()}}, {}};
    if (!is_latent()) read.v = {read_v, {count, heads(), dv()}};
    operators_.read_kv(read, stream_);

    std::vector<std::uint8_t> got(bytes_.size());
    std::vector<float> got_k(at(count * heads() * d() + 1));
    std::vector<float> got_v(at(count * heads() * dv() + 1));
    operators_.download(got.data(), memory_.front().data(), got.size(), stream_);
    operators_.download(got_k.data(), read_k, got_k.size() * sizeof(float), stream_);
    operators_.download(got_v.data(), read_v, got_v.size() * sizeof(float), stream_);
    operators_.synchronize(stream_);
    const auto different = std::mismatch(got.begin(), got.end(), bytes_.begin()).first;
    if (different != got.end()) return "byte " + std::to_string(different - got.begin()) + " of the pool";
    for (std::int64_t local = 0; local < count; ++local) {
      const std::int64_t position = layout_.global(kvp_rank_, first_local + local);
      for (std::int64_t head = 0; head < heads(); ++head) {
        for (std::int64_t i = 0; i < d(); ++i)
          if (got_k[at((local * heads() + head) * d() + i)] != stored(1, position, head, i, true))
            return "key read at position " + std::to_string(position);
        for (std::int64_t i = 0; i < dv() && !is_latent(); ++i)
          if (got_v[at((local * heads() + head) * dv() + i)] != stored(1, position, head, i, false))
            return "value read at position " + std::to_string(position);
      }
    }
    if (!std::isnan(got_k.back()) || !std::isnan(got_v.back())) return "something was written past the end";
    return "";
  }

 private:
  std::int64_t heads() const { return pool_.format.num_heads; }
  std::int64_t d() const { return pool_.format.head_dim; }
  std::int64_t dv() const { return pool_.format.value_dim; }
  bool is_latent() const { return pool_.format.is_latent; }

  template <class X>
  X* upload(const std::vector<X>& values) {
    memory_.push_back(operators_.allocate(values.size() * sizeof(X) + 1));
    operators_.upload(memory_.back().data(), values.data(), values.size() * sizeof(X), stream_);
    return reinterpret_cast<X*>(memory_.back().data());
  }
  std::vector<T> numbers(std::int64_t count) {
    std::vector<T> values;
    for (std::int64_t i = 0; i < count; ++i)
      values.push_back(T(static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f));
    return values;
  }
  float scale(std::int64_t head, bool is_key) const {
    constexpr float kScales[2][3] = {{0.25f, 1.0f, 2.0f}, {0.5f, 2.0f, 4.0f}};
    return pool_.format.dtype == DType::fp8_e4m3 ? kScales[is_key ? 1 : 0][head] : 1.0f;
  }
  std::int64_t place(std::int64_t slot, std::int64_t position, std::int64_t head, std::int64_t i,
                     bool is_key) {
    const std::int64_t local = layout_.local(position);
    const std::int64_t page_tokens = pool_.format.page_tokens;
    const std::int64_t page = lists_.at(slot, local / page_tokens);
    return (is_key ? pool_.key : pool_.value)(page, head, local % page_tokens, i);
  }
  /// Puts row `from` of the inputs where the token must lie, if this rank owns it.
  void expect(std::int64_t slot, std::int64_t position, const std::vector<T>& keys,
              const std::vector<T>& values, std::size_t from) {
    if (position < 0 || layout_.owner(position) != kvp_rank_) return;
    dispatch(pool_.format.dtype, [&]<class S>(S*) {
      const auto put = [&](const std::vector<T>& row, std::int64_t head, std::int64_t i, std::int64_t width,
                           bool is_key) {
        const auto value =
            static_cast<float>(row[at((static_cast<std::int64_t>(from) * heads() + head) * width + i)]);
        const S x(value / scale(head, is_key));
        std::memcpy(bytes_.data() + at(place(slot, position, head, i, is_key)) * sizeof(S), &x, sizeof(S));
      };
      for (std::int64_t head = 0; head < heads(); ++head) {
        for (std::int64_t i = 0; i < d(); ++i) put(keys, head, i, d(), true);
        for (std::int64_t i = 0; i < dv() && !is_latent(); ++i) put(values, head, i, dv(), false);
      }
    });
  }
  float stored(std::int64_t slot, std::int64_t position, std::int64_t head, std::int64_t i, bool is_key) {
    float value = 0.0f;
    dispatch(pool_.format.dtype, [&]<class S>(S*) {
      S x;
      std::memcpy(&x, bytes_.data() + at(place(slot, position, head, i, is_key)) * sizeof(S), sizeof(S));
      value = static_cast<float>(x) * scale(head, is_key);
    });
    return value;
  }

  const Operators<T>& operators_;
  cuda::Stream stream_;
  KvPool pool_;
  KvLayout layout_;
  std::int64_t kvp_rank_;
  HostPageLists lists_;
  std::vector<std::uint8_t> bytes_;
  std::deque<cuda::Buffer> memory_;  // the pool first
  KvView view_;
  std::mt19937 random_{11};
};

/// Runs the statements, which name operators, side and stream, and checks that both sides agree. E is the
/// side's type of activations.
#define HELIX_CHECK_TWINS(bench, ...)                                                   \
  CHECK((bench).difference([&](auto& operators, const auto& side, const auto& stream) { \
    using E [[maybe_unused]] = ElementOf<decltype(side)>;                               \
    __VA_ARGS__                                                                         \
  }) == "")

}  // namespace

TEMPLATE_TEST_CASE("16-bit norms on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t width : {1, 7, 64, 130, 4096, 7168}) {
      for (const std::int64_t pad : kPads) {
        for (const std::int64_t rows : {1, 5}) {
          CAPTURE(to_string(dtype), width, pad, rows);
          for (const bool adds : {false, true}) {
            bench.clear();
            const auto delta = bench.random(rows, width + pad);
            const auto residual = bench.random(rows, width + pad);
            const auto out = bench.poison(rows, width + pad);
            const auto weight = bench.weights(width, dtype);
            HELIX_CHECK_TWINS(bench, {
              RmsNormArgs<E> args;
              if (adds) args.delta = side.view(delta, rows, width, pad);
              args.residual = side.view(residual, rows, width, pad);
              args.weight = side.weight(weight, dtype, 1, width);
              args.out = side.view(out, rows, width, pad);
              operators.rms_norm(args, stream);
            });
          }
          if (width > 130) continue;
          bench.clear();
          const auto x = bench.random(rows * 3, width + pad);
          const auto weight = bench.weights(width, dtype);
          HELIX_CHECK_TWINS(bench, {
            operators.head_rms_norm(HeadRmsNormArgs<E>{side.view(x, rows, 3, width, pad),
                                                       side.weight(weight, dtype, 1, width), 1e-6f},
                                    stream);
          });
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit rotary embedding on a GPU agrees with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const bool is_interleaved : {false, true}) {
    for (const std::int64_t rotary : {64, 22}) {
      for (const std::int64_t width : {rotary, rotary + 64, rotary + 5}) {
        for (const std::int64_t pad : kPads) {
          for (const std::int64_t heads : {1, 3, 40}) {
            for (const bool in_place : {false, true}) {
              CAPTURE(is_interleaved, rotary, width, pad, heads, in_place);
              bench.clear();
              const auto positions = bench.same(std::vector<std::int64_t>{0, 1, 77, 100000, -1});
              const auto in = bench.random(5 * heads, width + pad);
              const auto out = bench.poison(5 * heads, width + pad);
              std::vector<float> values;
              for (std::int64_t i = 0; i < rotary / 2; ++i)
                values.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(rotary)));
              const auto frequencies = bench.same(values);
              HELIX_CHECK_TWINS(bench, {
                const auto x = side.view(in, 5, heads, width, pad);
                operators.rope(RopeArgs<E>{x,
                                           in_place ? x : side.view(out, 5, heads, width, pad),
                                           side(positions),
                                           {side(frequencies), rotary, is_interleaved, 1.25f}},
                               stream);
              });
            }
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit activations and row copies on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const std::int64_t width : {1, 8, 33, 3000}) {
    for (const std::int64_t pad : kPads) {
      CAPTURE(width, pad);
      bench.clear();
      const auto gate_up = bench.random(5, 2 * width + pad, 8.0);
      const auto activated = bench.poison(5, width + pad);
      HELIX_CHECK_TWINS(bench, {
        operators.swiglu(
            SwigluArgs<E>{side.view(gate_up, 5, 2 * width, pad), side.view(activated, 5, width, pad)},
            stream);
      });

      bench.clear();
      const auto in = bench.random(6, width + pad);
      const auto rows = bench.same(std::vector<std::int32_t>{5, 0, 3, 3});
      const auto gathered = bench.poison(4, width + pad);
      HELIX_CHECK_TWINS(bench, {
        operators.gather_rows(
            GatherRowsArgs<E>{side.view(in, 6, width, pad), side(rows), side.view(gathered, 4, width, pad)},
            stream);
      });

      for (const DType dtype : kWeightTypes) {
        CAPTURE(to_string(dtype));
        bench.clear();
        const auto table = bench.weights(5 * width, dtype);
        const auto ids = bench.same(std::vector<std::int32_t>{10, 14, 9, 15, 12, 0, -1, 2147483647});
        const auto out = bench.poison(8, width + pad);
        HELIX_CHECK_TWINS(bench, {
          operators.embed(
              EmbedArgs<E>{side(ids), side.weight(table, dtype, 5, width), 10, side.view(out, 8, width, pad)},
              stream);
        });
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit products on a GPU agree with f32 in every kernel", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  std::size_t turn = 0;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t k : {8, 40, 128, 4096, 37}) {
      for (const std::int64_t n : {8, 24, 1000, 33}) {
        if (k == 4096 && n == 33) continue;
        for (const std::int64_t rows : {1, 2, 3, 8, 9, 16, 17, 64, 200}) {
          ++turn;
          const std::int64_t in_pad = kPads[turn % 3];
          const std::int64_t out_pad = kPads[turn / 3 % 3];
          const bool has_bias = turn % 2 == 0;
          const bool accumulates = turn / 2 % 2 == 0;
          // Behind the library's product a bias of another type costs one more rounding: not two units.
          const bool is_library = dtype == kDTypeOf<TestType>;
          const DType bias_dtype = is_library ? dtype : kWeightTypes[turn / 2 % 3];
          CAPTURE(to_string(dtype), rows, k, n, in_pad, out_pad, has_bias, accumulates);
          bench.clear();
          const auto in = bench.random(rows, k + in_pad);
          const auto weight = bench.weights(n * k, dtype);
          const auto bias = bench.weights(n, bias_dtype);
          const auto out = accumulates ? bench.random(rows, n + out_pad) : bench.poison(rows, n + out_pad);
          HELIX_CHECK_TWINS(bench, {
            operators.linear(LinearArgs<E>{side.view(in, rows, k, in_pad), side.weight(weight, dtype, n, k),
                                           has_bias ? side.weight(bias, bias_dtype, 1, n) : WeightView{},
                                           side.view(out, rows, n, out_pad), accumulates},
                             stream);
          });
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit products of heads on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {1, 9, 16, 17, 40}) {
      for (const std::int64_t heads : {1, 3, 16}) {
        for (const std::int64_t k : {17, 128}) {
          for (const std::int64_t n : {35, 128, 512}) {
            for (const std::int64_t pad : kPads) {
              CAPTURE(to_string(dtype), tokens, heads, k, n, pad);
              bench.clear();
              const auto in = bench.random(tokens * heads, k + pad);
              const auto weight = bench.weights(heads * n * k, dtype);
              const auto out = bench.poison(tokens * heads, n + pad);
              HELIX_CHECK_TWINS(bench, {
                operators.head_linear(HeadLinearArgs<E>{side.view(in, tokens, heads, k, pad),
                                                        side.weight(weight, dtype, heads * n, k),
                                                        side.view(out, tokens, heads, n, pad)},
                                      stream);
              });
            }
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit keys and values on a GPU are stored and read as f32 ones are", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for_each_cache([&](DType dtype, std::int64_t dim, std::int64_t kvp, std::int64_t rank, bool is_latent,
                     std::int64_t pad) {
    bench.clear();
    const Cache<TestType> cache(bench, dtype, dim, kvp, rank, is_latent);
    const KvFormat& sizes = cache.pool.format;
    const std::vector<std::int32_t> host_offsets{0, 4, 4, 13};
    const auto offsets = bench.same(host_offsets);
    const auto slots = bench.same(std::vector<std::int32_t>{2, 0, 1});
    const auto positions =
        bench.same(std::vector<std::int64_t>{0, 1, -1, 3, 60, 61, 62, 63, 64, 65, 66, 67, 68});
    const auto k = bench.random(13 * sizes.num_heads, dim + pad, 3.0);
    const auto v = bench.random(13 * sizes.num_heads, sizes.value_dim + pad, 3.0);
    HELIX_CHECK_TWINS(bench, {
      AppendKvArgs<E> args;
      args.k = side.view(k, 13, sizes.num_heads, dim, pad);
      if (!is_latent) args.v = side.view(v, 13, sizes.num_heads, sizes.value_dim, pad);
      args.batch = {host_offsets, side(offsets), side(positions), side(slots)};
      args.kv = cache.on(side);
      operators.append_kv(args, stream);
    });
    const std::int64_t local = cache.layout.length(18, rank);  // what write_kv may have stored
    const auto read_k = bench.same(std::vector<float>(at(local * sizes.num_heads * dim), std::nanf("")));
    const auto read_v =
        bench.same(std::vector<float>(at(local * sizes.num_heads * sizes.value_dim), std::nanf("")));
    HELIX_CHECK_TWINS(bench, {
      WriteKvArgs<E> args;
      args.k = side.view(k, 13, sizes.num_heads, dim, pad);
      if (!is_latent) args.v = side.view(v, 13, sizes.num_heads, sizes.value_dim, pad);
      args.first_position = 5;
      args.sequence_slot = 1;
      args.kv = cache.on(side);
      operators.write_kv(args, stream);
      ReadKvArgs read;
      read.kv = args.kv;
      read.sequence_slot = 1;
      read.k = {side(read_k), {local, sizes.num_heads, dim}};
      if (!is_latent) read.v = {side(read_v), {local, sizes.num_heads, sizes.value_dim}};
      operators.read_kv(read, stream);
    });
  });
}

TEMPLATE_TEST_CASE("keys and values on a GPU lie where each engine's pool has them", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using Traffic = PoolTraffic<TestType>;
  const Operators<TestType> operators;
  for (const bool is_latent : {false, true}) {
    for (const MakeKvPool make : is_latent ? latent_pool_makers() : kv_pool_makers()) {
      for (const DType dtype : kKvTypes) {
        for (const std::int64_t dim : {64, 20}) {
          for (const std::int64_t page_tokens : {4, 16}) {
            for (const bool is_csr : {false, true}) {
              const KvPoolSizes sizes{dtype,       is_latent ? 1 : 3, dim, is_latent ? dim - 8 : dim,
                                      page_tokens, Traffic::kPages};
              CAPTURE(make(sizes).name, to_string(dtype), dim, page_tokens, is_csr);
              CHECK(Traffic(operators, make, sizes, is_csr, KvLayout(1, 1), 0).problem() == "");
              CHECK(Traffic(operators, make, sizes, is_csr, KvLayout(2, 3), 1).problem() == "");
            }
          }
          const KvPoolSizes single{dtype, is_latent ? 1 : 3, dim, is_latent ? dim - 8 : dim,
                                   1,     Traffic::kPages};
          CAPTURE(make(single).name, to_string(dtype), dim);
          CHECK(Traffic(operators, make, single, true, KvLayout(4, 1), 2).problem() == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("messages on a GPU hold 16-bit partials bit for bit", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using T = TestType;
  const Operators<T> operators;
  const cuda::Stream stream = operators.create_stream();
  std::mt19937 random(7);
  for (const std::int64_t kvp : {1, 2, 5}) {
    for (const std::int64_t tokens : {0, 1, 3, 17}) {
      for (const std::int64_t width : {1, 16, 128, 9}) {
        for (const std::int64_t pad : kPads) {
          CAPTURE(kvp, tokens, width, pad);
          const std::int64_t heads = 2;  // of a peer
          const std::int64_t all_heads = kvp * heads;
          std::vector<T> out(at(tokens * all_heads * (width + pad)));
          for (T& x : out) x = T::from_bits(static_cast<std::uint16_t>(random()));
          std::vector<float> lse(at(tokens * all_heads));
          for (float& x : lse) x = static_cast<float>(random() % 1000);
          std::vector<std::int64_t> positions(at(tokens));
          for (std::int64_t& x : positions) x = static_cast<std::int64_t>(random() % 5000) - 1;
          const std::uint64_t before = 41;
          // A block a head: header, lse, outputs.
          const std::int64_t lse_bytes = (tokens * 4 + 15) / 16 * 16;
          const std::int64_t block = 16 + lse_bytes + (tokens * width * 2 + 15) / 16 * 16 + pad * 4;
          const std::int64_t message = heads * block;

          std::vector<std::uint8_t> expected(at(kvp * message), 0x7b);
          for (std::int64_t head = 0; head < all_heads; ++head) {
            std::uint8_t* to = expected.data() + head * block;
            const ExchangeHeader header{exchange_epoch(before + 1, positions.data(), tokens),
                                        static_cast<std::uint32_t>(tokens),
                                        static_cast<std::uint32_t>(kvp - 1)};
            if (head % heads == 0) std::memcpy(to, &header, sizeof(header));
            for (std::int64_t t = 0; t < tokens; ++t) {
              const std::int64_t row = t * all_heads + head;
              std::memcpy(to + 16 + t * 4, lse.data() + row, 4);
              std::memcpy(to + 16 + lse_bytes + t * width * 2, out.data() + row * (width + pad),
                          at(width * 2));
            }
          }

          std::deque<cuda::Buffer> memory;
          const auto upload = [&]<class X>(const std::vector<X>& values) {
            cuda::Buffer& buffer = memory.emplace_back(operators.allocate(values.size() * sizeof(X) + 1));
            operators.upload(buffer.data(), values.data(), values.size() * sizeof(X), stream);
            return reinterpret_cast<X*>(buffer.data());
          };
          const T* device_out = upload(out);
          const float* device_lse = upload(lse);
          std::uint64_t* epoch = upload(std::vector<std::uint64_t>{before});
          const std::int64_t* device_positions = upload(positions);
          auto* messages =
              reinterpret_cast<std::byte*>(upload(std::vector<std::uint8_t>(expected.size(), 0x7b)));
          PackPartialArgs<T> args;
          args.out = TensorView<const T, 3>(device_out, {tokens, all_heads, width},
                                            {all_heads * (width + pad), width + pad, 1});
          args.lse = TensorView<const float, 2>(device_lse, {tokens, all_heads});
          args.packed_out = {reinterpret_cast<T*>(messages + 16 + lse_bytes),
                             {tokens, all_heads, width},
                             {width, block / 2, 1}};
          args.packed_lse = {reinterpret_cast<float*>(messages + 16), {tokens, all_heads}, {1, block / 4}};
          args.headers = {messages, tokens, kvp - 1, epoch, device_positions, kvp, message};
          operators.pack_partial(args, stream);
          std::vector<std::uint8_t> packed(expected.size());
          std::uint64_t after = 0;
          operators.download(packed.data(), messages, packed.size(), stream);
          operators.download(&after, epoch, sizeof(after), stream);
          operators.synchronize(stream);
          CHECK(packed == expected);
          CHECK(after == before + 1);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("headers on a GPU are stamped and checked by the 16-bit operators", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  constexpr std::int64_t kTokens = 300;  // more than a warp has threads
  std::vector<std::int64_t> positions(kTokens);
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i * i) - 1;
  for (const int wrong : {-1, 0, 2}) {
    CAPTURE(wrong);
    const Operators<TestType> operators;
    const cuda::Stream stream = operators.create_stream();
    const cuda::Buffer messages = operators.allocate(4 * 48);  // the last one is this rank's own
    const cuda::Buffer epochs = operators.allocate(4 * sizeof(std::uint64_t));
    const cuda::Buffer device_positions = operators.allocate(kTokens * sizeof(std::int64_t));
    auto* epoch = reinterpret_cast<std::uint64_t*>(epochs.data());
    const auto* read_positions = reinterpret_cast<const std::int64_t*>(device_positions.data());
    operators.upload(device_positions.data(), positions.data(), device_positions.size_bytes(), stream);
    const std::array<std::uint64_t, 4> counts{8, 8, wrong == 2 ? 9u : 8u, 8};
    operators.upload(epoch, counts.data(), sizeof(counts), stream);
    for (int peer = 0; peer < 4; ++peer) {
      operators.stamp(StampArgs{messages.data() + 48 * peer, wrong == 0 && peer == 0 ? kTokens - 1 : kTokens,
                                peer, epoch + peer, read_positions},
                      stream);
    }
    ExchangeHeader header;
    operators.download(&header, messages.data() + 48, sizeof(header), stream);
    operators.synchronize(stream);
    CHECK(header.epoch == exchange_epoch(9, positions.data(), kTokens));
    CHECK((header.tokens == kTokens && header.sender == 1));
    operators.check_exchange(CheckExchangeArgs{messages.data(), 48, 3, kTokens, messages.data() + 3 * 48},
                             stream);
    if (wrong < 0) {
      CHECK_NOTHROW(operators.synchronize(stream));
      continue;
    }
    const auto culprit = Catch::Matchers::Contains("the message from rank " + std::to_string(wrong));
    CHECK_THROWS_WITH(operators.synchronize(stream), culprit);
    CHECK_THROWS_WITH(operators.synchronize(stream), culprit);  // sticky
  }
}

TEMPLATE_TEST_CASE("16-bit partials on a GPU combine as f32 ones do", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (const std::int64_t ranks : {1, 2, 5, 32}) {
    for (const std::int64_t width : {1, 33, 64, 128, 512}) {
      for (const std::int64_t pad : kPads) {
        for (const bool has_sink : {false, true}) {
          CAPTURE(ranks, width, pad, has_sink);
          constexpr std::int64_t kTokens = 5;
          constexpr std::int64_t kHeads = 3;
          bench.clear();
          auto out_values = bench.numbers(ranks * kTokens * kHeads * (width + pad));
          auto lse_values = bench.numbers(ranks * kTokens * kHeads, 10.0);
          for (std::size_t i = 0; i < lse_values.size(); ++i) {
            // Every second token: no rank but the last sees anything; token 3: none at all.
            const auto token = static_cast<std::int64_t>(i) / kHeads % kTokens;
            const auto rank = static_cast<std::int64_t>(i) / (kHeads * kTokens);
            if ((token % 2 == 0 || rank == ranks - 1) && token != 3) continue;
            lse_values[i] = kNone;
            std::fill_n(out_values.begin() + static_cast<std::int64_t>(i) * (width + pad), width + pad,
                        std::nanf(""));
          }
          const auto partial_out = bench.activations(out_values, width + pad);
          const auto partial_lse = bench.same(lse_values);
          const auto sink = bench.same(bench.numbers(kHeads, 5.0));
          const auto out = bench.poison(kTokens * kHeads, width + pad);
          const auto lse = bench.same(std::vector<float>(at(kTokens * kHeads), std::nanf("")));
          HELIX_CHECK_TWINS(bench, {
            LseCombineArgs<E> args;
            const std::int64_t row = width + pad;
            args.partial_out = TensorView<const E, 4>(side(partial_out), {ranks, kTokens, kHeads, width},
                                                      {kTokens * kHeads * row, kHeads * row, row, 1});
            args.partial_lse = TensorView<const float, 3>(side(partial_lse), {ranks, kTokens, kHeads});
            if (has_sink) args.sink = side(sink);
            args.out = side.view(out, kTokens, kHeads, width, pad);
            args.lse = {side(lse), {kTokens, kHeads}};
            operators.lse_combine(args, stream);
          });
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("log-sum-exps of other conventions on a GPU are converted as they are read", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using T = TestType;
  constexpr std::int64_t kTokens = 3;
  constexpr std::int64_t kDim = 16;
  const Operators<T> operators;
  const cuda::Stream stream = operators.create_stream();
  std::deque<cuda::Buffer> memory;
  const auto upload = [&]<class X>(const std::vector<X>& values) {
    memory.push_back(operators.allocate(values.size() * sizeof(X)));
    operators.upload(memory.back().data(), values.data(), values.size() * sizeof(X), stream);
    return reinterpret_cast<X*>(memory.back().data());
  };
  const auto download = [&](const float* from, std::int64_t count) {
    std::vector<float> values(at(count));
    operators.download(values.data(), from, values.size() * sizeof(float), stream);
    operators.synchronize(stream);
    return values;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto convention :
       {LseConvention::natural, LseConvention::base2, LseConvention::natural_positive_inf_if_empty}) {
    for (const std::int64_t ranks : {1, 3, 9}) {
      CAPTURE(int(convention), ranks);
      // Token 1 is empty on rank 0, token 2 everywhere.
      std::vector<float> natural(at(ranks * kTokens));
      std::vector<float> given;
      for (std::int64_t i = 0; i < ranks * kTokens; ++i) {
        const bool is_empty = i % kTokens == 2 || i == 1;
        natural[at(i)] = is_empty ? -kInfinity : 0.75f * static_cast<float>(i % 5) - 1.0f;
        given.push_back(convention == LseConvention::base2 ? natural[at(i)] / 0.693147181f : natural[at(i)]);
        if (is_empty && convention == LseConvention::natural_positive_inf_if_empty) given.back() = kInfinity;
      }
      std::vector<T> outs;
      for (std::int64_t i = 0; i < ranks * kTokens * kDim; ++i)
        outs.push_back(
            T(natural[at(i / kDim)] == -kInfinity ? std::nanf("") : static_cast<float>(i / kDim % 7)));
      T* const out = upload(std::vector<T>(at(kTokens * kDim)));
      float* const lse = upload(std::vector<float>(at(kTokens), std::nanf("")));
      LseCombineArgs<T> args;
      args.partial_out = TensorView<const T, 4>(upload(outs), {ranks, kTokens, 1, kDim});
      args.partial_lse = TensorView<const float, 3>(upload(given), {ranks, kTokens, 1});
      args.out = {out, {kTokens, 1, kDim}};
      args.lse = {lse, {kTokens, 1}};
      args.convention = convention;
      operators.lse_combine(args, stream);
      const std::vector<float> got = download(lse, kTokens);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        double sum = 0.0;
        for (std::int64_t r = 0; r < ranks; ++r) sum += std::exp(double{natural[at(r * kTokens + t)]});
        CAPTURE(t);
        if (sum == 0.0) {
          CHECK(got[at(t)] == -kInfinity);
        } else {
          CHECK(std::abs(got[at(t)] - std::log(sum)) < 1e-5);
        }
      }

      PackPartialArgs<T> pack;
      float* const packed = upload(std::vector<float>(at(ranks * kTokens), std::nanf("")));
      T* const packed_out = upload(std::vector<T>(at(ranks * kTokens * kDim)));
      const cuda::Buffer header = operators.allocate(sizeof(ExchangeHeader));
      const cuda::Buffer epoch = operators.allocate(sizeof(std::uint64_t));
      pack.out = TensorView<const T, 3>(args.partial_out.data(), {ranks * kTokens, 1, kDim});
      pack.lse = TensorView<const float, 2>(args.partial_lse.data(), {ranks * kTokens, 1});
      pack.packed_out = {packed_out, {ranks * kTokens, 1, kDim}};
      pack.packed_lse = {packed, {ranks * kTokens, 1}};
      pack.headers.message = header.data();
      pack.headers.epoch = reinterpret_cast<std::uint64_t*>(epoch.data());
      pack.convention = convention;
      operators.pack_partial(pack, stream);
      const std::vector<float> packed_lse = download(packed, ranks * kTokens);
      for (std::size_t i = 0; i < natural.size(); ++i) {
        CAPTURE(i);
        CHECK((packed_lse[i] == natural[i] || std::abs(packed_lse[i] - natural[i]) < 1e-6f));
      }
    }
  }
}

TEMPLATE_TEST_CASE("router logits of 16-bit activations on a GPU are not rounded to 16 bits", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t k : {8, 128, 1024, 37}) {
      for (const std::int64_t experts : {1, 8, 37, 256}) {
        for (const std::int64_t tokens : {1, 3, 8, 9, 17, 200}) {
          for (const std::int64_t pad : kPads) {
            CAPTURE(to_string(dtype), k, experts, tokens, pad);
            bench.clear();
            const auto in = bench.random(tokens, k + pad);
            const auto weight = bench.weights(experts * k, dtype);
            // Compared as floats, to 1e-5 of the largest: bf16 would be wrong by 4e-3.
            const auto logits = bench.same(std::vector<float>(at(tokens * experts), std::nanf("")));
            HELIX_CHECK_TWINS(bench, {
              operators.router_logits(RouterLogitsArgs<E>{side.view(in, tokens, k, pad),
                                                          side.weight(weight, dtype, experts, k),
                                                          {side(logits), {tokens, experts}}},
                                      stream);
            });
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("experts on a GPU are chosen alike by the operators of every type", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  struct Case {
    std::int64_t experts, groups, kept, top_k;
  };
  for (const Case c : {Case{1, 1, 1, 1}, Case{8, 4, 2, 3}, Case{64, 8, 3, 6}, Case{256, 8, 4, 8}}) {
    for (const auto scoring : {RouterScoring::softmax, RouterScoring::sigmoid}) {
      for (const bool has_bias : {false, true}) {
        for (const std::int64_t tokens : {1, 7, 70}) {
          for (const std::int64_t pad : kPads) {
            CAPTURE(c.experts, c.groups, c.kept, c.top_k, int(scoring), has_bias, tokens, pad);
            bench.clear();
            const auto logits = bench.same(bench.numbers(tokens * (c.experts + pad), 3.0));
            const auto bias = bench.same(bench.numbers(c.experts, 0.4));
            const auto experts = bench.same(std::vector<std::int32_t>(at(tokens * c.top_k), -9));
            const auto weights = bench.same(std::vector<float>(at(tokens * c.top_k), std::nanf("")));
            HELIX_CHECK_TWINS(bench, {
              operators.route(RouteArgs{TensorView<const float, 2>(side(logits), {tokens, c.experts},
                                                                   {c.experts + pad, 1}),
                                        has_bias ? side(bias) : nullptr,
                                        scoring,
                                        c.groups,
                                        c.kept,
                                        true,
                                        2.5f,
                                        {side(experts), {tokens, c.top_k}},
                                        {side(weights), {tokens, c.top_k}}},
                              stream);
            });
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("experts of 16-bit activations on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kTopK = 3;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {1, 7, 40}) {
      for (const std::int64_t hidden : {40, 512}) {
        for (const std::int64_t ffn : {17, 256}) {
          for (const std::int64_t pad : kPads) {
            CAPTURE(to_string(dtype), tokens, hidden, ffn, pad);
            constexpr std::size_t kLocal = 4;  // experts 2 to 5 of 8
            bench.clear();
            std::vector<std::int32_t> chosen;
            for (std::int64_t t = 0; t < tokens; ++t)
              for (std::int64_t k = 0; k < kTopK; ++k)
                chosen.push_back(static_cast<std::int32_t>((t % 3 == 0 ? 2 + k : t * 5 + k * 3) % 8));
            const auto experts = bench.same(chosen);
            const auto weights = bench.same(bench.numbers(tokens * kTopK));
            const auto in = bench.random(tokens, hidden + pad);
            const auto out = bench.random(tokens, hidden + pad);
            std::array<Array<std::uint8_t>, kLocal> gate_up;
            std::array<Array<std::uint8_t>, kLocal> down;
            for (std::size_t e = 0; e < kLocal; ++e) {
              gate_up[e] = bench.weights(2 * ffn * hidden, dtype);
              down[e] = bench.weights(hidden * ffn, dtype);
            }
            std::deque<cuda::Buffer> workspaces;  // until the queued calls have run
            HELIX_CHECK_TWINS(bench, {
              std::vector<ExpertWeights> local;
              for (std::size_t e = 0; e < kLocal; ++e)
                local.push_back({side.weight(gate_up[e], dtype, 2 * ffn, hidden),
                                 side.weight(down[e], dtype, hidden, ffn)});
              const std::size_t bytes = operators.expert_ffn_workspace_bytes(tokens, kTopK, hidden, ffn);
              workspaces.push_back(operators.allocate(bytes));
              operators.expert_ffn(
                  ExpertFfnArgs<E>{side.view(in, tokens, hidden, pad),
                                   TensorView<const std::int32_t, 2>(side(experts), {tokens, kTopK}),
                                   TensorView<const float, 2>(side(weights), {tokens, kTopK}),
                                   local,
                                   2,
                                   side.view(out, tokens, hidden, pad),
                                   {workspaces.back().data(), bytes}},
                  stream);
            });
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("a GPU draws the tokens that the CPU draws", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using T = TestType;
  const Operators<T> gpu;
  const cpu::Operators cpu(2);
  const cuda::Stream stream = gpu.create_stream();
  cpu::Stream cpu_stream = cpu.create_stream();
  std::mt19937 random(99);
  const auto pick = [&](auto... values) {
    const std::array choices{values...};
    return choices[random() % choices.size()];
  };
  for (int round = 0; round < 200; ++round) {
    const std::int64_t vocab = pick(1, 2, 50, 1000, 8192, 32003);
    const std::int64_t shards = pick(1, 2, 4, 8);
    const std::int64_t rows = pick(1, 2, 5);
    const std::int64_t pad = pick(0, 8, 3);
    const float temperature = pick(0.0f, 0.05f, 0.7f, 1.0f, 3.0f);
    const float top_p = pick(1.0f, 0.95f, 0.9f, 0.5f, 0.01f);
    const double spread = pick(0.1, 3.0, 15.0);
    const std::uint64_t seed = random();
    const std::int64_t width = (vocab + shards - 1) / shards + pad;
    CAPTURE(round, vocab, shards, rows, pad, temperature, top_p, spread, seed);

    std::vector<std::int64_t> begins;
    for (std::int64_t s = 0; s <= shards; ++s) begins.push_back(std::min(vocab, s * (width - pad)));
    std::vector<T> logits(at(shards * rows * width));
    std::vector<float> wide;
    std::normal_distribution<double> normal(0.0, spread);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const std::size_t shard = i / at(rows * width);
      const bool is_padding = static_cast<std::int64_t>(i) % width >= begins[shard + 1] - begins[shard];
      logits[i] = T(is_padding ? std::nanf("") : static_cast<float>(normal(random)));
      wide.push_back(static_cast<float>(logits[i]));
    }
    std::vector<std::uint64_t> counters;
    for (std::int64_t r = 0; r < rows; ++r) counters.push_back(random());

    std::vector<std::int32_t> expected(at(rows), -5);
    const TensorView<const float, 3> view(wide.data(), {shards, rows, width});
    cpu.sample(
        SampleArgs<float>{view, begins.data(), temperature, top_p, seed, counters.data(), expected.data()},
        cpu_stream);
    cpu.synchronize(cpu_stream);

    std::deque<cuda::Buffer> memory;
    const auto upload = [&]<class X>(const std::vector<X>& values) {
      cuda::Buffer& buffer = memory.emplace_back(gpu.allocate(values.size() * sizeof(X)));
      gpu.upload(buffer.data(), values.data(), values.size() * sizeof(X), stream);
      return reinterpret_cast<X*>(buffer.data());
    };
    std::vector<std::int32_t> drawn(at(rows), -7);
    std::int32_t* tokens = upload(drawn);
    const TensorView<const T, 3> device_view(upload(logits), {shards, rows, width});
    gpu.sample(SampleArgs<T>{device_view, upload(begins), temperature, top_p, seed, upload(counters), tokens},
               stream);
    gpu.download(drawn.data(), tokens, drawn.size() * sizeof(std::int32_t), stream);
    gpu.synchronize(stream);
    CHECK(drawn == expected);
  }
}

TEST_CASE("operators on a GPU take all device memory from an engine's allocator and give it back") {
  HELIX_REQUIRE_GPUS(1);
  cuda::use_device(0);
  struct Pool {
    cuda::Buffer memory{std::size_t{80} << 20};
    std::size_t used = 0;
    std::size_t given = 0;
    std::size_t returned = 0;
  };
  const auto pool = std::make_shared<Pool>();
  const cuda::Allocator allocator{[pool](std::size_t bytes) -> void* {
                                    const std::size_t begin = pool->used;
                                    if (bytes > pool->memory.size_bytes() - begin) return nullptr;
                                    pool->used += (bytes + 255) / 256 * 256;
                                    pool->given += bytes;
                                    return pool->memory.data() + begin;
                                  },
                                  [pool](void*, std::size_t bytes) { pool->returned += bytes; }};
  {
    const Operators<bf16> operators(0, allocator);
    const cuda::Stream stream = operators.create_stream();
    const std::size_t made = pool->given;
    CHECK(made > 0);
    const cuda::Buffer buffer = operators.allocate(3000);
    CHECK(pool->given == made + 3000);
    std::vector<std::uint8_t> bytes(3000, 1);
    operators.download(bytes.data(), buffer.data(), bytes.size(), stream);
    operators.synchronize(stream);
    CHECK(std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t x) { return x == 0; }));
    // The workspace of the library is made by the first product, and made once.
    const cuda::Buffer matrices = operators.allocate(3 * 64 * 64 * sizeof(bf16));
    auto* const in = reinterpret_cast<bf16*>(matrices.data());
    const std::size_t before = pool->given;
    const auto multiply = [&] {
      operators.linear({TensorView<const bf16, 2>(in, {64, 64}),
                        {in + 64 * 64, DType::bf16, 64, 64},
                        {},
                        {in + 2 * 64 * 64, {64, 64}}},
                       stream);
    };
    const auto captured = cuda::Graph::capture(stream, multiply);
    CHECK(pool->given == before);  // a capture allocates nothing
    multiply();
    const std::size_t after = pool->given;
    CHECK(after > before);
    multiply();
    CHECK(pool->given == after);
    captured.replay(stream);
    operators.synchronize(stream);
    CHECK_THROWS_AS(operators.allocate(std::size_t{100} << 20), Error);
  }
  CHECK(pool->returned == pool->given);
  CHECK_THROWS_AS(Operators<bf16>(0, {allocator.allocate, nullptr}), Error);
}

TEST_CASE("a borrowed buffer leaves its memory alone") {
  HELIX_REQUIRE_GPUS(1);
  const Operators<float> operators;
  const cuda::Stream stream = operators.create_stream();
  const cuda::Buffer owner = operators.allocate(1024);
  const std::vector<std::uint8_t> ones(1024, 1);
  operators.upload(owner.data(), ones.data(), ones.size(), stream);
  {
    const cuda::Buffer borrowed = cuda::Buffer::borrow(owner.data() + 256, 512);
    CHECK((borrowed.data() == owner.data() + 256 && borrowed.size_bytes() == 512));
  }
  std::vector<std::uint8_t> bytes(1024);
  operators.download(bytes.data(), owner.data(), bytes.size(), stream);
  operators.synchronize(stream);
  CHECK(bytes == ones);
}

}  // namespace helix::test
