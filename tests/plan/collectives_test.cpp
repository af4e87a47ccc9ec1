// SPDX-License-Identifier: Apache-2.0
// Hardware and collectives: formulas computed by hand, the choice of the algorithm, monotonicity, and invalid
// machines.
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include <helix/plan/collectives.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using namespace helix::plan;
using helix::ErrorCode;
using helix::test::failure_of;

/// 1 us and 100 GB/s inside a domain of 8, 5 us and 10 GB/s outside.
Hardware two_levels() {
  Hardware hardware = hardware_preset("gb200");
  hardware.nvlink_domain = 8;
  hardware.inside = {microseconds(1), gigabytes_per_second(100)};
  hardware.outside = {microseconds(5), gigabytes_per_second(10)};
  return hardware;
}

TEST_CASE("an all-reduce inside a domain is one-shot when small and two-shot when large") {
  const Hardware hardware = two_levels();
  const auto small = collective_time(hardware, Collective::all_reduce, {8, 1}, bytes(1000));
  CHECK(small.algorithm == CollectiveAlgorithm::one_shot);
  CHECK(in_microseconds(small.time) == Approx(1 + 7 * 1000 / 1e5));
  const auto large = collective_time(hardware, Collective::all_reduce, {8, 1}, bytes(8e6));
  CHECK(large.algorithm == CollectiveAlgorithm::two_shot);
  CHECK(in_microseconds(large.time) == Approx(2 * (1 + 7 * 1e6 / 1e5)));
}

TEST_CASE("an all-reduce across domains reduces inside them first when the network is slow") {
  const auto time = collective_time(two_levels(), Collective::all_reduce, {32, 1}, bytes(8e6));
  CHECK(time.algorithm == CollectiveAlgorithm::hierarchical);
  // 1 MB shards: 7 of them inside a domain, twice; 4 domains exchange quarters of a shard, twice.
  CHECK(in_microseconds(time.time) == Approx(2 * (1 + 7e6 / 1e5) + 2 * (5 + 3 * 0.25e6 / 1e4)));
}

TEST_CASE("a group with a stride leaves the domain earlier") {
  const Hardware hardware = two_levels();
  const auto near = collective_time(hardware, Collective::all_to_all, {4, 2}, bytes(4000));
  CHECK(in_microseconds(near.time) == Approx(1 + 3 * 1000 / 1e5));
  const auto far = collective_time(hardware, Collective::all_to_all, {4, 8}, bytes(4000));
  CHECK(in_microseconds(far.time) == Approx(5 + 3 * 1000 / 1e4));
  const auto both = collective_time(hardware, Collective::all_to_all, {4, 4}, bytes(4000));
  CHECK(in_microseconds(both.time) == Approx(5 + 2 * 1000 / 1e4));
}

TEST_CASE("gathers and broadcasts by hand") {
  const Hardware hardware = two_levels();
  const auto gather = collective_time(hardware, Collective::all_gather, {8, 1}, bytes(8e6));
  CHECK(in_microseconds(gather.time) == Approx(1 + 7e6 / 1e5));
  CHECK(collective_time(hardware, Collective::reduce_scatter, {8, 1}, bytes(8e6)).time == gather.time);
  const auto tiny = collective_time(hardware, Collective::broadcast, {8, 1}, bytes(8));
  CHECK(tiny.algorithm == CollectiveAlgorithm::one_shot);
  const auto large = collective_time(hardware, Collective::broadcast, {8, 1}, bytes(8e6));
  CHECK(large.algorithm == CollectiveAlgorithm::two_shot);
  const auto send = collective_time(hardware, Collective::send, {2, 8}, bytes(1e4));
  CHECK(in_microseconds(send.time) == Approx(5 + 1));
}

TEST_CASE("a gather across domains sends each part over the network once when that is slow") {
  const auto time = collective_time(two_levels(), Collective::all_gather, {32, 1}, bytes(32e6));
  CHECK(time.algorithm == CollectiveAlgorithm::hierarchical);
  // 1 MB parts: one to each of 3 other domains; then the 4 that a rank holds go to the 7 other ranks of its
  // domain.
  CHECK(in_microseconds(time.time) == Approx(5 + 3e6 / 1e4 + 1 + 7 * 4e6 / 1e5));
}

