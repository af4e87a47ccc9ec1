// SPDX-License-Identifier: Apache-2.0
// Replaces the system's pthread_create.
#include "support/failing_threads.hpp"

#include <atomic>
#include <cerrno>

#include <dlfcn.h>
#include <pthread.h>

namespace {

std::atomic<int> num_asked = 0;
std::atomic<int> first_refused = 0;
std::atomic<int> num_refused = 0;

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) noexcept {
  static const auto next = reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  const int number = num_asked.fetch_add(1);
  const int first = first_refused.load();
  if (number >= first && number - first < num_refused.load()) return EAGAIN;
  return next(thread, attributes, body, argument);
}

namespace helix::test {

int num_threads_asked() {
  return num_asked.load();
}

void refuse_threads(int first, int count) {
  first_refused = first;
  num_refused = count;
  num_asked = 0;
}

}  // namespace helix::test
