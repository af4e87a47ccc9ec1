// SPDX-License-Identifier: Apache-2.0
// HELIX_API: marks what a shared build exports. The compiled parts are built with hidden visibility.
#pragma once

#if defined(__GNUC__)
#define HELIX_API __attribute__((visibility("default")))
#else
#define HELIX_API
#endif
