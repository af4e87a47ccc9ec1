// SPDX-License-Identifier: Apache-2.0
// Hardware: what one GPU and the links between GPUs can do, from data sheets or from measurement.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <helix/export.hpp>
#include <helix/plan/units.hpp>

namespace helix::plan {

/// A number of bytes, and the time to read or move them.
struct TimedSize {
  Bytes size{};
  Time time{};
};

/// Time of a read of device memory by its size. It is linear between the given points. Below them the
/// bandwidth is the first point's, above them the last one's. More bytes never take less time.
class HELIX_API BandwidthCurve {
 public:
  /// A measured read: its size and the bandwidth that it reaches.
  struct Point {
    Bytes size;
    Bandwidth bandwidth;
  };

  BandwidthCurve() = default;  ///< An empty curve: reads take no time.
  /// One bandwidth for all sizes. @throws Error(invalid_argument) unless positive.
  explicit BandwidthCurve(Bandwidth flat);
  /// A curve through measured points. @throws Error(invalid_argument) unless there is a point, sizes grow,
  /// values are positive and finite, and no larger size takes less time.
  explicit BandwidthCurve(std::vector<Point> points);

  /// Time to move `size`, interpolated between the points.
  Time time(Bytes size) const {
    if (points_.size() == 1) return size / points_.front().bandwidth;
    return points_.empty() ? Time{} : interpolated(size);
  }
  /// Bandwidth at the largest size.
  Bandwidth peak() const { return points_.empty() ? Bandwidth::unlimited() : points_.back().bandwidth; }
  const std::vector<Point>& points() const { return points_; }

 private:
  Time interpolated(Bytes size) const;

  std::vector<Point> points_{};
};

/// Dense matrix throughput when the wider operand has at most `bits` bits.
struct ComputePeak {
  double bits = 16;
  FlopRate rate{};
};

/// One direction of one GPU's link.
struct Link {
  Time latency{};  ///< Time of a message that carries nothing.
  Bandwidth bandwidth = Bandwidth::unlimited();
};

/// Collectives that a machine may be measured with.
enum class Collective : std::uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send };
/// Name of the collective: "all_reduce".
HELIX_API std::string_view to_string(Collective collective);

/// A measured collective: times over bytes a rank. For all_reduce and broadcast these are the buffer; for
/// all_to_all what a rank holds, own slice included; for all_gather and reduce_scatter the whole. Used
/// instead of the model for groups of exactly `ranks` inside one NVLink domain: linear between points, the
/// first time below them, and above them the last time and what the model adds. A group that was not measured
/// takes no less time than the largest measured group of its ranks in one domain. An all_gather,
/// reduce_scatter or broadcast also takes no less than half of an all_reduce, which two of them make.
struct MeasuredCollective {
  Collective collective = Collective::all_reduce;
  int ranks = 2;
  std::vector<TimedSize> points{};
};

/// Times that no bytes or flops explain. All zero in a pure roofline.
struct Overheads {
  Time per_operator{};    ///< Each operator of one rank: launch, prologue, tail
  Time per_collective{};  ///< Each collective, on top of its links' latency
  Time per_layer{};       ///< Each layer, whatever it holds
  Time per_slice{};       ///< Each HOP-B slice, if there are several: attention starts and ends again
  Time per_step{};        ///< Each pass through the model
};

/// A machine. Every field is an assumption that a user can change.
struct HELIX_API Hardware {
  std::string name{};
  std::string source{};  ///< Origin of the figures: which are measured, stated by the vendor, or assumed
  Bytes memory{};        ///< Memory of one GPU.
  double usable_memory_fraction = 0.9;
  BandwidthCurve read{};
  /// Bandwidth of attention over KV, where it was measured. It includes whole launches, so per_operator is
  /// not added. Without points attention reads as everything else does.
  BandwidthCurve attention_read{};
  std::vector<ComputePeak> peaks{};  ///< Matrix throughputs, with increasing bits
  int nvlink_domain = 1;             ///< GPUs that reach each other over `inside`
  Link inside{};
  Link outside{};
  std::vector<MeasuredCollective> measured{};
  Overheads overheads{};

  /// Memory left for weights, KV and workspace.
  Bytes usable_memory() const { return memory * usable_memory_fraction; }
  /// Throughput of products whose wider operand has `bits` bits: that of the narrowest listed format that
  /// holds them. @throws Error(unsupported) if none does.
  FlopRate peak(double bits) const;
  /// Checks every field. @throws Error(invalid_argument) for a value out of range or NaN, naming it.
  void check() const;
};

/// A machine by name, e.g. "h200". @throws Error(invalid_argument) listing the known names.
HELIX_API Hardware hardware_preset(std::string_view name);
/// Names that hardware_preset() knows.
HELIX_API std::vector<std::string> hardware_preset_names();

}  // namespace helix::plan
