// SPDX-License-Identifier: Apache-2.0
// Launches of the products of few rows.
#include <algorithm>
#include <cstdint>

#include <helix/dtype.hpp>

#include "cuda/linear/few_rows.cuh"
#include "cuda/linear/few_rows.hpp"

namespace helix::cuda {
namespace {

/// Tiles of 16 rows and two blocks an SM are better (99.3 us of a layer's products against 100.0) where the
/// activation rows beside each tile are few.
using OneOrTwo = few_rows::Shape<2, 16, 6, 2>;
using UpToEight = few_rows::Shape<8, 32, 10, 1>;
using UpToSixteen = few_rows::Shape<kMostFewRows, 32, 7, 1>;
/// Tiles of 64 rows, where blocks have as many: activations come once for twice the weights.
using UpToEightWide = few_rows::Shape<8, 64, 5, 1, 16384>;
using UpToSixteenWide = few_rows::Shape<kMostFewRows, 64, 4, 1, 16384, 1>;
constexpr int kWideRows = 44;  // of a block, at least

template <class S, bool kIsGated, class T>
void launch(const Product<T>& p, int num_sms, cudaStream_t stream) {
  using namespace few_rows;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<S>));
  constexpr int kHalves = kIsGated ? 2 : 1;
  constexpr std::int64_t kElement = sizeof(T);
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;  // by 256 bytes: 7 % slower
  const Tiles tiles(p.width, S::kTileWidth / kHalves, num_sms * S::kBlocksPerSm);
  const std::int64_t chunks = p.cols / kChunkColumns;
  const std::int64_t row_bytes = p.cols * kElement;
  const Params<T> params{
      .weights =
          rows_map<4>(const_cast<void*>(p.weight), kDTypeOf<T>, {kChunkColumns, p.width, kHalves, chunks},
                      {row_bytes, row_bytes * p.width, kLineBytes},
                      {kChunkColumns, tiles.height, kHalves, S::kChunks}, kPromotion),
      .rows = rows_map<4>(const_cast<T*>(p.in), kDTypeOf<T>, {kChunkColumns, p.rows, 1, chunks},
                          {p.in_row * kElement, 16, kLineBytes}, {kChunkColumns, p.rows, 1, S::kChunks},
                          kPromotion),
      .product = p,
      .tiles = tiles};
  const auto kernel = product_kernel<T, S, kIsGated>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, tiles.blocks, kThreads, kBytes, stream, true, params);
}

template <bool kIsGated, class T>
void launch_for_rows(const Product<T>& p, int num_sms, cudaStream_t stream) {
  if (p.rows <= OneOrTwo::kRows) return launch<OneOrTwo, kIsGated>(p, num_sms, stream);
  const bool is_wide = p.width * (kIsGated ? 2 : 1) >= kWideRows * num_sms;
  if (p.rows <= UpToEight::kRows)
    return is_wide ? launch<UpToEightWide, kIsGated>(p, num_sms, stream)
                   : launch<UpToEight, kIsGated>(p, num_sms, stream);
  is_wide ? launch<UpToSixteenWide, kIsGated>(p, num_sms, stream)
          : launch<UpToSixteen, kIsGated>(p, num_sms, stream);
}

}  // namespace

template <class T>
bool fits_few_rows(const Product<T>& p) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  return p.heads == 1 && p.rows <= kMostFewRows && p.cols > 0 && p.cols % kChunkColumns == 0 &&
         p.in_row % kElements == 0 && is_aligned(p.in) && is_aligned(p.weight);
}

template <class T>
void multiply_few_rows(const Product<T>& product, int num_sms, cudaStream_t stream) {
  launch_for_rows<false>(product, num_sms, stream);
}

template <class T>
void multiply_few_rows_gated(const Product<T>& product, int num_sms, cudaStream_t stream) {
  launch_for_rows<true>(product, num_sms, stream);
}

#define HELIX_INSTANTIATE(T)                                             \
  template bool fits_few_rows(const Product<T>&);                        \
  template void multiply_few_rows(const Product<T>&, int, cudaStream_t); \
  template void multiply_few_rows_gated(const Product<T>&, int, cudaStream_t);
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
