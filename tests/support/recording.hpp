// SPDX-License-Identifier: Apache-2.0
// Recording: the calls of one rank in order, and a communicator that records its calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>

namespace helix::test {

/// One call. `stream` and `event` are the numbers of objects from create_stream() and create_event(); -1:
/// none.
struct Call {
  std::string name;
  int stream = -1;
  int event = -1;
  std::int64_t begin = 0;  ///< partial_attention: first token
  std::int64_t count = 0;  ///< the call's tokens, rows, elements or bytes

  friend bool operator==(const Call&, const Call&) = default;
};

/// The calls of one rank. Copies of a backend and its communicators share it.
class Recording {
 public:
  void add(std::string_view name, int stream, std::int64_t count = 0, int event = -1,
           std::int64_t begin = 0) {
    const std::lock_guard lock(mutex_);
    calls_.push_back({std::string(name), stream, event, begin, count});
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    calls_.clear();
  }
  std::vector<Call> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  int next_stream() { return streams_++; }
  int next_event() { return events_++; }

 private:
  mutable std::mutex mutex_;
  std::vector<Call> calls_;
  int streams_ = 0;
  int events_ = 0;
};

/// Whether stream order and events alone guarantee that calls[earlier] finishes before calls[later] starts.
inline bool happens_before(std::span<const Call> calls, std::size_t earlier, std::size_t later) {
  std::vector<bool> reached(calls.size(), false);
  reached[earlier] = true;
  for (std::size_t i = earlier + 1; i <= later; ++i) {
    for (std::size_t j = earlier; j < i && !reached[i]; ++j) {
      if (reached[j] && calls[j].stream == calls[i].stream && calls[i].stream >= 0) reached[i] = true;
    }
    if (calls[i].name != "wait") continue;
    for (std::size_t j = i; j-- > 0;) {  // the last record before the wait
      if (calls[j].name != "record" || calls[j].event != calls[i].event) continue;
      if (reached[j]) reached[i] = true;
      break;
    }
  }
  return reached[later];
}

/// A stream and its number.
struct RecordedStream {
  cpu::Stream inner;
  int id = -1;
};

/// A LocalComm whose collectives are recorded as "<group>.<operation>".
class RecordingComm {
 public:
  using Stream = RecordedStream;

  RecordingComm(cpu::LocalComm inner, std::string group, std::shared_ptr<Recording> recording)
      : inner_(std::move(inner)), group_(std::move(group)), recording_(std::move(recording)) {}

  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  void all_reduce(const void* in, void* out, std::int64_t n, DType dtype, Stream s) {
    note("all_reduce", s, n);
    inner_.all_reduce(in, out, n, dtype, s.inner);
  }
  void reduce_scatter(const void* in, void* out, std::int64_t n, DType dtype, Stream s) {
    note("reduce_scatter", s, n);
    inner_.reduce_scatter(in, out, n, dtype, s.inner);
  }
  void all_gather(const void* in, void* out, std::int64_t n, Stream s) {
    note("all_gather", s, n);
    inner_.all_gather(in, out, n, s.inner);
  }
  void all_to_all(const void* in, void* out, std::int64_t n, Stream s) {
    note("all_to_all", s, n);
    inner_.all_to_all(in, out, n, s.inner);
  }
  void all_to_all_v(const void* in, std::span<const std::int64_t> send, void* out,
                    std::span<const std::int64_t> receive, Stream s) {
    note("all_to_all_v", s, static_cast<std::int64_t>(send.size()));
    inner_.all_to_all_v(in, send, out, receive, s.inner);
  }
  void broadcast(void* buffer, std::int64_t n, int root, Stream s) {
    note("broadcast", s, n);
    inner_.broadcast(buffer, n, root, s.inner);
  }
  void send(const void* in, std::int64_t n, int peer, Stream s) {
    note("send", s, n);
    inner_.send(in, n, peer, s.inner);
  }
  void recv(void* out, std::int64_t n, int peer, Stream s) {
    note("recv", s, n);
    inner_.recv(out, n, peer, s.inner);
  }
  void barrier(Stream s) {
    note("barrier", s, 0);
    inner_.barrier(s.inner);
  }
  RecordingComm split(int color, int key) {
    recording_->add(group_ + ".split", -1);
    return {inner_.split(color, key), group_ + ".split", recording_};
  }
  void abort(std::string_view reason) noexcept { inner_.abort(reason); }

 private:
  void note(std::string_view operation, const Stream& s, std::int64_t n) {
    recording_->add(group_ + "." + std::string(operation), s.id, n);
  }

  cpu::LocalComm inner_;
  std::string group_;
  std::shared_ptr<Recording> recording_;
};

}  // namespace helix::test
