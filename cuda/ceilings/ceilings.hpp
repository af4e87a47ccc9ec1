// SPDX-License-Identifier: Apache-2.0
// Kernels of the benchmarks: the memory's peak read rate, and random data to read.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

namespace helix::cuda::bench {

/// Reads `bytes` (a multiple of 16) once, 16 bytes per thread and load, in a grid-stride loop of 4 blocks per
/// SM.
void launch_read(const void* data, std::size_t bytes, void* sink, StreamHandle stream);

/// Whether this device can run launch_bulk_read(): compute capability 9.0, with code for it.
bool has_bulk_read();

/// Reads `bytes` (a multiple of 16) at `data` (aligned to 16) once, by bulk copies into rings in shared
/// memory. `blocks_per_sm` blocks, 1 or 2, fill an SM's shared memory; 224 KiB per SM are in flight at a
/// time. Adds word i % 32 of each whole 128-byte line i, counted from `data`, to the 32-bit integer at `sum`,
/// modulo 2^32.
/// @throws Error(unsupported) where has_bulk_read() is false, Error(invalid_argument) for other arguments.
void launch_bulk_read(const void* data, std::size_t bytes, int blocks_per_sm, void* sum, StreamHandle stream);

/// Uniform random elements of `dtype` in (-1, 1), a function of `seed` and the index.
void launch_fill(void* data, DType dtype, std::size_t elements, std::uint64_t seed, StreamHandle stream);

}  // namespace helix::cuda::bench
