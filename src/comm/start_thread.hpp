// SPDX-License-Identifier: Apache-2.0
// A thread with a stack of its own size, or an error that says which one the system refused.
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

/// Bytes of a thread's stack at least. std::thread's has what RLIMIT_STACK (ulimit -s) said when the process
/// began, and the kernels of products keep tiles of 300 KiB on it.
inline constexpr std::size_t kMinStackBytes = std::size_t{2} << 20;
/// Bytes below a stack that end the process when they are touched: more than any frame, which could reach
/// past a page into the memory of others.
inline constexpr std::size_t kStackGuardBytes = std::size_t{1} << 20;

/// As std::thread, for start_thread().
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

/// Starts `body` on a thread that is `what`; an exception that leaves it ends the program.
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
