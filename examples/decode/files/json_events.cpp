// SPDX-License-Identifier: Apache-2.0
// JsonEvents: the parser library, which no other file includes, and the error messages.
#include "files/json_events.hpp"

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

/// The parser's error message without the name of its exception and, for a text of one line, without the line
/// number: "[json.exception.parse_error.101] parse error at line 2, column 1: syntax error while parsing
/// ...".
std::string_view reason(std::string_view what) {
  const auto drop_through = [&](std::string_view end) {
    if (const std::size_t at = what.find(end); at != std::string_view::npos)
      what.remove_prefix(at + end.size());
  };
  if (what.starts_with("[json.exception.")) drop_through("] ");
  if (what.starts_with("parse error at ")) drop_through(" at ");
  if (what.starts_with("line 1,")) drop_through(": ");
  return what;
}

/// Receives the events of nlohmann's parser. JsonEvents does not receive them itself, because then all its
/// readers would include the library.
class ParserEvents {
 public:
  explicit ParserEvents(JsonEvents& events) : events_(events) {}

  bool null() { return events_.null(); }
  bool boolean(bool value) { return events_.boolean(value); }
  bool number_integer(std::int64_t value) { return events_.number_integer(value); }
  bool number_unsigned(std::uint64_t value) { return events_.number_unsigned(value); }
  bool number_float(double value, const std::string& text) { return events_.number_float(value, text); }
  bool string(std::string& value) { return events_.string(value); }
  bool binary(nlohmann::json::binary_t&) { return false; }  // a JSON text holds no binary values
  bool start_object(std::size_t size) { return events_.start_object(size); }
  bool key(std::string& key) { return events_.key(key); }
  bool end_object() { return events_.end_object(); }
  bool start_array(std::size_t size) { return events_.start_array(size); }
  bool end_array() { return events_.end_array(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
    return events_.parse_error(position, reason(error.what()));
  }

 private:
  JsonEvents& events_;
};

}  // namespace

void JsonEvents::parse(std::string_view text) {
  ParserEvents events(*this);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
  // nlohmann's parser takes a NUL after a value for the end of the text.
  if (const std::size_t at = text.find('\0'); at != std::string_view::npos) parse_error(at + 1, "a NUL byte");
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

bool JsonEvents::start_object(std::size_t) {
  return unexpected("an object");
}

bool JsonEvents::key(std::string&) {
  return unexpected("a key");
}

bool JsonEvents::start_array(std::size_t) {
  return unexpected("an array");
}

bool JsonEvents::parse_error(std::size_t position, std::string_view why) {
  throw Error(ErrorCode::invalid_file, file_, ": not valid JSON at byte ", position, ": ", printable(why));
}

bool JsonEvents::unexpected(const std::string& what) {
  throw Error(ErrorCode::invalid_file, file_, ": unexpected ", what);
}

}  // namespace helix::decode
