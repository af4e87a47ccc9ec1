// SPDX-License-Identifier: Apache-2.0
// JsonEvents: reads a JSON document from an untrusted file event by event, without building a copy of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace helix::decode {

/// Base class of readers that take a document in one pass. A reader overrides the events that it expects; any
/// other event is refused. Memory beyond the text itself is only what the reader keeps. Each event returns
/// whether to go on, which is always true, because a refusal throws.
class JsonEvents {
 public:
  /// Deepest nesting that is accepted; no config, index, prompt or measurement comes near it.
  static constexpr std::size_t kMaxNesting = 16;

  /// `file` is the file's name for messages; the string must outlive the reader.
  explicit JsonEvents(std::string_view file) : file_(file) {}
  virtual ~JsonEvents() = default;

  /// Reads the whole of `text`.
  /// @throws Error(invalid_file) naming the file if the text is malformed, for example if it has a NUL, and
  /// whatever the events throw.
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
  /// Called when the text is not JSON from byte `position` on. `why` quotes the text, so it may hold any
  /// bytes.
  virtual bool parse_error(std::size_t position, std::string_view why);

 protected:
  /// Refuses an event that was not expected. Always throws; returns bool so that events can return its
  /// result.
  virtual bool unexpected(const std::string& what);

  std::string_view file() const { return file_; }

 private:
  std::string_view file_;
};

}  // namespace helix::decode
