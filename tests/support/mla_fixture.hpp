// SPDX-License-Identifier: Apache-2.0
// Latent attention of one layer, from the sharded cache to the combined output, with one thread per KVP rank.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <helix/backend.hpp>
#include <helix/batch_buffer.hpp>
#include <helix/job_comms.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>

#include "support/mla_world.hpp"
#include "support/ranks.hpp"

namespace helix::test {

/// One KVP rank: its shard of the cache, attention over it, the exchange and the combine.
template <Backend B>
class MlaRank {
 public:
  using T = typename B::Activation;
  using World = MlaWorld<T>;

  MlaRank(B& backend, const World& world, const MlaSharding& sharding)
      : backend_(&backend),
        world_(&world),
        sharding_(sharding),
        stream_(backend.create_stream()),
        cache_(backend, topology_of(world, sharding), cache_spec(world, sharding)) {
    poison(static_cast<std::byte*>(cache_.layer(0).k), cache_.capacity_bytes());
    fill();
  }

  /// Computes and writes this rank's heads of `result`.
  void run(MlaOutput<float>& result) {
    B& backend = *backend_;
    const std::int64_t tokens = world_->num_tokens();
    const std::int64_t heads = world_->heads();
    const std::int64_t mine = heads / sharding_.kvp;
    const std::int64_t d = World::kDim;
    const std::int64_t dv = World::kValueDim;
    BatchBuffer<B> batch(backend, static_cast<std::int64_t>(sequences_.size()), tokens);
    std::vector<std::int32_t> slots;
    for (const SequenceId id : sequences_) slots.push_back(cache_.slot(id));
    batch.set(world_->offsets(), world_->positions(), slots, stream_);

    // The code under test reads only memory that it has written itself; otherwise NaN would show.
    const auto poisoned = [&](std::size_t bytes) {
      auto buffer = backend.allocate(std::max<std::size_t>(bytes, 1));
      poison(buffer.data(), bytes);
      return buffer;
    };
    auto q = backend.allocate(world_->q().size() * sizeof(T));
    backend.upload(q.data(), world_->q().data(), q.size_bytes(), stream_);
    auto partial_out = poisoned(bytes_of<T>(tokens * heads * dv));
    auto partial_lse = poisoned(bytes_of<float>(tokens * heads));
    auto workspace = poisoned(backend.partial_attention_workspace_bytes(tokens, heads, d, dv));
    auto out = poisoned(bytes_of<T>(tokens * mine * dv));
    auto lse = poisoned(bytes_of<float>(tokens * mine));

    PartialAttentionArgs<T> args;
    args.q = {reinterpret_cast<const T*>(q.data()), {tokens, heads, d}};
    args.batch = batch.batch();
    args.kv = cache_.layer(0);
    args.target.out = {reinterpret_cast<T*>(partial_out.data()), {tokens, heads, dv}};
    args.target.lse = {reinterpret_cast<float*>(partial_lse.data()), {tokens, heads}};
    args.scale = World::kScale;
    args.workspace = {workspace.data(), workspace.size_bytes()};
    partial_attention(backend, args, stream_);

    KvpAllToAll<B> exchange(backend, {.max_tokens = tokens, .num_query_heads = heads, .value_dim = dv});
    const auto received =
        exchange.exchange({args.target.out, args.target.lse}, args.batch.positions, stream_);
    LseCombineArgs<T> combine;
    combine.partial_out = received.out;
    combine.partial_lse = received.lse;
    combine.out = {reinterpret_cast<T*>(out.data()), {tokens, mine, dv}};
    combine.lse = {reinterpret_cast<float*>(lse.data()), {tokens, mine}};
    lse_combine(backend, combine, stream_);

    std::vector<T> host_out(World::at(tokens * mine * dv));
    std::vector<float> host_lse(World::at(tokens * mine));
    backend.download(host_out.data(), out.data(), out.size_bytes(), stream_);
    backend.download(host_lse.data(), lse.data(), lse.size_bytes(), stream_);
    backend.synchronize(stream_);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t row = t * heads + backend.comms().kvp->rank() * mine;
      for (std::int64_t h = 0; h < mine; ++h)
        result.lse[World::at(row + h)] = host_lse[World::at(t * mine + h)];
      for (std::int64_t i = 0; i < mine * dv; ++i)
        result.out[World::at(row * dv + i)] = static_cast<float>(host_out[World::at(t * mine * dv + i)]);
    }
  }

 private:
  template <class X>
  static std::size_t bytes_of(std::int64_t count) {
    return World::at(count) * sizeof(X);
  }

