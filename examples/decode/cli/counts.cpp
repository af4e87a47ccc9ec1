// SPDX-License-Identifier: Apache-2.0
// The grammar of counts, in exact arithmetic: doubles would round 2^53 + 1.
#include "cli/counts.hpp"

#include <algorithm>
#include <limits>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

[[noreturn]] void refuse(std::string_view text, std::string_view why) {
  throw Error(ErrorCode::invalid_argument, "'", text, "' ", why);
}

[[noreturn]] void refuse_form(std::string_view text) {
  refuse(text, "is no count; give a whole number such as 131072, 128K (131072), 1M (1048576) or 1e6");
}

[[noreturn]] void refuse_size(std::string_view text) {
  throw Error(ErrorCode::invalid_argument, "'", text, "' is too large; at most ", kLargest,
              " can be counted");
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Removes and returns the leading digits of `rest`.
std::string_view take_digits(std::string_view& rest) {
  const auto end = std::find_if_not(rest.begin(), rest.end(), is_digit);
  const auto count = static_cast<std::size_t>(end - rest.begin());
  const std::string_view digits = rest.substr(0, count);
  rest.remove_prefix(count);
  return digits;
}

/// The factor 1024^n of a suffix; 0 if the text is no suffix.
std::int64_t suffix_factor(std::string_view suffix) {
  if (suffix.size() == 2 && suffix[1] == 'i') suffix.remove_suffix(1);
  if (suffix == "K" || suffix == "k") return std::int64_t{1} << 10;
  if (suffix == "M" || suffix == "m") return std::int64_t{1} << 20;
  if (suffix == "G" || suffix == "g") return std::int64_t{1} << 30;
  return 0;
}

}  // namespace

std::int64_t parse_count(std::string_view text) {
  std::string_view rest = text;
  const bool is_negative = rest.starts_with('-');
  if (is_negative) rest.remove_prefix(1);
  const std::string_view whole = take_digits(rest);
  std::string_view fraction;
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    fraction = take_digits(rest);
    if (fraction.empty()) refuse_form(text);
  }
  if (whole.empty()) refuse_form(text);
  while (fraction.ends_with('0')) fraction.remove_suffix(1);

  std::int64_t value = 0;
  const auto multiply = [&](std::int64_t factor) {
    if (value > kLargest / factor) refuse_size(text);
    value *= factor;
  };
  for (const std::string_view digits : {whole, fraction}) {
    for (const char digit : digits) {
      multiply(10);
      if (value > kLargest - (digit - '0')) refuse_size(text);
      value += digit - '0';
    }
  }
  std::int64_t power_of_ten = -static_cast<std::int64_t>(fraction.size());
  if (rest.starts_with('e') || rest.starts_with('E')) {
    rest.remove_prefix(1);
    if (rest.starts_with('+')) rest.remove_prefix(1);
    const std::string_view digits = take_digits(rest);
    if (digits.empty() || !rest.empty()) refuse_form(text);
    std::int64_t exponent = 0;
    for (const char digit : digits) exponent = std::min<std::int64_t>(1000, 10 * exponent + (digit - '0'));
    power_of_ten += exponent;
  } else if (!rest.empty()) {
    const std::int64_t factor = suffix_factor(rest);
    if (factor == 0) refuse_form(text);
    multiply(factor);
  }
  for (; power_of_ten > 0 && value > 0; --power_of_ten) multiply(10);
  for (; power_of_ten < 0; ++power_of_ten) {
    if (value % 10 != 0) refuse(text, "is not whole; give a whole number");
    value /= 10;
  }
  return is_negative ? -value : value;
}

}  // namespace helix::decode
