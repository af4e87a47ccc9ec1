// SPDX-License-Identifier: Apache-2.0
// KV pools as engines keep them, each with the view that foreign_kv.hpp makes.
#pragma once

#include <cstdint>

#include <helix/dense_kv.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/kv_format.hpp>

#include "support/engine_pool.hpp"

namespace helix::test {

template <bool is_block_first, bool is_hnd>
Pool vllm(const Sizes& s) {
  Pool pool(s.dtype, {pool_elements(s)});
  pool.view = vllm_kv({.pool = pool.memory[0].data(),
                       .dtype = s.dtype,
                       .num_blocks = s.num_pages,
                       .block_size = s.page_tokens,
                       .num_kv_heads = s.heads,
                       .head_size = s.d,
                       .is_block_first = is_block_first,
                       .is_hnd = is_hnd});
  set_rows(pool, [=](std::int64_t half, std::int64_t page, std::int64_t token, std::int64_t head) {
    const Index p{page, s.num_pages}, kv{half, 2}, t{token, s.page_tokens}, h{head, s.heads};
    return row_of(s.d, {is_block_first ? p : kv, is_block_first ? kv : p, is_hnd ? h : t, is_hnd ? t : h});
  });
  return pool;
}

template <bool is_hnd>
Pool vllm_diffkv(const Sizes& s) {
  const std::int64_t columns = s.d + s.dv;
  Pool pool(s.dtype, {s.num_pages * s.page_tokens * s.heads * columns});
  pool.view = vllm_diffkv_kv({.pool = pool.memory[0].data(),
                              .dtype = s.dtype,
                              .num_blocks = s.num_pages,
                              .block_size = s.page_tokens,
                              .num_kv_heads = s.heads,
                              .head_size = s.d,
                              .head_size_v = s.dv,
                              .is_hnd = is_hnd});
  set_rows(pool, [=](std::int64_t half, std::int64_t page, std::int64_t token, std::int64_t head) {
    const Index t{token, s.page_tokens}, h{head, s.heads};
    return row_of(columns, {{page, s.num_pages}, is_hnd ? h : t, is_hnd ? t : h}) + half * s.d;
  });
  return pool;
}

/// Pools of vLLM with several layers in its HND layout, which is FlashInfer's stride order.
inline Pool vllm_layers(const Sizes& s) {
  constexpr std::int64_t kLayers = 3;
  constexpr std::int64_t kLayer = 2;
  Pool pool(s.dtype, {kLayers * pool_elements(s)});
  using enum KvAxis;
  pool.view = dense_kv({.pool = pool.memory[0].data(),
                        .dtype = s.dtype,
                        .num_pages = s.num_pages,
                        .num_layers = kLayers,
                        .layer = kLayer,
                        .num_kv_heads = s.heads,
                        .page_tokens = s.page_tokens,
                        .head_dim = s.d},
                       {page, half, head, layer, token});
  set_rows(pool, [=](std::int64_t kv, std::int64_t p, std::int64_t t, std::int64_t h) {
    return row_of(s.d, {{p, s.num_pages}, {kv, 2}, {h, s.heads}, {kLayer, kLayers}, {t, s.page_tokens}});
  });
  return pool;
}

template <bool is_hnd>
Pool flashinfer(const Sizes& s) {
  Pool pool(s.dtype, {pool_elements(s)});
  const FlashInferKvArgs args{.pool = pool.memory[0].data(),
                              .dtype = s.dtype,
                              .num_pages = s.num_pages,
                              .page_size = s.page_tokens,
                              .num_kv_heads = s.heads,
                              .head_dim = s.d};
  pool.view = is_hnd ? flashinfer_hnd_kv(args) : flashinfer_nhd_kv(args);
  set_rows(pool, [=](std::int64_t half, std::int64_t page, std::int64_t token, std::int64_t head) {
    const Index t{token, s.page_tokens}, h{head, s.heads};
    return row_of(s.d, {{page, s.num_pages}, {half, 2}, is_hnd ? h : t, is_hnd ? t : h});
  });
  return pool;
}

template <bool is_hnd>
Pool flashinfer_tuple(const Sizes& s) {
  Pool pool(s.dtype, {pool_elements(s) / 2, pool_elements(s) / 2});
  const FlashInferKvArgs args{.pool = pool.memory[0].data(),
                              .dtype = s.dtype,
                              .num_pages = s.num_pages,
                              .page_size = s.page_tokens,
                              .num_kv_heads = s.heads,
                              .head_dim = s.d,
                              .v_cache = pool.memory[1].data()};
  pool.view = is_hnd ? flashinfer_hnd_kv(args) : flashinfer_nhd_kv(args);
  const auto row = [=](std::int64_t page, std::int64_t token, std::int64_t head) {
    const Index t{token, s.page_tokens}, h{head, s.heads};
    return row_of(s.d, {{page, s.num_pages}, is_hnd ? h : t, is_hnd ? t : h});
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return Pool::Place{0, row(p, t, h)}; };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return Pool::Place{1, row(p, t, h)}; };
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

/// One row per token, [page][token][D]: the latents of vLLM, SGLang and FlashMLA.
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
  Pool pool(s.dtype, {kLayers * pool_elements(s)});
  pool.view = tensorrt_llm_kv({.pool = pool.memory[0].data(),
                               .dtype = s.dtype,
                               .num_blocks = s.num_pages,
                               .num_layers = kLayers,
                               .layer = kLayer,
                               .num_kv_heads = s.heads,
                               .tokens_per_block = s.page_tokens,
                               .size_per_head = s.d});
  set_rows(pool, [=](std::int64_t half, std::int64_t p, std::int64_t t, std::int64_t h) {
    return row_of(s.d, {{p, s.num_pages}, {kLayer, kLayers}, {half, 2}, {h, s.heads}, {t, s.page_tokens}});
  });
  return pool;
}

