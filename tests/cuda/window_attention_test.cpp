// SPDX-License-Identifier: Apache-2.0
// Attention that writes into peer memory, in one call or several, and the results that its peers combine.
#include <algorithm>
#include <chrono>
#include <cstdint>
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

#include "cuda/gpu.hpp"
#include "cuda/peer_ranks.hpp"
#include "support/equal_bits.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::Batch;
using helix::bf16;
using helix::KvFormat;
using helix::KvLayout;
using helix::KvpAllToAll;
using helix::KvView;
using helix::PartialTarget;
using helix::TensorView;
using helix::contract::require;
using helix::cuda::Buffer;
using helix::cuda::Graph;
using helix::cuda::KernelTarget;
using helix::cuda::PeerComm;
using helix::cuda::Stream;
using helix::test::device_of;
using helix::test::have_equal_bits;
using helix::test::make_group;
using helix::test::on_device;
using helix::test::on_host;
using helix::test::PeerBackend;
using helix::test::random_values;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

namespace {

/// Sequences of equal length over a cache of random values.
struct AttentionShape {
  std::int64_t kv_heads;
  std::int64_t group;  // query heads per KV head
  std::int64_t dim;    // 576 for latents
  std::int64_t sequences;
  std::int64_t queries;  // tokens of the step, per sequence
  std::int64_t length;   // tokens of a sequence, including those of the step
  std::int64_t chunk = 16;
  std::int64_t idle = 0;  // sequences without a token, after the others
  KernelTarget target = KernelTarget::this_gpu;

  std::int64_t tokens() const { return sequences * queries; }
  std::int64_t heads() const { return kv_heads * group; }
  std::int64_t value_dim() const { return dim == 576 ? 512 : dim; }
};

/// One rank's attention and exchange. Attention that writes into the peers' memory must combine to the same
/// bits as partials of the same kernels that are copied there.
template <class T>
struct AttentionExchange {
  static constexpr std::int64_t kPageTokens = 16;

  PeerBackend<T>& backend;
  AttentionShape shape;
  KvpAllToAll<PeerBackend<T>> all_to_all;
  std::int64_t pages;  // per sequence
  KvFormat format;
  std::vector<std::int32_t> offsets_host;
  Buffer pool, q, page_table, offsets, slots, positions, workspace, out, lse, combined;

  AttentionExchange(PeerBackend<T>& of, const AttentionShape& s, bool has_lines = true)
      : backend(of),
        shape(s),
        all_to_all(of, {.max_tokens = s.tokens(),
                        .num_query_heads = s.heads(),
                        .value_dim = s.value_dim(),
                        .has_lines = has_lines}),
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
    of.set_kernel_target(s.target);
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
  TensorView<T, 3> result() { return result_in(combined, 0); }
  /// A result that begins `begin` elements into `memory`.
  TensorView<T, 3> result_in(const Buffer& memory, std::int64_t begin) {
    return {data_of<T>(memory) + begin,
            {shape.tokens(), shape.heads() / backend.comms().kvp->size(), shape.value_dim()}};
  }
  Batch batch() const {
    return {offsets_host, data_of<const std::int32_t>(offsets), data_of<const std::int64_t>(positions),
            data_of<const std::int32_t>(slots)};
  }
  auto messages(const Buffer& at) {
    return all_to_all.outgoing({.tokens = shape.tokens()}, data_of<const std::int64_t>(at));
  }

  void attend(const Batch& part, const PartialTarget<T>& target, const Stream& stream) {
    KvView kv = KvView::of_pool(pool.data(), format, shape.sequences * pages);
    kv.page_table = data_of<const std::int32_t>(page_table);
    kv.max_pages = pages;
    kv.layout = KvLayout(backend.comms().kvp->size(), shape.chunk);
    kv.kvp_rank = backend.comms().kvp->rank();
    helix::partial_attention(backend,
                             {.q = {data_of<const T>(q), {shape.tokens(), shape.heads(), shape.dim}},
                              .batch = part,
                              .kv = kv,
                              .target = target,
                              .scale = 0.05f,
                              .workspace = {workspace.data(), workspace.size_bytes()}},
                             stream);
  }
  void combine(const Buffer& at, const Stream& stream) {
    all_to_all.exchange_and_combine(messages(at), nullptr, result(), stream);
  }
  /// Queues attention that writes directly into the peers' memory, and the combine.
  void queue(const Stream& stream) {
    attend(batch(), messages(positions).target, stream);
    combine(positions, stream);
  }
  /// Queues attention that writes into this rank's memory, and a copy to the peers' memory.
  void push(const Stream& stream) {
    const TensorView<T, 3> local_out(data_of<T>(out), {shape.tokens(), shape.heads(), shape.value_dim()});
    const TensorView<float, 2> local_lse(data_of<float>(lse), {shape.tokens(), shape.heads()});
    attend(batch(), {.out = local_out, .lse = local_lse}, stream);
    const auto to = messages(positions).target;
    backend.pack_partial({.out = {local_out.data(), {shape.tokens(), shape.heads(), shape.value_dim()}},
                          .lse = {local_lse.data(), {shape.tokens(), shape.heads()}},
                          .target = to},
                         stream);
  }

