// SPDX-License-Identifier: Apache-2.0
// Times of collectives: a formula for each algorithm, and the choice of the fastest.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <memory>
#include <vector>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/plan/collectives.hpp>

namespace helix::plan {
namespace {

/// A group divided into NVLink domains, all full but the last. The slowest rank counts: inside a domain, one
/// of a full domain; between domains, one of the last, which sends the most outside.
struct Spread {
  int ranks;
  int in_domain;       ///< Ranks of the group that share a full domain.
  int in_last_domain;  ///< Ranks of the group in its least-filled domain.
  int domains;
  const Link& inside;
  const Link& outside;

  bool is_one_domain() const { return domains == 1; }
  const Link& slowest() const { return is_one_domain() ? inside : outside; }

  /// Every rank sends `message` to every other at once, over both kinds of links.
  Time direct(Bytes message) const {
    const Time near = in_domain > 1 ? inside.latency + message * (in_domain - 1) / inside.bandwidth : Time{};
    const Time far =
        is_one_domain() ? Time{} : outside.latency + message * (ranks - in_last_domain) / outside.bandwidth;
    return std::max(near, far);
  }
  Time direct_inside(Bytes message) const {
    return inside.latency + message * (in_domain - 1) / inside.bandwidth;
  }
  Time direct_between_domains(Bytes message) const {
    return outside.latency + message * (domains - 1) / outside.bandwidth;
  }
  /// The ranks of a domain receive what all others hold, `part` from each, and divide that evenly.
  Time gather_between_domains(Bytes part) const {
    return outside.latency + part * (ranks - in_last_domain) / in_last_domain / outside.bandwidth;
  }
  /// One step of a ring, as slow as its slowest link.
  Time ring_step(Bytes message) const { return slowest().latency + message / slowest().bandwidth; }
};

class Fastest {
 public:
  void offer(CollectiveAlgorithm algorithm, Time time) {
    if (best_.algorithm == CollectiveAlgorithm::none || time < best_.time) best_ = {time, algorithm};
  }
  CollectiveTime best() const { return best_; }

 private:
  CollectiveTime best_;
};

CollectiveTime all_reduce_time(const Spread& group, Bytes size) {
  Fastest fastest;
  const Bytes part = size / group.ranks;
  fastest.offer(CollectiveAlgorithm::one_shot, group.direct(size));
  fastest.offer(CollectiveAlgorithm::two_shot, group.direct(part) * 2);
  fastest.offer(CollectiveAlgorithm::ring, group.ring_step(part) * (2 * (group.ranks - 1)));
  if (!group.is_one_domain() && group.in_domain > 1) {
    const Bytes shard = size / group.in_last_domain;
    const Time between = std::min(group.direct_between_domains(shard),
                                  group.direct_between_domains(shard / group.domains) * 2);
    fastest.offer(CollectiveAlgorithm::hierarchical,
                  group.direct_inside(size / group.in_domain) * 2 + between);
  }
  return fastest.best();
}

/// All-gather; also reduce-scatter, which is the reverse.
CollectiveTime all_gather_time(const Spread& group, Bytes size) {
  Fastest fastest;
  const Bytes part = size / group.ranks;
  fastest.offer(CollectiveAlgorithm::one_shot, group.direct(part));
  fastest.offer(CollectiveAlgorithm::ring, group.ring_step(part) * (group.ranks - 1));
  if (!group.is_one_domain() && group.in_domain > 1) {
    fastest.offer(
        CollectiveAlgorithm::hierarchical,
        group.gather_between_domains(part) + group.direct_inside(part * group.ranks / group.in_domain));
  }
  return fastest.best();
}

CollectiveTime broadcast_time(const Spread& group, Bytes size) {
  Fastest fastest;
  const auto rounds = std::bit_width(static_cast<unsigned>(group.ranks - 1));
  fastest.offer(CollectiveAlgorithm::one_shot, group.direct(size));
  fastest.offer(CollectiveAlgorithm::two_shot, group.direct(size / group.ranks) * 2);
  fastest.offer(CollectiveAlgorithm::tree, group.ring_step(size) * rounds);
  return fastest.best();
}

/// By the model, without measurements.
CollectiveTime modelled(const Spread& spread, Collective collective, Bytes size) {
  switch (collective) {
    case Collective::all_reduce:
      return all_reduce_time(spread, size);
    case Collective::all_gather:
    case Collective::reduce_scatter:
      return all_gather_time(spread, size);
    case Collective::all_to_all:
      return {spread.direct(size / spread.ranks), CollectiveAlgorithm::one_shot};
    case Collective::broadcast:
      return broadcast_time(spread, size);
    case Collective::send:
      return {spread.ring_step(size), CollectiveAlgorithm::one_shot};
  }
  return {};
}

/// Whether an all-reduce consists of this collective and its reverse.
bool is_half_of_all_reduce(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::reduce_scatter ||
         collective == Collective::broadcast;
}

Time measured_time(const MeasuredCollective& measured, const Spread& spread, Bytes size) {
  const std::vector<TimedSize>& points = measured.points;
  if (size <= points.front().size) return points.front().time;
  if (size >= points.back().size) {
    return points.back().time + modelled(spread, measured.collective, size).time -
           modelled(spread, measured.collective, points.back().size).time;
  }
  const auto next = std::ranges::lower_bound(points, size, {}, &TimedSize::size);
  const TimedSize& a = *std::prev(next);
  const TimedSize& b = *next;
  return a.time + (b.time - a.time) * ((size - a.size) / (b.size - a.size));
}

Spread spread_of(const Hardware& hardware, CommGroup group) {
  const int in_domain = std::clamp(hardware.nvlink_domain / group.stride, 1, group.ranks);
  const int domains = ceil_div(group.ranks, in_domain);
  return {.ranks = group.ranks,
          .in_domain = in_domain,
          .in_last_domain = group.ranks - (domains - 1) * in_domain,
          .domains = domains,
          .inside = hardware.inside,
          .outside = hardware.outside};
}

/// Times of one collective over growing groups, each of which counts what was measured of smaller ones. One
/// walk upwards computes each of them once. (A recursion downwards computed all-reduces anew for each half of
/// one: with 50 measured groups of four collectives a search took more than 27 s of CPU time, this
/// takes 1.3.)
class Ladder {
 public:
  /// For groups inside a domain that has `max_ranks` of them, and one that may be larger.
  Ladder(const Hardware& hardware, Collective collective, int stride, int max_ranks, Bytes size)
      : hardware_(hardware), collective_(collective), stride_(stride), size_(size) {
    for (const MeasuredCollective& measured : hardware.measured) {
      if (measured.collective == collective && measured.ranks >= 2 && measured.ranks <= max_ranks)
        measured_.push_back(&measured);
    }
    if (!std::ranges::is_sorted(measured_, {}, &MeasuredCollective::ranks))
      std::ranges::sort(measured_, {}, &MeasuredCollective::ranks);
    if (is_half_of_all_reduce(collective))
      all_reduce_ = std::make_unique<Ladder>(hardware, Collective::all_reduce, stride, max_ranks, size);
  }

