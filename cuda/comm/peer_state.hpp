// SPDX-License-Identifier: Apache-2.0
// The state of a PeerComm: its group, what all groups of a rank share, and what all groups of a root share.
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

/// What kernels and the host of one rank tell each other. Host memory.
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
  std::vector<std::vector<int>> groups;  // by PeerWaits::group: the root ranks of such groups

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
  std::shared_ptr<comm::Root> root;              // if ranks are threads: where their hosts meet
  std::optional<comm::Bootstrap> bootstrap;      // if ranks are processes
  std::vector<NcclComm> nccl;                    // of the root group, to abort it
  milliseconds timeout{0};

  /// Longest that a host waits for a stream. Longer than one wait of a kernel, which then times out first; a
  /// stream with several waits, or long work, may take longer than each of them.
  milliseconds limit() const;
  /// Ends all waits in this process. The first failure wins.
  void fail(const std::string& text) noexcept;
  void throw_if_failed();
  /// Called after threads have failed to meet: ends the waits of their kernels too.
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
  int ranks_a_device = 1;  // most ranks of the root on one device
  std::shared_ptr<const PeerRange> range;
  PeerChannel channel;

  int size() const { return static_cast<int>(root_ranks.size()); }
  bool has_windows() const { return hosts->why_apart().empty(); }
  /// Places the channels of the group in `memory`, of channel_bytes(); allocates it if null. Collective.
  void open_channel(std::shared_ptr<const PeerRange> memory = nullptr);

  /// @throws the failure of the family, or what a kernel of this rank recorded, after ending the family.
  void expect_no_failure() const;
  /// Records the next call. @throws what expect_no_failure() throws.
  void begin(const char* operation) const;
  /// As begin(), for a call that sends messages. @throws Error(invalid_argument), before the call is
  /// recorded, if `stream` names no queue; Error(unsupported) if there is no transport.
  void begin_message(const char* operation, const Stream& stream) const;
  /// @throws Error(unsupported), on all ranks, if there is no transport: neither windows nor NCCL.
  void expect_transport() const;
  /// Whether a message of `bytes` goes over NCCL.
  bool is_for_nccl(std::int64_t bytes) const;
  /// The number of channels for messages of `bytes` in total.
  int blocks_for(std::int64_t bytes) const;

  /// @throws a failure of NCCL, after ending the family. Work that NCCL aborts seems to succeed, so call this
  /// after work has ended, too.
  void check_nccl() const;

  /// Ends the family, and the job if there is a Bootstrap.
  void fail_everywhere(std::string_view reason) const noexcept {
    cuda::fail_everywhere(*family, own->root_rank, reason);
  }
  /// Throws what a kernel recorded, after ending the family.
  [[noreturn]] void throw_failure(const PeerFailure& failure) const;
};

/// Bytes of the channels of a group of `size` ranks, if up to `ranks_a_device` ranks of its root share a
/// device.
std::int64_t channel_bytes(int size, int ranks_a_device);

/// Messages of at least this many bytes use NCCL if there is one.
inline constexpr std::int64_t kNcclBytes = 1 << 20;

}  // namespace helix::cuda
