// SPDX-License-Identifier: Apache-2.0
// The two threads of a Frontend.
#include "serve/frontend.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <new>
#include <system_error>
#include <utility>

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

/// Whether nobody can add to what `in` has: it is a file, or its other end is closed.
bool is_all_sent(int in) {
  struct stat status {};
  if (fstat(in, &status) == 0 && S_ISREG(status.st_mode)) return true;
  pollfd watched{in, POLLRDHUP, 0};
  return poll(&watched, 1, 0) > 0 && (watched.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

/// Whether a write that fails so has met the closed end of a pipe or socket.
bool has_left(int code) {
  return code == EPIPE || code == ECONNRESET;
}

}  // namespace

Frontend::Frontend(int in, int out, std::chrono::milliseconds patience)
    : in_(in), out_(out), patience_(patience) {
  std::signal(SIGPIPE, SIG_IGN);  // a client that left is seen by what write() returns
  HELIX_EXPECTS(pipe2(wake_, O_CLOEXEC) == 0, ErrorCode::io,
                "a pipe cannot be made: ", std::error_code(errno, std::generic_category()).message());
  try {
    reader_ = std::thread([this] { guard([this] { read_lines(); }); });
    writer_ = std::thread([this] { guard([this] { write_lines(); }); });
  } catch (const std::system_error& error) {
    if (reader_.joinable()) {
      close(wake_[1]);
      reader_.join();
      close(wake_[0]);
    }
    throw Error(ErrorCode::capacity, "a thread for input and output cannot be started: ", error.what());
  }
}

Frontend::~Frontend() {
  finish();
}

std::string Frontend::finish() {
  if (!reader_.joinable()) return failure_;
  {
    const std::scoped_lock lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  close(wake_[1]);  // which the reader sees
  reader_.join();
  writer_.join();
  close(wake_[0]);
  return failure_;
}

template <class Body>
void Frontend::guard(const Body& body) noexcept {
  try {
    body();
  } catch (const std::bad_alloc&) {
    const std::scoped_lock lock(mutex_);
    lines_.clear();
    std::string().swap(partial_);
    std::string().swap(pending_);
    failure_ = "no memory for what came on standard input";
    end_input();
    is_client_gone_ = true;
  }
  changed_.notify_all();
}

void Frontend::end_input() {
  has_ended_ = true;
  end_ = std::chrono::steady_clock::now();
}

void Frontend::add_line(Line line) {
  line_bytes_ += line.text.size() + sizeof(Line);
  lines_.push_back(std::move(line));
}

void Frontend::add_bytes(std::string_view bytes) {
  const std::scoped_lock lock(mutex_);
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    const std::string_view part = bytes.substr(0, end);
    if (!is_skipping_ && partial_.size() + part.size() > kMaxLineBytes) {
      add_line({{}, true});
      std::string().swap(partial_);
      is_skipping_ = true;
    }
    if (!is_skipping_) partial_ += part;
    if (end == std::string_view::npos) break;
    if (!is_skipping_) add_line({std::exchange(partial_, {}), false});
    is_skipping_ = false;
    bytes.remove_prefix(end + 1);
  }
  changed_.notify_all();
}

/// Lines that nobody takes are left to the client, whose writes then wait. That it has left is looked for
/// meanwhile, as its end is not read.
void Frontend::wait_for_room() {
  std::unique_lock lock(mutex_);
  const auto has_room = [this] { return is_closing_ || line_bytes_ <= kMaxLineBytes; };
  while (!changed_.wait_for(lock, std::chrono::milliseconds(kPollMilliseconds), has_room)) {
    if (is_all_sent_ || !is_all_sent(in_)) continue;
    is_all_sent_ = true;
    end_ = std::chrono::steady_clock::now();
  }
}

void Frontend::read_lines() {
  std::array<char, kReadBytes> buffer;
  while (true) {
    wait_for_room();
    // The output only for its closed end, which an idle server would not see otherwise.
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
    if (count <= 0) break;
    add_bytes({buffer.data(), static_cast<std::size_t>(count)});
  }
  const std::scoped_lock lock(mutex_);
  if (!partial_.empty()) add_line({std::exchange(partial_, {}), false});
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
    while (in_flight_ > 0 && !is_client_gone_) {
      lock.unlock();
      // A pipe that can be written takes PIPE_BUF bytes without waiting, so that the end never waits for
      // long.
      pollfd watched{out_, POLLOUT, 0};
      const bool is_ready = poll(&watched, 1, kPollMilliseconds) > 0;
      const ssize_t count = is_ready ? ::write(out_, text.data() + (text.size() - in_flight_),
                                               std::min<std::size_t>(in_flight_, PIPE_BUF))
                                     : 0;
      const int code = errno;
      lock.lock();
      const auto now = std::chrono::steady_clock::now();
      if (count > 0) {
        in_flight_ -= static_cast<std::size_t>(count);
        last_progress = now;
      }
      const bool has_failed = count < 0 && code != EINTR && code != EAGAIN;
      if (has_failed && !has_left(code)) {
        failure_ =
            "standard output cannot be written: " + std::error_code(code, std::generic_category()).message();
      }
      // The reader ends before finish() waits for this thread, if not before.
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

std::optional<Frontend::Line> Frontend::take_line() {
  std::optional<Line> taken;
  {
    const std::scoped_lock lock(mutex_);
    if (lines_.empty()) return taken;
    taken = std::move(lines_.front());
    lines_.pop_front();
    line_bytes_ -= taken->text.size() + sizeof(Line);
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

bool Frontend::is_client_gone() const {
  const std::scoped_lock lock(mutex_);
  return is_client_gone_;
}

}  // namespace helix::decode
