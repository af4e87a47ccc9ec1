// SPDX-License-Identifier: Apache-2.0
// What helix-bench-cuda wrote, case by case.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/limits.hpp>

namespace helix::plan_cli {

/// One case, e.g. "decode_layer/kvp:4/tpa:1/layers:8/batch:8/context:524288/hop_b:off".
struct BenchCase {
  std::string name;
  std::string family;                             ///< Name up to the first '/'.
  std::map<std::string, std::string> parameters;  ///< Parameters in the name: "kvp" -> "4", "ragged" -> "".
  std::map<std::string, double> values;           ///< Counters; all finite.
  std::string file{};                             ///< File that holds it; empty: none.

  /// File and case, as errors name them: "results.json: case exchange/kvp:4".
  std::string where() const;

  bool has(const std::string& counter) const { return values.contains(counter); }
  /// @throws Error(invalid_file) if the case has no such counter, or it is not in [1e-9, 1e18].
  double value(const std::string& counter) const;
  /// @throws Error(invalid_file) if the name has no such parameter.
  const std::string& text(const std::string& key) const;
  /// @throws Error(invalid_file) if the name has no such parameter, or it is not a whole number of 1 to
  /// `largest`.
  std::int64_t parameter(const std::string& key, std::int64_t largest) const;
  /// KVP or TPA: at most kMaxRanks, so that products of two fit. @throws as parameter().
  std::int64_t ranks(const std::string& key) const { return parameter(key, kMaxRanks); }
};

/// The cases that succeeded in one file's text, in its order. @throws Error(invalid_file) naming `file`.
std::vector<BenchCase> parse_bench_results(std::string_view text, const std::string& file);

/// All cases that succeeded, of all files; of equal names the last. @throws Error(io), Error(invalid_file).
std::vector<BenchCase> read_bench_results(const std::vector<std::filesystem::path>& files);

}  // namespace helix::plan_cli
