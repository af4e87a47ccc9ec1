// SPDX-License-Identifier: Apache-2.0
// The main function of the tests, compiled only once.
#define CATCH_CONFIG_RUNNER
#include "support/catch.hpp"
#include "support/skipped.hpp"

int main(int argc, char** argv) {
  return helix::test::exit_code(Catch::Session().run(argc, argv));
}
