// SPDX-License-Identifier: Apache-2.0
// Threads meet as those of LocalComm do, and the last one maps the memory of all. Processes of an island tell
// each other over local sockets, and each maps the others' memory by its descriptors.
#include "cuda/comm/peer_hosts.hpp"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "comm/all_of.hpp"
#include "cuda/comm/nccl_all_of.hpp"
#include "cuda/comm/peer_groups.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {

std::size_t peer_stride(int device, std::size_t bytes, std::size_t multiple) {
  return round_up(bytes, std::lcm(PeerMemory::granularity(device), multiple));
}

namespace {

std::vector<int> devices_of(const std::vector<int>& devices, const std::vector<int>& root_ranks) {
  std::vector<int> own;
  for (const int rank : root_ranks) own.push_back(devices[static_cast<std::size_t>(rank)]);
  return own;
}

/// Of calls for which hosts only meet.
comm::Move moves_nothing(const std::vector<comm::Call*>& /*calls*/) {
  return comm::Move();
}

struct WindowCall : comm::Call {
  PeerRanges::Taken taken;
  std::exception_ptr failure;
};

/// What the host of a rank calls: what processes tell each other first, so that calls which differ are seen.
struct HostCall {
  std::uint32_t is_split = 0;
  std::int32_t color = 0;
  std::int32_t key = 0;
  std::uint32_t unused = 0;
  std::uint64_t bytes = 0;     // of a window
  std::uint64_t multiple = 0;  // of its stride
  std::uint64_t stride = 0;    // by this rank's device

  std::string describe() const {
    if (is_split != 0) return "split";
    return "allocate_window of " + std::to_string(bytes) + " bytes in multiples of " +
           std::to_string(multiple);
  }
};

/// What ranks tell each other of a failure: 0, there is none, or 1 + its code.
std::uint32_t verdict_of(const std::optional<Error>& failure) {
  return failure ? 1 + static_cast<std::uint32_t>(failure->code()) : 0;
}

void expect_equal(const std::vector<HostCall>& calls, const std::vector<int>& root_ranks) {
  const HostCall& first = calls.front();
  for (std::size_t i = 1; i < calls.size(); ++i) {
    HELIX_EXPECTS(calls[i].is_split == first.is_split && calls[i].bytes == first.bytes &&
                      calls[i].multiple == first.multiple,
                  ErrorCode::invalid_argument, "ranks disagree: rank ", root_ranks[0], " calls ",
                  first.describe(), ", rank ", root_ranks[i], " calls ", calls[i].describe(),
                  "; all must make the same calls in the same order with the same sizes");
  }
}

}  // namespace

std::shared_ptr<const PeerRange> ThreadHosts::allocate(std::size_t bytes, std::size_t multiple) {
  WindowCall own;
  own.operation = comm::Operation::allocate_window;
  own.count = static_cast<std::int64_t>(bytes);
  own.root = static_cast<int>(multiple);
  group_->collective(rank_, own, [&](const std::vector<comm::Call*>& calls) {
    PeerRanges::Taken taken;
    std::exception_ptr failure;
    try {
      taken = ranges_->take(devices_of(devices_, group_->root_ranks), bytes, multiple);
    } catch (const Error&) {  // which ends this call on all ranks, and not the group
      failure = std::current_exception();
    }
    for (comm::Call* const call : calls) {
      auto& of_rank = static_cast<WindowCall&>(*call);
      of_rank.taken = taken;
      of_rank.failure = failure;
    }
    return comm::Move();
  });
  if (own.failure) std::rethrow_exception(own.failure);
  if (!own.taken.is_zeroed) zero_own(*own.taken.range);
  return own.taken.range;
}

