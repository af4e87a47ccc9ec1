// SPDX-License-Identifier: Apache-2.0
// Messages between pairs of ranks, and the collectives built from them.
#include "cpu/mpi_group.hpp"

#include <array>
#include <utility>

#include "comm/rank_names.hpp"
#include "comm/reduce.hpp"

namespace helix::cpu {
namespace mpi {

thread_local Posted posted;

}  // namespace mpi

using mpi::Posted;
using mpi::posted;

namespace {

/// Most bytes of a message, because MPI counts with int. Larger transfers are sent in pieces of this size,
/// which the MPI library splits further anyway.
constexpr std::int64_t kMessageBytes = 64 << 20;

/// Distinct tags keep different operations from matching each other, so such a mistake is a timeout and not
/// wrong data. A send matches a recv.
int tag_of(comm::Operation operation) {
  return 2 + static_cast<int>(operation == comm::Operation::recv ? comm::Operation::send : operation);
}

/// Calls post(begin, bytes) for each message. The first that is shorter than kMessageBytes, and empty if need
/// be, ends the transfer. Otherwise the pieces of one transfer could be taken for those of another.
template <class Post>
void in_messages(std::int64_t bytes, Post&& post) {
  for (std::int64_t begin = 0; begin <= bytes; begin += kMessageBytes)
    post(begin, static_cast<int>(std::min(bytes - begin, kMessageBytes)));
}

std::int64_t bytes_received(const MPI_Status& status) {
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  return bytes;
}

}  // namespace

MpiComm::Group::Group(MPI_Comm own, milliseconds limit, std::shared_ptr<mpi::Alarm> shared_alarm)
    : comm(own), timeout(limit), alarm(std::move(shared_alarm)) {
  mpi::check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  mpi::check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  world_ranks = mpi::ranks_in(comm, MPI_COMM_WORLD);
}

MpiComm::Group::~Group() {
  if (mpi::is_running()) MPI_Comm_free(&comm);
}

void MpiComm::Group::check_alive() {
  if (!has_failed.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(failure_mutex);
  throw Error(failure_code, failure);
}

void MpiComm::Group::post_send(const void* buffer, std::int64_t bytes, int peer, Operation operation) {
  in_messages(bytes, [&](std::int64_t begin, int piece) {
    MPI_Request request = MPI_REQUEST_NULL;
    const std::byte* source = buffer == nullptr ? nullptr : static_cast<const std::byte*>(buffer) + begin;
    mpi::check(MPI_Isend(source, piece, MPI_BYTE, peer, tag_of(operation), comm, &request), "MPI_Isend");
    posted.requests.push_back(request);
    posted.messages.push_back({peer, false, begin, piece, bytes});
  });
}

void MpiComm::Group::post_recv(void* buffer, std::int64_t bytes, int peer, Operation operation) {
  in_messages(bytes, [&](std::int64_t begin, int piece) {
    MPI_Request request = MPI_REQUEST_NULL;
    std::byte* target = buffer == nullptr ? nullptr : static_cast<std::byte*>(buffer) + begin;
    mpi::check(MPI_Irecv(target, piece, MPI_BYTE, peer, tag_of(operation), comm, &request), "MPI_Irecv");
    posted.requests.push_back(request);
    posted.messages.push_back({peer, true, begin, piece, bytes});
  });
}

bool MpiComm::Group::test_all(int& result) {
  int flag = 0;
  result = MPI_Testall(static_cast<int>(posted.requests.size()), posted.requests.data(), &flag,
                       posted.statuses.data());
  return flag != 0 || result != MPI_SUCCESS;
}

void MpiComm::Group::wait(Operation operation) {
  posted.statuses.resize(posted.requests.size());
  int result = MPI_SUCCESS;
  const auto is_done = [&] {
    if (test_all(result)) return true;
    check_pieces(operation);
    return false;
  };
  if (!mpi::poll_until(comm::deadline_after(timeout), is_done)) {
    // A message that arrives between the last poll and this check has arrived in time.
    const std::vector<int> late = late_peers();
    if (!late.empty()) give_up(operation, late);
    (void)test_all(result);  // all are complete
  }
  for (std::size_t i = 0; i < posted.messages.size(); ++i) {
    check_message(operation, posted.messages[i], posted.statuses[i],
                  result == MPI_ERR_IN_STATUS ? posted.statuses[i].MPI_ERROR : result);
  }
  posted.clear();
}

std::vector<int> MpiComm::Group::late_peers() const {
  std::vector<int> late;
  for (std::size_t i = 0; i < posted.requests.size(); ++i) {
    if (posted.requests[i] == MPI_REQUEST_NULL) continue;
    int is_complete = 0;
    MPI_Request_get_status(posted.requests[i], &is_complete, MPI_STATUS_IGNORE);
    if (is_complete == 0) late.push_back(name(posted.messages[i].peer));
  }
  std::sort(late.begin(), late.end());
  late.erase(std::unique(late.begin(), late.end()), late.end());
  return late;
}

void MpiComm::Group::check_pieces(Operation operation) const {
  for (std::size_t i = 0; i < posted.messages.size(); ++i) {
    const Posted::Message& message = posted.messages[i];
    if (!message.is_recv || message.bytes < kMessageBytes) continue;
    int is_complete = 0;
    MPI_Status status;
    MPI_Request_get_status(posted.requests[i], &is_complete, &status);
    if (is_complete == 0 || bytes_received(status) == message.bytes) continue;
    drop_requests();
    check_message(operation, message, status, MPI_SUCCESS);
  }
}

void MpiComm::Group::drop_requests() {
  for (std::size_t i = 0; i < posted.requests.size(); ++i) {
    MPI_Request& request = posted.requests[i];
    if (request == MPI_REQUEST_NULL) continue;
    int is_complete = 0;
    MPI_Request_get_status(request, &is_complete, MPI_STATUS_IGNORE);
    if (is_complete == 0 && posted.messages[i].is_recv) MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
}

void MpiComm::Group::give_up(Operation operation, const std::vector<int>& late) const {
  drop_requests();
  throw Error(ErrorCode::timeout, to_string(operation), ": world ", helix::comm::rank_names(late),
              " did not arrive within ", helix::comm::seconds(timeout), " s; world rank ", name(rank),
              " waited");
}

void MpiComm::Group::check_message(Operation operation, const Posted::Message& message,
                                   const MPI_Status& status, int code) const {
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  if (error_class == MPI_ERR_PENDING) return;  // another message has the error
  HELIX_EXPECTS(error_class != MPI_ERR_TRUNCATE, ErrorCode::invalid_argument, to_string(operation),
                ": world rank ", name(message.peer), " sent more than the ", message.transfer_bytes,
                " bytes that world rank ", name(rank), " expects; all must call with the same sizes");
  HELIX_EXPECTS(error_class == MPI_SUCCESS, ErrorCode::peer_failed, to_string(operation), " with world rank ",
                name(message.peer), " failed: ", mpi::message_of(code));
  if (!message.is_recv) return;
  const std::int64_t received = bytes_received(status);
  HELIX_EXPECTS(received == message.bytes, ErrorCode::invalid_argument, to_string(operation), ": world rank ",
                name(message.peer), " sent ", message.begin + received, " bytes, world rank ", name(rank),
                " expects ", message.transfer_bytes, "; all must call with the same sizes");
}

std::byte* MpiComm::Group::scratch_of(std::int64_t bytes) {
  if (std::ssize(scratch) < bytes) scratch.resize(static_cast<std::size_t>(bytes));
  return scratch.data();
}

void MpiComm::Group::all_gather(Operation operation, const void* in, void* out, std::int64_t bytes) {
  const auto equal = [=](int) { return bytes; };
  exchange(
      operation, [=](int) { return static_cast<const std::byte*>(in); }, equal,
      [=](int r) { return static_cast<std::byte*>(out) + r * bytes; }, equal);
}

void MpiComm::Group::sum(const std::byte* terms, void* out, std::int64_t count, DType dtype) const {
  const auto width = static_cast<std::int64_t>(size_bytes(dtype));
  std::array<float, helix::comm::kReduceBlock> total;
  for (std::int64_t begin = 0; begin < count; begin += helix::comm::kReduceBlock) {
    const std::int64_t block = std::min(helix::comm::kReduceBlock, count - begin);
    for (int r = 0; r < size; ++r) {
      helix::comm::add_to_sum(total.data(), terms + (r * count + begin) * width, block, dtype, r == 0);
    }
    helix::comm::store_sum(static_cast<std::byte*>(out) + begin * width, total.data(), block, dtype);
  }
}

void MpiComm::Group::all_reduce(const void* in, void* out, std::int64_t count, DType dtype) {
  const auto width = static_cast<std::int64_t>(size_bytes(dtype));
  const auto begin = [&](int r) { return count * r / size; };
  std::byte* result = static_cast<std::byte*>(out);
  const std::byte* own = result + begin(rank) * width;
  reduce_slices(Operation::all_reduce, in, result + begin(rank) * width, dtype, begin);
  exchange(
      Operation::all_reduce, [&](int) { return own; },
      [&](int) { return (begin(rank + 1) - begin(rank)) * width; },
      [&](int r) { return result + begin(r) * width; },
      [&](int r) { return (begin(r + 1) - begin(r)) * width; });
}

}  // namespace helix::cpu
