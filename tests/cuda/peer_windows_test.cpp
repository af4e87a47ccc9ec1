// SPDX-License-Identifier: Apache-2.0
// The exchange of partials and reduce_norm through the memory of peers: right against sums in double, equal
// on all ranks, replayed with odd numbers of exchanges, headers sent by whoever writes last, and a rank out
// of step is named.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/partial_attention.hpp>
#include <helix/reduce_norm.hpp>

#include "cuda/gpu.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using helix::Batch;
using helix::bf16;
using helix::ErrorCode;
using helix::KvFormat;
using helix::KvLayout;
using helix::KvpAllToAll;
using helix::KvView;
using helix::Partial;
using helix::PartialSink;
using helix::TensorView;
using helix::contract::require;
using helix::cuda::AttentionTarget;
using helix::cuda::Buffer;
using helix::cuda::Graph;
using helix::cuda::PeerComm;
using helix::cuda::Stream;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

namespace {

/// Ranks on as many GPUs as there are.
std::vector<PeerComm> make_group(int size, std::chrono::milliseconds timeout = 20s) {
  const int devices = std::min(size, helix::cuda::device_count());
  std::vector<int> all(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) all[static_cast<std::size_t>(rank)] = rank % devices;
  return PeerComm::create_group(all, {.timeout = timeout, .use_nccl = false});
}

int device_of(const PeerComm& comm) {
  return comm.rank() % std::min(comm.size(), helix::cuda::device_count());
}

template <class T>
using PeerBackend = helix::cuda::Backend<PeerComm, T>;

template <class T>
Buffer on_device(const std::vector<T>& values) {
  Buffer buffer(std::max<std::size_t>(1, values.size() * sizeof(T)));
  HELIX_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}

template <class T>
std::vector<T> on_host(const PeerBackend<T>& backend, const Buffer& buffer, std::size_t count,
                       const Stream& stream) {
  std::vector<T> values(count);
  backend.download(values.data(), buffer.data(), count * sizeof(T), stream);
  return values;
}

/// Values of any rank, so that each knows what the others bring.
template <class T>
std::vector<T> random_values(std::int64_t count, unsigned seed) {
  std::vector<T> values(static_cast<std::size_t>(count));
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (T& value : values) {
    state = state * 1664525u + 1013904223u;
    value = T(static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-30f);  // in (-2, 2)
  }
  return values;
}

struct ExchangeCase {
  std::int64_t tokens;
  std::int64_t heads;  // of all ranks of the group
  std::int64_t dim;
};

/// log-sum-exps of a rank; -inf for an empty shard, whose outputs are NaN.
std::vector<float> lse_of(int rank, const ExchangeCase& c, unsigned step) {
  std::vector<float> lse =
      random_values<float>(c.tokens * c.heads, 1000u * step + 7u * static_cast<unsigned>(rank));
  for (std::size_t i = 0; i < lse.size(); ++i)
    if ((i + static_cast<std::size_t>(rank)) % 5 == 0) lse[i] = -INFINITY;
  return lse;
}

template <class T>
std::vector<T> out_of(int rank, const ExchangeCase& c, unsigned step) {
  auto out = random_values<T>(c.tokens * c.heads * c.dim, 31u + 100u * step + static_cast<unsigned>(rank));
  const std::vector<float> lse = lse_of(rank, c, step);
  for (std::size_t row = 0; row < lse.size(); ++row)
    if (lse[row] == -INFINITY)
      for (std::int64_t i = 0; i < c.dim; ++i)
        out[row * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(i)] = T(NAN);
  return out;
}

/// What rank `rank` must combine: [tokens, heads / size, dim].
template <class T>
void check_combined(const std::vector<T>& got, int rank, int size, const ExchangeCase& c, unsigned step) {
  std::vector<std::vector<float>> lse;
  std::vector<std::vector<T>> out;
  for (int r = 0; r < size; ++r) {
    lse.push_back(lse_of(r, c, step));
    out.push_back(out_of<T>(r, c, step));
  }
  const std::int64_t heads = c.heads / size;
  for (std::int64_t token = 0; token < c.tokens; ++token) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto row = static_cast<std::size_t>(token * c.heads + rank * heads + h);
      for (std::int64_t i = 0; i < c.dim; ++i) {
        double total = 0.0;
        double sum = 0.0;
        for (std::size_t r = 0; r < lse.size(); ++r) {
          if (lse[r][row] == -INFINITY) continue;
          const double weight = std::exp(double{lse[r][row]});
          total += weight;
          sum += weight * double{static_cast<float>(
                              out[r][row * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(i)])};
        }
        const double expected = total == 0.0 ? 0.0 : sum / total;
        const auto value = static_cast<double>(
            static_cast<float>(got[static_cast<std::size_t>(((token * heads) + h) * c.dim + i)]));
        require(std::abs(value - expected) <= 1.0 / 64 * (1.0 + std::abs(expected)), "token ", token,
                " head ", h, " column ", i, " is ", value, ", expected ", expected, " in step ", step);
      }
    }
  }
}

