// SPDX-License-Identifier: Apache-2.0
// OperatorTimer: the time of one operator on one machine, from its bytes, flops and messages.
#pragma once

#include <algorithm>
#include <cstdint>

#include <helix/plan/collectives.hpp>
#include <helix/plan/hardware.hpp>
#include <helix/plan/step_time.hpp>

namespace helix::plan::detail {

/// Product of `rows` rows with a matrix of `weights` elements.
struct Product {
  double rows = 0;
  double weights = 0;      ///< Elements read.
  double activations = 0;  ///< Elements read and written.
  double multiplies = 0;   ///< Multiply-adds in total; 0: rows * weights.
};

/// Times operators and hands them to a sink, which sums or lists them.
class OperatorTimer {
 public:
  OperatorTimer(const Precision& precision, const Hardware& hardware, FlopRate product_rate)
      : precision_(precision), hardware_(hardware), product_rate_(product_rate) {}

  const Precision& precision() const { return precision_; }
  const Hardware& hardware() const { return hardware_; }
  Bytes activation_bytes(double elements) const { return packed_bytes(elements, precision_.activation_bits); }

  OperatorTime timed(Operator op, Cost cost, const BandwidthCurve& read, Time overhead, Bytes bytes,
                     Flops flops, FlopRate rate) const {
    const Time memory = read.time(bytes);
    const Time compute = flops / rate;
    OperatorTime result;
    result.op = op;
    result.cost = cost;
    result.bytes = bytes;
    result.flops = flops;
    result.overhead = overhead;
    result.time = std::max(memory, compute) + overhead;
    result.bound = compute > memory ? Bound::compute : Bound::memory;
    if (overhead > std::max(memory, compute)) result.bound = Bound::overhead;
    return result;
  }

  template <class Sink>
  void local(Sink& sink, Operator op, Cost cost, Bytes bytes) const {
    sink(timed(op, cost, hardware_.read, hardware_.overheads.per_operator, bytes, Flops{}, product_rate_));
  }

  template <class Sink>
  void product(Sink& sink, Operator op, Cost cost, const Product& shape) const {
    const double multiplies = shape.multiplies > 0 ? shape.multiplies : shape.rows * shape.weights;
    sink(timed(op, cost, hardware_.read, hardware_.overheads.per_operator,
               packed_bytes(shape.weights, precision_.weight_bits) + activation_bytes(shape.activations),
               flops(2 * multiplies), product_rate_));
  }

  OperatorTime timed_collective(Operator op, Cost cost, Collective kind, CommGroup group, Bytes size) const {
    const CollectiveTime fastest = collective_time(hardware_, kind, group, size);
    OperatorTime result;
    result.op = op;
    result.cost = cost;
    result.bytes = size;
    result.algorithm = fastest.algorithm;
    result.ranks = group.ranks;
    result.overhead = hardware_.overheads.per_collective;
    result.time = fastest.time + result.overhead;
    result.bound = result.overhead > fastest.time ? Bound::overhead : Bound::network;
    return result;
  }

  template <class Sink>
  void collective(Sink& sink, Operator op, Cost cost, Collective kind, CommGroup group, Bytes size,
                  std::int64_t count = 1) const {
    if (group.ranks == 1) return;
    OperatorTime result = timed_collective(op, cost, kind, group, size);
    result.count = count;
    sink(result);
  }

  /// The faster option: `kind` with everything, or an all-to-all with only what was chosen.
  template <class Sink>
  void faster(Sink& sink, Operator op, Collective kind, CommGroup group, Bytes all, Bytes chosen) const {
    const OperatorTime whole = timed_collective(op, Cost::token_exchange, kind, group, all);
    const OperatorTime part =
        timed_collective(op, Cost::token_exchange, Collective::all_to_all, group, chosen);
    sink(part.time < whole.time ? part : whole);
  }

  /// An operator that takes a declared time and nothing else.
  OperatorTime declared(Operator op, Time time) const {
    OperatorTime result;
    result.op = op;
    result.time = time;
    result.overhead = time;
    result.bound = Bound::overhead;
    return result;
  }

 private:
  const Precision& precision_;
  const Hardware& hardware_;
  FlopRate product_rate_;
};

}  // namespace helix::plan::detail
