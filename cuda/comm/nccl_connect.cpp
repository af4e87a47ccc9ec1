// SPDX-License-Identifier: Apache-2.0
// How a cuda::NcclComm is made: borrowed, within a process, between processes, or split from another.
#include <algorithm>
#include <memory>
#include <span>
#include <sstream>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <helix/cuda/nccl_comm.hpp>
#include <helix/error.hpp>

#include "comm/bootstrap_wait.hpp"
#include "comm/run_bounded.hpp"
#include "comm/timeout.hpp"
#include "cuda/comm/last_work.hpp"
#include "cuda/comm/nccl_state.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

/// ncclCommInitRank, with the setting for the communicator's graphs, which NCCL has from 2.29 on.
/// Communicators split from this one inherit the setting.
ncclResult_t init_rank(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                       [[maybe_unused]] NcclComm::GraphUse graph_use) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
  if (graph_use == NcclComm::GraphUse::one_at_a_time) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.graphUsageMode = 1;  // default 2: several graphs, or graphs and other operations, at once
    return ncclCommInitRankConfig(comm, size, id, rank, &config);
  }
#endif
  return ncclCommInitRank(comm, size, id, rank);
}

void expect_devices(std::span<const int> devices) {
  HELIX_EXPECTS(!devices.empty(), ErrorCode::invalid_argument, "NcclComm: a group needs at least one device");
  for (std::size_t i = 0; i < devices.size(); ++i) {
    HELIX_EXPECTS(std::count(devices.begin(), devices.end(), devices[i]) == 1, ErrorCode::invalid_argument,
                  "NcclComm: device ", devices[i],
                  " is given to two ranks; NCCL needs one GPU each, LocalComm shares one");
    const int count = device_count();
    HELIX_EXPECTS(devices[i] >= 0 && devices[i] < count, ErrorCode::unsupported, "NcclComm: rank ", i,
                  " wants device ", devices[i], "; there are ", count);
  }
}

}  // namespace

NcclComm NcclComm::borrow(ncclComm* comm, bool may_abort, milliseconds timeout) {
  comm::expect_timeout(timeout);
  timeout = comm::bounded(timeout);
  HELIX_EXPECTS(comm != nullptr, ErrorCode::invalid_argument, "NcclComm: the communicator is null");
  return NcclComm(State::make({.family = NcclFamily::make(),
                               .handle = NcclHandle(comm, {.is_owned = false}),
                               .timeout = timeout,
                               .may_abort = may_abort}));
}

std::vector<NcclComm> NcclComm::create_group(std::span<const int> devices, milliseconds timeout,
                                             GraphUse graph_use) {
  comm::expect_timeout(timeout);
  timeout = comm::bounded(timeout);
  expect_devices(devices);
  const auto handles = std::make_shared<NcclHandles>(devices.size());
  const bool is_done = comm::run_bounded(
      timeout,
      [handles, graph_use, devices = std::vector<int>(devices.begin(), devices.end())] {
        // Do all that may fail on one device first: inside the NCCL group the other ranks would wait for it.
        for (const int device : devices) {
          HELIX_CUDA_CHECK(cudaSetDevice(device));
          HELIX_CUDA_CHECK(cudaFree(nullptr));  // creates the context
        }
        ncclUniqueId id;
        check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
        check_nccl(ncclGroupStart(), "ncclGroupStart");
        ncclResult_t result = ncclSuccess;
        for (std::size_t rank = 0; rank < devices.size() && result == ncclSuccess; ++rank) {
          if (cudaSetDevice(devices[rank]) != cudaSuccess) result = ncclUnhandledCudaError;
          if (result == ncclSuccess)
            result = init_rank(handles->place(rank), static_cast<int>(devices.size()), id,
                               static_cast<int>(rank), graph_use);
        }
        const ncclResult_t ended = ncclGroupEnd();
        check_nccl(result != ncclSuccess ? result : ended, "ncclCommInitRank");
      },
      [] {});
  HELIX_EXPECTS(is_done, ErrorCode::timeout, "NcclComm: ", devices.size(),
                " GPUs of this process did not connect within ", comm::seconds(timeout),
                " s; NCCL_DEBUG=INFO shows why");
  const auto family = NcclFamily::make();
  family->progress = std::vector<RankProgress>(devices.size());
  std::vector<NcclComm> comms;
  for (std::size_t rank = 0; rank < handles->size(); ++rank) {
    comms.push_back(
        NcclComm(State::make({.family = family, .handle = handles->take(rank), .timeout = timeout})));
  }
  return comms;
}

NcclComm NcclComm::connect(comm::Bootstrap bootstrap, int device, GraphUse graph_use) {
  HELIX_EXPECTS(device >= 0 && device < device_count(), ErrorCode::unsupported, "NcclComm: device ", device,
                " is wanted; there are ", device_count());
  const DeviceScope scope(device);
  ncclUniqueId id{};
  if (bootstrap.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "rank 0");
  bootstrap.broadcast(std::as_writable_bytes(std::span(id.internal)));
  bootstrap.barrier();  // bounded, and names missing ranks; NCCL does neither
  const auto handles = std::make_shared<NcclHandles>(1);
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  const comm::BootstrapWait waiting(bootstrap);
  const bool is_done = comm::run_bounded(
      bootstrap.timeout() + comm::kWatchGrace,
      [handles, id, rank, size, device, graph_use] {
        HELIX_CUDA_CHECK(cudaSetDevice(device));
        std::ostringstream who;
        who << "rank " << rank << " of " << size << ", device " << device;
        check_nccl(init_rank(handles->place(0), size, id, rank, graph_use), "ncclCommInitRank", who.str());
      },
      [&] { bootstrap.check(); });
  if (!is_done) {
    std::ostringstream text;
    text << "NCCL did not connect rank " << rank << " of " << size << " within "
         << comm::seconds(bootstrap.timeout()) << " s; NCCL_DEBUG=INFO shows why";
    bootstrap.fail(text.str());
    throw Error(ErrorCode::timeout, text.str());
  }
  const auto family = NcclFamily::make();
  family->bootstrap = bootstrap;
  NcclComm comm(State::make({.family = family, .handle = handles->take(0), .timeout = bootstrap.timeout()}));
  bootstrap.on_failure([weak = std::weak_ptr(family)](const Error& error) {
    const LastWork work;
    if (const auto alive = weak.lock()) alive->fail(error.what());
  });
  return comm;
}

NcclComm NcclComm::split(int color, int key) {
  HELIX_EXPECTS(color >= 0, ErrorCode::invalid_argument, "split: color is ", color,
                "; NCCL needs one that is not negative");
  const auto handles = std::make_shared<NcclHandles>(1);
  const bool is_done = comm::run_bounded(
      state_->timeout + (state_->family->bootstrap ? comm::kWatchGrace : milliseconds(0)),
      [handles, state = state_, color, key] {
        state->call("split", [&](ncclComm_t comm) {
          return ncclCommSplit(comm, color, key, handles->place(0), nullptr);
        });
      },
      [&] { state_->family->throw_if_failed(); });
  if (!is_done) {
    std::ostringstream text;
    text << "split: some rank did not arrive within " << comm::seconds(state_->timeout) << " s; "
         << state_->name() << " waited" << state_->family->laggards(state_->root_rank);
    state_->fail_everywhere(text.str());
    throw Error(ErrorCode::timeout, text.str());
  }
  return NcclComm(State::make({.family = state_->family,
                               .handle = handles->take(0),
                               .timeout = state_->timeout,
                               .parent_root_rank = state_->root_rank}));
}

}  // namespace helix::cuda