/// One rank's exchange, with partials on the device for two steps.
template <class T>
struct Exchange {
  PeerBackend<T>& backend;
  ExchangeCase shape;
  KvpAllToAll<PeerBackend<T>> all_to_all;
  std::vector<Buffer> out, lse;
  Buffer positions;
  Buffer combined;

  Exchange(PeerBackend<T>& of, const ExchangeCase& c, std::int64_t max_tokens)
      : backend(of),
        shape(c),
        all_to_all(of, {.max_tokens = max_tokens, .num_query_heads = c.heads, .value_dim = c.dim}),
        positions(on_device(std::vector<std::int64_t>(static_cast<std::size_t>(c.tokens + 1), 5))),
        combined(static_cast<std::size_t>(c.tokens * c.heads / of.comms().kvp->size() * c.dim) * sizeof(T)) {
    for (unsigned step = 0; step < 2; ++step) {
      out.push_back(on_device(out_of<T>(of.comms().kvp->rank(), c, step)));
      lse.push_back(on_device(lse_of(of.comms().kvp->rank(), c, step)));
    }
  }

  TensorView<T, 3> result() {
    return {reinterpret_cast<T*>(combined.data()),
            {shape.tokens, shape.heads / backend.comms().kvp->size(), shape.dim}};
  }

  /// Writes the partials of `step` where attention would, and combines.
  void queue(unsigned step, const Stream& stream) {
    const auto messages = all_to_all.outgoing({.tokens = shape.tokens},
                                              reinterpret_cast<const std::int64_t*>(positions.data()));
    backend.pack_partial(
        {.out = {reinterpret_cast<const T*>(out[step].data()), {shape.tokens, shape.heads, shape.dim}},
         .lse = {reinterpret_cast<const float*>(lse[step].data()), {shape.tokens, shape.heads}},
         .packed_out = messages.sink.out,
         .packed_lse = messages.sink.lse,
         .headers = messages.sink.headers,
         .slot = messages.sink.slot},
        stream);
    all_to_all.exchange_and_combine(messages, nullptr, result(), stream);
  }

  void check(unsigned step, const Stream& stream) {
    check_combined(on_host<T>(backend, combined, static_cast<std::size_t>(result().size()), stream),
                   backend.comms().kvp->rank(), backend.comms().kvp->size(), shape, step);
  }
};

/// Sequences of one length over a cache of random values.
struct AttentionShape {
  std::int64_t kv_heads;
  std::int64_t group;  // query heads a KV head
  std::int64_t dim;    // 576: latents
  std::int64_t sequences;
  std::int64_t queries;  // tokens of the step, a sequence
  std::int64_t length;   // tokens of a sequence, those of the step included
  std::int64_t chunk = 16;
  std::int64_t idle = 0;  // sequences without a token, behind the others
  AttentionTarget target = AttentionTarget::this_gpu;

