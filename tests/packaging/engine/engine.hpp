// SPDX-License-Identifier: Apache-2.0
// A shared library that uses helix inside, as an engine does.
#pragma once

#include <helix/export.hpp>

namespace engine {

/// Throws a helix::Error that is created in this library.
HELIX_API void fail_here();

/// Throws a helix::Error that is created inside helix::cpu.
HELIX_API void fail_in_helix();

/// Calls `act` and returns whether it threw a helix::Error.
HELIX_API bool catches(void (*act)());

}  // namespace engine