void ThreadHosts::zero_own(const PeerRange& range) {
  const auto wait_for_all = [&] {
    comm::Call call;
    call.operation = comm::Operation::barrier;
    group_->collective(rank_, call, moves_nothing);
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
  if (!meets_) return;
  if (peer < 0) {
    group_->collective(rank_, call, moves_nothing);
  } else if (call.operation == comm::Operation::send) {
    group_->transfer(rank_, peer, 0, call, moves_nothing);
  } else {
    group_->transfer(peer, rank_, 1, call, moves_nothing);
  }
}

PeerHosts::Part ThreadHosts::split(int color, int key, NcclComm* /*nccl*/) {
  auto [group, rank] = group_->split(rank_, color, key);
  return {std::make_shared<ThreadHosts>(islands_, ranges_, group, rank, devices_, meets_), rank,
          group->root_ranks};
}

template <class T>
std::vector<T> ProcessHosts::all_of(const T& own, NcclComm* nccl) const {
  if (comm::is_in_one_island(process_->links->neighbourhoods(), group_.root_ranks()))
    return group_.all_of(own);
  comm::Bootstrap bootstrap = process_->bootstrap;
  if (group_.size() == static_cast<std::size_t>(bootstrap.size())) {
    const std::vector<T> by_root_rank = comm::all_of(bootstrap, own);
    std::vector<T> all;
    for (const int rank : group_.root_ranks()) all.push_back(by_root_rank[static_cast<std::size_t>(rank)]);
    return all;
  }
  HELIX_EXPECTS(nccl != nullptr, ErrorCode::unsupported, "PeerComm: ", why_apart(),
                ", and NCCL is not to be used, or has no GPU for each rank: such a part of a job cannot be "
                "split again");
  return cuda::all_of(*nccl, process_->device, own);
}

std::shared_ptr<const PeerRange> ProcessHosts::allocate(std::size_t bytes, std::size_t multiple) {
  const int device = process_->device;
  const DeviceScope scope(device);
  const std::vector<HostCall> calls = group_.all_of(
      HostCall{.bytes = bytes, .multiple = multiple, .stride = peer_stride(device, bytes, multiple)});
  expect_equal(calls, group_.root_ranks());
  std::size_t stride = 0;
  for (const HostCall& call : calls) stride = std::max(stride, static_cast<std::size_t>(call.stride));
  std::shared_ptr<PeerRange> range;
  std::optional<Error> failure;
  std::optional<PeerMemory> own;
  comm::Socket exported;
  try {
    own = PeerMemory::create(device, stride, true);
    exported = comm::Socket(own->export_descriptor());
  } catch (const Error& error) {
    failure = error;  // and no descriptor, or the others would wait for one
  }
  const std::vector<comm::Socket> descriptors = group_.exchange(exported);
  const auto is_own = [&](std::size_t i) { return static_cast<int>(i) == group_.rank(); };
  bool are_all_there = !failure;
  for (std::size_t i = 0; i < descriptors.size(); ++i)
    are_all_there = are_all_there && (is_own(i) || descriptors[i].is_open());
  try {
    if (are_all_there) {
      std::vector<PeerMemory> memories;
      for (std::size_t i = 0; i < descriptors.size(); ++i)
        memories.push_back(is_own(i) ? std::move(*own) : PeerMemory::import(descriptors[i].fd()));
      range = std::make_shared<PeerRange>(std::move(memories), stride, std::vector<int>{device});
      range->zero(group_.rank(), device);
    }
  } catch (const Error& error) {
    failure = error;
  }
  // Nobody writes before all have zeroed. The first rank's failure is everybody's.
  const std::vector<std::uint32_t> verdicts = group_.all_of(verdict_of(failure));
  for (std::size_t i = 0; i < verdicts.size(); ++i) {
    if (verdicts[i] == 0) continue;
    if (is_own(i)) throw Error(*failure);
    const auto code = static_cast<ErrorCode>(verdicts[i] - 1);
    throw Error(code, "rank ", group_.root_ranks()[i], " could not take its part of a window of ", stride,
                " bytes a rank, or map those of its peers (", to_string(code), "); that rank says why");
  }
  return range;
}

PeerHosts::Part ProcessHosts::split(int color, int key, NcclComm* nccl) {
  const std::vector<HostCall> places = all_of(HostCall{.is_split = 1, .color = color, .key = key}, nccl);
  expect_equal(places, group_.root_ranks());
  std::vector<std::size_t> members;
  for (std::size_t i = 0; i < places.size(); ++i)
    if (places[i].color == color) members.push_back(i);
  std::stable_sort(members.begin(), members.end(),
                   [&](std::size_t a, std::size_t b) { return places[a].key < places[b].key; });
  std::vector<int> root_ranks;
  int rank = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (static_cast<int>(members[i]) == group_.rank()) rank = static_cast<int>(i);
    root_ranks.push_back(group_.root_ranks()[members[i]]);
  }
  return {std::make_shared<ProcessHosts>(process_, root_ranks, rank), rank, root_ranks};
}

}  // namespace helix::cuda
