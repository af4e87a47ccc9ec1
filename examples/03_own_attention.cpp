// SPDX-License-Identifier: Apache-2.0
// An engine with its own allocator, queue, communicator, KV pool and attention kernel. It takes token
// ownership, the exchange of partials and the combine from Helix. It needs only the headers: nothing is
// linked.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include <helix/foreign_kv.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>

namespace {

constexpr int kKvp = 4, kHeads = 8, kKvHeads = 2, kDim = 32, kContext = 333, kBlock = 16, kChunk = 8;
constexpr float kScale = 0.17f;

/// The engine's communicator: threads that meet at a barrier. Helix calls only the four functions below.
class EngineComm {
 public:
  struct Room {
    std::barrier<> door{kKvp};
    std::atomic<bool> has_failed = false;
    const std::byte* sent[kKvp] = {};
  };
  EngineComm(Room& room, int rank) : room_(&room), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const { return kKvp; }
  void all_to_all(const void* in, void* out, std::int64_t bytes, int /*stream*/) {
    room_->sent[rank_] = static_cast<const std::byte*>(in);
    meet();
    for (int peer = 0; peer < kKvp; ++peer) {
      std::memcpy(static_cast<std::byte*>(out) + peer * bytes, room_->sent[peer] + rank_ * bytes,
                  static_cast<std::size_t>(bytes));
    }
    meet();
  }
  /// Wakes the other ranks, now and at each later meeting.
  void abort(std::string_view reason) noexcept {
    std::fprintf(stderr, "rank %d: %.*s\n", rank_, static_cast<int>(reason.size()), reason.data());
    room_->has_failed = true;
    room_->door.arrive_and_drop();
  }

 private:
  void meet() {
    room_->door.arrive_and_wait();
    HELIX_EXPECTS(!room_->has_failed, helix::ErrorCode::peer_failed, "another rank has failed");
  }

  Room* room_;
  int rank_;
};

/// The engine as Helix sees it: memory, a queue (here operations run at once), and the three operations
/// pack_partial(), check_exchange() and lse_combine().
class EngineBackend {
 public:
  using Activation = float;
  using Stream = int;
  using Event = int;
  using Comm = EngineComm;
  class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(std::size_t bytes)
        : bytes_(static_cast<std::byte*>(::operator new(bytes, kAlignment))), size_(bytes) {
      std::memset(bytes_.get(), 0, bytes);
    }
    std::byte* data() const { return bytes_.get(); }
    std::size_t size_bytes() const { return size_; }

   private:
    static constexpr std::align_val_t kAlignment{256};
    struct Delete {
      void operator()(std::byte* bytes) const { ::operator delete(bytes, kAlignment); }
    };
    std::unique_ptr<std::byte, Delete> bytes_;
    std::size_t size_ = 0;
  };

  explicit EngineBackend(EngineComm& comm) : comm_(&comm) {}
  helix::StageComms<Comm> comms() const { return {comm_, comm_}; }
  Buffer allocate(std::size_t bytes) { return Buffer(bytes); }
  Stream create_stream() { return 0; }
  Event create_event() { return 0; }
  void record(Event&, Stream) {}
  void wait(Stream, const Event&) {}
  void synchronize(Stream) {}
  void upload(void* target, const void* source, std::size_t bytes, Stream) {
    std::memcpy(target, source, bytes);
  }

