// SPDX-License-Identifier: Apache-2.0
// Calibration with cases whose results can be computed by hand.
#include "calibration.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <helix/plan/hardware.hpp>

#include "support/catch.hpp"

namespace {

using namespace helix::plan;
using helix::plan_cli::BenchCase;

/// A kernel that takes `us` for 1 MB, which a plain read takes 2 us for.
BenchCase small_kernel(double us) {
  return {.name = "rms_norm/1",
          .family = "rms_norm",
          .parameters = {},
          .values = {{"us", us}, {"bytes", 1e6}, {"read_bytes/s", 1e6 / 2e-6}}};
}

TEST_CASE("overheads are the median excess of small kernels, and a combine that reads next to nothing") {
  const auto overheads = [](const std::vector<BenchCase>& cases) {
    return helix::plan_cli::calibrate(hardware_preset("gb200"), cases).overheads;
  };
  // Excesses of 3, 4 and 9 us over the read give the middle one. Nothing is read faster than the smallest
  // read, 2 us.
  const Overheads odd = overheads({small_kernel(5), small_kernel(11), small_kernel(6)});
  CHECK(in_microseconds(odd.per_operator) == Approx(4));
  CHECK(in_microseconds(odd.per_slice) == Approx(4 + 2));
  // Excesses of 3, 4, 6 and 9 us give the mean of the two in the middle.
  const Overheads even = overheads({small_kernel(5), small_kernel(11), small_kernel(6), small_kernel(8)});
  CHECK(in_microseconds(even.per_operator) == Approx(5));
  CHECK(in_microseconds(even.per_slice) == Approx(5 + 2));
  // Kernels that are faster than a read of their bytes have no overhead.
  CHECK(overheads({small_kernel(1)}).per_operator == Time{});
}

TEST_CASE("every file of results calibrates every preset") {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(HELIX_BENCH_RESULTS)) {
    ++files;
    const std::vector<BenchCase> cases = helix::plan_cli::read_bench_results({entry.path()});
    for (const std::string& name : hardware_preset_names()) {
      INFO(entry.path() << ", " << name);
      CHECK_NOTHROW(helix::plan_cli::calibrate(hardware_preset(name), cases).check());
    }
  }
  CHECK(files >= 10);
}

/// A plain read of `bytes` bytes.
BenchCase read_of(double bytes, double us) {
  return {.name = "linear/1",
          .family = "linear",
          .parameters = {},
          .values = {{"bytes", bytes}, {"read_bytes/s", bytes / (us * 1e-6)}}};
}

TEST_CASE("below large reads a flat curve keeps its bandwidth, where that is no slower than they are") {
  const auto read = [](double us) {
    return helix::plan_cli::calibrate(hardware_preset("gb200"), {read_of(8e7, us)}).read;
  };
  // 80 MB take 10 us at 8000 GB/s.
  CHECK(in_microseconds(read(20).time(bytes(8e7))) == Approx(20));
  CHECK(in_microseconds(read(20).time(bytes(4e7))) == Approx(5));
  CHECK(in_microseconds(read(5).time(bytes(8e7))) == Approx(5));
  CHECK(in_microseconds(read(5).time(bytes(4e7))) == Approx(2.5));
}

/// A layer over KVP 2 with the given times of exchange and all-reduce.
BenchCase layer(double exchange_us, double all_reduce_us, bool has_windows) {
  BenchCase at{.name = "decode_layer",
               .family = "decode_layer",
               .parameters = {{"kvp", "2"}, {"tpa", "1"}, {"batch", "8"}},
               .values = {{"exchange_us", exchange_us}, {"all_reduce_us", all_reduce_us}}};
  if (has_windows) at.parameters["windows"] = "";
  return at;
}

TEST_CASE("collectives over windows count only where none went over NCCL, and none takes no time") {
  const auto us = [](const std::vector<BenchCase>& cases, Collective collective) {
    Hardware base = hardware_preset("gb200");
    base.overheads.per_operator = microseconds(3);
    for (const MeasuredCollective& measured : helix::plan_cli::calibrate(base, cases).measured) {
      if (measured.collective != collective) continue;
      REQUIRE(measured.points.size() == 1);
      return in_microseconds(measured.points[0].time);
    }
    return 0.0;  // uses the model's value
  };
  const std::vector<BenchCase> both{layer(4, 6, true), layer(9, 8, false), layer(4, 6, true)};
  CHECK(us(both, Collective::all_reduce) == 8);
  CHECK(us(both, Collective::all_to_all) == Approx(9 - 3).epsilon(0.02));
  CHECK(us({layer(4, 6, true)}, Collective::all_reduce) == 6);
  CHECK(us({layer(4, 6, true)}, Collective::all_to_all) == Approx(4 - 3).epsilon(0.1));
  CHECK(us({layer(2, 6, true)}, Collective::all_to_all) == 0);
  CHECK(us({layer(2, 6, true)}, Collective::all_reduce) == 6);
  CHECK(us({layer(2, 6, false), layer(9, 8, false)}, Collective::all_to_all) == Approx(6).epsilon(0.02));
}

