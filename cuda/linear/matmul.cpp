// SPDX-License-Identifier: Apache-2.0
// Products through cuBLASLt: a handle, two workspaces, and plans for up to kMaxPlans shapes.
#include "cuda/linear/matmul.hpp"

#include <array>
#include <compare>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

namespace helix::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
constexpr std::uint32_t kAlignment = 16;

/// Everything that the choice of an algorithm depends on.
struct MatmulShape {
  DType dtype = DType::bf16;
  DType out_dtype = DType::bf16;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t width = 0;
  std::int64_t heads = 1;
  std::int64_t in_row = 0;
  std::int64_t in_head = 0;
  std::int64_t out_row = 0;
  std::int64_t out_head = 0;
  bool has_bias = false;
  bool has_workspace = false;

  friend auto operator<=>(const MatmulShape&, const MatmulShape&) = default;
};

void check(cublasStatus_t status, const char* call, const MatmulShape& shape) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(status == CUBLAS_STATUS_NOT_SUPPORTED ? ErrorCode::unsupported : ErrorCode::internal, call,
              " failed with ", cublasLtGetStatusString(status), " for [", shape.heads, ", ", shape.rows, ", ",
              shape.cols, "] x [", shape.heads, ", ", shape.width, ", ", shape.cols, "]^T in ",
              to_string(shape.dtype), " into ", to_string(shape.out_dtype), ", row strides ", shape.in_row,
              " and ", shape.out_row);
}

template <auto kDestroy>
struct Destroy {
  template <class Handle>
  void operator()(Handle* handle) const noexcept {
    (void)kDestroy(handle);
  }
};
template <class Handle, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<kDestroy>>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
using LibraryHandle = Owned<cublasLtHandle_t, cublasLtDestroy>;

/// The library is column-major, so it sees a row-major [rows, cols] matrix as cols x rows.
struct MatmulPlan {
  Description description;
  Layout weight;  // cols x width, transposed by the product
  Layout in;      // cols x rows
  Layout out;     // width x rows
  cublasLtMatmulAlgo_t algorithm{};
};

cudaDataType library_type(DType dtype) {
  return dtype == DType::f32 ? CUDA_R_32F : dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
}

Layout make_layout(const MatmulShape& shape, DType dtype, std::int64_t rows, std::int64_t cols,
                   std::int64_t stride, std::int64_t head_stride) {
  cublasLtMatrixLayout_t handle = nullptr;
  check(cublasLtMatrixLayoutCreate(&handle, library_type(dtype), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(cols), stride),
        "cublasLtMatrixLayoutCreate", shape);
  Layout layout(handle);
  const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
    check(cublasLtMatrixLayoutSetAttribute(handle, attribute, &value, sizeof(value)),
          "cublasLtMatrixLayoutSetAttribute", shape);
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(shape.heads));
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, head_stride);
  return layout;
}

Preference make_preference(const MatmulShape& shape) {
  cublasLtMatmulPreference_t handle = nullptr;
  check(cublasLtMatmulPreferenceCreate(&handle), "cublasLtMatmulPreferenceCreate", shape);
  Preference preference(handle);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(handle, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute", shape);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, shape.has_workspace ? kWorkspaceBytes : std::size_t{0});
  // Split-K partial sums are added in f32 in a fixed order, never as rounded outputs.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(attribute, kAlignment);
  return preference;
}

MatmulPlan make_plan(cublasLtHandle_t library, const MatmulShape& shape) {
  MatmulPlan plan;
  cublasLtMatmulDesc_t description = nullptr;
  check(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate",
        shape);
  plan.description.reset(description);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  check(
      cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)),
      "cublasLtMatmulDescSetAttribute", shape);
  if (shape.has_bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    check(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                         sizeof(epilogue)),
          "cublasLtMatmulDescSetAttribute", shape);
  }
  plan.weight =
      make_layout(shape, shape.dtype, shape.cols, shape.width, shape.cols, shape.width * shape.cols);
  plan.in = make_layout(shape, shape.dtype, shape.cols, shape.rows, shape.in_row, shape.in_head);
  plan.out = make_layout(shape, shape.out_dtype, shape.width, shape.rows, shape.out_row, shape.out_head);
  const Preference preference = make_preference(shape);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  check(cublasLtMatmulAlgoGetHeuristic(library, description, plan.weight.get(), plan.in.get(), plan.out.get(),
                                       plan.out.get(), preference.get(), 1, &result, &found),
        "cublasLtMatmulAlgoGetHeuristic", shape);
  check(found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic", shape);
  plan.algorithm = result.algo;
  return plan;
}

}  // namespace

