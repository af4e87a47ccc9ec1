// SPDX-License-Identifier: Apache-2.0
// Any bytes as a weight index: helix::Error, or names of files in the same directory.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <helix/error.hpp>

#include "checkpoint/checkpoint.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void read(std::string_view text) {
  try {
    const auto shards = helix::decode::parse_weight_map(text, "fuzz");
    require(!shards.empty());
    for (const auto& [tensor, shard] : shards) {
      require(!shard.empty() && shard != "." && shard != ".." && shard.find('/') == std::string::npos);
    }
  } catch (const helix::Error& error) {
    require(error.code() == helix::ErrorCode::invalid_file);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read({reinterpret_cast<const char*>(data), size});
  return 0;
}