  std::int64_t tokens() const { return sequences * queries; }
  std::int64_t heads() const { return kv_heads * group; }
  std::int64_t value_dim() const { return dim == 576 ? 512 : dim; }
};

/// One rank's attention and exchange. What attention writes into the peers' memory must combine to the bits
/// of partials of the same kernels that were pushed there.
template <class T>
struct AttentionExchange {
  static constexpr std::int64_t kPageTokens = 16;

  PeerBackend<T>& backend;
  AttentionShape shape;
  KvpAllToAll<PeerBackend<T>> all_to_all;
  std::int64_t pages;  // of a sequence
  KvFormat format;
  std::vector<std::int32_t> offsets_host;
  Buffer pool, q, page_table, offsets, slots, positions, workspace, out, lse, combined;

  AttentionExchange(PeerBackend<T>& of, const AttentionShape& s)
      : backend(of),
        shape(s),
        all_to_all(of, {.max_tokens = s.tokens(), .num_query_heads = s.heads(), .value_dim = s.value_dim()}),
        pages((s.length + kPageTokens - 1) / kPageTokens),
        format(s.dim == 576
                   ? KvFormat::latent(helix::kDTypeOf<T>, s.dim, s.value_dim(), kPageTokens)
                   : KvFormat::head_major(helix::kDTypeOf<T>, s.kv_heads, s.dim, s.dim, kPageTokens)),
        pool(on_device(random_values<T>(s.sequences * pages * format.k.page, seed()))),
        q(on_device(random_values<T>(s.tokens() * s.heads() * s.dim, 3))),
        workspace(of.partial_attention_workspace_bytes(s.tokens(), s.heads(), s.dim, s.value_dim())),
        out(bytes_of(s.tokens() * s.heads() * s.value_dim())),
        lse(static_cast<std::size_t>(s.tokens() * s.heads()) * sizeof(float)),
        combined(bytes_of(s.tokens() * s.heads() / of.comms().kvp->size() * s.value_dim())) {
    of.set_attention_target(s.target);
    std::vector<std::int32_t> table, rows;
    std::vector<std::int64_t> at;
    for (std::int64_t b = 0; b <= s.sequences + s.idle; ++b)
      offsets_host.push_back(static_cast<std::int32_t>(std::min(b, s.sequences) * s.queries));
    for (std::int64_t i = 0; i < s.sequences * pages; ++i) table.push_back(static_cast<std::int32_t>(i));
    for (std::int64_t b = 0; b < s.sequences + s.idle; ++b)
      rows.push_back(static_cast<std::int32_t>(std::min(b, s.sequences - 1)));
    for (std::int64_t i = 0; i < s.tokens(); ++i) at.push_back(s.length - s.queries + i % s.queries);
    page_table = on_device(table);
    offsets = on_device(offsets_host);
    slots = on_device(rows);
    positions = on_device(at);
  }

  unsigned seed() const { return 77u + static_cast<unsigned>(backend.comms().kvp->rank()); }
  static std::size_t bytes_of(std::int64_t elements) {
    return static_cast<std::size_t>(elements) * sizeof(T);
  }
  template <class U>
  static U* data_of(const Buffer& buffer) {
    return reinterpret_cast<U*>(buffer.data());
  }
  TensorView<T, 3> result() {
    return {data_of<T>(combined),
            {shape.tokens(), shape.heads() / backend.comms().kvp->size(), shape.value_dim()}};
  }
  Batch batch() const {
    return {offsets_host, data_of<const std::int32_t>(offsets), data_of<const std::int64_t>(positions),
            data_of<const std::int32_t>(slots)};
  }
  auto messages(const Buffer& at) {
    return all_to_all.outgoing({.tokens = shape.tokens()}, data_of<const std::int64_t>(at));
  }