class MatmulLibrary {
 public:
  explicit MatmulLibrary(std::shared_ptr<const Allocator> allocator) : allocator_(std::move(allocator)) {
    cublasLtHandle_t handle = nullptr;
    const cublasStatus_t status = cublasLtCreate(&handle);
    HELIX_EXPECTS(status == CUBLAS_STATUS_SUCCESS, ErrorCode::internal, "cublasLtCreate failed with ",
                  cublasLtGetStatusString(status), "; is libcublasLt of the toolkit that built this there?");
    handle_.reset(handle);
  }

  void multiply(const MatmulArgs& args, const Stream& stream) {
    MatmulShape shape{args.dtype,   args.out_dtype, args.rows,           args.cols,
                      args.width,   args.heads,     args.in_row,         args.in_head,
                      args.out_row, args.out_head,  args.bias != nullptr};
    const std::lock_guard lock(mutex_);  // also covers queueing: a description holds the call's bias
    std::byte* workspace = workspace_of(stream);
    shape.has_workspace = workspace != nullptr;
    auto found = plans_.find(shape);
    if (found == plans_.end()) {
      if (plans_.size() >= kMaxPlans) plans_.clear();  // a long service sees any number of step sizes
      found = plans_.emplace(shape, make_plan(handle_.get(), shape)).first;
    }
    const MatmulPlan* plan = &found->second;
    if (shape.has_bias) {
      check(cublasLtMatmulDescSetAttribute(plan->description.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                           &args.bias, sizeof(args.bias)),
            "cublasLtMatmulDescSetAttribute", shape);
    }
    const float alpha = 1.0f;
    const float beta = args.accumulate ? 1.0f : 0.0f;
    check(cublasLtMatmul(handle_.get(), plan->description.get(), &alpha, args.weight, plan->weight.get(),
                         args.in, plan->in.get(), &beta, args.out, plan->out.get(), args.out, plan->out.get(),
                         &plan->algorithm, workspace, workspace == nullptr ? 0 : kWorkspaceBytes,
                         stream.handle()),
          "cublasLtMatmul", shape);
  }

 private:
  struct StreamWorkspace {
    std::optional<Stream> stream;  // empty: not assigned yet
    Buffer memory;
  };

  /// The stream's own workspace, so that streams do not write to the same one concurrently. nullptr for a
  /// third stream, and if a capture forbids allocating one.
  std::byte* workspace_of(const Stream& stream) {
    for (StreamWorkspace& own : workspaces_) {
      if (own.stream && own.stream->handle() != stream.handle()) continue;
      if (!own.stream) {
        cudaStreamCaptureStatus capture{};
        HELIX_CUDA_CHECK(cudaStreamIsCapturing(stream.handle(), &capture));
        if (capture != cudaStreamCaptureStatusNone) return nullptr;
        own.memory = Buffer(kWorkspaceBytes, allocator_);
        own.stream = stream;
      }
      return own.memory.data();
    }
    return nullptr;
  }

  static constexpr std::size_t kMaxPlans = 4096;

  std::mutex mutex_;
  std::shared_ptr<const Allocator> allocator_;
  LibraryHandle handle_;
  std::array<StreamWorkspace, 2> workspaces_;
  std::map<MatmulShape, MatmulPlan> plans_;
};

void MatmulLibraryDelete::operator()(MatmulLibrary* library) const noexcept {
  delete library;
}

OwnedMatmulLibrary make_matmul_library(std::shared_ptr<const Allocator> allocator) {
  return OwnedMatmulLibrary(new MatmulLibrary(std::move(allocator)));
}

void library_matmul(MatmulLibrary& library, const MatmulArgs& args, const Stream& stream) {
  HELIX_EXPECTS(args.dtype == DType::f16 || args.dtype == DType::bf16, ErrorCode::unsupported,
                "library_matmul: ", to_string(args.dtype), "; built for f16 and bf16");
  HELIX_EXPECTS(args.out_dtype == args.dtype || args.out_dtype == DType::f32, ErrorCode::unsupported,
                "library_matmul: ", to_string(args.dtype), " into ", to_string(args.out_dtype),
                "; built for f32 and ", to_string(args.dtype));
  library.multiply(args, stream);
}

}  // namespace helix::cuda
