// SPDX-License-Identifier: Apache-2.0
// The producers of a block that attends to latents of e4m3: their threads read KV tiles, and write them to
// shared memory in the type of the queries.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/latent_block.cuh"
#include "cuda/attention/latent_producer.cuh"

namespace helix::cuda::latent {

/// All producer warps share each KV tile: four threads have two rows of it, 32 apart, and each has 16 bytes
/// of every chunk of both. While a unit of chunks is widened the next one is on its way, also that of the
/// next tile; and the tile after that on its way to the L2 cache.
template <class T, int kBlocks>
class Widener {
 public:
  __device__ Widener(const AttentionParams& params, Shared<kBlocks>& shared)
      : p(params),
        s(shared),
        row_(static_cast<int>(threadIdx.x) % kWarpGroup / kRowThreads),
        part_(static_cast<int>(threadIdx.x) % kRowThreads) {}

  __device__ void run() {
    produce_parts(p, s, [&](const Part& part) { widen_tiles(part); });
  }

 private:
  static constexpr int kRowThreads = 4;
  static constexpr int kRows = 2;  // of a thread
  static constexpr int kRowStep = kLatentTileTokens / kRows;
  static constexpr int kRowPart = 16;  // bytes
  static_assert(kProducerWarps * kWarp * kRows == kLatentTileTokens * kRowThreads);
  static_assert(kRowThreads * kRowPart == kChunkColumns);
  static constexpr int kLastChunks = kUnitChunks + 1;  // of the last unit: the rope's too

  /// Where this thread's rows of a tile begin, or null where there is none to be read.
  struct Places {
    const std::byte* latent[kRows];
    const std::byte* rope[kRows];
  };
  __device__ __forceinline__ Places places_of(const Part& part, int i) const {
    Places places;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int token = part.tile_token(i) + row_ + k * kRowStep;
      places.latent[k] = nullptr;
      if (i >= part.count || token < part.span.begin_token || token >= part.span.end_token) continue;
      const int page = p.lists.pages[part.span.first_page + token / p.page_tokens];
      const int in_page = token % p.page_tokens;
      places.latent[k] = p.k.at(page, 0, in_page) + part_ * kRowPart;
      places.rope[k] = p.rope.at(page, 0, in_page) + part_ * kRowPart;
    }
    return places;
  }

  using Loaded = uint4[kLastChunks][kRows];

  /// Asks for `kCount` chunks from `chunk` on.
  template <int kCount = kUnitChunks>
  static __device__ __forceinline__ void load(const Places& places, int chunk, Loaded& to) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        to[j][k] = uint4{0, 0, 0, 0};
        if (places.latent[k] != nullptr)
          to[j][k] = __ldcg(reinterpret_cast<const uint4*>(
              chunk + j == kValueChunks ? places.rope[k] : places.latent[k] + (chunk + j) * kChunkColumns));
      }
    }
  }
  /// Brings the rows of a tile into the L2 cache, each of the row's threads a line of latents.
  __device__ __forceinline__ void prefetch(const Places& places) const {
    constexpr int kLineBytes = 128;
    static_assert(kRowThreads * kLineBytes == kLatentColumns);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (places.latent[k] == nullptr) continue;
      prefetch_line(places.latent[k] + part_ * (kLineBytes - kRowPart));
      if (part_ == 0) prefetch_line(places.rope[k]);
    }
  }

  /// Writes a unit from chunk `chunk` on, and says that it is there.
  template <int kCount = kUnitChunks>
  __device__ __forceinline__ void store(int buffer, int chunk, const Loaded& from) const {
    const unsigned first = at(s.kv[buffer]) + static_cast<unsigned>(chunk) * kChunkBytes;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const uint4& x = from[j][k];
        const unsigned to =
            first + static_cast<unsigned>(j) * kChunkBytes + static_cast<unsigned>(k * kRowStep) * kRowBytes;
        store_eight(to, 0, x.x, x.y);
        store_eight(to, 1, x.z, x.w);
      }
    }
    fence_before_copy();
    __syncwarp();
    barrier_arrive_if(threadIdx.x % kWarp == 0, at(&s.full[buffer][chunk / kUnitChunks]));
  }
  /// Eight elements, at place `i` of this thread's two in a chunk.
  __device__ __forceinline__ void store_eight(unsigned to, unsigned i, unsigned low, unsigned high) const {
    unsigned x[4];
    widen(low, x[0], x[1]);
    widen(high, x[2], x[3]);
    if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
      for (unsigned& pair : x) {
        const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pair));
        pair = pack<bf16>(wide.x, wide.y);
      }
    }
    store_shared(to + swizzled(static_cast<unsigned>(row_), static_cast<unsigned>(part_) * 2u + i),
                 uint4{x[0], x[1], x[2], x[3]});
  }

  __device__ __forceinline__ void widen_tiles(const Part& part) {
    Loaded even;
    Loaded odd;
    Places places = places_of(part, 0);
    load(places, 0, even);
    load(places, kUnitChunks, odd);
    prefetch(places_of(part, 1));
#pragma unroll 1
    for (int i = 0; i < part.count; ++i) {
      const int buffer = i % 2;
      const unsigned parity = (uses_ >> buffer & 1u) ^ 1u;
      uses_ ^= 1u << buffer;
      prefetch(places_of(part, i + 2));
      barrier_wait(at(&s.empty[buffer][0]), parity);
      store(buffer, 0, even);
      load(places, 2 * kUnitChunks, even);
      store(buffer, kUnitChunks, odd);
      load<kLastChunks>(places, 3 * kUnitChunks, odd);
      places = places_of(part, i + 1);
      barrier_wait(at(&s.empty[buffer][1]), parity);
      store(buffer, 2 * kUnitChunks, even);
      load(places, 0, even);
      store<kLastChunks>(buffer, 3 * kUnitChunks, odd);
      load(places, kUnitChunks, odd);
    }
  }

  const AttentionParams& p;
  Shared<kBlocks>& s;
  const int row_;
  const int part_;
  unsigned uses_ = 0;  // of the buffers, a bit each: whether their number is odd
};

}  // namespace helix::cuda::latent
