// SPDX-License-Identifier: Apache-2.0
// ExchangeWork: one rank's exchange and combine of random partial attention, and the check of all ranks'
// results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>

#include "device_data.hpp"
#include "rank_threads.hpp"
#include "support/worse.hpp"

namespace helix::bench {

struct ExchangeShape {
  std::int64_t tokens;
  std::int64_t heads;  ///< Heads of a rank's attention.
  std::int64_t dim;

  /// Bytes of outputs and log-sum-exps of a rank, including the slice that stays on the rank.
  std::int64_t bytes() const { return tokens * heads * (dim * 2 + 4); }
};

/// One rank's input and output, on the host.
struct ExchangeResult {
  std::vector<bf16> out;       ///< [tokens, heads, dim]
  std::vector<float> lse;      ///< [tokens, heads]
  std::vector<bf16> combined;  ///< [tokens, heads / kvp, dim]
};

template <class Comm>
class ExchangeWork {
 public:
  /// `has_lines` is KvpAllToAllSpec::has_lines.
  ExchangeWork(Rank<Comm>& rank, const ExchangeShape& shape, bool has_lines = true)
      : rank_(&rank),
        shape_(shape),
        kvp_(rank.backend.comms().kvp->size()),
        exchange_(rank.backend, {.max_tokens = shape.tokens,
                                 .num_query_heads = shape.heads,
                                 .value_dim = shape.dim,
                                 .has_lines = has_lines}),
        out_(random_bf16(shape.tokens * shape.heads * shape.dim, seed())),
        lse_(on_device(rank.backend,
                       random_floats(shape.tokens * shape.heads, 5.0f, static_cast<std::uint32_t>(seed())))),
        combined_(static_cast<std::size_t>(shape.tokens * shape.heads / kvp_ * shape.dim) * kBf16Bytes) {
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < shape.tokens; ++i) positions.push_back(1000 * i);
    positions_ = on_device(rank.backend, positions);
    bare_ = cuda::Buffer(static_cast<std::size_t>(2 * kvp_ * messages().target.headers.message_bytes));
  }

  /// [tokens, heads, dim] and [tokens, heads], for an attention kernel that writes to a buffer of its own.
  Partial<bf16> partial() const {
    return {{reinterpret_cast<bf16*>(out_.data()), {shape_.tokens, shape_.heads, shape_.dim}},
            {reinterpret_cast<float*>(lse_.data()), {shape_.tokens, shape_.heads}}};
  }

  PartialTarget<bf16> target() const { return {partial().out, partial().lse}; }

  /// Includes packing, for an attention kernel that writes elsewhere.
  void queue_with_packing() {
    const auto received = exchange_.exchange(partial(), positions(), rank_->stream);
    lse_combine(rank_->backend, LseCombineArgs<bf16>{received.out, received.lse, nullptr, combined(), {}},
                rank_->stream);
  }

  /// For an attention kernel that writes directly into the messages.
  typename KvpAllToAll<RankBackend<Comm>>::Outgoing messages() const {
    return exchange_.outgoing({.tokens = shape_.tokens}, positions());
  }

  bool are_lines() const { return messages().target.lines.rows.out != nullptr; }

  /// Fills the messages as such an attention kernel does.
  void fill_messages() {
    const Partial<bf16> from = partial();
    const PartialTarget<bf16> to = messages().target;
    rank_->backend.pack_partial({.out = from.out, .lse = from.lse, .target = to}, rank_->stream);
  }

  /// Queues the rest of the exchange. Messages with headers stay intact, so this can be repeated.
  void queue() { exchange_.exchange_and_combine(messages(), nullptr, combined(), rank_->stream); }

  /// NCCL's all-to-all alone, with messages of the same size.
  void queue_all_to_all() {
    const std::int64_t message = messages().target.headers.message_bytes;
    rank_->backend.comms().kvp->all_to_all(bare_.data(), bare_.data() + kvp_ * message, message,
                                           rank_->stream);
  }

  /// The inputs and outputs of this rank. Waits.
  ExchangeResult result() const {
    rank_->backend.synchronize(rank_->stream);
    const std::int64_t rows = shape_.tokens * shape_.heads;
    return {on_host<bf16>(rank_->backend, out_.data(), rows * shape_.dim),
            on_host<float>(rank_->backend, lse_.data(), rows),
            on_host<bf16>(rank_->backend, combined_.data(), rows / kvp_ * shape_.dim)};
  }

