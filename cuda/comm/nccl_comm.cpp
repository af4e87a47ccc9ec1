// SPDX-License-Identifier: Apache-2.0
// cuda::NcclComm: the collectives, and bounded waits for them.
#include <optional>
#include <sstream>

#include <cuda_runtime_api.h>

#include <helix/cuda/nccl_comm.hpp>
#include <helix/error.hpp>

#include "comm/bootstrap_wait.hpp"
#include "comm/bytes.hpp"
#include "comm/collective_arguments.hpp"
#include "cuda/comm/host_wait.hpp"
#include "cuda/comm/nccl_state.hpp"

namespace helix::cuda {

using comm::at;

int NcclComm::rank() const {
  return state_->rank;
}
int NcclComm::size() const {
  return state_->size;
}

void NcclComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("all_reduce", in, out, count, dtype);
  state_->enqueue("all_reduce", stream, [&](ncclComm_t comm, StreamHandle queue) {
    if (count == 0) return ncclSuccess;
    return ncclAllReduce(in, out, unsigned_count(count), nccl_type(dtype), ncclSum, comm, queue);
  });
}

void NcclComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("reduce_scatter", in, out, count, dtype);
  state_->enqueue("reduce_scatter", stream, [&](ncclComm_t comm, StreamHandle queue) {
    if (count == 0) return ncclSuccess;
    return ncclReduceScatter(in, out, unsigned_count(count), nccl_type(dtype), ncclSum, comm, queue);
  });
}

void NcclComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_gather", in, out, bytes);
  state_->enqueue("all_gather", stream, [&](ncclComm_t comm, StreamHandle queue) {
    if (bytes == 0) return ncclSuccess;
    return ncclAllGather(in, out, unsigned_count(bytes), ncclInt8, comm, queue);
  });
}

void NcclComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_to_all", in, out, bytes);
  state_->enqueue_group("all_to_all", stream, [&](ncclComm_t comm, StreamHandle queue) {
    // NCCL turns the message to oneself into a copy inside the same kernel.
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < state_->size && bytes > 0 && result == ncclSuccess; ++peer) {
      result = ncclSend(at(in, peer * bytes), unsigned_count(bytes), ncclInt8, peer, comm, queue);
      if (result == ncclSuccess)
        result = ncclRecv(at(out, peer * bytes), unsigned_count(bytes), ncclInt8, peer, comm, queue);
    }
    return result;
  });
}

void NcclComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                            std::span<const std::int64_t> recv_bytes, Stream stream) {
  comm::expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  comm::expect_own_bytes(send_bytes, recv_bytes, rank());
  state_->enqueue_group("all_to_all_v", stream, [&](ncclComm_t comm, StreamHandle queue) {
    ncclResult_t result = ncclSuccess;
    std::int64_t send_begin = 0;
    std::int64_t recv_begin = 0;
    for (std::size_t i = 0; i < send_bytes.size() && result == ncclSuccess; ++i) {
      const int peer = static_cast<int>(i);
      if (send_bytes[i] > 0)
        result = ncclSend(at(in, send_begin), unsigned_count(send_bytes[i]), ncclInt8, peer, comm, queue);
      if (recv_bytes[i] > 0 && result == ncclSuccess)
        result = ncclRecv(at(out, recv_begin), unsigned_count(recv_bytes[i]), ncclInt8, peer, comm, queue);
      send_begin += send_bytes[i];
      recv_begin += recv_bytes[i];
    }
    return result;
  });
}

void NcclComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  comm::expect_buffer("broadcast", "buffer", buffer, bytes);
  comm::expect_root("broadcast", root, size());
  state_->enqueue("broadcast", stream, [&](ncclComm_t comm, StreamHandle queue) {
    if (bytes == 0) return ncclSuccess;
    return ncclBroadcast(buffer, buffer, unsigned_count(bytes), ncclInt8, root, comm, queue);
  });
}

void NcclComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("send", "buffer", buffer, bytes);
  comm::expect_peer("send", peer, rank(), size());
  state_->enqueue("send", stream, [&](ncclComm_t comm, StreamHandle queue) {
    if (bytes == 0) return ncclSuccess;
    return ncclSend(buffer, unsigned_count(bytes), ncclInt8, peer, comm, queue);
  });
}

void NcclComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank(), size());
  state_->enqueue("recv", stream, [&](ncclComm_t comm, StreamHandle queue) {
    if (bytes == 0) return ncclSuccess;
    return ncclRecv(buffer, unsigned_count(bytes), ncclInt8, peer, comm, queue);
  });
}

void NcclComm::barrier(Stream stream) {
  state_->enqueue("barrier", stream, [&](ncclComm_t comm, StreamHandle queue) {
    void* value = state_->barrier_value.data();
    return ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, comm, queue);
  });
}

void NcclComm::begin_step(std::uint64_t step) const {
  NcclFamily& family = *state_->family;
  if (family.bootstrap) family.bootstrap->set_step(step);
  family.begin(state_->root_rank, "");
}

void NcclComm::end_step() const {
  state_->family->end_step(state_->root_rank);
}

void NcclComm::abort(std::string_view reason) noexcept {
  state_->fail_everywhere(reason);
}

void NcclComm::check() const {
  State& state = *state_;
  state.family->throw_if_failed();
  const std::optional<ncclResult_t> error = state.async_error();
  if (!error) return;
  std::ostringstream text;
  text << "NCCL reports after " << state.operation.load(std::memory_order_relaxed) << " on " << state.name()
       << ": " << ncclGetErrorString(*error);
  state.fail_everywhere(text.str());
  throw Error(code_of(*error), text.str());
}

/// Waits for a stream or an event.
template <class Work>
void NcclComm::wait_for(const Work& work) const {
  State& state = *state_;
  NcclFamily& family = *state.family;
  const comm::BootstrapWait waiting(family.bootstrap);
  const milliseconds limit = state.timeout + (family.bootstrap ? comm::kWatchGrace : milliseconds(0));
  const auto throw_if_failed = [&] { family.throw_if_failed(); };  // aborted work seems to succeed
  wait_awake(work, throw_if_failed, [&](Clock::duration waited) {
    check();
    if (waited < limit) return;
    std::ostringstream text;
    text << state.operation.load(std::memory_order_relaxed) << ": the stream of " << state.name()
         << " did not finish within " << comm::seconds(state.timeout) << " s"
         << family.laggards(state.root_rank);
    state.fail_everywhere(text.str());
    throw Error(ErrorCode::timeout, text.str());
  });
}

void NcclComm::synchronize(Stream stream) const {
  wait_for(stream);
}

void NcclComm::synchronize(const Event& event) const {
  wait_for(event);
}

}  // namespace helix::cuda
