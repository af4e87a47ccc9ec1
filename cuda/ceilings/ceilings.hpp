// SPDX-License-Identifier: Apache-2.0
// Kernels of the benchmarks: what the memory gives at most, and random data to read.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

namespace helix::cuda::bench {

/// Reads `bytes` (a multiple of 16) once, 16 bytes a thread and load, in a grid-stride loop of 4 blocks an
/// SM.
void launch_read(const void* data, std::size_t bytes, void* sink, StreamHandle stream);

/// Uniform random elements of `dtype` in (-1, 1), a function of `seed` and the place.
void launch_fill(void* data, DType dtype, std::size_t elements, std::uint64_t seed, StreamHandle stream);

}  // namespace helix::cuda::bench