TEST_CASE("where a group fills domains unevenly, a rank of the emptiest is the slowest") {
  const auto time = [&](Collective collective, int ranks, double size) {
    return collective_time(two_levels(), collective, {ranks, 1}, bytes(size));
  };
  // The ninth rank is alone: its 8 messages leave its domain, and so does one message of each other rank.
  CHECK(in_microseconds(time(Collective::all_to_all, 9, 9000).time) == Approx(5 + 8 * 1000 / 1e4));
  CHECK(in_microseconds(time(Collective::all_to_all, 12, 12000).time) == Approx(5 + 8 * 1000 / 1e4));
  CHECK(in_microseconds(time(Collective::all_to_all, 16, 16000).time) == Approx(5 + 8 * 1000 / 1e4));
  // 8 ranks and 4 ranks: shards of 1 MB among the eight, of 2 MB between the four and their partners.
  const CollectiveTime reduced = time(Collective::all_reduce, 12, 8e6);
  CHECK(reduced.algorithm == CollectiveAlgorithm::hierarchical);
  CHECK(in_microseconds(reduced.time) == Approx(2 * (1 + 7e6 / 1e5) + 5 + 2e6 / 1e4));
  // The 4 receive the parts of the 8, two of 1 MB each; each of the 8 sends 1.5 of the 12 parts to the 7
  // others.
  const CollectiveTime gathered = time(Collective::all_gather, 12, 12e6);
  CHECK(gathered.algorithm == CollectiveAlgorithm::hierarchical);
  CHECK(in_microseconds(gathered.time) == Approx(5 + 2e6 / 1e4 + 1 + 7 * 1.5e6 / 1e5));
}

TEST_CASE("one rank, or nothing to send, takes no time") {
  for (const Collective collective :
       {Collective::all_reduce, Collective::all_to_all, Collective::broadcast}) {
    CHECK(collective_time(two_levels(), collective, {1, 1}, bytes(1e6)).time == Time{});
    CHECK(collective_time(two_levels(), collective, {8, 1}, Bytes{}).algorithm == CollectiveAlgorithm::none);
  }
}

TEST_CASE("groups and sizes that cannot be are refused with the value") {
  const auto refuses = [](CommGroup group, Bytes size, const char* says) {
    const auto failure =
        failure_of([&] { collective_time(two_levels(), Collective::all_reduce, group, size); });
    return failure && failure->code == ErrorCode::invalid_argument && failure->says(says);
  };
  CHECK(refuses({-4, 1}, bytes(1), "-4 ranks"));
  CHECK(refuses({0, 1}, bytes(1), "0 ranks"));
  CHECK(refuses({4, 0}, bytes(1), "0 apart"));
  CHECK(refuses({4, 1}, bytes(-1), "-1 bytes"));
  CHECK(refuses({4, 1}, bytes(std::nan("")), "nan bytes"));
}

TEST_CASE("measured collectives replace the model for their ranks inside a domain only") {
  Hardware hardware = two_levels();
  hardware.measured = {
      {Collective::all_to_all, 4, {{bytes(1000), microseconds(8)}, {bytes(3000), microseconds(10)}}}};
  const auto at = [&](double size, CommGroup group) {
    return collective_time(hardware, Collective::all_to_all, group, bytes(size));
  };
  CHECK(in_microseconds(at(10, {4, 1}).time) == 8);
  CHECK(in_microseconds(at(2000, {4, 1}).time) == 9);
  CHECK(in_microseconds(at(5000, {4, 1}).time) == Approx(10 + 0.75 * 2000 / 1e5));
  CHECK(at(2000, {4, 1}).algorithm == CollectiveAlgorithm::measured);
  CHECK(at(2000, {2, 1}).algorithm != CollectiveAlgorithm::measured);
  CHECK(at(2000, {4, 8}).algorithm != CollectiveAlgorithm::measured);
}

