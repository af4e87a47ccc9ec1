// SPDX-License-Identifier: Apache-2.0
// The helix::Error that a call throws, for tests of error messages, and tables of mistakes that must cause
// one.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include <helix/error.hpp>

#include "support/catch.hpp"

namespace helix::test {

struct Failure {
  ErrorCode code;
  std::string what;

  bool says(std::string_view part) const { return what.find(part) != std::string::npos; }
  friend bool operator==(const Failure&, const Failure&) = default;
};

/// The Error that `act` throws; nullopt if it returns. Other exceptions propagate.
template <class Act>
std::optional<Failure> failure_of(Act&& act) {
  try {
    act();
  } catch (const Error& error) {
    return Failure{error.code(), error.what()};
  }
  return std::nullopt;
}

/// The Error that `act` must throw.
template <class Act>
Failure required_failure(Act&& act) {
  const std::optional<Failure> failure = failure_of(act);
  if (!failure) FAIL("nothing was thrown");
  return *failure;
}

/// The message of the Error that `act` throws; empty if it returns.
template <class Act>
std::string failure_message(Act&& act) {
  const std::optional<Failure> failure = failure_of(act);
  return failure ? failure->what : "";
}

/// A way to spoil a T, and the words that the message must contain.
template <class T>
struct Mistake {
  std::string_view names;
  std::function<void(T&)> make;
  ErrorCode code = ErrorCode::invalid_argument;
};

/// Checks that `act` accepts what `make_good` makes, and refuses it by name after each of the mistakes.
template <class T, class MakeGood, class Act>
void check_mistakes(std::initializer_list<Mistake<T>> mistakes, const MakeGood& make_good, const Act& act) {
  {
    T good = make_good();
    REQUIRE_FALSE(failure_of([&] { act(good); }));
  }
  for (const Mistake<T>& mistake : mistakes) {
    T spoiled = make_good();
    mistake.make(spoiled);
    const auto failure = failure_of([&] { act(spoiled); });
    INFO(mistake.names);
    REQUIRE(failure);
    CAPTURE(failure->what);
    CHECK(failure->code == mistake.code);
    CHECK(failure->says(mistake.names));
  }
}

}  // namespace helix::test
