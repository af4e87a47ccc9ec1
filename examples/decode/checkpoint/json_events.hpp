// SPDX-License-Identifier: Apache-2.0
// JsonEvents: a JSON document from a file that nobody vouches for, taken piece by piece without a copy of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace helix::decode {

/// Base of readers that take a document in one pass. A reader overrides the events that it expects; any other
/// one is refused. Beyond its own bytes a document costs what the reader keeps of it.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  /// Nesting that no config, index, prompt or measurement comes near.
  static constexpr std::size_t kMaxNesting = 16;

  /// `file`: its name, for messages; outlives the reader.
  explicit JsonEvents(std::string_view file) : file_(file) {}

  /// Reads the whole of `text`. @throws Error(invalid_file) naming the file for malformed text, and what the
  /// events throw.
  void parse(std::string_view text);

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(std::int64_t value) override;
  bool number_unsigned(std::uint64_t value) override;
  bool number_float(double, const std::string& text) override;
  bool string(std::string& value) override;
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }
  bool start_object(std::size_t) override { return unexpected("an object"); }
  bool key(std::string&) override { return unexpected("a key"); }
  bool end_object() override { return unexpected("the end of an object"); }
  bool start_array(std::size_t) override { return unexpected("an array"); }
  bool end_array() override { return unexpected("the end of an array"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) override;

 protected:
  /// Refuses what came instead of what was expected. Throws; bool serves the events.
  virtual bool unexpected(const std::string& what);

  std::string_view file() const { return file_; }

 private:
  std::string_view file_;
};

}  // namespace helix::decode
