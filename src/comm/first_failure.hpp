// SPDX-License-Identifier: Apache-2.0
// FirstFailure: once one call has failed, all later calls fail.
#pragma once

#include <exception>

namespace helix::comm {

/// Remembers the first exception on a set of connections. A failed call may leave half a message on the wire,
/// or one that nobody expects, so every later call rethrows that exception. Used by one thread at a time.
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
