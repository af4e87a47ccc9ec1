// SPDX-License-Identifier: Apache-2.0
// Frontend: commands in and events out of a serving decoder, beside its steps.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "serve/serve_request.hpp"

namespace helix::decode {

/// Reads commands from one descriptor and writes events to another, each on a thread of its own, so that
/// neither a silent client, nor one that does not read, nor a line that takes seconds to parse holds up a
/// step. What was written reaches the client before finish() returns, unless that says why not.
class Frontend {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;  // prompts of millions of tokens
  /// Memory of lines that are not taken, beyond which no more are read; the last may exceed it.
  static constexpr std::size_t kMaxWaitingBytes = std::size_t{64} << 20;
  static constexpr std::size_t kMaxBacklog = std::size_t{8} << 20;

  /// The descriptors stay open and the caller's. Once the input has ended, or its writer has left, a client
  /// that takes nothing for `patience` counts as gone. @throws Error(capacity) if a thread cannot be started.
  Frontend(int in, int out, std::chrono::milliseconds patience = std::chrono::seconds(10));
  ~Frontend();
  Frontend(const Frontend&) = delete;
  Frontend& operator=(const Frontend&) = delete;

  /// Begins to read, requests with these defaults; lines are left to the client before. Called once.
  void start_reading(const ServeDefaults& defaults);
  /// The oldest line that has come and was not taken, if there is one. Lines of white space are none. Does
  /// not wait, also not for a line that is parsed.
  std::optional<ParsedLine> take_line();
  /// Waits until there is a line, the input has ended, the client is gone, or the time is over.
  void wait_for_line(std::chrono::milliseconds longest);
  /// Whether no line is left and none will come.
  bool has_ended() const;

  /// Queues `lines` for the client. Does not wait.
  void write(std::string lines);
  /// Bytes queued for the client that it has not taken.
  std::size_t backlog() const;
  /// Whether the client is more than kMaxBacklog bytes behind: steps should wait for it.
  bool is_behind() const { return backlog() > kMaxBacklog; }
  /// Waits until the client has caught up, or the time is over.
  void wait_for_client(std::chrono::milliseconds longest);
  /// Waits until the client has taken all that is queued for it, or is gone, or the time is over.
  void wait_until_written(std::chrono::milliseconds longest);
  /// Whether nothing reaches the client any more: its end is closed, or cannot be written.
  bool is_client_gone() const;

  /// Ends both threads, as the destructor does. Returns, in words, what was not read of a client that had not
  /// left, or not written to it; empty if nothing.
  std::string finish();

 private:
  void read_lines();
  void write_lines();
  void add_line(ParsedLine line);
  /// No line will come any more; the mutex is held.
  void end_input();
  /// Waits until reading has started and so many lines are taken that there is room for more. Returns whether
  /// there is: not if the frontend is closing.
  bool wait_for_room();
  /// Gives up both directions after an exception of a thread: what waits is dropped, finish() returns `why`.
  void end_reading(std::string why);
  /// Runs the body of a thread.
  template <class Body>
  void guard(const Body& body) noexcept;

  struct Line {
    ParsedLine parsed;
    std::size_t bytes = 0;  // of memory
  };

  int in_;
  int out_;
  std::chrono::milliseconds patience_;
  int wake_[2] = {-1, -1};  // a pipe that ends the reader
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<ServeDefaults> defaults_;  // once reading has started; not changed then
  std::deque<Line> lines_;                 // that were not taken
  std::size_t line_bytes_ = 0;             // of them
  bool has_ended_ = false;
  bool is_all_sent_ = false;                     // what is left to read is the last, if it has not ended
  std::chrono::steady_clock::time_point end_{};  // when either was seen
  std::string pending_;                          // to be written
  std::size_t in_flight_ = 0;
  bool is_client_gone_ = false;
  std::string failure_;  // of a read or write, unless the client had left
  bool is_closing_ = false;
  std::thread reader_;
  std::thread writer_;
};

}  // namespace helix::decode
