// SPDX-License-Identifier: Apache-2.0
// A progress bar on standard error, shown only on a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace helix::decode {

/// Shows "label [#####.....] 57%" while done < total. Silent when standard error is not a terminal, or when
/// `enabled` is false (all ranks but one). Draws at most ten times a second.
class Progress {
 public:
  Progress(std::string label, std::int64_t total, bool enabled);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::int64_t done);

 private:
  std::string label_;
  std::int64_t total_;
  bool enabled_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace helix::decode
