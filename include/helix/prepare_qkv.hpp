// SPDX-License-Identifier: Apache-2.0
// prepare_qkv: norm of q and k, rope, and the append to the cache as one operation. project_qkv: the product
// that q, k and v come from, then prepare_qkv.
#pragma once

#include <cstdint>
#include <string_view>

#include <helix/backend/layer.hpp>
#include <helix/backend/optional.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>

namespace helix {
namespace detail {

/// Throws Error(invalid_argument) unless the batch is a whole step and q, k, v and norms fit the view.
template <class T>
void check_prepare_qkv(const PrepareQkvArgs<T>& args) {
  HELIX_EXPECTS(!args.kv.format.is_latent, ErrorCode::invalid_argument,
                "prepare_qkv: the cache holds latents; prepare_latent() is for those");
  check_append_kv(AppendKvArgs<T>{.k = args.k, .v = args.v, .batch = args.batch, .kv = args.kv});
  const std::int64_t tokens = args.batch.num_tokens();
  const std::int64_t dim = args.kv.format.head_dim;
  HELIX_EXPECTS(args.batch.first_token() == 0 && args.k.extent(0) == tokens, ErrorCode::invalid_argument,
                "prepare_qkv: the batch is tokens ", args.batch.first_token(), " to ",
                args.batch.first_token() + tokens, " of k's ", args.k.extent(0),
                ", which are turned in place: pass a whole step, not a slice");
  HELIX_EXPECTS(args.q.extent(0) == tokens && args.q.extent(1) >= 1 && args.q.extent(1) <= kMaxCount &&
                    args.q.extent(2) == dim && (tokens == 0 || args.q.stride(2) == 1),
                ErrorCode::invalid_argument, "prepare_qkv: q is [", args.q.extent(0), ", ", args.q.extent(1),
                ", ", args.q.extent(2), "] with a last stride of ", args.q.stride(2), "; it must be [",
                tokens, ", 1 to ", kMaxCount, ", ", dim, "] with 1");
  check_given("prepare_qkv", "q", args.q.data(), tokens);
  const auto check_norm = [&](std::string_view name, const WeightView& norm) {
    HELIX_EXPECTS(norm.empty() || (norm.rows == 1 && norm.cols == dim), ErrorCode::invalid_argument,
                  "prepare_qkv: ", name, " is [", norm.rows, ", ", norm.cols, "]; it must be [1, ", dim,
                  "] or empty");
    check_weight_data("prepare_qkv", name, norm);
  };
  check_norm("q_norm", args.q_norm);
  check_norm("k_norm", args.k_norm);
  check_rope("prepare_qkv", args.rope, dim);
  check_epsilon("prepare_qkv", "epsilon", args.epsilon);
}

/// Throws Error(invalid_argument) unless the heads are columns of `out`.
template <class T, class Head>
void check_columns(std::string_view name, const TensorView<Head, 3>& heads, const TensorView<T, 2>& out) {
  const std::int64_t count = heads.extent(1);
  const std::int64_t dim = heads.extent(2);
  const std::int64_t apart = count == 1 ? dim : heads.stride(1);
  const auto bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(heads.data()) -
                                               reinterpret_cast<std::uintptr_t>(out.data()));
  const std::int64_t begin = bytes / static_cast<std::int64_t>(sizeof(T));
  HELIX_EXPECTS(
      (heads.extent(0) == 1 || heads.stride(0) == out.stride(0)) && apart >= dim && begin >= 0 &&
          saturating_sum(begin, saturating_sum(saturating_product(count - 1, apart), dim)) <= out.extent(1),
      ErrorCode::invalid_argument, "project_qkv: ", name, " is [", heads.extent(0), ", ", count, ", ", dim,
      "] with strides [", heads.stride(0), ", ", heads.stride(1), ", ", heads.stride(2), "] from element ",
      begin, " of out on, which is [", out.extent(0), ", ", out.extent(1), "] with a row stride of ",
      out.stride(0), "; its heads must be columns of out");
}

/// Throws Error(invalid_argument) unless the product gives the columns that q, k and v are.
template <class T>
void check_project_qkv(const ProjectQkvArgs<T>& args) {
  check_prepare_qkv(args.prepare);
  const LinearArgs<T>& linear = args.linear;
  const std::int64_t rows = args.prepare.batch.num_tokens();
  HELIX_EXPECTS(
      linear.in.extent(0) == rows && linear.in.extent(1) == linear.weight.cols &&
          linear.out.extent(0) == rows && linear.out.extent(1) == linear.weight.rows && !linear.accumulate,
      ErrorCode::invalid_argument, "project_qkv: in is [", linear.in.extent(0), ", ", linear.in.extent(1),
      "], out [", linear.out.extent(0), ", ", linear.out.extent(1),
      linear.accumulate ? "] (accumulated)" : "]", ", weight [", linear.weight.rows, ", ", linear.weight.cols,
      "]; the batch has ", rows, " tokens: they must be [tokens, K], [tokens, N] (written anew) and [N, K]");
  HELIX_EXPECTS(linear.bias.empty() || (linear.bias.rows == 1 && linear.bias.cols == linear.weight.rows),
                ErrorCode::invalid_argument, "project_qkv: bias is [", linear.bias.rows, ", ",
                linear.bias.cols, "]; it must be [1, ", linear.weight.rows, "] or empty");
  check_weight_data("project_qkv", "weight", linear.weight);
  check_weight_data("project_qkv", "bias", linear.bias);
  check_given("project_qkv", "in", linear.in.data(), rows);
  check_given("project_qkv", "weight", linear.weight.data, linear.weight.rows);
  check_given("project_qkv", "out", linear.out.data(), rows);
  if (rows == 0) return;
  HELIX_EXPECTS(linear.in.stride(1) == 1 && linear.out.stride(1) == 1, ErrorCode::invalid_argument,
                "project_qkv: in has a last stride of ", linear.in.stride(1), " and out of ",
                linear.out.stride(1), "; both must be 1");
  check_columns("q", args.prepare.q, linear.out);
  check_columns("k", args.prepare.k, linear.out);
  check_columns("v", args.prepare.v, linear.out);
}

}  // namespace detail

