// SPDX-License-Identifier: Apache-2.0
// The results of helix-bench-cuda, case by case.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <helix/limits.hpp>

namespace helix::plan_cli {

/// One case, such as "decode_layer/kvp:4/tpa:1/layers:8/batch:8/context:524288/hop_b:off".
struct BenchCase {
  std::string name;
  std::string family;                             ///< Name up to the first '/'.
  std::map<std::string, std::string> parameters;  ///< Parameters in the name: "kvp" -> "4", "ragged" -> "".
  std::map<std::string, double> values;           ///< Counters; all finite.
  std::string file{};                             ///< File that holds it; empty: none.

  /// File and case as error messages name them, such as "results.json: case exchange/kvp:4".
  std::string where() const;

  bool has(const std::string& counter) const { return values.contains(counter); }
  /// @throws Error(invalid_file) if the case has no such counter, or it is not in [1e-9, 1e18].
  double value(const std::string& counter) const;
  /// @throws Error(invalid_file) if the name has no such parameter.
  const std::string& text(const std::string& key) const;
  /// @throws Error(invalid_file) if the name has no such parameter, or it is not a whole number of 1 to
  /// `largest`.
  std::int64_t parameter(const std::string& key, std::int64_t largest) const;
  /// KVP or TPA: at most kMaxRanks, so that the product of two does not overflow.
  /// @throws as parameter() does.
  std::int64_t ranks(const std::string& key) const { return parameter(key, kMaxRanks); }
};

/// The successful cases in one file's text, in the order of the file.
/// @throws Error(invalid_file) naming `file`.
std::vector<BenchCase> parse_bench_results(std::string_view text, const std::string& file);

/// The successful cases of all files. Of cases with equal names, the last one counts.
/// @throws Error(io), Error(invalid_file).
std::vector<BenchCase> read_bench_results(const std::vector<std::filesystem::path>& files);

}  // namespace helix::plan_cli
