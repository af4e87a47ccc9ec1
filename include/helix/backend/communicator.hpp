// SPDX-License-Identifier: Apache-2.0
// Communicator concepts: the collectives that library code calls, one concept for each use.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix {

namespace detail {

/// A count in concepts. Converts to integers of 64 bits only: a communicator that counts in fewer would cut
/// large messages short.
struct LongCount {
  template <std::integral I>
  requires(sizeof(I) == 8) operator I() const;
};

}  // namespace detail

/// One rank's end of a group. Counts are integers of 64 bits. Collectives are asynchronous: each is queued on
/// a stream of the backend, and every rank of the group calls them in the same order with the same sizes. A
/// failure is sticky on the stream and aborts the group. abort() wakes every rank with Error(peer_failed)
/// that names the caller of abort(). It may be called after any failure and does not throw. decode_layer,
/// backends and engines call it; the exchange alone does not.
template <class C>
concept GroupComm = requires(C& comm, const C& const_comm, std::string_view reason) {
  { const_comm.rank() } -> std::convertible_to<int>;
  { const_comm.size() } -> std::convertible_to<int>;
  { comm.abort(reason) }
  noexcept;
};

/// A communicator with the collective that KvpAllToAll needs of the KVP group: all_to_all of `in` [size, n
/// bytes] to `out` [size, n bytes].
template <class C, class Stream>
concept ExchangeComm = GroupComm<C> &&
    requires(C& comm, const void* in, void* out, detail::LongCount n, Stream stream) {
  comm.all_to_all(in, out, n, stream);
};

/// A communicator with the collective that layers need of the stage: all_reduce sums n elements over the
/// ranks and gives every rank the same bits (invariant 12). `in` may equal `out`; both are aligned to their
/// type.
template <class C, class Stream>
concept ReduceComm = GroupComm<C> &&
    requires(C& comm, const void* in, void* out, detail::LongCount n, DType dtype, Stream stream) {
  comm.all_reduce(in, out, n, dtype, stream);
};

/// A communicator with the collective that the vocabulary head needs of the stage: all_gather of `in`, n
/// bytes, to `out` [size, n bytes].
template <class C, class Stream>
concept GatherComm = GroupComm<C> &&
    requires(C& comm, const void* in, void* out, detail::LongCount n, Stream stream) {
  comm.all_gather(in, out, n, stream);
};

/// Memory of all ranks of a group, as one rank addresses it. part(rank) is where that rank's part begins in
/// this rank's address space; the parts lie stride_bytes() apart. The memory lives until the window ends. A
/// default-constructed window has none.
template <class W>
concept RankWindow = std::default_initializable<W> && std::movable<W> && requires(const W& window, int rank) {
  { window.part(rank) } -> std::convertible_to<std::byte*>;
  { window.stride_bytes() } -> std::convertible_to<std::int64_t>;
};

/// A communicator whose ranks may reach each other's memory. has_windows(), equal on all ranks, says whether
/// they do. If so, allocate_window(bytes, parts), which is collective, gives zeroed memory of at least
/// `bytes` bytes a rank, at a stride that is a multiple of 16 * parts.
template <class C>
concept WindowComm = GroupComm<C> &&
    requires(C& comm, const C& const_comm, std::size_t bytes, std::int64_t parts) {
  { const_comm.has_windows() } -> std::convertible_to<bool>;
  { comm.allocate_window(bytes, parts) } -> RankWindow;
};

/// A communicator with all that this library calls on the groups of a backend. An engine's own needs no more.
template <class C, class Stream>
concept Communicator = ExchangeComm<C, Stream> && ReduceComm<C, Stream> && GatherComm<C, Stream>;

/// A communicator that can form groups of its ranks. split(color, key) is collective, blocks the host, and
/// returns the group of the ranks with the same color, ordered by key. Only split_kvp() and split_world()
/// need it.
template <class C>
concept SplittableComm = GroupComm<C> && requires(C& comm, int color, int key) {
  { comm.split(color, key) } -> std::same_as<C>;
};

/// The communicators of the two groups that a layer uses.
template <class Comm>
struct StageComms {
  Comm* stage = nullptr;  ///< All N ranks of the stage, by stage_rank.
  Comm* kvp = nullptr;    ///< The KVP group, by kvp_rank.
};

/// A backend that has the communicators of its rank.
template <class B>
concept StageBackend = GroupComm<typename B::Comm> && requires(B& backend) {
  { backend.comms() } -> std::same_as<StageComms<typename B::Comm>>;
};

namespace detail {

/// Returns the communicator. Throws Error(invalid_argument) if it is null.
template <class Comm>
Comm& given_comm(std::string_view operation, std::string_view name, Comm* comm) {
  HELIX_EXPECTS(comm != nullptr, ErrorCode::invalid_argument, operation, ": the backend's comms().", name,
                " is null; give it both communicators, of one rank where a group has one");
  return *comm;
}

/// Throws Error(invalid_argument) unless the stage communicator has the `size` of the topology's stage.
template <class Comm>
void check_stage_size(std::string_view operation, const Comm& stage, int size) {
  HELIX_EXPECTS(stage.size() == size, ErrorCode::invalid_argument, operation, ": the stage communicator has ",
                stage.size(), " ranks; the topology's stage has ", size);
}

}  // namespace detail

/// Allocates `bytes` bytes of device memory on each rank of `comm`, which the other ranks may write; zeroed,
/// aligned to 256 bytes. Collective. A communicator that has messages delivered to memory of its own offers
/// allocate_window(bytes), with one argument. For any other, WindowComm included, the memory is plain memory
/// of the backend, and the ranks exchange nothing.
template <class B, class Comm>
auto allocate_window(B& backend, [[maybe_unused]] Comm& comm, std::size_t bytes) {
  if constexpr (requires { comm.allocate_window(bytes); }) {
    return comm.allocate_window(bytes);
  } else {
    return backend.allocate(bytes);
  }
}

}  // namespace helix
