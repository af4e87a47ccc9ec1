// SPDX-License-Identifier: Apache-2.0
// KV pools as engines keep them: memory full of NaN, its view, and where each row lies in words of its own.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/kv_format.hpp>

namespace helix::test {

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Sizes of a pool under test.
struct Sizes {
  DType dtype = DType::f32;
  std::int64_t heads = 2;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  std::int64_t page_tokens = 16;
  std::int64_t num_pages = 0;
};

/// Memory in an engine's layout, its view, and where a row lies: element of memory[buffer].
struct Pool {
  struct Place {
    std::size_t buffer;
    std::int64_t element;
  };
  std::vector<std::vector<std::byte>> memory;
  KvView view;
  std::function<Place(std::int64_t page, std::int64_t token, std::int64_t head)> k, v, rope;

  explicit Pool(DType dtype, std::vector<std::int64_t> elements) {
    dispatch(dtype, [&]<class T>(T*) {
      const T nan(std::nanf(""));
      for (const std::int64_t count : elements) {
        auto& bytes = memory.emplace_back(at(count) * sizeof(T));
        for (std::size_t i = 0; i < bytes.size(); i += sizeof(T)) std::memcpy(&bytes[i], &nan, sizeof(T));
      }
    });
  }
};

/// An engine's layout: a maker of pools, and what it fixes.
struct Layout {
  const char* name;
  Pool (*make)(const Sizes&);
  std::int64_t page_tokens = 16;
  bool is_latent = false;
  bool has_own_value_dim = false;
};

inline Pool vllm(const Sizes& s) {
  const std::int64_t half = s.num_pages * s.page_tokens * s.heads * s.d;
  Pool pool(s.dtype, {2 * half});
  pool.view = vllm_kv({.pool = pool.memory[0].data(),
                       .dtype = s.dtype,
                       .num_blocks = s.num_pages,
                       .block_size = s.page_tokens,
                       .num_kv_heads = s.heads,
                       .head_size = s.d});
  pool.k = [=](std::int64_t page, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, ((page * s.page_tokens + token) * s.heads + head) * s.d};
  };
  pool.v = [=](std::int64_t page, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, half + ((page * s.page_tokens + token) * s.heads + head) * s.d};
  };
  return pool;
}

inline FlashInferKvArgs flashinfer_args(const Sizes& s, Pool& pool) {
  return {.pool = pool.memory[0].data(),
          .dtype = s.dtype,
          .num_pages = s.num_pages,
          .page_size = s.page_tokens,
          .num_kv_heads = s.heads,
          .head_dim = s.d};
}

inline Pool flashinfer_nhd(const Sizes& s) {
  Pool pool(s.dtype, {s.num_pages * 2 * s.page_tokens * s.heads * s.d});
  pool.view = flashinfer_nhd_kv(flashinfer_args(s, pool));
  const auto row = [=](std::int64_t page, std::int64_t half, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, (((page * 2 + half) * s.page_tokens + token) * s.heads + head) * s.d};
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 0, t, h); };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 1, t, h); };
  return pool;
}

inline Pool flashinfer_hnd(const Sizes& s) {
  Pool pool(s.dtype, {s.num_pages * 2 * s.heads * s.page_tokens * s.d});
  pool.view = flashinfer_hnd_kv(flashinfer_args(s, pool));
  const auto row = [=](std::int64_t page, std::int64_t half, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, (((page * 2 + half) * s.heads + head) * s.page_tokens + token) * s.d};
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 0, t, h); };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 1, t, h); };
  return pool;
}

