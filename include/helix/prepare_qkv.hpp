// SPDX-License-Identifier: Apache-2.0
// prepare_qkv: norm of q and k, rope and the append to the cache as one operation.
#pragma once

#include <helix/backend/layer.hpp>

namespace helix {

/// Norm of q and k, rope and append: prepare_qkv of the backend if it has one, else one operation after the
/// other. Queued on `stream`, allocates nothing, capturable.
/// @throws Error(invalid_argument) unless k and v are rows of the KV view, which can be read.
template <LayerBackend B>
void prepare_qkv(B& backend, const PrepareQkvArgs<typename B::Activation>& args, typename B::Stream stream) {
  using T = typename B::Activation;
  detail::check_append_kv(AppendKvArgs<T>{args.k, args.v, args.batch, args.kv});
  if constexpr (requires { backend.prepare_qkv(args, stream); }) {
    backend.prepare_qkv(args, stream);
  } else {
    if (!args.q_norm.empty())
      backend.head_rms_norm(HeadRmsNormArgs<T>{args.q, args.q_norm, args.epsilon}, stream);
    if (!args.k_norm.empty())
      backend.head_rms_norm(HeadRmsNormArgs<T>{args.k, args.k_norm, args.epsilon}, stream);
    backend.rope(RopeArgs<T>{args.q, args.q, args.batch.positions, args.rope}, stream);
    backend.rope(RopeArgs<T>{args.k, args.k, args.batch.positions, args.rope}, stream);
    backend.append_kv(AppendKvArgs<T>{args.k, args.v, args.batch, args.kv}, stream);
  }
}

/// Does not compile: the error names T and the activation type of B.
template <LayerBackend B, detail::OtherActivation<B> T>
void prepare_qkv(B&, const PrepareQkvArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
