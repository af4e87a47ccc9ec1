// SPDX-License-Identifier: Apache-2.0
// The main function of the CUDA tests.
#define CATCH_CONFIG_RUNNER
#include "examples/nccl_environment.hpp"
#include "support/catch.hpp"
#include "support/skipped.hpp"

int main(int argc, char** argv) {
  helix::turn_nccl_multicast_off();
  helix::let_ranks_share_a_gpu();
  return helix::test::exit_code(Catch::Session().run(argc, argv));
}
