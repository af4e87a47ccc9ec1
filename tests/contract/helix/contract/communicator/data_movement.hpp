// SPDX-License-Identifier: Apache-2.0
// Collectives and messages that move bytes: every byte comes from the right rank, and no other byte is
// written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/contract/communicator/guarded_bytes.hpp>

namespace helix::contract {

template <class Comm>
void all_gather_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (const std::int64_t bytes : contract_bytes()) {
    for (const bool in_place : {false, true}) {
      GuardedBytes out(comm.size() * bytes);
      GuardedBytes in(bytes);
      std::uint8_t* source = in_place ? out.data() + comm.rank() * bytes : in.data();
      for (std::int64_t i = 0; i < bytes; ++i) source[i] = pattern(comm.rank(), 0, i);
      comm.all_gather(source, out.data(), bytes, stream);
      stream.synchronize();
      out.check("all_gather");
      for (int r = 0; r < comm.size(); ++r) {
        for (std::int64_t i = 0; i < bytes; ++i) {
          require(out[r * bytes + i] == pattern(r, 0, i), "all_gather of ", bytes, " bytes: byte ", i,
                  " of rank ", r, " is wrong, in_place ", in_place);
        }
      }
    }
  }
}

template <class Comm>
void all_to_all_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (const std::int64_t bytes : contract_bytes()) {
    GuardedBytes in(comm.size() * bytes);
    GuardedBytes out(comm.size() * bytes);
    for (int to = 0; to < comm.size(); ++to) {
      for (std::int64_t i = 0; i < bytes; ++i) in.data()[to * bytes + i] = pattern(comm.rank(), to, i);
    }
    comm.all_to_all(in.data(), out.data(), bytes, stream);
    stream.synchronize();
    out.check("all_to_all");
    for (int from = 0; from < comm.size(); ++from) {
      for (std::int64_t i = 0; i < bytes; ++i) {
        require(out[from * bytes + i] == pattern(from, comm.rank(), i), "all_to_all of ", bytes,
                " bytes: byte ", i, " from rank ", from, " is wrong");
      }
    }
  }
}

/// Unequal counts, some of them zero. The memory of the counts is overwritten right after the call.
template <class Comm>
void all_to_all_v_contract(Comm& comm) {
  typename Comm::Stream stream;
  const int size = comm.size();
  for (const std::int64_t unit : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{30000}}) {
    const auto count = [&](int from, int to) { return unit * ((from * 3 + to * 5) % 4); };
    std::vector<std::int64_t> send;
    std::vector<std::int64_t> recv;
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (int peer = 0; peer < size; ++peer) {
      send.push_back(count(comm.rank(), peer));
      recv.push_back(count(peer, comm.rank()));
      sent += send.back();
      received += recv.back();
    }
    GuardedBytes in(sent);
    GuardedBytes out(received);
    std::int64_t offset = 0;
    for (int to = 0; to < size; ++to) {
      for (std::int64_t i = 0; i < count(comm.rank(), to); ++i)
        in.data()[offset++] = pattern(comm.rank(), to, i);
    }
    comm.all_to_all_v(in.data(), send, out.data(), recv, stream);
    std::fill(send.begin(), send.end(), -1);
    std::fill(recv.begin(), recv.end(), -1);
    stream.synchronize();
    out.check("all_to_all_v");
    offset = 0;
    for (int from = 0; from < size; ++from) {
      for (std::int64_t i = 0; i < count(from, comm.rank()); ++i, ++offset) {
        require(out[offset] == pattern(from, comm.rank(), i), "all_to_all_v: byte ", i, " from rank ", from,
                " is wrong, unit ", unit);
      }
    }
  }
}

template <class Comm>
void broadcast_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (const std::int64_t bytes : contract_bytes()) {
    for (int root = 0; root < comm.size(); ++root) {
      GuardedBytes buffer(bytes);
      if (comm.rank() == root) {
        for (std::int64_t i = 0; i < bytes; ++i) buffer.data()[i] = pattern(root, 9, i);
      }
      comm.broadcast(buffer.data(), bytes, root, stream);
      stream.synchronize();
      buffer.check("broadcast");
      for (std::int64_t i = 0; i < bytes; ++i) {
        require(buffer[i] == pattern(root, 9, i), "broadcast of ", bytes, " bytes from ", root, ": byte ", i,
                " is wrong");
      }
    }
  }
}

/// Every pair of ranks in both directions, several messages in a row. Messages match in the order of the
/// calls.
template <class Comm>
void send_recv_contract(Comm& comm) {
  typename Comm::Stream stream;
  const int rank = comm.rank();
  for (int low = 0; low < comm.size(); ++low) {
    for (int high = low + 1; high < comm.size(); ++high) {
      if (rank != low && rank != high) continue;
      const int peer = rank == low ? high : low;
      std::vector<GuardedBytes> sent;
      std::vector<GuardedBytes> received;
      for (const std::int64_t bytes : contract_bytes()) {
        sent.emplace_back(bytes);
        received.emplace_back(bytes);
        for (std::int64_t i = 0; i < bytes; ++i)
          sent.back().data()[i] = pattern(rank, peer, i, static_cast<int>(sent.size()));
      }
      for (std::size_t m = 0; m < sent.size(); ++m) {
        if (rank == low) {
          comm.send(sent[m].data(), sent[m].size(), peer, stream);
          comm.recv(received[m].data(), received[m].size(), peer, stream);
        } else {
          comm.recv(received[m].data(), received[m].size(), peer, stream);
          comm.send(sent[m].data(), sent[m].size(), peer, stream);
        }
      }
      stream.synchronize();
      for (std::size_t m = 0; m < sent.size(); ++m) {
        received[m].check("recv");
        for (std::int64_t i = 0; i < received[m].size(); ++i) {
          require(received[m][i] == pattern(peer, rank, i, static_cast<int>(m) + 1), "message ", m,
                  " from rank ", peer, ": byte ", i, " is wrong");
        }
      }
    }
  }
}

}  // namespace helix::contract
