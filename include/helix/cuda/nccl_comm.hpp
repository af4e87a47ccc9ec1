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
/// out. Sums of f16 and bf16 are rounded at each rank on their way, in an order of NCCL's choice, and have
/// the same bits on all ranks. The first message to a peer may wait on the host for the peer's.
///
/// Whether NCCL uses NVLink multicast is its user's choice, NCCL_NVLS_ENABLE; helix never writes the
/// process's environment. A process that dies holding multicast objects can leave the host's GPUs unusable,
/// so a program that owns its process does well to set it to 0 before the first call of NCCL, as helix-decode
/// does.
///
/// Capturable after each operation ran once outside of a capture, which connects the ranks.
class HELIX_API NcclComm {
 public:
  using Stream = cuda::Stream;
  // With copies declared there are no moves, which would leave a handle to nothing.
  NcclComm(const NcclComm&) = default;
  NcclComm& operator=(const NcclComm&) = default;

  /// Each rank captures and replays a graph of its own; see cuda::Graph.
  static constexpr bool kCapturesAlone = true;

  /// What a communicator's user promises of the graphs that capture it.
  enum class GraphUse {
    /// Nothing: several graphs, or graphs and queued operations, may use the communicator at once.
    any,
    /// No two graphs use the communicator at once, nor does a queued operation while a graph that holds it
    /// runs, as in a decode loop. NCCL then leaves its own ordering out of captured steps: on four H200s a
    /// collective takes 1 us less, and the host launches a step of 8 layers in 5 to 30 us in place of 40 to
    /// 80. Heeded where helix was built against NCCL 2.29 or later; before, only NCCL_GRAPH_MIXING_SUPPORT=0
    /// in the environment of the process says the same, of all its communicators, and where that variable is
    /// set it is what counts.
    one_at_a_time,
  };

  /// Uses an engine's communicator (ncclComm_t), which the engine keeps alive and destroys. abort() aborts it
  /// only if `may_abort`; otherwise later calls throw, but the device keeps waiting until the engine acts. To
  /// end a wait of synchronize() takes the engine's own communicator too.
  static NcclComm borrow(ncclComm* comm, bool may_abort = false,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60));

  /// Makes a group whose ranks are all of this process, rank r on devices[r], each to be used by a thread of
  /// its own. `graph_use` is that of the group and of all that are split from it.
  /// @throws Error(timeout) past the timeout, Error(invalid_argument) if a device stands twice,
  /// Error(unsupported) if there is no such device.
  static std::vector<NcclComm> create_group(std::span<const int> devices,
                                            std::chrono::milliseconds timeout = std::chrono::seconds(60),
                                            GraphUse graph_use = GraphUse::any);

  /// Connects the processes of `bootstrap`, this one on `device`. Collective over them, with an equal
  /// `graph_use`, which is that of the group and of all that are split from it. When the bootstrap sees a
  /// rank fail, this communicator and its parts are aborted, which releases blocked streams; abort() tells
  /// all processes. The calling thread's current device stays what it was.
  /// @throws Error(timeout) naming the rank that is missing. Then NCCL may still be waiting on a thread of
  /// its own: end the process.
  static NcclComm connect(comm::Bootstrap bootstrap, int device, GraphUse graph_use = GraphUse::any);

  int rank() const;
  int size() const;

  // As comm::CollectiveComm says.
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

  /// Makes groups of the ranks of equal `color`, which is not negative, as comm::CollectiveComm says.
  /// Synchronize the streams that use this group first.
  NcclComm split(int color, int key);

  /// Tells the job's watch, and the messages about ranks that are behind, that this rank queues or replays
  /// step `step` next, which must not decrease. A replayed step's operations never pass through the host, so
  /// without it a failure is reported at the last step that was queued. Cheap.
  void begin_step(std::uint64_t step) const;
  /// The step of begin_step() is queued: a rank that stands still before, in a capture too, is told from
  /// those that wait for it. By all ranks or by none. Cheap.
  void end_step() const;

  /// Aborts all groups split from the same root, on all ranks of this process and, with a Bootstrap, of the
  /// job: queued operations end with wrong data, synchronize() and later calls throw Error(peer_failed)
  /// naming this rank (of the root group) and `reason`. The first abort wins. Any thread. NCCL frees a
  /// communicator only when no graph holds it: where one does, this returns after 2 s, and the rest goes on
  /// when the graph's owner has destroyed it.
  void abort(std::string_view reason) noexcept;

  /// Throws what has failed so far, on any rank that is known of, or what NCCL reports; waits for nothing.
  void check() const;

  /// Waits for the stream, but not forever: polls it, NCCL's own errors and the state of the job. Busy for
  /// 100 ms, so that the end of a decode step is seen at once; then the thread sleeps between polls.
  /// @throws Error(peer_failed) once any rank failed; Error(timeout) past the timeout, naming the ranks that
  /// are behind where they are known, after aborting the group; what NCCL or CUDA report.
  void synchronize(Stream stream) const;
  /// The same for what stood before the event when it was recorded.
  void synchronize(const Event& event) const;

  struct State;

 private:
  template <class Work>
  void wait_for(const Work& work) const;

  explicit NcclComm(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace helix::cuda
