// SPDX-License-Identifier: Apache-2.0
// Opens closed standard streams, ignores the signals of failed writes, and writes errors at once.
#include "files/standard_streams.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>

#include <fcntl.h>
#include <unistd.h>

namespace helix::decode {

void prepare_standard_streams() {
  for (const int number : {SIGPIPE, SIGXFSZ}) std::signal(number, SIG_IGN);
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() returns the lowest free descriptor, which is this one.
    if (::open("/dev/null", descriptor == STDERR_FILENO ? O_RDWR : O_RDONLY) < 0) return;
  }
}

void print_error(std::string_view text) noexcept {
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
  static_cast<void>(std::fflush(stderr));
}

}  // namespace helix::decode
