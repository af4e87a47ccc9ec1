// SPDX-License-Identifier: Apache-2.0
// reduce_norm: all-reduce, residual and norm as one operation, which ends each half of a layer.
#pragma once

#include <helix/backend/layer.hpp>
#include <helix/backend/optional.hpp>
#include <helix/error.hpp>

namespace helix {

/// Arguments of reduce_norm(): sum = the ranks' summands added up; residual += sum; out = residual /
/// rms(residual) * weight.
template <class T>
struct ReduceNormArgs {
  TensorView<T, 2> summand;   ///< [tokens, M], dense, this rank's part; may be overwritten.
  TensorView<T, 2> residual;  ///< [tokens, M], dense, read and written.
  WeightView weight{};        ///< [1, M], or empty: no norm follows, and out is not written.
  TensorView<T, 2> out{};     ///< [tokens, M], written; must not alias summand, residual or weight.
  float epsilon = 1e-5f;
};

namespace detail {

/// Does the operation in two steps, which any backend has: all_reduce and rms_norm.
template <LayerBackend B>
void reduce_then_norm(B& backend, const ReduceNormArgs<typename B::Activation>& args,
                      typename B::Stream stream) {
  using T = typename B::Activation;
  given_comm("reduce_norm", "stage", backend.comms().stage)
      .all_reduce(args.summand.data(), args.summand.data(), args.summand.size(), kDTypeOf<T>, stream);
  backend.rms_norm(RmsNormArgs<T>{.delta = args.summand,
                                  .residual = args.residual,
                                  .weight = args.weight,
                                  .out = args.weight.empty() ? TensorView<T, 2>{} : args.out,
                                  .epsilon = args.epsilon},
                   stream);
}

}  // namespace detail

/// Ends a block: sums the summands over the stage, adds the sum to the residual, and norms the residual for
/// what follows. A backend that does all three at once has reduce_norm(args, stream); with any other it is
/// all_reduce and rms_norm. Collective over the stage with equal shapes; all ranks get the same bits
/// (invariant 12). Queued on `stream`, allocates nothing, capturable. After an error of one rank alone its
/// caller calls abort() of the stage, else the others wait until its timeout.
/// @throws Error(invalid_argument) if shapes contradict each other, an address or the backend's stage
/// communicator is missing, the weight is not [1, M] of f32, f16 or bf16, the last stride of out is not 1 or
/// its rows overlap, or epsilon is below 0 or not finite.
template <LayerBackend B>
void reduce_norm(B& backend, const ReduceNormArgs<typename B::Activation>& args, typename B::Stream stream) {
  const bool has_norm = !args.weight.empty();
  HELIX_EXPECTS(args.summand.extents() == args.residual.extents() && args.summand.is_contiguous() &&
                    args.residual.is_contiguous() &&
                    (!has_norm || (args.out.extents() == args.residual.extents() && args.out.stride(1) == 1)),
                ErrorCode::invalid_argument, "reduce_norm: summand is [", args.summand.extent(0), ", ",
                args.summand.extent(1), "] with strides [", args.summand.stride(0), ", ",
                args.summand.stride(1), "], residual [", args.residual.extent(0), ", ",
                args.residual.extent(1), "] with [", args.residual.stride(0), ", ", args.residual.stride(1),
                "], out [", args.out.extent(0), ", ", args.out.extent(1), "] with [", args.out.stride(0),
                ", ", args.out.stride(1),
                "]; they must be equal, summand and residual dense, and the last stride of out 1");
  HELIX_EXPECTS(!has_norm || (args.weight.rows == 1 && args.weight.cols == args.residual.extent(1)),
                ErrorCode::invalid_argument, "reduce_norm: weight is [", args.weight.rows, ", ",
                args.weight.cols, "]; it must be [1, ", args.residual.extent(1), "]");
  detail::check_given("reduce_norm", "summand", args.summand.data(), args.summand.size());
  detail::check_given("reduce_norm", "residual", args.residual.data(), args.residual.size());
  if (has_norm) {
    detail::check_weight_data("reduce_norm", "weight", args.weight);
    detail::check_epsilon("reduce_norm", "epsilon", args.epsilon);
    detail::check_given("reduce_norm", "out", args.out.data(), args.out.size());
    detail::check_elements_apart("reduce_norm", "out", args.out);
  }
  if (args.summand.size() == 0) return;
  if constexpr (requires { backend.reduce_norm(args, stream); }) {
    backend.reduce_norm(args, stream);
  } else {
    HELIX_EXPECT_NO_MEMBER(B, reduce_norm, (const ReduceNormArgs<Activation>&, Stream));
    detail::reduce_then_norm(backend, args, stream);
  }
}

/// Does not compile: the error names T and the activation type of B.
template <LayerBackend B, detail::OtherActivation<B> T>
void reduce_norm(B&, const ReduceNormArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