TEST_CASE(
    "an exchange that was measured alone counts in place of a layer's, whose size is that of its heads") {
  Hardware base = hardware_preset("gb200");
  base.overheads.per_operator = microseconds(3);
  const auto all_to_all = [&](const std::vector<BenchCase>& cases) {
    const std::vector<MeasuredCollective> measured = helix::plan_cli::calibrate(base, cases).measured;
    const auto found = std::ranges::find(measured, Collective::all_to_all, &MeasuredCollective::collective);
    REQUIRE(found != measured.end());
    REQUIRE(found->points.size() == 1);
    return found->points[0];
  };
  const BenchCase alone{.name = "exchange",
                        .family = "exchange",
                        .parameters = {{"kvp", "2"}},
                        .values = {{"us", 20}, {"bytes", 1e6}}};
  const TimedSize measured = all_to_all({layer(9, 8, false), alone});
  CHECK(in_bytes(measured.size) == 1e6);
  // The combine reads 1.5 MB at 8000 GB/s.
  CHECK(in_microseconds(measured.time) == Approx(20 - 3 - 1.5e6 / 8e6));

  using helix::plan_cli::BenchShape;
  for (const int tpa : {1, 2}) {
    BenchCase at = layer(9, 8, false);
    at.parameters["tpa"] = std::to_string(tpa);
    CHECK(in_bytes(all_to_all({at}).size) == 8.0 * (BenchShape::kHeads / tpa) * (BenchShape::kDim * 2 + 4));
  }
}

TEST_CASE(
    "attention of no bytes takes what the line through the two smallest sizes says, where that is above 0") {
  const auto attention = [](double megabytes, double us) {
    return BenchCase{.name = "partial_attention",
                     .family = "partial_attention",
                     .parameters = {{"queries", "1"}},
                     .values = {{"us", us}, {"bytes/s", megabytes * 1e6 / (us * 1e-6)}}};
  };
  const auto read = [](const std::vector<BenchCase>& cases) {
    return helix::plan_cli::calibrate(hardware_preset("gb200"), cases).attention_read;
  };
  // 10 us and 1 us a megabyte.
  const BandwidthCurve slow_start = read({attention(10, 20), attention(20, 30), attention(100, 110)});
  CHECK(in_microseconds(slow_start.time(bytes(1))) == Approx(10));
  CHECK(in_microseconds(slow_start.time(bytes(1e7))) == Approx(20));
  // Twice the bytes take more than twice the time: below the smallest size its bandwidth holds.
  const BandwidthCurve no_start = read({attention(10, 20), attention(20, 50)});
  CHECK(in_microseconds(no_start.time(bytes(5e6))) == Approx(10));
  CHECK(in_microseconds(no_start.time(bytes(1e7))) == Approx(20));
}

TEST_CASE("aggregates and failed cases are no measurements, and a later file replaces a case") {
  const auto cases = helix::plan_cli::parse_bench_results(R"({"benchmarks": [
    {"name": "a/manual_time", "run_type": "iteration", "us": 1},
    {"name": "a/manual_time", "run_type": "aggregate", "aggregate_name": "mean", "us": 9},
    {"name": "b", "error_occurred": true, "us": 9},
    {"name": "c", "us": 3}]})",
                                                          "file");
  REQUIRE(cases.size() == 2);
  CHECK((cases[0].name == "a" && cases[0].value("us") == 1));
  CHECK((cases[1].name == "c" && cases[1].value("us") == 3));
  const auto folder = std::filesystem::temp_directory_path();
  std::vector<std::filesystem::path> files;
  for (const char* us : {"1", "2"}) {
    files.push_back(folder / (std::string("helix_later_file_") + us + ".json"));
    std::ofstream(files.back()) << R"({"benchmarks": [{"name": "a", "us": )" << us << "}]}";
  }
  const auto read = helix::plan_cli::read_bench_results(files);
  REQUIRE(read.size() == 1);
  CHECK(read[0].value("us") == 2);
}

}  // namespace
