// SPDX-License-Identifier: Apache-2.0
// The kernels of cuda::LocalComm: one launch does a collective's work for all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

namespace helix::cuda {

inline constexpr int kMaxLocalRanks = 64;

/// Sums of all ranks' inputs. `scatter`: in[r] is [num_ranks, count] and out[r] [count] gets slice r;
/// otherwise in[r] and out[r] are [count] and every out gets the sum.
struct LocalReduction {
  std::array<const void*, kMaxLocalRanks> in;
  std::array<void*, kMaxLocalRanks> out;
  int num_ranks;
  std::int64_t count;  // elements
  bool scatter;
};

/// A copy of `bytes` from `source` to `target`, which do not overlap.
struct LocalCopy {
  std::byte* target;
  const std::byte* source;
  std::int64_t bytes;
};

/// Queues the sum in rank order with f32 accumulation. An output may be an input of its own rank (its own
/// slice, if scattered). `dtype` is f32, f16 or bf16; pointers are aligned to its size.
void local_reduce(const LocalReduction& reduction, DType dtype, StreamHandle stream);

/// Queues all copies, in any order.
void local_copy(std::span<const LocalCopy> copies, StreamHandle stream);

}  // namespace helix::cuda
