// SPDX-License-Identifier: Apache-2.0
// BandwidthCurve, and the checks of Hardware.
#include <algorithm>
#include <cmath>
#include <iterator>

#include <helix/error.hpp>
#include <helix/plan/hardware.hpp>

namespace helix::plan {
namespace {

/// Requires a positive value that is not NaN; infinity means unlimited.
void check_positive(std::string_view hardware, std::string_view name, double value, std::string_view unit) {
  HELIX_EXPECTS(value > 0, ErrorCode::invalid_argument, "hardware ", hardware, ": ", name, " is ", value, " ",
                unit, "; it must be positive");
}

void check_time(std::string_view hardware, std::string_view name, Time time) {
  const double us = in_microseconds(time);
  HELIX_EXPECTS(us >= 0 && std::isfinite(us), ErrorCode::invalid_argument, "hardware ", hardware, ": ", name,
                " is ", us, " us; it must be finite and not negative");
}

}  // namespace

std::string_view to_string(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::all_to_all:
      return "all_to_all";
    case Collective::broadcast:
      return "broadcast";
    case Collective::send:
      return "send";
  }
  return "unknown";
}

BandwidthCurve::BandwidthCurve(Bandwidth flat) : points_{{Bytes{}, flat}} {
  HELIX_EXPECTS(flat > Bandwidth{}, ErrorCode::invalid_argument, "the read bandwidth is ",
                in_gigabytes_per_second(flat), " GB/s; it must be positive");
}

BandwidthCurve::BandwidthCurve(std::vector<Point> points) : points_(std::move(points)) {
  HELIX_EXPECTS(!points_.empty(), ErrorCode::invalid_argument,
                "the curve of read bandwidth has no points; give at least one");
  Bytes last_size;
  Time last_time;
  for (const Point& point : points_) {
    const double size = in_bytes(point.size);
    const double rate = in_gigabytes_per_second(point.bandwidth);
    HELIX_EXPECTS(size > 0 && std::isfinite(size) && rate > 0 && std::isfinite(rate),
                  ErrorCode::invalid_argument, "the curve of read bandwidth has ", rate, " GB/s at ", size,
                  " bytes; both must be positive and finite");
    HELIX_EXPECTS(point.size > last_size, ErrorCode::invalid_argument, "the curve of read bandwidth has ",
                  size, " bytes after ", in_bytes(last_size), "; sort the points by size");
    const Time time = point.size / point.bandwidth;
    HELIX_EXPECTS(time >= last_time, ErrorCode::invalid_argument, "by the curve of read bandwidth ", size,
                  " bytes take ", in_microseconds(time), " us, less than the ", in_microseconds(last_time),
                  " us of ", in_bytes(last_size), " bytes");
    last_size = point.size;
    last_time = time;
  }
}

Time BandwidthCurve::interpolated(Bytes size) const {
  if (size <= points_.front().size) return size / points_.front().bandwidth;
  if (size > points_.back().size) return size / points_.back().bandwidth;
  const auto next = std::ranges::lower_bound(points_, size, {}, &Point::size);
  const Point& from = *std::prev(next);
  const Time begin = from.size / from.bandwidth;
  const Time end = next->size / next->bandwidth;
  return begin + (end - begin) * ((size - from.size) / (next->size - from.size));
}

FlopRate Hardware::peak(double bits) const {
  for (const ComputePeak& peak : peaks) {
    if (bits <= peak.bits) return peak.rate;
  }
  throw Error(ErrorCode::unsupported, "hardware ", name, " states no throughput for operands of ", bits,
              " bits; its widest format has ", peaks.empty() ? 0.0 : peaks.back().bits);
}

void Hardware::check() const {
  const double size = in_gigabytes(memory);
  HELIX_EXPECTS(size > 0 && std::isfinite(size), ErrorCode::invalid_argument, "hardware ", name,
                ": memory is ", size, " GB; it must be positive and finite");
  HELIX_EXPECTS(usable_memory_fraction > 0 && usable_memory_fraction <= 1, ErrorCode::invalid_argument,
                "hardware ", name, ": usable_memory_fraction is ", usable_memory_fraction,
                "; it must be in (0, 1]");
  HELIX_EXPECTS(!read.points().empty(), ErrorCode::invalid_argument, "hardware ", name,
                ": the read bandwidth is not given");
  HELIX_EXPECTS(!peaks.empty(), ErrorCode::invalid_argument, "hardware ", name,
                ": no throughput of matrix products is given");
  double last_bits = 0;
  for (const ComputePeak& peak : peaks) {
    HELIX_EXPECTS(peak.bits > last_bits, ErrorCode::invalid_argument, "hardware ", name,
                  ": a throughput for ", peak.bits, " bits stands after one for ", last_bits,
                  "; sort them by bits");
    last_bits = peak.bits;
    check_positive(name, "a throughput", in_teraflops_per_second(peak.rate), "TFLOP/s");
  }
  constexpr int kMaxDomain = 1 << 20;
  HELIX_EXPECTS(nvlink_domain >= 1 && nvlink_domain <= kMaxDomain, ErrorCode::invalid_argument, "hardware ",
                name, ": nvlink_domain is ", nvlink_domain, "; it must be in [1, ", kMaxDomain, "]");
  check_time(name, "the latency inside the domain", inside.latency);
  check_time(name, "the latency outside the domain", outside.latency);
  check_positive(name, "the bandwidth inside the domain", in_gigabytes_per_second(inside.bandwidth), "GB/s");
  check_positive(name, "the bandwidth outside the domain", in_gigabytes_per_second(outside.bandwidth),
                 "GB/s");
  check_time(name, "per_operator", overheads.per_operator);
  check_time(name, "per_collective", overheads.per_collective);
  check_time(name, "per_layer", overheads.per_layer);
  check_time(name, "per_slice", overheads.per_slice);
  check_time(name, "per_step", overheads.per_step);
  for (const MeasuredCollective& collective : measured) {
    const auto same = [&](const MeasuredCollective& other) {
      return other.collective == collective.collective && other.ranks == collective.ranks;
    };
    HELIX_EXPECTS(std::count_if(measured.begin(), measured.end(), same) == 1, ErrorCode::invalid_argument,
                  "hardware ", name, ": ", to_string(collective.collective), " over ", collective.ranks,
                  " ranks is measured twice; give all its points in one entry");
    HELIX_EXPECTS(collective.ranks >= 2 && !collective.points.empty(), ErrorCode::invalid_argument,
                  "hardware ", name, ": a measured ", to_string(collective.collective), " has ",
                  collective.ranks, " ranks and ", collective.points.size(),
                  " points; at least 2 ranks and 1 point are needed");
    TimedSize last{Bytes{}, Time{}};
    for (const TimedSize& point : collective.points) {
      check_time(name, to_string(collective.collective), point.time);
      HELIX_EXPECTS(point.size > last.size && point.time >= last.time && std::isfinite(in_bytes(point.size)),
                    ErrorCode::invalid_argument, "hardware ", name, ": the measured ",
                    to_string(collective.collective), " over ", collective.ranks, " ranks takes ",
                    in_microseconds(point.time), " us for ", in_bytes(point.size), " bytes after ",
                    in_microseconds(last.time), " us for ", in_bytes(last.size),
                    "; sizes must grow, times must not fall");
      last = point;
    }
  }
}

}  // namespace helix::plan
