// SPDX-License-Identifier: Apache-2.0
// The memory of a group's channels, and how failures are found and reported.
#include "cuda/comm/peer_state.hpp"

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>

#include <helix/integers.hpp>

#include "comm/bootstrap_wait.hpp"
#include "comm/rank_names.hpp"
#include "cuda/comm/nccl_state.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

constexpr int kChannels = 64;                     // channels of a GPU, shared by its ranks
constexpr int kSharedBlocks = 128;                // of waiting kernels, all ranks on one large GPU
constexpr std::int64_t kPiecesBytes = 128 << 10;  // of a channel's slots of one parity, all senders
constexpr std::int64_t kBlockBytes = 8 << 10;     // bytes that a block moves before another one helps
constexpr std::int64_t kFlaggedWords = 2048;      // of a block's slots of one parity, all senders

/// How much longer the host waits than the kernels, which record the peer that they waited for.
constexpr milliseconds kRecordGrace{500};
/// If a kernel stopped because a peer gave up or the group was aborted: how long to wait for the report of
/// that failure.
constexpr milliseconds kCauseGrace{500};

/// Offsets in bytes of the parts of a channel window, which begins with the poison words.
struct ChannelLayout {
  std::int64_t channels, piece, most_flagged_words, counts, flagged_word_counts, flags, slots, sealed,
      flagged_words, bytes;

  ChannelLayout(std::int64_t size, int ranks_a_device)
      : channels(larger<std::int64_t>(2, kChannels / ranks_a_device)),
        piece(size == 1 ? kMinPieceBytes
                        : larger(kMinPieceBytes, kPiecesBytes / size / kMinPieceBytes * kMinPieceBytes)),
        most_flagged_words(kFlaggedWords / size),
        counts(kMaxPeers * static_cast<std::int64_t>(sizeof(std::uint32_t))),
        flagged_word_counts(counts + channels * size * 4),
        flags(round_up(flagged_word_counts + kMaxFlaggedWordBlocks * 4, std::int64_t{256})),
        slots(round_up(flags + channels * 2 * size * 8, std::int64_t{256})),
        sealed(slots + channels * 2 * size * piece),
        flagged_words(sealed + channels * 2 * size * piece),
        bytes(flagged_words + kMaxFlaggedWordBlocks * 2 * size * most_flagged_words * 8) {}
};

/// Most blocks of a waiting kernel of one of `ranks` ranks on `device`: those of all ranks fit there at once,
/// one per SM.
int most_waiting_blocks(int device, int ranks) {
  int num_sms = 0;
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  return std::max(2, std::min(kSharedBlocks, num_sms) / ranks);
}

}  // namespace

PeerRank::PeerRank(int number, int on_device) : root_rank(number), device(on_device) {
  const DeviceScope scope(device);
  report = PinnedBuffer(sizeof(PeerReport));
  stop = Buffer(sizeof(PeerStop));
}

const PeerFailure* PeerRank::failure() const {
  const PeerFailure& failure = host().failure;
  const auto is_complete = std::atomic_ref(host().failure.is_complete).load(std::memory_order_acquire);
  return is_complete == 0 ? nullptr : &failure;
}

milliseconds PeerFamily::limit() const {
  return timeout + kRecordGrace + (bootstrap ? comm::kWatchGrace : milliseconds(0));
}

void PeerFamily::fail(const std::string& text) noexcept {
  std::vector<NcclComm> to_abort;
  std::string own_text;
  std::string hosts_text;
  try {
    own_text = text;
    hosts_text = text;
  } catch (...) {
    // Out of memory for the text: still end all waits.
  }
  {
    const std::lock_guard lock(mutex);
    if (!has_failed) {
      failure.swap(own_text);
      has_failed.store(true, std::memory_order_release);
    }
    to_abort.swap(nccl);
  }
  for (const auto& rank : ranks) std::atomic_ref(rank->host().abort).store(1, std::memory_order_release);
  if (root) {
    const std::lock_guard lock(root->mutex);
    root->fail(std::move(hosts_text));
  }
  // The ranks of this process are one family of NCCL's. If there is a Bootstrap, it knows already.
  if (!to_abort.empty()) to_abort.front().state_->family->fail(text);
}

void PeerFamily::throw_if_failed() {
  if (has_failed.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex);
    throw Error(ErrorCode::peer_failed, failure.empty() ? comm::kUnnamedFailure : failure.c_str());
  }
  if (root && root->has_failed.load(std::memory_order_acquire)) {
    const std::lock_guard lock(root->mutex);
    root->throw_if_failed();
  }
}

void PeerFamily::fail_with_hosts() noexcept {
  if (!root || !root->has_failed.load(std::memory_order_acquire)) return;
  std::string text;
  try {
    const std::lock_guard lock(root->mutex);
    text = root->failure;
  } catch (...) {
    // Out of memory for the text: the family fails without it.
  }
  fail(text);
}

std::string PeerFamily::laggards(const PeerRank& own) const {
  std::ostringstream text;
  for (const auto& rank : ranks) name_if_behind(text, rank->root_rank, rank->progress, own.progress.made());
  return text.str();
}

