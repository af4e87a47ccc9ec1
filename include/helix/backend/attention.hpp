// SPDX-License-Identifier: Apache-2.0
// AttentionBackend: tokens into the KV cache and attention over a shard of it, and the arguments of each.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include <helix/backend/batch.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/backend/queue.hpp>
#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

/// Arguments of append_kv(), which stores each token whose owner is kv.kvp_rank (the device makes the test)
/// and drops the others and padding. Rows of k and v may be strided; their last stride is 1.
template <class T>
struct AppendKvArgs {
  TensorView<const T, 3> k;    ///< [tokens, Hkv/TPA, D]; MLA: the latent rows [tokens, 1, D].
  TensorView<const T, 3> v{};  ///< [tokens, Hkv/TPA, Dv]; MLA: empty.
  Batch batch;
  KvView kv;
};

/// Arguments of write_kv(), which stores those tokens of one sequence that kv.kvp_rank owns. Row i is the
/// token at global position first_position + i. Converts as append_kv does: rounds value / scale to the
/// nearest stored value.
template <class T>
struct WriteKvArgs {
  TensorView<const T, 3> k;  ///< [tokens, Hkv/TPA, D], last stride 1.
  TensorView<const T, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1; MLA: empty.
  std::int64_t first_position = 0;
  std::int32_t sequence_slot = 0;
  KvView kv;
};

/// Arguments of read_kv(), which reads local tokens [first_local, first_local + rows of k) of one sequence
/// back as values, stored * scale.
struct ReadKvArgs {
  KvView kv;
  std::int32_t sequence_slot = 0;
  std::int64_t first_local = 0;
  TensorView<float, 3> k;  ///< [tokens, Hkv/TPA, D], last stride 1, written.
  TensorView<float, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1, written; MLA: empty.
};

/// Arguments of read_latents(), which reads local tokens [first_local, first_local + rows) of one sequence
/// back from latents (MLA) as activations: stored * scale, rounded to T. A backend may have
/// read_latents(args, stream); attention_block then expands keys and values of long chunks, see MlaPrefill.
template <class T>
struct ReadLatentsArgs {
  KvView kv;
  const std::int32_t* sequence_slot = nullptr;  ///< [1], device memory: the sequence's row of the page table.
  std::int64_t first_local = 0;
  TensorView<T, 2> rows;  ///< [tokens, D], last stride 1, written.
};

namespace detail {

/// Whether the value is neither infinite nor NaN. Avoids <cmath>, which every user would then include.
constexpr bool is_finite(float value) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return value >= -kMax && value <= kMax;
}

/// The soft cap that a backend computes with: 0 (none) for one so large that scores of f32 do not feel it.
/// The inverse of such a cap, or its product with log2(e), may leave the range of f32.
constexpr float effective_soft_cap(float soft_cap) {
  return soft_cap < 0x1p96f ? soft_cap : 0.0f;
}

/// Alignment in bytes of a workspace that an operation carves: that of the widest vectors of kernels.
inline constexpr std::size_t kWorkspaceAlignment = 16;

/// Throws Error(invalid_argument) if a workspace with a size has no address, or one that is not aligned to
/// `alignment` bytes.
inline void check_workspace(std::string_view operation, std::span<const std::byte> workspace,
                            std::size_t alignment = 1) {
  HELIX_EXPECTS(workspace.data() != nullptr || workspace.empty(), ErrorCode::invalid_argument, operation,
                ": workspace is null with ", workspace.size(), " bytes; it must point to device memory");
  HELIX_EXPECTS(workspace.empty() || reinterpret_cast<std::uintptr_t>(workspace.data()) % alignment == 0,
                ErrorCode::invalid_argument, operation, ": workspace begins at ",
                static_cast<const void*>(workspace.data()), "; it must be aligned to ", alignment,
                " bytes, as allocate() of the backend gives it");
}

/// Throws Error(invalid_argument) unless the scale (called `name`), window and soft cap are in range.
inline void check_scores(std::string_view operation, std::string_view name, float scale, std::int64_t window,
                         float soft_cap) {
  HELIX_EXPECTS(scale > 0.0f && is_finite(scale) && window >= 0 && soft_cap >= 0.0f && is_finite(soft_cap),
                ErrorCode::invalid_argument, operation, ": ", name, " is ", scale,
                " (> 0 and finite), window ", window, " (>= 0), soft_cap ", soft_cap, " (>= 0 and finite)");
  HELIX_EXPECTS(soft_cap == 0.0f || is_finite(scale / soft_cap), ErrorCode::invalid_argument, operation, ": ",
                name, " ", scale, " over soft_cap ", soft_cap,
                " is beyond f32; give a larger soft_cap, or 0 for none");
}

