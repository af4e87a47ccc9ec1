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

/// Place of a process in its job, and how it finds the others.
struct HELIX_API BootstrapOptions {
  int rank = 0;
  int size = 1;

  /// Rank of the process on its machine, usually the number of its device.
  int local_rank = 0;

  /// Host name or IP address of rank 0, which listens on that address only: "localhost" and 127.* keep the
  /// job on this machine. If a host name resolves to 127.* alone, as Debian's /etc/hosts makes a machine's
  /// own name do, rank 0 listens on all interfaces instead, unless is_one_machine.
  std::string address = "127.0.0.1";
  /// Whether all ranks are known to be on one machine.
  bool is_one_machine = false;
  /// Address on which rank 0 listens if not `address`, which may not be its machine's own (NAT, a container's
  /// port, a cluster's service). "0.0.0.0" stands for all interfaces. Empty: `address`.
  std::string listen_address = {};
  /// TCP port, 1 to 65535, on which rank 0 listens until all ranks have connected.
  int port = 29500;

  /// Secret that only ranks of this job know, equal on all of them; may be empty. A process that does not
  /// know it is a stranger, which neither ends the job nor counts as a rank. Both sides show that they know
  /// the secret by an HMAC over the other's random challenge, so that it is not sent, and a recorded hello is
  /// of no use later. It keeps out strangers and other jobs, but nobody who alters the traffic of accepted
  /// connections.
  std::string secret = {};
  /// Name of the job, equal on all ranks; may be empty. Processes of another job are strangers.
  std::string job = {};

  /// Hash of what must be equal on all ranks (model, topology, options). If it differs between ranks of the
  /// job, all are refused.
  std::uint64_t config_hash = 0;

  /// Time after which a rank that is silent, or keeps another waiting, counts as dead. All ranks know within
  /// twice this time.
  std::chrono::milliseconds timeout{60'000};
  /// Time between two heartbeats, at most a quarter of the timeout.
  std::chrono::milliseconds heartbeat{200};

  /// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun sets them; else what Open
  /// MPI (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK) or Slurm (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID) set;
  /// else returns a job of one process. MASTER_ADDR may be absent if the launcher says that all ranks are on
  /// one machine. Under torchrun the port is MASTER_PORT + 1, because torchrun itself listens on MASTER_PORT.
  /// The job's name is the launcher's: TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, or SLURM_JOB_ID and
  /// SLURM_STEP_ID. The secret is HELIX_JOB_SECRET, or the content of the file that HELIX_JOB_SECRET_FILE
  /// names. HELIX_LISTEN_ADDR is the listen_address.
  /// @throws Error(invalid_argument) naming the variable that is missing, empty or not a number in range;
  /// Error(io) naming the secret's file if it cannot be read.
  static BootstrapOptions from_environment();
};

/// A rank's end of a TCP star around rank 0. Rank 0 has two connections to each other rank: one for
/// broadcast, gather and barrier, and one for heartbeats, which a thread of each process sends and watches.
///
/// A rank has failed if its connection closes without a farewell, if it is silent for the timeout, if it
/// calls fail(), or if another rank has waited for the timeout and this one
/// - waits for nobody, is at no later step, and has stood still for half of the timeout or is steps behind;
/// - has left before that rank's operation;
/// - where no rank did either: waits too, but in an earlier step.
///
/// If a process or its machine was stopped, its times count anew when it goes on. Rank 0 sees the failures of
/// the others and tells all; the others see rank 0's. At the rendezvous strangers are heard alongside the
/// ranks and ignored. Each leaves after 5 s, or when there are so many that rank 0 has no room for a newer
/// connection: it hears up to 256 besides the job's own, fewer where its limit of open files is near. A rank
/// that is sent away with them connects again. After the rendezvous nobody listens. Traffic is not encrypted:
/// for trusted networks. All machines must have the same byte order. Copies are the same end.
class HELIX_API Bootstrap {
 public:
  /// Connects all ranks. Collective; rank 0 serves, the others connect until the deadline.
  /// @throws Error(invalid_argument) if rank, size (at most kMaxRanks), port or times are out of range;
  /// Error(timeout) naming the missing ranks; Error(invalid_argument) on all ranks if sizes, ranks or
  /// configurations contradict each other, and on this rank if rank 0 is of another job; Error(peer_failed)
  /// naming a rank that leaves again; Error(io) if rank 0 cannot listen or accept, or, on all ranks that come
  /// soon, if its limit of open files (ulimit -n) leaves fewer than two for each other rank and eight more.
  explicit Bootstrap(const BootstrapOptions& options);
  // With copies declared there are no moves, which would leave a handle to nothing.
  Bootstrap(const Bootstrap&) = default;
  Bootstrap& operator=(const Bootstrap&) = default;

  /// This process's rank in the job, from 0 to size() - 1.
  int rank() const;
  /// Number of ranks in the job.
  int size() const;
  /// This process's rank on its machine, for the choice of its GPU.
  int local_rank() const;
  /// How long a rank waits for another. All ranks know within twice this time that a rank has failed.
  std::chrono::milliseconds timeout() const;

  /// Copies the `bytes` of rank 0 to every rank; sizes must be equal on all ranks. Collective, blocks; one
  /// thread at a time.
  /// @throws Error(timeout), Error(peer_failed), Error(invalid_argument) on ranks that expect another size.
  /// Once a call has thrown on a rank, broadcast(), gather() and barrier() throw the same there, because the
  /// rest of the failed transfer still lies between the ranks.
  void broadcast(std::span<std::byte> bytes);
  /// Returns all ranks' bytes, by rank, on rank 0 and nothing on the others. Each rank may give another
  /// number of bytes, up to 1 GiB. Collective, blocks; one thread at a time.
  /// @throws Error(timeout), Error(peer_failed), Error(invalid_argument) on rank 0 if a rank gives more.
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> bytes);
  /// Returns when all ranks have called it. Collective, blocks. @throws what gather() and broadcast() throw.
  void barrier();

  /// Tells the other ranks' watch which step this rank is at; `step` must not decrease. Cheap, any thread.
  void set_step(std::uint64_t step);
  /// Tells the other ranks' watch what this rank does next. `operation` is a string literal; "" means
  /// unknown, as in a replayed step. Cheap, any thread.
  void begin_operation(const char* operation);
  /// Begins a wait for other ranks and returns its number. It must not outlast the timeout at one step and
  /// operation. Waits of several threads may overlap; the watch sees the one that began first. Any thread.
  std::uint64_t begin_wait();
  /// Ends the wait that begin_wait() returned; on any thread.
  void end_wait(std::uint64_t wait);

  /// Calls `callback` once with an Error(peer_failed) that names rank, operation and step: on the thread that
  /// learns of the failure, or at once if the job has failed already. The callback must not throw. If no
  /// memory is left for the message, it names nobody.
  void on_failure(std::function<void(const Error&)> callback);
  /// Tells all ranks that this one has failed, and calls the callbacks of on_failure(). Returns when the
  /// ranks have been told, after at most a second in addition to the callbacks, so that the process may end
  /// next. Never throws; the first failure wins.
  void fail(std::string_view reason) noexcept;
  /// Whether any rank of the job has failed, as far as this rank knows.
  bool has_failed() const;
  /// Throws the failure, an Error(peer_failed), if there is one.
  void check() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace helix::comm
