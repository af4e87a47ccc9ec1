// SPDX-License-Identifier: Apache-2.0
// Converts torch's tensors for Helix, and implements the operators over any Helix backend. Memory comes from
// torch and belongs to the stream on which the caller queues.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>

namespace helix_torch {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;  ///< An output and its log-sum-exp.

/// Throws unless `tensor` has `dim` dimensions, the type, and the given device.
inline void check_tensor(const char* name, const at::Tensor& tensor, std::int64_t dim, at::ScalarType dtype,
                         const at::Tensor& beside) {
  TORCH_CHECK(tensor.dim() == dim, name, " is ", tensor.sizes(), "; give ", dim, " dimensions");
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " is of ", tensor.scalar_type(), "; give ", dtype);
  TORCH_CHECK(tensor.device() == beside.device(), name, " is on ", tensor.device(), "; give it on ",
              beside.device());
}

template <class T, int R>
helix::TensorView<T, R> view_of(const at::Tensor& tensor) {
  typename helix::TensorView<T, R>::extents_type extents{}, strides{};
  std::copy_n(tensor.sizes().begin(), R, extents.begin());
  std::copy_n(tensor.strides().begin(), R, strides.begin());
  return {static_cast<T*>(tensor.data_ptr()), extents, strides};
}

/// A new tensor with the contents of `view`. Queued on torch's current stream.
template <class T, int R>
at::Tensor copy_of(const helix::TensorView<const T, R>& view, const at::TensorOptions& options) {
  return at::from_blob(const_cast<T*>(view.data()), at::IntArrayRef(view.extents()),
                       at::IntArrayRef(view.strides()), options)
      .clone(at::MemoryFormat::Contiguous);
}

inline helix::DType dtype_of(const at::Tensor& kv_cache) {
  switch (kv_cache.scalar_type()) {
    case at::kFloat:
      return helix::DType::f32;
    case at::kHalf:
      return helix::DType::f16;
    case at::kBFloat16:
      return helix::DType::bf16;
    case at::kFloat8_e4m3fn:
      return helix::DType::fp8_e4m3;
    default:
      TORCH_CHECK(false, "kv_cache is of ", kv_cache.scalar_type(),
                  "; give Float, Half, BFloat16 or Float8_e4m3fn");
  }
}

/// The arguments of partial_attention.
struct AttentionCall {
  /// [tokens, heads, D]; tokens / B query tokens per sequence, in order, which are its last tokens.
  const at::Tensor& q;
  /// [2, blocks, block_size, KV heads, D], or with the 2 as second dimension; any strides.
  const at::Tensor& kv_cache;
  const at::Tensor& block_table;  ///< [B, blocks of a sequence] int32.
  const at::Tensor& seq_lens;     ///< [B] int32 or int64: tokens on all KVP ranks, including those of q.
  double scale;
  std::int64_t kvp_size, kvp_rank, interleave;
  bool block_first;
  std::int64_t window;
  double soft_cap;
};

inline void check(const AttentionCall& call) {
  const at::Tensor& q = call.q;
  check_tensor("q", q, 3, q.scalar_type(), q);
  check_tensor("kv_cache", call.kv_cache, 5, call.kv_cache.scalar_type(), q);
  check_tensor("block_table", call.block_table, 2, at::kInt, q);
  check_tensor("seq_lens", call.seq_lens, 1, call.seq_lens.scalar_type() == at::kInt ? at::kInt : at::kLong,
               q);
  const std::int64_t sequences = call.seq_lens.size(0);
  TORCH_CHECK(call.block_table.size(0) == sequences, "block_table has ", call.block_table.size(0),
              " rows and seq_lens ", sequences, " sequences; give as many");
  TORCH_CHECK(sequences > 0 ? q.size(0) % sequences == 0 : q.size(0) == 0, "q has ", q.size(0),
              " tokens for ", sequences, " sequences; give as many of each sequence");
  TORCH_CHECK(call.kv_cache.size(call.block_first ? 1 : 0) == 2, "kv_cache is ", call.kv_cache.sizes(),
              " with block_first ", call.block_first, "; dimension ", call.block_first ? 1 : 0,
              " must be 2: K, then V");
  TORCH_CHECK(call.kv_cache.stride(4) == 1, "kv_cache has a last stride of ", call.kv_cache.stride(4),
              "; it must be 1");
  TORCH_CHECK(call.block_table.stride(1) == 1 || call.block_table.size(1) <= 1,
              "block_table has a last stride of ", call.block_table.stride(1), "; it must be 1");
  TORCH_CHECK(call.kvp_rank >= 0 && call.kvp_rank < call.kvp_size, "kvp_rank is ", call.kvp_rank,
              "; give one in [0, ", call.kvp_size, ")");
}

