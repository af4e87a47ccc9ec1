// SPDX-License-Identifier: Apache-2.0
// Properties of cpu::Stream, cpu::Event, cpu::Buffer and the copies of cpu::Operators.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "support/catch.hpp"

using namespace std::chrono_literals;
using helix::ErrorCode;
using helix::cpu::Buffer;
using helix::cpu::Event;
using helix::cpu::Stream;

namespace {

/// Blocks tasks until open().
class Gate {
 public:
  void open() {
    is_open_ = true;
    is_open_.notify_all();
  }
  void pass() const { is_open_.wait(false); }

 private:
  std::atomic<bool> is_open_ = false;
};

std::string message_of(const std::exception_ptr& failure) {
  if (!failure) return "";
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string synchronize_message(const Stream& stream) {
  try {
    stream.synchronize();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("tasks run in the order of enqueuing, past the size of the ring") {
  Stream stream;
  std::vector<int> seen;
  for (int i = 0; i < 5000; ++i) stream.enqueue([&seen, i] { seen.push_back(i); });
  stream.synchronize();
  std::vector<int> expected(5000);
  std::iota(expected.begin(), expected.end(), 0);
  REQUIRE(seen == expected);
}

TEST_CASE("a stream and an event that were moved from still name their queue") {
  Stream first;
  Stream second = std::move(first);
  int count = 0;
  first.enqueue([&] { ++count; });  // NOLINT(bugprone-use-after-move)
  second.enqueue([&] { ++count; });
  Event event;
  event.record(first);
  const Event same = std::move(event);
  event.wait(second);  // NOLINT(bugprone-use-after-move)
  same.wait(second);
  first.synchronize();
  CHECK(count == 2);
}

TEST_CASE("a full queue makes the caller wait and loses nothing") {
  Stream stream;
  Gate gate;
  std::atomic<int> enqueued = 0;
  std::atomic<int> ran = 0;
  stream.enqueue([&] { gate.pass(); });
  std::thread producer([&] {
    for (int i = 0; i < 2000; ++i) {
      stream.enqueue([&] { ++ran; });
      ++enqueued;
    }
  });
  std::this_thread::sleep_for(50ms);
  CHECK(enqueued < 2000);  // negative control: the producer is blocked
  CHECK(ran == 0);
  gate.open();
  producer.join();
  stream.synchronize();
  REQUIRE(ran == 2000);
}

TEST_CASE("several producers share a stream") {
  Stream stream;
  int unguarded = 0;  // only the worker touches it
  std::vector<std::thread> producers;
  for (int p = 0; p < 4; ++p) {
    producers.emplace_back([stream, &unguarded]() mutable {
      for (int i = 0; i < 1000; ++i) stream.enqueue([&unguarded] { ++unguarded; });
    });
  }
  for (std::thread& producer : producers) producer.join();
  stream.synchronize();
  REQUIRE(unguarded == 4000);
}

TEST_CASE("captures of the largest size arrive whole and are destroyed once") {
  const auto alive = std::make_shared<int>(0);
  {
    Stream stream;
    std::array<unsigned char, Stream::kTaskBytes - 2 * sizeof(void*) - sizeof(std::shared_ptr<int>)>
        payload{};
    for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<unsigned char>(i * 7);
    bool equal = false;
    stream.enqueue(
        [payload, alive, target = &equal, expected = &payload] { *target = payload == *expected; });
    stream.synchronize();
    REQUIRE(equal);
    CHECK(alive.use_count() == 1);
    stream.enqueue([] { throw std::runtime_error("skip what follows"); });
    stream.enqueue([alive] { FAIL("ran after a failure"); });
    CHECK(synchronize_message(stream) == "skip what follows");
    CHECK(alive.use_count() == 1);  // a skipped task is destroyed too
  }
  REQUIRE(alive.use_count() == 1);
}

TEST_CASE("a capture that throws while it is stored leaves the stream usable") {
  struct Thrower {
    Thrower() = default;
    Thrower(const Thrower&) { throw std::runtime_error("no copy"); }
    void operator()() const {}
  };
  Stream stream;
  const Thrower thrower;
  CHECK_THROWS_WITH(stream.enqueue(thrower), "no copy");
  bool ran = false;
  stream.enqueue([&] { ran = true; });
  stream.synchronize();
  REQUIRE(ran);
}

TEST_CASE("the first failure is sticky, later tasks are skipped, the handler is called once on the worker") {
  Stream stream;
  std::thread::id worker;
  std::thread::id handler_thread;
  std::vector<std::string> handled;
  bool ran_after = false;
  stream.on_failure([&](std::exception_ptr failure) {
    handler_thread = std::this_thread::get_id();
    handled.push_back(message_of(failure));
    throw std::runtime_error("a handler's own failure is dropped");
  });
  int calls_of_another = 0;
  stream.on_failure([&](std::exception_ptr failure) { calls_of_another += message_of(failure) == "first"; });
  CHECK(stream.failure() == nullptr);
  stream.enqueue([&] { worker = std::this_thread::get_id(); });
  stream.enqueue([] { throw helix::Error(ErrorCode::out_of_step, "first"); });
  stream.enqueue([] { throw std::runtime_error("second"); });
  stream.enqueue([&] { ran_after = true; });
  CHECK(synchronize_message(stream) == "first");
  CHECK(synchronize_message(stream) == "first");
  CHECK(message_of(stream.failure()) == "first");
  CHECK_FALSE(ran_after);
  REQUIRE(handled == std::vector<std::string>{"first"});
  REQUIRE(handler_thread == worker);
  REQUIRE(calls_of_another == 1);

  std::atomic<int> late_calls = 0;
  stream.on_failure([&](std::exception_ptr failure) { late_calls += message_of(failure) == "first"; });
  CHECK(synchronize_message(stream) == "first");
  REQUIRE(late_calls == 1);  // a handler registered late still receives the failure
}

TEST_CASE("the last handle drains the queue before it is gone") {
  std::atomic<int> ran = 0;
  {
    Stream stream;
    const Stream copy = stream;
    CHECK(copy == stream);
    CHECK_FALSE(Stream() == stream);
    for (int i = 0; i < 100; ++i) {
      stream.enqueue([&] {
        std::this_thread::sleep_for(100us);
        ++ran;
      });
    }
  }
  REQUIRE(ran == 100);
}

TEST_CASE("the last handle may be dropped by the stream's own worker") {
  const auto ran = std::make_shared<std::atomic<int>>(0);
  const auto gate = std::make_shared<Gate>();
  {
    std::optional<Stream> stream{std::in_place};
    stream->enqueue([own = *stream, gate] { gate->pass(); });
    stream->enqueue([ran] { ++*ran; });
  }
  gate->open();
  for (int i = 0; i < 5000 && *ran == 0; ++i) std::this_thread::sleep_for(1ms);
  REQUIRE(*ran == 1);
}

TEST_CASE("a task may enqueue on its own stream, but not wait for it") {
  Stream stream;
  std::atomic<int> ran = 0;
  stream.enqueue([stream, &ran]() mutable { stream.enqueue([&ran] { ++ran; }); });
  while (ran == 0) std::this_thread::sleep_for(1ms);
  REQUIRE(ran == 1);

  std::atomic<int> code = -1;
  stream.enqueue([stream, &code]() mutable {
    try {
      for (int i = 0; i < 1000; ++i) stream.enqueue([] {});
    } catch (const helix::Error& error) {
      code = static_cast<int>(error.code());
    }
  });
  stream.synchronize();
  CHECK(code == static_cast<int>(ErrorCode::invalid_argument));

  stream.enqueue([stream] { stream.synchronize(); });
  CHECK_THROWS_AS(stream.synchronize(), helix::Error);
}

TEST_CASE("a wait holds back the waiting stream, not the host") {
  Stream producer;
  Stream consumer;
  Event event;
  Gate gate;
  int value = 0;
  int seen = -1;
  producer.enqueue([&] {
    gate.pass();
    value = 42;
  });
  event.record(producer);
  event.wait(consumer);
  consumer.enqueue([&] { seen = value; });
  gate.open();
  consumer.synchronize();
  REQUIRE(seen == 42);
}

TEST_CASE("waiting for an event that was never recorded does nothing") {
  Stream stream;
  Event event;
  event.wait(stream);
  bool ran = false;
  stream.enqueue([&] { ran = true; });
  stream.synchronize();
  REQUIRE(ran);
}

TEST_CASE("a wait refers to the record before it, whatever is recorded later") {
  Stream slow;
  Stream fast;
  Stream waiter;
  Event event;
  Gate first;
  Gate second;
  std::atomic<bool> first_done = false;
  slow.enqueue([&] {
    first.pass();
    first_done = true;
  });
  event.record(slow);
  event.wait(waiter);
  bool seen = false;
  waiter.enqueue([&] { seen = first_done; });
  event.record(fast);  // reached at once: must not release the wait above
  slow.enqueue([&] { second.pass(); });
  event.record(slow);  // not reached for a long time: must not delay the wait either
  std::this_thread::sleep_for(20ms);
  first.open();
  waiter.synchronize();
  REQUIRE(seen);
  second.open();
  slow.synchronize();  // the gate is destroyed before the stream
}

TEST_CASE("a failure spreads to the streams that wait for it, and only to what was recorded after it") {
  Stream failing;
  Stream before;
  Stream after;
  Stream after_that;
  Event early;
  Event late;
  Event later;
  bool ran = false;
  int handler_calls = 0;
  failing.enqueue([] {});
  early.record(failing);
  failing.enqueue([] { throw std::runtime_error("broken"); });
  late.record(failing);
  after.on_failure([&](std::exception_ptr) { ++handler_calls; });
  late.wait(after);
  after.enqueue([&] { ran = true; });
  later.record(after);
  later.wait(after_that);
  CHECK(synchronize_message(after_that) == "broken");
  CHECK(synchronize_message(after) == "broken");
  CHECK_FALSE(ran);
  CHECK(handler_calls == 1);
  early.wait(before);  // waits for the task before the failure
  CHECK(synchronize_message(before).empty());

  Stream healthy;
  late.record(healthy);  // recording again clears the failure from the event
  late.wait(before);
  CHECK(synchronize_message(before).empty());
}

TEST_CASE("an event outlives the stream it was recorded on") {
  Event event;
  Stream waiter;
  std::atomic<bool> ran = false;
  {
    Stream gone;
    gone.enqueue([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ran = true;
    });
    event.record(gone);
  }
  bool ran_before = false;
  event.wait(waiter);
  waiter.enqueue([&] { ran_before = ran; });
  waiter.synchronize();
  CHECK(ran_before);
}

TEST_CASE("two streams hand data back and forth through two events") {
  Stream a;
  Stream b;
  Event a_done;
  Event b_done;
  std::int64_t value = 0;  // guarded only by the events
  constexpr int kRounds = 2000;
  for (int i = 0; i < kRounds; ++i) {
    b_done.wait(a);
    a.enqueue([&] { value = value * 3 % 1000003 + 1; });
    a_done.record(a);
    a_done.wait(b);
    b.enqueue([&] { value = value * 5 % 1000003 + 2; });
    b_done.record(b);
  }
  a.synchronize();
  b.synchronize();
  std::int64_t expected = 0;
  for (int i = 0; i < kRounds; ++i) {
    expected = expected * 3 % 1000003 + 1;
    expected = expected * 5 % 1000003 + 2;
  }
  REQUIRE(value == expected);
}

TEST_CASE("a buffer is zeroed, aligned, movable and reports its size") {
  const Buffer empty;
  CHECK(empty.data() == nullptr);
  CHECK(empty.size_bytes() == 0);
  CHECK(Buffer(0).data() == nullptr);
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4095}, std::size_t{4097}, std::size_t{1} << 20}) {
    Buffer buffer(bytes);
    CHECK(buffer.size_bytes() == bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256 == 0);
    CHECK(std::all_of(buffer.data(), buffer.data() + bytes, [](std::byte b) { return b == std::byte{0}; }));
    std::memset(buffer.data(), 1, bytes);
    const std::byte* data = buffer.data();
    const Buffer moved = std::move(buffer);
    CHECK(moved.data() == data);
    CHECK(moved.size_bytes() == bytes);
    CHECK(buffer.size_bytes() == 0);  // NOLINT(bugprone-use-after-move): the moved-from state is the property
  }
}

TEST_CASE("a buffer that cannot be had is a capacity error with its size") {
  const std::size_t absurd = std::size_t{1} << 60;
  try {
    const Buffer buffer(absurd);
    FAIL("allocated " << absurd << " bytes");
  } catch (const helix::Error& error) {
    CHECK(error.code() == ErrorCode::capacity);
    CHECK_THAT(error.what(), Catch::Matchers::ContainsSubstring(std::to_string(absurd)));
  }
}

TEST_CASE("an upload takes its bytes when it is called, small and large") {
  const helix::cpu::Operators operators;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{511}, std::size_t{512},
                                  std::size_t{513}, std::size_t{100000}}) {
    CAPTURE(bytes);
    Stream stream = operators.create_stream();
    std::vector<unsigned char> source(bytes);
    for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<unsigned char>(i * 31 + 7);
    const std::vector<unsigned char> original = source;
    const Buffer target = operators.allocate(bytes);
    std::vector<unsigned char> back(bytes, 0xee);
    Gate gate;
    stream.enqueue([&] { gate.pass(); });
    operators.upload(target.data(), source.data(), bytes, stream);
    std::fill(source.begin(), source.end(), static_cast<unsigned char>(0xaa));
    gate.open();
    operators.download(back.data(), target.data(), bytes, stream);
    CHECK(back == original);
    operators.fill_zero(target.data(), bytes, stream);
    operators.download(back.data(), target.data(), bytes, stream);
    CHECK(back == std::vector<unsigned char>(bytes, 0));
  }
}

TEST_CASE("the number of threads is checked") {
  CHECK(helix::cpu::Operators().num_threads() == 1);
  CHECK(helix::cpu::Operators(0).num_threads() >= 1);
  CHECK(helix::cpu::Operators(3).num_threads() == 3);
  CHECK_THROWS_AS(helix::cpu::Operators(-1), helix::Error);
}
