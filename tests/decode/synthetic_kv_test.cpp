// SPDX-License-Identifier: Apache-2.0
// Synthetic KV: runs of rows equal their single elements, pages hold what their rank owns, and the values
// never change.
#include "generate/synthetic_kv.hpp"

#include <cstdint>
#include <cstring>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/page_ledger.hpp>
#include <helix/topology.hpp>

#include "support/catch.hpp"

using namespace helix;
using namespace helix::decode;

namespace {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

constexpr ModelShape kGqa = {.num_query_heads = 8,
                             .num_kv_heads = 4,
                             .head_dim = 24,
                             .value_dim = 20,
                             .hidden = 64,
                             .ffn = 64,
                             .vocab = 64,
                             .num_layers = 3};

ModelShape mla_shape() {
  ModelShape shape = kGqa;
  shape.num_kv_heads = 1;
  shape.head_dim = 36;
  shape.value_dim = 28;
  shape.mla = MlaShape{.kv_lora_rank = 28, .qk_nope_head_dim = 6, .qk_rope_head_dim = 8, .v_head_dim = 6};
  return shape;
}

/// Adds a value's bits to an FNV-1a hash.
void mix(std::uint64_t& hash, std::uint16_t bits) {
  for (const unsigned byte : {bits & 0xffu, static_cast<unsigned>(bits) >> 8}) {
    hash = (hash ^ byte) * 0x100000001b3ull;
  }
}

/// The expected contents of a rank's pages, element by element.
template <class T>
void check_stored(const LocalBackend& backend, const ShardedKVCache<LocalBackend>& cache,
                  const SequenceId& sequence, Range heads, Range layers, const std::vector<float>& scales) {
  const KvView view = cache.layer(0);
  const KvFormat& format = view.format;
  const std::int64_t v_dim = format.is_latent ? 0 : format.value_dim;
  const std::int64_t local = cache.local_length(sequence);
  std::vector<float> k(static_cast<std::size_t>(local * heads.size() * format.head_dim));
  std::vector<float> v(static_cast<std::size_t>(local * heads.size() * v_dim));
  auto stream = backend.create_stream();
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
    cache.read(sequence, static_cast<int>(layer - layers.begin), {0, local},
               TensorView<float, 3>(k.data(), {local, heads.size(), format.head_dim}),
               TensorView<float, 3>(v.data(), {v_dim == 0 ? 0 : local, heads.size(), v_dim}), stream);
    backend.synchronize(stream);
    std::int64_t wrong = 0;
    for (std::int64_t l = 0; l < local; ++l) {
      const std::int64_t position = view.layout.global(view.kvp_rank, l);
      for (std::int64_t head = heads.begin; head < heads.end; ++head) {
        const float scale = scales.empty() ? 1.0f : scales[static_cast<std::size_t>(head)];
        const auto check = [&](const std::vector<float>& rows, std::int64_t dim, bool is_value) {
          const std::uint32_t key = synthetic_row_key(layer, head, position, is_value);
          for (std::int64_t d = 0; d < dim; ++d) {
            const float value = synthetic_element(key, static_cast<std::uint32_t>(d));
            const float expected = static_cast<float>(T(value / scale)) * scale;
            const std::int64_t at = (l * heads.size() + head - heads.begin) * dim + d;
            wrong += rows[static_cast<std::size_t>(at)] != expected ? 1 : 0;
          }
        };
        check(k, format.head_dim, false);
        check(v, v_dim, true);
      }
    }
    CAPTURE(layer, view.kvp_rank, heads.begin);
    CHECK(wrong == 0);
  }
}

