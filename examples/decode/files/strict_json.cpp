// SPDX-License-Identifier: Apache-2.0
// The bounded JSON parser.
#include "files/strict_json.hpp"

#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "files/json_events.hpp"

namespace helix::decode {
namespace {

constexpr std::size_t kMaxQuotedBytes = 100;

/// Builds the document. nlohmann's parser with a callback could also refuse values, but it visits all
/// elements of an array each time that one ends: 24 s for 1 MB.
class DocumentBuilder : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  nlohmann::json take() { return std::move(document_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool start_object(std::size_t) override { return open(nlohmann::json::value_t::object); }
  bool start_array(std::size_t) override { return open(nlohmann::json::value_t::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& key) override {
    const auto [at, is_new] = open_.back()->get_ref<nlohmann::json::object_t&>().try_emplace(std::move(key));
    HELIX_EXPECTS(is_new, ErrorCode::invalid_file, file(), ": key ", printable(at->first),
                  " appears twice in one object");
    member_ = &at->second;
    return true;
  }

 private:
  /// Puts `value` in the next place of the document. The place does not move while the value is open: its
  /// array or object gets another element only after the value is closed.
  template <class T>
  bool add(T&& value) {
    HELIX_EXPECTS(++num_values_ <= kMaxJsonValues, ErrorCode::invalid_file, file(), ": holds more than ",
                  kMaxJsonValues, " JSON values; no config or measurement does");
    if (open_.empty()) {
      document_ = std::forward<T>(value);
      last_ = &document_;
    } else if (open_.back()->is_array()) {
      last_ = &open_.back()->get_ref<nlohmann::json::array_t&>().emplace_back(std::forward<T>(value));
    } else {
      *member_ = std::forward<T>(value);
      last_ = member_;
    }
    return true;
  }

  bool open(nlohmann::json::value_t kind) {
    HELIX_EXPECTS(open_.size() < kMaxNesting, ErrorCode::invalid_file, file(), ": JSON nested deeper than ",
                  kMaxNesting, " levels");
    add(kind);
    open_.push_back(last_);
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  nlohmann::json document_;
  std::vector<nlohmann::json*> open_;
  nlohmann::json* member_ = nullptr;  // value place of the last key of the innermost object
  nlohmann::json* last_ = nullptr;
  std::size_t num_values_ = 0;
};

}  // namespace

std::string printable(std::string_view text) {
  std::string result = "'";
  for (const char c : text.substr(0, kMaxQuotedBytes)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kMaxQuotedBytes ? "...'" : "'");
}

std::string one_line(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= ' ' && byte != 0x7f) {
      line += c;
    } else if (c == '\n') {
      line += "\\n";
    } else if (c == '\t') {
      line += "\\t";
    } else {
      line.append("\\x").append({kDigits[byte / 16], kDigits[byte % 16]});
    }
  }
  return line;
}

nlohmann::json parse_strict_json(std::string_view text, std::string_view file) {
  DocumentBuilder builder(file);
  builder.parse(text);
  return builder.take();
}

}  // namespace helix::decode
