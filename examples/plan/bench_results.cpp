// SPDX-License-Identifier: Apache-2.0
// JSON of Google Benchmark as helix-bench-cuda writes it.
#include "bench_results.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "checkpoint/strict_json.hpp"
#include "checkpoint/text_file.hpp"

namespace helix::plan_cli {
namespace {

using nlohmann::json;

/// Without what the harness appends.
std::string case_name(std::string name) {
  for (const std::string_view suffix : {"/manual_time", "/iterations:1"}) {
    if (name.ends_with(suffix)) name.resize(name.size() - suffix.size());
  }
  return name;
}

BenchCase parse_case(const json& entry, const std::string& name) {
  BenchCase result;
  result.name = name;
  std::stringstream parts(name);
  std::getline(parts, result.family, '/');
  for (std::string part; std::getline(parts, part, '/');) {
    const std::size_t colon = part.find(':');
    if (colon != std::string::npos) result.parameters[part.substr(0, colon)] = part.substr(colon + 1);
  }
  for (const auto& [key, value] : entry.items()) {
    if (value.is_number() && std::isfinite(value.get<double>())) result.values[key] = value.get<double>();
  }
  return result;
}

}  // namespace

double BenchCase::value(const std::string& counter) const {
  const auto at = values.find(counter);
  constexpr double kSmallest = 1e-9;  // wider than any measurement; keeps quotients finite
  constexpr double kLargest = 1e18;
  HELIX_EXPECTS(at != values.end() && at->second >= kSmallest && at->second <= kLargest,
                ErrorCode::invalid_file, "case ", decode::printable(name), ": its counter \"", counter,
                "\" is missing or not in [", kSmallest, ", ", kLargest, "]");
  return at->second;
}

const std::string& BenchCase::text(const std::string& key) const {
  const auto at = parameters.find(key);
  HELIX_EXPECTS(at != parameters.end(), ErrorCode::invalid_file, "case ", decode::printable(name),
                ": its name does not say \"", key, "\"");
  return at->second;
}

std::int64_t BenchCase::parameter(const std::string& key) const {
  const std::string& digits = text(key);
  const char* end = digits.data() + digits.size();
  std::int64_t value = 0;
  const auto [last, code] = std::from_chars(digits.data(), end, value);
  HELIX_EXPECTS(code == std::errc() && last == end && value >= 1 && value <= (std::int64_t{1} << 40),
                ErrorCode::invalid_file, "case ", decode::printable(name), ": its \"", key, "\" is ",
                decode::printable(digits), ", not a whole number of 1 to 2^40");
  return value;
}

std::vector<BenchCase> read_bench_results(const std::vector<std::filesystem::path>& files) {
  std::vector<BenchCase> cases;
  for (const std::filesystem::path& file : files) {
    const json root = decode::parse_strict_json(decode::read_text(file), file.string());
    HELIX_EXPECTS(root.is_object() && root.contains("benchmarks") && root["benchmarks"].is_array(),
                  ErrorCode::invalid_file, file.string(),
                  ": no array \"benchmarks\"; give the JSON of helix-bench-cuda (bench/run_gpu.sh)");
    for (const json& entry : root["benchmarks"]) {
      HELIX_EXPECTS(entry.is_object() && entry.contains("name") && entry["name"].is_string(),
                    ErrorCode::invalid_file, file.string(), ": a benchmark has no \"name\"");
      const bool is_aggregate = entry.contains("run_type") && entry["run_type"] != "iteration";
      const bool has_failed = entry.contains("error_occurred") && entry["error_occurred"] == true;
      if (is_aggregate || has_failed) continue;
      BenchCase next = parse_case(entry, case_name(entry["name"].get<std::string>()));
      const auto same = std::find_if(cases.begin(), cases.end(),
                                     [&](const BenchCase& other) { return other.name == next.name; });
      if (same == cases.end()) {
        cases.push_back(std::move(next));
      } else {
        *same = std::move(next);
      }
    }
  }
  HELIX_EXPECTS(!cases.empty(), ErrorCode::invalid_file, files.empty() ? "" : files.front().string(),
                ": no case succeeded");
  return cases;
}

}  // namespace helix::plan_cli
