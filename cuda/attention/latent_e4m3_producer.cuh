// SPDX-License-Identifier: Apache-2.0
// The producers of a block that attends to latents of e4m3: they copy rows as they are, of pages of any size
// and strides.
#pragma once

#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_producer.cuh"
#include "cuda/attention/latent_rows.cuh"

namespace helix::cuda::latent_e4m3 {

/// Each of the producer warps copies a quarter of the tokens of every KV tile, one after another, and puts
/// zeros where there is none.
template <class K>
class Copier {
 public:
  __device__ Copier(const AttentionParams& params, Shared<K>& shared) : p(params), s(shared) {}

  __device__ void run() {
    latent::produce_parts<K::kBlocks>(p, s, [&](const Part& part) { copy_tiles(part); });
  }

 private:
  static constexpr int kWarpTokens = kLatentTileTokens / kProducerWarps;
  static constexpr unsigned kPart = 16;  // bytes of a copy
  static_assert(kWarp * kPart == kLatentColumns);
  static constexpr int kRopeLanes = K::kRopeBytes / kPart;  // of a row

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }

  /// Where lane l's row of a tile lies, of the first kWarpTokens lanes; null where there is none.
  struct Row {
    const std::byte* latent = nullptr;
    const std::byte* rope = nullptr;
  };
  __device__ __forceinline__ Row row_of(const std::int32_t* pages, const QueryTileSpan& span, int first_token,
                                        int i, int count) const {
    Row row;
    const int token = first_token + i * kLatentTileTokens + warp() * kWarpTokens + lane();
    if (i >= count || lane() >= kWarpTokens || token < span.begin_token || token >= span.end_token)
      return row;
    const std::int64_t page = pages[token / p.page_tokens];
    const int in_page = token % p.page_tokens;
    row.latent = p.k.at(page, 0, in_page);
    row.rope = p.rope.at(page, 0, in_page);
    return row;
  }
  static __device__ __forceinline__ const std::byte* of_lane(const std::byte* from, int lane) {
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), lane));
  }
  __device__ __forceinline__ void copy(unsigned to, const std::byte* from, unsigned offset) const {
    latent::copy_part(to, from == nullptr ? p.k.first : from + offset, from != nullptr);
  }

  __device__ __forceinline__ void copy_rows(unsigned tile, const Row& row) const {
    const unsigned first = tile + static_cast<unsigned>(warp() * kWarpTokens) * K::kRowBytes;
    const auto part = static_cast<unsigned>(lane()) * kPart;
#pragma unroll
    for (int k = 0; k < kWarpTokens; ++k)
      copy(first + static_cast<unsigned>(k) * K::kRowBytes + part, of_lane(row.latent, k), part);
    constexpr int kRopeRows = kWarp / kRopeLanes;  // at a time
    const auto rope_part = static_cast<unsigned>(lane() % kRopeLanes) * kPart;
#pragma unroll
    for (int k = 0; k < kWarpTokens; k += kRopeRows) {
      const int r = k + lane() / kRopeLanes;
      copy(first + static_cast<unsigned>(r) * K::kRowBytes + K::kRopeAt + rope_part, of_lane(row.rope, r),
           rope_part);
    }
    if constexpr (K::kIsMixed) {
      if (lane() < kWarpTokens)
        copy(first + static_cast<unsigned>(lane()) * K::kRowBytes + K::kScalesAt, row.latent, K::kScalesAt);
    }
  }

  __device__ __forceinline__ void copy_tiles(const Part& part) {
    const QueryTileSpan span = part.span;
    const std::int32_t* pages = p.lists.pages + span.first_page;
    const int first_token = part.first_token;
    const int count = part.count;
    Row row = row_of(pages, span, first_token, 0, count);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Row next = row_of(pages, span, first_token, i + 1, count);
      barrier_wait(at(&s.empty[place_.stage]), place_.parity ^ 1u);
      copy_rows(at(s.tiles[place_.stage]), row);
      barrier_arrive_after_copies(at(&s.full[place_.stage]));
      place_.advance();
      row = next;
    }
  }

  const AttentionParams& p;
  Shared<K>& s;
  StagePlace<K> place_{0};
};

}  // namespace helix::cuda::latent_e4m3
