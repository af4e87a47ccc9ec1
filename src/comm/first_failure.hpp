// SPDX-License-Identifier: Apache-2.0
// FirstFailure: after a call that failed none goes on.
#pragma once

#include <exception>

namespace helix::comm {

/// Of connections that a call which throws leaves with part of a message, or with one that nobody asked for:
/// what ended it is thrown by every later call. One thread at a time.
class FirstFailure {
 public:
  /// Returns body(). @throws what the first body to throw threw.
  template <class Body>
  auto call(const Body& body) {
    if (failure_) std::rethrow_exception(failure_);
    try {
      return body();
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

 private:
  std::exception_ptr failure_;
};

}  // namespace helix::comm
