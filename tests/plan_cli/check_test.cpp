// SPDX-License-Identifier: Apache-2.0
// Predictions of helix-plan --check for cases whose times can be computed by hand.
#include "check.hpp"

#include <string>
#include <vector>

#include <helix/plan/hardware.hpp>

#include "support/catch.hpp"

namespace {

using namespace helix::plan;
using helix::plan_cli::BenchCase;

/// 8000 GB/s for reads of any size, and 3 us an operator.
Hardware plain_hardware() {
  Hardware hardware = hardware_preset("gb200");
  hardware.overheads.per_operator = microseconds(3);
  return hardware;
}

/// Operations a second of products of 16 bits.
double peak_flops() {
  return plain_hardware().peak(16) / (flops(1) / seconds(1));
}

/// The predicted times of `cases`, with no calibration that concerns them.
std::vector<double> predicted_us(const std::vector<BenchCase>& cases) {
  const BenchCase all_reduce{.name = "decode_layer",
                             .family = "decode_layer",
                             .parameters = {{"kvp", "1"}, {"tpa", "4"}, {"batch", "8"}},
                             .values = {{"all_reduce_us", 6}}};
  std::vector<double> times;
  for (const auto& row : helix::plan_cli::check_predictions(plain_hardware(), {all_reduce}, cases).rows)
    times.push_back(row.predicted_us);
  return times;
}

TEST_CASE("a product takes the read of its bytes or its arithmetic, and an operator's overhead") {
  const auto product = [](double bytes, double operations) {
    return BenchCase{.name = "linear",
                     .family = "linear",
                     .parameters = {},
                     .values = {{"us", 1}, {"bytes", bytes}, {"flop/s", operations / 1e-6}}};
  };
  const std::vector<double> us = predicted_us({product(8e7, 1), product(8e7, peak_flops() * 20e-6)});
  REQUIRE(us.size() == 2);
  CHECK(us[0] == Approx(10 + 3));
  CHECK(us[1] == Approx(20 + 3));
}

TEST_CASE("attention of several query tokens is predicted as such") {
  // 8 sequences of 8192 tokens of 4096 bytes: 8 KV heads of 128 in bf16, K and V.
  constexpr double kBytes = 8 * 8192 * 4096.0;
  const auto attention = [](int queries) {
    return BenchCase{.name = "partial_attention",
                     .family = "partial_attention",
                     .parameters = {{"heads", "64:8"}, {"batch", "8"}, {"queries", std::to_string(queries)}},
                     .values = {{"us", 100}, {"bytes/s", kBytes / 100e-6}}};
  };
  const std::vector<double> us = predicted_us({attention(1), attention(64), attention(1024)});
  REQUIRE(us.size() == 3);
  CHECK(us[0] == Approx(kBytes / 8e6 + 3).epsilon(0.2));
  CHECK(us[1] >= us[0]);
  // 4 operations for each query head, column and pair of a query and a key.
  CHECK(us[2] > 4.0 * 64 * 128 * 8 * 1024 * 7000 / peak_flops() * 1e6);
}

}  // namespace