  void attend(const Batch& part, const PartialSink<T>& sink, const Stream& stream) {
    KvView kv = KvView::of_pool(pool.data(), format, shape.sequences * pages);
    kv.page_table = data_of<const std::int32_t>(page_table);
    kv.max_pages = pages;
    kv.layout = KvLayout(backend.comms().kvp->size(), shape.chunk);
    kv.kvp_rank = backend.comms().kvp->rank();
    helix::partial_attention(backend,
                             {.q = {data_of<const T>(q), {shape.tokens(), shape.heads(), shape.dim}},
                              .batch = part,
                              .kv = kv,
                              .sink = sink,
                              .scale = 0.05f,
                              .workspace = {workspace.data(), workspace.size_bytes()}},
                             stream);
  }
  void combine(const Buffer& at, const Stream& stream) {
    all_to_all.exchange_and_combine(messages(at), nullptr, result(), stream);
  }
  /// Attention straight into the peers' memory, and the combine.
  void queue(const Stream& stream) {
    attend(batch(), messages(positions).sink, stream);
    combine(positions, stream);
  }
  /// Attention into this rank's memory, and a copy to the peers'.
  void push(const Stream& stream) {
    const TensorView<T, 3> local_out(data_of<T>(out), {shape.tokens(), shape.heads(), shape.value_dim()});
    const TensorView<float, 2> local_lse(data_of<float>(lse), {shape.tokens(), shape.heads()});
    attend(batch(), {.out = local_out, .lse = local_lse}, stream);
    const auto to = messages(positions).sink;
    backend.pack_partial({.out = {local_out.data(), {shape.tokens(), shape.heads(), shape.value_dim()}},
                          .lse = {local_lse.data(), {shape.tokens(), shape.heads()}},
                          .packed_out = to.out,
                          .packed_lse = to.lse,
                          .headers = to.headers,
                          .slot = to.slot},
                         stream);
  }

  /// Whether the headers of the exchange that is under way have left.
  bool are_headers_sent(const Stream& stream) {
    const helix::WindowExchangeArgs at = messages(positions).sink.exchange;
    std::uint64_t exchanges = 0;
    backend.download(&exchanges, at.epoch, sizeof(exchanges), stream);
    std::uint32_t header = 0;
    const std::byte* const own = at.received + at.sender * at.sender_bytes;
    backend.download(&header, own + (exchanges % 2 == 0 ? 0 : at.slot_bytes), sizeof(header), stream);
    return header == static_cast<std::uint32_t>(exchanges + 1);
  }

  std::vector<T> result_on_host(const Stream& stream) {
    return on_host<T>(backend, combined, static_cast<std::size_t>(result().size()), stream);
  }
  static bool are_same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
  }
};

/// Decode steps of one launch, of several, of a cluster and of many splits, an idle sequence behind the last
/// launch, prompts and drafts, latents and the combine behind them, and all that other GPUs run.
std::vector<AttentionShape> attention_shapes() {
  std::vector<AttentionShape> shapes{
      {.kv_heads = 2, .group = 4, .dim = 128, .sequences = 3, .queries = 1, .length = 700},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 1, .queries = 1, .length = 20000},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 300, .queries = 1, .length = 40},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 600, .queries = 1, .length = 40, .idle = 200},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 3, .queries = 1, .length = 90, .chunk = 4096},
      {.kv_heads = 2, .group = 8, .dim = 128, .sequences = 2, .queries = 8, .length = 2000},
      {.kv_heads = 2, .group = 8, .dim = 128, .sequences = 1, .queries = 1500, .length = 1700},
      {.kv_heads = 1, .group = 8, .dim = 64, .sequences = 520, .queries = 4, .length = 50},
      {.kv_heads = 1, .group = 16, .dim = 576, .sequences = 2, .queries = 1, .length = 900},
      {.kv_heads = 1, .group = 16, .dim = 576, .sequences = 270, .queries = 1, .length = 40},
      {.kv_heads = 1, .group = 16, .dim = 576, .sequences = 2, .queries = 1, .length = 90, .chunk = 4096}};
  for (const std::size_t i : {0u, 2u, 4u, 8u}) {
    shapes.push_back(shapes[i]);
    shapes.back().target = AttentionTarget::any_gpu;
  }
  return shapes;
}

}  // namespace

