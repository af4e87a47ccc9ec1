// SPDX-License-Identifier: Apache-2.0
// LinkedGroup: ranks connected by local sockets, and their collectives over them.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/local_links.hpp"
#include "comm/socket.hpp"

namespace helix::comm {

/// One rank's end of a group connected by LocalLinks. Calls are collective over the group, and throw what
/// LocalLinks throws. A group of one rank needs no links.
class LinkedGroup {
 public:
  /// `root_ranks`: the group's ranks as LocalLinks numbers them; this rank is `root_ranks[rank]`.
  LinkedGroup(std::shared_ptr<const LocalLinks> links, std::vector<int> root_ranks, int rank)
      : links_(std::move(links)), root_ranks_(std::move(root_ranks)), rank_(static_cast<std::size_t>(rank)) {}

  int rank() const { return static_cast<int>(rank_); }
  std::size_t size() const { return root_ranks_.size(); }
  const std::vector<int>& root_ranks() const { return root_ranks_; }

  /// The bytes of all ranks, concatenated in rank order. All ranks bring the same number.
  std::vector<std::byte> gather(std::span<const std::byte> own) const {
    for (std::size_t i = 0; i < size(); ++i)
      if (i != rank_) links_->send(root_ranks_[i], own);
    std::vector<std::byte> all;
    all.reserve(size() * own.size());
    for (std::size_t i = 0; i < size(); ++i) {
      all.insert(all.end(), own.begin(), own.end());  // a placeholder that what others sent overwrites
      if (i != rank_) (void)links_->recv(root_ranks_[i], std::span(all).last(own.size()));
    }
    return all;
  }

  /// The values of all ranks, by rank; T is trivially copyable.
  template <class T>
  std::vector<T> all_of(const T& own) const {
    const std::vector<std::byte> bytes = gather(std::as_bytes(std::span(&own, 1)));
    std::vector<T> all(size());
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
  }

  /// The descriptors of all ranks, exchanged for this rank's; closed for this rank, or one without a
  /// descriptor, or one whose descriptor this process has no room for: `lost` then says so.
  std::vector<Socket> exchange(const Socket& own, std::string& lost) const {
    const std::byte mark{1};
    for (std::size_t i = 0; i < size(); ++i)
      if (i != rank_) links_->send(root_ranks_[i], std::span(&mark, 1), own.fd());
    std::vector<Socket> descriptors(size());
    for (std::size_t i = 0; i < size(); ++i) {
      if (i == rank_) continue;
      std::byte received{};
      const int descriptor = links_->recv(root_ranks_[i], std::span(&received, 1));
      if (descriptor == LocalLinks::kNoRoom) {
        lost = "no room for the descriptor that rank " + std::to_string(root_ranks_[i]) +
               " sent: this process may have no more open files; raise its limit (ulimit -n)";
      } else {
        descriptors[i] = Socket(descriptor);
      }
    }
    return descriptors;
  }

 private:
  std::shared_ptr<const LocalLinks> links_;
  std::vector<int> root_ranks_;
  std::size_t rank_;
};

}  // namespace helix::comm
