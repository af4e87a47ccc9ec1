// SPDX-License-Identifier: Apache-2.0
// What stands behind a PeerComm: its group, what all groups of a rank share, and what all groups of a root.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

#include "comm/meeting.hpp"
#include "comm/timeout.hpp"
#include "cuda/comm/fail_everywhere.hpp"
#include "cuda/comm/peer_channel.hpp"
#include "cuda/comm/peer_hosts.hpp"
#include "cuda/comm/rank_progress.hpp"

namespace helix::cuda {

using comm::Clock;
using comm::milliseconds;

/// What kernels and the host of one rank tell each other; host memory.
struct PeerReport {
  PeerFailure failure;
  std::uint32_t abort = 0;
};

/// One rank of this process, in all of its groups.
struct PeerRank {
  PeerRank(int number, int on_device);

  int root_rank;
  int device;
  PinnedBuffer report;  // a PeerReport
  Buffer stop;          // a PeerStop
  RankProgress progress;
  std::mutex mutex;
  std::vector<std::vector<int>> groups;  // root ranks of each group, by PeerWaits::group

  PeerReport& host() const { return *reinterpret_cast<PeerReport*>(report.data()); }
  /// What a kernel of this rank recorded, if anything.
  const PeerFailure* failure() const;
};

/// All groups of one root that live in this process.
struct PeerFamily {
  std::mutex mutex;
  std::atomic<bool> has_failed = false;
  std::string failure;
  std::vector<std::shared_ptr<PeerRank>> ranks;  // of this process
  std::shared_ptr<comm::Root> root;              // of threads: where their hosts meet
  std::optional<comm::Bootstrap> bootstrap;      // of processes
  std::vector<NcclComm> nccl;                    // of the root group, to end it
  milliseconds timeout{0};

  /// Longest that a host waits for a stream: the kernels on it come first.
  milliseconds limit() const;
  /// Ends all waits of this process. The first failure wins.
  void fail(const std::string& text) noexcept;
  void throw_if_failed();
  /// Where threads have failed to meet: ends the waits of their kernels too.
  void fail_with_hosts() noexcept;
  /// "; rank 2 is behind: its call 7 was all_reduce, this rank made 8" or nothing.
  std::string laggards(const PeerRank& own) const;
};

struct PeerComm::State {
  std::shared_ptr<PeerFamily> family;
  std::shared_ptr<PeerRank> own;
  std::shared_ptr<PeerHosts> hosts;
  std::optional<NcclComm> nccl;
  std::vector<int> root_ranks;
  int rank = 0;
  int ranks_a_device = 1;  // most ranks of the root that share one
  std::shared_ptr<const PeerRange> range;
  PeerChannel channel;

  int size() const { return static_cast<int>(root_ranks.size()); }
  bool has_windows() const { return hosts->why_apart().empty(); }
  /// Lays the channels of the group into `memory`, of channel_bytes(); null: allocates that. Collective.
  void open_channel(std::shared_ptr<const PeerRange> memory = nullptr);

  /// @throws the failure of the family, or what a kernel of this rank recorded, after ending the family.
  void expect_no_failure() const;
  /// Notes what is called next. @throws as expect_no_failure().
  void begin(const char* operation) const;
  /// The same of what needs messages. @throws Error(unsupported) where nothing carries them.
  void begin_message(const char* operation) const;
  /// @throws Error(unsupported) where nothing carries messages, alike on all ranks.
  void expect_transport() const;
  /// Whether a message of `bytes` goes over NCCL.
  bool is_for_nccl(std::int64_t bytes) const;
  /// Channels for messages of `bytes` in all.
  int blocks_for(std::int64_t bytes) const;

  /// @throws what has failed over NCCL, after ending the family. What NCCL aborts seems to succeed: to be
  /// called once work has ended too.
  void check_nccl() const;

  /// Ends the family, and with a Bootstrap the job.
  void fail_everywhere(std::string_view reason) const noexcept {
    cuda::fail_everywhere(*family, own->root_rank, reason);
  }
  /// Throws what a kernel recorded, after ending the family.
  [[noreturn]] void throw_failure(const PeerFailure& failure) const;
};

/// Bytes of the channels of a group of `size` ranks, of whose root `ranks_a_device` share a device.
std::int64_t channel_bytes(int size, int ranks_a_device);

/// From this size on NCCL is used where it is there.
inline constexpr std::int64_t kNcclBytes = 1 << 20;

}  // namespace helix::cuda
