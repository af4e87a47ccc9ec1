// SPDX-License-Identifier: Apache-2.0
// all_of: gathers one value from each rank of a Bootstrap to all ranks.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/error.hpp>

namespace helix::comm {

/// Returns the values of all ranks, by rank; T is trivially copyable. Collective. @throws Error(io) if a rank
/// sent another number of bytes, and what Bootstrap::gather() throws.
template <class T>
std::vector<T> all_of(Bootstrap& bootstrap, const T& own) {
  std::vector<T> all(static_cast<std::size_t>(bootstrap.size()));
  const auto parts = bootstrap.gather(std::as_bytes(std::span(&own, 1)));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    HELIX_EXPECTS(parts[i].size() == sizeof(T), ErrorCode::io, "rank ", i, " sent ", parts[i].size(),
                  " bytes to the others; expected ", sizeof(T));
    std::memcpy(&all[i], parts[i].data(), sizeof(T));
  }
  bootstrap.broadcast(std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace helix::comm
