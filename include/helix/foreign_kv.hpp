// SPDX-License-Identifier: Apache-2.0
// Views of KV pools that other engines own: one function for each engine's layout.
#pragma once

#include <array>
#include <cstdint>

#include <helix/dense_kv.hpp>
#include <helix/dtype.hpp>
#include <helix/kv_format.hpp>

// The caller of every function fills in what differs from step to step or rank to rank: page_table with
// max_pages or page_begins, layout and kvp_rank, and for fp8 the scales. The operation that reads the view
// checks the sizes (check_kv_view); the functions themselves throw Error(invalid_argument) only for pools
// that exceed the address space and layers that do not exist. vLLM's decode context parallelism is
// KvLayout(dcp_world_size, cp_kv_cache_interleave_size); its local block tables fit as they are.
//
// Latents: vLLM's [num_blocks, block_size, 576], SGLang's MLATokenToKVPool [size + page_size, 1, 576] and
// FlashMLA's are whole rows, for which KvView::of_pool() with KvFormat::latent() is enough. Use
// DType::fp8_ds_mla for vLLM's rows of 656 bytes, which carry scales of their own. nvfp4 has no view.

namespace helix {

/// Sizes of one layer's cache in vLLM.
struct VllmKvArgs {
  void* pool = nullptr;  ///< [2, num_blocks, block_size, num_kv_heads, head_size], or as the flags below say.
  DType dtype = DType::bf16;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;  ///< Tokens a block.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;
  /// Whether get_kv_cache_shape() begins with num_blocks and has the 2 second, as FlashInfer's backend does.
  bool is_block_first = false;
  bool is_hnd = false;  ///< Whether get_kv_cache_layout() is "HND": heads lie before tokens in memory.
};

/// View of one layer's cache in vLLM. Its shape is that of the attention backend's get_kv_cache_shape(), by
/// default [2, num_blocks, block_size, num_kv_heads, head_size]. Its order in memory is that of
/// get_kv_cache_stride_order().
inline KvView vllm_kv(const VllmKvArgs& args) {
  using enum KvAxis;
  const std::array<KvAxis, 2> outer = args.is_block_first ? std::array{page, half} : std::array{half, page};
  const std::array<KvAxis, 2> inner = args.is_hnd ? std::array{head, token} : std::array{token, head};
  return dense_kv({.pool = args.pool,
                   .dtype = args.dtype,
                   .num_pages = args.num_blocks,
                   .num_kv_heads = args.num_kv_heads,
                   .page_tokens = args.block_size,
                   .head_dim = args.head_size},
                  {layer, outer[0], outer[1], inner[0], inner[1]});
}

/// Sizes of one layer's cache in vLLM, for keys and values of different sizes.
struct VllmDiffKvArgs {
  void* pool = nullptr;  ///< [num_blocks, block_size, num_kv_heads, head_size + head_size_v].
  DType dtype = DType::bf16;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;  ///< Tokens a block.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;
  std::int64_t head_size_v = 0;
  bool is_hnd = false;  ///< Whether get_kv_cache_layout() is "HND".
};

/// View of one layer's cache of vLLM's FlashAttentionDiffKVBackend, where a token's value follows its key.
inline KvView vllm_diffkv_kv(const VllmDiffKvArgs& args) {
  const std::int64_t row = detail::size_sum(args.head_size, args.head_size_v);
  KvView view;
  view.format = args.is_hnd ? KvFormat::head_major(args.dtype, args.num_kv_heads, row, row, args.block_size)
                            : KvFormat::token_major(args.dtype, args.num_kv_heads, row, row, args.block_size);
  view.format.head_dim = args.head_size;
  view.format.value_dim = args.head_size_v;
  view.format.k.page = detail::size_product(args.num_kv_heads, args.block_size, row);
  view.format.v = view.format.k;
  view.num_pages = args.num_blocks;
  view.k = args.pool;
  view.v = detail::behind(args.pool, args.head_size, args.dtype);
  return view;
}

/// Sizes of one layer's paged cache in FlashInfer.
struct FlashInferKvArgs {
  void* pool = nullptr;  ///< The pool, NHD or HND as the called function says.
  DType dtype = DType::bf16;
  std::int64_t num_pages = 0;
  std::int64_t page_size = 0;  ///< Tokens a page.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  /// Second tensor if paged_kv_cache is a tuple (k_cache, v_cache); `pool` is then the first. Each has the
  /// shape that the called function says, without the 2.
  void* v_cache = nullptr;
};

namespace detail {

inline KvView flashinfer_kv(const FlashInferKvArgs& args, const std::array<KvAxis, 2>& inner) {
  using enum KvAxis;
  const bool is_tuple = args.v_cache != nullptr;
  KvView view = dense_kv({.pool = args.pool,
                          .dtype = args.dtype,
                          .num_pages = args.num_pages,
                          .num_kv_heads = args.num_kv_heads,
                          .page_tokens = args.page_size,
                          .head_dim = args.head_dim},
                         {layer, is_tuple ? half : page, is_tuple ? page : half, inner[0], inner[1]});
  if (is_tuple) view.v = args.v_cache;
  return view;
}

}  // namespace detail

/// View of FlashInfer's paged_kv_cache in layout NHD, [max_num_pages, 2, page_size, num_kv_heads, head_dim].
inline KvView flashinfer_nhd_kv(const FlashInferKvArgs& args) {
  return detail::flashinfer_kv(args, {KvAxis::token, KvAxis::head});
}

/// View of FlashInfer's paged_kv_cache in layout HND, [max_num_pages, 2, num_kv_heads, page_size, head_dim]:
/// the order of Helix's own pool.
inline KvView flashinfer_hnd_kv(const FlashInferKvArgs& args) {
  return detail::flashinfer_kv(args, {KvAxis::head, KvAxis::token});
}

/// Sizes of one layer's latent cache in FlashInfer.
struct FlashInferMlaKvArgs {
  void* ckv = nullptr;  ///< [num_pages, page_size, head_dim_ckv].
  void* kpe = nullptr;  ///< [num_pages, page_size, head_dim_kpe].
  DType dtype = DType::bf16;
  std::int64_t num_pages = 0;
  std::int64_t page_size = 0;     ///< Tokens a page.
  std::int64_t head_dim_ckv = 0;  ///< Latent columns, the value of a token: 512 in DeepSeek's models.
  std::int64_t head_dim_kpe = 0;  ///< Rope columns: 64.
};

/// View of FlashInfer's caches of multi-head latent attention: ckv_cache [num_pages, page_size, head_dim_ckv]
/// and kpe_cache [num_pages, page_size, head_dim_kpe].
inline KvView flashinfer_mla_kv(const FlashInferMlaKvArgs& args) {
  KvView view;
  view.format = KvFormat::latent(args.dtype, detail::size_sum(args.head_dim_ckv, args.head_dim_kpe),
                                 args.head_dim_ckv, args.page_size);
  view.format.k = {detail::size_product(args.page_size, args.head_dim_ckv), 0, args.head_dim_ckv};
  view.format.rope = {detail::size_product(args.page_size, args.head_dim_kpe), 0, args.head_dim_kpe};
  view.num_pages = args.num_pages;
  view.k = args.ckv;
  view.rope = args.kpe;
  return view;
}

/// Sizes of one layer's cache in SGLang.
struct SglangKvArgs {
  void* k = nullptr;  ///< [num_slots, num_kv_heads, head_dim].
  void* v = nullptr;  ///< [num_slots, num_kv_heads, v_head_dim].
  DType dtype = DType::bf16;
  std::int64_t num_slots = 0;  ///< Token slots of the pool, including the page of padding: size + page_size.
  std::int64_t page_size = 1;  ///< Tokens a page; page p is slots [p * page_size, (p + 1) * page_size).
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_head_dim = 0;
};

/// View of one layer in the two pools of SGLang's MHATokenToKVPool: k_buffer [size + page_size, head_num,
/// head_dim] and v_buffer [size + page_size, head_num, v_head_dim]. The page table holds pages, as in
/// SGLang's paged backends; with page_size 1 it is req_to_token as it is.
inline KvView sglang_kv(const SglangKvArgs& args) {
  KvView view;
  view.format =
      KvFormat::token_major(args.dtype, args.num_kv_heads, args.head_dim, args.v_head_dim, args.page_size);
  view.num_pages = args.page_size > 0 ? args.num_slots / args.page_size : 0;
  view.k = args.k;
  view.v = args.v;
  return view;
}

/// Sizes of a pool of TensorRT-LLM, which holds several layers.
struct TensorRtLlmKvArgs {
  void* pool = nullptr;  ///< [num_blocks, num_layers, 2, num_kv_heads, tokens_per_block, size_per_head].
  DType dtype = DType::bf16;
  std::int64_t num_blocks = 0;
  std::int64_t num_layers = 0;
  std::int64_t layer = 0;  ///< Layer of the pool that the view shows.
  std::int64_t num_kv_heads = 0;
  std::int64_t tokens_per_block = 0;
  std::int64_t size_per_head = 0;
};

/// View of one layer in the primary pool of TensorRT-LLM's KVCacheManager: [num_blocks, num_layers, 2,
/// num_kv_heads, tokens_per_block, size_per_head]. Page ids are blocks of the pool, not the offsets of its
/// host_kv_cache_block_offsets, which count a block's layers and halves.
/// @throws Error(invalid_argument) if the pool has no such layer.
inline KvView tensorrt_llm_kv(const TensorRtLlmKvArgs& args) {
  using enum KvAxis;
  return dense_kv({.pool = args.pool,
                   .dtype = args.dtype,
                   .num_pages = args.num_blocks,
                   .num_layers = args.num_layers,
                   .layer = args.layer,
                   .num_kv_heads = args.num_kv_heads,
                   .page_tokens = args.tokens_per_block,
                   .head_dim = args.size_per_head},
                  {page, layer, half, head, token});
}

/// Sizes of a pool of latents in TensorRT-LLM, which holds several layers.
struct TensorRtLlmMlaKvArgs {
  void* pool = nullptr;  ///< [num_blocks, num_layers, 1, tokens_per_block, kv_lora_rank + qk_rope_head_dim].
  DType dtype = DType::bf16;
  std::int64_t num_blocks = 0;
  std::int64_t num_layers = 0;
  std::int64_t layer = 0;  ///< Layer of the pool that the view shows.
  std::int64_t tokens_per_block = 0;
  std::int64_t kv_lora_rank = 0;      ///< Latent columns, the value of a token: 512 in DeepSeek's models.
  std::int64_t qk_rope_head_dim = 0;  ///< Rope columns: 64.
};

/// View of one layer of latents in a pool of TensorRT-LLM's KVCacheManager of type SELFKONLY, whose blocks
/// hold keys alone. Page ids are blocks of the pool, as in tensorrt_llm_kv().
/// @throws Error(invalid_argument) if the pool has no such layer.
inline KvView tensorrt_llm_mla_kv(const TensorRtLlmMlaKvArgs& args) {
  detail::check_layer_of_pool(args.layer, args.num_layers);
  KvView view;
  view.format = KvFormat::latent(args.dtype, detail::size_sum(args.kv_lora_rank, args.qk_rope_head_dim),
                                 args.kv_lora_rank, args.tokens_per_block);
  const std::int64_t layer_elements = view.format.k.page;
  view.format.k.page = view.format.rope.page = detail::pool_elements(layer_elements, args.num_layers);
  view.num_pages = args.num_blocks;
  view.k = detail::behind(args.pool, args.layer * layer_elements, args.dtype);
  view.rope = detail::behind(view.k, args.kv_lora_rank, args.dtype);
  return view;
}

}  // namespace helix
