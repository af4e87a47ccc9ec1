// SPDX-License-Identifier: Apache-2.0
// cuda::PeerComm: the collectives, over windows or NCCL, and bounded waits for them.
#include <functional>
#include <sstream>
#include <string>

#include <cuda_runtime_api.h>

#include <helix/cuda/peer_comm.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "comm/bootstrap_wait.hpp"
#include "comm/collective_arguments.hpp"
#include "comm/operation.hpp"
#include "cuda/comm/host_wait.hpp"
#include "cuda/comm/peer_moves.hpp"
#include "cuda/comm/peer_state.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {

using comm::Operation;

namespace {

std::uint32_t tag_of(Operation operation, std::int64_t count, int detail = 0) {
  return call_tag(static_cast<std::uint32_t>(operation), {count, detail});
}

/// Whether hosts meet for a call on `stream`. They do not for a captured call, which runs later; either all
/// ranks capture a call or none.
bool hosts_meet(const PeerComm::State& state, const Stream& stream) {
  if (!state.hosts->meets()) return false;
  cudaStreamCaptureStatus status{};
  HELIX_CUDA_CHECK(cudaStreamIsCapturing(stream.handle(), &status));
  return status == cudaStreamCaptureStatusNone;
}

comm::Call call_of(Operation operation, std::int64_t count, int root = 0) {
  comm::Call call;
  call.operation = operation;
  call.count = count;
  call.root = root;
  return call;
}

/// The moves of a call, still without bytes.
PeerMoves moves_of(const void* in, void* out, std::uint32_t tag) {
  PeerMoves moves;
  moves.in = static_cast<const std::byte*>(in);
  moves.out = static_cast<std::byte*>(out);
  moves.tag = tag;
  return moves;
}

/// Calls queue(), which queues this rank's kernel of `call`, with all ranks or with `peer`. If it throws and
/// hosts do not meet, nobody knows whether it threw on all ranks. So it ends the group: otherwise this rank's
/// next message would be taken for the missing one.
template <class Queue>
void queue_together(const PeerComm::State& state, comm::Call call, const Stream& stream, int peer,
                    const Queue& queue) {
  const auto queue_on_device = [&] {
    const DeviceScope scope(state.own->device);
    queue();
  };
  if (state.size() == 1) return queue_on_device();
  if (hosts_meet(state, stream)) {
    try {
      return state.hosts->queue_together(call, peer, std::ref(queue_on_device));
    } catch (...) {
      state.family->fail_with_hosts();
      throw;
    }
  }
  try {
    queue_on_device();
  } catch (const std::exception& error) {
    state.fail_everywhere(error.what());
    throw;
  } catch (...) {
    state.fail_everywhere("");
    throw;
  }
}

void move(const PeerComm::State& state, const comm::Call& call, const PeerMoves& moves, int blocks,
          const Stream& stream, int peer = -1) {
  queue_together(state, call, stream, peer,
                 [&] { peer_move(state.channel, moves, blocks, stream.handle()); });
}

void reduce(const PeerComm::State& state, Operation operation, PeerReduction call, const Stream& stream) {
  call.tag = tag_of(operation, call.count, static_cast<int>(call.dtype));
  const auto bytes = call.count * static_cast<std::int64_t>(size_bytes(call.dtype));
  comm::Call of_hosts = call_of(operation, call.count);
  of_hosts.dtype = call.dtype;
  if (state.size() == 1) {
    PeerMoves moves = moves_of(call.in, call.out, call.tag);
    moves.send_bytes[0] = moves.recv_bytes[0] = bytes;
    return move(state, of_hosts, moves, state.blocks_for(bytes), stream);
  }
  queue_together(state, of_hosts, stream, -1, [&] {
    peer_reduce(state.channel, call, state.blocks_for(bytes * state.size()), stream.handle());
  });
}

void expect_windows(const PeerComm::State& state) {
  HELIX_EXPECTS(state.has_windows(), ErrorCode::unsupported, "PeerComm: no windows, as ",
                state.hosts->why_apart());
}

}  // namespace

std::byte* PeerWindow::part(int rank) const {
  return range_ ? range_->part(rank) : nullptr;
}
std::int64_t PeerWindow::stride_bytes() const {
  return range_ ? range_->stride() : 0;
}

int PeerComm::rank() const {
  return state_->rank;
}
int PeerComm::size() const {
  return state_->size();
}
bool PeerComm::has_windows() const {
  return state_->has_windows();
}