inline Pool tensorrt_llm_mla(const Sizes& s) {
  constexpr std::int64_t kLayers = 3;
  constexpr std::int64_t kLayer = 1;
  Pool pool(s.dtype, {s.num_pages * kLayers * s.page_tokens * s.d});
  pool.view = tensorrt_llm_mla_kv({.pool = pool.memory[0].data(),
                                   .dtype = s.dtype,
                                   .num_blocks = s.num_pages,
                                   .num_layers = kLayers,
                                   .layer = kLayer,
                                   .tokens_per_block = s.page_tokens,
                                   .kv_lora_rank = s.dv,
                                   .qk_rope_head_dim = s.d - s.dv});
  const auto row = [=](std::int64_t p, std::int64_t t) {
    return row_of(s.d, {{p, s.num_pages}, {kLayer, kLayers}, {t, s.page_tokens}});
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t) { return Pool::Place{0, row(p, t)}; };
  pool.rope = [=](std::int64_t p, std::int64_t t, std::int64_t) { return Pool::Place{0, row(p, t) + s.dv}; };
  return pool;
}

inline constexpr Layout kLayouts[] = {
    {.name = "vLLM", .make = vllm<false, false>},
    {.name = "vLLM, HND", .make = vllm<false, true>},
    {.name = "vLLM, blocks first", .make = vllm<true, false>},
    {.name = "vLLM, blocks first, HND", .make = vllm<true, true>},
    {.name = "vLLM, several layers, HND", .make = vllm_layers},
    {.name = "vLLM, K and V of two sizes", .make = vllm_diffkv<false>, .has_own_value_dim = true},
    {.name = "vLLM, K and V of two sizes, HND", .make = vllm_diffkv<true>, .has_own_value_dim = true},
    {.name = "FlashInfer NHD", .make = flashinfer<false>},
    {.name = "FlashInfer HND", .make = flashinfer<true>},
    {.name = "FlashInfer NHD, page size 1", .make = flashinfer<false>, .page_tokens = 1},
    {.name = "FlashInfer NHD, a tuple", .make = flashinfer_tuple<false>},
    {.name = "FlashInfer HND, a tuple", .make = flashinfer_tuple<true>},
    {.name = "SGLang, page size 1", .make = sglang, .page_tokens = 1, .has_own_value_dim = true},
    {.name = "SGLang, page size 16", .make = sglang, .has_own_value_dim = true},
    {.name = "TensorRT-LLM", .make = tensorrt_llm, .page_tokens = 32},
    {.name = "TensorRT-LLM, MLA", .make = tensorrt_llm_mla, .page_tokens = 32, .is_latent = true},
    {.name = "FlashInfer MLA", .make = flashinfer_mla, .is_latent = true},
    {.name = "FlashInfer MLA, page size 1", .make = flashinfer_mla, .page_tokens = 1, .is_latent = true},
    {.name = "latent rows, page size 1", .make = latent_rows, .page_tokens = 1, .is_latent = true},
    {.name = "latent rows, page size 8", .make = latent_rows, .page_tokens = 8, .is_latent = true},
};

}  // namespace helix::test
