// SPDX-License-Identifier: Apache-2.0
// partial_attention: queries x this rank's KV shard -> output and log-sum-exp that combine exactly with other
// shards'.
#pragma once

#include <helix/backend.hpp>
#include <helix/error.hpp>

namespace helix {

/// Attention over one shard. Shards combine exactly: out = sum_r exp(lse_r - LSE) out_r, LSE = log(sum_r
/// exp(lse_r)).
template <class T>
struct Partial {
  TensorView<T, 3> out;      ///< [tokens, heads, Dv]; 0 where the shard holds no visible token
  TensorView<float, 2> lse;  ///< [tokens, heads], natural log; -inf there
};

/// out = softmax(scale * q k^T) v and lse over the local shard, per query head and token; see
/// PartialAttentionArgs. Local to the rank (not collective). Queued on `stream`; allocates nothing;
/// capturable. Query heads of KV head h are [h * G, (h + 1) * G), G = (Hq/TPA) / (Hkv/TPA). Source: paper
/// section 2.1.1.
/// @throws Error(invalid_argument) if shapes contradict each other or the workspace is smaller than
///         backend.partial_attention_workspace_bytes(batch tokens, Hq/TPA, D, Dv).
template <Backend B, class T>
void partial_attention(B& backend, const PartialAttentionArgs<T>& args, typename B::Stream stream) {
  const KvView& kv = args.kv;
  const std::int64_t tokens = args.batch.num_tokens();
  const std::int64_t end = args.batch.first_token() + tokens;
  const std::int64_t heads = args.q.extent(1);
  const std::int64_t first_out = args.first_out_token;
  HELIX_EXPECTS(args.q.extent(0) >= end && args.out.extent(0) >= end - first_out &&
                    args.lse.extent(0) >= end - first_out &&
                    (tokens == 0 || (first_out >= 0 && first_out <= args.batch.first_token())),
                ErrorCode::invalid_argument, "partial_attention: the batch has tokens [",
                args.batch.first_token(), ", ", end, "); q has ", args.q.extent(0), " tokens, out ",
                args.out.extent(0), " and lse ", args.lse.extent(0), " from token ", first_out);
  HELIX_EXPECTS(args.out.extent(1) == heads && args.lse.extent(1) == heads, ErrorCode::invalid_argument,
                "partial_attention: q has ", heads, " heads; out has ", args.out.extent(1), ", lse ",
                args.lse.extent(1));
  HELIX_EXPECTS(kv.num_heads >= 1 && heads % kv.num_heads == 0, ErrorCode::invalid_argument,
                "partial_attention: ", heads, " query heads do not divide into ", kv.num_heads, " KV heads");
  HELIX_EXPECTS(args.q.extent(2) == kv.head_dim && args.out.extent(2) == kv.value_dim,
                ErrorCode::invalid_argument, "partial_attention: head_dim of q is ", args.q.extent(2),
                " and of the cache ", kv.head_dim, "; value_dim of out is ", args.out.extent(2),
                " and of the cache ", kv.value_dim);
  HELIX_EXPECTS(args.q.stride(2) == 1 && args.out.stride(2) == 1, ErrorCode::invalid_argument,
                "partial_attention: the last stride must be 1; q has ", args.q.stride(2), ", out has ",
                args.out.stride(2));
  HELIX_EXPECTS(args.scale > 0.0f && args.window >= 0 && args.soft_cap >= 0.0f, ErrorCode::invalid_argument,
                "partial_attention: scale is ", args.scale, " (> 0), window ", args.window,
                " (>= 0), soft_cap ", args.soft_cap, " (>= 0)");
  const std::size_t needed =
      backend.partial_attention_workspace_bytes(tokens, heads, kv.head_dim, kv.value_dim);
  HELIX_EXPECTS(args.workspace.size() >= needed, ErrorCode::invalid_argument,
                "partial_attention: workspace is ", args.workspace.size(), " bytes; ", needed, " are needed");
  if (tokens == 0) return;
  backend.partial_attention(args, stream);
}

}  // namespace helix
