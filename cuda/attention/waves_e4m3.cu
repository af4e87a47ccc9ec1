// SPDX-License-Identifier: Apache-2.0
// The kernel for many query rows over e4m3 KV.
#include "cuda/attention/wave_launch.cuh"

namespace helix::cuda {
namespace {

/// Query rows of a KV head from which this kernel is the fastest. 64 rows (drafts of 8 with 8 heads a KV
/// head, H200), by this kernel and without it: 8 sequences of 131072 tokens 719 and 1120 us, 8 of 8192 76.8
/// and 89.1, 1 of 8192 28.2 and 34.1. 32 rows, 8 of 131072: without it 590.
constexpr std::int64_t kMinRows = 64;

template <class T, class S>
void launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  WaveMaps maps;
  map_wave_queries<S>(p, call, maps);
  maps.box_tokens = Divisor(box_tokens_of(call.kv.format, S::kTokens));
  if (maps.box_tokens < kSwizzleRows || !call.has_tensor_maps)
    return launch_waves<T, fp8_e4m3, S, WaveWideningRows>(p, maps, grid);
  map_wave_rows<S>(p, call.kv, maps);
  launch_waves<T, fp8_e4m3, S, WaveWideningBoxes>(p, maps, grid);
}

}  // namespace

const AttentionKernel kWavesE4m3{
    .fits =
        [](const AttentionCall& call) {
          return fits_waves<fp8_e4m3>(call) && call.kv.format.dtype == DType::fp8_e4m3 &&
                 call.most_rows >= kMinRows;
        },
    .query_tile_rows = wave_query_tile_rows<fp8_e4m3>,
    .sm_rows = wave_query_tile_rows<fp8_e4m3>,
    .has_fixed_query_tile = false,
    .most_query_tiles = kMaxWaveQueryTiles,
    .least_rows = kMinRows,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          with_wave_instance<fp8_e4m3>(p.head_dim, p.value_dim, [&]<class S>(S*) {
            if (call.dtype == DType::bf16) {
              launch<bf16, S>(p, call, grid);
            } else {
              launch<f16, S>(p, call, grid);
            }
          });
        }};

}  // namespace helix::cuda
