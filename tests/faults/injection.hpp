// SPDX-License-Identifier: Apache-2.0
// Backends and communicators that fail where a test says: at the n-th call of one rank, on the host or in its
// queue.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <helix/cpu/stream.hpp>
#include <helix/dtype.hpp>
#include <helix/job_comms.hpp>

namespace helix::test {

/// What goes wrong.
enum class Fault {
  none,
  host_exception,  ///< The call throws on the host.
  /// A task before the call throws on the stream's worker, or on the host if there is no worker.
  queue_exception,
  no_memory,   ///< The call throws std::bad_alloc on the host.
  host_stop,   ///< The rank's host thread stops for longer than the others wait.
  queue_stop,  ///< The rank's stream stops, or its host thread if there is no worker.
  mismatch,    ///< A collective is called with another size.
  skip,        ///< A collective is not called.
};

inline std::string_view to_string(Fault fault) {
  constexpr std::string_view kNames[] = {"none",      "host_exception", "queue_exception", "no_memory",
                                         "host_stop", "queue_stop",     "mismatch",        "skip"};
  return kNames[static_cast<std::size_t>(fault)];
}

inline bool is_stop(Fault fault) {
  return fault == Fault::host_stop || fault == Fault::queue_stop;
}
inline bool is_of_collectives(Fault fault) {
  return fault == Fault::mismatch || fault == Fault::skip;
}

/// The fault of one rank, at its first suitable call from number `call` on.
struct Injection {
  Fault fault = Fault::none;
  std::int64_t call = 0;
  std::chrono::milliseconds stop{0};  ///< How long a stop lasts.
};

/// Counts the calls of one rank, made from its one host thread, and injects the fault.
class FaultPoint {
 public:
  explicit FaultPoint(const Injection& injection = {}) : injection_(injection) {}

  std::int64_t num_calls() const { return num_calls_; }
  /// The call that failed; empty before the failure.
  const std::string& where() const { return where_; }

  /// To be called before each call of the backend. `stream` is null if the call takes none or no task can be
  /// queued.
  void reach(std::string_view name, const cpu::Stream* stream) {
    if (!is_due(!is_of_collectives(injection_.fault))) return;
    where_ = name;
    const std::string what = "injected before call " + std::to_string(num_calls_) + ", " + where_;
    const auto sleep = [time = injection_.stop] { std::this_thread::sleep_for(time); };
    const bool is_queued = stream != nullptr && (injection_.fault == Fault::queue_exception ||
                                                 injection_.fault == Fault::queue_stop);
    if (is_stop(injection_.fault)) {
      if (is_queued) return cpu::Stream(*stream).enqueue(sleep);
      return sleep();
    }
    if (injection_.fault == Fault::no_memory) throw std::bad_alloc();
    if (!is_queued) throw std::runtime_error(what);
    cpu::Stream(*stream).enqueue(
        [what = std::make_shared<const std::string>(what)] { throw std::runtime_error(*what); });
  }

  /// To be called before each collective of a group of several ranks. Returns the fault to apply.
  Fault reach_collective(std::string_view name, const cpu::Stream* stream) {
    if (!is_of_collectives(injection_.fault)) {
      reach(name, stream);
      return Fault::none;
    }
    if (!is_due(true)) return Fault::none;
    where_ = name;
    return injection_.fault;
  }

 private:
  bool is_due(bool can_have_it) {
    ++num_calls_;
    return injection_.fault != Fault::none && can_have_it && where_.empty() && num_calls_ > injection_.call;
  }

  Injection injection_;
  std::int64_t num_calls_ = 0;
  std::string where_;
};

/// The stream in which a fault can be queued; null if this kind of stream has no worker.
inline const cpu::Stream* worker_of(const cpu::Stream& stream) {
  return &stream;
}
template <class Other>
const cpu::Stream* worker_of(const Other&) {
  return nullptr;
}

/// A communicator whose collectives may fail, use another size or be skipped.
template <class Base>
class FaultyComm : public Base {
 public:
  using Stream = typename Base::Stream;

  FaultyComm(Base inner, std::shared_ptr<FaultPoint> point)
      : Base(std::move(inner)), point_(std::move(point)) {}

