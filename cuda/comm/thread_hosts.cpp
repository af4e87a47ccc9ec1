// SPDX-License-Identifier: Apache-2.0
// Threads meet as in LocalComm, and one of them maps the memory of all.
#include "cuda/comm/thread_hosts.hpp"

#include <exception>

#include <cuda_runtime_api.h>

#include <helix/error.hpp>

#include "cuda/runtime/device_gate.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

std::vector<int> devices_of(const std::vector<int>& devices, const std::vector<int>& root_ranks) {
  std::vector<int> own;
  for (const int rank : root_ranks) own.push_back(devices[static_cast<std::size_t>(rank)]);
  return own;
}

/// The plan of a meeting that moves no data.
comm::Move moves_nothing(const std::vector<comm::Call*>& /*calls*/) {
  return comm::Move();
}

struct WindowCall : comm::Call {
  PeerRanges::Taken taken;
  std::exception_ptr refusal;
};

}  // namespace

std::shared_ptr<const PeerRange> ThreadHosts::allocate(std::size_t bytes, std::size_t multiple) {
  WindowCall own;
  own.operation = comm::Operation::allocate_window;
  own.count = static_cast<std::int64_t>(bytes);
  own.multiple = multiple;
  meet(own, -1);
  // Do this without the root's lock: mapping waits for kernels of other groups, whose hosts have yet to meet.
  if (rank_ == 0) {
    try {
      own.taken = ranges_->take(devices_of(devices_, group_->root_ranks), bytes, multiple);
    } catch (...) {  // ends this call on all ranks, but not the group
      own.refusal = std::current_exception();
    }
  }
  group_->collective(rank_, own, [](const std::vector<comm::Call*>& calls) {
    const auto& first = static_cast<const WindowCall&>(*calls.front());
    for (comm::Call* const call : calls) {
      auto& of_rank = static_cast<WindowCall&>(*call);
      of_rank.taken = first.taken;
      of_rank.refusal = first.refusal;
    }
    return comm::Move();
  });
  if (own.refusal) std::rethrow_exception(own.refusal);
  if (!own.taken.is_zeroed) zero_own(*own.taken.range);
  return own.taken.range;
}

void ThreadHosts::zero_own(const PeerRange& range) {
  const auto wait_for_all = [&] {
    comm::Call call;
    call.operation = comm::Operation::barrier;
    meet(call, -1);
  };
  const int device = devices_[static_cast<std::size_t>(group_->root_ranks[static_cast<std::size_t>(rank_)])];
  {
    const DeviceScope scope(device);
    HELIX_CUDA_CHECK(cudaDeviceSynchronize());
  }
  wait_for_all();
  range.zero(rank_, device);
  wait_for_all();
}

void ThreadHosts::meet(comm::Call& call, int peer) {
  if (peer < 0) {
    group_->collective(rank_, call, moves_nothing);
  } else if (call.operation == comm::Operation::send) {
    group_->transfer(rank_, peer, 0, call, moves_nothing);
  } else {
    group_->transfer(peer, rank_, 1, call, moves_nothing);
  }
}

void ThreadHosts::queue_together(comm::Call& call, int peer, const std::function<void()>& queue) {
  DeviceGate::let_waits_begin();
  meet(call, peer);
  const DeviceGate::Queueing section;
  std::exception_ptr failure;
  try {
    queue();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    call.failure = error.what();
  } catch (...) {
    failure = std::current_exception();
    call.failure = "what it queues throws no std::exception";
  }
  try {
    meet(call, peer);
  } catch (const std::exception& error) {
    group_->abort(rank_, error.what());  // a no-op if the group has failed already
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  if (failure) std::rethrow_exception(failure);
}

PeerHosts::Part ThreadHosts::split(int color, int key, NcclComm* /*nccl*/) {
  auto [group, rank] = group_->split(rank_, color, key);
  return {std::make_shared<ThreadHosts>(islands_, ranges_, group, rank, devices_, meets_), rank,
          group->root_ranks};
}

}  // namespace helix::cuda
