// SPDX-License-Identifier: Apache-2.0
// The version of these headers. CMakeLists.txt reads it from here.
#pragma once

#define HELIX_VERSION_MAJOR 0  ///< Grows when the interface breaks.
#define HELIX_VERSION_MINOR 1  ///< Grows with what is new, which may break it while the first number is zero.
#define HELIX_VERSION_PATCH 0  ///< Grows with corrections.
/// One number that grows with the version: `#if HELIX_VERSION >= 100` is "from 0.1.0 on".
#define HELIX_VERSION (HELIX_VERSION_MAJOR * 10000 + HELIX_VERSION_MINOR * 100 + HELIX_VERSION_PATCH)
