// SPDX-License-Identifier: Apache-2.0
// From the type of a weight to code for it.
#pragma once

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::cuda {

/// dispatch() for the type of a weight, which is_arithmetic(): there is no code for types that only a cache
/// has.
template <class Use>
void dispatch_weight(DType dtype, const Use& use) {
  dispatch(dtype, [&]<class W>(W* type) {
    if constexpr (detail::is_arithmetic(kDTypeOf<W>)) {
      use(type);
    } else {
      throw Error(ErrorCode::unsupported, "weights are ", to_string(dtype), "; built for f32, f16 and bf16");
    }
  });
}

}  // namespace helix::cuda
