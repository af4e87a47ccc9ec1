// SPDX-License-Identifier: Apache-2.0
// The terminal side of Progress.
#include "generate/progress.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "files/standard_streams.hpp"

namespace helix::decode {

Progress::Progress(std::string label, std::int64_t total, bool enabled)
    : label_(std::move(label)), total_(total), enabled_(enabled && total > 0 && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (drawn_) print_error("\r\033[K");
}

void Progress::update(std::int64_t done) {
  if (!enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr std::int64_t kWidth = 30;
  const std::int64_t filled = std::clamp<std::int64_t>(done * kWidth / total_, 0, kWidth);
  print_error(fmt::format("\r{} [{:#<{}}{:.<{}}] {}%\033[K", label_, "", filled, "", kWidth - filled,
                          std::clamp<std::int64_t>(done * 100 / total_, 0, 100)));
}

}  // namespace helix::decode
