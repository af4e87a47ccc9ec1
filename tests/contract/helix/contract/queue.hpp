// SPDX-License-Identifier: Apache-2.0
// Memory, streams and events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/contract/workbench.hpp>

namespace helix::contract {

template <TestableBackend B>
void memory_and_streams() {
  B backend = LoneRank<B>::make();
  typename B::Stream first = backend.create_stream();
  typename B::Stream second = backend.create_stream();
  constexpr std::size_t kBytes = 3 << 20;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4}, std::size_t{1000}, kBytes}) {
    CAPTURE(bytes);
    typename B::Buffer a = backend.allocate(bytes);
    typename B::Buffer b = backend.allocate(bytes);
    CHECK(a.size_bytes() >= bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 256 == 0);
    std::vector<unsigned char> host(bytes, 77), back(bytes, 1);
    backend.download(back.data(), a.data(), bytes, first);  // complete on return
    CHECK(back == std::vector<unsigned char>(bytes, 0));    // zeroed

    backend.upload(a.data(), host.data(), bytes, first);
    std::fill(host.begin(), host.end(), static_cast<unsigned char>(11));  // reused at once
    backend.copy(b.data(), a.data(), bytes, first);                       // in order, so it sees 77
    backend.upload(a.data(), host.data(), bytes, first);
    backend.fill_zero(a.data(), bytes / 2, first);
    // The other stream waits for all of it; the host does not.
    typename B::Event event = backend.create_event();
    backend.record(event, first);
    backend.wait(second, event);
    backend.download(host.data(), a.data(), bytes, second);
    backend.download(back.data(), b.data(), bytes, second);
    CHECK(back == std::vector<unsigned char>(bytes, 77));
    std::vector<unsigned char> expected(bytes, 11);
    std::fill_n(expected.begin(), bytes / 2, static_cast<unsigned char>(0));
    CHECK(host == expected);
    backend.synchronize(first);
  }

  // An event is recorded again and again; each wait is for the last record before it. A value hops between
  // the streams.
  typename B::Buffer cells = backend.allocate(64 * sizeof(std::int32_t));
  typename B::Event there = backend.create_event();
  typename B::Event back_again = backend.create_event();
  auto* cell = reinterpret_cast<std::int32_t*>(cells.data());
  const std::int32_t start = 4242;
  backend.upload(cell, &start, sizeof(start), first);
  for (int i = 0; i < 62; i += 2) {
    backend.record(there, first);
    backend.wait(second, there);
    backend.copy(cell + i + 1, cell + i, sizeof(std::int32_t), second);
    backend.record(back_again, second);
    backend.wait(first, back_again);
    backend.copy(cell + i + 2, cell + i + 1, sizeof(std::int32_t), first);
  }
  std::int32_t end = 0;
  backend.download(&end, cell + 62, sizeof(end), first);
  CHECK(end == start);

  // Empty operations touch nothing.
  backend.upload(nullptr, nullptr, 0, first);
  backend.download(nullptr, nullptr, 0, first);
  backend.copy(nullptr, nullptr, 0, first);
  backend.fill_zero(nullptr, 0, first);
  backend.synchronize(first);
}

}  // namespace helix::contract
