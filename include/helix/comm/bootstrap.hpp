// SPDX-License-Identifier: Apache-2.0
// comm::Bootstrap: how the processes of a job find each other before NCCL, and learn when one of them fails.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/error.hpp>

namespace helix::comm {

/// Where a process stands in its job, and how it finds the others.
struct HELIX_API BootstrapOptions {
  int rank = 0;
  int size = 1;

  /// The process's number among those of its machine, usually the one of its device.
  int local_rank = 0;

  /// Host name or IP address of rank 0, which listens there and nowhere else: "localhost" and 127.* keep the
  /// job to this machine. Where a host name resolves to 127.* alone, as Debian's /etc/hosts makes a machine's
  /// own name do, rank 0 listens on all interfaces instead, unless is_one_machine.
  std::string address = "127.0.0.1";
  /// Whether all ranks are known to be on one machine.
  bool is_one_machine = false;
  /// Where rank 0 listens if not at `address`, which may not be its machine's own (NAT, a container's port, a
  /// cluster's service): "0.0.0.0" for all interfaces. Empty: at `address`.
  std::string listen_address = {};
  /// TCP port, 1 to 65535, on which rank 0 listens until all are there.
  int port = 29500;

  /// What only ranks of this job know, alike on all of them; may be empty. A process that does not know it is
  /// a stranger: it never ends the job nor counts as a rank. Both sides show that they know it by an HMAC
  /// over the other's random challenge, so that it is not sent and a recorded hello is of no use later. It
  /// keeps out strangers and other jobs; who alters the traffic of accepted connections is not kept out.
  std::string secret = {};
  /// Name of the job, alike on all ranks; may be empty. Processes of another job are strangers.
  std::string job = {};

  /// A hash of what must be equal on all ranks (model, topology, options). If ranks of the job differ, all
  /// are refused.
  std::uint64_t config_hash = 0;

  /// After which a rank that is silent, or keeps another waiting, counts as dead: all know within twice it.
  std::chrono::milliseconds timeout{60'000};
  /// Time between two heartbeats, a quarter of the timeout at most.
  std::chrono::milliseconds heartbeat{200};

  /// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun sets them; else what Open
  /// MPI (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK) or Slurm (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID) set;
  /// else a job of one process. MASTER_ADDR may be absent where the launcher says that all ranks are on one
  /// machine. Under torchrun the port is MASTER_PORT + 1, since it listens on MASTER_PORT itself. The job is
  /// named by what the launcher calls it: TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, or SLURM_JOB_ID and
  /// SLURM_STEP_ID. HELIX_JOB_SECRET is the secret, or HELIX_JOB_SECRET_FILE names the file that holds it;
  /// HELIX_LISTEN_ADDR is the listen_address.
  /// @throws Error(invalid_argument) naming the variable that is missing, empty or no number in range,
  /// Error(io) naming the file of the secret that cannot be read.
  static BootstrapOptions from_environment();
};

/// A rank's end of a TCP star around rank 0. Two connections to each rank: one for broadcast, gather and
/// barrier, and one for heartbeats that a thread of each process sends and watches.
///
/// A rank has failed when its connection closes without a farewell, when it is silent for the timeout, when
/// it calls fail(), or when it keeps another rank waiting for the timeout: it waits for nobody, at no later
/// step than that one's, and has stood still for half of the timeout or is steps behind; it has left before
/// that one's operation; or, where there is neither, it waits too, but in an earlier step. A process that was
/// stopped itself, or its machine, starts to count anew when it goes on.
/// Rank 0 sees the failures of others and tells all; the others see rank 0's. Strangers at the rendezvous
/// are heard beside the ranks, each for 5 s at most, and are ignored; after it nobody listens. Not encrypted:
/// for networks that are trusted. All machines have the same byte order. Copies are the same end.
class HELIX_API Bootstrap {
 public:
  /// Connects all ranks. Collective; rank 0 serves, the others connect until the deadline.
  /// @throws Error(invalid_argument) if rank, size (at most kMaxRanks), port or times are out of range;
  /// Error(timeout) naming the ranks that are missing; Error(invalid_argument) on all ranks if sizes,
  /// ranks or configurations contradict each other, and on this one if rank 0 is of another job;
  /// Error(peer_failed) naming a rank that leaves again; Error(io) if rank 0 cannot listen.
  explicit Bootstrap(const BootstrapOptions& options);
  // With copies declared there are no moves, which would leave a handle to nothing.
  Bootstrap(const Bootstrap&) = default;
  Bootstrap& operator=(const Bootstrap&) = default;

  /// This process's rank in the job, of size().
  int rank() const;
  int size() const;
  /// Its rank among those of its machine: which GPU it takes.
  int local_rank() const;
  /// How long another rank is waited for; all know within twice as long that it has failed.
  std::chrono::milliseconds timeout() const;

  /// Gives every rank the `bytes` of rank 0, as many everywhere. Collective, blocks; one thread at a time.
  /// @throws Error(timeout), Error(peer_failed), Error(invalid_argument) on ranks that expect another size. A
  /// rank on which a call has thrown throws the same from then on, in gather() and barrier() too: what is
  /// left of it lies between the ranks.
  void broadcast(std::span<std::byte> bytes);
  /// Returns all ranks' bytes by rank on rank 0, and nothing on the others; each rank may give another number
  /// of bytes, up to 1 GiB. Collective, blocks; one thread at a time. @throws Error(timeout),
  /// Error(peer_failed), Error(invalid_argument) on rank 0 where a rank gives more.
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> bytes);
  /// Returns when all ranks have called it. Collective, blocks; throws as gather() and broadcast() do.
  void barrier();

  /// Tells the others' watch at which step this rank is; `step` must not decrease. Cheap, any thread.
  void set_step(std::uint64_t step);
  /// Tells the others' watch what this rank does next; `operation` is a string literal, "" where nobody
  /// knows, as in a step that is replayed. Cheap, any thread.
  void begin_operation(const char* operation);
  /// Begins a wait for other ranks, which must not outlast the timeout at one step and operation.
  void begin_wait();
  /// Ends the wait that begin_wait() began.
  void end_wait();

  /// Calls `callback` once, with an Error(peer_failed) that names rank, operation and step, from the thread
  /// that learns of the failure, or at once if the job has failed already. It must not throw. Where no memory
  /// is left for the message it names nobody.
  void on_failure(std::function<void(const Error&)> callback);
  /// Tells all ranks that this one has failed, calls what on_failure() left, and returns when they have been
  /// told, in a second at most beside those callbacks, so that the process may end next. Never throws; the
  /// first failure wins.
  void fail(std::string_view reason) noexcept;
  /// Whether any rank of the job has failed, as far as this one knows.
  bool has_failed() const;
  /// Throws the failure, an Error(peer_failed), if there is one.
  void check() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace helix::comm
