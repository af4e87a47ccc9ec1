// SPDX-License-Identifier: Apache-2.0
// Launches of the products of few rows.
#include <cstdint>

#include <helix/dtype.hpp>

#include "cuda/linear/few_rows.cuh"
#include "cuda/linear/few_rows.hpp"
#include "cuda/linear/few_rows_launch.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {
namespace {

using few_rows::OneOrTwo;
using few_rows::UpToEight;
using few_rows::UpToSixteen;
/// Tiles of 64 rows, for blocks with that many: activations are copied once for twice the weights.
using UpToEightWide = few_rows::Shape<8, 64, 5, 1, 16384>;
using UpToSixteenWide = few_rows::Shape<kMaxFewRows, 64, 4, 1, 16384, 1>;
/// Weight rows per block from which tiles of 64 rows are used. With 124 (16384 x 16384), 8 and 16 rows take
/// 0.990 and 0.980 of the time with tiles of 32 (docs/measurements/steps.md, commit 840e898). The crossover
/// was not measured separately.
constexpr int kWideRows = 44;

template <class S, class Tail, class T>
void launch(const Product<T>& p, int num_sms, cudaStream_t stream) {
  using namespace few_rows;
  const Tiles tiles(p.width, S::kTileWidth / Tail::kHalves, num_sms * S::kBlocksPerSm);
  const std::int64_t row_bytes = p.cols * std::int64_t{sizeof(T)};
  const CUtensorMap weights =
      rows_map<4>(const_cast<void*>(p.weight), kDTypeOf<T>,
                  {kChunkColumns, p.width, Tail::kHalves, p.cols / kChunkColumns},
                  {row_bytes, row_bytes * p.width, kChunkRowBytes},
                  {kChunkColumns, tiles.height, Tail::kHalves, S::kChunks}, kPromotion);
  launch_product<S>(p, p.rows, weights, tiles, Tail{}, stream);
}

template <class Tail, class T>
void launch_for_rows(const Product<T>& p, int num_sms, cudaStream_t stream) {
  if (p.rows <= OneOrTwo::kRows) return launch<OneOrTwo, Tail>(p, num_sms, stream);
  const bool is_wide = p.width * Tail::kHalves >= kWideRows * num_sms;
  if (p.rows <= UpToEight::kRows)
    return is_wide ? launch<UpToEightWide, Tail>(p, num_sms, stream)
                   : launch<UpToEight, Tail>(p, num_sms, stream);
  is_wide ? launch<UpToSixteenWide, Tail>(p, num_sms, stream) : launch<UpToSixteen, Tail>(p, num_sms, stream);
}

}  // namespace

template <class T>
bool has_few_rows(const Product<T>& p) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  return p.heads == 1 && p.rows <= kMaxFewRows && p.cols > 0 && p.cols % kChunkColumns == 0 &&
         p.in_row % kElements == 0 && is_map_stride(p.rows, p.in_row * static_cast<std::int64_t>(sizeof(T)));
}

template <class T>
bool fits_few_rows(const Product<T>& p) {
  return has_few_rows(p) && common_alignment({address_of(p.in), address_of(p.weight)}) == 16;
}

template <class T>
void multiply_few_rows(const Product<T>& product, int num_sms, cudaStream_t stream) {
  launch_for_rows<few_rows::Stored>(product, num_sms, stream);
}

template <class T>
void multiply_few_rows_gated(const Product<T>& product, int num_sms, cudaStream_t stream) {
  launch_for_rows<few_rows::Gated>(product, num_sms, stream);
}

#define HELIX_INSTANTIATE(T)                                             \
  template bool has_few_rows(const Product<T>&);                         \
  template bool fits_few_rows(const Product<T>&);                        \
  template void multiply_few_rows(const Product<T>&, int, cudaStream_t); \
  template void multiply_few_rows_gated(const Product<T>&, int, cudaStream_t);
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
