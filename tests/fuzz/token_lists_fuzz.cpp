// SPDX-License-Identifier: Apache-2.0
// Any bytes as a file of prompts give helix::Error, or lists that are equal after writing and reading again.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/token_lists.hpp"
#include "fuzz.hpp"

namespace {

using helix::fuzz::require;

std::string written(const std::vector<std::vector<std::int32_t>>& lists) {
  std::string text = "[";
  for (const auto& list : lists) {
    text += text.size() > 1 ? ",[" : "[";
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i > 0) text += ',';
      text += std::to_string(list[i]);
    }
    text += ']';
  }
  return text + "]";
}

void check(std::string_view text) {
  using helix::decode::parse_token_lists;
  const auto lists = parse_token_lists(text, "fuzz");
  require(parse_token_lists(written(lists), "fuzz") == lists);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  helix::fuzz::read_file(data, size, check);
  return 0;
}
