// SPDX-License-Identifier: Apache-2.0
// cuda::PeerComm: a Communicator whose ranks write into each other's memory. Needs no CUDA header.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

namespace helix::cuda {

class PeerRange;
struct PeerChannel;

/// Zeroed device memory of each rank of a group, which kernels of all ranks read and write. In the address
/// space of every rank the parts follow one another at a constant stride, so that one strided view reaches
/// all peers. Copies are the same window. Between processes the memory is freed with the last copy, after the
/// device is idle. Ranks that are threads keep it for their next windows until the last of their
/// communicators goes, or a group of the same devices, or more, has no room for another window.
class HELIX_API PeerWindow {
 public:
  /// A window without memory.
  PeerWindow() = default;
  PeerWindow(std::shared_ptr<const PeerRange> range, int rank, const std::uint32_t* gave_up)
      : range_(std::move(range)), rank_(rank), gave_up_(gave_up) {}

  /// Address of this rank's part.
  std::byte* data() const { return part(rank_); }
  /// Address of the part of `rank`.
  std::byte* part(int rank) const;
  /// Bytes between the parts of consecutive ranks; each part has memory for all of them.
  std::int64_t stride_bytes() const;
  /// Device word of the communicator, for TargetLines::gave_up.
  const std::uint32_t* gave_up() const { return gave_up_; }

 private:
  std::shared_ptr<const PeerRange> range_;
  int rank_ = 0;
  const std::uint32_t* gave_up_ = nullptr;
};

/// A rank's handle to a group of GPUs that reach each other's memory, over NVLink or in one GPU. Ranks are
/// threads of a process or processes of a machine. Models comm::CollectiveComm on device memory, where the
/// operations are documented. In addition:
///
/// - The ranks of a root group form islands; in an island all ranks reach each other's memory. A group inside
///   one island, be it the root or made by split(), has windows. Any other group uses NCCL alone. If NCCL
///   cannot be used, such a group can be split, and its other calls throw Error(unsupported).
/// - Messages are stores into windows, with flags that the peers' kernels poll. Kernels of collectives have
///   64 blocks at most. Where ranks share a GPU all kernels that wait have fewer, to leave room for the
///   kernels that they wait for.
/// - Every rank that shares a GPU needs a hardware queue of its own, and no kernel may be loaded while others
///   wait. Set CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER in the environment before the
///   first call of CUDA. Threads that share a GPU meet on the host before and after they queue what is not
///   captured, and allocations of this library wait meanwhile. A call is captured by all ranks or by none.
///   Allocations made elsewhere do not wait, and none waits while captured steps run. While kernels may wait,
///   no rank may therefore allocate or free memory elsewhere, nor at all while captured steps run; capturing
///   a Graph does both.
/// - Large messages, except those of all_to_all_v, go over NCCL if each rank has a GPU of its own and
///   `use_nccl` is set. So does everything of a group of several islands. transport() tells which is used.
/// - Sums are in f32 and in rank order, with the same bits on all ranks; those over NCCL are as NcclComm
///   says.
/// - Counts of messages live in device memory, so that a captured step replays correctly.
/// - A kernel waits no longer than the group's timeout. With a Bootstrap it waits 2 s more, by which time the
///   watch has found the rank that stands still. A kernel that gives up records the ranks it waited for and
///   releases the peers of that group. What is queued behind it runs on wrong data: kernels send nothing any
///   more, but messages over NCCL still leave, as NCCL does not know. synchronize(), or the next call, turns
///   the record into Error(timeout) or Error(out_of_step), which names the ranks, and ends all groups of the
///   root. Collectives that differ between ranks are recorded too, where their messages meet. Kernels of
///   queue_kernel() compare less: see cuda::Backend::reduce_norm().
///
/// Capturable; each rank captures and replays a graph of its own. What goes over NCCL is capturable as
/// NcclComm says.
class HELIX_API PeerComm {
 public:
  using Stream = cuda::Stream;
  // With copies declared there are no moves, which would leave a handle to nothing.
  PeerComm(const PeerComm&) = default;
  PeerComm& operator=(const PeerComm&) = default;

  /// Whether each rank captures and replays a graph of its own; see cuda::Graph.
  static constexpr bool kCapturesAlone = true;

  /// Options of a group: how it waits, and what it uses besides windows.
  struct Options {
    /// Limit of a wait; connect() uses its Bootstrap's.
    std::chrono::milliseconds timeout = std::chrono::seconds(60);
    bool use_nccl = true;  ///< Whether NCCL carries large messages and groups of several islands.
    /// Whether threads that share a GPU meet on the host before and after they queue a kernel that waits,
    /// outside of captures. If not, no rank may allocate, free or map memory while another's kernel waits:
    /// freeing waits for all kernels and keeps others from being queued.
    bool hosts_meet = true;
    /// Promise about graphs for NCCL's communicators.
    NcclComm::GraphUse graph_use = NcclComm::GraphUse::any;
    /// Name of this process's island, for connect(). Processes of one machine with different names are of
    /// different islands, as if they were on two machines. Those with the same name, or none, are of one
    /// island only if they reach each other's memory. The one option that may differ between ranks.
    std::string island = {};
  };

