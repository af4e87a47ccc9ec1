// SPDX-License-Identifier: Apache-2.0
// LocalComm: ranks meet under one mutex, and the last to arrive moves the data for all.
#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>

#include "cpu/reduce.hpp"

namespace helix::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPieceElements = 8192;         // of a reduction; 32 KB an input
constexpr std::int64_t kPieceBytes = 64 * 1024;       // of a copy
constexpr std::int64_t kSharedMoveBytes = 512 << 10;  // from here on waking the other ranks to help pays

enum class Operation {
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  all_to_all_v,
  broadcast,
  send,
  recv,
  barrier,
  split
};

std::string_view to_string(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::all_gather:
      return "all_gather";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::all_to_all_v:
      return "all_to_all_v";
    case Operation::broadcast:
      return "broadcast";
    case Operation::send:
      return "send";
    case Operation::recv:
      return "recv";
    case Operation::barrier:
      return "barrier";
    case Operation::split:
      return "split";
  }
  return "unknown";
}

bool is_reduction(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce_scatter;
}

/// What one rank brings to a meeting. Lives on its stack until it leaves.
struct Call {
  Operation operation = Operation::barrier;
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;  // elements of a reduction, else bytes
  DType dtype = DType::f32;
  int root = 0;
  const std::int64_t* send_bytes = nullptr;  // all_to_all_v
  const std::int64_t* recv_bytes = nullptr;
  int color = 0;  // split
  int key = 0;

  std::string describe() const {
    std::ostringstream text;
    text << to_string(operation);
    if (is_reduction(operation)) {
      text << " of " << count << " x " << helix::to_string(dtype);
    } else if (operation != Operation::all_to_all_v && operation != Operation::barrier &&
               operation != Operation::split) {
      text << " of " << count << " bytes";
    }
    if (operation == Operation::broadcast) text << " from group rank " << root;
    return text.str();
  }
};