/// The cache as it lies in memory. A tensor has strides, so one function serves NHD, HND, both places of the
/// 2, and a single layer of a larger pool. foreign_kv.hpp is for engines that have only a pointer.
inline helix::KvView kv_view_of(const AttentionCall& call) {
  const at::Tensor k = call.kv_cache.select(call.block_first ? 1 : 0, 0);
  const at::Tensor v = call.kv_cache.select(call.block_first ? 1 : 0, 1);
  helix::KvView kv;
  kv.format = {.dtype = dtype_of(k),
               .num_heads = k.size(2),
               .head_dim = k.size(3),
               .value_dim = k.size(3),
               .page_tokens = k.size(1),
               .k = {.page = k.stride(0), .head = k.stride(2), .token = k.stride(1)},
               .v = {.page = v.stride(0), .head = v.stride(2), .token = v.stride(1)}};
  kv.k = k.data_ptr();
  kv.v = v.data_ptr();
  kv.num_pages = k.size(0);
  kv.page_table = call.block_table.const_data_ptr<std::int32_t>();
  // The rows may be slices of a longer table.
  kv.max_pages = call.block_table.size(0) > 1 ? call.block_table.stride(0) : call.block_table.size(1);
  kv.layout = helix::KvLayout(call.kvp_size, call.interleave);
  kv.kvp_rank = call.kvp_rank;
  return kv;
}

/// The batch of a call: each sequence contributes its last tokens / B tokens.
struct Step {
  std::vector<std::int32_t> query_offsets_host;
  at::Tensor query_offsets, positions, slots;

  Step(const at::Tensor& q, const at::Tensor& seq_lens) {
    const std::int64_t sequences = seq_lens.size(0), each = sequences > 0 ? q.size(0) / sequences : 0;
    for (std::int64_t b = 0; b <= sequences; ++b)
      query_offsets_host.push_back(static_cast<std::int32_t>(b * each));
    const at::TensorOptions integers = at::TensorOptions().dtype(at::kInt).device(q.device());
    slots = at::arange(sequences + 1, integers);
    query_offsets = each == 1 ? slots : slots * each;
    at::Tensor last = seq_lens.to(at::kLong).sub(1);
    // A sequence with fewer tokens than queries is padded at its front with position -1.
    if (each > 1) last = last.unsqueeze(1) + at::arange(1 - each, 1, last.options());
    positions = last.clamp_min(-1).contiguous();
  }

  helix::Batch batch() const {
    return {query_offsets_host, query_offsets.const_data_ptr<std::int32_t>(),
            positions.const_data_ptr<std::int64_t>(), slots.const_data_ptr<std::int32_t>()};
  }
};

template <class B>
TensorPair partial_attention(B& backend, const AttentionCall& call, typename B::Stream stream) {
  using T = typename B::Activation;
  const at::Tensor& q = call.q;
  const helix::KvView kv = kv_view_of(call);
  const Step step(q, call.seq_lens);
  const at::Tensor out = at::empty({q.size(0), q.size(1), kv.format.value_dim}, q.options());
  const at::Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  const std::size_t bytes = backend.partial_attention_workspace_bytes(
      q.size(0), q.size(1), kv.format.head_dim, kv.format.value_dim);
  const at::Tensor workspace = at::empty({static_cast<std::int64_t>(bytes)}, q.options().dtype(at::kByte));
  helix::partial_attention(backend,
                           {.q = view_of<const T, 3>(q),
                            .batch = step.batch(),
                            .kv = kv,
                            .target = {.out = view_of<T, 3>(out), .lse = view_of<float, 2>(lse)},
                            .scale = static_cast<float>(call.scale),
                            .window = call.window,
                            .soft_cap = static_cast<float>(call.soft_cap),
                            .workspace = {static_cast<std::byte*>(workspace.data_ptr()), bytes}},
                           stream);
  if (q.is_cpu()) backend.synchronize(stream);  // on a GPU torch's own stream orders this
  return {out, lse};
}

