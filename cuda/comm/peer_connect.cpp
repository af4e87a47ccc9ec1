// SPDX-License-Identifier: Apache-2.0
// How a cuda::PeerComm is made: within a process, between processes, or split from another.
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/cuda/peer_comm.hpp>
#include <helix/error.hpp>

#include "comm/all_of.hpp"
#include "cuda/comm/last_work.hpp"
#include "cuda/comm/peer_islands.hpp"
#include "cuda/comm/peer_ranges.hpp"
#include "cuda/comm/peer_state.hpp"
#include "cuda/comm/process_hosts.hpp"
#include "cuda/comm/thread_hosts.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

/// The largest number of ranks on one device.
template <class Device>
int most_on_one(const std::vector<Device>& devices) {
  std::ptrdiff_t most = 0;
  for (const Device& device : devices)
    most = std::max(most, std::count(devices.begin(), devices.end(), device));
  return static_cast<int>(most);
}

using DeviceId = std::array<char, 16>;

DeviceId id_of(int device) {
  cudaDeviceProp prop{};
  HELIX_CUDA_CHECK(cudaGetDeviceProperties(&prop, device));
  DeviceId id;
  std::copy_n(prop.uuid.bytes, id.size(), id.begin());
  return id;
}

}  // namespace

std::vector<PeerComm> PeerComm::create_group(std::span<const int> devices, const Options& options) {
  comm::expect_timeout(options.timeout);
  HELIX_EXPECTS(!devices.empty() && devices.size() <= kMaxPeers, ErrorCode::invalid_argument,
                "PeerComm: a group of ", devices.size(), " ranks; 1 to ", kMaxPeers, " can be");
  const int count = device_count();
  for (const int device : devices)
    HELIX_EXPECTS(device >= 0 && device < count, ErrorCode::unsupported, "PeerComm: device ", device,
                  " is wanted; there are ", count);
  const std::vector<int> all(devices.begin(), devices.end());
  const int shared = most_on_one(all);
  const auto islands = PeerIslands::of_devices(devices);
  const auto ranges = PeerRanges::create();
  const bool has_nccl = options.use_nccl && shared == 1 && all.size() > 1;

  auto family = std::make_shared<PeerFamily>();
  family->timeout = comm::bounded(options.timeout);
  family->root = std::make_shared<comm::Root>();
  family->root->timeout = family->timeout;
  const auto group = comm::Group::whole(family->root, static_cast<int>(all.size()));
  if (has_nccl) family->nccl = NcclComm::create_group(devices, family->timeout, options.graph_use);
  std::vector<PeerComm> comms;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    auto state = std::make_shared<State>();
    state->family = family;
    state->own = std::make_shared<PeerRank>(static_cast<int>(rank), all[rank]);
    family->ranks.push_back(state->own);
    state->hosts = std::make_shared<ThreadHosts>(islands, ranges, group, static_cast<int>(rank), all,
                                                 shared > 1 && options.hosts_meet);
    if (has_nccl) state->nccl = family->nccl[rank];
    state->root_ranks = group->root_ranks;
    state->rank = static_cast<int>(rank);
    state->ranks_a_device = shared;
    comms.push_back(PeerComm(std::move(state)));
  }
  // Even if the whole group has no transport, parts of it inside an island may.
  if (!islands->has_pair()) comms.front().state_->expect_transport();
  if (!comms.front().has_windows()) return comms;
  const std::size_t bytes = static_cast<std::size_t>(channel_bytes(static_cast<int>(all.size()), shared));
  const auto range = ranges->take(all, bytes, 16).range;
  for (const PeerComm& comm : comms) comm.state_->open_channel(range);
  return comms;
}

PeerComm PeerComm::connect(comm::Bootstrap bootstrap, int device, const Options& options) {
  HELIX_EXPECTS(device >= 0 && device < device_count(), ErrorCode::unsupported, "PeerComm: device ", device,
                " is wanted; there are ", device_count());
  const DeviceScope scope(device);
  auto family = std::make_shared<PeerFamily>();
  family->timeout = bootstrap.timeout();
  family->bootstrap = bootstrap;
  auto state = std::make_shared<State>();
  state->family = family;
  state->own = std::make_shared<PeerRank>(bootstrap.rank(), device);
  family->ranks.push_back(state->own);
  state->rank = bootstrap.rank();
  state->root_ranks.resize(static_cast<std::size_t>(bootstrap.size()));
  std::iota(state->root_ranks.begin(), state->root_ranks.end(), 0);
  state->ranks_a_device = most_on_one(comm::all_of(bootstrap, id_of(device)));

  const auto links = comm::LocalLinks::connect(bootstrap, options.island);
  const auto islands = PeerIslands::of_processes(bootstrap, links, device);
  state->hosts = std::make_shared<ProcessHosts>(
      std::make_shared<PeerProcess>(PeerProcess{bootstrap, links, islands, device}), state->root_ranks,
      state->rank);
  if (state->has_windows()) state->open_channel();
  if (options.use_nccl && state->ranks_a_device == 1 && bootstrap.size() > 1) {
    state->nccl = NcclComm::connect(bootstrap, device, options.graph_use);
    family->nccl.push_back(*state->nccl);
  }
  // Even if the whole group has no transport, parts of it inside an island may.
  if (!islands->has_pair()) state->expect_transport();
  bootstrap.on_failure([weak = std::weak_ptr(family)](const Error& error) {
    const LastWork work;
    if (const auto alive = weak.lock()) alive->fail(error.what());
  });
  return PeerComm(std::move(state));
}

PeerComm PeerComm::split(int color, int key) {
  HELIX_EXPECTS(color >= 0, ErrorCode::invalid_argument, "split: color is ", color,
                "; it must not be negative");
  state_->begin("split");
  auto part = std::make_shared<State>();
  part->family = state_->family;
  part->own = state_->own;
  part->ranks_a_device = state_->ranks_a_device;
  // The hosts split first: they report calls that differ, for which NCCL would only wait.
  PeerHosts::Part members = state_->hosts->split(color, key, state_->nccl ? &*state_->nccl : nullptr);
  part->hosts = std::move(members.hosts);
  part->rank = members.rank;
  part->root_ranks = std::move(members.root_ranks);
  if (state_->nccl) part->nccl = state_->nccl->split(color, key);
  if (part->has_windows()) part->open_channel();
  return PeerComm(std::move(part));
}

}  // namespace helix::cuda