std::int64_t channel_bytes(int size, int ranks_a_device) {
  return ChannelLayout(size, ranks_a_device).bytes;
}

void PeerComm::State::open_channel(std::shared_ptr<const PeerRange> memory) {
  const ChannelLayout layout(size(), ranks_a_device);
  range = memory ? std::move(memory) : hosts->allocate(static_cast<std::size_t>(layout.bytes), 16);
  channel.window = range->part(0);
  channel.flags = layout.flags;
  channel.slots = layout.slots;
  channel.sealed = layout.sealed;
  channel.piece = layout.piece;
  channel.counts = reinterpret_cast<std::uint32_t*>(range->part(rank) + layout.counts);
  channel.channels = static_cast<int>(layout.channels);
  channel.flagged_words = layout.flagged_words;
  channel.most_flagged_words = layout.most_flagged_words;
  channel.flagged_word_counts =
      reinterpret_cast<std::uint32_t*>(range->part(rank) + layout.flagged_word_counts);
  PeerWaits& waits = channel.waits;
  waits.failure = &own->host().failure;
  waits.abort = &own->host().abort;
  waits.stop = reinterpret_cast<PeerStop*>(own->stop.data());
  waits.timeout_ns = static_cast<std::uint64_t>((family->limit() - kRecordGrace).count()) * 1'000'000;
  waits.poison = reinterpret_cast<std::uint32_t*>(range->part(0));
  waits.stride = range->stride();
  waits.rank = rank;
  waits.size = size();
  waits.most_blocks = ranks_a_device == 1 ? 0 : most_waiting_blocks(own->device, ranks_a_device);
  const std::lock_guard lock(own->mutex);
  const auto known = std::ranges::find(own->groups, root_ranks);
  waits.group = static_cast<std::uint32_t>(known - own->groups.begin());
  if (known == own->groups.end()) own->groups.push_back(root_ranks);
}

void PeerComm::State::expect_no_failure() const {
  const PeerFailure* const failure = own->failure();  // kernels that gave up seem to succeed
  family->throw_if_failed();
  if (failure != nullptr) throw_failure(*failure);
}

void PeerComm::State::begin(const char* operation) const {
  expect_no_failure();
  if (family->bootstrap) family->bootstrap->begin_operation(operation);
  own->progress.begin(operation);
}

void PeerComm::State::begin_message(const char* operation, const Stream& stream) const {
  (void)stream.handle();
  begin(operation);
  expect_transport();
}

void PeerComm::State::expect_transport() const {
  HELIX_EXPECTS(has_windows() || nccl, ErrorCode::unsupported, "PeerComm: ", hosts->why_apart(),
                ", and NCCL is not to be used, or has no GPU for each rank");
}

bool PeerComm::State::is_for_nccl(std::int64_t bytes) const {
  return nccl && (!has_windows() || bytes >= kNcclBytes);
}

int PeerComm::State::blocks_for(std::int64_t bytes) const {
  return static_cast<int>(std::clamp<std::int64_t>(ceil_div(bytes, kBlockBytes), 1, channel.channels));
}

void PeerComm::State::check_nccl() const {
  if (!nccl) return;
  try {
    nccl->check();
  } catch (const Error& error) {  // NCCL's own family, and the job if there is a Bootstrap, already know
    const std::string text = error.what();
    family->fail(error.code() == ErrorCode::peer_failed ? text
                                                        : comm::Root::failure_of(own->root_rank, text));
    throw;
  }
}

void PeerComm::State::throw_failure(const PeerFailure& failure) const {
  std::vector<int> group;
  {
    const std::lock_guard lock(own->mutex);
    group = own->groups.at(failure.group);
  }
  if (failure.fault == PeerFault::gave_up || failure.fault == PeerFault::aborted) {
    const Clock::time_point deadline = Clock::now() + kCauseGrace;
    while (Clock::now() < deadline) {
      family->throw_if_failed();
      // The family is told only after NCCL's part has ended, which may take seconds.
      if (family->bootstrap) family->bootstrap->check();
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  std::vector<int> missing;
  for (std::size_t i = 0; i < group.size(); ++i)
    if (failure.missing >> i & 1) missing.push_back(group[i]);
  const int peer = group.at(failure.peer);
  if (missing.empty()) missing.push_back(peer);
  std::ostringstream text;
  const std::string_view last = own->progress.last_call();
  ErrorCode code = ErrorCode::timeout;
  switch (failure.fault) {
    case PeerFault::out_of_step:
      code = ErrorCode::out_of_step;
      text << "rank " << peer << " is out of step with rank " << own->root_rank << ": its message says "
           << failure.seen << ", expected " << failure.wanted
           << ": a rank skipped or repeated a step, or their calls differ; the last call was " << last;
      break;
    case PeerFault::gave_up:
      text << "rank " << peer << " gave up waiting for other ranks; rank " << own->root_rank
           << " waited for it in " << last;
      break;
    default:
      text << comm::rank_names(missing) << " did not come within " << comm::seconds(family->timeout)
           << " s; rank " << own->root_rank << " waited in " << last;
      break;
  }
  text << family->laggards(*own);
  fail_everywhere(text.str());
  throw Error(code, text.str());
}

}  // namespace helix::cuda