/// Norms and rotates q and k, and appends k and v to the cache. Calls prepare_qkv of the backend if it has
/// one, else one operation after the other. Queued on `stream`, allocates nothing, capturable.
/// @throws Error(invalid_argument) unless the KV view can be read, k and v are rows of it, q has heads as
/// wide, each has a row for every token of the batch, which is a whole step, the norms are [1, D] of f32, f16
/// or bf16 or empty, epsilon is finite and not negative, and rope is finite and rotates an even number of a
/// head's columns.
template <LayerBackend B>
void prepare_qkv(B& backend, const PrepareQkvArgs<typename B::Activation>& args, typename B::Stream stream) {
  using T = typename B::Activation;
  detail::check_prepare_qkv(args);
  if constexpr (requires { backend.prepare_qkv(args, stream); }) {
    backend.prepare_qkv(args, stream);
  } else {
    HELIX_EXPECT_NO_MEMBER(B, prepare_qkv, (const PrepareQkvArgs<Activation>&, Stream));
    if (!args.q_norm.empty())
      backend.head_rms_norm(HeadRmsNormArgs<T>{.x = args.q, .weight = args.q_norm, .epsilon = args.epsilon},
                            stream);
    if (!args.k_norm.empty())
      backend.head_rms_norm(HeadRmsNormArgs<T>{.x = args.k, .weight = args.k_norm, .epsilon = args.epsilon},
                            stream);
    backend.rope(
        RopeArgs<T>{.in = args.q, .out = args.q, .positions = args.batch.positions, .rope = args.rope},
        stream);
    backend.rope(
        RopeArgs<T>{.in = args.k, .out = args.k, .positions = args.batch.positions, .rope = args.rope},
        stream);
    backend.append_kv(AppendKvArgs<T>{.k = args.k, .v = args.v, .batch = args.batch, .kv = args.kv}, stream);
  }
}

/// Computes q, k and v by one product, then does what prepare_qkv() does. Calls project_qkv of the backend if
/// it has one, else one operation after the other. Queued on `stream`, allocates nothing, capturable. Where
/// the backend's is collective (cuda::Backend over windows), all ranks of the KVP group must call it with
/// equal rows, weights, positions and slots; only their pages differ.
/// @throws what prepare_qkv() throws, and Error(invalid_argument) unless the product's rows are the batch's
/// tokens, dense along their last dimension, its shapes fit each other, and q, k and v are columns of its
/// output; before anything is queued.
template <LayerBackend B>
void project_qkv(B& backend, const ProjectQkvArgs<typename B::Activation>& args, typename B::Stream stream) {
  detail::check_project_qkv(args);
  if constexpr (requires { backend.project_qkv(args, stream); }) {
    backend.project_qkv(args, stream);
  } else {
    HELIX_EXPECT_NO_MEMBER(B, project_qkv, (const ProjectQkvArgs<Activation>&, Stream));
    backend.linear(args.linear, stream);
    helix::prepare_qkv(backend, args.prepare, stream);
  }
}

/// Does not compile: the error names T and the activation type of B.
template <LayerBackend B, detail::OtherActivation<B> T>
void prepare_qkv(B&, const PrepareQkvArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

/// Does not compile: the error names T and the activation type of B.
template <LayerBackend B, detail::OtherActivation<B> T>
void project_qkv(B&, const ProjectQkvArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
