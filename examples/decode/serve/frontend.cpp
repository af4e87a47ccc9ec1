// SPDX-License-Identifier: Apache-2.0
// The reading and the writing thread of a Frontend.
#include "serve/frontend.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <functional>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

constexpr std::size_t kReadBytes = 65536;
constexpr int kPollMilliseconds = 100;
constexpr std::chrono::seconds kLastPatience(1);  // with a client that reads nothing, after a failure
/// Waits of kPollMilliseconds take so long only if this process was stopped, and perhaps its client too.
constexpr std::chrono::milliseconds kOverslept(500);

/// Assembles lines from pieces of input.
class LineSplitter {
 public:
  /// Receives a line without its line end, or the first kMaxLineBytes of a longer one, which is not whole.
  using Take = std::function<void(const std::string& line, bool is_whole)>;

  explicit LineSplitter(Take take) : take_(std::move(take)) {}

  void add(std::string_view bytes) {
    while (!bytes.empty()) {
      const std::size_t end = bytes.find('\n');
      add_part(bytes.substr(0, end));
      if (end == std::string_view::npos) return;
      if (!is_skipping_) take_(std::exchange(partial_, {}), true);
      is_skipping_ = false;
      bytes.remove_prefix(end + 1);
    }
  }
  /// Takes a last line that has no line end.
  void finish() {
    if (!partial_.empty()) take_(std::exchange(partial_, {}), true);
  }

 private:
  void add_part(std::string_view part) {
    if (is_skipping_) return;
    const std::size_t room = Frontend::kMaxLineBytes - partial_.size();
    partial_ += part.substr(0, room);
    if (part.size() <= room) return;
    is_skipping_ = true;
    take_(std::exchange(partial_, {}), false);
  }

  Take take_;
  std::string partial_;       // a line whose end has not arrived
  bool is_skipping_ = false;  // skipping to the end of a line that is too long
};

/// Parses the line; returns nullopt for white space.
std::optional<ParsedLine> parse_line(const std::string& line, bool is_whole, const ServeDefaults& defaults) {
  if (!is_whole) {
    return BadLine{id_of(line), "a line has more than " + std::to_string(Frontend::kMaxLineBytes) +
                                    " bytes; send shorter ones"};
  }
  if (line.find_first_not_of(" \t\r") == std::string::npos) return std::nullopt;
  return parse_command(line, defaults);
}

/// Memory that the parsed line takes besides its text.
std::size_t owned_bytes(const ParsedLine& line) {
  if (const auto* bad = std::get_if<BadLine>(&line)) return bad->id.capacity() + bad->message.capacity();
  const auto* request = std::get_if<ServeRequest>(&std::get<ServeCommand>(line));
  if (request == nullptr) return 0;  // at most an id
  return (request->prompt.capacity() + request->stop.capacity()) * sizeof(TokenIds::value_type);
}

