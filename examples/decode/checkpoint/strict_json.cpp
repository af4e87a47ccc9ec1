// SPDX-License-Identifier: Apache-2.0
// The bounded JSON parser.
#include "checkpoint/strict_json.hpp"

#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

constexpr std::size_t kMaxNesting = 16;
constexpr std::size_t kMaxQuotedBytes = 100;

}  // namespace

std::string printable(std::string_view text) {
  std::string result = "'";
  for (const char c : text.substr(0, kMaxQuotedBytes)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kMaxQuotedBytes ? "...'" : "'");
}

nlohmann::json parse_strict_json(std::string_view text, std::string_view file) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> open;  // keys seen in each open object; arrays stay empty
  const auto watch = [&](int, Event event, nlohmann::json& parsed) {
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        open.emplace_back();
        HELIX_EXPECTS(open.size() <= kMaxNesting, ErrorCode::invalid_file, file, ": JSON nested deeper than ",
                      kMaxNesting, " levels");
        break;
      case Event::object_end:
      case Event::array_end:
        open.pop_back();
        break;
      case Event::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        HELIX_EXPECTS(open.back().insert(key).second, ErrorCode::invalid_file, file, ": key ", printable(key),
                      " appears twice in one object");
        break;
      }
      case Event::value:
        break;
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), watch);
  } catch (const nlohmann::json::exception& error) {
    // The library quotes the offending bytes, which may be anything.
    const std::string message = printable(std::string_view(error.what()));
    throw Error(ErrorCode::invalid_file, file, ": not valid JSON: ", message);
  }
}

}  // namespace helix::decode
