// SPDX-License-Identifier: Apache-2.0
// cpu::Buffer: its memory outlives the queued work that touches it, and is given back afterwards.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <helix/cpu/backend.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

constexpr std::size_t kPage = 4096;

/// Whether the system has memory at `address`.
bool is_mapped(const std::byte* address) {
  unsigned char resident = 0;
  return ::mincore(const_cast<std::byte*>(address), kPage, &resident) == 0;
}

/// Holds a stream back until it is opened.
class Gate {
 public:
  void block(const cpu::Stream& stream) {
    cpu::Stream(stream).enqueue([is_open = is_open_] {
      while (!is_open->load()) std::this_thread::yield();
    });
  }
  void open() { *is_open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> is_open_ = std::make_shared<std::atomic<bool>>(false);
};

bool becomes_unmapped(const std::byte* address) {
  for (int i = 0; i < 2000 && is_mapped(address); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return !is_mapped(address);
}

TEST_CASE("buffer: an exception between queueing and waiting frees nothing that queued work touches") {
  const cpu::Operators operators;
  const cpu::Stream stream = operators.create_stream();  // outlives the buffers
  Gate gate;
  std::vector<std::byte> result(8 * kPage);
  const std::byte* address = nullptr;
  cpu::Buffer kept = operators.allocate(8 * kPage);
  const auto step = [&] {
    const cpu::Buffer scratch = operators.allocate(8 * kPage);
    address = scratch.data();
    gate.block(stream);
    const std::vector<std::byte> source(8 * kPage, std::byte{7});
    operators.upload(scratch.data(), source.data(), source.size(), stream);
    operators.copy(kept.data(), scratch.data(), source.size(), stream);
    throw std::runtime_error("on the host");
  };
  CHECK_THROWS_AS(step(), std::runtime_error);
  CHECK(is_mapped(address));
  gate.open();
  operators.download(result.data(), kept.data(), result.size(), stream);
  CHECK(result == std::vector<std::byte>(8 * kPage, std::byte{7}));
  CHECK(becomes_unmapped(address));
}

TEST_CASE("buffer: without queued work the memory goes back at once") {
  cpu::Operators operators;
  const cpu::Stream idle = operators.create_stream();
  cpu::Buffer buffer = operators.allocate(kPage);
  const std::byte* const address = buffer.data();
  REQUIRE(is_mapped(address));
  operators.fill_zero(buffer.data(), kPage, idle);
  operators.synchronize(idle);
  buffer = {};
  CHECK(becomes_unmapped(address));  // the worker may still be leaving its last task
}

TEST_CASE("buffer: a busy stream delays what was freed before, not what it queues after") {
  cpu::Operators operators;
  const cpu::Stream blocked = operators.create_stream();
  const cpu::Stream busy = operators.create_stream();
  Gate first;
  Gate second;
  cpu::Buffer buffer = operators.allocate(kPage);
  const std::byte* const address = buffer.data();
  first.block(blocked);
  buffer = {};
  second.block(blocked);  // queued after the end of the buffer
  for (int i = 0; i < 100; ++i) cpu::Stream(busy).enqueue([] {});
  operators.synchronize(busy);
  CHECK(is_mapped(address));
  first.open();
  CHECK(becomes_unmapped(address));
  second.open();
}

/// Address space of the process.
std::int64_t mapped_bytes() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::int64_t>(kPage);
}

TEST_CASE("buffer: a stream that is never idle does not keep memory for ever") {
  constexpr std::int64_t kBufferBytes = std::int64_t{64} << 20;
  constexpr int kBuffers = 64;
  cpu::Operators operators;
  std::atomic<bool> is_over = false;
  const std::int64_t before = mapped_bytes();
  cpu::Stream stream = operators.create_stream();
  {
    std::jthread feeder([&] {
      while (!is_over.load())
        stream.enqueue([] { std::this_thread::sleep_for(std::chrono::microseconds(20)); });
    });
    for (int i = 0; i < kBuffers; ++i) {
      const cpu::Buffer buffer = operators.allocate(kBufferBytes);
      std::memset(buffer.data(), i, 1);
    }
    std::int64_t kept = mapped_bytes() - before;
    for (int i = 0; i < 5000 && kept >= kBufferBytes * kBuffers / 4; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      kept = mapped_bytes() - before;
    }
    CHECK(kept < kBufferBytes * kBuffers / 4);
    is_over = true;
  }
}

TEST_CASE("buffer: a failed stream still lets go") {
  cpu::Operators operators;
  cpu::Stream stream = operators.create_stream();
  Gate gate;
  cpu::Buffer buffer = operators.allocate(kPage);
  const std::byte* const address = buffer.data();
  gate.block(stream);
  stream.enqueue([] { throw std::runtime_error("in the queue"); });
  operators.fill_zero(buffer.data(), kPage, stream);  // skipped
  buffer = {};
  gate.open();
  CHECK(becomes_unmapped(address));
  std::byte byte{};
  CHECK_THROWS_AS(operators.download(&byte, &byte, 1, stream), std::runtime_error);
}

}  // namespace
}  // namespace helix::test
