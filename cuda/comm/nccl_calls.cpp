// SPDX-License-Identifier: Apache-2.0
// Converts NCCL's results to errors, and helix's types to NCCL's.
#include "cuda/comm/nccl_calls.hpp"

namespace helix::cuda {

ErrorCode code_of(ncclResult_t result) {
  switch (result) {
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return ErrorCode::invalid_argument;
    case ncclSystemError:
      return ErrorCode::io;
    case ncclRemoteError:
      return ErrorCode::peer_failed;
    default:
      return ErrorCode::internal;
  }
}

[[noreturn]] void throw_nccl(ncclResult_t result, std::string_view operation, std::string_view who) {
  const char* detail = ncclGetLastError(nullptr);
  throw Error(code_of(result), "NCCL ", operation, who.empty() ? "" : " on ", who,
              " failed: ", ncclGetErrorString(result), detail == nullptr || *detail == '\0' ? "" : ": ",
              detail == nullptr ? "" : detail);
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return ncclFloat16;
    case DType::bf16:
      return ncclBfloat16;
    default:
      return ncclFloat32;
  }
}

}  // namespace helix::cuda
