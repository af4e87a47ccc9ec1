// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of this process, over NCCL or over each other's memory, and how they time collective work.
#pragma once

#include <chrono>
#include <concepts>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/error.hpp>

#include "timing.hpp"

namespace helix::bench {

/// The backend of a rank whose collectives use Comm: cuda::NcclComm or cuda::PeerComm.
template <class Comm>
using RankBackend = cuda::Backend<Comm, bf16>;

/// The suffix of a case's name.
template <class Comm>
std::string over() {
  return std::same_as<Comm, cuda::PeerComm> ? "/windows" : "";
}

/// A barrier for the threads of all ranks. If a rank fails, the waits of the others end with an Error.
class MeetingPoint {
 public:
  explicit MeetingPoint(int size) : size_(size) {}

  void arrive_and_wait() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return has_failed_ || round_ != round; });
    if (round_ == round) throw Error(ErrorCode::peer_failed, "another rank failed");
  }

  void fail() {
    const std::lock_guard lock(mutex_);
    has_failed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int size_;
  int arrived_ = 0;
  int round_ = 0;
  bool has_failed_ = false;
};

/// One rank: its thread's device is current.
template <class Comm>
struct Rank {
  RankBackend<Comm> backend;
  cuda::Stream stream;
  MeetingPoint& meeting;

  int index() const { return backend.comms().stage->rank(); }
};

template <class Comm>
std::vector<Comm> make_group(const std::vector<int>& devices) {
  if constexpr (std::same_as<Comm, cuda::PeerComm>) {
    return Comm::create_group(devices);
  } else {
    return Comm::create_group(devices, std::chrono::seconds(60), Comm::GraphUse::one_at_a_time);
  }
}

/// Calls body(Rank<Comm>&) for each of the kvp * tpa ranks of a stage on a thread of its own. Rank r uses GPU
/// r of `num_gpus`; ranks share GPUs if there are more ranks.
/// @throws the failure of the rank that failed first.
template <class Comm, class Body>
void run_ranks(int kvp, int tpa, int num_gpus, const Body& body) {
  const int size = kvp * tpa;
  std::vector<int> devices;
  for (int r = 0; r < size; ++r) devices.push_back(r % num_gpus);
  auto comms = make_group<Comm>(devices);
  MeetingPoint meeting(size);
  std::mutex mutex;
  std::exception_ptr first_failure;
  const auto run_rank = [&](int r) {
    Comm& stage = comms[static_cast<std::size_t>(r)];
    const int device = devices[static_cast<std::size_t>(r)];
    try {
      cuda::use_device(device);
      Comm group = stage.split(r % tpa, r / tpa);
      RankBackend<Comm> backend(stage, std::move(group), device);
      Rank<Comm> rank{backend, backend.create_stream(), meeting};
      body(rank);
      meeting.arrive_and_wait();  // no rank frees memory while another still works
    } catch (const std::exception& error) {
      {
        const std::lock_guard lock(mutex);
        if (!first_failure) first_failure = std::current_exception();
      }
      meeting.fail();
      stage.abort(error.what());
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (int r = 1; r < size; ++r) threads.emplace_back(run_rank, r);
    } catch (const std::exception& error) {  // threads that have started wait for the others
      meeting.fail();
      comms.front().abort(error.what());
      throw;
    }
    run_rank(0);
  }
  if (first_failure) std::rethrow_exception(first_failure);
}

/// Microseconds of each of `replays` consecutive replays of a graph that all ranks replay, after two untimed
/// replays. `before` queues work ahead of each replay and is timed with it. Collective.
template <class Comm>
std::vector<double> time_replays(
    Rank<Comm>& rank, const cuda::Graph& graph, int replays, const std::function<void()>& before = [] {}) {
  constexpr int kUncounted = 2;
  std::vector<cuda::Event> events;
  for (int i = 0; i < kUncounted + replays; ++i) events.push_back(cuda::Event::create(true));
  rank.meeting.arrive_and_wait();
  for (const cuda::Event& event : events) {
    before();
    graph.replay(rank.stream);
    cuda::record(event, rank.stream);
  }
  rank.backend.synchronize(rank.stream);
  rank.meeting.arrive_and_wait();
  std::vector<double> times;
  for (std::size_t i = kUncounted; i < events.size(); ++i)
    times.push_back(1e3 * static_cast<double>(cuda::elapsed_ms(events[i - 1], events[i])));
  return times;
}

/// A graph of `per_graph` calls of `queue`, captured after all ranks have connected. Collective.
template <class Comm>
cuda::Graph capture_together(Rank<Comm>& rank, int per_graph, const std::function<void()>& queue) {
  for (int i = 0; i < 3; ++i) queue();  // ranks connect at first use
  rank.backend.synchronize(rank.stream);
  rank.meeting.arrive_and_wait();
  return cuda::Graph::capture(rank.stream, [&] {
    for (int i = 0; i < per_graph; ++i) queue();
  });
}

/// Microseconds of one `queue()`. Each rank's graph holds `per_graph` of them; the result is the median over
/// 50 replays on this rank's clock. Collective.
template <class Comm>
double time_together(Rank<Comm>& rank, int per_graph, const std::function<void()>& queue) {
  const auto graph = capture_together(rank, per_graph, queue);
  return median(time_replays(rank, graph, 50)) / per_graph;
}

/// Like time_together(), for several queues that take turns: GPUs that work hard slow down, so work that is
/// timed later would seem slower.
template <class Comm>
std::vector<double> time_in_turn(Rank<Comm>& rank, const std::vector<std::function<void()>>& queues) {
  constexpr int kRounds = 5;
  constexpr int kReplays = 10;
  std::vector<cuda::Graph> graphs;
  for (const auto& queue : queues) graphs.push_back(capture_together(rank, 1, queue));
  std::vector<std::vector<double>> times(queues.size());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      const auto more = time_replays(rank, graphs[i], kReplays);
      times[i].insert(times[i].end(), more.begin(), more.end());
    }
  }
  std::vector<double> medians;
  for (const auto& of_queue : times) medians.push_back(median(of_queue));
  return medians;
}

}  // namespace helix::bench
