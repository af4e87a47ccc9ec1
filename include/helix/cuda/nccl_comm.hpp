// SPDX-License-Identifier: Apache-2.0
// cuda::NcclComm: a Communicator over NCCL, one rank a GPU. Needs no NCCL header.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

struct ncclComm;

namespace helix::cuda {

/// A rank's handle to a group of GPUs. Models helix::Communicator on device memory. Calls queue and return;
/// the first message to a peer may wait on the host for the peer's. Wrong sizes are not noticed by NCCL:
/// where ranks disagree, synchronize() times out. Sums of f16 and bf16 are rounded at each rank on their way,
/// in an order of NCCL's choice, and have the same bits on all ranks.
///
/// Making one turns NVLink multicast off in the process's environment (NCCL_NVLS_ENABLE=0), also where the
/// user turned it on: a process that dies holding multicast objects can leave the host's GPUs unusable.
///
/// Capturable after each operation ran once outside of a capture, which connects the ranks.
class HELIX_API NcclComm {
 public:
  using Stream = cuda::Stream;

  /// Each rank captures and replays a graph of its own; see cuda::Graph.
  static constexpr bool kCapturesAlone = true;

  /// Promises, for all of the process's communicators that are made later, that none is used by two graphs at
  /// once, nor by a queued operation while a graph that holds it runs. NCCL then leaves its own ordering out
  /// of captured steps: on four H200s a collective takes 1 us less, and the host launches a step of 8 layers
  /// in 5 to 30 us in place of 40 to 80. Keeps the user's NCCL_GRAPH_MIXING_SUPPORT where it is set.
  static void disable_graph_mixing();

  /// An engine's communicator (ncclComm_t), which it keeps alive and destroys. abort() aborts it only if
  /// `may_abort`; otherwise later calls throw, but the device keeps waiting until the engine acts. To end a
  /// wait of synchronize() takes the engine's own communicator too.
  static NcclComm borrow(ncclComm* comm, bool may_abort = false,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60));

  /// All ranks of a new group in this process, rank r on devices[r], each to be used by a thread of its own.
  /// @throws Error(timeout) past the timeout, Error(invalid_argument) if a device stands twice.
  static std::vector<NcclComm> create_group(std::span<const int> devices,
                                            std::chrono::milliseconds timeout = std::chrono::seconds(60));

  /// Collective over the processes of `bootstrap`, this one on `device`. When the bootstrap sees a rank fail,
  /// this communicator and its parts are aborted, which releases blocked streams; abort() tells all
  /// processes.
  /// @throws Error(timeout) naming the rank that is missing. Then NCCL may still be waiting on a thread of
  /// its own: end the process.
  static NcclComm connect(comm::Bootstrap bootstrap, int device);

  int rank() const;
  int size() const;

  /// Sum of `count` elements of f32, f16 or bf16. `in` may equal `out`.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// in [size, count] elements -> out [count], this rank's slice of the sum.
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// in [bytes] -> out [size, bytes]. `in` may be this rank's slice of `out`.
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  /// in [size, bytes] -> out [size, bytes].
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  /// Packed unequal counts in bytes, one a peer, in host memory; read before the call returns.
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);

  /// Collective, blocks the host: ranks of equal `color`, which is not negative, form a new group, ordered by
  /// (key, old rank), which shares this one's failure state. Synchronize the streams that use this group
  /// first.
  NcclComm split(int color, int key);

  /// Aborts all groups split from the same root, on all ranks of this process and, with a Bootstrap, of the
  /// job: queued operations end with wrong data, synchronize() and later calls throw Error(peer_failed)
  /// naming this rank (of the root group) and `reason`. The first abort wins. Any thread. NCCL frees a
  /// communicator only when no graph holds it: where one does, this returns after 2 s, and the rest goes on
  /// when the graph's owner has destroyed it.
  void abort(std::string_view reason) noexcept;

  /// Waits for the stream, but not forever: polls it, NCCL's own errors and the state of the job. Busy for
  /// 100 ms, so that the end of a decode step is seen at once; then the thread sleeps between polls.
  /// @throws Error(peer_failed) once any rank failed; Error(timeout) past the timeout, naming the ranks that
  /// are behind where they are known, after aborting the group; what NCCL or CUDA report.
  void synchronize(Stream stream) const;

  struct State;

 private:
  explicit NcclComm(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace helix::cuda
