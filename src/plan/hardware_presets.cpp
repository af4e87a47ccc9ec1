// SPDX-License-Identifier: Apache-2.0
// Machines: figures measured here, stated by the vendor, or assumed.
#include <array>
#include <sstream>

#include <helix/error.hpp>
#include <helix/plan/hardware.hpp>

namespace helix::plan {
namespace {

BandwidthCurve::Point read_point(double megabytes, double terabytes_per_second) {
  return {bytes(megabytes * 1e6), gigabytes_per_second(terabytes_per_second * 1e3)};
}

TimedSize timed(double kilobytes, double time_us) {
  return {bytes(kilobytes * 1e3), microseconds(time_us)};
}

/// Figures of docs/measurements and bench/results. They do not include the throughput of products, a link
/// between two GPUs, or anything outside the domain.
Hardware h200() {
  Hardware hardware;
  hardware.name = "h200";
  hardware.source =
      "measured on H200s (docs/measurements): cold reads by size, attention in bf16, exchange and NCCL's "
      "all-reduce on two and four GPUs; the vendor: 141 GB, network 400 Gb/s; assumed: 790 TFLOP/s in 16 "
      "bits and twice that in 8, 379 GB/s and 1.2 us between two GPUs inside, 5 us outside, 3 us an operator";
  hardware.memory = gigabytes(141);
  hardware.read =
      BandwidthCurve({read_point(16, 1.6), read_point(64, 3.4), read_point(256, 4.2), read_point(1000, 4.6)});
  hardware.attention_read =
      BandwidthCurve({read_point(33.6, 2.152), read_point(268, 3.868), read_point(537, 4.184),
                      read_point(2147, 4.473), read_point(4295, 4.53), read_point(34360, 4.605)});
  hardware.peaks = {{8, teraflops_per_second(1580)}, {16, teraflops_per_second(790)}};
  hardware.nvlink_domain = 8;
  hardware.inside = {microseconds(1.2), gigabytes_per_second(379)};
  hardware.outside = {microseconds(5), gigabytes_per_second(50)};
  // KvpAllToAll and combine over NCCL in a graph, less the 3 us that the combine counts as an operator; by
  // bytes per rank, own slice included. The all-reduce is that of whole decode steps. All from
  // NVIDIA-H200-x4-2026-11-21.json, except the larger all-reduces, which are from
  // NVIDIA-H200-x2-2026-11-21.json.
  hardware.measured = {
      {Collective::all_to_all,
       2,
       {timed(33, 5.2), timed(133, 6.0), timed(532, 8.3), timed(1065, 11.5), timed(2130, 13.6)}},
      {Collective::all_to_all,
       4,
       {timed(33, 6.0), timed(133, 6.6), timed(532, 9.0), timed(1065, 13.0), timed(2130, 15.3)}},
      {Collective::all_reduce, 2, {timed(262, 7.5), timed(8389, 44.8), timed(33554, 134)}},
      {Collective::all_reduce, 4, {timed(262, 10.3)}}};
  hardware.overheads.per_operator = microseconds(3);
  // On two GPUs two slices took 21 us per layer longer. The curve, read twice at half the size, explains 9 us
  // of that.
  hardware.overheads.per_slice = microseconds(6);
  return hardware;
}

/// The vendor's figures for GB200 NVL72, per GPU of its 72, without sparsity.
Hardware gb200() {
  Hardware hardware;
  hardware.name = "gb200";
  hardware.source =
      "the vendor's data sheet of GB200 NVL72, of one GPU, products without sparsity: 13.4 TB / 72, 576 TB/s "
      "/ 72, 720, 360 and 180 PFLOP/s / 72 in 4, 8 and 16 bits, NVLink 1.8 TB/s both ways, network 400 Gb/s; "
      "assumed: latencies of 1 us inside and 5 us outside";
  hardware.memory = gigabytes(186);
  hardware.read = BandwidthCurve(gigabytes_per_second(8000));
  hardware.peaks = {
      {4, teraflops_per_second(10000)}, {8, teraflops_per_second(5000)}, {16, teraflops_per_second(2500)}};
  hardware.nvlink_domain = 72;
  hardware.inside = {microseconds(1), gigabytes_per_second(900)};
  hardware.outside = {microseconds(5), gigabytes_per_second(50)};
  return hardware;
}

/// gb200 with two declared times. They are fitted so that at 1M tokens, 4 bits and up to 64 GPUs the fastest
/// Helix layout is 1.13 (Llama-405B) and 1.50 times (DeepSeek-R1) as fast as the fastest baseline, as the
/// paper reports: two unknowns, two equations, solved by Newton's method (3.53 and 36.65 us). They say how
/// much time the paper's simulator must add to reads and links; they are not measurements.
Hardware gb200_fitted() {
  Hardware hardware = gb200();
  hardware.name = "gb200-fitted";
  hardware.source +=
      "; fitted to the paper's interactivity gains of 1.13 and 1.5: 3.5 us a collective, 36.7 us a layer";
  hardware.overheads.per_collective = microseconds(3.5);
  hardware.overheads.per_layer = microseconds(36.7);
  return hardware;
}

/// The machine of appendix A: only reads take time.
Hardware roofline_8000() {
  Hardware hardware = gb200();
  hardware.name = "roofline-8000";
  hardware.source = "the paper's appendix A: memory is read at 8000 GB/s; products and links take no time";
  hardware.peaks = {{64, FlopRate::unlimited()}};
  hardware.inside = {};
  hardware.outside = {};
  return hardware;
}

constexpr std::array<Hardware (*)(), 4> kPresets{h200, gb200, gb200_fitted, roofline_8000};

}  // namespace

std::vector<std::string> hardware_preset_names() {
  std::vector<std::string> names;
  for (const auto preset : kPresets) names.push_back(preset().name);
  return names;
}

Hardware hardware_preset(std::string_view name) {
  std::ostringstream known;
  for (const auto preset : kPresets) {
    Hardware hardware = preset();
    if (hardware.name == name) return hardware;
    known << (known.tellp() > 0 ? ", " : "") << hardware.name;
  }
  throw Error(ErrorCode::invalid_argument, "there is no hardware preset \"", name, "\"; known are ",
              known.str());
}

}  // namespace helix::plan
