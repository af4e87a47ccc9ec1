// SPDX-License-Identifier: Apache-2.0
// The texts of errors.

#include <helix/error.hpp>

#include "support/catch.hpp"

TEST_CASE("a number in a message is the number that was given") {
  const auto text = [](auto value) { return helix::message({value}); };
  CHECK(text(1.0f) == "1");
  CHECK(text(1.0000001f) == "1.0000001");
  CHECK(text(-100.00001f) == "-100.00001");
  CHECK(text(0.1f) == "0.1");
  CHECK(text(100000.0f) == "100000");
  CHECK(text(1e6f) == "1e+06");
  CHECK(text(1e-300) == "1e-300");
  CHECK(text(879.353439232) == "879.353");
  CHECK(text(-7) == "-7");
  CHECK(text(true) == "1");
}
