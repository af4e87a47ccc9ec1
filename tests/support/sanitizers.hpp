// SPDX-License-Identifier: Apache-2.0
// The sanitizer with which the tests are built.
#pragma once

namespace helix::test {

#ifdef __has_feature  // clang
#define HELIX_TEST_FEATURE(name) __has_feature(name)
#else
#define HELIX_TEST_FEATURE(name) 0
#endif

#if defined(__SANITIZE_THREAD__) || HELIX_TEST_FEATURE(thread_sanitizer)
inline constexpr bool kHasThreadSanitizer = true;
#else
inline constexpr bool kHasThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__) || HELIX_TEST_FEATURE(address_sanitizer)
inline constexpr bool kHasAddressSanitizer = true;
#else
inline constexpr bool kHasAddressSanitizer = false;
#endif

/// Whether a sanitizer makes the code an order of magnitude slower.
inline constexpr bool kIsSanitized = kHasThreadSanitizer || kHasAddressSanitizer;

#undef HELIX_TEST_FEATURE

}  // namespace helix::test
