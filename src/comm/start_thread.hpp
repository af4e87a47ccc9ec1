// SPDX-License-Identifier: Apache-2.0
// A thread, or an error that says which one the system refused.
#pragma once

#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <helix/error.hpp>

namespace helix::comm {

/// Starts `body` on a thread that is `what`. @throws Error(capacity) if the system has no thread to give.
template <class Body>
std::thread start_thread(std::string_view what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::capacity, what, " cannot be started: ", error.what(),
                "; use fewer threads, or raise the limit (ulimit -u or -v, a container's pids)");
  }
}

}  // namespace helix::comm