  /// Makes a group of threads of this process, rank r on devices[r]; ranks may share a device.
  /// @throws Error(unsupported) if no two devices reach each other's memory and NCCL cannot be used, or a
  /// device does not exist; Error(invalid_argument) unless there are 1 to 64 ranks.
  static std::vector<PeerComm> create_group(std::span<const int> devices, const Options& options);
  static std::vector<PeerComm> create_group(std::span<const int> devices) {
    return create_group(devices, Options());
  }

  /// Connects the processes of `bootstrap`, this one on `device`; they may share devices. Descriptors of
  /// memory travel over local sockets, whose other end shows that it is of the job and of the same user.
  /// Collective over the processes, with equal options. Processes form an island if they are of one machine,
  /// one network namespace and one Options::island, have devices of one compute capability and number of SMs,
  /// and can map each other's memory. Groups of up to 64 ranks inside an island have windows. The calling
  /// thread's current device stays what it was. A thread that has chosen none (cudaSetDevice) is on device 0,
  /// where CUDA then makes a context as that is restored: choose `device` first.
  /// @throws Error(timeout), Error(peer_failed); Error(unsupported) if no two processes form an island and
  /// NCCL cannot be used; Error(capacity).
  static PeerComm connect(comm::Bootstrap bootstrap, int device, const Options& options);

  int rank() const;
  int size() const;
  /// Whether the ranks reach each other's memory, so that allocate_window() may be called. Equal on all
  /// ranks.
  bool has_windows() const;
  /// Whether some ranks of the root share a device, on which kernels of one may wait for those of another.
  /// Equal on all ranks.
  bool shares_device() const;
  /// How messages travel, in words: "peer memory, large messages over NCCL"; "none" if nothing carries them.
  std::string transport() const;

  // The operations of comm::CollectiveComm.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  /// send() of comm::CollectiveComm. On the device it waits for the receiver.
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);
  /// split() of comm::CollectiveComm. Between processes the calls of split() and allocate_window() take turns
  /// over all groups of a root: each process makes them in the same order, one thread at a time. Ranks that
  /// come with different groups get Error(invalid_argument). If the group spans several islands, its ranks
  /// agree over the Bootstrap where the group is the whole job (no other thread may use the Bootstrap
  /// meanwhile), otherwise over NCCL.
  /// @throws Error(unsupported) if they need NCCL and cannot use it.
  PeerComm split(int color, int key);

  /// Allocates a window of at least `bytes` a rank, whose stride is a multiple of 16 * `parts` bytes.
  /// Collective, with equal arguments; blocks the host. @throws Error(invalid_argument) unless `bytes` is 1
  /// to 2^48 and `parts` 1 to kMaxCount; Error(unsupported) without windows; Error(capacity) on all ranks if
  /// one of them has no room, Error(io) if one has no more open files. The group stays usable.
  PeerWindow allocate_window(std::size_t bytes, std::int64_t parts) const;

  /// Announces the step that this rank queues or replays next; see NcclComm::begin_step().
  void begin_step(std::uint64_t step) const;
  /// Announces that the step is queued; see NcclComm::end_step().
  void end_step() const;
  /// Ends all groups split from the same root, on all ranks of this process and, with a Bootstrap, of the
  /// job. Kernels stop waiting, with wrong data. synchronize() and later calls throw Error(peer_failed) with
  /// this rank (of the root group) and `reason`. The first abort wins. Any thread may call it.
  void abort(std::string_view reason) noexcept;
  /// Waits for the stream, but not forever: polls it for 100 ms without sleeping, then with sleeps between
  /// polls.
  /// @throws Error(peer_failed) once any rank failed; Error(timeout) with the ranks that did not come, once a
  /// kernel has waited for the timeout; Error(timeout) past the timeout if the stream has not ended, with the
  /// ranks of this process that are behind, so that between processes it may name no other;
  /// Error(out_of_step) if ranks made different calls; what CUDA reports.
  void synchronize(Stream stream) const;
  /// Waits for the work queued before the event was recorded, as synchronize(Stream) waits for a stream.
  void synchronize(const Event& event) const;

  /// Calls queue(channel) and returns its result. `queue` queues one kernel of this library on `stream`,
  /// which reaches the peers through `channel`, or on all ranks none. `operation`, a string literal, names
  /// the kernel. Collective over the group; only with windows. @throws Error(peer_failed) once any rank
  /// failed; what `queue` throws, which ends the group, unless hosts meet and it throws on all ranks.
  template <class Queue>
  auto queue_kernel(const char* operation, Stream stream, const Queue& queue) const {
    std::invoke_result_t<const Queue&, const PeerChannel&> result{};
    const auto keep_result = [&](const PeerChannel& channel) { result = queue(channel); };
    queue_together(operation, stream, std::ref(keep_result));
    return result;
  }

  struct State;

 private:
  void queue_together(const char* operation, const Stream& stream,
                      const std::function<void(const PeerChannel&)>& queue) const;
  template <class Work>
  void wait_for(const Work& work) const;

  explicit PeerComm(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace helix::cuda
