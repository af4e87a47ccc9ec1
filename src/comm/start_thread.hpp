// SPDX-License-Identifier: Apache-2.0
// Starts a thread with a chosen stack size; an error says which thread the system refused.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#include <pthread.h>

#include <helix/error.hpp>

namespace helix::comm {

/// Least stack of a thread in bytes. A std::thread gets RLIMIT_STACK (ulimit -s) of the time when the process
/// began, and a kernel of products keeps 160 KiB of tiles on the stack.
inline constexpr std::size_t kMinStackBytes = std::size_t{2} << 20;
/// Bytes of guard below a stack, which end the process when touched. Larger than any frame: a frame can reach
/// past a guard of one page into other memory.
inline constexpr std::size_t kStackGuardBytes = std::size_t{1} << 20;

/// A std::thread for start_thread().
class Thread {
 public:
  Thread() = default;
  explicit Thread(pthread_t handle) : handle_(handle) {}
  Thread(Thread&& other) noexcept : handle_(std::exchange(other.handle_, std::nullopt)) {}
  Thread& operator=(Thread&& other) noexcept {
    if (joinable()) std::terminate();
    handle_ = std::exchange(other.handle_, std::nullopt);
    return *this;
  }
  ~Thread() {
    if (joinable()) std::terminate();
  }

  bool joinable() const { return handle_.has_value(); }
  bool is_current() const { return handle_ && pthread_equal(*handle_, pthread_self()) != 0; }
  void join() { pthread_join(*std::exchange(handle_, std::nullopt), nullptr); }
  void detach() { pthread_detach(*std::exchange(handle_, std::nullopt)); }

 private:
  std::optional<pthread_t> handle_;
};

/// Starts `body` on a thread that errors call `what`. An exception that leaves `body` ends the program.
/// @throws Error(capacity) if the system has no thread to give.
template <class Body>
Thread start_thread(std::string_view what, Body&& body) {
  using Own = std::decay_t<Body>;
  auto own = std::make_unique<Own>(std::forward<Body>(body));
  pthread_attr_t attributes;
  pthread_t handle{};
  int code = pthread_attr_init(&attributes);
  if (code == 0) {
    std::size_t usual = 0;
    pthread_attr_getstacksize(&attributes, &usual);
    pthread_attr_setstacksize(&attributes, std::max(usual, kMinStackBytes) + kStackGuardBytes);
    pthread_attr_setguardsize(&attributes, kStackGuardBytes);
    code = pthread_create(
        &handle, &attributes,
        [](void* given) noexcept -> void* {
          const std::unique_ptr<Own> mine(static_cast<Own*>(given));
          (*mine)();
          return nullptr;
        },
        own.get());
    pthread_attr_destroy(&attributes);
  }
  HELIX_EXPECTS(code == 0, ErrorCode::capacity, what,
                " cannot be started: ", std::generic_category().message(code),
                "; use fewer threads, or raise the limit (ulimit -u or -v, a container's pids)");
  own.release();
  return Thread(handle);
}

}  // namespace helix::comm
