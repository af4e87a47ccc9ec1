// SPDX-License-Identifier: Apache-2.0
// Ordering: operations without a host wait, barriers, and two groups on two streams.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <helix/contract/communicator/guarded_bytes.hpp>
#include <helix/dtype.hpp>

namespace helix::contract {

/// Hundreds of operations without a host wait, on buffers that are reused at once, so that a missing final
/// rendezvous shows.
template <class Comm>
void back_to_back_contract(Comm& comm, int rounds = 300) {
  typename Comm::Stream stream;
  const int size = comm.size();
  constexpr std::int64_t kCount = 33;
  std::vector<float> values(kCount);
  std::vector<std::uint8_t> in(static_cast<std::size_t>(size) * 8);
  std::vector<std::uint8_t> out(in.size());
  int wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    stream.enqueue([&, round] {
      for (std::int64_t i = 0; i < kCount; ++i) {
        values[static_cast<std::size_t>(i)] = static_cast<float>(comm.rank() + round + i);
      }
      for (int to = 0; to < size; ++to) {
        for (int i = 0; i < 8; ++i)
          in[static_cast<std::size_t>(to * 8 + i)] = pattern(comm.rank(), to, i, round);
      }
    });
    comm.all_reduce(values.data(), values.data(), kCount, DType::f32, stream);
    comm.all_to_all(in.data(), out.data(), 8, stream);
    if (round % 7 == 0) comm.barrier(stream);
    stream.enqueue([&, round] {
      for (std::int64_t i = 0; i < kCount; ++i) {
        const float expected = static_cast<float>(size * (size - 1) / 2 + size * (round + i));
        wrong += values[static_cast<std::size_t>(i)] != expected;
      }
      for (int from = 0; from < size; ++from) {
        for (int i = 0; i < 8; ++i) {
          wrong += out[static_cast<std::size_t>(from * 8 + i)] != pattern(from, comm.rank(), i, round);
        }
      }
    });
  }
  stream.synchronize();
  require(wrong == 0, wrong, " values were wrong in ", rounds, " rounds");
}

/// A barrier releases no rank before the last rank has arrived. All ranks are on one machine, so they share
/// its steady clock.
template <class Comm>
void barrier_contract(Comm& comm) {
  typename Comm::Stream stream;
  const auto now = [] {
    return static_cast<std::int64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  };
  for (int late = 0; late < comm.size(); ++late) {
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::int64_t entered = now();
    std::int64_t left = 0;
    std::vector<std::int64_t> entries(static_cast<std::size_t>(comm.size()));
    comm.barrier(stream);
    stream.enqueue([&] { left = now(); });
    comm.all_gather(&entered, entries.data(), sizeof(std::int64_t), stream);
    stream.synchronize();
    require(*std::max_element(entries.begin(), entries.end()) <= left, "rank ", comm.rank(),
            " left the barrier before rank ", late, " entered it");
  }
}

/// Two groups over the same ranks, each used on its own stream at the same time, like an exchange that
/// overlaps the rest of the layer.
template <class Comm>
void two_streams_contract(Comm& comm, int rounds = 200) {
  Comm other = comm.split(0, -comm.rank());  // in reverse order, so that mixing up the groups shows
  require(other.size() == comm.size(), "split kept ", other.size(), " of ", comm.size(), " ranks");
  require(other.rank() == comm.size() - 1 - comm.rank(), "split by descending key gave rank ", other.rank());
  typename Comm::Stream first;
  typename Comm::Stream second;
  std::vector<std::int64_t> gathered(static_cast<std::size_t>(comm.size()));
  std::vector<std::int64_t> reversed(static_cast<std::size_t>(comm.size()));
  std::int64_t mine = 0;
  std::int64_t other_mine = 0;
  int wrong = 0;
  int other_wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    first.enqueue([&, round] { mine = comm.rank() * 1000 + round; });
    comm.all_gather(&mine, gathered.data(), sizeof(std::int64_t), first);
    first.enqueue([&, round] {
      for (int r = 0; r < comm.size(); ++r)
        wrong += gathered[static_cast<std::size_t>(r)] != r * 1000 + round;
    });
    second.enqueue([&, round] { other_mine = -(other.rank() * 1000 + round); });
    other.all_gather(&other_mine, reversed.data(), sizeof(std::int64_t), second);
    second.enqueue([&, round] {
      for (int r = 0; r < other.size(); ++r)
        other_wrong += reversed[static_cast<std::size_t>(r)] != -(r * 1000 + round);
    });
  }
  first.synchronize();
  second.synchronize();
  require(wrong == 0 && other_wrong == 0, wrong, " and ", other_wrong, " values were wrong");
}

}  // namespace helix::contract