TEMPLATE_TEST_CASE("attention's last block sends the headers of what it writes to peers", "", bf16, float) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4);
  run_ranks_or_throw(make_group(size), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<TestType> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    std::size_t number = 0;
    for (const AttentionShape& s : attention_shapes()) {
      AttentionExchange<TestType> exchange(backend, s);
      exchange.push(stream);
      require(!exchange.are_headers_sent(stream), "a copy sent headers, in shape ", number);
      exchange.combine(exchange.positions, stream);
      const auto pushed = exchange.result_on_host(stream);
      for (int round = 0; round < 4; ++round) {
        exchange.attend(exchange.batch(), exchange.messages(exchange.positions).sink, stream);
        require(exchange.are_headers_sent(stream), "attention sent no headers in round ", round, " of shape ",
                number);
        exchange.combine(exchange.positions, stream);
        require(exchange.are_same_bits(exchange.result_on_host(stream), pushed), "other bits in round ",
                round, " of shape ", number);
      }
      for (int round = 0; round < 5; ++round) exchange.queue(stream);
      require(exchange.are_same_bits(exchange.result_on_host(stream), pushed), "other bits in shape ",
              number);
      ++number;
      comm.barrier(stream);
      backend.synchronize(stream);
    }
  });
}

TEST_CASE("attention in two calls leaves the headers to the combine") {
  HELIX_REQUIRE_GPUS(1);
  run_ranks_or_throw(make_group(2), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AttentionExchange<bf16> exchange(
        backend, {.kv_heads = 2, .group = 4, .dim = 128, .sequences = 5, .queries = 1, .length = 300});
    exchange.push(stream);
    exchange.combine(exchange.positions, stream);
    const auto pushed = exchange.result_on_host(stream);
    for (int round = 0; round < 3; ++round) {
      const auto sink = exchange.messages(exchange.positions).sink;
      exchange.attend(exchange.batch().slice(3, 2), sink, stream);
      require(!exchange.are_headers_sent(stream), "the first call sent headers");
      exchange.attend(exchange.batch().slice(0, 3), sink, stream);
      require(!exchange.are_headers_sent(stream), "the second call sent headers");
      exchange.combine(exchange.positions, stream);
      require(exchange.are_same_bits(exchange.result_on_host(stream), pushed), "other bits in round ", round);
    }
    comm.barrier(stream);
    backend.synchronize(stream);
  });
}

TEST_CASE("captured attention sends its headers in replays of odd numbers of exchanges") {
  HELIX_REQUIRE_GPUS(1);
  const int count = GENERATE(1, 2, 3);
  const bool is_latent = GENERATE(false, true);
  run_ranks_or_throw(make_group(2), [count, is_latent](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AttentionExchange<bf16> exchange(
        backend,
        is_latent ? AttentionShape{.kv_heads = 1,
                                   .group = 16,
                                   .dim = 576,
                                   .sequences = 2,
                                   .queries = 1,
                                   .length = 700}
                  : AttentionShape{
                        .kv_heads = 2, .group = 4, .dim = 128, .sequences = 270, .queries = 1, .length = 90});
    exchange.push(stream);
    exchange.combine(exchange.positions, stream);
    const auto pushed = exchange.result_on_host(stream);
    exchange.queue(stream);
    backend.synchronize(stream);
    const Graph graph = Graph::capture(stream, [&] {
      for (int i = 0; i < count; ++i) exchange.queue(stream);
    });
    comm.barrier(stream);
    backend.synchronize(stream);
    for (int replay = 0; replay < 50; ++replay) {
      if (replay % 7 == comm.rank()) std::this_thread::sleep_for(1ms);
      graph.replay(stream);
      if (replay % 9 == 0)
        require(exchange.are_same_bits(exchange.result_on_host(stream), pushed), "other bits in replay ",
                replay);
    }
    backend.synchronize(stream);
    comm.barrier(stream);
    backend.synchronize(stream);
  });
}

