// SPDX-License-Identifier: Apache-2.0
// JsonEvents: what is refused, in words.
#include "checkpoint/json_events.hpp"

#include <helix/error.hpp>

#include "checkpoint/strict_json.hpp"

namespace helix::decode {

void JsonEvents::parse(std::string_view text) {
  nlohmann::json::sax_parse(text.begin(), text.end(), this);
}

bool JsonEvents::number_integer(std::int64_t value) {
  return unexpected("the number " + std::to_string(value));
}

bool JsonEvents::number_unsigned(std::uint64_t value) {
  return unexpected("the number " + std::to_string(value));
}

bool JsonEvents::number_float(double, const std::string& text) {
  return unexpected("the number " + printable(text));
}

bool JsonEvents::string(std::string& value) {
  return unexpected("the string " + printable(value));
}

bool JsonEvents::parse_error(std::size_t position, const std::string&,
                             const nlohmann::json::exception& error) {
  // The library quotes the offending bytes, which may be anything.
  throw Error(ErrorCode::invalid_file, file_, ": not valid JSON at byte ", position, ": ",
              printable(error.what()));
}

bool JsonEvents::unexpected(const std::string& what) {
  throw Error(ErrorCode::invalid_file, file_, ": unexpected ", what);
}

}  // namespace helix::decode
