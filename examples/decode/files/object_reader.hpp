// SPDX-License-Identifier: Apache-2.0
// ObjectReader: reads typed, bounded values from one JSON object; errors name key, value and range.
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

/// Reads typed, bounded values from one JSON object, which must outlive the reader. A key whose value is null
/// counts as present only for is_null(). The reading functions throw Error(invalid_file) naming file, key,
/// value and expectation.
class ObjectReader {
 public:
  /// `prefix` is the path to the object within the file, for messages: "", "rope_scaling." and so on.
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
  /// One integer or a list of integers; empty if the key is absent.
  std::vector<std::int64_t> integers(const char* key, std::int64_t low, std::int64_t high,
                                     std::size_t max_size) const;
  /// One token id or a list of them, the forms of eos_token_id; empty if the key is absent. -1, which means
  /// none in transformers, is left out.
  std::vector<std::int64_t> token_ids(const char* key, std::size_t max_size) const;
  /// The value under `key`; nullptr if it is absent or null.
  const nlohmann::json* find(const char* key) const;
  const nlohmann::json& json() const { return object_; }

  /// Throws Error(invalid_file) saying that the key's value is not what was expected.
  template <class... Parts>
  [[noreturn]] void fail(const char* key, const nlohmann::json& value, const Parts&... expected) const {
    throw Error(ErrorCode::invalid_file, file_, ": ", prefix_, key, " is ", shown(value), "; expected ",
                expected...);
  }
  /// Throws Error(invalid_file) saying that the key is missing.
  template <class... Parts>
  [[noreturn]] void fail_missing(const char* key, const Parts&... expected) const {
    throw Error(ErrorCode::invalid_file, file_, ": ", prefix_, key, " is missing; expected ", expected...);
  }
  /// Throws Error(unsupported) saying that the key asks for something that is not built.
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
