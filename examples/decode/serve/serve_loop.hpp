// SPDX-License-Identifier: Apache-2.0
// ServeLoop: one rank of a decoder that takes requests while it runs.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <helix/error.hpp>
#include <helix/topology.hpp>

#include "files/reason.hpp"
#include "generate/gather_results.hpp"
#include "generate/generation.hpp"
#include "generate/measure.hpp"
#include "model/stage_model.hpp"
#include "serve/events.hpp"
#include "serve/frontend.hpp"
#include "serve/scheduler.hpp"
#include "serve/serve_plan.hpp"
#include "serve/serve_request.hpp"
#include "serve/step_order.hpp"

namespace helix::decode {

/// A communicator whose abort() ends the process before the host learns that a stream failed, such as
/// cpu::MpiComm.
template <class Comm>
concept EndsProcess = requires(Comm& comm, std::function<void(std::string_view)> last_words) {
  comm.before_abort(last_words);
};

/// All ranks run this loop together. In each turn the root takes the clients' commands, tells all ranks what
/// to do, and gathers what was drawn. An idle root sends an order often enough that no rank thinks it dead.
template <DecoderBackend B>
class ServeLoop {
 public:
  /// The client in `io` is used on world rank 0 only.
  ServeLoop(B& backend, typename B::Comm& world, const Topology& topo, const ModelConfig& config,
            const GenerationRequest& request, StageModel<B>& model, const RootIo& io)
      : world_(world),
        topo_(topo),
        model_(model),
        replica_(topo.coordinates(world.rank()).replica),
        channel_(backend, world, model.stream()),
        gather_(backend, world, model.stream()),
        client_(io.client),
        longest_silence_(io.longest_silence) {
    if (!is_root()) return;
    scheduler_ = std::make_unique<Scheduler>(plan_scheduler(request, config, topo),
                                             [this](const std::string& event) { events_ += event; });
    RankMemory memory = model.memory();
    memory.kv_bytes = static_cast<std::int64_t>(model.cache().capacity_bytes());
    client_->write(ready_event(serve_abilities(request, config, topo, io.activation, memory)));
    client_->start_reading({request.sampling, request.penalties});
    if constexpr (EndsProcess<typename B::Comm>)
      world.before_abort([this](std::string_view reason) { tell_failure(reason); });
  }
  ~ServeLoop() {
    if constexpr (EndsProcess<typename B::Comm>) {
      if (is_root()) world_.before_abort({});
    }
  }
  ServeLoop(const ServeLoop&) = delete;
  ServeLoop& operator=(const ServeLoop&) = delete;

  /// Returns when the root's input has ended and all requests are done, or when nobody reads the output.
  /// @throws the failure of a step or of another rank. Each unfinished request then has an error event, which
  /// a client that reads has received.
  void run() {
    try {
      serve();
    } catch (const std::exception& error) {
      if (is_root()) tell_failure(reason_of(error));
      throw;
    }
  }

 private:
  bool is_root() const { return world_.rank() == 0; }

  void serve() {
    while (true) {
      const StepOrder order = next_order();
      const ReplicaOrder& mine = order.replicas[static_cast<std::size_t>(replica_)];
      for (const CacheCall& call : mine.cache_calls) apply(call);
      const Drawn drawn = run_step(mine.step);
      complete(order, drawn);
      if (order.is_last) return;
    }
  }

  StepOrder next_order() {
    if (!is_root()) return deserialize_order(channel_.broadcast({}));
    StepOrder order = decide();
    if (world_.size() > 1) channel_.broadcast(serialize(order));
    return order;
  }

  /// Root: waits for something to do, but not so long that other ranks would give up.
  StepOrder decide() {
    if (client_->is_behind()) {
      client_->wait_for_client(longest_silence_);
    } else if (scheduler_->is_idle()) {
      client_->wait_for_line(longest_silence_);
    }
    const std::scoped_lock lock(in_use_);
    take_lines([this](ParsedLine line) { take(std::move(line)); });
    StepOrder order;
    if (client_->is_behind()) {
      order.replicas.resize(static_cast<std::size_t>(topo_.dp()));
    } else {
      order = scheduler_->next();
    }
    order.is_last = client_->is_client_gone() || (client_->has_ended() && scheduler_->is_idle());
    flush();
    return order;
  }

  /// Calls each(line) for the lines that have arrived. It stops when this takes so long that running requests
  /// and other ranks would have to wait, or when the client does not read the answers. The next turn takes
  /// the remaining lines.
  template <class Each>
  void take_lines(const Each& each) {
    constexpr int kLines = 64;  // between two checks of the client
    constexpr std::chrono::milliseconds kLongest{20};
    const auto end = std::chrono::steady_clock::now() + kLongest;
    bool goes_on = true;
    while (goes_on && !client_->is_behind()) {
      for (int line = 0; goes_on && line < kLines; ++line) {
        std::optional<ParsedLine> taken = client_->take_line();
        if (taken) each(std::move(*taken));
        goes_on = taken && std::chrono::steady_clock::now() < end;
      }
      flush();
    }
  }

