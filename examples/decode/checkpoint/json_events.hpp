// SPDX-License-Identifier: Apache-2.0
// JsonEvents: a JSON document from a file that nobody vouches for, taken piece by piece without a copy of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace helix::decode {

/// Base of readers that take a document in one pass. A reader overrides the events that it expects; any other
/// one is refused. Beyond its own bytes a document costs what the reader keeps of it. An event returns
/// whether to go on, which is always true: what is refused throws.
class JsonEvents {
 public:
  /// Nesting that no config, index, prompt or measurement comes near.
  static constexpr std::size_t kMaxNesting = 16;

  /// `file`: its name, for messages; outlives the reader.
  explicit JsonEvents(std::string_view file) : file_(file) {}
  virtual ~JsonEvents() = default;

  /// Reads the whole of `text`. @throws Error(invalid_file) naming the file for malformed text, such as one
  /// with a NUL, and what the events throw.
  void parse(std::string_view text);

  virtual bool null() { return unexpected("null"); }
  virtual bool boolean(bool) { return unexpected("a boolean"); }
  virtual bool number_integer(std::int64_t value);
  virtual bool number_unsigned(std::uint64_t value);
  virtual bool number_float(double value, const std::string& text);
  virtual bool string(std::string& value);
  virtual bool start_object(std::size_t size);
  virtual bool key(std::string& key);
  virtual bool end_object() { return unexpected("the end of an object"); }
  virtual bool start_array(std::size_t size);
  virtual bool end_array() { return unexpected("the end of an array"); }
  /// The text is no JSON from byte `position` on. `why` quotes it, and so may hold any bytes.
  virtual bool parse_error(std::size_t position, std::string_view why);

 protected:
  /// Refuses what came instead of what was expected. Throws; bool serves the events.
  virtual bool unexpected(const std::string& what);

  std::string_view file() const { return file_; }

 private:
  std::string_view file_;
};

}  // namespace helix::decode