TEST_CASE("a rank whose attention is at other positions, or does not come, is named") {
  HELIX_REQUIRE_GPUS(1);
  const bool is_absent = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [is_absent](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AttentionExchange<bf16> exchange(
        backend, {.kv_heads = 2, .group = 4, .dim = 128, .sequences = 2, .queries = 1, .length = 300});
    exchange.queue(stream);
    backend.synchronize(stream);
    const Buffer others = on_device(std::vector<std::int64_t>{6, 6});
    const Buffer& at = comm.rank() == 1 ? others : exchange.positions;
    if (is_absent && comm.rank() == 1) {
      std::this_thread::sleep_for(4s);
    } else {
      exchange.attend(exchange.batch(), exchange.messages(at).sink, stream);
      exchange.combine(at, stream);
    }
    backend.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK_THAT(outcomes.message(0), Contains("rank 1"));
  if (!is_absent) CHECK_THAT(outcomes.message(0), Contains("out of step"));
}

TEMPLATE_TEST_CASE("partials combine exactly through the memory of peers", "", bf16, float) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4);
  run_ranks_or_throw(make_group(size), [](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<TestType> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    for (const ExchangeCase& c : {ExchangeCase{1, 8, 128}, ExchangeCase{3, 4, 7}, ExchangeCase{33, 16, 64}}) {
      Exchange<TestType> exchange(backend, c, c.tokens + 2);
      require(exchange.all_to_all.has_windows(), "no windows");
      for (int round = 0; round < 5; ++round) {
        const unsigned step = round % 2 == 0 ? 0 : 1;
        exchange.queue(step, stream);
        exchange.check(step, stream);
      }
      for (int round = 0; round < 20; ++round) exchange.queue(round % 3 == 0 ? 1 : 0, stream);
      exchange.check(0, stream);
      comm.barrier(stream);
      backend.synchronize(stream);
    }
  });
}

TEST_CASE("captured steps with odd numbers of exchanges replay rightly") {
  HELIX_REQUIRE_GPUS(1);
  const int count = GENERATE(1, 2, 3);
  run_ranks_or_throw(make_group(2), [count](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    Exchange<bf16> exchange(backend, {2, 8, 128}, 2);
    for (unsigned step = 0; step < 2; ++step) exchange.queue(step, stream);
    backend.synchronize(stream);
    const Graph graph = Graph::capture(stream, [&] {
      for (int i = 0; i < count; ++i) exchange.queue(i % 2 == 0 ? 0 : 1, stream);
    });
    comm.barrier(stream);
    backend.synchronize(stream);
    for (int replay = 0; replay < 50; ++replay) {
      if (replay % 7 == comm.rank()) std::this_thread::sleep_for(1ms);
      graph.replay(stream);
      if (replay % 9 == 0) exchange.check(count % 2 == 0 ? 1 : 0, stream);
    }
    backend.synchronize(stream);
    comm.barrier(stream);
    backend.synchronize(stream);
  });
}