  /// Whether the headers of the exchange in progress have been sent.
  bool are_headers_sent(const Stream& stream) {
    const helix::WindowExchangeArgs at = messages(positions).target.exchange;
    std::uint64_t exchanges = 0;
    backend.download(&exchanges, at.exchanges, sizeof(exchanges), stream);
    std::uint32_t header = 0;
    const std::byte* const own = at.received + at.sender * at.sender_bytes;
    backend.download(&header, own + (exchanges % 2 == 0 ? 0 : at.slot_bytes), sizeof(header), stream);
    return header == static_cast<std::uint32_t>(exchanges + 1);
  }

  std::vector<T> result_on_host(const Stream& stream) { return on_host_of(result(), stream); }
  std::vector<T> on_host_of(const TensorView<T, 3>& view, const Stream& stream) {
    std::vector<T> values(static_cast<std::size_t>(view.size()));
    backend.download(values.data(), view.data(), values.size() * sizeof(T), stream);
    return values;
  }
};

/// Decode steps of one launch, of several, of a cluster and of many splits; an idle sequence after the last
/// launch; prompts and drafts; latents and the combine after them; and all kernels that other GPUs run.
std::vector<AttentionShape> attention_shapes() {
  std::vector<AttentionShape> shapes{
      {.kv_heads = 2, .group = 4, .dim = 128, .sequences = 3, .queries = 1, .length = 700},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 1, .queries = 1, .length = 20000},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 300, .queries = 1, .length = 40},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 600, .queries = 1, .length = 40, .idle = 200},
      {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 3, .queries = 1, .length = 90, .chunk = 4096},
      {.kv_heads = 2, .group = 8, .dim = 128, .sequences = 2, .queries = 8, .length = 2000},
      {.kv_heads = 2, .group = 8, .dim = 128, .sequences = 1, .queries = 150, .length = 1700},
      {.kv_heads = 2, .group = 8, .dim = 128, .sequences = 1, .queries = 1500, .length = 1700},
      {.kv_heads = 1, .group = 8, .dim = 64, .sequences = 520, .queries = 4, .length = 50},
      {.kv_heads = 1, .group = 16, .dim = 576, .sequences = 2, .queries = 1, .length = 900},
      {.kv_heads = 1, .group = 16, .dim = 576, .sequences = 270, .queries = 1, .length = 40},
      {.kv_heads = 1, .group = 16, .dim = 576, .sequences = 2, .queries = 1, .length = 90, .chunk = 4096}};
  for (const std::size_t i : {0u, 2u, 4u, 9u}) {
    shapes.push_back(shapes[i]);
    shapes.back().target = KernelTarget::any_gpu;
  }
  return shapes;
}

}  // namespace

TEMPLATE_TEST_CASE("what attention writes to peers combines to the bits of what is pushed there", "", bf16,
                   float) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4);
  const bool has_lines = GENERATE(false, true);
  run_ranks_or_throw(make_group(size), [has_lines](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<TestType> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    std::size_t number = 0;
    for (const AttentionShape& s : attention_shapes()) {
      AttentionExchange<TestType> exchange(backend, s, has_lines);
      exchange.push(stream);
      require(!exchange.are_headers_sent(stream), "a copy sent headers, in shape ", number);
      exchange.combine(exchange.positions, stream);
      const auto pushed = exchange.result_on_host(stream);
      for (int round = 0; round < 4; ++round) {
        exchange.attend(exchange.batch(), exchange.messages(exchange.positions).target, stream);
        require(!exchange.are_headers_sent(stream), "attention sent headers in round ", round, " of shape ",
                number);
        exchange.combine(exchange.positions, stream);
        require(have_equal_bits(exchange.result_on_host(stream), pushed), "other bits in round ", round,
                " of shape ", number);
      }
      for (int round = 0; round < 5; ++round) exchange.queue(stream);
      require(have_equal_bits(exchange.result_on_host(stream), pushed), "other bits in shape ", number);
      ++number;
      comm.barrier(stream);
      backend.synchronize(stream);
    }
  });
}

