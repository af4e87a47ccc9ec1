// SPDX-License-Identifier: Apache-2.0
// Views of KV pools that other engines own: one function for each engine's layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/kv_format.hpp>

// Every function leaves to the caller what differs from step to step or rank to rank: page_table with
// max_pages or page_begins, layout and kvp_rank, and for fp8 the scales. Sizes are checked by the operation
// that reads the view (check_kv_view). Decode context parallelism as vLLM has it is KvLayout(dcp_world_size,
// cp_kv_cache_interleave_size): its local block tables fit as they are.

namespace helix {
namespace detail {

inline KvView foreign_view(DType dtype, std::int64_t num_heads, std::int64_t head_dim, std::int64_t value_dim,
                           std::int64_t page_tokens, std::int64_t num_pages) {
  KvView view;
  view.format.dtype = dtype;
  view.format.num_heads = num_heads;
  view.format.head_dim = head_dim;
  view.format.value_dim = value_dim;
  view.format.page_tokens = page_tokens;
  view.num_pages = num_pages;
  return view;
}

/// The view with keys at `pool`, values `v_offset` elements behind them, and rows of both at `strides`.
inline KvView with_rows(KvView view, void* pool, const KvStrides& strides, std::int64_t v_offset) {
  view.format.k = view.format.v = strides;
  view.k = pool;
  if (pool != nullptr) view.v = static_cast<std::byte*>(pool) + v_offset * view.format.element_bytes();
  return view;
}

}  // namespace detail

/// Sizes of one layer's cache in vLLM.
struct VllmKvArgs {
  void* pool = nullptr;  ///< [2, num_blocks, block_size, num_kv_heads, head_size].
  DType dtype = DType::bf16;
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;  ///< Tokens a block.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;
};

/// A layer's cache of vLLM, [2, num_blocks, block_size, num_kv_heads, head_size] with keys before values: the
/// shape that FlashAttentionBackend.get_kv_cache_shape() gives, in its NHD order.
inline KvView vllm_kv(const VllmKvArgs& args) {
  const std::int64_t token = args.num_kv_heads * args.head_size;
  const std::int64_t block = args.block_size * token;
  return detail::with_rows(detail::foreign_view(args.dtype, args.num_kv_heads, args.head_size, args.head_size,
                                                args.block_size, args.num_blocks),
                           args.pool, {block, args.head_size, token}, args.num_blocks * block);
}

/// Sizes of one layer's paged cache in FlashInfer.
struct FlashInferKvArgs {
  void* pool = nullptr;  ///< NHD or HND, as the function called says.
  DType dtype = DType::bf16;
  std::int64_t num_pages = 0;
  std::int64_t page_size = 0;  ///< Tokens a page.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
};

/// FlashInfer's paged_kv_cache in layout NHD, [max_num_pages, 2, page_size, num_kv_heads, head_dim].
inline KvView flashinfer_nhd_kv(const FlashInferKvArgs& args) {
  const std::int64_t token = args.num_kv_heads * args.head_dim;
  const std::int64_t half = args.page_size * token;
  return detail::with_rows(detail::foreign_view(args.dtype, args.num_kv_heads, args.head_dim, args.head_dim,
                                                args.page_size, args.num_pages),
                           args.pool, {2 * half, args.head_dim, token}, half);
}

/// FlashInfer's paged_kv_cache in layout HND, [max_num_pages, 2, num_kv_heads, page_size, head_dim]: the
/// order of Helix's own pool.
inline KvView flashinfer_hnd_kv(const FlashInferKvArgs& args) {
  const std::int64_t head = args.page_size * args.head_dim;
  const std::int64_t half = args.num_kv_heads * head;
  return detail::with_rows(detail::foreign_view(args.dtype, args.num_kv_heads, args.head_dim, args.head_dim,
                                                args.page_size, args.num_pages),
                           args.pool, {2 * half, head, args.head_dim}, half);
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

/// FlashInfer's caches of multi-head latent attention: ckv_cache [num_pages, page_size, head_dim_ckv] and
/// kpe_cache [num_pages, page_size, head_dim_kpe]. Where an engine keeps whole latent rows, [pages, tokens,
/// 576] (vLLM, SGLang, FlashMLA), KvView::of_pool() with KvFormat::latent() describes them.
inline KvView flashinfer_mla_kv(const FlashInferMlaKvArgs& args) {
  KvView view = detail::foreign_view(args.dtype, 1, args.head_dim_ckv + args.head_dim_kpe, args.head_dim_ckv,
                                     args.page_size, args.num_pages);
  view.format.is_latent = true;
  view.format.k = {args.page_size * args.head_dim_ckv, 0, args.head_dim_ckv};
  view.format.rope = {args.page_size * args.head_dim_kpe, 0, args.head_dim_kpe};
  view.k = args.ckv;
  view.rope = args.kpe;
  return view;
}

/// Sizes of one layer's cache in SGLang.
struct SglangKvArgs {
  void* k = nullptr;  ///< [num_slots, num_kv_heads, head_dim].
  void* v = nullptr;  ///< [num_slots, num_kv_heads, v_head_dim].
  DType dtype = DType::bf16;
  std::int64_t num_slots = 0;  ///< Token slots of the pool, the page of padding included: size + page_size.
  std::int64_t page_size = 1;  ///< Tokens a page; page p is slots [p, p + 1) * page_size.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_head_dim = 0;
};

/// The two pools of SGLang's MHATokenToKVPool: k_buffer [size + page_size, head_num, head_dim] and v_buffer
/// [size + page_size, head_num, v_head_dim] of a layer. The page table holds pages, as SGLang's paged
/// backends do; with page_size 1 that is req_to_token as it is.
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

/// One layer in the primary pool of TensorRT-LLM's KVCacheManager: [num_blocks, num_layers, 2, num_kv_heads,
/// tokens_per_block, size_per_head]. Page ids are blocks of the pool, not the offsets of its
/// host_kv_cache_block_offsets, which count a block's layers and halves.
/// @throws Error(invalid_argument) if the pool has no such layer.
inline KvView tensorrt_llm_kv(const TensorRtLlmKvArgs& args) {
  HELIX_EXPECTS(args.layer >= 0 && args.layer < args.num_layers, ErrorCode::invalid_argument,
                "tensorrt_llm_kv: layer is ", args.layer, "; the pool has ", args.num_layers, " layers");
  const std::int64_t head = args.tokens_per_block * args.size_per_head;
  const std::int64_t half = args.num_kv_heads * head;
  KvView view =
      detail::with_rows(detail::foreign_view(args.dtype, args.num_kv_heads, args.size_per_head,
                                             args.size_per_head, args.tokens_per_block, args.num_blocks),
                        args.pool, {args.num_layers * 2 * half, head, args.size_per_head}, half);
  const std::int64_t layer_bytes = args.layer * 2 * half * view.format.element_bytes();
  if (args.pool != nullptr) {
    view.k = static_cast<std::byte*>(view.k) + layer_bytes;
    view.v = static_cast<std::byte*>(view.v) + layer_bytes;
  }
  return view;
}

}  // namespace helix