/// Throws unless k [tokens, heads, D] and v [tokens, heads, Dv] (latent: empty) fit the format and are given.
template <class T>
void check_kv_rows(std::string_view operation, const KvFormat& format, TensorView<const T, 3> k,
                   TensorView<const T, 3> v) {
  const auto check = [&](std::string_view name, const TensorView<const T, 3>& rows, std::int64_t dim) {
    HELIX_EXPECTS(
        rows.extent(0) == k.extent(0) && rows.extent(1) == format.num_heads && rows.extent(2) == dim,
        ErrorCode::invalid_argument, operation, ": ", name, " is [", rows.extent(0), ", ", rows.extent(1),
        ", ", rows.extent(2), "]; it must be [", k.extent(0), ", ", format.num_heads, ", ", dim, "]");
    HELIX_EXPECTS(rows.extent(0) >= 0 && rows.extent(0) <= kMaxTokens, ErrorCode::invalid_argument, operation,
                  ": ", name, " has ", rows.extent(0), " rows; there must be 0 to ", kMaxTokens);
    HELIX_EXPECTS(rows.extent(0) == 0 || rows.stride(2) == 1, ErrorCode::invalid_argument, operation, ": ",
                  name, " has a last stride of ", rows.stride(2), "; it must be 1");
    check_given(operation, name, rows.data(), rows.extent(0));
  };
  check("k", k, format.head_dim);
  if (!format.is_latent) {
    check("v", v, format.value_dim);
  } else {
    HELIX_EXPECTS(v.size() == 0, ErrorCode::invalid_argument, operation,
                  ": v must be empty for MLA, whose V is part of the K row; it has ", v.extent(0), " rows");
  }
}

/// Throws Error(invalid_argument) unless the batch and the view can be read, k and v are rows of the view,
/// and k has a row for each token of the batch.
template <class T>
void check_append_kv(const AppendKvArgs<T>& args) {
  const Batch& batch = args.batch;
  check_batch("append_kv", batch);
  check_kv_view("append_kv", args.kv);
  check_kv_rows("append_kv", args.kv.format, args.k, args.v);
  HELIX_EXPECTS(args.k.extent(0) >= batch.first_token() + batch.num_tokens(), ErrorCode::invalid_argument,
                "append_kv: the batch has tokens [", batch.first_token(), ", ",
                batch.first_token() + batch.num_tokens(), "); k has ", args.k.extent(0));
}

/// Throws Error(invalid_argument) if the page table has no row for `slot`, a host value.
inline void check_slot(std::string_view operation, const KvView& kv, std::int64_t slot) {
  HELIX_EXPECTS(slot >= 0 && (kv.num_slots == 0 || slot < kv.num_slots), ErrorCode::invalid_argument,
                operation, ": sequence_slot is ", slot, " of ", kv.num_slots,
                "; slots count from 0: take ShardedKVCache::slot()");
}

/// Throws Error(invalid_argument) if local tokens up to `end` reach beyond a row of the page table. The host
/// does not know how long the rows of a CSR list are, so those are not checked.
inline void check_local_end(std::string_view operation, const KvView& kv, std::int64_t end) {
  HELIX_EXPECTS(kv.page_begins != nullptr || end <= kv.max_pages * kv.format.page_tokens,
                ErrorCode::invalid_argument, operation, ": local token ", end - 1, " is in page ",
                (end - 1) / kv.format.page_tokens, " of the sequence, whose row of the page table has ",
                kv.max_pages, "; append() to the sequence before its tokens are stored or read");
}

/// Throws Error(invalid_argument) unless the rows fit the view, and those that this rank stores lie within
/// the sequence's row of the page table.
template <class T>
void check_write_kv(const WriteKvArgs<T>& args) {
  const KvView& kv = args.kv;
  check_kv_view("write_kv", kv);
  check_kv_rows("write_kv", kv.format, args.k, args.v);
  HELIX_EXPECTS(args.first_position >= 0 && args.first_position <= kMaxTokens, ErrorCode::invalid_argument,
                "write_kv: first_position is ", args.first_position, "; it must be 0 to ", kMaxTokens);
  check_slot("write_kv", kv, args.sequence_slot);
  const TokenRange span{args.first_position, args.first_position + args.k.extent(0)};
  const TokenRange owned = kv.layout.local_range(span, kv.kvp_rank);
  if (owned.size() > 0) check_local_end("write_kv", kv, owned.end);
}

/// Throws Error(invalid_argument) unless local tokens [first_local, first_local + rows) lie within a row of
/// the page table.
inline void check_read_range(std::string_view operation, const KvView& kv, std::int64_t first_local,
                             std::int64_t rows) {
  HELIX_EXPECTS(first_local >= 0 && first_local <= kMaxTokens, ErrorCode::invalid_argument, operation,
                ": first_local is ", first_local, "; it must be 0 to ", kMaxTokens);
  if (rows > 0) check_local_end(operation, kv, first_local + rows);
}

