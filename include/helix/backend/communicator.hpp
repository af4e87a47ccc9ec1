// SPDX-License-Identifier: Apache-2.0
// Communicators: the collectives that library code calls, a concept for each user of them.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix {

/// One rank's end of a group. Collectives are asynchronous: each is queued on a stream of the backend, and
/// every rank of the group calls it in the same order with the same sizes. A failure is sticky on the stream
/// and aborts the group: abort() wakes every rank with Error(peer_failed) naming the one that called it; it
/// may be called after a failure of anything, and does not throw.
template <class C>
concept GroupComm = requires(C& comm, const C& const_comm, std::string_view reason) {
  { const_comm.rank() } -> std::convertible_to<int>;
  { const_comm.size() } -> std::convertible_to<int>;
  { comm.abort(reason) }
  noexcept;
};

/// What KvpAllToAll asks of the KVP group: `in` [size, n bytes] -> `out` [size, n bytes].
template <class C, class Stream>
concept ExchangeComm = GroupComm<C> &&
    requires(C& comm, const void* in, void* out, std::int64_t n, Stream stream) {
  comm.all_to_all(in, out, n, stream);
};

/// What layers ask of the stage: the sum of n elements over the ranks, the same bits on every rank (invariant
/// 12). `in` may equal `out`; both are aligned to their type.
template <class C, class Stream>
concept ReduceComm = GroupComm<C> &&
    requires(C& comm, const void* in, void* out, std::int64_t n, DType dtype, Stream stream) {
  comm.all_reduce(in, out, n, dtype, stream);
};

/// What the vocabulary head asks of the stage: `in` n bytes -> `out` [size, n bytes].
template <class C, class Stream>
concept GatherComm = GroupComm<C> &&
    requires(C& comm, const void* in, void* out, std::int64_t n, Stream stream) {
  comm.all_gather(in, out, n, stream);
};

/// Memory of all ranks of a group: part(rank) is where that rank's begins, in the addresses of this one, and
/// the parts of all lie stride_bytes() apart. It is kept until the window's end; one made of {} has none.
template <class W>
concept RankWindow = std::default_initializable<W> && std::movable<W> && requires(const W& window, int rank) {
  { window.part(rank) } -> std::convertible_to<std::byte*>;
  { window.stride_bytes() } -> std::convertible_to<std::int64_t>;
};

/// A communicator whose ranks may reach each other's memory. has_windows(), alike on all ranks, says whether
/// they do; then allocate_window(bytes, parts), which is collective, gives zeroed memory of at least `bytes`
/// a rank, at a stride that is a multiple of 16 * parts.
template <class C>
concept WindowComm = GroupComm<C> &&
    requires(C& comm, const C& const_comm, std::size_t bytes, std::int64_t parts) {
  { const_comm.has_windows() } -> std::convertible_to<bool>;
  { comm.allocate_window(bytes, parts) } -> RankWindow;
};

/// All that this library calls on the groups of a backend. Nothing else is required of an engine's own.
template <class C, class Stream>
concept Communicator = ExchangeComm<C, Stream> && ReduceComm<C, Stream> && GatherComm<C, Stream>;

/// A communicator that can make groups of its ranks: split(color, key) is collective, blocks the host, and
/// gives the group of the ranks with the same color, ordered by key. Only split_kvp() and split_world() need
/// it.
template <class C>
concept SplittableComm = GroupComm<C> && requires(C& comm, int color, int key) {
  { comm.split(color, key) } -> std::same_as<C>;
};

/// The two groups that one layer talks to.
template <class Comm>
struct StageComms {
  Comm* stage = nullptr;  ///< All N ranks of the stage, by stage_rank.
  Comm* kvp = nullptr;    ///< The KVP group, by kvp_rank.
};

/// A backend that knows the groups of its rank.
template <class B>
concept StageBackend = GroupComm<typename B::Comm> && requires(B& backend) {
  { backend.comms() } -> std::same_as<StageComms<typename B::Comm>>;
};

namespace detail {

/// The communicator. Throws Error(invalid_argument) if there is none.
template <class Comm>
Comm& given_comm(std::string_view operation, std::string_view name, Comm* comm) {
  HELIX_EXPECTS(comm != nullptr, ErrorCode::invalid_argument, operation, ": the backend's comms().", name,
                " is null; give it both communicators, of one rank where a group has one");
  return *comm;
}

}  // namespace detail

/// `bytes` of device memory that the ranks of `comm` may write to each other's; zeroed, aligned to 256.
/// Collective. A communicator that shares memory between ranks brings allocate_window(bytes); of any other it
/// is plain memory of the backend, and nothing is exchanged.
template <class B, class Comm>
auto allocate_window(B& backend, [[maybe_unused]] Comm& comm, std::size_t bytes) {
  if constexpr (requires { comm.allocate_window(bytes); }) {
    return comm.allocate_window(bytes);
  } else {
    return backend.allocate(bytes);
  }
}

}  // namespace helix
