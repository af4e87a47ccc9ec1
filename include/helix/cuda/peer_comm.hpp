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

/// Zeroed device memory of each rank of a group, which kernels of all ranks read and write. In the addresses
/// of every rank the parts lie one behind the other, at a constant stride, so that one strided view reaches
/// all peers. Copies are the same window. Between processes the memory goes with the last one, after the
/// device is idle; ranks that are threads keep it for their next windows, until the last of their
/// communicators goes.
class HELIX_API PeerWindow {
 public:
  /// No memory.
  PeerWindow() = default;
  PeerWindow(std::shared_ptr<const PeerRange> range, int rank, const std::uint32_t* gave_up)
      : range_(std::move(range)), rank_(rank), gave_up_(gave_up) {}

  /// This rank's part.
  std::byte* data() const { return part(rank_); }
  /// The part of `rank`.
  std::byte* part(int rank) const;
  /// Bytes from one rank's part to the next one's; all of a part is memory.
  std::int64_t stride_bytes() const;
  /// As TargetLines::gave_up: a word of the communicator.
  const std::uint32_t* gave_up() const { return gave_up_; }

 private:
  std::shared_ptr<const PeerRange> range_;
  int rank_ = 0;
  const std::uint32_t* gave_up_ = nullptr;
};

/// A rank's handle to a group of GPUs that reach each other's memory, over NVLink or in one GPU: threads of a
/// process, or processes of a machine. Models comm::CollectiveComm on device memory, where the operations are
/// documented. What it adds:
///
/// - Ranks of a root fall into islands, in which all reach each other's memory. A group that lies inside one,
///   the root or what split() makes, has windows; one that does not uses NCCL alone. Where NCCL cannot be
///   used, such a group can be split, and whatever else it is asked for throws Error(unsupported).
/// - Messages are stores into windows, with flags that the peers' kernels poll: those of collectives by 64
///   blocks at most, and all by fewer where ranks share a GPU, so that kernels that wait leave room for those
///   that they wait for. There every rank needs a hardware queue of its own, and no kernel may be loaded
///   while others wait: set CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER in the environment
///   before the first call of CUDA. Threads that share a GPU meet on the host before and after they queue
///   what is not captured, and allocations of this library wait meanwhile; a call is captured by all ranks or
///   by none. While captured steps run, or memory comes from elsewhere, no rank may allocate or free any, as
///   capturing a Graph does.
/// - Large messages, but for those of all_to_all_v, go over NCCL, where each rank has a GPU of its own and
///   `use_nccl` is set; so does everything of a group of several islands. transport() tells.
/// - Sums are in f32 and in rank order, the same bits on all ranks; over NCCL as NcclComm says.
/// - Counts of messages live in device memory, so that a captured step replays rightly.
/// - A kernel waits no longer than the group's timeout, with a Bootstrap 2 s more: by then its watch has
/// found
///   who stands still. One that gives up records whom it waited for and lets the peers of that group go;
///   synchronize(), or the next call, turns the record into Error(timeout) or Error(out_of_step), which names
///   the ranks, and ends all groups of the root. Collectives that differ between ranks are such a record too,
///   where the messages meet; the kernels of queue_kernel() are told apart by less: see
///   cuda::Backend::reduce_norm().
///
/// Capturable; each rank captures and replays a graph of its own. Over NCCL as NcclComm says.
class HELIX_API PeerComm {
 public:
  using Stream = cuda::Stream;
  // With copies declared there are no moves, which would leave a handle to nothing.
  PeerComm(const PeerComm&) = default;
  PeerComm& operator=(const PeerComm&) = default;

  /// Each rank captures and replays a graph of its own; see cuda::Graph.
  static constexpr bool kCapturesAlone = true;

