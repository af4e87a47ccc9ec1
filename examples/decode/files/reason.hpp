// SPDX-License-Identifier: Apache-2.0
// reason_of(): what an exception says to the user.
#pragma once

#include <exception>
#include <new>

namespace helix::decode {

/// What `error` says. std::bad_alloc names neither cause nor remedy, so it has a text of its own.
inline const char* reason_of(const std::exception& error) noexcept {
  return dynamic_cast<const std::bad_alloc*>(&error) == nullptr
             ? error.what()
             : "there is no memory left; free some, or ask for a shorter context or fewer sequences";
}

}  // namespace helix::decode