TEST_CASE("what was not measured takes no less than the largest group inside a domain that was") {
  Hardware hardware = two_levels();
  hardware.measured = {
      {Collective::all_reduce, 2, {{bytes(1000), microseconds(7)}}},
      {Collective::all_reduce, 4, {{bytes(1000), microseconds(10)}}},
      {Collective::all_to_all, 2, {{bytes(1000), microseconds(6)}, {bytes(8e6), seconds(1)}}},
      {Collective::all_to_all, 4, {{bytes(1000), microseconds(5)}}}};
  const auto us = [&](Collective collective, CommGroup group, double size) {
    return in_microseconds(collective_time(hardware, collective, group, bytes(size)).time);
  };
  CHECK(us(Collective::all_reduce, {3, 1}, 1000) == 7);
  CHECK(us(Collective::all_reduce, {8, 1}, 1000) == 10);
  // The model's time is longer.
  CHECK(us(Collective::all_reduce, {8, 1}, 1e9) == Approx(2 * (1 + 7e9 / 8 / 1e5)));
  CHECK(us(Collective::all_reduce, {16, 1}, 1000) == 10);  // 8 of the ranks share a domain
  CHECK(us(Collective::all_reduce, {16, 4}, 1000) < 10);   // only 2 of them do, 7 us
  CHECK(us(Collective::all_reduce, {16, 4}, 1000) >= 7);
  CHECK(us(Collective::all_reduce, {8, 8}, 1000) < 7);  // and here none does
  // A measured time is used as it is. Beyond the measured sizes, four ranks take no less time than two.
  CHECK(us(Collective::all_to_all, {4, 1}, 1000) == 5);
  CHECK(us(Collective::all_to_all, {4, 1}, 8e6) == us(Collective::all_to_all, {2, 1}, 8e6));
  // Two of each of these make an all-reduce.
  for (const Collective half : {Collective::all_gather, Collective::reduce_scatter, Collective::broadcast}) {
    CHECK(us(half, {4, 1}, 1000) == 5);
    CHECK(us(half, {8, 1}, 1000) == 5);
    CHECK(us(half, {8, 8}, 1000) < 6);
  }
}

TEST_CASE("thousands of measured groups cost milliseconds, not their number squared or cubed") {
  Hardware model = two_levels();
  model.nvlink_domain = 4096;
  Hardware hardware = model;
  constexpr int kMostRanks = 2000;
  for (int ranks = kMostRanks; ranks >= 2; --ranks) {
    for (const Collective collective : {Collective::all_gather, Collective::all_reduce})
      hardware.measured.push_back({collective, ranks, {{bytes(1), microseconds(ranks)}}});
  }
  const Bytes size = bytes(1e6);
  const auto modelled = [&](Bytes asked) {
    return in_microseconds(collective_time(model, Collective::all_gather, {kMostRanks, 1}, asked).time);
  };
  const auto start = std::chrono::steady_clock::now();
  const CollectiveTime time = collective_time(hardware, Collective::all_gather, {kMostRanks, 1}, size);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
  CHECK(in_microseconds(time.time) == Approx(kMostRanks + modelled(size) - modelled(bytes(1))));
}

TEST_CASE("on H200s no collective is faster over more GPUs, and two take what was measured") {
  const Hardware h200 = hardware_preset("h200");
  const auto us = [&](Collective collective, int ranks, double size) {
    return in_microseconds(collective_time(h200, collective, {ranks, 1}, bytes(size)).time);
  };
  for (const Collective collective :
       {Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter, Collective::all_to_all,
        Collective::broadcast}) {
    for (double size = 100; size < 1e9; size *= 3) {
      double last = 0;
      for (const int ranks : {2, 3, 4, 5, 8}) {
        INFO(to_string(collective) << " of " << size << " bytes over " << ranks);
        CHECK(us(collective, ranks, size) >= last);
        last = us(collective, ranks, size);
      }
    }
  }
  // bench/results/NVIDIA-H200-x4-2026-11-21.json: 8 hidden states of 16384 in bf16; exchange and combine of 4
  // tokens, minus the combine.
  CHECK(us(Collective::all_reduce, 2, 262144) == Approx(7.5).epsilon(0.02));
  CHECK(us(Collective::all_to_all, 2, 133120) == Approx(9.02 - 3).epsilon(0.02));
}

TEST_CASE("better links never slow a collective, and more bytes never speed it up") {
  for (const Collective collective :
       {Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter, Collective::all_to_all,
        Collective::broadcast, Collective::send}) {
    for (const int ranks : {2, 6, 8, 12, 64, 100}) {
      Time last;
      for (double size = 1; size < 1e10; size *= 7) {
        const Time time = collective_time(two_levels(), collective, {ranks, 1}, bytes(size)).time;
        CHECK(time >= last);
        last = time;
        for (const bool is_inside : {true, false}) {
          Hardware better = two_levels();
          Link& link = is_inside ? better.inside : better.outside;
          link = {link.latency * 0.5, link.bandwidth * 3};
          CHECK(collective_time(better, collective, {ranks, 1}, bytes(size)).time <= time);
        }
      }
    }
  }
}

