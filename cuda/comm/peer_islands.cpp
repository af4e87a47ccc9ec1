// SPDX-License-Identifier: Apache-2.0
// Threads ask the driver about their devices; processes try to map a little of each other's memory.
#include "cuda/comm/peer_islands.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

#include "comm/all_of.hpp"
#include "comm/linked_group.hpp"
#include "comm/rank_names.hpp"
#include "cuda/comm/peer_channel.hpp"
#include "cuda/comm/peer_memory.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

/// What kernels divide their work by. Ranks of a window wait for each other tile by tile, so all must divide
/// it equally.
struct DeviceKind {
  int num_sms = 0;
  int major = 0;
  int minor = 0;

  bool operator==(const DeviceKind&) const = default;
  std::string describe() const {
    return std::to_string(num_sms) + " SMs of compute capability " + std::to_string(major) + "." +
           std::to_string(minor);
  }
};

DeviceKind kind_of(int device) {
  DeviceKind kind;
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&kind.num_sms, cudaDevAttrMultiProcessorCount, device));
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&kind.major, cudaDevAttrComputeCapabilityMajor, device));
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&kind.minor, cudaDevAttrComputeCapabilityMinor, device));
  return kind;
}

/// What a rank tells the ranks that try to reach its memory.
struct Offer {
  DeviceKind kind;
  std::uint32_t unused = 0;
  std::uint64_t bytes = 0;  // of the memory to be mapped
};

/// "rank 0 has 132 SMs of compute capability 9.0, rank 2 has 114 SMs of compute capability 9.0" or nothing.
std::string why_not_alike(std::span<const Offer> offers, std::span<const int> root_ranks) {
  for (std::size_t i = 1; i < offers.size(); ++i) {
    if (offers[i].kind == offers[0].kind) continue;
    return "rank " + std::to_string(root_ranks[0]) + " has " + offers[0].kind.describe() + ", rank " +
           std::to_string(root_ranks[i]) + " has " + offers[i].kind.describe();
  }
  return "";
}

/// The ranks that this process is linked with, including itself.
comm::LinkedGroup neighbours_of(const std::shared_ptr<const comm::LocalLinks>& links, int own_rank) {
  const std::vector<int>& neighbourhoods = links->neighbourhoods();
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < neighbourhoods.size(); ++rank)
    if (neighbourhoods[rank] == neighbourhoods[static_cast<std::size_t>(own_rank)])
      ranks.push_back(static_cast<int>(rank));
  const auto own = std::find(ranks.begin(), ranks.end(), own_rank);
  return {links, ranks, static_cast<int>(own - ranks.begin())};
}

/// Tries to map a little memory of each rank of the group with the same kind of device. reach[from * size +
/// to] is not 0 if `from` could map that of `to`. Collective over the group. Failures are no errors;
/// `obstacle` names the first.
std::vector<std::byte> try_reach(const comm::LinkedGroup& group, int device, std::string& obstacle) {
  const DeviceScope scope(device);
  Offer offer{.kind = kind_of(device)};
  std::optional<PeerMemory> own;
  comm::Socket exported;
  try {
    offer.bytes = PeerMemory::stride(device, 1, 1);
    own = PeerMemory::create(device, static_cast<std::size_t>(offer.bytes), true);
    exported = comm::Socket(own->export_descriptor());
  } catch (const Error& error) {  // sends no descriptor, but still takes part in the exchange
    obstacle = error.what();
  }
  const std::vector<Offer> offers = group.all_of(offer);
  if (obstacle.empty()) obstacle = why_not_alike(offers, group.root_ranks());
  std::string lost;
  const std::vector<comm::Socket> descriptors = group.exchange(exported, lost);
  if (obstacle.empty()) obstacle = lost;
  std::vector<std::byte> reach(group.size());
  std::vector<std::unique_ptr<PeerRange>> mapped;  // kept until all ranks have tried
  for (std::size_t i = 0; i < group.size(); ++i) {
    const bool is_own = static_cast<int>(i) == group.rank();
    if (!exported.is_open() || (!is_own && !descriptors[i].is_open()) || offers[i].kind != offer.kind)
      continue;
    try {
      std::vector<PeerMemory> memory;
      memory.push_back(is_own ? std::move(*own) : PeerMemory::import(descriptors[i].fd()));
      mapped.push_back(std::make_unique<PeerRange>(
          std::move(memory), static_cast<std::size_t>(offers[i].bytes), std::vector<int>{device}));
      reach[i] = std::byte{1};
    } catch (const Error& error) {
      if (obstacle.empty()) obstacle = error.what();
    }
  }
  return group.gather(reach);
}

}  // namespace

std::shared_ptr<const PeerIslands> PeerIslands::of_devices(std::span<const int> devices) {
  std::vector<Offer> offers;
  for (const int device : devices) offers.push_back({.kind = kind_of(device)});
  std::vector<int> ranks(devices.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<int> islands = comm::islands_of(devices.size(), [&](std::size_t from, std::size_t to) {
    return offers[from].kind == offers[to].kind && can_share_memory(devices[from], devices[to]);
  });
  return std::shared_ptr<const PeerIslands>(
      new PeerIslands(std::move(islands), why_not_alike(offers, ranks)));
}

std::shared_ptr<const PeerIslands> PeerIslands::of_processes(
    comm::Bootstrap bootstrap, const std::shared_ptr<const comm::LocalLinks>& links, int device) {
  const comm::LinkedGroup group = neighbours_of(links, bootstrap.rank());
  std::string obstacle = links->why_not();
  if (obstacle.empty() && group.size() < static_cast<std::size_t>(bootstrap.size()))
    obstacle = "not all processes are of one machine, network namespace and Options::island";
  const std::vector<std::byte> reach = try_reach(group, device, obstacle);
  const std::vector<int> near = comm::islands_of(group.size(), [&](std::size_t from, std::size_t to) {
    return reach[from * group.size() + to] != std::byte{0};
  });
  // Name the island by its rank in the job, which all ranks know.
  const int first = near[static_cast<std::size_t>(group.rank())];
  const int own = first == comm::kNoIsland ? first : group.root_ranks()[static_cast<std::size_t>(first)];
  return std::shared_ptr<const PeerIslands>(
      new PeerIslands(comm::all_of(bootstrap, own), std::move(obstacle)));
}

std::string PeerIslands::why_apart(std::span<const int> root_ranks) const {
  if (root_ranks.size() > kMaxPeers)
    return std::to_string(root_ranks.size()) + " ranks are more than the " + std::to_string(kMaxPeers) +
           " that reach each other's memory";
  if (comm::is_in_one_island(islands_, root_ranks)) return "";
  const auto island = [&](int rank) { return islands_[static_cast<std::size_t>(rank)]; };
  std::vector<int> apart{root_ranks.front()};
  for (const int rank : root_ranks)
    if (apart.size() == 1 && island(rank) != island(apart.front())) apart.push_back(rank);
  const std::string text =
      comm::rank_names(apart) +
      (apart.size() == 1 ? " has no memory that others can map" : " do not reach each other's memory");
  return obstacle_.empty() ? text : text + " (" + obstacle_ + ")";
}

}  // namespace helix::cuda
