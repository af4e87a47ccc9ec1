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
#include <thread>
#include <vector>

#include <unistd.h>

#include <helix/cpu/backend.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

constexpr std::size_t kPage = 4096;  // one page, or part of one

/// Touched only in its first pages, so mostly address space, of which others take little meanwhile.
constexpr std::size_t kBytes = std::size_t{256} << 20;

/// Address space of the process.
std::int64_t mapped_bytes() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

/// Blocks a stream until it is opened.
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

/// Whether one buffer fewer than at `before` is mapped, now or soon.
bool gives_back(std::int64_t before) {
  const auto is_back = [&] { return mapped_bytes() < before - static_cast<std::int64_t>(kBytes / 2); };
  for (int i = 0; i < 5000 && !is_back(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return is_back();
}

/// Whether about as much is mapped as at `before`.
bool keeps(std::int64_t before) {
  return mapped_bytes() > before - static_cast<std::int64_t>(kBytes / 2);
}

TEST_CASE("buffer: an exception between queueing and waiting frees nothing that queued work touches") {
  const cpu::Operators operators;
  const cpu::Stream stream = operators.create_stream();  // outlives the buffers
  Gate gate;
  std::vector<std::byte> result(8 * kPage);
  std::int64_t before = 0;
  cpu::Buffer kept = operators.allocate(8 * kPage);
  const auto step = [&] {
    const cpu::Buffer scratch = operators.allocate(kBytes);
    before = mapped_bytes();
    gate.block(stream);
    const std::vector<std::byte> source(8 * kPage, std::byte{7});
    operators.upload(scratch.data(), source.data(), source.size(), stream);
    operators.copy(kept.data(), scratch.data(), source.size(), stream);
    throw std::runtime_error("on the host");
  };
  CHECK_THROWS_AS(step(), std::runtime_error);
  CHECK(keeps(before));
  gate.open();
  operators.download(result.data(), kept.data(), result.size(), stream);
  CHECK(result == std::vector<std::byte>(8 * kPage, std::byte{7}));
  CHECK(gives_back(before));
}

TEST_CASE("buffer: without queued work the memory goes back at once") {
  cpu::Operators operators;
  const cpu::Stream idle = operators.create_stream();
  cpu::Buffer buffer = operators.allocate(kBytes);
  const std::int64_t before = mapped_bytes();
  operators.fill_zero(buffer.data(), kPage, idle);
  operators.synchronize(idle);
  buffer = {};
  CHECK(gives_back(before));  // the worker may still be finishing its last task
}

TEST_CASE("buffer: a busy stream delays what was freed before, not what it queues after") {
  cpu::Operators operators;
  const cpu::Stream blocked = operators.create_stream();
  const cpu::Stream busy = operators.create_stream();
  Gate first;
  Gate second;
  cpu::Buffer buffer = operators.allocate(kBytes);
  const std::int64_t before = mapped_bytes();
  first.block(blocked);
  buffer = {};
  second.block(blocked);  // queued after the buffer's destruction
  for (int i = 0; i < 100; ++i) cpu::Stream(busy).enqueue([] {});
  operators.synchronize(busy);
  CHECK(keeps(before));
  first.open();
  CHECK(gives_back(before));
  second.open();
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
  cpu::Buffer buffer = operators.allocate(kBytes);
  const std::int64_t before = mapped_bytes();
  gate.block(stream);
  stream.enqueue([] { throw std::runtime_error("in the queue"); });
  operators.fill_zero(buffer.data(), kPage, stream);  // skipped
  buffer = {};
  gate.open();
  CHECK(gives_back(before));
  std::byte byte{};
  CHECK_THROWS_AS(operators.download(&byte, &byte, 1, stream), std::runtime_error);
}

}  // namespace
}  // namespace helix::test