/// Throws Error(invalid_argument) unless the view has the slot and the tokens, and k and v are of its shape.
inline void check_read_kv(const ReadKvArgs& args) {
  check_kv_view("read_kv", args.kv);
  check_kv_rows<float>("read_kv", args.kv.format, args.k, args.v);
  check_slot("read_kv", args.kv, args.sequence_slot);
  check_read_range("read_kv", args.kv, args.first_local, args.k.extent(0));
}

/// Throws Error(invalid_argument) unless the view is latent and has the tokens, and rows are of its width.
template <class T>
void check_read_latents(const ReadLatentsArgs<T>& args) {
  check_kv_view("read_latents", args.kv);
  HELIX_EXPECTS(args.kv.format.is_latent, ErrorCode::invalid_argument,
                "read_latents: the cache holds K and V; read them with read_kv");
  HELIX_EXPECTS(args.rows.extent(0) >= 0 && args.rows.extent(0) <= kMaxTokens, ErrorCode::invalid_argument,
                "read_latents: there are ", args.rows.extent(0), " rows; there must be 0 to ", kMaxTokens);
  check_given("read_latents", "rows", args.rows.data(), args.rows.extent(0));
  HELIX_EXPECTS(
      args.rows.extent(1) == args.kv.format.head_dim && (args.rows.size() == 0 || args.rows.stride(1) == 1),
      ErrorCode::invalid_argument, "read_latents: rows are ", args.rows.extent(1),
      " wide with a last stride of ", args.rows.stride(1), "; the latents are ", args.kv.format.head_dim,
      " wide, and the stride must be 1");
  check_given("read_latents", "sequence_slot", args.sequence_slot, args.rows.extent(0));
  check_read_range("read_latents", args.kv, args.first_local, args.rows.extent(0));
}

}  // namespace detail

/// Arguments of partial_attention(): attention of each query over this rank's shard, out = softmax(scale * q
/// k) v, lse = log(sum(exp(scale * q k))). A query at global position p reads local tokens
/// KvLayout::visible(p, window, kvp_rank). What lies in pages past a sequence's last token, or before all
/// windows, does not affect the result. If a token has an infinite or NaN value, and one query of a step sees
/// it and another does not, matrix instructions may make the other's out NaN too.
template <class T>
struct PartialAttentionArgs {
  TensorView<const T, 3> q;  ///< [tokens of the step, Hq/TPA, D], last stride 1.
  Batch batch;               ///< The whole step or a slice; only its tokens' rows of the target are written.
  KvView kv;
  PartialTarget<T> target;         ///< Where the result is written.
  float scale = 0.0f;              ///< Factor on q k, above 0.
  std::int64_t window = 0;         ///< Tokens that a query sees, itself included; 0 is all of them.
  float soft_cap = 0.0f;           ///< Score = cap * tanh(score / cap) before the softmax; 0 is none.
  std::span<std::byte> workspace;  ///< Scratch of partial_attention_workspace_bytes().
  /// Whether prepare_qkv, project_qkv or prepare_latent of this batch, or of one that it is a slice of, is
  /// queued before, and nothing queued after it writes what attention reads, except q. The backend may then
  /// read everything but q and the KV of the step's own tokens while that operation still runs.
  bool follows_prepare = false;
};

/// A backend that reads latents back as activations.
template <class B>
concept LatentReader = requires(B& backend, typename B::Stream stream) {
  backend.read_latents(ReadLatentsArgs<typename B::Activation>{}, stream);
};

/// A backend that partial_attention() can use.
template <class B>
concept PartialAttentionBackend = requires(B& backend, typename B::Stream stream, std::int64_t n) {
  backend.partial_attention(PartialAttentionArgs<typename B::Activation>{}, stream);
  // (tokens, query heads, D, Dv): enough for any step of up to so many tokens, at any positions.
  { backend.partial_attention_workspace_bytes(n, n, n, n) } -> std::same_as<std::size_t>;
};

/// A backend with all that attention over a sharded cache needs.
template <class B>
concept AttentionBackend = QueueBackend<B> && PartialAttentionBackend<B> &&
    requires(B& backend, typename B::Stream stream, const void* source, void* target, std::size_t bytes) {
  backend.copy(target, source, bytes, stream);  // device -> device; the two do not overlap
  backend.append_kv(AppendKvArgs<typename B::Activation>{}, stream);
  backend.write_kv(WriteKvArgs<typename B::Activation>{}, stream);
  backend.read_kv(ReadKvArgs{}, stream);
};

}  // namespace helix