std::byte* at(void* base, std::int64_t offset) {
  return static_cast<std::byte*>(base) + offset;
}
const std::byte* at(const void* base, std::int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

void copy_bytes(void* target, const void* source, std::int64_t bytes) {
  // A rank's own slice may already be in place.
  if (bytes > 0 && target != source) std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

std::int64_t pieces(std::int64_t count, std::int64_t piece) {
  return (count + piece - 1) / piece;
}

/// The data movement of one meeting, cut into units that any rank may do, in any order. A unit reads
/// everything that it overwrites, so `in == out` needs no scratch.
class Move {
 public:
  Move() = default;
  explicit Move(const std::vector<Call*>& calls) : calls_(calls.data()), size_(std::ssize(calls)) {
    const Call& call = *calls.front();
    switch (call.operation) {
      case Operation::all_reduce:
        plan(1, call.count, kPieceElements);
        break;
      case Operation::reduce_scatter:
        plan(size_, call.count, kPieceElements);
        break;
      case Operation::all_gather:
        plan(size_, call.count, kPieceBytes);
        break;
      case Operation::all_to_all:
        plan(size_ * size_, call.count, kPieceBytes);
        break;
      case Operation::all_to_all_v:
        units_ = size_ * size_;
        break;
      case Operation::broadcast:
      case Operation::send:
      case Operation::recv:
        plan(1, call.count, kPieceBytes);
        break;
      case Operation::barrier:
      case Operation::split:
        break;
    }
  }

  std::int64_t units() const { return units_; }

  /// Bytes written, over all ranks.
  std::int64_t total_bytes() const {
    const Call& call = *calls_[0];
    switch (call.operation) {
      case Operation::all_reduce:
      case Operation::reduce_scatter:
        return size_ * call.count * static_cast<std::int64_t>(helix::size_bytes(call.dtype));
      case Operation::all_gather:
      case Operation::all_to_all:
        return size_ * size_ * call.count;
      case Operation::all_to_all_v: {
        std::int64_t total = 0;
        for (std::int64_t r = 0; r < size_; ++r) {
          for (std::int64_t peer = 0; peer < size_; ++peer) total += calls_[r]->send_bytes[peer];
        }
        return total;
      }
      case Operation::broadcast:
        return (size_ - 1) * call.count;
      default:
        return call.count;
    }
  }

  void run(std::int64_t unit) const {
    const std::int64_t lane = units_a_lane_ == 0 ? unit : unit / units_a_lane_;
    const Call& call = *calls_[0];
    const std::int64_t begin = units_a_lane_ == 0 ? 0 : (unit % units_a_lane_) * piece_;
    const std::int64_t count = std::min(piece_, call.count - begin);
    switch (call.operation) {
      case Operation::all_reduce:
        reduce(begin, begin, count, 0, size_);
        break;
      case Operation::reduce_scatter:
        reduce(lane * call.count + begin, begin, count, lane, lane + 1);
        break;
      case Operation::all_gather:
        for (std::int64_t r = 0; r < size_; ++r) {
          copy_bytes(at(calls_[r]->out, lane * call.count + begin), at(calls_[lane]->in, begin), count);
        }
        break;
      case Operation::all_to_all: {
        const std::int64_t from = lane / size_;
        const std::int64_t to = lane % size_;
        copy_bytes(at(calls_[to]->out, from * call.count + begin),
                   at(calls_[from]->in, to * call.count + begin), count);
        break;
      }
      case Operation::all_to_all_v: {
        const std::int64_t from = lane / size_;
        const std::int64_t to = lane % size_;
        std::int64_t source = 0;
        std::int64_t target = 0;
        for (std::int64_t r = 0; r < to; ++r) source += calls_[from]->send_bytes[r];
        for (std::int64_t r = 0; r < from; ++r) target += calls_[to]->recv_bytes[r];
        copy_bytes(at(calls_[to]->out, target), at(calls_[from]->in, source), calls_[from]->send_bytes[to]);
        break;
      }
      case Operation::broadcast:
        for (std::int64_t r = 0; r < size_; ++r) {
          copy_bytes(at(calls_[r]->out, begin), at(calls_[call.root]->out, begin), count);
        }
        break;
      case Operation::send:
      case Operation::recv:
        copy_bytes(at(calls_[1]->out, begin), at(calls_[0]->in, begin), count);
        break;
      case Operation::barrier:
      case Operation::split:
        break;
    }
  }

 private:
  void plan(std::int64_t lanes, std::int64_t count, std::int64_t piece) {
    piece_ = piece;
    units_a_lane_ = pieces(count, piece);
    units_ = lanes * units_a_lane_;
  }

  /// Elements [in_begin, +count) of every input, summed into [out_begin, +count) of the ranks [first, last).
  void reduce(std::int64_t in_begin, std::int64_t out_begin, std::int64_t count, std::int64_t first,
              std::int64_t last) const {
    const DType dtype = calls_[0]->dtype;
    const auto width = static_cast<std::int64_t>(helix::size_bytes(dtype));
    std::array<float, kReduceBlock> sum;
    for (std::int64_t done = 0; done < count; done += kReduceBlock) {
      const std::int64_t block = std::min<std::int64_t>(kReduceBlock, count - done);
      for (std::int64_t r = 0; r < size_; ++r) {
        add_to_sum(sum.data(), at(calls_[r]->in, (in_begin + done) * width), block, dtype, r == 0);
      }
      for (std::int64_t r = first; r < last; ++r) {
        store_sum(at(calls_[r]->out, (out_begin + done) * width), sum.data(), block, dtype);
      }
    }
  }

  Call* const* calls_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t piece_ = 0;
  std::int64_t units_a_lane_ = 0;
  std::int64_t units_ = 0;
};

/// One place where a fixed set of ranks meets, round after round: all ranks of a group, or a sender and a
/// receiver. Guarded by Root::mutex, except while `is_moving`: then `calls` and `move` are read freely and
/// change only when nobody is inside.
struct Meeting {
  explicit Meeting(std::vector<int> names)
      : root_ranks(std::move(names)), calls(root_ranks.size(), nullptr) {}

  const std::vector<int> root_ranks;  // who meets here, as named in messages
  std::vector<Call*> calls;           // null: not arrived
  std::size_t arrived = 0;
  std::uint64_t round = 0;
  bool is_moving = false;
  Move move;
  std::atomic<std::int64_t> next_unit = 0;
  int inside = 0;                       // ranks that are moving data
  std::optional<ErrorCode> error_code;  // why this meeting failed; the root has failed then too
  std::string error_text;
  std::condition_variable changed;

  std::string missing_ranks() const {
    std::ostringstream text;
    std::size_t missing = 0;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (calls[i] == nullptr) text << (missing++ == 0 ? "" : ", ") << root_ranks[i];
    }
    return (missing == 1 ? "rank " : "ranks ") + text.str();
  }

  /// The first contradiction between the calls, or nothing.
  std::optional<std::string> disagreement() const {
    std::ostringstream text;
    const Call& first = *calls.front();
    const bool is_pair = first.operation == Operation::send;
    for (std::size_t i = 1; i < calls.size(); ++i) {
      const Call& call = *calls[i];
      const bool agrees =
          call.count == first.count && (is_pair || (call.operation == first.operation &&
                                                    call.dtype == first.dtype && call.root == first.root));
      if (agrees) continue;
      text << "ranks disagree: rank " << root_ranks[0] << " calls " << first.describe() << ", rank "
           << root_ranks[i] << " calls " << call.describe()
           << "; all must make the same calls in the same order with the same sizes";
      return text.str();
    }
    if (first.operation != Operation::all_to_all_v) return std::nullopt;
    for (std::size_t from = 0; from < calls.size(); ++from) {
      for (std::size_t to = 0; to < calls.size(); ++to) {
        const std::int64_t sent = calls[from]->send_bytes[to];
        const std::int64_t expected = calls[to]->recv_bytes[from];
        if (sent == expected) continue;
        text << "all_to_all_v: rank " << root_ranks[from] << " sends " << sent << " bytes to rank "
             << root_ranks[to] << ", which expects " << expected;
        return text.str();
      }
    }
    return std::nullopt;
  }
};

/// All groups split from one create_group.
struct Root {
  std::mutex mutex;
  std::chrono::milliseconds timeout{0};
  std::atomic<bool> has_failed = false;          // written under mutex
  std::string failure;                           // "rank 2 failed: why"
  std::vector<std::weak_ptr<Meeting>> meetings;  // to wake on failure

  std::shared_ptr<Meeting> open_meeting(std::vector<int> root_ranks) {  // mutex held
    std::erase_if(meetings, [](const std::weak_ptr<Meeting>& meeting) { return meeting.expired(); });
    auto meeting = std::make_shared<Meeting>(std::move(root_ranks));
    meetings.push_back(meeting);
    return meeting;
  }

  void fail(int rank, std::string_view reason) {  // mutex held
    if (has_failed) return;
    failure = "rank " + std::to_string(rank) + " failed: " + std::string(reason);
    has_failed = true;
    for (const std::weak_ptr<Meeting>& meeting : meetings) {
      if (const auto open = meeting.lock()) open->changed.notify_all();
    }
  }

  void throw_if_failed() {  // mutex held
    if (has_failed) throw Error(ErrorCode::peer_failed, failure);
  }

  [[noreturn]] void fail_meeting(Meeting& meeting, std::size_t place, ErrorCode code,
                                 std::string text) {  // mutex held
    meeting.error_code = code;
    meeting.error_text = std::move(text);
    fail(meeting.root_ranks[place], meeting.error_text);
    throw Error(code, meeting.error_text);
  }

  /// Blocks until everybody is here and the data has moved. `prepare` is called by the last to arrive, mutex
  /// held.
  template <class Prepare>
  void meet(Meeting& meeting, std::size_t place, Call& call, Prepare&& prepare) {
    std::unique_lock lock(mutex);
    throw_if_failed();
    if (meeting.calls[place] != nullptr) {
      fail_meeting(
          meeting, place, ErrorCode::invalid_argument,
          "rank " + std::to_string(meeting.root_ranks[place]) + " calls " + call.describe() + " while its " +
              meeting.calls[place]->describe() +
              " is still waiting; use one stream for each communicator, or order the streams by events");
    }
    const std::uint64_t round = meeting.round;
    meeting.calls[place] = &call;
    if (++meeting.arrived == meeting.calls.size()) {
      if (auto text = meeting.disagreement()) {
        fail_meeting(meeting, place, ErrorCode::invalid_argument, std::move(*text));
      }
      prepare(meeting.calls);
      meeting.move = Move(meeting.calls);
      meeting.next_unit.store(0, std::memory_order_relaxed);
      meeting.is_moving = true;
      if (meeting.move.units() > 1 && meeting.move.total_bytes() >= kSharedMoveBytes)
        meeting.changed.notify_all();
      help(meeting, lock);
    } else {
      gather(meeting, place, call, round, lock);
      if (meeting.round == round && has_units(meeting)) help(meeting, lock);
    }
    // The move is bounded and reads this rank's memory: nothing may interrupt it, also not an abort.
    meeting.changed.wait(lock, [&] { return meeting.round != round; });
  }

 private:
  static bool has_units(const Meeting& meeting) {
    return meeting.is_moving && meeting.next_unit.load(std::memory_order_relaxed) < meeting.move.units();
  }

  /// Waits until the data of this round moves or has moved.
  void gather(Meeting& meeting, std::size_t place, const Call& call, std::uint64_t round,
              std::unique_lock<std::mutex>& lock) {
    const Clock::time_point deadline = Clock::now() + timeout;
    const auto moved_or_failed = [&] {
      return meeting.round != round || meeting.is_moving || meeting.error_code.has_value() || has_failed;
    };
    if (!meeting.changed.wait_until(lock, deadline, moved_or_failed)) {
      std::ostringstream text;
      text << to_string(call.operation) << ": " << meeting.missing_ranks() << " did not arrive within "
           << std::chrono::duration<double>(timeout).count() << " s; rank " << meeting.root_ranks[place]
           << " waited in " << call.describe();
      fail_meeting(meeting, place, ErrorCode::timeout, text.str());
    }
    if (meeting.round != round || meeting.is_moving) return;
    if (meeting.error_code) throw Error(*meeting.error_code, meeting.error_text);
    throw_if_failed();
  }

  /// Does units until none is left; the last to leave closes the round.
  void help(Meeting& meeting, std::unique_lock<std::mutex>& lock) {
    ++meeting.inside;
    lock.unlock();
    for (;;) {
      const std::int64_t unit = meeting.next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit >= meeting.move.units()) break;
      meeting.move.run(unit);
    }
    lock.lock();
    if (--meeting.inside > 0) return;
    std::fill(meeting.calls.begin(), meeting.calls.end(), nullptr);
    meeting.arrived = 0;
    meeting.is_moving = false;
    ++meeting.round;
    meeting.changed.notify_all();
  }
};

