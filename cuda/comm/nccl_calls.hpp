// SPDX-License-Identifier: Apache-2.0
// Converts NCCL's results to errors, and helix's types to NCCL's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <nccl.h>

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::cuda {

ErrorCode code_of(ncclResult_t result);

/// `who`: "rank 1 of 4", empty if unknown.
[[noreturn]] void throw_nccl(ncclResult_t result, std::string_view operation, std::string_view who);

inline void check_nccl(ncclResult_t result, std::string_view operation, std::string_view who = {}) {
  if (result != ncclSuccess) throw_nccl(result, operation, who);
}

ncclDataType_t nccl_type(DType dtype);

inline std::size_t unsigned_count(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

}  // namespace helix::cuda
