// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library, and the checks that throw it.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include <helix/export.hpp>

namespace helix {

/// What kind of failure an Error reports, for callers that react to some kinds and not to others.
enum class ErrorCode {
  invalid_argument,  ///< Shapes, ranges or options that contradict each other or the build
  invalid_topology,  ///< A TopologySpec that breaks one or more rules
  capacity,          ///< Pages, sequences, tokens or workspace exhausted; nothing was changed
  invalid_file,      ///< A checkpoint or config that is truncated, inconsistent or hostile
  io,                ///< The operating system refused a file or socket
  timeout,           ///< A bounded wait ran out: a rank never arrived
  peer_failed,       ///< Another rank failed and aborted the group
  out_of_step,       ///< A rank skipped or repeated a step (epochs differ, invariant 13)
  unsupported,       ///< Legal in general, not built or not available here
  device_failed,     ///< A kernel faulted or the device is lost: nothing on it can be used; end the process
  internal           ///< A bug in this library
};

/// Name of `code` as written above, e.g. "invalid_argument".
constexpr std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::invalid_topology:
      return "invalid_topology";
    case ErrorCode::capacity:
      return "capacity";
    case ErrorCode::invalid_file:
      return "invalid_file";
    case ErrorCode::io:
      return "io";
    case ErrorCode::timeout:
      return "timeout";
    case ErrorCode::peer_failed:
      return "peer_failed";
    case ErrorCode::out_of_step:
      return "out_of_step";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::device_failed:
      return "device_failed";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

/// One word, number or truth value of a message. It is not a stream: `<sstream>` and one template instance
/// for each message took a third of the compile time of a unit that includes decode_layer.hpp.
class MessagePart {
 public:
  MessagePart(std::string_view text) : text_(text) {}               // NOLINT: conversions are the point
  MessagePart(const char* text) : text_(text) {}                    // NOLINT
  MessagePart(const std::string& text) : text_(text) {}             // NOLINT
  MessagePart(char letter) : number_(1, letter), text_(number_) {}  // NOLINT
  template <std::integral Int>
  MessagePart(Int value) : number_(std::to_string(value)), text_(number_) {}  // NOLINT
  template <std::floating_point Real>
  MessagePart(Real value) : number_(in_digits(value)), text_(number_) {}  // NOLINT

  MessagePart(const void* address) : number_(in_hex(address)), text_(number_) {}  // NOLINT

  MessagePart(const MessagePart&) = delete;  // text_ may look into number_
  MessagePart& operator=(const MessagePart&) = delete;

  std::string_view text() const { return text_; }

 private:
  /// A float is what somebody gave: the fewest digits that mean it and no other, so that 1.0000001 is not 1.
  /// A double is mostly computed: six digits.
  template <std::floating_point Real>
  static std::string in_digits(Real value) {
    char digits[64];
    if constexpr (std::is_same_v<Real, float>) {
      return {digits, std::to_chars(digits, digits + sizeof digits, value, std::chars_format::general).ptr};
    } else {
      std::snprintf(digits, sizeof digits, "%g", static_cast<double>(value));
      return digits;
    }
  }

  static std::string in_hex(const void* address) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%p", address);
    return digits;
  }

  std::string number_;
  std::string_view text_;
};

/// Joins the parts.
inline std::string message(std::initializer_list<MessagePart> parts) {
  std::string text;
  for (const MessagePart& part : parts) text += part.text();
  return text;
}

/// The one exception of the library, thrown by its host functions. The message says what is wrong, both
/// values, and what to do. Caught across shared libraries, whatever their visibility.
class HELIX_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::initializer_list<MessagePart> parts)
      : std::runtime_error(message(parts)), code_(code) {}

  /// An error whose message is made of the parts, without braces.
  template <class... Parts>
  explicit Error(ErrorCode code, const Parts&... parts) : Error(code, {MessagePart(parts)...}) {}

  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace helix

/// Throws helix::Error(code, parts...) unless `condition` holds. The parts are evaluated only on failure.
#define HELIX_EXPECTS(condition, code, ...)                        \
  do {                                                             \
    if (!(condition)) throw ::helix::Error((code), {__VA_ARGS__}); \
  } while (false)

namespace helix::detail {

/// Throws Error(invalid_argument) if `data` is null and `count`, of rows or bytes, is not 0.
inline void check_given(std::string_view operation, std::string_view name, const void* data,
                        std::int64_t count) {
  HELIX_EXPECTS(data != nullptr || count == 0, ErrorCode::invalid_argument, operation, ": ", name,
                " is null; it must point to device memory");
}

}  // namespace helix::detail