  /// Time of a group of `ranks`, which are no fewer than in the call before.
  CollectiveTime climb_to(int ranks) {
    for (; next_ < measured_.size() && measured_[next_]->ranks < ranks; ++next_)
      below_ = step(measured_[next_]->ranks, measured_[next_]).time;
    const bool is_measured = next_ < measured_.size() && measured_[next_]->ranks == ranks;
    return step(ranks, is_measured ? measured_[next_] : nullptr);
  }

 private:
  CollectiveTime step(int ranks, const MeasuredCollective* own) {
    const Spread spread = spread_of(hardware_, {ranks, stride_});
    CollectiveTime time = modelled(spread, collective_, size_);
    if (own != nullptr) {
      time = {measured_time(*own, spread, size_), CollectiveAlgorithm::measured};
      if (size_ <= own->points.back().size) return time;
    }
    const auto raise = [&](Time least) {
      if (least > time.time) time = {least, CollectiveAlgorithm::measured};
    };
    raise(below_);
    if (all_reduce_) raise(all_reduce_->climb_to(ranks).time / 2);
    return time;
  }

  const Hardware& hardware_;
  Collective collective_;
  int stride_;
  Bytes size_;
  std::vector<const MeasuredCollective*> measured_;  // by ranks
  std::size_t next_ = 0;                             // the first of at least as many ranks as the last call's
  Time below_{};                                     // of the one before that
  std::unique_ptr<Ladder> all_reduce_;               // for a collective that is half of one
};

}  // namespace

std::string_view to_string(CollectiveAlgorithm algorithm) {
  switch (algorithm) {
    case CollectiveAlgorithm::none:
      return "none";
    case CollectiveAlgorithm::one_shot:
      return "one_shot";
    case CollectiveAlgorithm::two_shot:
      return "two_shot";
    case CollectiveAlgorithm::ring:
      return "ring";
    case CollectiveAlgorithm::tree:
      return "tree";
    case CollectiveAlgorithm::hierarchical:
      return "hierarchical";
    case CollectiveAlgorithm::measured:
      return "measured";
  }
  return "unknown";
}

CollectiveTime collective_time(const Hardware& hardware, Collective collective, CommGroup group, Bytes size) {
  HELIX_EXPECTS(
      group.ranks >= 1 && group.ranks <= kMaxRanks && group.stride >= 1 && group.stride <= kMaxRanks,
      ErrorCode::invalid_argument, "collective_time: the group has ", group.ranks, " ranks, ", group.stride,
      " apart; both must be in [1, ", kMaxRanks, "]");
  HELIX_EXPECTS(size >= Bytes{}, ErrorCode::invalid_argument, "collective_time: the size is ", in_bytes(size),
                " bytes; it must be 0 or more");
  if (group.ranks == 1 || size == Bytes{}) return {};
  const Spread spread = spread_of(hardware, group);
  if (hardware.measured.empty()) return modelled(spread, collective, size);
  return Ladder(hardware, collective, group.stride, spread.in_domain, size).climb_to(group.ranks);
}

}  // namespace helix::plan
