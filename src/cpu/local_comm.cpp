// SPDX-License-Identifier: Apache-2.0
// LocalComm: ranks meet under one mutex, and the last to arrive moves the data for all.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>

#include "cpu/collective_arguments.hpp"
#include "cpu/meeting.hpp"

namespace helix::cpu {

using local::Call;
using local::copy_bytes;
using local::Meeting;
using local::Operation;
using local::Root;

namespace {

constexpr auto kNothingToPrepare = [](const std::vector<Call*>&) {};

}  // namespace

struct LocalComm::Group {
  std::shared_ptr<Root> root;
  std::vector<int> root_ranks;
  std::shared_ptr<Meeting> collectives;  // met on streams
  std::shared_ptr<Meeting> splits;       // met on hosts
  std::map<std::pair<int, int>, std::shared_ptr<Meeting>>
      channels;  // by (sender, receiver); guarded by root->mutex

  /// root->mutex held, or nobody else knows the root yet.
  Group(std::shared_ptr<Root> shared_root, std::vector<int> ranks)
      : root(std::move(shared_root)),
        root_ranks(std::move(ranks)),
        collectives(root->open_meeting(root_ranks)),
        splits(root->open_meeting(root_ranks)) {}

  int size() const { return static_cast<int>(root_ranks.size()); }

  void check_alive() const {
    if (!root->has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(root->mutex);
    root->throw_if_failed();
  }

  void collective(int rank, Call& call) {
    root->meet(*collectives, static_cast<std::size_t>(rank), call, kNothingToPrepare);
  }

  void transfer(int sender, int receiver, std::size_t place, Call& call) {
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
    root->meet(*channel, place, call, kNothingToPrepare);
  }

  /// Queues `call`; a group of one needs only `alone`, the copy that the operation comes down to.
  static void enqueue(const std::shared_ptr<Group>& group, int rank, const Call& call, Stream& stream,
                      std::int64_t alone_bytes) {
    if (group->size() == 1) {
      stream.enqueue([group, call, alone_bytes] {
        group->check_alive();
        copy_bytes(call.out, call.in, alone_bytes);
      });
    } else {
      stream.enqueue([group, rank, call = call]() mutable { group->collective(rank, call); });
    }
  }
};

LocalComm::LocalComm(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

std::vector<LocalComm> LocalComm::create_group(int size, std::chrono::milliseconds timeout) {
  HELIX_EXPECTS(size >= 1, ErrorCode::invalid_argument, "group size is ", size, "; at least 1 is needed");
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
  auto root = std::make_shared<Root>();
  root->timeout = timeout;
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  const auto group = std::make_shared<Group>(std::move(root), std::move(ranks));
  std::vector<LocalComm> handles;
  for (int rank = 0; rank < size; ++rank) handles.push_back(LocalComm(group, rank));
  return handles;
}

int LocalComm::rank() const {
  return rank_;
}
int LocalComm::size() const {
  return group_->size();
}

void LocalComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  expect_reduction("all_reduce", in, out, count, dtype);
  const Call call{.operation = Operation::all_reduce, .in = in, .out = out, .count = count, .dtype = dtype};
  Group::enqueue(group_, rank_, call, stream, count * static_cast<std::int64_t>(helix::size_bytes(dtype)));
}

void LocalComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  expect_reduction("reduce_scatter", in, out, count, dtype);
  const Call call{
      .operation = Operation::reduce_scatter, .in = in, .out = out, .count = count, .dtype = dtype};
  Group::enqueue(group_, rank_, call, stream, count * static_cast<std::int64_t>(helix::size_bytes(dtype)));
}

void LocalComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  expect_buffers("all_gather", in, out, bytes);
  const Call call{.operation = Operation::all_gather, .in = in, .out = out, .count = bytes};
  Group::enqueue(group_, rank_, call, stream, bytes);
}

void LocalComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  expect_buffers("all_to_all", in, out, bytes);
  const Call call{.operation = Operation::all_to_all, .in = in, .out = out, .count = bytes};
  Group::enqueue(group_, rank_, call, stream, bytes);
}

void LocalComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                             std::span<const std::int64_t> recv_bytes, Stream stream) {
  expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  stream.enqueue([group = group_, rank = rank_, in, out, counts = PeerBytes(send_bytes, recv_bytes)] {
    Call call{.operation = Operation::all_to_all_v,
              .in = in,
              .out = out,
              .send_bytes = counts.send(),
              .recv_bytes = counts.recv()};
    group->collective(rank, call);  // also alone: its two counts are checked like any other
  });
}

void LocalComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  expect_buffer("broadcast", "buffer", buffer, bytes);
  expect_root("broadcast", root, size());
  const Call call{.operation = Operation::broadcast, .out = buffer, .count = bytes, .root = root};
  Group::enqueue(group_, rank_, call, stream, 0);
}

void LocalComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  expect_buffer("send", "buffer", buffer, bytes);
  expect_peer("send", peer, rank_, size());
  stream.enqueue([group = group_, rank = rank_, peer, buffer, bytes] {
    Call call{.operation = Operation::send, .in = buffer, .count = bytes};
    group->transfer(rank, peer, 0, call);
  });
}

void LocalComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  expect_buffer("recv", "buffer", buffer, bytes);
  expect_peer("recv", peer, rank_, size());
  stream.enqueue([group = group_, rank = rank_, peer, buffer, bytes] {
    Call call{.operation = Operation::recv, .out = buffer, .count = bytes};
    group->transfer(peer, rank, 1, call);
  });
}

void LocalComm::barrier(Stream stream) {
  Group::enqueue(group_, rank_, {.operation = Operation::barrier}, stream, 0);
}

LocalComm LocalComm::split(int color, int key) {
  struct SplitCall : Call {
    std::shared_ptr<Group> group;
    int rank = 0;
  };
  SplitCall own;
  own.operation = Operation::split;
  own.color = color;
  own.key = key;
  group_->root->meet(
      *group_->splits, static_cast<std::size_t>(rank_), own, [&](const std::vector<Call*>& calls) {
        std::map<int, std::vector<std::size_t>> members;  // by color, in order of old rank
        for (std::size_t rank = 0; rank < calls.size(); ++rank) members[calls[rank]->color].push_back(rank);
        for (auto& [unused, ranks] : members) {
          std::stable_sort(ranks.begin(), ranks.end(),
                           [&](std::size_t a, std::size_t b) { return calls[a]->key < calls[b]->key; });
          std::vector<int> root_ranks;
          for (const std::size_t rank : ranks) root_ranks.push_back(group_->root_ranks[rank]);
          const auto group = std::make_shared<Group>(group_->root, std::move(root_ranks));
          for (std::size_t i = 0; i < ranks.size(); ++i) {
            auto& call = static_cast<SplitCall&>(*calls[ranks[i]]);
            call.group = group;
            call.rank = static_cast<int>(i);
          }
        }
      });
  return LocalComm(std::move(own.group), own.rank);
}

void LocalComm::abort(std::string_view reason) noexcept {
  try {
    const std::lock_guard lock(group_->root->mutex);
    group_->root->fail(group_->root_ranks[static_cast<std::size_t>(rank_)], reason);
  } catch (...) {
    // Out of memory for the message: the timeout of the other ranks still ends their wait.
  }
}

}  // namespace helix::cpu