constexpr auto kNothingToPrepare = [](const std::vector<Call*>&) {};

void expect_count(std::string_view operation, std::string_view what, std::int64_t count) {
  HELIX_EXPECTS(count >= 0, ErrorCode::invalid_argument, operation, ": ", what, " is ", count,
                "; it must not be negative");
}

void expect_pointer(std::string_view operation, std::string_view what, const void* pointer,
                    std::int64_t count) {
  HELIX_EXPECTS(pointer != nullptr || count == 0, ErrorCode::invalid_argument, operation, ": ", what,
                " is null, but the count is ", count);
}

void expect_summable(std::string_view operation, DType dtype) {
  HELIX_EXPECTS(dtype != DType::fp8_e4m3, ErrorCode::unsupported, operation, ": cannot sum ",
                helix::to_string(dtype), "; use f32, f16 or bf16");
}

/// One rank's counts to and from each peer. Small groups keep them inside the queued task.
class PeerBytes {
 public:
  static constexpr std::size_t kInline = 32;

  PeerBytes(std::span<const std::int64_t> send, std::span<const std::int64_t> recv) : size_(send.size()) {
    if (size_ > kInline) large_ = std::make_unique_for_overwrite<std::int64_t[]>(2 * size_);
    std::copy(send.begin(), send.end(), data());
    std::copy(recv.begin(), recv.end(), data() + size_);
  }
  PeerBytes(PeerBytes&& other) noexcept : size_(other.size_), large_(std::move(other.large_)) {
    if (!large_) std::copy_n(other.small_.data(), 2 * size_, small_.data());
  }

