// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors header give helix::Error or a header whose guarantees hold, nothing else.
#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <helix/error.hpp>

#include "checkpoint/safetensors.hpp"
#include "fuzz.hpp"

namespace {

using helix::fuzz::require;

void parse(std::span<const std::byte> bytes, std::uint64_t file_size) {
  using helix::ErrorCode;
  try {
    const auto header = helix::decode::parse_safetensors_header(bytes, file_size, "fuzz");
    require(header.data_offset <= file_size);
    const std::uint64_t data_bytes = file_size - header.data_offset;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
    for (std::size_t i = 0; i < header.tensors.size(); ++i) {
      const auto& tensor = header.tensors[i];
      require(i == 0 || header.tensors[i - 1].name < tensor.name);
      require(tensor.begin <= tensor.end && tensor.end <= data_bytes);
      require(tensor.rows() >= 0 && tensor.cols() >= 0);
      if (tensor.dtype) {
        const std::uint64_t elements =
            static_cast<std::uint64_t>(tensor.rows()) * static_cast<std::uint64_t>(tensor.cols());
        require(elements * helix::size_bytes(*tensor.dtype) == tensor.end - tensor.begin);
      }
      ranges.emplace_back(tensor.begin, tensor.end);
    }
    std::sort(ranges.begin(), ranges.end());
    std::uint64_t covered = 0;
    for (const auto& [begin, end] : ranges) {
      require(begin == covered);
      covered = end;
    }
    require(covered == data_bytes);
  } catch (const helix::Error& error) {
    require(error.code() == ErrorCode::invalid_file);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // The first 8 bytes claim the size of the file; the rest is its beginning. It is parsed once with the
  // claimed size and once with its real size.
  const auto bytes = std::as_bytes(std::span<const std::uint8_t>(data, size));
  std::uint64_t claimed = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(size, 8); ++i) {
    claimed |= static_cast<std::uint64_t>(data[i]) << (8 * i);
  }
  const auto file = bytes.subspan(std::min<std::size_t>(size, 8));
  parse(file, claimed);
  parse(file, file.size());
  return 0;
}
