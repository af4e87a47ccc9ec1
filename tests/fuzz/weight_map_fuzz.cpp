// SPDX-License-Identifier: Apache-2.0
// Any bytes as a weight index give helix::Error, or names of files in the same directory.
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.hpp"
#include "fuzz.hpp"

namespace {

using helix::fuzz::require;

void check(std::string_view text) {
  const auto shards = helix::decode::parse_weight_map(text, "fuzz");
  require(!shards.empty());
  for (const auto& [tensor, shard] : shards) {
    require(!shard.empty() && shard != "." && shard != ".." && shard.find('/') == std::string::npos);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  helix::fuzz::read_file(data, size, check);
  return 0;
}
