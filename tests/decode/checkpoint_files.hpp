// SPDX-License-Identifier: Apache-2.0
// Writes valid and broken safetensors files and checkpoint directories for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/dtype.hpp>

#include "support/process.hpp"

namespace helix::decode::test {

using helix::test::ScratchDirectory;

/// u64 header size, header, data.
inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  std::string bytes(8, '\0');
  const std::uint64_t size = header.size();
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(size >> (8 * i) & 0xff);
  return bytes.append(header).append(data);
}

/// A tensor to write.
struct TensorContent {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string data;
};

/// A valid file of `tensors`. `shift` bytes of padding in the header change the alignment of the data.
inline std::string safetensors_of(const std::vector<TensorContent>& tensors, std::size_t shift = 0) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::string data;
  for (const TensorContent& tensor : tensors) {
    header += ",\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[";
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      header.append(d == 0 ? "" : ",").append(std::to_string(tensor.shape[d]));
    }
    header += "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
    data += tensor.data;
    header += std::to_string(data.size()) + "]}";
  }
  header += "}";
  header.append(shift, ' ');
  return safetensors_bytes(header, data);
}

/// Like safetensors_of(), with data that begins `remainder` bytes after a multiple of 64.
inline std::string safetensors_at(std::size_t remainder, const std::vector<TensorContent>& tensors) {
  std::size_t data_bytes = 0;
  for (const TensorContent& tensor : tensors) data_bytes += tensor.data.size();
  const std::size_t header_bytes = safetensors_of(tensors).size() - data_bytes;
  return safetensors_of(tensors, (64 + remainder - header_bytes % 64) % 64);
}

/// The value of element (row, col) of tensor `name`: a small integer that is exact in every format.
inline int element(std::string_view name, std::int64_t row, std::int64_t col) {
  std::uint64_t hash = 1469598103934665603u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  hash ^= static_cast<std::uint64_t>(row) * 0x9e3779b97f4a7c15u +
          static_cast<std::uint64_t>(col) * 0xc2b2ae3d27d4eb4fu;
  hash ^= hash >> 29;
  hash *= 0xbf58476d1ce4e5b9u;
  hash ^= hash >> 32;
  return static_cast<int>(hash % 31) - 15;
}

template <class T>
std::string elements_as(std::string_view name, std::int64_t rows, std::int64_t cols) {
  std::string data;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      const T value(static_cast<float>(element(name, row, col)));
      char bytes[sizeof(T)];
      std::memcpy(bytes, &value, sizeof(T));
      data.append(bytes, sizeof(T));
    }
  }
  return data;
}

/// A matrix (`rows` > 0) or a vector (`rows` == 0) filled by element().
inline TensorContent filled(std::string name, std::int64_t rows, std::int64_t cols,
                            DType dtype = DType::bf16) {
  TensorContent tensor;
  tensor.shape = rows == 0 ? std::vector<std::int64_t>{cols} : std::vector<std::int64_t>{rows, cols};
  const std::int64_t all_rows = rows == 0 ? 1 : rows;
  dispatch(dtype, [&]<class T>(T*) { tensor.data = elements_as<T>(name, all_rows, cols); });
  constexpr std::string_view kNames[] = {"F32", "F16", "BF16", "F8_E4M3"};
  tensor.dtype = kNames[static_cast<std::size_t>(dtype)];
  tensor.name = std::move(name);
  return tensor;
}

}  // namespace helix::decode::test
