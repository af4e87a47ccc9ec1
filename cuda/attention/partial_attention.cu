// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::partial_attention: arguments, choice of the kernel, launches.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/workspace.hpp>

#include "cuda/attention/params.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {
namespace {

/// From the first byte of `memory` that is aligned as WorkspaceArena's pieces are.
std::span<std::byte> aligned(std::span<std::byte> memory) {
  void* base = memory.data();
  std::size_t space = memory.size();
  base = std::align(WorkspaceArena::kAlignment, 1, base, space);
  return {static_cast<std::byte*>(base), space};
}

/// Partial results: two row blocks a block of the grid, with their max and sum.
struct Partials {
  std::span<std::byte> out, max, sum;
  Partials(WorkspaceArena& arena, std::int64_t blocks, std::int64_t rows, std::int64_t value_dim)
      : out(arena.take_bytes(static_cast<std::size_t>(2 * blocks * rows * partial_stride(value_dim) * 4))),
        max(arena.take_bytes(static_cast<std::size_t>(2 * blocks * rows * 4))),
        sum(arena.take_bytes(static_cast<std::size_t>(2 * blocks * rows * 4))) {}
};

}  // namespace

template <class T>
std::size_t Operators<T>::partial_attention_workspace_bytes(std::int64_t num_tokens,
                                                            std::int64_t num_query_heads,
                                                            std::int64_t head_dim,
                                                            std::int64_t value_dim) const {
  if (num_tokens <= 0 || num_query_heads <= 0) return 0;
  WorkspaceArena arena;
  Partials(arena, kBlocksPerSm * state_->num_sms, std::max(kMaxRows, portable_rows(head_dim, value_dim)),
           value_dim);
  return arena.used_bytes() + WorkspaceArena::kAlignment;
}

