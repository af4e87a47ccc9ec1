// SPDX-License-Identifier: Apache-2.0
// partial_attention: queries x this rank's KV shard -> output and log-sum-exp, which combine exactly with
// those of other shards.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/backend/attention.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

namespace helix {
namespace detail {

/// Throws Error(invalid_argument) unless batch, view, q and target can be read or written and fit each other.
template <class T>
void check_partial_attention(const PartialAttentionArgs<T>& args) {
  check_batch("partial_attention", args.batch);
  const KvFormat& format = args.kv.format;
  const PartialTarget<T>& target = args.target;
  const std::int64_t tokens = args.batch.num_tokens();
  const std::int64_t end = args.batch.first_token() + tokens;
  const std::int64_t heads = args.q.extent(1);
  check_kv_view("partial_attention", args.kv);
  HELIX_EXPECTS(args.q.extent(0) >= end && target.first_token >= 0 &&
                    (tokens == 0 || target.first_token <= args.batch.first_token()) &&
                    target.out.extent(0) >= end - target.first_token &&
                    target.lse.extent(0) >= end - target.first_token,
                ErrorCode::invalid_argument, "partial_attention: the batch has tokens [",
                args.batch.first_token(), ", ", end, "); q has ", args.q.extent(0), " tokens, out ",
                target.out.extent(0), " and lse ", target.lse.extent(0), " from token ", target.first_token);
  HELIX_EXPECTS(target.out.extent(1) == heads && target.lse.extent(1) == heads, ErrorCode::invalid_argument,
                "partial_attention: q has ", heads, " heads; out has ", target.out.extent(1), ", lse ",
                target.lse.extent(1));
  HELIX_EXPECTS(heads >= 1 && heads <= kMaxCount, ErrorCode::invalid_argument, "partial_attention: q has ",
                heads, " heads; there must be 1 to ", kMaxCount);
  HELIX_EXPECTS(heads % format.num_heads == 0, ErrorCode::invalid_argument, "partial_attention: ", heads,
                " query heads do not divide into ", format.num_heads, " KV heads");
  HELIX_EXPECTS(args.q.extent(2) == format.head_dim && target.out.extent(2) == format.value_dim,
                ErrorCode::invalid_argument, "partial_attention: head_dim of q is ", args.q.extent(2),
                " and of the cache ", format.head_dim, "; value_dim of out is ", target.out.extent(2),
                " and of the cache ", format.value_dim);
  HELIX_EXPECTS(args.q.stride(2) == 1 && target.out.stride(2) == 1, ErrorCode::invalid_argument,
                "partial_attention: the last stride must be 1; q has ", args.q.stride(2), ", out has ",
                target.out.stride(2));
  check_scores("partial_attention", "scale", args.scale, args.window, args.soft_cap);
  check_given("partial_attention", "q", args.q.data(), tokens);
  check_given("partial_attention", "target.out", target.out.data(), tokens);
  check_given("partial_attention", "target.lse", target.lse.data(), tokens);
  check_elements_apart("partial_attention", "target.out", target.out);
  check_elements_apart("partial_attention", "target.lse", target.lse);
  check_workspace("partial_attention", args.workspace);
}

}  // namespace detail

/// Computes out = softmax(scale * q k^T) v and lse over the local shard, for each query head and token; see
/// PartialAttentionArgs. Local to the rank (not collective). Queued on `stream`; allocates nothing;
/// capturable. Calls of one cuda::Operators share counters on the device: order calls on several streams by
/// events. Query heads of KV head h are [h * G, (h + 1) * G), G = (Hq/TPA) / (Hkv/TPA). Source: paper section
/// 2.1.1.
/// @throws Error(invalid_argument) if shapes contradict each other, rows of out or lse overlap, an address or
/// a field of the batch or the KV view is missing, or scale or soft_cap is not finite; Error(capacity) if the
/// workspace is smaller than backend.partial_attention_workspace_bytes(batch tokens, Hq/TPA, D, Dv);
/// Error(unsupported) for what the backend's kernels are not built for: on GPUs head sizes above 1024, more
/// than 65536 KV heads, sequences that may have nearly 2^31 tokens on a rank, nearly 2^35 of them times KV
/// heads, or 2^31 query rows of a KV head. Page ids that the pool does not have fail the stream of
/// cpu::Backend; GPUs do not check them.
template <PartialAttentionBackend B>
void partial_attention(B& backend, const PartialAttentionArgs<typename B::Activation>& args,
                       typename B::Stream stream) {
  detail::check_partial_attention(args);
  const KvFormat& format = args.kv.format;
  const std::int64_t tokens = args.batch.num_tokens();
  const std::size_t needed =
      backend.partial_attention_workspace_bytes(tokens, args.q.extent(1), format.head_dim, format.value_dim);
  HELIX_EXPECTS(args.workspace.size() >= needed, ErrorCode::capacity, "partial_attention: workspace is ",
                args.workspace.size(), " bytes; ", needed,
                " are needed: size it with the backend's partial_attention_workspace_bytes()");
  if (tokens == 0) return;
  backend.partial_attention(args, stream);
}

/// Does not compile: the error names T and the activation type of B.
template <PartialAttentionBackend B, detail::OtherActivation<B> T>
void partial_attention(B&, const PartialAttentionArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
