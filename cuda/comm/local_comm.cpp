// SPDX-License-Identifier: Apache-2.0
// cuda::LocalComm: ranks meet as in cpu::LocalComm, and the last to arrive queues the work of all.
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/cuda/local_comm.hpp>
#include <helix/error.hpp>

#include "comm/collective_arguments.hpp"
#include "comm/local_group.hpp"
#include "cuda/comm/local_reduce.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {

using comm::Group;
using comm::Move;
using comm::Operation;

namespace {

struct Call : comm::Call {
  StreamHandle stream = nullptr;
  int device = -1;  // of the calling thread; a stream under capture cannot be asked for its device
};

/// Shared by all groups of a root to queue work; guarded by its mutex. One event serves every wait:
/// cudaStreamWaitEvent takes the event's state at the call, so it may be recorded again at once.
struct Root : comm::Root {
  int device = -1;  // of the streams; -1: not known yet
  Event event;
  std::vector<LocalCopy> copies;

  static Call& at(const std::vector<comm::Call*>& calls, std::size_t place) {
    return static_cast<Call&>(*calls[place]);
  }

  /// Queues the operation on the first rank's stream: after all that the ranks' streams already hold, and
  /// before all that they queue next.
  void queue(const std::vector<comm::Call*>& calls) {
    check_device(calls);
    const DeviceScope scope(device);
    const StreamHandle first = at(calls, 0).stream;
    bool is_one_stream = true;
    for (std::size_t i = 1; i < calls.size(); ++i) {
      const StreamHandle other = at(calls, i).stream;
      if (other == first) continue;
      is_one_stream = false;
      if (event.handle() == nullptr) event = Event::create();
      HELIX_CUDA_CHECK(cudaEventRecord(event.handle(), other));
      HELIX_CUDA_CHECK(cudaStreamWaitEvent(first, event.handle(), 0));
    }
    queue_work(calls, first);
    if (is_one_stream) return;
    HELIX_CUDA_CHECK(cudaEventRecord(event.handle(), first));
    for (std::size_t i = 1; i < calls.size(); ++i) {
      const StreamHandle other = at(calls, i).stream;
      if (other != first) HELIX_CUDA_CHECK(cudaStreamWaitEvent(other, event.handle(), 0));
    }
  }

 private:
  /// Asks only once: all streams of one rank belong to its device.
  void check_device(const std::vector<comm::Call*>& calls) {
    if (device >= 0) return;
    std::vector<int> devices(calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) {
      devices[i] = at(calls, i).device;
      HELIX_EXPECTS(devices[i] == devices[0], ErrorCode::invalid_argument,
                    "LocalComm: the ranks use the devices ", devices[0], " and ", devices[i],
                    "; its group shares one device, use NcclComm for several");
    }
    device = devices[0];
  }

  void add_copy(void* target, std::int64_t target_begin, const void* source, std::int64_t source_begin,
                std::int64_t bytes) {
    if (bytes == 0) return;
    std::byte* const to = comm::at(target, target_begin);
    const std::byte* const from = comm::at(source, source_begin);
    if (to != from) copies.push_back({to, from, bytes});  // a rank's own slice may already be in place
  }