/// Whether no more input can arrive: `in` is a file, or its other end is closed.
bool is_all_sent(int in) {
  struct stat status {};
  if (fstat(in, &status) == 0 && S_ISREG(status.st_mode)) return true;
  pollfd watched{in, POLLRDHUP, 0};
  return poll(&watched, 1, 0) > 0 && (watched.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

/// Whether a write that failed with `code` met the closed end of a pipe or socket.
bool has_left(int code) {
  return code == EPIPE || code == ECONNRESET;
}

}  // namespace

Frontend::Frontend(int in, int out, std::chrono::milliseconds patience)
    : in_(in), out_(out), patience_(patience) {
  std::signal(SIGPIPE, SIG_IGN);  // write() reports a client that has left, so the signal is not needed
  HELIX_EXPECTS(pipe2(wake_, O_CLOEXEC) == 0, ErrorCode::io,
                "a pipe cannot be made: ", std::error_code(errno, std::generic_category()).message(),
                "; close other files, or raise the limit (ulimit -n)");
  try {
    reader_ = std::thread([this] { guard([this] { read_lines(); }); });
    writer_ = std::thread([this] { guard([this] { write_lines(); }); });
  } catch (const std::system_error& error) {
    close_threads();
    throw Error(ErrorCode::capacity, "a thread for input and output cannot be started: ", error.what(),
                "; raise the limit (ulimit -u or -v, a container's pids)");
  } catch (...) {
    close_threads();
    throw;
  }
}

Frontend::~Frontend() {
  {
    const std::scoped_lock lock(mutex_);
    patience_ = std::min<std::chrono::milliseconds>(patience_, kLastPatience);
  }
  close_threads();
}

std::string Frontend::finish() {
  close_threads();
  return failure_;
}

void Frontend::close_threads() noexcept {
  if (wake_[1] < 0) return;  // has been done
  {
    const std::scoped_lock lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  close(std::exchange(wake_[1], -1));  // wakes the reader
  if (reader_.joinable()) reader_.join();
  if (writer_.joinable()) writer_.join();
  close(wake_[0]);
}

template <class Body>
void Frontend::guard(const Body& body) noexcept {
  try {
    body();
  } catch (const std::bad_alloc&) {
    give_up("no memory for what came on standard input");
  } catch (const std::exception& error) {
    give_up(error.what());
  }
  changed_.notify_all();
}

void Frontend::give_up(const char* why) noexcept {
  const std::scoped_lock lock(mutex_);
  lines_.clear();
  std::string().swap(pending_);
  end_input();
  is_client_gone_ = true;
  try {
    failure_ = why;
  } catch (const std::bad_alloc&) {
  }
}

void Frontend::end_input() {
  has_ended_ = true;
  end_ = std::chrono::steady_clock::now();
}

void Frontend::add_line(ParsedLine line) {
  const std::size_t bytes = sizeof(Line) + owned_bytes(line);
  {
    const std::scoped_lock lock(mutex_);
    lines_.push_back({std::move(line), bytes});
    line_bytes_ += bytes;
  }
  changed_.notify_all();
}

/// Lines that nobody takes are left with the client, whose writes then block. This also watches whether the
/// client has left, because the end of its input is not being read.
bool Frontend::wait_for_room() {
  std::unique_lock lock(mutex_);
  const auto has_room = [this] { return is_closing_ || (defaults_ && line_bytes_ <= kMaxWaitingBytes); };
  while (!changed_.wait_for(lock, std::chrono::milliseconds(kPollMilliseconds), has_room)) {
    if (is_all_sent_ || !is_all_sent(in_)) continue;
    is_all_sent_ = true;
    end_ = std::chrono::steady_clock::now();
  }
  return !is_closing_;
}

void Frontend::read_lines() {
  std::array<char, kReadBytes> buffer;
  LineSplitter lines([this](const std::string& line, bool is_whole) {
    if (std::optional<ParsedLine> parsed = parse_line(line, is_whole, *defaults_))
      add_line(std::move(*parsed));
  });
  while (wait_for_room()) {
    // The output is watched only for a closed end, which an idle server would not notice otherwise.
    std::array<pollfd, 3> watched{pollfd{in_, POLLIN, 0}, pollfd{wake_[0], POLLIN, 0}, pollfd{out_, 0, 0}};
    if (poll(watched.data(), watched.size(), -1) < 0 && errno == EINTR) continue;
    if (watched[1].revents != 0) break;  // the frontend is closing
    if ((watched[2].revents & (POLLERR | POLLHUP)) != 0) {
      const std::scoped_lock lock(mutex_);
      is_client_gone_ = true;
      break;
    }
    const ssize_t count = read(in_, buffer.data(), buffer.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) {
      const std::string reason = std::error_code(errno, std::generic_category()).message();
      const std::scoped_lock lock(mutex_);
      failure_ = "standard input cannot be read: " + reason;
    }
    if (count == 0) lines.finish();
    if (count <= 0) break;  // what an error cut off is no line
    lines.add({buffer.data(), static_cast<std::size_t>(count)});
  }
  const std::scoped_lock lock(mutex_);
  end_input();
  changed_.notify_all();
}

void Frontend::write_lines() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !pending_.empty() || is_closing_; });
    if (pending_.empty()) return;
    const std::string text = std::exchange(pending_, {});
    in_flight_ = text.size();
    auto last_progress = std::chrono::steady_clock::now();
    auto last_look = last_progress;
    while (in_flight_ > 0 && !is_client_gone_) {
      lock.unlock();
      // A writable pipe takes PIPE_BUF bytes without blocking, so finish() never waits for long.
      pollfd watched{out_, POLLOUT, 0};
      const bool is_ready = poll(&watched, 1, kPollMilliseconds) > 0;
      const ssize_t count = is_ready ? ::write(out_, text.data() + (text.size() - in_flight_),
                                               std::min<std::size_t>(in_flight_, PIPE_BUF))
                                     : 0;
      const int code = errno;
      lock.lock();
      const auto now = std::chrono::steady_clock::now();
      if (count > 0) in_flight_ -= static_cast<std::size_t>(count);
      if (count > 0 || now - last_look > kOverslept) last_progress = now;
      last_look = now;
      const bool has_failed = count < 0 && code != EINTR && code != EAGAIN;
      if (has_failed && !has_left(code)) {
        failure_ =
            "standard output cannot be written: " + std::error_code(code, std::generic_category()).message();
      }
      // The reader ends before finish() waits for this thread, or earlier.
      const bool is_late = (has_ended_ || is_all_sent_) && now - std::max(last_progress, end_) > patience_;
      if (is_late && !has_failed) {
        failure_ = "nobody read standard output for " +
                   fmt::format("{}", static_cast<double>(patience_.count()) / 1000) +
                   " s at the end: " + std::to_string(in_flight_ + pending_.size()) + " bytes are lost";
      }
      if (has_failed || is_late) is_client_gone_ = true;
    }
    if (is_client_gone_) {
      pending_.clear();
      in_flight_ = 0;
    }
    changed_.notify_all();
  }
}

void Frontend::start_reading(const ServeDefaults& defaults) {
  {
    const std::scoped_lock lock(mutex_);
    defaults_ = defaults;
  }
  changed_.notify_all();
}

std::optional<ParsedLine> Frontend::take_line() {
  std::optional<ParsedLine> taken;
  {
    const std::scoped_lock lock(mutex_);
    if (lines_.empty()) return taken;
    taken = std::move(lines_.front().parsed);
    line_bytes_ -= lines_.front().bytes;
    lines_.pop_front();
  }
  changed_.notify_all();
  return taken;
}

void Frontend::wait_for_line(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [this] { return !lines_.empty() || has_ended_ || is_client_gone_; });
}

bool Frontend::has_ended() const {
  const std::scoped_lock lock(mutex_);
  return has_ended_ && lines_.empty();
}

void Frontend::write(std::string lines) {
  {
    const std::scoped_lock lock(mutex_);
    if (is_client_gone_) return;
    pending_ += lines;
  }
  changed_.notify_all();
}

std::size_t Frontend::backlog() const {
  const std::scoped_lock lock(mutex_);
  return pending_.size() + in_flight_;
}

void Frontend::wait_for_client(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest,
                    [this] { return is_client_gone_ || pending_.size() + in_flight_ <= kMaxBacklog; });
}

void Frontend::wait_until_written(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [this] { return is_client_gone_ || pending_.size() + in_flight_ == 0; });
}

bool Frontend::is_client_gone() const {
  const std::scoped_lock lock(mutex_);
  return is_client_gone_;
}

}  // namespace helix::decode
