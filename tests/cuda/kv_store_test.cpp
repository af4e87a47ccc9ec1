// SPDX-License-Identifier: Apache-2.0
// Keys and values that a GPU appends, writes and reads: 16-bit types compared with f32, and byte for byte in
// each engine's pool.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "cuda/at.hpp"
#include "cuda/gpu.hpp"
#include "cuda/host_page_lists.hpp"
#include "cuda/kv_pools.hpp"
#include "cuda/twin_bench.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

using cuda::Operators;

constexpr std::array kKvTypes{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3};

/// A cache of three sequences with random pages, equal on both sides.
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

/// Calls body(dtype, head dim, KVP, rank, is latent, pad) for all combinations that the cache tests use.
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

/// Compares append_kv, write_kv and read_kv on one pool with the layout that its name states, byte for byte.
/// Bytes that belong to no token must stay unchanged.
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
    for (std::int64_t slot = 0; slot < kSlots; ++slot)  // page 0 belongs to no sequence
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

  /// Appends tokens of two sequences and padding, writes a span of the third, and reads it back. Empty if
  /// everything is correct.
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

    std::vector<float> got_k(at(count * heads() * d() + 1));
    std::vector<float> got_v(at(count * heads() * dv() + 1));
    if (const std::string problem = difference(); !problem.empty()) return problem;
    operators_.download(got_k.data(), read_k, got_k.size() * sizeof(float), stream_);
    operators_.download(got_v.data(), read_v, got_v.size() * sizeof(float), stream_);
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

  /// Fills one sequence. Empty if each element has the value of its place in the model, and nothing else
  /// changed.
  std::string synthetic_problem() {
    constexpr std::int64_t kTokens = 13;
    constexpr std::int64_t kLayer = 5;
    constexpr std::int64_t kFirstHead = 2;
    operators_.fill_synthetic_kv({view_, 1, kTokens, kLayer, kFirstHead}, stream_);
    const auto row_of = [&](std::int64_t position, std::int64_t width, bool is_value) {
      std::vector<float> row;
      for (std::int64_t head = 0; head < heads(); ++head) {
        const std::uint32_t key = synthetic_row_key(kLayer, kFirstHead + head, position, is_value);
        for (std::int64_t i = 0; i < width; ++i)
          row.push_back(synthetic_element(key, static_cast<std::uint32_t>(i)));
      }
      return row;
    };
    for (std::int64_t position = 0; position < kTokens; ++position)
      expect(1, position, row_of(position, d(), false), row_of(position, dv(), true), 0);
    return difference();
  }

 private:
  /// Describes where the pool differs from what is expected; empty if nowhere.
  std::string difference() {
    std::vector<std::uint8_t> got(bytes_.size());
    operators_.download(got.data(), memory_.front().data(), got.size(), stream_);
    operators_.synchronize(stream_);
    const auto different = std::mismatch(got.begin(), got.end(), bytes_.begin()).first;
    return different == got.end() ? "" : "byte " + std::to_string(different - got.begin()) + " of the pool";
  }
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
  /// Puts row `from` of the inputs at the place of the token, if this rank owns it.
  template <class X>
  void expect(std::int64_t slot, std::int64_t position, const std::vector<X>& keys,
              const std::vector<X>& values, std::size_t from) {
    if (position < 0 || layout_.owner(position) != kvp_rank_) return;
    dispatch(pool_.format.dtype, [&]<class S>(S*) {
      const auto put = [&](const std::vector<X>& row, std::int64_t head, std::int64_t i, std::int64_t width,
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

}  // namespace

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
              CHECK(Traffic(operators, make, sizes, is_csr, KvLayout(2, 3), 1).synthetic_problem() == "");
            }
          }
          const KvPoolSizes single{dtype, is_latent ? 1 : 3, dim, is_latent ? dim - 8 : dim,
                                   1,     Traffic::kPages};
          CAPTURE(make(single).name, to_string(dtype), dim);
          CHECK(Traffic(operators, make, single, true, KvLayout(4, 1), 2).problem() == "");
          CHECK(Traffic(operators, make, single, true, KvLayout(4, 1), 2).synthetic_problem() == "");
        }
      }
    }
  }
}

TEST_CASE("a GPU stores tokens for which no room was made in no page of any sequence") {
  HELIX_REQUIRE_GPUS(1);
  constexpr std::int64_t kDim = 64;
  using Backend = cuda::Backend<cuda::LocalComm, float>;
  Backend backend;
  const ModelShape shape{.num_query_heads = 1,
                         .num_kv_heads = 1,
                         .head_dim = kDim,
                         .value_dim = kDim,
                         .hidden = kDim,
                         .ffn = kDim};
  ShardedKVCache<Backend> cache(
      backend, Topology(TopologySpec{}, shape),
      {.dtype = DType::f32, .num_layers = 2, .page_tokens = 16, .num_pages = 3, .max_sequences = 2});
  const cuda::Stream stream = backend.create_stream();
  const SequenceId full = cache.add();
  const SequenceId empty = cache.add();
  cache.append(full, 3 * 16, stream);
  const auto pages = [&](int layer) {
    std::vector<std::uint8_t> bytes(cache.capacity_bytes() / 2);
    backend.download(bytes.data(), cache.layer(layer).k, bytes.size(), stream);
    return bytes;
  };
  const std::vector<float> ones(kDim, 1.0f);
  const std::vector<std::int32_t> offsets{0, 1};
  const std::int32_t slot = cache.slot(empty);
  const cuda::Buffer row = backend.allocate(ones.size() * 4);
  const cuda::Buffer device_offsets = backend.allocate(8);
  const cuda::Buffer position = backend.allocate(8);  // 0
  const cuda::Buffer device_slot = backend.allocate(4);
  backend.upload(row.data(), ones.data(), row.size_bytes(), stream);
  backend.upload(device_offsets.data(), offsets.data(), 8, stream);
  backend.upload(device_slot.data(), &slot, 4, stream);
  const TensorView<const float, 3> values(reinterpret_cast<const float*>(row.data()), {1, 1, kDim});
  const Batch batch{offsets, reinterpret_cast<const std::int32_t*>(device_offsets.data()),
                    reinterpret_cast<const std::int64_t*>(position.data()),
                    reinterpret_cast<const std::int32_t*>(device_slot.data())};
  for (const int layer : {0, 1}) {
    const std::array before{pages(0), pages(1)};
    backend.append_kv({.k = values, .v = values, .batch = batch, .kv = cache.layer(layer)}, stream);
    CHECK(std::array{pages(0), pages(1)} == before);
  }
}

}  // namespace helix::test
