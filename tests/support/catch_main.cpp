// SPDX-License-Identifier: Apache-2.0
// The main function of the tests, compiled once, where Catch2 v2 brings none.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
