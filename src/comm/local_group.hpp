// SPDX-License-Identifier: Apache-2.0
// The ranks of a group that are threads, of a LocalComm or a PeerComm, and where they meet.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/meeting.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

struct Group {
  std::shared_ptr<Root> root;
  std::vector<int> root_ranks;
  std::shared_ptr<Meeting> collectives;
  std::shared_ptr<Meeting> splits;  // met on hosts
  /// By (sender, receiver); guarded by root->mutex.
  std::map<std::pair<int, int>, std::shared_ptr<Meeting>> channels;

  /// The caller holds root->mutex, unless no other thread knows the root yet.
  Group(std::shared_ptr<Root> shared_root, std::vector<int> ranks)
      : root(std::move(shared_root)),
        root_ranks(std::move(ranks)),
        collectives(root->open_meeting(root_ranks)),
        splits(root->open_meeting(root_ranks)) {}

  /// All ranks of a new root.
  static std::shared_ptr<Group> whole(std::shared_ptr<Root> root, int size) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
    return std::make_shared<Group>(std::move(root), std::move(ranks));
  }

  int size() const { return static_cast<int>(root_ranks.size()); }

  void check_alive() const {
    if (!root->has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(root->mutex);
    root->throw_if_failed();
  }

  /// See Root::meet.
  template <class Plan>
  void collective(int rank, Call& call, Plan&& plan) {
    root->meet(*collectives, static_cast<std::size_t>(rank), call, plan);
  }

  /// `place` is 0 for the sender and 1 for the receiver.
  template <class Plan>
  void transfer(int sender, int receiver, std::size_t place, Call& call, Plan&& plan) {
    std::shared_ptr<Meeting> channel;
    {
      const std::lock_guard lock(root->mutex);
      std::shared_ptr<Meeting>& known = channels[{sender, receiver}];
      if (!known) {
        known = root->open_meeting(
            {root_ranks[static_cast<std::size_t>(sender)], root_ranks[static_cast<std::size_t>(receiver)]});
      }
      channel = known;
    }
    root->meet(*channel, place, call, plan);
  }

  /// The part that `rank` belongs to, and its rank there.
  std::pair<std::shared_ptr<Group>, int> split(int rank, int color, int key) {
    struct SplitCall : Call {
      std::shared_ptr<Group> group;
      int rank = 0;
    };
    SplitCall own;
    own.operation = Operation::split;
    own.color = color;
    own.key = key;
    root->meet(*splits, static_cast<std::size_t>(rank), own, [&](const std::vector<Call*>& calls) {
      std::map<int, std::vector<std::size_t>> members;  // by color, in order of old rank
      for (std::size_t old = 0; old < calls.size(); ++old) members[calls[old]->color].push_back(old);
      for (auto& [unused, ranks] : members) {
        std::stable_sort(ranks.begin(), ranks.end(),
                         [&](std::size_t a, std::size_t b) { return calls[a]->key < calls[b]->key; });
        std::vector<int> part_ranks;
        for (const std::size_t old : ranks) part_ranks.push_back(root_ranks[old]);
        const auto part = std::make_shared<Group>(root, std::move(part_ranks));
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          auto& call = static_cast<SplitCall&>(*calls[ranks[i]]);
          call.group = part;
          call.rank = static_cast<int>(i);
        }
      }
      return Move();
    });
    return {std::move(own.group), own.rank};
  }

  void abort(int rank, std::string_view reason) noexcept {
    try {
      const std::lock_guard lock(root->mutex);
      root->fail(root_ranks[static_cast<std::size_t>(rank)], reason);
    } catch (...) {
      // The mutex failed: the timeout of the other ranks still ends their wait.
    }
  }
};

/// The handles make(group, rank) of a new root's `size` ranks, in rank order.
/// @throws Error(invalid_argument) unless the timeout is positive.
template <class Make>
auto make_handles(std::shared_ptr<Root> root, int size, milliseconds timeout, Make&& make) {
  expect_timeout(timeout);
  root->timeout = timeout;
  const std::shared_ptr<Group> group = Group::whole(std::move(root), size);
  std::vector<decltype(make(group, 0))> handles;
  for (int rank = 0; rank < size; ++rank) handles.push_back(make(group, rank));
  return handles;
}

}  // namespace helix::comm
