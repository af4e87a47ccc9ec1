// SPDX-License-Identifier: Apache-2.0
// Parses the Google Benchmark JSON that helix-bench-cuda writes.
#include "bench_results.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "files/strict_json.hpp"
#include "files/text_file.hpp"

namespace helix::plan_cli {
namespace {

using nlohmann::json;

/// Most cases in all files together. A predicted case is left out of its own calibration, so that the time of
/// --check grows with the square of their number: 3 s for so many. A run of the benchmarks has some 200.
constexpr std::size_t kMaxCases = 2000;

/// The name without the suffixes that the harness appends.
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
    const std::size_t colon = std::min(part.find(':'), part.size());
    result.parameters[part.substr(0, colon)] = part.substr(std::min(colon + 1, part.size()));
  }
  for (const auto& [key, value] : entry.items()) {
    if (value.is_number() && std::isfinite(value.get<double>())) result.values[key] = value.get<double>();
  }
  return result;
}

}  // namespace

std::string BenchCase::where() const {
  return (file.empty() ? "" : file + ": ") + "case " + decode::printable(name);
}

double BenchCase::value(const std::string& counter) const {
  const auto at = values.find(counter);
  constexpr double kSmallest = 1e-9;  // outside the range of any measurement; keeps quotients finite
  constexpr double kLargest = 1e18;
  HELIX_EXPECTS(at != values.end() && at->second >= kSmallest && at->second <= kLargest,
                ErrorCode::invalid_file, where(), ": its counter \"", counter, "\" is missing or not in [",
                kSmallest, ", ", kLargest, "]");
  return at->second;
}

const std::string& BenchCase::text(const std::string& key) const {
  const auto at = parameters.find(key);
  HELIX_EXPECTS(at != parameters.end(), ErrorCode::invalid_file, where(), ": its name does not say \"", key,
                "\"");
  return at->second;
}

std::int64_t BenchCase::parameter(const std::string& key, std::int64_t largest) const {
  const std::string& digits = text(key);
  const char* end = digits.data() + digits.size();
  std::int64_t value = 0;
  const auto [last, code] = std::from_chars(digits.data(), end, value);
  HELIX_EXPECTS(code == std::errc() && last == end && value >= 1 && value <= largest, ErrorCode::invalid_file,
                where(), ": its \"", key, "\" is ", decode::printable(digits),
                ", not a whole number of 1 to ", largest);
  return value;
}

std::vector<BenchCase> parse_bench_results(std::string_view text, const std::string& file) {
  const json root = decode::parse_strict_json(text, file);
  HELIX_EXPECTS(root.is_object() && root.contains("benchmarks") && root["benchmarks"].is_array(),
                ErrorCode::invalid_file, file,
                ": no array \"benchmarks\"; give the JSON of helix-bench-cuda (bench/run_gpu.sh)");
  std::vector<BenchCase> cases;
  for (const json& entry : root["benchmarks"]) {
    HELIX_EXPECTS(entry.is_object() && entry.contains("name") && entry["name"].is_string(),
                  ErrorCode::invalid_file, file, ": a benchmark has no \"name\"");
    const bool is_aggregate = entry.contains("run_type") && entry["run_type"] != "iteration";
    const bool has_failed = entry.contains("error_occurred") && entry["error_occurred"] == true;
    if (!is_aggregate && !has_failed) {
      cases.push_back(parse_case(entry, case_name(entry["name"].get<std::string>())));
      cases.back().file = file;
    }
  }
  return cases;
}

std::vector<BenchCase> read_bench_results(const std::vector<std::filesystem::path>& files) {
  std::vector<BenchCase> cases;
  std::unordered_map<std::string, std::size_t> places;
  for (const std::filesystem::path& file : files) {
    for (BenchCase& next : parse_bench_results(decode::read_text(file), file.string())) {
      const auto [place, is_new] = places.emplace(next.name, cases.size());
      HELIX_EXPECTS(!is_new || cases.size() < kMaxCases, ErrorCode::invalid_file, file.string(),
                    ": its case ", decode::printable(next.name), " is one of more than ", kMaxCases,
                    "; give the results of fewer benchmarks");
      if (is_new) {
        cases.push_back(std::move(next));
      } else {
        cases[place->second] = std::move(next);
      }
    }
  }
  HELIX_EXPECTS(!cases.empty(), ErrorCode::invalid_file, files.empty() ? "" : files.front().string(),
                ": no case succeeded");
  return cases;
}

}  // namespace helix::plan_cli