  const std::int64_t* send() const { return large_ ? large_.get() : small_.data(); }
  const std::int64_t* recv() const { return send() + size_; }

 private:
  std::int64_t* data() { return large_ ? large_.get() : small_.data(); }

  std::size_t size_;
  std::unique_ptr<std::int64_t[]> large_;
  std::array<std::int64_t, 2 * kInline> small_;
};

}  // namespace

struct LocalComm::Group {
  std::shared_ptr<Root> root;
  std::vector<int> root_ranks;
  std::shared_ptr<Meeting> collectives;  // met on streams
  std::shared_ptr<Meeting> splits;       // met on hosts
  std::map<std::pair<int, int>, std::shared_ptr<Meeting>>
      channels;  // by (sender, receiver); guarded by root->mutex

  /// root->mutex held, or nobody else knows the root yet.
  Group(std::shared_ptr<Root> shared_root, std::vector<int> ranks)
      : root(std::move(shared_root)),
        root_ranks(std::move(ranks)),
        collectives(root->open_meeting(root_ranks)),
        splits(root->open_meeting(root_ranks)) {}

  int size() const { return static_cast<int>(root_ranks.size()); }

  void check_alive() const {
    if (!root->has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(root->mutex);
    root->throw_if_failed();
  }

  void collective(int rank, Call& call) {
    root->meet(*collectives, static_cast<std::size_t>(rank), call, kNothingToPrepare);
  }

  void transfer(int sender, int receiver, std::size_t place, Call& call) {
    std::shared_ptr<Meeting> channel;
    {
      const std::lock_guard lock(root->mutex);
      std::shared_ptr<Meeting>& known = channels[{sender, receiver}];
      if (!known) {
        known = root->open_meeting(
            {root_ranks[static_cast<std::size_t>(sender)], root_ranks[static_cast<std::size_t>(receiver)]});
      }
      channel = known;
    }
    root->meet(*channel, place, call, kNothingToPrepare);
  }

  /// Queues `call`; a group of one needs only `alone`, the copy that the operation comes down to.
  static void enqueue(const std::shared_ptr<Group>& group, int rank, const Call& call, Stream& stream,
                      std::int64_t alone_bytes) {
    if (group->size() == 1) {
      stream.enqueue([group, call, alone_bytes] {
        group->check_alive();
        copy_bytes(call.out, call.in, alone_bytes);
      });
    } else {
      stream.enqueue([group, rank, call = call]() mutable { group->collective(rank, call); });
    }
  }
};

LocalComm::LocalComm(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

std::vector<LocalComm> LocalComm::create_group(int size, std::chrono::milliseconds timeout) {
  HELIX_EXPECTS(size >= 1, ErrorCode::invalid_argument, "group size is ", size, "; at least 1 is needed");
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
  auto root = std::make_shared<Root>();
  root->timeout = timeout;
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  const auto group = std::make_shared<Group>(std::move(root), std::move(ranks));
  std::vector<LocalComm> handles;
  for (int rank = 0; rank < size; ++rank) handles.push_back(LocalComm(group, rank));
  return handles;
}

int LocalComm::rank() const {
  return rank_;
}
int LocalComm::size() const {
  return group_->size();
}

void LocalComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  expect_count("all_reduce", "count", count);
  expect_summable("all_reduce", dtype);
  expect_pointer("all_reduce", "in", in, count);
  expect_pointer("all_reduce", "out", out, count);
  const Call call{.operation = Operation::all_reduce, .in = in, .out = out, .count = count, .dtype = dtype};
  Group::enqueue(group_, rank_, call, stream, count * static_cast<std::int64_t>(helix::size_bytes(dtype)));
}

void LocalComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  expect_count("reduce_scatter", "count", count);
  expect_summable("reduce_scatter", dtype);
  expect_pointer("reduce_scatter", "in", in, count);
  expect_pointer("reduce_scatter", "out", out, count);
  const Call call{
      .operation = Operation::reduce_scatter, .in = in, .out = out, .count = count, .dtype = dtype};
  Group::enqueue(group_, rank_, call, stream, count * static_cast<std::int64_t>(helix::size_bytes(dtype)));
}

void LocalComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  expect_count("all_gather", "bytes", bytes);
  expect_pointer("all_gather", "in", in, bytes);
  expect_pointer("all_gather", "out", out, bytes);
  Group::enqueue(group_, rank_, {.operation = Operation::all_gather, .in = in, .out = out, .count = bytes},
                 stream, bytes);
}

void LocalComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  expect_count("all_to_all", "bytes", bytes);
  expect_pointer("all_to_all", "in", in, bytes);
  expect_pointer("all_to_all", "out", out, bytes);
  Group::enqueue(group_, rank_, {.operation = Operation::all_to_all, .in = in, .out = out, .count = bytes},
                 stream, bytes);
}

void LocalComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                             std::span<const std::int64_t> recv_bytes, Stream stream) {
  const auto expect_peers = [&](std::string_view what, std::span<const std::int64_t> bytes) {
    HELIX_EXPECTS(std::ssize(bytes) == size(), ErrorCode::invalid_argument, "all_to_all_v: ", what, " has ",
                  bytes.size(), " counts; the group has ", size(), " ranks");
    std::int64_t total = 0;
    for (const std::int64_t count : bytes) {
      expect_count("all_to_all_v", what, count);
      total += count;
    }
    return total;
  };
  expect_pointer("all_to_all_v", "in", in, expect_peers("send_bytes", send_bytes));
  expect_pointer("all_to_all_v", "out", out, expect_peers("recv_bytes", recv_bytes));
  stream.enqueue([group = group_, rank = rank_, in, out, counts = PeerBytes(send_bytes, recv_bytes)] {
    Call call{.operation = Operation::all_to_all_v,
              .in = in,
              .out = out,
              .send_bytes = counts.send(),
              .recv_bytes = counts.recv()};
    group->collective(rank, call);  // also alone: its two counts are checked like any other
  });
}

void LocalComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  expect_count("broadcast", "bytes", bytes);
  expect_pointer("broadcast", "buffer", buffer, bytes);
  HELIX_EXPECTS(root >= 0 && root < size(), ErrorCode::invalid_argument, "broadcast: root is ", root,
                "; the group has ranks 0 to ", size() - 1);
  Group::enqueue(group_, rank_,
                 {.operation = Operation::broadcast, .out = buffer, .count = bytes, .root = root}, stream, 0);
}

void LocalComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  expect_count("send", "bytes", bytes);
  expect_pointer("send", "buffer", buffer, bytes);
  HELIX_EXPECTS(peer >= 0 && peer < size() && peer != rank_, ErrorCode::invalid_argument, "send: peer is ",
                peer, "; it must be another rank of this group of ", size());
  stream.enqueue([group = group_, rank = rank_, peer, buffer, bytes] {
    Call call{.operation = Operation::send, .in = buffer, .count = bytes};
    group->transfer(rank, peer, 0, call);
  });
}

void LocalComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  expect_count("recv", "bytes", bytes);
  expect_pointer("recv", "buffer", buffer, bytes);
  HELIX_EXPECTS(peer >= 0 && peer < size() && peer != rank_, ErrorCode::invalid_argument, "recv: peer is ",
                peer, "; it must be another rank of this group of ", size());
  stream.enqueue([group = group_, rank = rank_, peer, buffer, bytes] {
    Call call{.operation = Operation::recv, .out = buffer, .count = bytes};
    group->transfer(peer, rank, 1, call);
  });
}

void LocalComm::barrier(Stream stream) {
  Group::enqueue(group_, rank_, {.operation = Operation::barrier}, stream, 0);
}

LocalComm LocalComm::split(int color, int key) {
  struct SplitCall : Call {
    std::shared_ptr<Group> group;
    int rank = 0;
  };
  SplitCall own;
  own.operation = Operation::split;
  own.color = color;
  own.key = key;
  group_->root->meet(
      *group_->splits, static_cast<std::size_t>(rank_), own, [&](const std::vector<Call*>& calls) {
        std::map<int, std::vector<std::size_t>> members;  // by color, in order of old rank
        for (std::size_t rank = 0; rank < calls.size(); ++rank) members[calls[rank]->color].push_back(rank);
        for (auto& [unused, ranks] : members) {
          std::stable_sort(ranks.begin(), ranks.end(),
                           [&](std::size_t a, std::size_t b) { return calls[a]->key < calls[b]->key; });
          std::vector<int> root_ranks;
          for (const std::size_t rank : ranks) root_ranks.push_back(group_->root_ranks[rank]);
          const auto group = std::make_shared<Group>(group_->root, std::move(root_ranks));
          for (std::size_t i = 0; i < ranks.size(); ++i) {
            auto& call = static_cast<SplitCall&>(*calls[ranks[i]]);
            call.group = group;
            call.rank = static_cast<int>(i);
          }
        }
      });
  return LocalComm(std::move(own.group), own.rank);
}

void LocalComm::abort(std::string_view reason) noexcept {
  try {
    const std::lock_guard lock(group_->root->mutex);
    group_->root->fail(group_->root_ranks[static_cast<std::size_t>(rank_)], reason);
  } catch (...) {
    // Out of memory for the message: the timeout of the other ranks still ends their wait.
  }
}

}  // namespace helix::cpu
