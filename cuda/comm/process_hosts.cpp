// SPDX-License-Identifier: Apache-2.0
// Processes of an island exchange descriptors over local sockets, and each maps the memory of the others.
#include "cuda/comm/process_hosts.hpp"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <helix/error.hpp>

#include "comm/all_of.hpp"
#include "comm/host_call.hpp"
#include "cuda/comm/nccl_all_of.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

/// A failure as ranks tell each other: 0 for none, else 1 + its code.
std::uint32_t verdict_of(const std::optional<Error>& failure) {
  return failure ? 1 + static_cast<std::uint32_t>(failure->code()) : 0;
}

}  // namespace

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

comm::HostCall ProcessHosts::new_call() const {
  comm::HostCall call;
  call.group = number_;
  call.last_group = process_->turns->last_group;
  return call;
}

std::shared_ptr<const PeerRange> ProcessHosts::allocate(std::size_t bytes, std::size_t multiple) {
  const int device = process_->device;
  const DeviceScope scope(device);
  const std::lock_guard lock(process_->turns->mutex);
  comm::HostCall own_call = new_call();
  own_call.bytes = bytes;
  own_call.multiple = multiple;
  own_call.stride = PeerMemory::stride(device, bytes, multiple);
  const std::vector<comm::HostCall> calls = group_.all_of(own_call);
  comm::expect_equal(calls, group_.root_ranks());
  std::size_t stride = 0;
  for (const comm::HostCall& call : calls) stride = std::max(stride, static_cast<std::size_t>(call.stride));
  std::shared_ptr<PeerRange> range;
  std::optional<Error> failure;
  std::optional<PeerMemory> own;
  comm::Socket exported;
  try {
    own = PeerMemory::create(device, stride, true);
    exported = comm::Socket(own->export_descriptor());
  } catch (const Error& error) {
    failure = error;  // sends no descriptor, but still takes part in the exchange
  }
  std::string lost;
  const std::vector<comm::Socket> descriptors = group_.exchange(exported, lost);
  if (!failure && !lost.empty()) failure = Error(ErrorCode::io, lost);
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
  // No rank may write before all have zeroed. All ranks report the first rank's failure.
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
  const std::lock_guard lock(process_->turns->mutex);
  comm::HostCall own_call = new_call();
  own_call.is_split = 1;
  own_call.color = color;
  own_call.key = key;
  const std::vector<comm::HostCall> places = all_of(own_call, nccl);
  comm::expect_equal(places, group_.root_ranks());
  const std::uint64_t number = comm::next_group(places);
  process_->turns->last_group = number;
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
  return {std::make_shared<ProcessHosts>(process_, root_ranks, rank, number), rank, root_ranks};
}

}  // namespace helix::cuda