 private:
  const std::int64_t* positions() const { return reinterpret_cast<const std::int64_t*>(positions_.data()); }
  TensorView<bf16, 3> combined() const {
    return {reinterpret_cast<bf16*>(combined_.data()), {shape_.tokens, shape_.heads / kvp_, shape_.dim}};
  }
  std::uint64_t seed() const { return 77 + static_cast<std::uint64_t>(rank_->index()) * 1'000'003; }

  Rank<Comm>* rank_;
  ExchangeShape shape_;
  std::int64_t kvp_;
  KvpAllToAll<RankBackend<Comm>> exchange_;
  cuda::Buffer out_;
  cuda::Buffer lse_;
  cuda::Buffer combined_;
  cuda::Buffer positions_;
  cuda::Buffer bare_;  // messages of NCCL's all-to-all alone, sent and received
};

struct ExchangeTimes {
  /// Exchange and combine after attention has written the messages.
  double us = 0.0;
  double pushed_us = 0.0;  ///< The same including a kernel that copies the messages into place.
};

/// The times with message headers, and with the protocol that the backend chooses for the size.
struct TimesByProtocol {
  ExchangeTimes headers;
  ExchangeTimes taken;
  /// This rank's results, for each protocol that was timed.
  std::vector<ExchangeResult> results;
};

/// Times of `per_graph` exchanges in a graph. Lines must be written anew for each exchange. Their time
/// without the copy is estimated by subtracting the time that the copy takes with headers. Collective.
template <class Comm>
TimesByProtocol time_exchanges(Rank<Comm>& rank, const ExchangeShape& shape, int per_graph) {
  const auto pushed_us = [&](ExchangeWork<Comm>& work) {
    return time_together(rank, per_graph, [&] {
      work.fill_messages();
      work.queue();
    });
  };
  TimesByProtocol times;
  {
    ExchangeWork<Comm> work(rank, shape, false);
    times.headers.pushed_us = pushed_us(work);
    times.headers.us = time_together(rank, per_graph, [&] { work.queue(); });
    times.results.push_back(work.result());
  }
  times.taken = times.headers;
  ExchangeWork<Comm> work(rank, shape);
  if (work.are_lines()) {
    times.taken.pushed_us = pushed_us(work);
    times.taken.us = times.taken.pushed_us - (times.headers.pushed_us - times.headers.us);
    times.results.push_back(work.result());
  }
  return times;
}

inline constexpr double kExchangeTolerance = 1.0 / 128;  ///< Two roundings to bf16.

/// The largest difference between the combined results of a KVP group and the merge of its ranks' partials in
/// double, relative to the largest value, over the first and the last token.
inline double exchange_error(const std::vector<ExchangeResult>& ranks, const ExchangeShape& shape) {
  const std::int64_t part = shape.heads / static_cast<std::int64_t>(ranks.size());
  double worst = 0.0;
  double scale = 0.0;
  for (const std::int64_t token : {std::int64_t{0}, shape.tokens - 1}) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      const auto row = static_cast<std::size_t>(token * shape.heads + head);
      double highest = -INFINITY;
      for (const ExchangeResult& rank : ranks) highest = std::max(highest, double{rank.lse[row]});
      double total = 0.0;
      std::vector<double> sums(static_cast<std::size_t>(shape.dim), 0.0);
      for (const ExchangeResult& rank : ranks) {
        const double weight = std::exp(double{rank.lse[row]} - highest);
        total += weight;
        for (std::size_t i = 0; i < sums.size(); ++i)
          sums[i] += weight * static_cast<float>(rank.out[row * sums.size() + i]);
      }
      const std::vector<bf16>& got = ranks[static_cast<std::size_t>(head / part)].combined;
      const auto got_row = static_cast<std::size_t>(token * part + head % part);
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const double expected = sums[i] / total;
        const double difference = std::abs(expected - static_cast<float>(got[got_row * sums.size() + i]));
        worst = test::worse(worst, difference);
        scale = std::max(scale, std::abs(expected));
      }
    }
  }
  return worst / scale;
}

}  // namespace helix::bench
