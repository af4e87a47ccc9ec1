// SPDX-License-Identifier: Apache-2.0
// Paged KV pools as engines keep them: the KvFormat that describes each, and an independent formula for the
// place of each element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <helix/kv_format.hpp>

namespace helix::test {

/// A pool of one layer. Offsets are in elements from the first byte of its memory.
struct KvPool {
  std::string name;
  KvFormat format;
  std::int64_t num_pages = 0;
  std::int64_t num_elements = 0;
  std::int64_t k_begin = 0;
  std::int64_t v_begin = 0;
  std::int64_t rope_begin = 0;
  /// Place of column `i` of a token's key, computed from the layout's name and not from the strides.
  std::function<std::int64_t(std::int64_t page, std::int64_t head, std::int64_t token, std::int64_t i)> key;
  /// Place of column `i` of a token's value; unused for latent pools.
  std::function<std::int64_t(std::int64_t page, std::int64_t head, std::int64_t token, std::int64_t i)> value;

  /// A view of the pool at `memory`, without a page table.
  KvView view(void* memory) const {
    const auto at = [&](std::int64_t element) -> void* {
      return static_cast<std::byte*>(memory) + element * format.element_bytes();
    };
    KvView kv;
    kv.format = format;
    kv.num_pages = num_pages;
    kv.k = at(k_begin);
    kv.v = format.is_latent ? nullptr : at(v_begin);
    kv.rope = format.is_latent ? at(rope_begin) : nullptr;
    return kv;
  }
};

/// Sizes of a pool.
struct KvPoolSizes {
  DType dtype = DType::f32;
  std::int64_t heads = 1;
  std::int64_t d = 0;
  std::int64_t dv = 0;
  std::int64_t page_tokens = 0;
  std::int64_t pages = 0;
};

using MakeKvPool = KvPool (*)(const KvPoolSizes&);

/// Helix's own layout: [page][K, V][head][token][D]; rows of V have room for D columns.
inline KvPool helix_pool(const KvPoolSizes& s) {
  KvPool pool;
  pool.name = "[page][K, V][head][token][D]";
  pool.format = KvFormat::head_major(s.dtype, s.heads, s.d, s.dv, s.page_tokens);
  pool.num_pages = s.pages;
  pool.num_elements = s.pages * 2 * s.heads * s.page_tokens * s.d;
  pool.v_begin = s.heads * s.page_tokens * s.d;
  const auto at = [s](std::int64_t part) {
    return [s, part](std::int64_t page, std::int64_t head, std::int64_t token, std::int64_t i) {
      return (((page * 2 + part) * s.heads + head) * s.page_tokens + token) * s.d + i;
    };
  };
  pool.key = at(0);
  pool.value = at(1);
  return pool;
}

/// A pool of K and one of V, [page][token][head][D], with `gap` elements between the pools and `pad` after
/// each token of K: SGLang's layout, in pages of 1 or more tokens.
inline KvPool separate_pools(const KvPoolSizes& s, std::int64_t gap, std::int64_t pad = 0) {
  KvPool pool;
  pool.name = "K [page][token][head][D], V [page][token][head][Dv]";
  pool.format = KvFormat::token_major(s.dtype, s.heads, s.d, s.dv, s.page_tokens);
  const std::int64_t token_elements = s.heads * s.d + pad;
  pool.format.k.token = token_elements;
  pool.format.k.page = s.page_tokens * token_elements;
  pool.v_begin = s.pages * s.page_tokens * token_elements + gap;
  pool.num_pages = s.pages;
  pool.num_elements = pool.v_begin + s.pages * s.page_tokens * s.heads * s.dv;
  pool.key = [=](std::int64_t page, std::int64_t head, std::int64_t token, std::int64_t i) {
    return (page * s.page_tokens + token) * token_elements + head * s.d + i;
  };
  pool.value = [s, begin = pool.v_begin](std::int64_t page, std::int64_t head, std::int64_t token,
                                         std::int64_t i) {
    return begin + ((page * s.page_tokens + token) * s.heads + head) * s.dv + i;
  };
  return pool;
}

/// vLLM's FlashAttention backend: [K, V][block][token][head][D].
inline KvPool vllm_pool(const KvPoolSizes& s) {
  KvPool pool = separate_pools(s, 0);
  pool.name = "[K, V][block][token][head][D]";
  return pool;
}

/// FlashInfer's NHD: [page][K, V][token][head][D].
inline KvPool flashinfer_nhd_pool(const KvPoolSizes& s) {
  KvPool pool;
  pool.name = "[page][K, V][token][head][D]";
  pool.format = KvFormat::token_major(s.dtype, s.heads, s.d, s.dv, s.page_tokens);
  pool.format.k.page = 2 * s.page_tokens * s.heads * s.d;
  pool.format.v = pool.format.k;
  pool.num_pages = s.pages;
  pool.num_elements = s.pages * pool.format.k.page;
  pool.v_begin = s.page_tokens * s.heads * s.d;
  const auto at = [s](std::int64_t part) {
    return [s, part](std::int64_t page, std::int64_t head, std::int64_t token, std::int64_t i) {
      return (((page * 2 + part) * s.page_tokens + token) * s.heads + head) * s.d + i;
    };
  };
  pool.key = at(0);
  pool.value = at(1);
  return pool;
}

/// FlashInfer's HND, equal to Helix's own layout if D = Dv: [page][K, V][head][token][D].
inline KvPool flashinfer_hnd_pool(const KvPoolSizes& s) {
  KvPool pool = helix_pool(s);
  pool.name = "[page][K, V][head][token][D] (HND)";
  return pool;
}

/// One layer of TensorRT-LLM's pool, which stores all layers of a block together: [block][layer][K,
/// V][head][token][D].
inline KvPool tensorrt_llm_pool(const KvPoolSizes& s) {
  constexpr std::int64_t kLayers = 3;
  constexpr std::int64_t kLayer = 1;
  KvPool pool;
  pool.name = "[block][layer][K, V][head][token][D]";
  const std::int64_t part = s.heads * s.page_tokens * s.d;
  const KvStrides rows{kLayers * 2 * part, s.page_tokens * s.d, s.d};
  pool.format = {s.dtype, s.heads, s.d, s.dv, s.page_tokens, false, rows, rows, {}};
  pool.num_pages = s.pages;
  pool.num_elements = s.pages * kLayers * 2 * part;
  pool.k_begin = kLayer * 2 * part;
  pool.v_begin = pool.k_begin + part;
  const auto at = [s](std::int64_t which) {
    return [s, which](std::int64_t page, std::int64_t head, std::int64_t token, std::int64_t i) {
      return ((((page * kLayers + kLayer) * 2 + which) * s.heads + head) * s.page_tokens + token) * s.d + i;
    };
  };
  pool.key = at(0);
  pool.value = at(1);
  return pool;
}

/// A token-major pool of K and a head-major pool of V, so that their strides differ.
inline KvPool unequal_pools(const KvPoolSizes& s) {
  KvPool pool = separate_pools(s, 16);
  pool.name = "K [page][token][head][D], V [page][head][token][Dv]";
  pool.format.v = {s.page_tokens * s.heads * s.dv, s.page_tokens * s.dv, s.dv};
  pool.value = [s, begin = pool.v_begin](std::int64_t page, std::int64_t head, std::int64_t token,
                                         std::int64_t i) {
    return begin + ((page * s.heads + head) * s.page_tokens + token) * s.dv + i;
  };
  return pool;
}

/// Latent rows, [page][token][D].
inline KvPool latent_pool(const KvPoolSizes& s) {
  KvPool pool;
  pool.name = "[page][token][latent, rope]";
  pool.format = KvFormat::latent(s.dtype, s.d, s.dv, s.page_tokens);
  pool.num_pages = s.pages;
  pool.num_elements = s.pages * s.page_tokens * s.d;
  pool.rope_begin = s.dv;
  pool.key = [s](std::int64_t page, std::int64_t, std::int64_t token, std::int64_t i) {
    return (page * s.page_tokens + token) * s.d + i;
  };
  return pool;
}

/// Latents and their rope columns in separate pools: [page][token][Dv] and [page][token][D - Dv].
inline KvPool split_latent_pools(const KvPoolSizes& s) {
  KvPool pool;
  pool.name = "latent [page][token][Dv], rope [page][token][D - Dv]";
  const std::int64_t rope = s.d - s.dv;
  pool.format = {s.dtype,
                 1,
                 s.d,
                 s.dv,
                 s.page_tokens,
                 true,
                 {s.page_tokens * s.dv, 0, s.dv},
                 {},
                 {s.page_tokens * rope, 0, rope}};
  pool.rope_begin = s.pages * s.page_tokens * s.dv + 16;
  pool.num_pages = s.pages;
  pool.num_elements = pool.rope_begin + s.pages * s.page_tokens * rope;
  pool.key = [s, rope, begin = pool.rope_begin](std::int64_t page, std::int64_t, std::int64_t token,
                                                std::int64_t i) {
    const std::int64_t row = page * s.page_tokens + token;
    return i < s.dv ? row * s.dv + i : begin + row * rope + i - s.dv;
  };
  return pool;
}

/// Rows of DType::fp8_ds_mla with four scales: [page][token][512 e4m3, 4 f32, 64 bf16]. Elements are bytes.
inline KvPool mixed_latent_pool(const KvPoolSizes& s) {
  KvPool pool;
  pool.name = "[page][token][656 bytes]";
  pool.format = KvFormat::latent(s.dtype, s.d, s.dv, s.page_tokens);
  pool.num_pages = s.pages;
  pool.num_elements = s.pages * s.page_tokens * 656;
  pool.rope_begin = 512 + 16;
  pool.key = [s](std::int64_t page, std::int64_t, std::int64_t token, std::int64_t i) {
    return (page * s.page_tokens + token) * 656 + i;
  };
  return pool;
}

/// All layouts of K and V.
inline std::vector<MakeKvPool> kv_pool_makers() {
  return {helix_pool,
          vllm_pool,
          flashinfer_nhd_pool,
          flashinfer_hnd_pool,
          tensorrt_llm_pool,
          unequal_pools,
          [](const KvPoolSizes& s) { return separate_pools(s, 24); },     // rows stay aligned to 16 bytes
          [](const KvPoolSizes& s) { return separate_pools(s, 3, 1); }};  // rows are not aligned
}

/// All layouts of latents.
inline std::vector<MakeKvPool> latent_pool_makers() {
  return {latent_pool, split_latent_pools};
}

}  // namespace helix::test
