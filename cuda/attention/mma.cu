// SPDX-License-Identifier: Apache-2.0
// The entries of mma.cuh and mma_latent.cuh in the table of kernels.
#include "cuda/attention/mma_latent_launch.cuh"
#include "cuda/attention/mma_launch.cuh"

namespace helix::cuda {
namespace {

/// Whether q has 16 bits, and KV 16 bits or e4m3.
bool fits_types(const AttentionCall& call) {
  const DType kv = call.kv.format.dtype;
  return size_bytes(call.dtype) == 2 && (size_bytes(kv) == 2 || kv == DType::fp8_e4m3);
}

/// Whether q (f16) has more mantissa bits than KV (bf16).
bool has_rest(const AttentionCall& call) {
  return call.dtype == DType::f16 && call.kv.format.dtype == DType::bf16;
}

bool fits(const AttentionCall& call) {
  return fits_types(call) && std::max(call.kv.format.head_dim, call.kv.format.value_dim) <= kMmaColumns;
}

bool fits_latent(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return fits_types(call) && format.is_latent && is_latent_shape(format.head_dim, format.value_dim);
}

int sm_rows(std::int64_t head_dim, std::int64_t value_dim) {
  return std::max(head_dim, value_dim) <= kMmaColumns ? 2 * kMmaTileRows : 0;
}

int sm_rows_of_latents(std::int64_t head_dim, std::int64_t value_dim) {
  return is_latent_shape(head_dim, value_dim) ? kWideMmaLatentRows : 0;
}

/// Calls use(KV*) for the type of KV.
template <class Use>
void with_kv_type(const AttentionCall& call, const Use& use) {
  switch (call.kv.format.dtype) {
    case DType::bf16:
      return use(static_cast<bf16*>(nullptr));
    case DType::f16:
      return use(static_cast<f16*>(nullptr));
    default:
      return use(static_cast<fp8_e4m3*>(nullptr));
  }
}

}  // namespace

const AttentionKernel kMmaRest{.fits = [](const AttentionCall& call) { return fits(call) && has_rest(call); },
                               .query_tile_rows = [](std::int64_t, std::int64_t) { return kMmaRows; },
                               .sm_rows = sm_rows,
                               .has_fixed_query_tile = false,
                               .launch = launch_mma<bf16, true>};

const AttentionKernel kMma{
    .fits = fits,
    .query_tile_rows = [](std::int64_t, std::int64_t) { return kMmaTileRows; },
    .sm_rows = sm_rows,
    .has_fixed_query_tile = false,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          with_kv_type(call, [&]<class KV>(KV*) { launch_mma<KV, false>(p, call, grid); });
        }};

const AttentionKernel kMmaLatentRest{
    .fits = [](const AttentionCall& call) { return fits_latent(call) && has_rest(call); },
    .query_tile_rows = [](std::int64_t, std::int64_t) { return kMmaRows; },
    .sm_rows = sm_rows_of_latents,
    .has_fixed_query_tile = false,
    .launch = launch_mma_latent_tiles<bf16, 1, 1, true, 1, kMinSharedMemory.block_bytes>};

const AttentionKernel kWideMmaLatent{
    .fits =
        [](const AttentionCall& call) {
          return fits_latent(call) && call.memory.block_bytes >= kWideMmaLatentBytes;
        },
    .query_tile_rows = [](std::int64_t, std::int64_t) { return kWideMmaLatentRows; },
    .sm_rows = sm_rows_of_latents,
    .has_fixed_query_tile = false,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          with_kv_type(call, [&]<class KV>(KV*) { launch_wide_mma_latent<KV>(p, call, grid); });
        }};

const AttentionKernel kMmaLatent{
    .fits = fits_latent,
    .query_tile_rows = [](std::int64_t, std::int64_t) { return kMmaLatentRows; },
    .sm_rows = sm_rows_of_latents,
    .has_fixed_query_tile = false,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          with_kv_type(call, [&]<class KV>(KV*) { launch_mma_latent<KV>(p, call, grid); });
        }};

}  // namespace helix::cuda
