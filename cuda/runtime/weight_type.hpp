// SPDX-License-Identifier: Apache-2.0
// Dispatches on the type of a weight.
#pragma once

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::cuda {

/// dispatch() for a weight's type, which is_arithmetic(). Types that only a cache has get no code.
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
