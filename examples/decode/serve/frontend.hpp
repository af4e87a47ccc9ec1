// SPDX-License-Identifier: Apache-2.0
// Frontend: reads the commands and writes the events of a serving decoder, concurrently with its steps.
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

/// Reads commands from one descriptor and writes events to another, each on a thread of its own. A silent
/// client, a client that does not read, and a line that takes seconds to parse therefore do not delay a step.
/// All written lines reach the client before finish() returns, unless finish() says why not.
class Frontend {
 public:
  // Enough for prompts of millions of tokens.
  static constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;
  /// Limit on the memory of lines that are not yet taken. Beyond it nothing more is read; the last line may
  /// exceed it.
  static constexpr std::size_t kMaxWaitingBytes = std::size_t{64} << 20;
  static constexpr std::size_t kMaxBacklog = std::size_t{8} << 20;

  /// The descriptors stay open and belong to the caller. Once the input has ended or its writer has left, a
  /// client that reads nothing for `patience` counts as gone.
  /// @throws Error(capacity) if a thread cannot be started, Error(io) if there is no descriptor left.
  Frontend(int in, int out, std::chrono::milliseconds patience = std::chrono::seconds(10));
  /// Ends both threads. Without finish(), as after a failure, a client that reads nothing for a second, or
  /// for `patience` if that is less, counts as gone.
  ~Frontend();
  Frontend(const Frontend&) = delete;
  Frontend& operator=(const Frontend&) = delete;

  /// Begins to read; requests get these defaults. Lines stay with the client until then. Call it once.
  void start_reading(const ServeDefaults& defaults);
  /// The oldest line that was read and not taken, if there is one. Lines of white space are skipped. Does not
  /// wait, not even for a line that is being parsed.
  std::optional<ParsedLine> take_line();
  /// Waits until there is a line, the input has ended, the client is gone, or the time has passed.
  void wait_for_line(std::chrono::milliseconds longest);
  /// Whether no line is left and none will come.
  bool has_ended() const;

  /// Queues `lines` for the client. Does not wait.
  void write(std::string lines);
  /// Bytes queued for the client that it has not read.
  std::size_t backlog() const;
  /// Whether the client is more than kMaxBacklog bytes behind. Steps should then wait for it.
  bool is_behind() const { return backlog() > kMaxBacklog; }
  /// Waits until the client has caught up, or the time has passed.
  void wait_for_client(std::chrono::milliseconds longest);
  /// Waits until the client has read everything queued for it, or is gone, or the time has passed.
  void wait_until_written(std::chrono::milliseconds longest);
  /// Whether nothing can reach the client any more: its end is closed, or writing fails.
  bool is_client_gone() const;

  /// Ends both threads. Returns a description of what could not be read from or
  /// written to a client that had not left; empty if nothing.
  std::string finish();

 private:
  void read_lines();
  void write_lines();
  void add_line(ParsedLine line);
  /// Records that no line will come any more. The mutex must be held.
  void end_input();
  /// Waits until reading has started and enough lines are taken that there is room for more. Returns false if
  /// the frontend is closing.
  bool wait_for_room();
  /// Gives up both directions after a thread's exception: what waits is dropped, and finish() returns `why`,
  /// or nothing if there is no memory even for that.
  void give_up(const char* why) noexcept;
  /// Ends the threads that have started.
  void close_threads() noexcept;
  /// Runs the body of a thread, and gives up on any exception.
  template <class Body>
  void guard(const Body& body) noexcept;

  struct Line {
    ParsedLine parsed;
    std::size_t bytes = 0;  // memory of the line
  };

  int in_;
  int out_;
  std::chrono::milliseconds patience_;
  int wake_[2] = {-1, -1};  // a pipe that ends the reader
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<ServeDefaults> defaults_;  // set when reading starts, then constant
  std::deque<Line> lines_;                 // not yet taken
  std::size_t line_bytes_ = 0;             // total memory of lines_
  bool has_ended_ = false;
  bool is_all_sent_ = false;                     // all input is sent, though its end may not be read yet
  std::chrono::steady_clock::time_point end_{};  // when the input ended or was seen to be all sent
  std::string pending_;                          // output not yet written
  std::size_t in_flight_ = 0;
  bool is_client_gone_ = false;
  std::string failure_;  // failed read or write, unless the client had left
  bool is_closing_ = false;
  std::thread reader_;
  std::thread writer_;
};

}  // namespace helix::decode