/// The exchange of one size of a group; KvpAllToAll owns the messages.
template <class B>
struct Exchange {
  B backend;
  /// The queue of the CPU backend; GPUs use torch's current stream.
  typename B::Stream stream;
  helix::KvpAllToAll<B> all_to_all;

  Exchange(B rank, typename B::Stream queue, const helix::KvpAllToAllSpec& spec)
      : backend(std::move(rank)), stream(std::move(queue)), all_to_all(backend, spec) {}
};

inline void check_partials(const at::Tensor& out, const at::Tensor& lse,
                           const std::optional<at::Tensor>& positions) {
  check_tensor("out", out, 3, out.scalar_type(), out);
  check_tensor("lse", lse, 2, at::kFloat, out);
  if (!positions) return;
  check_tensor("positions", *positions, 1, at::kLong, out);
  TORCH_CHECK(positions->size(0) == out.size(0) && positions->is_contiguous(), "positions is ",
              positions->sizes(), " with stride ", positions->stride(0), " for ", out.size(0),
              " tokens; give one a token, contiguous");
}

template <class B>
auto send(Exchange<B>& exchange, const at::Tensor& out, const at::Tensor& lse,
          const std::optional<at::Tensor>& positions, typename B::Stream stream) {
  using T = typename B::Activation;
  return exchange.all_to_all.exchange({view_of<T, 3>(out), view_of<float, 2>(lse)},
                                      positions ? positions->const_data_ptr<std::int64_t>() : nullptr,
                                      stream);
}

template <class B>
TensorPair exchange_partials(Exchange<B>& exchange, const at::Tensor& out, const at::Tensor& lse,
                             const std::optional<at::Tensor>& positions, typename B::Stream stream) {
  const auto received = send(exchange, out, lse, positions, stream);
  if (out.is_cpu()) exchange.backend.synchronize(stream);
  // Copies are needed because the next exchange overwrites these messages.
  return {copy_of(received.out, out.options()), copy_of(received.lse, lse.options())};
}

template <class B>
TensorPair combine_partials(B& backend, const helix::TensorView<const typename B::Activation, 4>& partial_out,
                            const helix::TensorView<const float, 3>& partial_lse,
                            const std::optional<at::Tensor>& sink, const at::TensorOptions& options,
                            typename B::Stream stream) {
  using T = typename B::Activation;
  const std::int64_t tokens = partial_out.extent(1), heads = partial_out.extent(2);
  const at::Tensor out = at::empty({tokens, heads, partial_out.extent(3)}, options);
  const at::Tensor lse = at::empty({tokens, heads}, options.dtype(at::kFloat));
  if (sink) {
    check_tensor("sink", *sink, 1, at::kFloat, out);
    TORCH_CHECK(sink->size(0) == heads && sink->is_contiguous(), "sink is ", sink->sizes(), " with stride ",
                sink->stride(0), " for ", heads, " heads; give one a head, contiguous");
  }
  helix::lse_combine(backend,
                     {.partial_out = partial_out,
                      .partial_lse = partial_lse,
                      .sinks = sink ? sink->const_data_ptr<float>() : nullptr,
                      .out = view_of<T, 3>(out),
                      .lse = view_of<float, 2>(lse)},
                     stream);
  if (out.is_cpu()) backend.synchronize(stream);
  return {out, lse};
}

inline void check_combine(const at::Tensor& partial_out, const at::Tensor& partial_lse) {
  check_tensor("partial_out", partial_out, 4, partial_out.scalar_type(), partial_out);
  check_tensor("partial_lse", partial_lse, 3, at::kFloat, partial_out);
}

}  // namespace helix_torch
