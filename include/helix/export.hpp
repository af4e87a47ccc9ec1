// SPDX-License-Identifier: Apache-2.0
// HELIX_API: what a shared build shows to others. The compiled parts are built with hidden visibility.
#pragma once

#if defined(__GNUC__)
#define HELIX_API __attribute__((visibility("default")))
#else
#define HELIX_API
#endif
