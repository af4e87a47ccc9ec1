// SPDX-License-Identifier: Apache-2.0
// ServeClient: a serving decoder in this process, with the client's ends of its pipes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>
#include <poll.h>
#include <unistd.h>

#include <helix/error.hpp>

#include "cli/launch.hpp"
#include "decode/golden.hpp"
#include "serve/frontend.hpp"

namespace helix::test {

/// Runs the decoder until close(). Every wait is bounded.
class ServeClient {
 public:
  ServeClient(const ReferenceModel& model, const TopologySpec& spec, decode::GenerationRequest request,
              decode::LaunchOptions options = {})
      : ServeClient([&model, topo = Topology(spec, model.config.shape), request = std::move(request),
                     options](decode::Frontend& client) mutable {
          options.client = &client;
          decode::run_local(model.checkpoint, model.config, topo, request, options);
        }) {}

  /// `serve` runs a decoder that the test provides.
  explicit ServeClient(std::function<void(decode::Frontend&)> serve) {
    if (pipe(in_.data()) != 0 || pipe(out_.data()) != 0) throw Error(ErrorCode::io, "no pipe");
    client_.emplace(in_[0], out_[1]);
    decoder_ = std::thread([this, serve = std::move(serve)] {
      try {
        serve(*client_);
      } catch (...) {
        failure_ = std::current_exception();
      }
      client_.reset();  // writes the remaining output
      ::close(out_[1]);
      has_ended_ = true;
    });
  }
  ~ServeClient() {
    if (in_[1] >= 0) ::close(in_[1]);
    decoder_.join();
    ::close(in_[0]);
    if (out_[0] >= 0) ::close(out_[0]);
  }
  ServeClient(const ServeClient&) = delete;
  ServeClient& operator=(const ServeClient&) = delete;

  void send(const nlohmann::json& command) { send_line(command.dump()); }
  void send_line(std::string_view line) {
    std::string text(line);
    text += '\n';
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t count = write(in_[1], text.data() + done, text.size() - done);
      if (count <= 0) throw Error(ErrorCode::io, "the decoder reads no more");
      done += static_cast<std::size_t>(count);
    }
  }

  /// The next event if one arrives in time; nullopt otherwise, and at the end.
  std::optional<nlohmann::json> next_event(std::chrono::milliseconds longest = std::chrono::seconds(60)) {
    while (true) {
      const std::size_t end = received_.find('\n');
      if (end != std::string::npos) {
        const std::string line = received_.substr(0, end);
        received_.erase(0, end + 1);
        return nlohmann::json::parse(line);
      }
      pollfd watched{out_[0], POLLIN, 0};
      if (poll(&watched, 1, static_cast<int>(longest.count())) <= 0) return std::nullopt;
      std::array<char, 65536> buffer;
      const ssize_t count = read(out_[0], buffer.data(), buffer.size());
      if (count <= 0) return std::nullopt;
      received_.append(buffer.data(), static_cast<std::size_t>(count));
    }
  }

  /// Bytes of unread events. Only meaningful while requests run.
  std::size_t backlog() const { return client_->backlog(); }

  /// Ends the input. Events continue until all requests are done.
  void close() {
    ::close(in_[1]);
    in_[1] = -1;
  }

  /// Ends the input, and returns when the decoder has ended.
  /// @throws the decoder's error.
  void finish() {
    close();
    while (next_event()) {
    }
    if (!has_ended(std::chrono::seconds(10))) throw Error(ErrorCode::timeout, "the decoder does not end");
    rethrow();
  }

  /// Stops reading, so that the decoder's writes fail.
  void hang_up() {
    ::close(out_[0]);
    out_[0] = -1;
  }
  /// Whether the decoder ends within `longest`.
  bool has_ended(std::chrono::milliseconds longest) const {
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!has_ended_ && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return has_ended_;
  }

  /// To be called after the last event: rethrows the decoder's error, if any.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::array<int, 2> in_{};   // to the decoder
  std::array<int, 2> out_{};  // from the decoder
  std::optional<decode::Frontend> client_;
  std::exception_ptr failure_;
  std::atomic<bool> has_ended_ = false;
  std::string received_;
  std::thread decoder_;
};

}  // namespace helix::test