template <class T>
void check_ranks(const ModelShape& shape, const TopologySpec& spec, std::int64_t tokens, int threads,
                 const std::vector<float>& scales = {}) {
  const Topology topo(spec, shape);
  const auto stages = cpu::LocalComm::create_group(topo.stage_size());
  const auto kvps = cpu::LocalComm::create_group(topo.kvp());
  const Range layers = {1, 3};
  for (int rank = 0; rank < topo.stage_size(); ++rank) {
    LocalBackend backend(stages[static_cast<std::size_t>(rank)],
                         kvps[static_cast<std::size_t>(topo.stage_coordinates(rank).kvp_rank)], threads);
    KvCacheSpec cache_spec = {.dtype = kDTypeOf<T>, .num_layers = 2, .page_tokens = 8, .chunk = 3};
    cache_spec.num_pages = PageLedger::pages_needed(KvLayout(topo.kvp(), 3), 8, tokens + 5, 0) + 4;
    cache_spec.k_scales = scales;
    if (!shape.is_mla()) cache_spec.v_scales = scales;
    ShardedKVCache<LocalBackend> cache(backend, topo, cache_spec);
    auto stream = backend.create_stream();
    cache.append(cache.add(), 5, stream);  // so that pages and slots do not begin at 0
    const SequenceId sequence = cache.add();
    cache.append(sequence, tokens, stream);
    const Range heads = topo.kv_heads(rank);
    fill_synthetic_kv(backend, cache, sequence, tokens, layers, heads, stream, false, [] {});
    check_stored<T>(backend, cache, sequence, heads, layers, scales);
  }
}

}  // namespace

TEST_CASE("runs of synthetic rows are their elements one by one, in every type") {
  const DType dtype = GENERATE(DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3);
  for (const std::int64_t columns : {0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100}) {
    for (const std::int64_t first : {0, 5}) {
      for (const float scale : {1.0f, 0.3f}) {
        const SyntheticRows rows = {.layer = 2,
                                    .head = 1,
                                    .first_position = 1000,
                                    .num_rows = 3,
                                    .is_value = first > 0,
                                    .first_column = first,
                                    .num_columns = columns,
                                    .scale = scale};
        dispatch(dtype, [&]<class T>(T*) {
          const std::int64_t stride = columns + 3;
          std::vector<T> expected(static_cast<std::size_t>(rows.num_rows * stride), T(7.0f));
          std::vector<T> out = expected;  // the gaps between rows must stay unchanged
          for (std::int64_t row = 0; row < rows.num_rows; ++row) {
            const std::uint32_t key = synthetic_row_key(2, 1, 1000 + row, rows.is_value);
            for (std::int64_t c = 0; c < columns; ++c) {
              const float value = synthetic_element(key, static_cast<std::uint32_t>(first + c));
              expected[static_cast<std::size_t>(row * stride + c)] = T(value / scale);
            }
          }
          fill_synthetic_rows(rows, dtype, out.data(), stride);
          CAPTURE(to_string(dtype), columns, first, scale);
          CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(T)) == 0);
        });
      }
    }
  }
}

TEST_CASE("the values of synthetic KV stay what they were") {
  std::vector<bf16> rows(std::size_t{16 * 64});
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const bool is_value : {false, true}) {
    for (const std::int64_t position : {std::int64_t{0}, std::int64_t{131000}, std::int64_t{1} << 33}) {
      fill_synthetic_rows({.layer = 3,
                           .head = 2,
                           .first_position = position,
                           .num_rows = 16,
                           .is_value = is_value,
                           .num_columns = 64},
                          DType::bf16, rows.data(), 64);
      for (const bf16 value : rows) mix(hash, value.bits);
    }
  }
  CHECK(hash == 0x635c65419e65303aull);
}

TEST_CASE("each rank's pages hold the synthetic rows that it owns") {
  for (const std::int64_t tokens : {1, 7, 8, 9, 100}) {
    check_ranks<bf16>(kGqa, {}, tokens, 2);
    check_ranks<float>(kGqa, {.kvp = 2, .tpa = 2}, tokens, 1);
    check_ranks<bf16>(mla_shape(), {.kvp = 2}, tokens, 2);
  }
  check_ranks<f16>(kGqa, {.kvp = 4}, 100, 3);
  check_ranks<fp8_e4m3>(kGqa, {.kvp = 2, .tpa = 2}, 100, 2, {0.5f, 0.3f, 0.01f, 2.0f});
  check_ranks<fp8_e4m3>(mla_shape(), {.kvp = 2}, 100, 2, {0.3f});
}