bool PeerComm::shares_device() const {
  return state_->ranks_a_device > 1;
}

void PeerComm::queue_together(const char* operation, const Stream& stream,
                              const std::function<void(const PeerChannel&)>& queue) const {
  expect_windows(*state_);
  (void)stream.handle();
  state_->begin(operation);
  // The kernels compare sizes, if at all; the hosts do not.
  comm::Call call = call_of(Operation::kernel, 0);
  call.kernel = operation;
  cuda::queue_together(*state_, call, stream, -1, [&] { queue(state_->channel); });
}

std::string PeerComm::transport() const {
  if (!has_windows()) return state_->nccl ? "NCCL" : "none";
  return state_->nccl ? "peer memory, large messages over NCCL" : "peer memory";
}

PeerWindow PeerComm::allocate_window(std::size_t bytes, std::int64_t parts) const {
  expect_windows(*state_);
  constexpr std::size_t kMaxBytes = std::size_t{1} << 48;  // more than the memory of any device
  HELIX_EXPECTS(bytes > 0 && bytes <= kMaxBytes && parts > 0 && parts <= kMaxCount,
                ErrorCode::invalid_argument, "allocate_window: ", bytes, " bytes in ", parts,
                " parts; give 1 to ", kMaxBytes, " bytes, and 1 to ", kMaxCount, " parts");
  state_->begin("allocate_window");
  return {state_->hosts->allocate(bytes, 16 * static_cast<std::size_t>(parts)), rank(),
          &state_->channel.waits.stop->gave_up};
}

void PeerComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("all_reduce", in, out, count, dtype);
  state_->begin_message("all_reduce", stream);
  if (count == 0) return;
  if (state_->is_for_nccl(count * static_cast<std::int64_t>(size_bytes(dtype))))
    return state_->nccl->all_reduce(in, out, count, dtype, stream);
  reduce(*state_, Operation::all_reduce,
         {.in = in, .out = out, .count = count, .dtype = dtype, .is_scatter = false}, stream);
}

void PeerComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("reduce_scatter", in, out, count, dtype);
  state_->begin_message("reduce_scatter", stream);
  if (count == 0) return;
  if (state_->is_for_nccl(count * static_cast<std::int64_t>(size_bytes(dtype))))
    return state_->nccl->reduce_scatter(in, out, count, dtype, stream);
  reduce(*state_, Operation::reduce_scatter,
         {.in = in, .out = out, .count = count, .dtype = dtype, .is_scatter = true}, stream);
}

void PeerComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_gather", in, out, bytes);
  state_->begin_message("all_gather", stream);
  if (bytes == 0) return;
  if (state_->is_for_nccl(bytes)) return state_->nccl->all_gather(in, out, bytes, stream);
  PeerMoves moves = moves_of(in, out, tag_of(Operation::all_gather, bytes));
  for (int p = 0; p < size(); ++p) {
    moves.send_bytes[p] = bytes;
    moves.recv_begin[p] = p * bytes;
    moves.recv_bytes[p] = bytes;
  }
  move(*state_, call_of(Operation::all_gather, bytes), moves, state_->blocks_for(bytes * size()), stream);
}

void PeerComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_to_all", in, out, bytes);
  state_->begin_message("all_to_all", stream);
  if (bytes == 0) return;
  if (state_->is_for_nccl(bytes)) return state_->nccl->all_to_all(in, out, bytes, stream);
  PeerMoves moves = moves_of(in, out, tag_of(Operation::all_to_all, bytes));
  for (int p = 0; p < size(); ++p) {
    moves.send_begin[p] = moves.recv_begin[p] = p * bytes;
    moves.send_bytes[p] = moves.recv_bytes[p] = bytes;
  }
  move(*state_, call_of(Operation::all_to_all, bytes), moves, state_->blocks_for(bytes * size()), stream);
}

void PeerComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                            std::span<const std::int64_t> recv_bytes, Stream stream) {
  comm::expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  comm::expect_own_bytes(send_bytes, recv_bytes, rank());
  state_->begin_message("all_to_all_v", stream);
  if (!has_windows()) return state_->nccl->all_to_all_v(in, send_bytes, out, recv_bytes, stream);
  comm::Call call = call_of(Operation::all_to_all_v, 0);
  call.send_bytes = send_bytes.data();
  call.recv_bytes = recv_bytes.data();
  PeerMoves moves = moves_of(in, out, tag_of(Operation::all_to_all_v, 0));
  moves.all_meet = true;  // else a disagreement, where only one of two ranks expects bytes, goes unnoticed
  std::int64_t send_begin = 0;
  std::int64_t recv_begin = 0;
  for (int p = 0; p < size(); ++p) {
    const auto i = static_cast<std::size_t>(p);
    moves.send_begin[p] = send_begin;
    moves.recv_begin[p] = recv_begin;
    send_begin += moves.send_bytes[p] = send_bytes[i];
    recv_begin += moves.recv_bytes[p] = recv_bytes[i];
  }
  // Blocks must be equal on all ranks, and the sizes between others are unknown.
  move(*state_, call, moves, state_->channel.channels, stream);
}

void PeerComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  comm::expect_buffer("broadcast", "buffer", buffer, bytes);
  comm::expect_root("broadcast", root, size());
  state_->begin_message("broadcast", stream);
  if (bytes == 0) return;
  if (state_->is_for_nccl(bytes)) return state_->nccl->broadcast(buffer, bytes, root, stream);
  PeerMoves moves = moves_of(buffer, buffer, tag_of(Operation::broadcast, bytes, root));
  if (rank() == root) {
    for (int p = 0; p < size(); ++p) moves.send_bytes[p] = p == root ? 0 : bytes;
  } else {
    moves.recv_bytes[root] = bytes;
  }
  move(*state_, call_of(Operation::broadcast, bytes, root), moves, state_->blocks_for(bytes), stream);
}

void PeerComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("send", "buffer", buffer, bytes);
  comm::expect_peer("send", peer, rank(), size());
  state_->begin_message("send", stream);
  if (bytes == 0) return;
  if (state_->is_for_nccl(bytes)) return state_->nccl->send(buffer, bytes, peer, stream);
  PeerMoves moves = moves_of(buffer, nullptr, tag_of(Operation::send, bytes));
  moves.send_bytes[peer] = bytes;
  move(*state_, call_of(Operation::send, bytes), moves, state_->blocks_for(bytes), stream, peer);
}

void PeerComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank(), size());
  state_->begin_message("recv", stream);
  if (bytes == 0) return;
  if (state_->is_for_nccl(bytes)) return state_->nccl->recv(buffer, bytes, peer, stream);
  PeerMoves moves = moves_of(nullptr, buffer, tag_of(Operation::send, bytes));
  moves.recv_bytes[peer] = bytes;
  move(*state_, call_of(Operation::recv, bytes), moves, state_->blocks_for(bytes), stream, peer);
}

void PeerComm::barrier(Stream stream) {
  state_->begin_message("barrier", stream);
  if (!has_windows()) return state_->nccl->barrier(stream);
  PeerMoves moves = moves_of(nullptr, nullptr, tag_of(Operation::barrier, 0));
  moves.all_meet = true;
  move(*state_, call_of(Operation::barrier, 0), moves, 1, stream);
}

void PeerComm::begin_step(std::uint64_t step) const {
  if (auto& job = state_->family->bootstrap) {
    job->set_step(step);
    job->begin_operation("");
  }
  state_->own->progress.begin("");
}

void PeerComm::end_step() const {
  if (state_->family->bootstrap) state_->family->bootstrap->begin_operation("");
  state_->own->progress.count();
}

void PeerComm::abort(std::string_view reason) noexcept {
  state_->fail_everywhere(reason);
}

/// Waits for a stream or an event.
template <class Work>
void PeerComm::wait_for(const Work& work) const {
  const State& state = *state_;
  PeerFamily& family = *state.family;
  const comm::BootstrapWait waiting(family.bootstrap);
  wait_awake(
      work, [&] { state.expect_no_failure(); },
      [&](Clock::duration waited) {
        state.check_nccl();
        if (waited < family.limit()) return;
        std::ostringstream text;
        text << state.own->progress.last_call() << ": the stream of rank " << state.own->root_rank
             << " did not finish within " << comm::seconds(family.timeout) << " s"
             << family.laggards(*state.own);
        state.fail_everywhere(text.str());
        throw Error(ErrorCode::timeout, text.str());
      });
  state.check_nccl();
}

void PeerComm::synchronize(Stream stream) const {
  wait_for(stream);
}

void PeerComm::synchronize(const Event& event) const {
  wait_for(event);
}

}  // namespace helix::cuda
