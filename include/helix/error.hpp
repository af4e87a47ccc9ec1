// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library, and the check that throws it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace helix {

/// What kind of failure an Error reports, for callers that react to some kinds and not to others.
enum class ErrorCode {
  invalid_argument,  ///< shapes, ranges or options that contradict each other or the build
  invalid_topology,  ///< a TopologySpec that breaks one or more rules
  capacity,          ///< pages, sequences, tokens or workspace exhausted; nothing was changed
  invalid_file,      ///< a checkpoint or config that is truncated, inconsistent or hostile
  io,                ///< the operating system refused a file or socket
  timeout,           ///< a bounded wait ran out: a rank never arrived
  peer_failed,       ///< another rank failed and aborted the group
  out_of_step,       ///< a rank skipped or repeated a step (epochs differ, invariant 13)
  unsupported,       ///< legal in general, not built or not available here
  internal           ///< a bug in this library
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
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

/// Thrown by every host function of the library. The message says what is wrong, both values, and what to do.
class Error : public std::runtime_error {
 public:
  /// Streams `parts` one after the other into the message.
  template <class... Parts>
  explicit Error(ErrorCode code, const Parts&... parts) : std::runtime_error(join(parts...)), code_(code) {}

  ErrorCode code() const noexcept { return code_; }

 private:
  template <class... Parts>
  static std::string join(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
  }

  ErrorCode code_;
};

}  // namespace helix

/// Throws helix::Error(code, parts...) unless `condition` holds. The parts are evaluated only on failure.
#define HELIX_EXPECTS(condition, code, ...)                      \
  do {                                                           \
    if (!(condition)) throw ::helix::Error((code), __VA_ARGS__); \
  } while (false)
