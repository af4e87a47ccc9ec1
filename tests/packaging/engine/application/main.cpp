// SPDX-License-Identifier: Apache-2.0
// Exceptions cross the boundaries of shared libraries in both directions.
#include <cstdio>

#include <engine.hpp>

#include <helix/error.hpp>

namespace {

bool is_caught_here(void (*act)(), helix::ErrorCode expected) {
  try {
    act();
  } catch (const helix::Error& error) {
    std::printf("caught: %s\n", error.what());
    return error.code() == expected;
  }
  return false;
}

void fail_in_application() {
  throw helix::Error(helix::ErrorCode::io, "the application's file is gone");
}

}  // namespace

int main() {
  const bool all = is_caught_here(engine::fail_here, helix::ErrorCode::capacity) &&
                   is_caught_here(engine::fail_in_helix, helix::ErrorCode::invalid_argument) &&
                   engine::catches(engine::fail_in_helix) && engine::catches(fail_in_application);
  return all ? 0 : 1;
}