  /// How a group waits, and what it uses beside windows.
  struct Options {
    std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< With a Bootstrap: its own instead.
    bool use_nccl = true;  ///< For large messages, and for groups of several islands.
    /// Whether threads that share a GPU meet on the host before and after they queue a kernel that waits,
    /// outside of captures. Without it, no rank may allocate, free or map memory while another's kernel
    /// waits: what is freed waits for all kernels, and keeps others from being queued.
    bool hosts_meet = true;
    NcclComm::GraphUse graph_use = NcclComm::GraphUse::any;  ///< As in NcclComm, of NCCL's communicators.
    /// Name of the island that this process is to be of, for connect(). Processes of a machine that give
    /// different names are of different islands, as if they were of two machines; the same name, or none,
    /// joins only those that reach each other's memory. The one option that may differ between ranks.
    std::string island = {};
  };

  /// Makes a group of threads of this process, rank r on devices[r]; ranks may share a device.
  /// @throws Error(unsupported) if no two devices reach each other's memory and NCCL cannot be used, or there
  /// is no such device; Error(invalid_argument) unless there are 1 to 64 ranks.
  static std::vector<PeerComm> create_group(std::span<const int> devices, const Options& options);
  static std::vector<PeerComm> create_group(std::span<const int> devices) {
    return create_group(devices, Options());
  }

  /// Connects the processes of `bootstrap`, this one on `device`; they may share devices. Descriptors of
  /// memory travel over local sockets, whose other end shows that it is of the job and of the same user.
  /// Collective over them, with equal options. Processes that are of one machine, one network namespace and
  /// one Options::island, have devices of one compute capability and number of SMs, and can map each other's
  /// memory, are an island; groups inside it of up to 64 have windows. The calling thread's current device
  /// stays what it was.
  /// @throws Error(timeout), Error(peer_failed); Error(unsupported) if no two processes are of one island and
  /// NCCL cannot be used; Error(capacity).
  static PeerComm connect(comm::Bootstrap bootstrap, int device, const Options& options);

  int rank() const;
  int size() const;
  /// Whether the ranks reach each other's memory: allocate_window() may be called. Equal on all ranks.
  bool has_windows() const;
  /// Whether some ranks of the root share a device, where kernels of one wait beside those of another. Equal
  /// on all ranks.
  bool shares_device() const;
  /// How messages travel, in words: "peer memory, large messages over NCCL"; "none" where nothing carries
  /// them.
  std::string transport() const;

  // As comm::CollectiveComm says.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  /// As comm::CollectiveComm says; on the device it waits for the receiver.
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);
  /// As comm::CollectiveComm says. Ranks of several islands tell each other over the Bootstrap where the
  /// group is the whole job, which no other thread may use meanwhile, else over NCCL. @throws
  /// Error(unsupported) if they would need NCCL, and cannot use it.
  PeerComm split(int color, int key);

  /// A window of `bytes` a rank at least, whose stride is a multiple of 16 * `parts` bytes. Collective, with
  /// equal arguments; blocks the host. @throws Error(invalid_argument) unless `bytes` are 1 to 2^48 and
  /// `parts` 1 to kMaxCount; Error(unsupported) without windows; Error(capacity), on all ranks alike, where
  /// one has no room: the group is as it was.
  PeerWindow allocate_window(std::size_t bytes, std::int64_t parts) const;

  /// As NcclComm::begin_step().
  void begin_step(std::uint64_t step) const;
  /// As NcclComm::end_step().
  void end_step() const;
  /// Ends all groups split from the same root, on all ranks of this process and, with a Bootstrap, of the
  /// job: kernels stop waiting, with wrong data, and synchronize() and later calls throw Error(peer_failed)
  /// naming this rank (of the root group) and `reason`. The first abort wins. Any thread.
  void abort(std::string_view reason) noexcept;
  /// Waits for the stream, but not forever. Busy for 100 ms, then the thread sleeps between polls.
  /// @throws Error(peer_failed) once any rank failed; Error(timeout) past the timeout, naming the ranks that
  /// did not come; Error(out_of_step) if ranks made different calls; what CUDA reports.
  void synchronize(Stream stream) const;
  /// The same for what stood before the event when it was recorded.
  void synchronize(const Event& event) const;

  /// Returns queue(channel), which queues a kernel of this library on `stream` that is `operation`, a string
  /// literal, and reaches the peers by `channel`. All ranks call it. Only with windows. @throws
  /// Error(peer_failed) once any rank failed; what `queue` throws, which ends the group, unless hosts meet
  /// and it throws on all ranks.
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
