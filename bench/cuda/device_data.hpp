// SPDX-License-Identifier: Apache-2.0
// Creates benchmark data on the calling thread's device, and copies it back to the host to check results.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/ceilings/ceilings.hpp"

namespace helix::bench {

inline constexpr std::size_t kBf16Bytes = 2;
inline constexpr std::uint64_t kSeed = 12345;

/// Uniform random elements of `dtype` in (-1, 1). Waits.
inline cuda::Buffer random_elements(DType dtype, std::int64_t elements, std::uint64_t seed) {
  cuda::Buffer buffer(static_cast<std::size_t>(elements) * size_bytes(dtype));
  const cuda::Stream stream = cuda::Stream::create();
  cuda::bench::launch_fill(buffer.data(), dtype, static_cast<std::size_t>(elements), seed, stream.handle());
  cuda::synchronize(stream);
  return buffer;
}

/// Uniform random bf16 in (-1, 1). Waits.
inline cuda::Buffer random_bf16(std::int64_t elements, std::uint64_t seed) {
  return random_elements(DType::bf16, elements, seed);
}

/// Copies `values` to the device of `operators`. Waits.
template <class T, class Operators>
cuda::Buffer on_device(const Operators& operators, const std::vector<T>& values) {
  cuda::Buffer buffer = operators.allocate(values.size() * sizeof(T));
  const cuda::Stream stream = operators.create_stream();
  operators.upload(buffer.data(), values.data(), buffer.size_bytes(), stream);
  operators.synchronize(stream);
  return buffer;
}

/// Copies `count` elements at device address `data` to the host. Waits only for the copy: synchronize first.
template <class T, class Operators>
std::vector<T> on_host(const Operators& operators, const void* data, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  const cuda::Stream stream = operators.create_stream();
  operators.download(values.data(), data, values.size() * sizeof(T), stream);
  operators.synchronize(stream);
  return values;
}

inline std::vector<float> random_floats(std::int64_t count, float scale, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = uniform(random);
  return values;
}

inline double to_double(double x) {
  return x;
}
template <class T>
double to_double(T x) {
  return static_cast<double>(static_cast<float>(x));
}

/// The RMS norm of `sums` [rows, weight.size()].
inline std::vector<double> normed_rows(std::vector<double> sums, const std::vector<bf16>& weight,
                                       double epsilon) {
  const std::size_t width = weight.size();
  for (std::size_t begin = 0; begin < sums.size(); begin += width) {
    double squares = 0.0;
    for (std::size_t i = begin; i < begin + width; ++i) squares += sums[i] * sums[i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(width) + epsilon);
    for (std::size_t i = 0; i < width; ++i) sums[begin + i] *= scale * to_double(weight[i]);
  }
  return sums;
}

/// |got - expected| / |expected|, Euclidean; NaN if either holds one.
template <class T, class U>
double relative_error(const std::vector<T>& got, const std::vector<U>& expected) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double right = to_double(expected[i]);
    difference += std::pow(to_double(got[i]) - right, 2);
    norm += right * right;
  }
  return std::sqrt(difference / norm);
}

}  // namespace helix::bench
