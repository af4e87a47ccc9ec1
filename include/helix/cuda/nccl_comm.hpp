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

/// A rank's handle to a group of GPUs. Models comm::CollectiveComm on device memory, where the operations are
/// documented. What differs: NCCL does not notice counts that differ between ranks; synchronize() then times
/// out. Sums of f16 and bf16 are rounded at each rank on their way, in an order that NCCL chooses, and have
/// the same bits on all ranks. The first message to a peer may wait on the host for the peer's first message.
///
/// NCCL_NVLS_ENABLE, which the user sets, says whether NCCL uses NVLink multicast; helix never changes the
/// process's environment. A process that dies while it holds multicast objects can leave the host's GPUs
/// unusable. A program that owns its process should therefore set the variable to 0 before the first call of
/// NCCL, as helix-decode does.
///
/// Capturable after each operation has run once outside of a capture, which connects the ranks.
class HELIX_API NcclComm {
 public:
  using Stream = cuda::Stream;
  // With copies declared there are no moves, which would leave a handle to nothing.
  NcclComm(const NcclComm&) = default;
  NcclComm& operator=(const NcclComm&) = default;

  /// Whether each rank captures and replays a graph of its own; see cuda::Graph.
  static constexpr bool kCapturesAlone = true;

  /// What the user of a communicator promises about the graphs that capture it.
  enum class GraphUse {
    /// No promise: several graphs, or graphs and queued operations, may use the communicator at once.
    any,
    /// No two graphs use the communicator at once, and no queued operation uses it while a graph that holds
    /// it runs, as in a decode loop. NCCL then leaves its own ordering out of captured steps: on four H200s a
    /// collective takes 1 us less, and the host launches a step of 8 layers in 5 to 30 us instead of 40 to
    /// 80. Takes effect where helix was built against NCCL 2.29 or later. With an older NCCL only
    /// NCCL_GRAPH_MIXING_SUPPORT=0 in the process's environment says the same, for all its communicators.
    /// Where that variable is set, it decides.
    one_at_a_time,
  };

  /// Uses an engine's communicator (ncclComm_t), which the engine keeps alive and destroys. A failure or
  /// abort() aborts it only if `may_abort`. Otherwise later calls and synchronize() still throw, but work
  /// that waits on the device keeps waiting until the engine aborts its communicator.
  static NcclComm borrow(ncclComm* comm, bool may_abort = false,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60));

  /// Makes a group whose ranks are all in this process, rank r on devices[r], each to be used by a thread of
  /// its own. `graph_use` applies to the group and to all groups split from it.
  /// @throws Error(timeout) past the timeout, Error(invalid_argument) if a device is listed twice,
  /// Error(unsupported) if a device does not exist.
  static std::vector<NcclComm> create_group(std::span<const int> devices,
                                            std::chrono::milliseconds timeout = std::chrono::seconds(60),
                                            GraphUse graph_use = GraphUse::any);

  /// Connects the processes of `bootstrap`, this one on `device`. Collective over them, with an equal
  /// `graph_use`, which applies to the group and to all groups split from it. When the bootstrap sees a rank
  /// fail, this communicator and those split from it are aborted, which releases blocked streams. abort()
  /// tells all processes. The calling thread's current device stays what it was. A thread that has chosen
  /// none (cudaSetDevice) is on device 0, where CUDA then makes a context as that is restored: choose
  /// `device` first.
  /// @throws Error(timeout): it names the missing rank if one does not come, but only this rank if NCCL does
  /// not connect those that did. NCCL may then still be waiting on a thread of its own: end the process.
  static NcclComm connect(comm::Bootstrap bootstrap, int device, GraphUse graph_use = GraphUse::any);

  int rank() const;
  int size() const;

  // The operations of comm::CollectiveComm.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);

  /// Splits the group as comm::CollectiveComm says; `color` must not be negative. Synchronize the streams
  /// that use this group first.
  NcclComm split(int color, int key);

  /// Announces that this rank queues or replays step `step` next; `step` must not decrease. The job's watch,
  /// and messages about ranks that are behind, report it. The operations of a replayed step never pass
  /// through the host: without this call a failure is reported at the last step that was queued. Cheap.
  void begin_step(std::uint64_t step) const;
  /// Announces that the step of begin_step() is queued. A rank that stands still before this call, also in a
  /// capture, can then be told from those that wait for it. Call it on all ranks or on none. Cheap.
  void end_step() const;

  /// Aborts all groups split from the same root, on all ranks of this process and, with a Bootstrap, of the
  /// job. Queued operations end with wrong data. synchronize() and later calls throw Error(peer_failed) with
  /// this rank (of the root group) and `reason`. The first abort wins. Any thread may call it. NCCL frees a
  /// communicator only when no graph holds it. If one does, this returns after 2 s, and the rest goes on when
  /// the graph's owner has destroyed it.
  void abort(std::string_view reason) noexcept;

  /// Throws what is known to have failed so far, on any rank, or what NCCL reports. Waits for nothing.
  void check() const;

  /// Waits for the stream, but not forever. Polls the stream, NCCL's own errors and the state of the job: for
  /// 100 ms without sleeping, so that the end of a decode step is seen at once, then with sleeps between
  /// polls.
  /// @throws Error(peer_failed) once any rank failed; Error(timeout) past the timeout, after aborting the
  /// group, with the ranks that are behind where they are known; what NCCL or CUDA report.
  void synchronize(Stream stream) const;
  /// Waits for the work queued before the event was recorded, as synchronize(Stream) waits for a stream.
  void synchronize(const Event& event) const;

  struct State;

 private:
  friend struct PeerFamily;

  template <class Work>
  void wait_for(const Work& work) const;

  explicit NcclComm(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace helix::cuda
