// SPDX-License-Identifier: Apache-2.0
// The kernel for many query rows over KV of q's type.
#include "cuda/attention/wave_launch.cuh"

namespace helix::cuda {
namespace {

/// Query rows of a KV head from which this kernel is the fastest. 32 rows (drafts of 4 with 8 heads a KV
/// head, H200), by this kernel and without it: 8 sequences of 131072 tokens 974 and 996 us, 1 of 8192 tokens
/// 24.6 and 28.3, 8 of 8192 tokens 80.6 and 78.4.
constexpr std::int64_t kMinRows = 32;

template <class T, class S>
void launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  WaveMaps maps;
  map_wave_queries<S>(p, call, maps);
  maps.box_tokens = Divisor(box_tokens_of(call.kv.format, S::kTokens));
  if (maps.box_tokens < kSwizzleRows) return launch_waves<T, T, S, WaveChunkCopies>(p, maps, grid);
  map_wave_rows<S>(p, call.kv, maps);
  launch_waves<T, T, S, BoxCopies>(p, maps, grid);
}

}  // namespace

const AttentionKernel kWaves{
    .fits =
        [](const AttentionCall& call) {
          return fits_waves<bf16>(call) && call.dtype == call.kv.format.dtype && call.has_tensor_maps &&
                 call.most_rows >= kMinRows;
        },
    .query_tile_rows = wave_query_tile_rows<bf16>,
    .sm_rows = wave_query_tile_rows<bf16>,
    .has_fixed_query_tile = false,
    .most_query_tiles = kMaxWaveQueryTiles,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          with_wave_instance<bf16>(p.head_dim, p.value_dim, [&]<class S>(S*) {
            if (call.dtype == DType::bf16) {
              launch<bf16, S>(p, call, grid);
            } else {
              launch<f16, S>(p, call, grid);
            }
          });
        }};

}  // namespace helix::cuda