TEST_CASE("a curve of read bandwidth is linear in time between its points") {
  const BandwidthCurve curve(
      {{bytes(1e6), gigabytes_per_second(1000)}, {bytes(5e6), gigabytes_per_second(2500)}});
  CHECK(in_microseconds(curve.time(bytes(5e5))) == Approx(0.5));
  CHECK(in_microseconds(curve.time(bytes(1e6))) == Approx(1));
  CHECK(in_microseconds(curve.time(bytes(3e6))) == Approx(1.5));
  CHECK(in_microseconds(curve.time(bytes(1e7))) == Approx(4));
}

TEST_CASE("absurd machines are refused with the value") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(failure_of([] { BandwidthCurve(gigabytes_per_second(0)); })->says("0 GB/s"));
  CHECK(failure_of([&] { BandwidthCurve(gigabytes_per_second(nan)); })->says("nan GB/s"));
  CHECK(failure_of([] { BandwidthCurve(std::vector<BandwidthCurve::Point>{}); })->says("no points"));
  CHECK(failure_of([] {
          BandwidthCurve({{bytes(2), gigabytes_per_second(1)}, {bytes(1), gigabytes_per_second(1)}});
        })->says("sort"));
  CHECK(failure_of([] {
          BandwidthCurve({{bytes(1e6), gigabytes_per_second(1)}, {bytes(2e6), gigabytes_per_second(3)}});
        })->says("less than"));
  struct Bad {
    std::function<void(Hardware&)> spoil;
    const char* says;
  };
  const std::vector<Bad> all{
      {[](Hardware& h) { h.memory = gigabytes(-2); }, "memory is -2 GB"},
      {[&](Hardware& h) { h.memory = gigabytes(nan); }, "memory is nan"},
      {[](Hardware& h) { h.usable_memory_fraction = 1.5; }, "usable_memory_fraction is 1.5"},
      {[](Hardware& h) { h.read = {}; }, "read bandwidth"},
      {[](Hardware& h) { h.peaks.clear(); }, "throughput"},
      {[&](Hardware& h) {
         h.peaks = {{16, teraflops_per_second(nan)}};
       },
       "nan TFLOP/s"},
      {[](Hardware& h) { h.nvlink_domain = 0; }, "nvlink_domain is 0"},
      {[](Hardware& h) { h.inside.latency = microseconds(-1); }, "latency inside the domain is -1"},
      {[](Hardware& h) { h.outside.bandwidth = Bandwidth{}; }, "bandwidth outside the domain is 0"},
      {[&](Hardware& h) { h.overheads.per_layer = microseconds(nan); }, "per_layer is nan"},
      {[](Hardware& h) {
         h.measured = {{Collective::all_reduce, 1, {{bytes(1), microseconds(1)}}}};
       },
       "1 ranks"},
      {[](Hardware& h) {
         h.measured = {
             {Collective::all_reduce, 2, {{bytes(1), microseconds(2)}, {bytes(2), microseconds(1)}}}};
       },
       "must not fall"},
      {[](Hardware& h) {
         h.measured = {{Collective::send, 2, {{bytes(1), microseconds(1)}}},
                       {Collective::send, 2, {{bytes(2), microseconds(2)}}}};
       },
       "send over 2 ranks is measured twice"}};
  for (const Bad& bad : all) {
    Hardware hardware = two_levels();
    bad.spoil(hardware);
    const auto failure = failure_of([&] { hardware.check(); });
    INFO(bad.says);
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(failure->says(bad.says));
  }
}

TEST_CASE("hardware presets are sound, known by name, and say where they come from") {
  for (const std::string& name : hardware_preset_names()) {
    INFO(name);
    const Hardware hardware = hardware_preset(name);
    CHECK(hardware.name == name);
    CHECK_NOTHROW(hardware.check());
    CHECK_FALSE(hardware.source.empty());
  }
  CHECK(failure_of([] { hardware_preset("abacus"); })->says("gb200"));
  CHECK(hardware_preset("h200").peak(4) == hardware_preset("h200").peak(8));
  CHECK(failure_of([] { hardware_preset("h200").peak(32); })->code == ErrorCode::unsupported);
}

}  // namespace
