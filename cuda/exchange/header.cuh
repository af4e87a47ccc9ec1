// SPDX-License-Identifier: Apache-2.0
// Headers of exchange messages on the device, one warp at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/backend.hpp>

#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

// Device code accesses a header as words, window_combine.cu as halves.
inline constexpr int kHeaderWords = sizeof(ExchangeHeader) / sizeof(std::uint32_t);
static_assert(kHeaderWords == 4 && offsetof(ExchangeHeader, epoch) == 0 &&
              offsetof(ExchangeHeader, tokens) == 8 && offsetof(ExchangeHeader, sender) == 12);

/// Sum over the lanes of the warp, returned in all lanes.
__device__ __forceinline__ unsigned long long sum_of_lanes(unsigned long long terms) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) terms += __shfl_xor_sync(~0u, terms, offset);
  return terms;
}

/// Sum of exchange_epoch_term() over the positions, in all lanes of the warp; over this warp's share if the
/// first `threads` threads of a block (whole warps) share them.
__device__ inline unsigned long long sum_epoch_terms(const std::int64_t* positions, std::int64_t tokens,
                                                     int threads = kWarp) {
  unsigned long long terms = 0;
  if (positions != nullptr) {
#pragma unroll 4
    for (std::int64_t i = static_cast<int>(threadIdx.x) % threads; i < tokens; i += threads)
      terms += exchange_epoch_term(positions[i], i);
  }
  return sum_of_lanes(terms);
}

/// Word `i` of a header. Uses words because messages need not be aligned to 8.
__device__ __forceinline__ std::uint32_t header_word(std::uint64_t epoch, std::int64_t tokens,
                                                     std::int64_t sender, int i) {
  switch (i) {
    case 0:
      return static_cast<std::uint32_t>(epoch);
    case 1:
      return static_cast<std::uint32_t>(epoch >> 32);
    case 2:
      return static_cast<std::uint32_t>(tokens);
    default:
      return static_cast<std::uint32_t>(sender);
  }
}

/// Increments the count of exchanges and writes the headers. Called by one warp; no other warp may read the
/// count.
__device__ inline void write_headers(const StampArgs& args) {
  const std::uint64_t exchanges = *args.exchanges + 1;
  const std::uint64_t epoch = exchange_epoch(exchanges, sum_epoch_terms(args.positions, args.tokens));
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  __syncwarp();
  if (lane == 0) *args.exchanges = exchanges;
  for (int i = lane; i < static_cast<int>(args.count) * kHeaderWords; i += kWarp) {
    auto* header = reinterpret_cast<std::uint32_t*>(args.message + i / kHeaderWords * args.message_bytes);
    header[i % kHeaderWords] = header_word(epoch, args.tokens, args.sender, i % kHeaderWords);
  }
}

}  // namespace helix::cuda
