// SPDX-License-Identifier: Apache-2.0
// From the type of a weight to code for it.
#pragma once

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::cuda {

/// Calls use(W*) for the type of a weight, which is_arithmetic(): unlike dispatch(), there is no code for
/// types that only a cache has.
template <class Use>
decltype(auto) dispatch_weight(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::f32:
      return use(static_cast<float*>(nullptr));
    case DType::f16:
      return use(static_cast<f16*>(nullptr));
    case DType::bf16:
      return use(static_cast<bf16*>(nullptr));
    default:
      throw Error(ErrorCode::unsupported, "weights are ", to_string(dtype), "; built for f32, f16 and bf16");
  }
}

}  // namespace helix::cuda