TEST_CASE("a rank that skips an exchange or is at other positions is named") {
  HELIX_REQUIRE_GPUS(1);
  const bool skips = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [skips](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    Exchange<bf16> exchange(backend, {1, 8, 128}, 1);
    exchange.queue(0, stream);
    backend.synchronize(stream);
    Buffer others = on_device(std::vector<std::int64_t>{6, 6});
    if (comm.rank() == 1) std::swap(exchange.positions, others);  // frees nothing
    if (skips && comm.rank() == 1) {
      std::this_thread::sleep_for(4s);
    } else {
      exchange.queue(1, stream);
    }
    backend.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK_THAT(outcomes.message(0), Contains("rank 1"));
  if (!skips) CHECK_THAT(outcomes.message(0), Contains("out of step"));
}

TEMPLATE_TEST_CASE("reduce_norm over windows equals the norm of the sum with equal bits on all ranks", "",
                   bf16, float) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 3, 8);
  run_ranks_or_throw(make_group(size), [size](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<TestType> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    struct Shape {
      std::int64_t rows, width;
    };
    // In two shots: the last two, and of 8 ranks 9 rows of 16384.
    for (const Shape& s : {Shape{1, 64},
                           {1, 2048},
                           {2, 4096},
                           {5, 8192},
                           {70, 1024},
                           {9, 16384},
                           {3, 24},
                           {2, 100},
                           {250, 4096},
                           {1021, 1000}}) {
      for (const bool has_norm : {true, false}) {
        const auto count = static_cast<std::size_t>(s.rows * s.width);
        const auto seed = [&](int rank) { return static_cast<unsigned>(17 * rank + 3); };
        const auto before = random_values<TestType>(s.rows * s.width, 5);
        const Buffer partial = on_device(random_values<TestType>(s.rows * s.width, seed(comm.rank())));
        const Buffer residual = on_device(before);
        const auto weights = random_values<TestType>(s.width, 11);
        const Buffer weight = on_device(weights);
        const Buffer out(count * sizeof(TestType));
        const auto view = [&](const Buffer& buffer) {
          return TensorView<TestType, 2>(reinterpret_cast<TestType*>(buffer.data()), {s.rows, s.width});
        };
        helix::reduce_norm(
            backend,
            {.partial = view(partial),
             .residual = view(residual),
             .weight = has_norm ? helix::WeightView{weight.data(), helix::kDTypeOf<TestType>, 1, s.width}
                                : helix::WeightView{},
             .out = has_norm ? view(out) : TensorView<TestType, 2>{}},
            stream);
        const auto sum = on_host<TestType>(backend, residual, count, stream);
        const auto normed = on_host<TestType>(backend, out, count, stream);
        std::vector<double> exact(count, 0.0);
        for (int r = 0; r < size; ++r) {
          const auto part = random_values<TestType>(s.rows * s.width, seed(r));
          for (std::size_t i = 0; i < count; ++i) exact[i] += double{static_cast<float>(part[i])};
        }
        const double unit = std::is_same_v<TestType, float> ? 1e-5 : 1.0 / 32;
        for (std::int64_t row = 0; row < s.rows; ++row) {
          double squares = 0.0;
          for (std::int64_t i = 0; i < s.width; ++i) {
            const auto at = static_cast<std::size_t>(row * s.width + i);
            const double x = exact[at] + double{static_cast<float>(before[at])};
            squares += x * x;
            require(std::abs(x - double{static_cast<float>(sum[at])}) <= unit * (1.0 + std::abs(x)), "row ",
                    row, " column ", i, ": residual ", static_cast<float>(sum[at]), ", expected ", x,
                    "; rows ", s.rows, " width ", s.width);
          }
          const double scale = 1.0 / std::sqrt(squares / static_cast<double>(s.width) + 1e-5);
          for (std::int64_t i = 0; has_norm && i < s.width; ++i) {
            const auto at = static_cast<std::size_t>(row * s.width + i);
            const double expected = (exact[at] + double{static_cast<float>(before[at])}) * scale *
                                    double{static_cast<float>(weights[static_cast<std::size_t>(i)])};
            require(std::abs(expected - double{static_cast<float>(normed[at])}) <=
                        unit * (1.0 + std::abs(expected)),
                    "row ", row, " column ", i, ": out ", static_cast<float>(normed[at]), ", expected ",
                    expected, "; rows ", s.rows, " width ", s.width);
          }
        }
        // The bits of all ranks.
        const Buffer all(count * sizeof(TestType) * static_cast<std::size_t>(size));
        comm.all_gather(residual.data(), all.data(), static_cast<std::int64_t>(count * sizeof(TestType)),
                        stream);
        const auto gathered = on_host<TestType>(backend, all, count * static_cast<std::size_t>(size), stream);
        for (std::size_t i = 0; i < gathered.size(); ++i)
          require(std::memcmp(&gathered[i], &sum[i % count], sizeof(TestType)) == 0, "rank ", i / count,
                  " has other bits at ", i % count);
      }
    }
  });
}