  FaultPoint& point() const { return *point_; }

  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
    pass("all_reduce", count, stream, [&](std::int64_t n) { Base::all_reduce(in, out, n, dtype, stream); });
  }
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
    pass("reduce_scatter", count, stream,
         [&](std::int64_t n) { Base::reduce_scatter(in, out, n, dtype, stream); });
  }
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
    pass("all_gather", bytes, stream, [&](std::int64_t n) { Base::all_gather(in, out, n, stream); });
  }
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
    pass("all_to_all", bytes, stream, [&](std::int64_t n) { Base::all_to_all(in, out, n, stream); });
  }
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
    pass("broadcast", bytes, stream, [&](std::int64_t n) { Base::broadcast(buffer, n, root, stream); });
  }
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
    pass("send", bytes, stream, [&](std::int64_t n) { Base::send(buffer, n, peer, stream); });
  }
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
    pass("recv", bytes, stream, [&](std::int64_t n) { Base::recv(buffer, n, peer, stream); });
  }
  FaultyComm split(int color, int key) {
    point_->reach("split", nullptr);
    return {Base::split(color, key), point_};
  }

 private:
  template <class Call>
  void pass(std::string_view name, std::int64_t size, const Stream& stream, Call&& call) {
    if (Base::size() == 1) return call(size);
    switch (point_->reach_collective(name, worker_of(stream))) {
      case Fault::skip:
        return;
      case Fault::mismatch:
        return call(size + 8);  // refused before a byte moves
      default:
        return call(size);
    }
  }

  std::shared_ptr<FaultPoint> point_;
};

/// A backend over a FaultyComm whose calls may fail. Its results are those of Base.
template <class Base>
class FaultyBackend : public Base {
 public:
  using typename Base::Comm;

  /// `more` are further constructor arguments of Base, after its communicators.
  template <class... More>
  FaultyBackend(const JobComms<Comm>& comms, std::shared_ptr<FaultPoint> point, More&&... more)
      : Base(comms.stage, comms.kvp, std::forward<More>(more)...), point_(std::move(point)) {}

#define HELIX_FALLIBLE(name)                        \
  template <class... Args>                          \
  decltype(auto) name(Args&&... args) const {       \
    point_->reach(#name, stream_of(args...));       \
    return Base::name(std::forward<Args>(args)...); \
  }
  HELIX_FALLIBLE(allocate)
  HELIX_FALLIBLE(create_stream)
  HELIX_FALLIBLE(create_event)
  HELIX_FALLIBLE(record)
  HELIX_FALLIBLE(wait)
  HELIX_FALLIBLE(synchronize)
  HELIX_FALLIBLE(upload)
  HELIX_FALLIBLE(download)
  HELIX_FALLIBLE(copy)
  HELIX_FALLIBLE(fill_zero)
  HELIX_FALLIBLE(rms_norm)
  HELIX_FALLIBLE(linear)
  HELIX_FALLIBLE(head_linear)
  HELIX_FALLIBLE(head_rms_norm)
  HELIX_FALLIBLE(rope)
  HELIX_FALLIBLE(append_kv)
  HELIX_FALLIBLE(write_kv)
  HELIX_FALLIBLE(read_kv)
  HELIX_FALLIBLE(read_latents)
  HELIX_FALLIBLE(partial_attention)
  HELIX_FALLIBLE(pack_partial)
  HELIX_FALLIBLE(stamp)
  HELIX_FALLIBLE(check_exchange)
  HELIX_FALLIBLE(lse_combine)
  HELIX_FALLIBLE(combine_exchange)
  HELIX_FALLIBLE(swiglu)
  HELIX_FALLIBLE(router_logits)
  HELIX_FALLIBLE(route)
  HELIX_FALLIBLE(expert_ffn)
  HELIX_FALLIBLE(embed)
  HELIX_FALLIBLE(gather_rows)
  HELIX_FALLIBLE(sample)
  HELIX_FALLIBLE(logit_norms)
  HELIX_FALLIBLE(advance)
#undef HELIX_FALLIBLE

 private:
  static const cpu::Stream* stream_of() {
    return nullptr;
  }
  template <class First, class... Rest>
  static const cpu::Stream* stream_of(const First& first, const Rest&... rest) {
    if constexpr (sizeof...(Rest) == 0) {
      return worker_of(first);
    } else {
      return stream_of(rest...);
    }
  }

  std::shared_ptr<FaultPoint> point_;
};

}  // namespace helix::test