  void take(ParsedLine line) {
    if (const auto* bad = std::get_if<BadLine>(&line)) {
      scheduler_->refuse(*bad);
      return;
    }
    auto& command = std::get<ServeCommand>(line);
    const bool asks_for_stats = std::holds_alternative<StatsCommand>(command);
    scheduler_->take(std::move(command));
    if (!asks_for_stats) return;
    ServeStats stats = scheduler_->stats();
    stats.resident_bytes = resident_bytes();
    events_ += stats_event(stats);
  }

  /// Root: ends all requests, including those read but not yet taken, and waits until a client that reads has
  /// their errors, because the process may end afterwards. Runs only once, on any thread; bounded.
  void tell_failure(std::string_view reason) {
    const auto end = std::chrono::steady_clock::now() + longest_silence_;
    const std::unique_lock lock(in_use_, end);
    if (!lock.owns_lock() || std::exchange(has_failed_, true)) return;
    const std::string message = "the decoder failed: " + std::string(reason);
    while (const std::optional<ParsedLine> line = client_->take_line()) refuse(*line, message);
    scheduler_->fail(message);
    flush();
    client_->wait_until_written(
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()));
  }

  void refuse(const ParsedLine& line, const std::string& message) {
    if (const auto* bad = std::get_if<BadLine>(&line)) {
      scheduler_->refuse(*bad);
    } else if (const auto* request = std::get_if<ServeRequest>(&std::get<ServeCommand>(line))) {
      scheduler_->refuse({request->id, message});
    }
  }

  void apply(const CacheCall& call) {
    ShardedKVCache<B>& cache = model_.cache();
    SequenceId made = call.id;
    switch (call.kind) {
      case CacheCall::Kind::add:
        made = cache.add();
        break;
      case CacheCall::Kind::fork:
        made = cache.fork(call.parent, call.tokens, model_.stream());
        break;
      case CacheCall::Kind::reserve:
        cache.reserve(call.id, call.tokens);
        break;
      case CacheCall::Kind::unreserve:
        cache.unreserve(call.id);
        break;
      case CacheCall::Kind::release:
        cache.release(call.id);
        break;
    }
    HELIX_EXPECTS(made == call.id, ErrorCode::out_of_step, "this rank's KV cache made sequence (slot ",
                  made.slot, ", generation ", made.generation, "), the root's (slot ", call.id.slot,
                  ", generation ", call.id.generation, ")");
  }

  Drawn run_step(const Step& step) {
    if (step.sequences.empty()) return {};
    counts_.clear();
    for (std::size_t i = 1; i < step.query_offsets.size(); ++i)
      counts_.push_back(step.query_offsets[i] - step.query_offsets[i - 1]);
    model_.cache().append(step.sequences, counts_, model_.stream());
    model_.forward(step);
    return model_.finish();
  }

  /// Gathers what the replicas drew on the root, which already has its own part.
  void complete(const StepOrder& order, const Drawn& drawn) {
    const bool has_work = std::ranges::any_of(
        order.replicas, [](const ReplicaOrder& replica) { return !replica.step.logit_rows.empty(); });
    if (!has_work) return;
    std::vector<ReplicaResult> results(order.replicas.size());
    ReplicaResult mine;
    mine.tokens.assign(drawn.tokens.begin(), drawn.tokens.end());
    mine.log_probs.assign(drawn.log_probs.chosen.begin(), drawn.log_probs.chosen.end());
    mine.best_ids.assign(drawn.log_probs.best_ids.begin(), drawn.log_probs.best_ids.end());
    mine.best_log_probs.assign(drawn.log_probs.best.begin(), drawn.log_probs.best.end());
    if (topo_.dp() > 1) {
      const auto all = gather_.gather(serialize(mine));
      // All ranks of a replica hold the same results; the last rank's are kept.
      for (int rank = 0; is_root() && rank < topo_.world_size(); ++rank) {
        results[static_cast<std::size_t>(topo_.coordinates(rank).replica)] =
            deserialize_result(all[static_cast<std::size_t>(rank)]);
      }
    } else {
      results[0] = std::move(mine);
    }
    if (!is_root()) return;
    const std::scoped_lock lock(in_use_);
    if (has_failed_) return;  // every request has already ended
    scheduler_->complete(results);
    flush();
  }

  void flush() {
    if (!events_.empty()) client_->write(std::exchange(events_, {}));
  }

  typename B::Comm& world_;
  const Topology& topo_;
  StageModel<B>& model_;
  int replica_;
  OrderChannel<B> channel_;
  BytesGather<B> gather_;
  Frontend* client_;
  std::chrono::milliseconds longest_silence_;
  std::timed_mutex in_use_;               // held by the user of the next three members
  std::unique_ptr<Scheduler> scheduler_;  // on the root
  std::string events_;                    // events of this turn
  bool has_failed_ = false;               // the requests have been told
  std::vector<std::int64_t> counts_;
};

}  // namespace helix::decode
