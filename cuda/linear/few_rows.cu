// SPDX-License-Identifier: Apache-2.0
// Launches of the products of few rows.
#include <algorithm>
#include <cstdint>

#include <helix/dtype.hpp>

#include "cuda/linear/few_rows.cuh"
#include "cuda/linear/few_rows.hpp"

namespace helix::cuda {
namespace {

// As many as fit. Of 4096 x 14336 weights, one row, with 8, 10 and 4 stages: 27.7, 27.8 and 32.9 us. Boxes
// that ask the L2 cache for 256 bytes at a time: 29.2.
constexpr int kStages = 8;
constexpr int kStagesWide = 7;  // of 16 rows

template <class T, int kRows, int kStages, bool kIsGated>
void launch(const Product<T>& p, int num_sms, cudaStream_t stream) {
  using namespace few_rows;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<kRows, kStages>));
  constexpr int kHalves = kIsGated ? 2 : 1;
  constexpr std::int64_t kElement = sizeof(T);
  const Tiles tiles(p.width, kTileWidth / kHalves, num_sms);
  const Params<T> params{
      .weights =
          rows_map<3>(const_cast<void*>(p.weight), kDTypeOf<T>, {p.cols, p.width, kHalves},
                      {p.cols * kElement, p.cols * kElement * p.width}, {kColumns, tiles.height, kHalves},
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_SWIZZLE_NONE),
      .rows = rows_map<3>(const_cast<T*>(p.in), kDTypeOf<T>, {p.cols, p.rows, 1}, {p.in_row * kElement, 16},
                          {kColumns, kRows, 1}, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_SWIZZLE_NONE),
      .product = p,
      .tiles = tiles};
  const auto kernel = product_kernel<T, kRows, kStages, kIsGated>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, tiles.blocks, kThreads, kBytes, stream, true, params);
}

template <class T, bool kIsGated>
void launch_for_rows(const Product<T>& p, int num_sms, cudaStream_t stream) {
  if (p.rows <= 8) return launch<T, 8, kStages, kIsGated>(p, num_sms, stream);
  launch<T, kMostFewRows, kStagesWide, kIsGated>(p, num_sms, stream);
}

}  // namespace

template <class T>
bool fits_few_rows(const Product<T>& p) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  return p.heads == 1 && p.rows <= kMostFewRows && p.cols > 0 && p.cols % kElements == 0 &&
         p.in_row % kElements == 0 && is_aligned(p.in) && is_aligned(p.weight);
}

template <class T>
void multiply_few_rows(const Product<T>& product, int num_sms, cudaStream_t stream) {
  launch_for_rows<T, false>(product, num_sms, stream);
}

template <class T>
void multiply_few_rows_gated(const Product<T>& product, int num_sms, cudaStream_t stream) {
  launch_for_rows<T, true>(product, num_sms, stream);
}

#define HELIX_INSTANTIATE(T)                                             \
  template bool fits_few_rows(const Product<T>&);                        \
  template void multiply_few_rows(const Product<T>&, int, cudaStream_t); \
  template void multiply_few_rows_gated(const Product<T>&, int, cudaStream_t);
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
