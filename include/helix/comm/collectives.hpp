// SPDX-License-Identifier: Apache-2.0
// comm::CollectiveComm: the operations of this library's communicators, documented once for all of them.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>

#include <helix/dtype.hpp>

namespace helix::comm {

/// One rank's handle to a group of `size()` ranks, with every operation that LocalComm, MpiComm, NcclComm and
/// PeerComm have. A decode layer asks for less: see the concepts in backend/communicator.hpp.
///
/// Each rank of the group makes the same calls in the same order, with equal counts, types and roots, each
/// from one stream at a time; split() gives further streams groups of their own. A call queues its work on
/// the stream and returns; buffers belong to the call until the stream has passed it. Counts are in elements
/// for reductions and in bytes for all else, never negative, and 0 is allowed. A buffer may be null where its
/// count is 0. Wrong arguments that one rank can judge alone are refused by the call itself with
/// Error(invalid_argument), or Error(unsupported) for a type that cannot be summed, and the group goes on.
///
/// - `all_reduce(in, out, count, dtype, stream)`: in [count] -> out [count], the sum over all ranks, with the
///   same bits on all of them. f32, f16 or bf16. `in` may equal `out`.
/// - `reduce_scatter(in, out, count, dtype, stream)`: in [size, count] -> out [count], slice `rank()` of the
///   sum over all ranks. The types of all_reduce.
/// - `all_gather(in, out, bytes, stream)`: in [bytes] -> out [size, bytes], rank r's input in row r. `in` may
///   be this rank's row of `out`.
/// - `all_to_all(in, out, bytes, stream)`: in [size, bytes] -> out [size, bytes]; row r of `in` goes to rank
///   r, row r of `out` comes from it. `in` and `out` must not overlap; this is not checked.
/// - `all_to_all_v(in, send_bytes, out, recv_bytes, stream)`: as all_to_all, with rows of unequal bytes,
///   packed. Both spans have one entry a rank, are in host memory, and are read before the call returns.
///   `send_bytes[r]` here equals `recv_bytes[rank()]` on rank r.
/// - `broadcast(buffer, bytes, root, stream)`: buffer [bytes], read on rank `root` and written on all others.
/// - `send(buffer, bytes, peer, stream)`, `recv(buffer, bytes, peer, stream)`: one message to another rank;
///   those between the same two ranks match in the order of the calls. Only these two ranks take part.
/// - `barrier(stream)`: the stream of no rank passes it before every rank's stream has reached it.
/// - `split(color, key)`: blocks the host; ranks of equal `color`, 0 or more (NCCL and PeerComm refuse other
///   values), form a new group, in which they are ordered by (key, old rank). It shares the failure state of
///   this one: an abort of either ends both.
/// - `abort(reason)`: ends the waits of all ranks, in this group and in all that were split from the same
///   root. They get Error(peer_failed), as does each later call, with this rank (as numbered in the root
///   group) and `reason`. The first abort wins. Never throws, any thread.
///
/// Waits for other ranks are bounded by the group's timeout, after which Error(timeout) names the operation
/// and, where it can be known, the ranks that did not come.
template <class C>
concept CollectiveComm = requires(C& comm, const C& const_comm, const void* in, void* out, std::int64_t count,
                                  int peer, std::span<const std::int64_t> peer_bytes, DType dtype,
                                  typename C::Stream stream, std::string_view reason) {
  { const_comm.rank() } -> std::convertible_to<int>;
  { const_comm.size() } -> std::convertible_to<int>;
  comm.all_reduce(in, out, count, dtype, stream);
  comm.reduce_scatter(in, out, count, dtype, stream);
  comm.all_gather(in, out, count, stream);
  comm.all_to_all(in, out, count, stream);
  comm.all_to_all_v(in, peer_bytes, out, peer_bytes, stream);
  comm.broadcast(out, count, peer, stream);
  comm.send(in, count, peer, stream);
  comm.recv(out, count, peer, stream);
  comm.barrier(stream);
  { comm.split(peer, peer) } -> std::same_as<C>;
  { comm.abort(reason) }
  noexcept;
};

}  // namespace helix::comm