inline Pool flashinfer_mla(const Sizes& s) {
  const std::int64_t rope = s.d - s.dv;
  Pool pool(s.dtype, {s.num_pages * s.page_tokens * s.dv, s.num_pages * s.page_tokens * rope});
  pool.view = flashinfer_mla_kv({.ckv = pool.memory[0].data(),
                                 .kpe = pool.memory[1].data(),
                                 .dtype = s.dtype,
                                 .num_pages = s.num_pages,
                                 .page_size = s.page_tokens,
                                 .head_dim_ckv = s.dv,
                                 .head_dim_kpe = rope});
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{0, (p * s.page_tokens + t) * s.dv};
  };
  pool.rope = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{1, (p * s.page_tokens + t) * rope};
  };
  return pool;
}

/// One row a token, [page][token][D]: vLLM's, SGLang's and FlashMLA's latents.
inline Pool latent_rows(const Sizes& s) {
  Pool pool(s.dtype, {s.num_pages * s.page_tokens * s.d});
  pool.view = KvView::of_pool(pool.memory[0].data(), KvFormat::latent(s.dtype, s.d, s.dv, s.page_tokens),
                              s.num_pages);
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{0, (p * s.page_tokens + t) * s.d};
  };
  pool.rope = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{0, (p * s.page_tokens + t) * s.d + s.dv};
  };
  return pool;
}

inline Pool sglang(const Sizes& s) {
  const std::int64_t slots = s.num_pages * s.page_tokens;
  Pool pool(s.dtype, {slots * s.heads * s.d, slots * s.heads * s.dv});
  pool.view = sglang_kv({.k = pool.memory[0].data(),
                         .v = pool.memory[1].data(),
                         .dtype = s.dtype,
                         .num_slots = slots,
                         .page_size = s.page_tokens,
                         .num_kv_heads = s.heads,
                         .head_dim = s.d,
                         .v_head_dim = s.dv});
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) {
    return Pool::Place{0, ((p * s.page_tokens + t) * s.heads + h) * s.d};
  };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) {
    return Pool::Place{1, ((p * s.page_tokens + t) * s.heads + h) * s.dv};
  };
  return pool;
}

inline Pool tensorrt_llm(const Sizes& s) {
  constexpr std::int64_t kLayers = 3;
  constexpr std::int64_t kLayer = 1;
  Pool pool(s.dtype, {s.num_pages * kLayers * 2 * s.heads * s.page_tokens * s.d});
  pool.view = tensorrt_llm_kv({.pool = pool.memory[0].data(),
                               .dtype = s.dtype,
                               .num_blocks = s.num_pages,
                               .num_layers = kLayers,
                               .layer = kLayer,
                               .num_kv_heads = s.heads,
                               .tokens_per_block = s.page_tokens,
                               .size_per_head = s.d});
  const auto row = [=](std::int64_t page, std::int64_t half, std::int64_t token, std::int64_t head) {
    const std::int64_t part = (page * kLayers + kLayer) * 2 + half;
    return Pool::Place{0, ((part * s.heads + head) * s.page_tokens + token) * s.d};
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 0, t, h); };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 1, t, h); };
  return pool;
}

inline constexpr Layout kLayouts[] = {
    {.name = "vLLM", .make = vllm},
    {.name = "FlashInfer NHD", .make = flashinfer_nhd},
    {.name = "FlashInfer HND", .make = flashinfer_hnd},
    {.name = "FlashInfer NHD, page size 1", .make = flashinfer_nhd, .page_tokens = 1},
    {.name = "SGLang, page size 1", .make = sglang, .page_tokens = 1, .has_own_value_dim = true},
    {.name = "SGLang, page size 16", .make = sglang, .has_own_value_dim = true},
    {.name = "TensorRT-LLM", .make = tensorrt_llm, .page_tokens = 32},
    {.name = "FlashInfer MLA", .make = flashinfer_mla, .is_latent = true},
    {.name = "FlashInfer MLA, page size 1", .make = flashinfer_mla, .page_tokens = 1, .is_latent = true},
    {.name = "latent rows, page size 1", .make = latent_rows, .page_tokens = 1, .is_latent = true},
    {.name = "latent rows, page size 8", .make = latent_rows, .page_tokens = 8, .is_latent = true},
};

}  // namespace helix::test
