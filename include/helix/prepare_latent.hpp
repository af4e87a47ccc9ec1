// SPDX-License-Identifier: Apache-2.0
// prepare_latent: norm of latents, rope on them and on their queries, and the append to the cache as one
// operation.
#pragma once

#include <cstdint>
#include <string_view>

#include <helix/backend/layer.hpp>
#include <helix/backend/optional.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

namespace helix {
namespace detail {

/// Throws Error(invalid_argument) unless the batch is a whole step and latents, queries and norm fit the
/// view.
template <class T>
void check_prepare_latent(const PrepareLatentArgs<T>& args) {
  const KvFormat& format = args.kv.format;
  HELIX_EXPECTS(format.is_latent, ErrorCode::invalid_argument,
                "prepare_latent: the cache has keys and values of ", format.num_heads,
                " heads, not latents; prepare_qkv() is for those");
  check_append_kv(AppendKvArgs<T>{.k = args.latents, .batch = args.batch, .kv = args.kv});
  const std::int64_t tokens = args.batch.num_tokens();
  HELIX_EXPECTS(args.batch.first_token() == 0 && args.latents.extent(0) == tokens,
                ErrorCode::invalid_argument, "prepare_latent: the batch is tokens ", args.batch.first_token(),
                " to ", args.batch.first_token() + tokens, " of ", args.latents.extent(0),
                " latents, which change in place: pass a whole step, not a slice");
  const auto check_queries = [&](std::string_view name, const auto& q) {
    HELIX_EXPECTS(q.extent(0) == tokens && q.extent(1) >= 1 && q.extent(1) <= kMaxCount &&
                      q.extent(1) == args.q_out.extent(1) && q.extent(2) == format.rope_columns() &&
                      (tokens == 0 || q.stride(2) == 1),
                  ErrorCode::invalid_argument, "prepare_latent: ", name, " is [", q.extent(0), ", ",
                  q.extent(1), ", ", q.extent(2), "] with a last stride of ", q.stride(2), "; both must be [",
                  tokens, ", the same 1 to ", kMaxCount, ", ", format.rope_columns(), "] with 1");
    check_given("prepare_latent", name, q.data(), tokens * format.rope_columns());
  };
  check_queries("q_in", args.q_in);
  check_queries("q_out", args.q_out);
  HELIX_EXPECTS(!args.norm.empty() && args.norm.rows == 1 && args.norm.cols == format.value_dim,
                ErrorCode::invalid_argument, "prepare_latent: norm is [", args.norm.rows, ", ",
                args.norm.cols, args.norm.empty() ? "], without data" : "]", "; it must be [1, ",
                format.value_dim, "]");
  check_weight_data("prepare_latent", "norm", args.norm);
  check_rope("prepare_latent", args.rope, format.rope_columns());
  check_epsilon("prepare_latent", "epsilon", args.epsilon);
}

/// Calls one operation of `backend` after the other.
template <class B, class T, class Stream>
void prepare_latent_in_turn(B& backend, const PrepareLatentArgs<T>& args, Stream stream) {
  const std::int64_t columns = args.norm.cols;
  const TensorView<T, 2> compressed(args.latents.data(), {args.latents.extent(0), columns},
                                    {args.latents.stride(0), 1});
  const TensorView<T, 3> k_rope = args.latents.slice(2, columns, args.latents.extent(2) - columns);
  backend.rms_norm(
      RmsNormArgs<T>{.residual = compressed, .weight = args.norm, .out = compressed, .epsilon = args.epsilon},
      stream);
  backend.rope(RopeArgs<T>{.in = k_rope, .out = k_rope, .positions = args.batch.positions, .rope = args.rope},
               stream);
  backend.rope(
      RopeArgs<T>{.in = args.q_in, .out = args.q_out, .positions = args.batch.positions, .rope = args.rope},
      stream);
  backend.append_kv(AppendKvArgs<T>{.k = args.latents, .batch = args.batch, .kv = args.kv}, stream);
}

}  // namespace detail

/// Norms and rotates the latents, rotates their queries, and appends the latents to the cache. Calls
/// prepare_latent of the backend if it has one, else one operation after the other. Queued on `stream`,
/// allocates nothing, capturable.
/// @throws Error(invalid_argument) unless the KV view can be read, the latents are rows of it for a whole
/// step, q_in and q_out have the rope columns of equally many heads for each of its tokens, norm is [1,
/// kv_lora] of f32, f16 or bf16, epsilon is finite and not negative, and rope is finite and rotates an even
/// number of the rope columns.
template <LayerBackend B>
void prepare_latent(B& backend, const PrepareLatentArgs<typename B::Activation>& args,
                    typename B::Stream stream) {
  detail::check_prepare_latent(args);
  if constexpr (requires { backend.prepare_latent(args, stream); }) {
    backend.prepare_latent(args, stream);
  } else {
    HELIX_EXPECT_NO_MEMBER(B, prepare_latent, (const PrepareLatentArgs<Activation>&, Stream));
    detail::prepare_latent_in_turn(backend, args, stream);
  }
}

/// Does not compile: the error names T and the activation type of B.
template <LayerBackend B, detail::OtherActivation<B> T>
void prepare_latent(B&, const PrepareLatentArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
