// SPDX-License-Identifier: Apache-2.0
// BootstrapWait: a wait for other ranks that the job's watch sees, and how much longer than the timeout it
// lasts.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include <helix/comm/bootstrap.hpp>

namespace helix::comm {

/// How much longer than the timeout a wait lasts if there is a watch, which learns after the timeout who is
/// behind and says it better than a bare timeout.
inline constexpr std::chrono::milliseconds kWatchGrace{2000};

/// While it lives, tells the job's watch, if there is one, that this rank waits. Those of several threads may
/// overlap.
class BootstrapWait {
 public:
  explicit BootstrapWait(std::optional<Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {
    if (bootstrap_) wait_ = bootstrap_->begin_wait();
  }
  BootstrapWait(const BootstrapWait&) = delete;
  BootstrapWait& operator=(const BootstrapWait&) = delete;
  ~BootstrapWait() {
    if (bootstrap_) bootstrap_->end_wait(wait_);
  }

 private:
  std::optional<Bootstrap> bootstrap_;
  std::uint64_t wait_ = 0;
};

}  // namespace helix::comm
