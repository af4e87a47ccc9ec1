// SPDX-License-Identifier: Apache-2.0
// Sums in rank order with float accumulation, shared by the CPU communicators.
#pragma once

#include <cstdint>
#include <cstring>

#include <helix/dtype.hpp>

namespace helix::comm {

/// Floats in a partial sum: 4 KB, which stay in L1.
inline constexpr std::int64_t kReduceBlock = 1024;

/// sum[i] = in[i] when `is_first`, else sum[i] += in[i]. `in` is of `dtype` and may be unaligned.
inline void add_to_sum(float* sum, const void* in, std::int64_t count, DType dtype, bool is_first) {
  dispatch(dtype, [&]<class T>(T*) {
    const auto* bytes = static_cast<const unsigned char*>(in);
    for (std::int64_t i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, bytes + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
      sum[i] = is_first ? static_cast<float>(value) : sum[i] + static_cast<float>(value);
    }
  });
}

/// out[i] = sum[i], rounded once to `dtype`.
inline void store_sum(void* out, const float* sum, std::int64_t count, DType dtype) {
  dispatch(dtype, [&]<class T>(T*) {
    auto* bytes = static_cast<unsigned char*>(out);
    for (std::int64_t i = 0; i < count; ++i) {
      const T value(sum[i]);
      std::memcpy(bytes + i * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
    }
  });
}

}  // namespace helix::comm
