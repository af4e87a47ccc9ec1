// SPDX-License-Identifier: Apache-2.0
// LocalComm: ranks meet under one mutex, and the last to arrive moves the data for all.
#include <memory>
#include <utility>
#include <vector>

#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "comm/collective_arguments.hpp"
#include "comm/local_group.hpp"

namespace helix::cpu {

using comm::Call;
using comm::copy_bytes;
using comm::Group;
using comm::Move;
using comm::Operation;

namespace {

constexpr auto kMoveAll = [](const std::vector<Call*>& calls) { return Move(calls); };

/// Queues `call`. A group of one rank only copies `alone_bytes` bytes.
void enqueue(const std::shared_ptr<Group>& group, int rank, const Call& call, Stream& stream,
             std::int64_t alone_bytes) {
  if (group->size() == 1) {
    stream.enqueue([group, call, alone_bytes] {
      group->check_alive();
      copy_bytes(call.out, call.in, alone_bytes);
    });
  } else {
    stream.enqueue([group, rank, call = call]() mutable { group->collective(rank, call, kMoveAll); });
  }
}

}  // namespace

LocalComm::LocalComm(std::shared_ptr<comm::Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

std::vector<LocalComm> LocalComm::create_group(int size, std::chrono::milliseconds timeout) {
  HELIX_EXPECTS(size >= 1 && size <= kMaxRanks, ErrorCode::invalid_argument, "group size is ", size,
                "; it must be in [1, ", kMaxRanks, "]");
  return comm::make_handles(std::make_shared<comm::Root>(), size, timeout,
                            [](const auto& group, int rank) { return LocalComm(group, rank); });
}

int LocalComm::rank() const {
  return rank_;
}
int LocalComm::size() const {
  return group_->size();
}

void LocalComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("all_reduce", in, out, count, dtype);
  const Call call{.operation = Operation::all_reduce, .in = in, .out = out, .count = count, .dtype = dtype};
  enqueue(group_, rank_, call, stream, count * static_cast<std::int64_t>(helix::size_bytes(dtype)));
}

void LocalComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("reduce_scatter", in, out, count, dtype);
  const Call call{
      .operation = Operation::reduce_scatter, .in = in, .out = out, .count = count, .dtype = dtype};
  enqueue(group_, rank_, call, stream, count * static_cast<std::int64_t>(helix::size_bytes(dtype)));
}

void LocalComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_gather", in, out, bytes);
  const Call call{.operation = Operation::all_gather, .in = in, .out = out, .count = bytes};
  enqueue(group_, rank_, call, stream, bytes);
}

void LocalComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_to_all", in, out, bytes);
  const Call call{.operation = Operation::all_to_all, .in = in, .out = out, .count = bytes};
  enqueue(group_, rank_, call, stream, bytes);
}

void LocalComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                             std::span<const std::int64_t> recv_bytes, Stream stream) {
  comm::expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  comm::expect_own_bytes(send_bytes, recv_bytes, rank());
  stream.enqueue([group = group_, rank = rank_, in, out, counts = comm::PeerBytes(send_bytes, recv_bytes)] {
    Call call{.operation = Operation::all_to_all_v,
              .in = in,
              .out = out,
              .send_bytes = counts.send(),
              .recv_bytes = counts.recv()};
    group->collective(rank, call, kMoveAll);
  });
}

void LocalComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  comm::expect_buffer("broadcast", "buffer", buffer, bytes);
  comm::expect_root("broadcast", root, size());
  const Call call{.operation = Operation::broadcast, .out = buffer, .count = bytes, .root = root};
  enqueue(group_, rank_, call, stream, 0);
}

void LocalComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("send", "buffer", buffer, bytes);
  comm::expect_peer("send", peer, rank_, size());
  stream.enqueue([group = group_, rank = rank_, peer, buffer, bytes] {
    Call call{.operation = Operation::send, .in = buffer, .count = bytes};
    group->transfer(rank, peer, 0, call, kMoveAll);
  });
}

void LocalComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank_, size());
  stream.enqueue([group = group_, rank = rank_, peer, buffer, bytes] {
    Call call{.operation = Operation::recv, .out = buffer, .count = bytes};
    group->transfer(peer, rank, 1, call, kMoveAll);
  });
}

void LocalComm::barrier(Stream stream) {
  enqueue(group_, rank_, {.operation = Operation::barrier}, stream, 0);
}

LocalComm LocalComm::split(int color, int key) {
  auto [group, rank] = group_->split(rank_, color, key);
  return LocalComm(std::move(group), rank);
}

void LocalComm::abort(std::string_view reason) noexcept {
  group_->abort(rank_, reason);
}

}  // namespace helix::cpu
