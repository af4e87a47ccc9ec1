// SPDX-License-Identifier: Apache-2.0
// ObjectReader: typed, bounded values out of one JSON object, with errors that name key, value and range.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <helix/error.hpp>

namespace helix::decode {

/// Reads typed, bounded values out of one JSON object, which outlives it. A key that is null counts as given
/// only for is_null(). Reading functions throw Error(invalid_file) naming file, key, value and expectation.
class ObjectReader {
 public:
  /// `prefix`: the path to the object within the file, "" or "rope_scaling." and so on, for messages.
  ObjectReader(const nlohmann::json& object, std::string_view file, std::string prefix)
      : object_(object), file_(file), prefix_(std::move(prefix)) {}

  bool has(const char* key) const { return find(key) != nullptr; }
  bool is_null(const char* key) const;
  bool is_absent(const char* key) const;

  std::int64_t integer(const char* key, std::int64_t low, std::int64_t high) const;
  std::int64_t integer_or(const char* key, std::int64_t fallback, std::int64_t low, std::int64_t high) const {
    return has(key) ? integer(key, low, high) : fallback;
  }
  double number(const char* key, double low, double high) const;
  double number_or(const char* key, double fallback, double low, double high) const {
    return has(key) ? number(key, low, high) : fallback;
  }
  bool boolean_or(const char* key, bool fallback) const;
  std::string string(const char* key) const;
  std::string string_or(const char* key, const char* fallback) const {
    return has(key) ? string(key) : fallback;
  }
  /// The object under `key`; nullopt if it is absent, null or empty.
  std::optional<ObjectReader> object(const char* key) const;
  /// One integer or a list of them; empty if absent.
  std::vector<std::int64_t> integers(const char* key, std::int64_t low, std::int64_t high,
                                     std::size_t max_size) const;
  /// The same of ids of tokens, as eos_token_id is written; transformers' -1 is none, and left out.
  std::vector<std::int64_t> token_ids(const char* key, std::size_t max_size) const;
  /// The value under `key`; nullptr if it is absent or null.
  const nlohmann::json* find(const char* key) const;
  const nlohmann::json& json() const { return object_; }

  /// Throws Error(invalid_file): the key's value is not what was expected.
  template <class... Parts>
  [[noreturn]] void fail(const char* key, const nlohmann::json& value, const Parts&... expected) const {
    throw Error(ErrorCode::invalid_file, file_, ": ", prefix_, key, " is ", shown(value), "; expected ",
                expected...);
  }
  /// Throws Error(invalid_file): the key is missing.
  template <class... Parts>
  [[noreturn]] void fail_missing(const char* key, const Parts&... expected) const {
    throw Error(ErrorCode::invalid_file, file_, ": ", prefix_, key, " is missing; expected ", expected...);
  }
  /// Throws Error(unsupported): the key asks for what is not built.
  template <class... Parts>
  [[noreturn]] void unsupported(const char* key, const Parts&... parts) const {
    throw Error(ErrorCode::unsupported, file_, ": ", prefix_, key, parts...);
  }

 private:
  static std::string shown(const nlohmann::json& value);
  std::int64_t checked_integer(const nlohmann::json& value, const char* key, std::int64_t low,
                               std::int64_t high) const;

  const nlohmann::json& object_;
  std::string_view file_;
  std::string prefix_;
};

}  // namespace helix::decode
