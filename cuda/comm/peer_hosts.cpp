// SPDX-License-Identifier: Apache-2.0
// Threads meet as those of LocalComm do, and the last one maps the memory of all. Processes tell each other
// over local sockets, and each maps the others' memory by its descriptors.
#include "cuda/comm/peer_hosts.hpp"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "cuda/comm/peer_groups.hpp"
#include "cuda/runtime/operators_state.hpp"

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

struct WindowCall : comm::Call {
  std::shared_ptr<const PeerRange> range;
};

}  // namespace

std::shared_ptr<const PeerRange> ThreadHosts::map_all(const std::vector<int>& devices, std::size_t bytes,
                                                      std::size_t multiple) {
  std::size_t stride = 0;
  for (const int device : devices) stride = std::max(stride, peer_stride(device, bytes, multiple));
  std::vector<PeerMemory> memories;
  for (const int device : devices) {
    const DeviceScope scope(device);
    memories.push_back(PeerMemory::create(device, stride, false));
  }
  auto range = std::make_shared<PeerRange>(std::move(memories), stride, devices);
  for (std::size_t rank = 0; rank < devices.size(); ++rank)
    range->zero(static_cast<int>(rank), devices[rank]);
  return range;
}

std::shared_ptr<const PeerRange> ThreadHosts::allocate(std::size_t bytes, std::size_t multiple) {
  WindowCall own;
  own.operation = comm::Operation::allocate_window;
  own.count = static_cast<std::int64_t>(bytes);
  own.root = static_cast<int>(multiple);
  group_->collective(rank_, own, [&](const std::vector<comm::Call*>& calls) {
    const auto range = map_all(devices_of(devices_, group_->root_ranks), bytes, multiple);
    for (comm::Call* const call : calls) static_cast<WindowCall&>(*call).range = range;
    return comm::Move();
  });
  return own.range;
}

void ThreadHosts::meet(comm::Call& call, int peer) {
  if (!meets_) return;
  const auto nothing = [](const std::vector<comm::Call*>&) { return comm::Move(); };
  if (peer < 0) {
    group_->collective(rank_, call, nothing);
  } else if (call.operation == comm::Operation::send) {
    group_->transfer(rank_, peer, 0, call, nothing);
  } else {
    group_->transfer(peer, rank_, 1, call, nothing);
  }
}

PeerHosts::Part ThreadHosts::split(int color, int key) {
  auto [group, rank] = group_->split(rank_, color, key);
  return {std::make_shared<ThreadHosts>(group, rank, devices_, meets_), rank, group->root_ranks};
}

template <class T>
std::vector<T> ProcessHosts::all_of(const T& own) const {
  std::vector<T> all(root_ranks_.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    if (static_cast<int>(i) != rank_) links_->send(root_ranks_[i], std::as_bytes(std::span(&own, 1)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (static_cast<int>(i) == rank_) {
      all[i] = own;
    } else {
      (void)links_->recv(root_ranks_[i], std::as_writable_bytes(std::span(&all[i], 1)));
    }
  }
  return all;
}

std::vector<comm::Socket> ProcessHosts::exchange(const comm::Socket& own) const {
  const std::byte mark{1};
  for (const int peer : root_ranks_)
    if (peer != root_ranks_[static_cast<std::size_t>(rank_)])
      links_->send(peer, std::span(&mark, 1), own.fd());
  std::vector<comm::Socket> descriptors(root_ranks_.size());
  for (std::size_t i = 0; i < root_ranks_.size(); ++i) {
    std::byte received{};
    if (static_cast<int>(i) != rank_)
      descriptors[i] = comm::Socket(links_->recv(root_ranks_[i], std::span(&received, 1)));
  }
  return descriptors;
}

std::shared_ptr<const PeerRange> ProcessHosts::allocate(std::size_t bytes, std::size_t multiple) {
  const DeviceScope scope(device_);
  const auto strides = all_of<std::uint64_t>(peer_stride(device_, bytes, multiple));
  const auto stride = static_cast<std::size_t>(*std::max_element(strides.begin(), strides.end()));
  std::shared_ptr<const PeerRange> range;
  std::exception_ptr failure;
  std::optional<PeerMemory> own;
  comm::Socket exported;
  try {
    own = PeerMemory::create(device_, stride, true);
    exported = comm::Socket(own->export_descriptor());
  } catch (const Error&) {
    failure = std::current_exception();  // and no descriptor, or the others would wait for one
  }
  const std::vector<comm::Socket> descriptors = exchange(exported);
  try {
    std::vector<PeerMemory> memories;
    for (std::size_t i = 0; i < descriptors.size() && !failure; ++i) {
      const bool is_own = static_cast<int>(i) == rank_;
      HELIX_EXPECTS(is_own || descriptors[i].is_open(), ErrorCode::unsupported, "rank ", root_ranks_[i],
                    " has no memory for its peers");
      memories.push_back(is_own ? std::move(*own) : PeerMemory::import(descriptors[i].fd()));
    }
    if (!failure) {
      const auto whole = std::make_shared<PeerRange>(std::move(memories), stride, std::vector<int>{device_});
      whole->zero(rank_, device_);
      range = whole;
    }
  } catch (const Error&) {
    failure = std::current_exception();
  }
  // Nobody writes before all have zeroed.
  const auto verdicts = all_of<std::uint32_t>(range != nullptr ? 1 : 0);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t i = 0; i < verdicts.size(); ++i) {
    HELIX_EXPECTS(verdicts[i] != 0, ErrorCode::unsupported, "rank ", root_ranks_[i],
                  " could not map the memory of its peers");
  }
  return range;
}

PeerHosts::Part ProcessHosts::split(int color, int key) {
  struct Place {
    std::int32_t color;
    std::int32_t key;
  };
  const std::vector<Place> places = all_of(Place{color, key});
  std::vector<std::size_t> members;
  for (std::size_t i = 0; i < places.size(); ++i)
    if (places[i].color == color) members.push_back(i);
  std::stable_sort(members.begin(), members.end(),
                   [&](std::size_t a, std::size_t b) { return places[a].key < places[b].key; });
  std::vector<int> root_ranks;
  int rank = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (static_cast<int>(members[i]) == rank_) rank = static_cast<int>(i);
    root_ranks.push_back(root_ranks_[members[i]]);
  }
  return {std::make_shared<ProcessHosts>(links_, root_ranks, rank, device_), rank, root_ranks};
}

}  // namespace helix::cuda
