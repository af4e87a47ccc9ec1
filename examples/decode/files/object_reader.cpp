// SPDX-License-Identifier: Apache-2.0
// ObjectReader: the checks of types and ranges.
#include "files/object_reader.hpp"

#include <limits>

#include <nlohmann/json.hpp>

#include "files/strict_json.hpp"

namespace helix::decode {

bool ObjectReader::is_null(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

bool ObjectReader::is_absent(const char* key) const {
  return object_.find(key) == object_.end();
}

std::int64_t ObjectReader::integer(const char* key, std::int64_t low, std::int64_t high) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) fail_missing(key, "an integer from ", low, " to ", high);
  return checked_integer(*value, key, low, high);
}

double ObjectReader::number(const char* key, double low, double high) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) fail_missing(key, "a number from ", low, " to ", high);
  if (!value->is_number()) fail(key, *value, "a number from ", low, " to ", high);
  const auto result = value->get<double>();
  if (!(result >= low && result <= high)) fail(key, *value, "a number from ", low, " to ", high);
  return result;
}

bool ObjectReader::boolean_or(const char* key, bool fallback) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) fail(key, *value, "true or false");
  return value->get<bool>();
}

std::string ObjectReader::string(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) fail_missing(key, "a string");
  if (!value->is_string()) fail(key, *value, "a string");
  return value->get<std::string>();
}

std::optional<ObjectReader> ObjectReader::object(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) fail(key, *value, "an object");
  if (value->empty()) return std::nullopt;
  return ObjectReader(*value, file_, prefix_ + key + ".");
}

std::vector<std::int64_t> ObjectReader::integers(const char* key, std::int64_t low, std::int64_t high,
                                                 std::size_t max_size) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return {};
  if (!value->is_array()) return {checked_integer(*value, key, low, high)};
  if (value->size() > max_size) fail(key, *value, "at most ", max_size, " integers");
  std::vector<std::int64_t> result;
  for (const nlohmann::json& entry : *value) result.push_back(checked_integer(entry, key, low, high));
  return result;
}

std::vector<std::int64_t> ObjectReader::token_ids(const char* key, std::size_t max_size) const {
  std::vector<std::int64_t> ids = integers(key, -1, std::numeric_limits<std::int32_t>::max(), max_size);
  std::erase(ids, -1);
  return ids;
}

const nlohmann::json* ObjectReader::find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::string ObjectReader::shown(const nlohmann::json& value) {
  if (value.is_string()) return printable(value.get_ref<const std::string&>());
  if (value.is_structured())
    return std::string("an ") + value.type_name() + " of " + std::to_string(value.size());
  return value.dump();
}

std::int64_t ObjectReader::checked_integer(const nlohmann::json& value, const char* key, std::int64_t low,
                                           std::int64_t high) const {
  constexpr std::uint64_t kLargest = std::numeric_limits<std::int64_t>::max();
  const bool fits =
      value.is_number_unsigned() ? value.get<std::uint64_t>() <= kLargest : value.is_number_integer();
  const std::int64_t result = fits ? value.get<std::int64_t>() : 0;
  if (!fits || result < low || result > high) fail(key, value, "an integer from ", low, " to ", high);
  return result;
}

}  // namespace helix::decode