  void pack_partial(const helix::PackPartialArgs<float>& args, Stream) {
    for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
      for (std::int64_t h = 0; h < args.out.extent(1); ++h) {
        args.target.lse(t, h) = helix::to_natural(args.lse(t, h), args.convention);
        for (std::int64_t d = 0; d < args.out.extent(2); ++d) args.target.out(t, h, d) = args.out(t, h, d);
      }
    }
    const helix::StampArgs& stamp = args.target.headers;
    const helix::ExchangeHeader header{
        .epoch = helix::exchange_epoch(++*stamp.exchanges, stamp.positions, stamp.tokens),
        .tokens = static_cast<std::uint32_t>(stamp.tokens),
        .sender = static_cast<std::uint32_t>(stamp.sender)};
    for (std::int64_t i = 0; i < stamp.count; ++i)
      std::memcpy(stamp.message + i * stamp.message_bytes, &header, sizeof header);
  }

  void check_exchange(const helix::CheckExchangeArgs& args, Stream) {
    helix::ExchangeHeader own, got;
    std::memcpy(&own, args.sent, sizeof own);
    for (std::int64_t peer = 0; peer < args.peers; ++peer) {
      std::memcpy(&got, args.messages + peer * args.message_bytes, sizeof got);
      helix::check_exchange_header(peer, got, own);
    }
  }

  void lse_combine(const helix::LseCombineArgs<float>& args, Stream) {
    for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
      for (std::int64_t h = 0; h < args.out.extent(1); ++h) {
        const auto lse_of = [&](std::int64_t r) {
          return double{helix::to_natural(args.partial_lse(r, t, h), args.convention)};
        };
        double max = args.sinks != nullptr ? args.sinks[h] : -HUGE_VAL;
        for (std::int64_t r = 0; r < args.partial_lse.extent(0); ++r) max = std::max(max, lse_of(r));
        double total = args.sinks != nullptr ? std::exp(args.sinks[h] - max) : 0.0;
        for (std::int64_t d = 0; d < args.out.extent(2); ++d) args.out(t, h, d) = 0.0f;
        for (std::int64_t r = 0; r < args.partial_lse.extent(0); ++r) {
          if (lse_of(r) == -HUGE_VAL) continue;  // no visible token here: out may be anything
          const double weight = std::exp(lse_of(r) - max);
          total += weight;
          for (std::int64_t d = 0; d < args.out.extent(2); ++d)
            args.out(t, h, d) += static_cast<float>(weight * args.partial_out(r, t, h, d));
        }
        for (std::int64_t d = 0; d < args.out.extent(2) && total > 0.0; ++d)
          args.out(t, h, d) = static_cast<float>(args.out(t, h, d) / total);
        if (args.lse.data() != nullptr) args.lse(t, h) = static_cast<float>(max + std::log(total));
      }
    }
  }

 private:
  EngineComm* comm_;
};

// One query token, and the K and V of the whole context, [token][KV head][dim].
struct Model {
  std::vector<float> q = random(kHeads * kDim), k = random(kContext * kKvHeads * kDim),
                     v = random(kContext * kKvHeads * kDim);

  static std::vector<float> random(int count) {
    static std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) x = normal(generator);
    return values;
  }
};

/// The engine's own attention kernel: attention of one query token over the rank's local tokens, in a pool of
/// any layout. Its lse has base 2, not e.
void engine_attention(const Model& model, const helix::KvView& kv, const helix::Partial<float>& out) {
  const helix::KvFormat& format = kv.format;
  const helix::TokenRange seen = kv.layout.visible(kContext - 1, 0, kv.kvp_rank);
  for (int h = 0; h < kHeads; ++h) {
    const int kv_head = h / (kHeads / kKvHeads);
    double total = 0.0;
    std::vector<double> sums(kDim, 0.0);
    for (std::int64_t local = seen.begin; local < seen.end; ++local) {
      const std::int64_t page = kv.page_table[kv.first_page_of(0) + local / format.page_tokens];
      const float* key = static_cast<float*>(kv.k) + format.k.at(page, kv_head, local % format.page_tokens);
      const float* value = static_cast<float*>(kv.v) + format.v.at(page, kv_head, local % format.page_tokens);
      double score = 0.0;
      for (int d = 0; d < kDim; ++d)
        score += double{model.q[static_cast<std::size_t>(h * kDim + d)]} * key[d];
      const double weight = std::exp(score * kScale);
      total += weight;
      for (int d = 0; d < kDim; ++d) sums[static_cast<std::size_t>(d)] += weight * value[d];
    }
    for (int d = 0; d < kDim; ++d)
      out.out(0, h, d) = static_cast<float>(sums[static_cast<std::size_t>(d)] / total);
    out.lse(0, h) = static_cast<float>(std::log2(total));
  }
}

