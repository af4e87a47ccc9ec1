// SPDX-License-Identifier: Apache-2.0
// The helix::Error that a call throws, for tests of messages.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <helix/error.hpp>

namespace helix::test {

struct Failure {
  ErrorCode code;
  std::string what;

  bool says(std::string_view part) const { return what.find(part) != std::string::npos; }
};

/// Nothing if `act` returns; other exceptions pass.
template <class Act>
std::optional<Failure> failure_of(Act&& act) {
  try {
    act();
  } catch (const Error& error) {
    return Failure{error.code(), error.what()};
  }
  return std::nullopt;
}

}  // namespace helix::test
