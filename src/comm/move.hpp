// SPDX-License-Identifier: Apache-2.0
// The data movement of one meeting of ranks on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/integers.hpp>

#include "comm/bytes.hpp"
#include "comm/call.hpp"
#include "comm/reduce.hpp"

namespace helix::comm {

/// Elements in a unit of a reduction: 32 KB an input.
inline constexpr std::int64_t kPieceElements = 8192;
/// Bytes in a unit of a copy.
inline constexpr std::int64_t kPieceBytes = 64 * 1024;
/// From this many bytes on, waking the other ranks to help pays off.
inline constexpr std::int64_t kSharedMoveBytes = 512 * 1024;

/// The data movement of one meeting, cut into units that any rank may do in any order. A unit of all_reduce
/// reads everything that it overwrites before it writes, so `in == out` needs no scratch there.
class Move {
 public:
  Move() = default;
  explicit Move(const std::vector<Call*>& calls) : calls_(calls.data()), size_(std::ssize(calls)) {
    const Call& call = *calls.front();
    switch (call.operation) {
      case Operation::all_reduce:
        plan(1, call.count, kPieceElements);
        break;
      case Operation::reduce_scatter:
        plan(size_, call.count, kPieceElements);
        break;
      case Operation::all_gather:
        plan(size_, call.count, kPieceBytes);
        break;
      case Operation::all_to_all:
        plan(size_ * size_, call.count, kPieceBytes);
        break;
      case Operation::all_to_all_v:
        units_ = size_ * size_;
        break;
      case Operation::broadcast:
      case Operation::send:
      case Operation::recv:
        plan(1, call.count, kPieceBytes);
        break;
      case Operation::barrier:
      case Operation::split:
      case Operation::allocate_window:
      case Operation::kernel:
        break;
    }
  }

  std::int64_t units() const { return units_; }

  /// Bytes written, over all ranks.
  std::int64_t total_bytes() const {
    const Call& call = *calls_[0];
    switch (call.operation) {
      case Operation::all_reduce:
      case Operation::reduce_scatter:
        return size_ * call.count * static_cast<std::int64_t>(helix::size_bytes(call.dtype));
      case Operation::all_gather:
      case Operation::all_to_all:
        return size_ * size_ * call.count;
      case Operation::all_to_all_v: {
        std::int64_t total = 0;
        for (std::int64_t r = 0; r < size_; ++r) {
          for (std::int64_t peer = 0; peer < size_; ++peer) total += calls_[r]->send_bytes[peer];
        }
        return total;
      }
      case Operation::broadcast:
        return (size_ - 1) * call.count;
      default:
        return call.count;
    }
  }

  void run(std::int64_t unit) const {
    const std::int64_t lane = units_a_lane_ == 0 ? unit : unit / units_a_lane_;
    const Call& call = *calls_[0];
    const std::int64_t begin = units_a_lane_ == 0 ? 0 : (unit % units_a_lane_) * piece_;
    const std::int64_t count = std::min(piece_, call.count - begin);
    switch (call.operation) {
      case Operation::all_reduce:
        reduce(begin, begin, count, 0, size_);
        break;
      case Operation::reduce_scatter:
        reduce(lane * call.count + begin, begin, count, lane, lane + 1);
        break;
      case Operation::all_gather:
        for (std::int64_t r = 0; r < size_; ++r) {
          copy_bytes(at(calls_[r]->out, lane * call.count + begin), at(calls_[lane]->in, begin), count);
        }
        break;
      case Operation::all_to_all: {
        const std::int64_t from = lane / size_;
        const std::int64_t to = lane % size_;
        copy_bytes(at(calls_[to]->out, from * call.count + begin),
                   at(calls_[from]->in, to * call.count + begin), count);
        break;
      }
      case Operation::all_to_all_v: {
        const std::int64_t from = lane / size_;
        const std::int64_t to = lane % size_;
        std::int64_t source = 0;
        std::int64_t target = 0;
        for (std::int64_t r = 0; r < to; ++r) source += calls_[from]->send_bytes[r];
        for (std::int64_t r = 0; r < from; ++r) target += calls_[to]->recv_bytes[r];
        copy_bytes(at(calls_[to]->out, target), at(calls_[from]->in, source), calls_[from]->send_bytes[to]);
        break;
      }
      case Operation::broadcast:
        for (std::int64_t r = 0; r < size_; ++r) {
          copy_bytes(at(calls_[r]->out, begin), at(calls_[call.root]->out, begin), count);
        }
        break;
      case Operation::send:
      case Operation::recv:
        copy_bytes(at(calls_[1]->out, begin), at(calls_[0]->in, begin), count);
        break;
      case Operation::barrier:
      case Operation::split:
      case Operation::allocate_window:
      case Operation::kernel:
        break;
    }
  }

 private:
  void plan(std::int64_t lanes, std::int64_t count, std::int64_t piece) {
    piece_ = piece;
    units_a_lane_ = ceil_div(count, piece);
    units_ = lanes * units_a_lane_;
  }

  /// Elements [in_begin, +count) of every input, summed into [out_begin, +count) of the ranks [first, last).
  void reduce(std::int64_t in_begin, std::int64_t out_begin, std::int64_t count, std::int64_t first,
              std::int64_t last) const {
    const DType dtype = calls_[0]->dtype;
    const auto width = static_cast<std::int64_t>(helix::size_bytes(dtype));
    std::array<float, kReduceBlock> sum;
    for (std::int64_t done = 0; done < count; done += kReduceBlock) {
      const std::int64_t block = std::min<std::int64_t>(kReduceBlock, count - done);
      for (std::int64_t r = 0; r < size_; ++r) {
        add_to_sum(sum.data(), at(calls_[r]->in, (in_begin + done) * width), block, dtype, r == 0);
      }
      for (std::int64_t r = first; r < last; ++r) {
        store_sum(at(calls_[r]->out, (out_begin + done) * width), sum.data(), block, dtype);
      }
    }
  }

  Call* const* calls_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t piece_ = 0;
  std::int64_t units_a_lane_ = 0;
  std::int64_t units_ = 0;
};

}  // namespace helix::comm
