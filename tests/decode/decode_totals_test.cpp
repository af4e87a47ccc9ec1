// SPDX-License-Identifier: Apache-2.0
// Quantiles, and the rates that follow from the times of decode steps.
#include "generate/decode_totals.hpp"

#include <utility>
#include <vector>

#include "support/catch.hpp"

namespace helix::test {

using decode::median_and_p99;

TEST_CASE("median and 99th percentile are the values below which so many are, in whatever order", "[quick]") {
  std::vector<double> values;
  for (int i = 0; i < 200; ++i) values.push_back((i * 77) % 200 + 1);  // 1 to 200
  CHECK(median_and_p99(values) == std::pair(100.0, 198.0));
  CHECK(median_and_p99({7.0}) == std::pair(7.0, 7.0));
  CHECK(median_and_p99({9.0, 7.0}) == std::pair(7.0, 9.0));
  CHECK(median_and_p99({9.0, 7.0, 8.0}) == std::pair(8.0, 9.0));
}

TEST_CASE("rates are of tokens a second and 10^9 bytes a second, over the time of all steps", "[quick]") {
  decode::DecodeTotals totals;
  totals.add(/*tokens=*/3, /*read_tokens=*/1000, /*ms=*/4.0);
  totals.add(1, 1000, 1.0);
  totals.add(1, 2000, 5.0);
  decode::GenerationTiming timing;
  totals.summarize(/*kv_token_bytes=*/500, timing);
  CHECK(timing.ttl_median_ms == 4.0);
  CHECK(timing.ttl_p99_ms == 5.0);
  CHECK(timing.tokens_per_s == Approx(500.0));  // 5 in 10 ms
  CHECK(timing.kv_gb_per_s == Approx(0.2));     // 2 MB in 10 ms

  decode::GenerationTiming none;
  decode::DecodeTotals().summarize(500, none);
  CHECK(none.tokens_per_s == 0.0);
}

}  // namespace helix::test