// The allocator behaves like an engine's, which hands out memory again as soon as its last use is queued. The
// first rows are written where the last ones are read.
// the last ones are read.
TEST_CASE("a combine may write where the attention ahead of it reads and works") {
  HELIX_REQUIRE_GPUS(1);
  const bool has_lines = GENERATE(false, true);
  run_ranks_or_throw(make_group(2), [has_lines](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AttentionExchange<bf16> exchange(
        backend, {.kv_heads = 1, .group = 4, .dim = 64, .sequences = 1500, .queries = 1, .length = 600},
        has_lines);
    const std::int64_t q_size = exchange.shape.tokens() * exchange.shape.heads() * exchange.shape.dim;
    const auto q = on_host<bf16>(backend, exchange.q, static_cast<std::size_t>(q_size), stream);
    exchange.push(stream);
    exchange.combine(exchange.positions, stream);
    const auto pushed = exchange.result_on_host(stream);
    for (int round = 0; round < 20; ++round) {
      const auto to = round % 2 == 0 ? exchange.result_in(exchange.q, q_size - exchange.result().size())
                                     : exchange.result_in(exchange.workspace, 0);
      const auto messages = exchange.messages(exchange.positions);
      exchange.attend(exchange.batch(), messages.target, stream);
      exchange.all_to_all.exchange_and_combine(messages, nullptr, to, stream);
      require(have_equal_bits(exchange.on_host_of(to, stream), pushed), "other bits in round ", round);
      backend.upload(exchange.q.data(), q.data(), q.size() * sizeof(bf16), stream);
    }
    comm.barrier(stream);
    backend.synchronize(stream);
  });
}

TEST_CASE("attention in two calls combines to the same bits") {
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
      const auto target = exchange.messages(exchange.positions).target;
      exchange.attend(exchange.batch().slice(3, 2), target, stream);
      require(!exchange.are_headers_sent(stream), "the first call sent headers");
      exchange.attend(exchange.batch().slice(0, 3), target, stream);
      require(!exchange.are_headers_sent(stream), "the second call sent headers");
      exchange.combine(exchange.positions, stream);
      require(have_equal_bits(exchange.result_on_host(stream), pushed), "other bits in round ", round);
    }
    comm.barrier(stream);
    backend.synchronize(stream);
  });
}

TEST_CASE("captured attention and its combine replay rightly with odd numbers of exchanges") {
  HELIX_REQUIRE_GPUS(1);
  const int count = GENERATE(1, 2, 3);
  const bool is_latent = GENERATE(false, true);
  const bool has_lines = GENERATE(false, true);
  run_ranks_or_throw(make_group(2), [count, is_latent, has_lines](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AttentionExchange<bf16> exchange(backend,
                                     is_latent ? AttentionShape{.kv_heads = 1,
                                                                .group = 16,
                                                                .dim = 576,
                                                                .sequences = 2,
                                                                .queries = 1,
                                                                .length = 700}
                                               : AttentionShape{.kv_heads = 2,
                                                                .group = 2,
                                                                .dim = 64,
                                                                .sequences = 270,
                                                                .queries = 1,
                                                                .length = 90},
                                     has_lines);
    exchange.push(stream);
    exchange.combine(exchange.positions, stream);
    const auto pushed = exchange.result_on_host(stream);
    exchange.queue(stream);
    backend.synchronize(stream);
    const Graph graph = Graph::capture(stream, [&] {
      for (int i = 0; i < count; ++i) exchange.queue(stream);
    });
    helix::test::replay_apart(backend, graph, stream, [&](int replay) {
      require(have_equal_bits(exchange.result_on_host(stream), pushed), "other bits in replay ", replay);
    });
  });
}

TEST_CASE("a rank whose attention is at other positions, or does not come, is named") {
  HELIX_REQUIRE_GPUS(1);
  const bool is_absent = GENERATE(false, true);
  const bool has_lines = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [is_absent, has_lines](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AttentionExchange<bf16> exchange(
        backend, {.kv_heads = 2, .group = 4, .dim = 128, .sequences = 2, .queries = 1, .length = 300},
        has_lines);
    exchange.queue(stream);
    backend.synchronize(stream);
    const Buffer others = on_device(std::vector<std::int64_t>{6, 6});
    const Buffer& at = comm.rank() == 1 ? others : exchange.positions;
    if (is_absent && comm.rank() == 1) {
      std::this_thread::sleep_for(4s);
    } else {
      exchange.attend(exchange.batch(), exchange.messages(at).target, stream);
      exchange.combine(at, stream);
    }
    backend.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK_THAT(outcomes.message(0), ContainsSubstring("rank 1"));
  if (!is_absent) CHECK_THAT(outcomes.message(0), ContainsSubstring("out of step"));
}