  void queue_work(const std::vector<comm::Call*>& calls, StreamHandle stream) {
    const comm::Call& call = *calls.front();
    const auto size = std::ssize(calls);
    const std::int64_t count = call.count;
    const auto rank_call = [&](std::ptrdiff_t rank) -> const comm::Call& {
      return *calls[static_cast<std::size_t>(rank)];
    };
    copies.clear();
    switch (call.operation) {
      case Operation::all_reduce:
      case Operation::reduce_scatter: {
        if (size == 1) {
          add_copy(call.out, 0, call.in, 0, count * static_cast<std::int64_t>(size_bytes(call.dtype)));
          break;
        }
        LocalReduction reduction{.in = {},
                                 .out = {},
                                 .num_ranks = static_cast<int>(size),
                                 .count = count,
                                 .scatter = call.operation == Operation::reduce_scatter};
        for (std::size_t i = 0; i < calls.size(); ++i) {
          reduction.in[i] = calls[i]->in;
          reduction.out[i] = calls[i]->out;
        }
        local_reduce(reduction, call.dtype, stream);
        return;
      }
      case Operation::all_gather:
        for (std::ptrdiff_t from = 0; from < size; ++from) {
          for (std::ptrdiff_t to = 0; to < size; ++to) {
            add_copy(rank_call(to).out, from * count, rank_call(from).in, 0, count);
          }
        }
        break;
      case Operation::all_to_all:
        for (std::ptrdiff_t from = 0; from < size; ++from) {
          for (std::ptrdiff_t to = 0; to < size; ++to) {
            add_copy(rank_call(to).out, from * count, rank_call(from).in, to * count, count);
          }
        }
        break;
      case Operation::all_to_all_v:
        for (std::ptrdiff_t to = 0; to < size; ++to) {
          std::int64_t target = 0;
          for (std::ptrdiff_t from = 0; from < size; ++from) {
            std::int64_t source = 0;
            for (std::ptrdiff_t r = 0; r < to; ++r) source += rank_call(from).send_bytes[r];
            const std::int64_t bytes = rank_call(from).send_bytes[to];
            add_copy(rank_call(to).out, target, rank_call(from).in, source, bytes);
            target += bytes;
          }
        }
        break;
      case Operation::broadcast:
        for (std::ptrdiff_t to = 0; to < size; ++to) {
          add_copy(rank_call(to).out, 0, rank_call(call.root).out, 0, count);
        }
        break;
      case Operation::send:
      case Operation::recv:
        add_copy(rank_call(1).out, 0, call.in, 0, count);
        break;
      case Operation::barrier:
      case Operation::split:
      case Operation::allocate_window:
      case Operation::kernel:
        break;
    }
    if (!copies.empty()) local_copy(copies, stream);
  }
};

/// Plans a meeting: queues the work on the device and returns an empty Move.
auto queue_on(const std::shared_ptr<Group>& group) {
  return [root = static_cast<Root*>(group->root.get())](const std::vector<comm::Call*>& calls) {
    root->queue(calls);
    return Move();
  };
}

void collective(const std::shared_ptr<Group>& group, int rank, Call call) {
  group->collective(rank, call, queue_on(group));
}

Call make_call(Operation operation, const void* in, void* out, std::int64_t count, Stream stream) {
  Call call;
  call.operation = operation;
  call.in = in;
  call.out = out;
  call.count = count;
  call.stream = stream.handle();
  // Without a driver the call fails when it is queued, after the check whether the ranks' calls agree.
  if (cudaGetDevice(&call.device) != cudaSuccess) (void)cudaGetLastError();
  return call;
}

}  // namespace

std::vector<LocalComm> LocalComm::create_group(int size, std::chrono::milliseconds timeout) {
  HELIX_EXPECTS(size >= 1 && size <= kMaxLocalRanks, ErrorCode::invalid_argument, "group size is ", size,
                "; 1 to ", kMaxLocalRanks, " ranks may share a GPU");
  auto root = std::make_shared<Root>();
  root->copies.reserve(static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
  return comm::make_handles(std::move(root), size, timeout,
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
  Call call = make_call(Operation::all_reduce, in, out, count, stream);
  call.dtype = dtype;
  collective(group_, rank_, call);
}

void LocalComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("reduce_scatter", in, out, count, dtype);
  Call call = make_call(Operation::reduce_scatter, in, out, count, stream);
  call.dtype = dtype;
  collective(group_, rank_, call);
}

void LocalComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_gather", in, out, bytes);
  collective(group_, rank_, make_call(Operation::all_gather, in, out, bytes, stream));
}

void LocalComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_to_all", in, out, bytes);
  collective(group_, rank_, make_call(Operation::all_to_all, in, out, bytes, stream));
}

void LocalComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                             std::span<const std::int64_t> recv_bytes, Stream stream) {
  comm::expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  comm::expect_own_bytes(send_bytes, recv_bytes, rank_);
  Call call = make_call(Operation::all_to_all_v, in, out, 0, stream);
  call.send_bytes = send_bytes.data();
  call.recv_bytes = recv_bytes.data();
  collective(group_, rank_, call);
}

void LocalComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  comm::expect_buffer("broadcast", "buffer", buffer, bytes);
  comm::expect_root("broadcast", root, size());
  Call call = make_call(Operation::broadcast, nullptr, buffer, bytes, stream);
  call.root = root;
  collective(group_, rank_, call);
}

void LocalComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("send", "buffer", buffer, bytes);
  comm::expect_peer("send", peer, rank_, size());
  Call call = make_call(Operation::send, buffer, nullptr, bytes, stream);
  group_->transfer(rank_, peer, 0, call, queue_on(group_));
}

void LocalComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank_, size());
  Call call = make_call(Operation::recv, nullptr, buffer, bytes, stream);
  group_->transfer(peer, rank_, 1, call, queue_on(group_));
}

void LocalComm::barrier(Stream stream) {
  collective(group_, rank_, make_call(Operation::barrier, nullptr, nullptr, 0, stream));
}

LocalComm LocalComm::split(int color, int key) {
  auto [group, rank] = group_->split(rank_, color, key);
  return LocalComm(std::move(group), rank);
}

void LocalComm::abort(std::string_view reason) noexcept {
  group_->abort(rank_, reason);
}

}  // namespace helix::cuda