  static Topology topology_of(const World& world, const MlaSharding& sharding) {
    ModelShape shape;
    shape.mla =
        MlaShape{.kv_lora_rank = World::kValueDim, .qk_rope_head_dim = World::kDim - World::kValueDim};
    shape.num_query_heads = world.heads();
    shape.num_kv_heads = 1;
    shape.head_dim = World::kDim;
    shape.value_dim = World::kValueDim;
    shape.hidden = shape.ffn = shape.vocab = 64;
    return Topology({.kvp = sharding.kvp}, shape);
  }

  static KvCacheSpec cache_spec(const World& world, const MlaSharding& sharding) {
    KvCacheSpec spec;
    spec.dtype = world.spec().kv_dtype;
    spec.num_layers = 1;
    spec.page_tokens = sharding.page_tokens;
    spec.chunk = sharding.chunk;
    spec.max_sequences = static_cast<std::int64_t>(world.lengths().size());
    spec.num_pages = 2 + PageLedger::pages_needed(KvLayout(sharding.kvp, sharding.chunk),
                                                  sharding.page_tokens, world.lengths());
    return spec;
  }

  /// Sets device memory so that every number in it is NaN, whatever its type.
  void poison(std::byte* target, std::size_t bytes) {
    const std::vector<std::uint8_t> ones(std::min<std::size_t>(bytes, std::size_t{1} << 20), 0xff);
    backend_->upload(target, ones.data(), ones.size(), stream_);
    for (std::size_t done = ones.size(); done < bytes; done += ones.size())
      backend_->copy(target + done, target, std::min(ones.size(), bytes - done), stream_);
  }

  /// Creates and writes the rows that this rank owns. All other rows are NaN, because none of them may be
  /// stored.
  void fill() {
    const std::int64_t kvp = sharding_.kvp;
    const std::int64_t chunk = sharding_.chunk;
    const std::int64_t rank = backend_->comms().kvp->rank();
    // In every block the same rows belong to this rank.
    HELIX_EXPECTS(World::kBlock % (kvp * chunk) == 0, ErrorCode::invalid_argument, "chunk ", chunk,
                  " over KVP ", kvp, " does not divide blocks of ", World::kBlock, " tokens");
    const auto lengths = world_->lengths();
    const std::int64_t block = std::min(World::kBlock, *std::max_element(lengths.begin(), lengths.end()));
    std::vector<T> rows(World::at(block * World::kDim), T(std::numeric_limits<float>::quiet_NaN()));
    auto device = backend_->allocate(rows.size() * sizeof(T));
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      const SequenceId id = sequences_.emplace_back(cache_.add());
      cache_.append(id, lengths[b], stream_);
      for (std::int64_t begin = 0; begin < lengths[b]; begin += World::kBlock) {
        const std::int64_t count = std::min(World::kBlock, lengths[b] - begin);
        for (std::int64_t i = 0; i < count; ++i)
          if (i / chunk % kvp == rank) world_->make_row(b, begin + i, rows.data() + i * World::kDim);
        backend_->upload(device.data(), rows.data(), bytes_of<T>(count * World::kDim), stream_);
        cache_.write(id, 0, begin, {reinterpret_cast<const T*>(device.data()), {count, 1, World::kDim}}, {},
                     stream_);
        backend_->synchronize(stream_);  // uploads waiting in the queue hold copies
      }
    }
  }

  B* backend_;
  const World* world_;
  MlaSharding sharding_;
  typename B::Stream stream_;
  ShardedKVCache<B> cache_;
  std::vector<SequenceId> sequences_;
};

/// Runs the attention of `world` with one thread per KVP rank, each with a communicator like LocalComm.
/// Elements that no rank wrote are NaN.
/// @throws with every rank's message if any rank fails.
template <Backend B, SplittableComm LocalComm>
MlaOutput<float> run_mla(const MlaWorld<typename B::Activation>& world, const MlaSharding& sharding) {
  constexpr std::chrono::minutes kBound{10};
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto rows = static_cast<std::size_t>(world.num_tokens() * world.heads());
  MlaOutput<float> result{
      std::vector<float>(rows * static_cast<std::size_t>(MlaWorld<float>::kValueDim), kNaN),
      std::vector<float>(rows, kNaN)};
  run_ranks_or_throw(
      LocalComm::create_group(sharding.kvp, kBound),
      [&](LocalComm& comm) {
        B backend(comm, comm.split(0, comm.rank()));
        MlaRank<B> rank(backend, world, sharding);
        rank.run(result);
      },
      kBound);
  return result;
}

}  // namespace helix::test