template <class T>
void Operators<T>::partial_attention(const PartialAttentionArgs<T>& args, Stream stream) const {
  const Batch& batch = args.batch;
  const KvView& kv = args.kv;
  const std::int64_t heads = args.q.extent(1);
  if (batch.num_tokens() == 0 || heads == 0) return;
  const DeviceScope scope(state_->device);
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(kv.dtype));

  AttentionParams p;
  p.dtype = kDTypeOf<T>;
  p.q = args.q.data();
  p.q_token_stride = args.q.stride(0);
  p.q_head_stride = args.q.stride(1);
  p.out = args.out.data();
  p.out_token_stride = args.out.stride(0);
  p.out_head_stride = args.out.stride(1);
  p.lse = args.lse.data();
  p.lse_token_stride = args.lse.stride(0);
  p.lse_head_stride = args.lse.stride(1);
  p.is_out_aligned = common_alignment({address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                                       step_of<T>(args.out.stride(1))}) >= 4 * sizeof(T);
  p.first_out_token = static_cast<int>(args.first_out_token);
  p.headers = args.headers;
  p.positions = batch.positions;
  p.head_bytes = kv.page_tokens * kv.head_dim * element_bytes;
  p.keys = static_cast<const std::byte*>(kv.pages);
  p.values = kv.is_mla ? p.keys : p.keys + kv.num_heads * p.head_bytes;
  p.page_bytes = kv.page_elements() * element_bytes;
  p.row_bytes = kv.head_dim * element_bytes;
  p.page_tokens = Divisor(static_cast<int>(kv.page_tokens));
  p.page_table = kv.page_table;
  p.max_pages = kv.max_pages;
  p.k_scale = kv.k_scale;
  p.v_scale = kv.is_mla ? kv.k_scale : kv.v_scale;
  p.layout = kv.layout;
  p.kvp_rank = kv.kvp_rank;
  p.kv_heads = Divisor(static_cast<int>(kv.num_heads));
  p.group = Divisor(static_cast<int>(heads / kv.num_heads));
  p.head_dim = static_cast<int>(kv.head_dim);
  p.value_dim = static_cast<int>(kv.value_dim);
  p.scale = args.scale;
  p.soft_cap = args.soft_cap;
  p.window = args.window;

  const auto& offsets = batch.query_offsets_host;
  std::int64_t longest = 0;
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b)
    longest = std::max<std::int64_t>(longest, offsets[b + 1] - offsets[b]);
  const bool is_aligned = common_alignment({address_of(args.q.data()), step_of<T>(args.q.stride(0)),
                                            step_of<T>(args.q.stride(1)), address_of(kv.pages)}) == 16;
  const bool is_tensor = has_tensor_attention(kDTypeOf<T>, kv.dtype, kv.head_dim, kv.value_dim) &&
                         !kv.is_mla && state_->is_hopper && is_aligned;
  p.rows = Divisor(is_tensor
                       ? static_cast<int>(std::min<std::int64_t>(tensor_rows(kv.head_dim), longest * p.group))
                       : portable_rows(kv.head_dim, kv.value_dim));
  const int all_blocks = kBlocksPerSm * state_->num_sms;
  const int blocks =
      state_->attention_blocks > 0 ? std::min(all_blocks, state_->attention_blocks) : all_blocks;

  WorkspaceArena arena(aligned(args.workspace));
  const Partials partials(arena, all_blocks, p.rows, p.value_dim);
  p.partial_out = reinterpret_cast<float*>(partials.out.data());
  p.partial_max = reinterpret_cast<float*>(partials.max.data());
  p.partial_sum = reinterpret_cast<float*>(partials.sum.data());
  p.counters = reinterpret_cast<int*>(state_->attention_counters.data());

  // As many sequences and row blocks a launch as the plan holds: prefill takes several.
  const int most = std::min(kMaxRowBlocks, static_cast<int>(kAttentionCounters) / p.kv_heads);
  const auto row_blocks = [&](std::size_t b) {
    return static_cast<int>(((offsets[b + 1] - offsets[b]) * p.group + p.rows - 1) / p.rows);
  };
  const std::size_t sequences = offsets.size() - 1;
  int skipped = 0;  // row blocks of sequence `first` that earlier launches did
  for (std::size_t first = 0; first < sequences;) {
    std::size_t end = first;
    int count = -skipped;
    p.is_one_row_block_each = skipped == 0;
    while (end < sequences && end - first < kMaxSequences && count < most) {
      const int blocks_of_sequence = row_blocks(end++);
      count += blocks_of_sequence;
      p.is_one_row_block_each = p.is_one_row_block_each && blocks_of_sequence == 1;
    }
    const int taken = std::min(count, most);
    std::copy(offsets.begin() + static_cast<std::ptrdiff_t>(first),
              offsets.begin() + static_cast<std::ptrdiff_t>(end) + 1, p.query_offsets);
    p.slots = batch.sequence_slots + first;
    p.num_sequences = static_cast<int>(end - first);
    p.first_token = offsets[first];
    p.num_tokens = offsets[end] - offsets[first];
    p.first_row_block = skipped;
    p.num_row_blocks = taken;
    if (taken > 0) {
      if (is_tensor) {
        launch_tensor_attention(p, blocks, blocks == all_blocks, stream.handle());
      } else {
        launch_portable_attention(p, kv.dtype, blocks, stream.handle());
      }
      p.headers.message = nullptr;  // once is enough
    }
    if (count > most) {  // the last sequence goes on in the next launch
      const int rest = count - most;
      skipped = row_blocks(end - 1) - rest;
      first = end - 1;
    } else {
      skipped = 0;
      first = end;
    }
  }
}

#define HELIX_INSTANTIATE(T)                                                                       \
  template void Operators<T>::partial_attention(const PartialAttentionArgs<T>&, Stream) const;     \
  template std::size_t Operators<T>::partial_attention_workspace_bytes(std::int64_t, std::int64_t, \
                                                                       std::int64_t, std::int64_t) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