/// Runs one rank: stores its share of the context in a pool with vLLM's layout, attends to it, exchanges the
/// partials and combines them.
void run_rank(EngineComm comm, const Model& model, float* combined) {
  const helix::KvLayout layout(kKvp, kChunk);
  const std::int64_t local_tokens = layout.length(kContext, comm.rank());
  // A pool has one block at least, even if no token of a short context lies on this rank.
  const std::int64_t blocks = std::max<std::int64_t>(1, (local_tokens + kBlock - 1) / kBlock);
  std::vector<float> pool(static_cast<std::size_t>(2 * blocks * kBlock * kKvHeads * kDim));
  std::vector<std::int32_t> table;
  for (std::int64_t i = blocks; i-- > 0;) table.push_back(static_cast<std::int32_t>(i));  // any order
  helix::KvView kv = helix::vllm_kv({.pool = pool.data(),
                                     .dtype = helix::DType::f32,
                                     .num_blocks = blocks,
                                     .block_size = kBlock,
                                     .num_kv_heads = kKvHeads,
                                     .head_size = kDim});
  kv.page_table = table.data();
  kv.max_pages = blocks;
  kv.layout = layout;
  kv.kvp_rank = comm.rank();
  helix::check_kv_view("engine", kv);
  for (std::int64_t local = 0; local < local_tokens; ++local) {
    const std::int64_t page = table[static_cast<std::size_t>(local / kBlock)];
    for (std::int64_t head = 0; head < kKvHeads; ++head) {
      const std::int64_t from = (layout.global(comm.rank(), local) * kKvHeads + head) * kDim;
      const std::int64_t to = kv.format.k.at(page, head, local % kBlock);
      std::copy_n(model.k.begin() + from, kDim, static_cast<float*>(kv.k) + to);
      std::copy_n(model.v.begin() + from, kDim, static_cast<float*>(kv.v) + to);
    }
  }

  EngineBackend backend(comm);
  const int stream = backend.create_stream();
  helix::KvpAllToAll<EngineBackend> exchange(backend,
                                             {.max_tokens = 1, .num_query_heads = kHeads, .value_dim = kDim});
  std::vector<float> out(kHeads * kDim), lse(kHeads);
  const helix::Partial<float> partial{{out.data(), {1, kHeads, kDim}}, {lse.data(), {1, kHeads}}};
  engine_attention(model, kv, partial);
  const std::int64_t positions[] = {kContext - 1};
  const auto received = exchange.exchange(partial, positions, stream, helix::LseConvention::base2);
  helix::lse_combine(backend,
                     {.partial_out = received.out,
                      .partial_lse = received.lse,
                      .out = {combined + comm.rank() * kHeads / kKvp * kDim, {1, kHeads / kKvp, kDim}}},
                     stream);
}

/// Largest difference from attention over the whole context in double precision.
double error_of(const Model& model, const std::vector<float>& combined) {
  double worst = 0.0;
  for (int h = 0; h < kHeads; ++h) {
    const int kv_head = h / (kHeads / kKvHeads);
    double total = 0.0;
    std::vector<double> sums(kDim, 0.0);
    for (int t = 0; t < kContext; ++t) {
      const auto row = static_cast<std::size_t>((t * kKvHeads + kv_head) * kDim);
      double score = 0.0;
      for (std::size_t d = 0; d < kDim; ++d)
        score += double{model.q[static_cast<std::size_t>(h * kDim) + d]} * model.k[row + d];
      total += std::exp(score * kScale);
      for (std::size_t d = 0; d < kDim; ++d) sums[d] += std::exp(score * kScale) * model.v[row + d];
    }
    for (std::size_t d = 0; d < kDim; ++d) {
      const double difference = std::abs(combined[static_cast<std::size_t>(h * kDim) + d] - sums[d] / total);
      worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
    }
  }
  return worst;
}

}  // namespace

int main() {
  const Model model;
  std::vector<float> combined(kHeads * kDim);
  EngineComm::Room room;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kKvp; ++rank) {
    ranks.emplace_back([&, rank] {
      EngineComm comm(room, rank);
      try {
        run_rank(comm, model, combined.data());
      } catch (const std::exception& error) {
        comm.abort(error.what());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  if (room.has_failed) return 1;
  const double worst = error_of(model, combined);
  std::printf("%d tokens over %d ranks: largest difference from whole attention %.1e\n", kContext, kKvp,
              worst);
  return worst < 1e-6 ? 0 : 1;
}
