// SPDX-License-Identifier: Apache-2.0
// cuda::Graph: a replay reads device memory that changed since the capture and gives the bits of eager calls;
// a failed capture leaves its stream usable; the collectives of all ranks fit into one graph.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/decode_layer.hpp>

#include "cuda/gpu.hpp"
#include "cuda/runtime/graph_nodes.hpp"
#include "support/catch.hpp"
#include "support/layer_fixture.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using cuda::Buffer;
using cuda::Event;
using cuda::Graph;
using cuda::LocalComm;
using cuda::Operators;
using cuda::Stream;

/// The attention half of a layer on fixed addresses: norm, projection, append, attention, combine.
template <class T>
class AttentionStep {
 public:
  static constexpr std::int64_t kSequences = 3;
  static constexpr std::int64_t kQueries = 8;  // per sequence: enough tokens for the matrix library
  static constexpr std::int64_t kTokens = kSequences * kQueries;
  static constexpr std::int64_t kHidden = 128;
  static constexpr std::int64_t kQueryHeads = 4;
  static constexpr std::int64_t kKvHeads = 2;
  static constexpr std::int64_t kDim = 64;
  static constexpr std::int64_t kWidth = (kQueryHeads + 2 * kKvHeads) * kDim;
  static constexpr std::int64_t kPageTokens = 16;
  static constexpr std::int64_t kMaxPages = 20;  // of a sequence
  static constexpr std::int64_t kNumPages = kSequences * kMaxPages;

  explicit AttentionStep(const Operators<T>& operators) : operators_(&operators) {
    const auto make = [&](std::int64_t bytes) { return operators.allocate(static_cast<std::size_t>(bytes)); };
    constexpr auto kElement = static_cast<std::int64_t>(sizeof(T));
    hidden_ = make(kTokens * kHidden * kElement);
    norm_ = make(kHidden * kElement);
    weight_ = make(kWidth * kHidden * kElement);
    normed_ = make(kTokens * kHidden * kElement);
    qkv_ = make(kTokens * kWidth * kElement);
    pages_ = make(kNumPages * 2 * kKvHeads * kPageTokens * kDim * kElement);
    table_ = make(kSequences * kMaxPages * 4);
    offsets_ = make((kSequences + 1) * 4);
    slots_ = make(kSequences * 4);
    positions_ = make(kTokens * 8);
    partial_ = make(kTokens * kQueryHeads * kDim * kElement);
    partial_lse_ = make(kTokens * kQueryHeads * 4);
    out_ = make(kTokens * kQueryHeads * kDim * kElement);
    lse_ = make(kTokens * kQueryHeads * 4);
    workspace_ =
        operators.allocate(operators.partial_attention_workspace_bytes(kTokens, kQueryHeads, kDim, kDim));
    for (std::int64_t b = 0; b <= kSequences; ++b)
      host_offsets_.push_back(static_cast<std::int32_t>(b * kQueries));
  }

  /// Fills weights, offsets and all pages from one seed.
  void fill(Stream stream) {
    std::mt19937 random(3);
    for (const Buffer* buffer : {&norm_, &weight_, &pages_})
      upload(*buffer, numbers(random, buffer->size_bytes() / sizeof(T)), stream);
    upload(offsets_, host_offsets_, stream);
  }

  /// Sets what changes from step to step: hidden states, positions, slots and page table.
  void set(unsigned step, Stream stream) {
    std::mt19937 random(100 + step);
    upload(hidden_, numbers(random, kTokens * kHidden), stream);
    std::vector<std::int64_t> positions;
    std::vector<std::int32_t> slots;
    for (std::int64_t b = 0; b < kSequences; ++b) {
      const std::int64_t first = static_cast<std::int64_t>(random() % (kMaxPages * kPageTokens - kQueries));
      for (std::int64_t t = 0; t < kQueries; ++t) positions.push_back(first + t);
      slots.push_back(static_cast<std::int32_t>((b + step) % kSequences));
    }
    if (step % 2 == 1) positions[5] = -1;
    std::vector<std::int32_t> table(kNumPages);
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
    std::shuffle(table.begin(), table.end(), random);
    upload(positions_, positions, stream);
    upload(slots_, slots, stream);
    upload(table_, table, stream);
  }

  void queue(Stream stream) const {
    const auto* positions = reinterpret_cast<const std::int64_t*>(positions_.data());
    const TensorView<T, 2> normed(typed<T>(normed_), {kTokens, kHidden});
    const TensorView<T, 2> qkv(typed<T>(qkv_), {kTokens, kWidth});
    operators_->rms_norm(RmsNormArgs<T>{{},
                                        {typed<T>(hidden_), {kTokens, kHidden}},
                                        {norm_.data(), kDTypeOf<T>, 1, kHidden},
                                        normed,
                                        1e-5f},
                         stream);
    operators_->linear(LinearArgs<T>{normed, {weight_.data(), kDTypeOf<T>, kWidth, kHidden}, {}, qkv, false},
                       stream);
    const auto heads = [&](std::int64_t first, std::int64_t count) {
      return TensorView<const T, 3>(qkv.data() + first * kDim, {kTokens, count, kDim}, {kWidth, kDim, 1});
    };
    KvView kv =
        KvView::of_pool(pages_.data(), KvFormat::head_major(kDTypeOf<T>, kKvHeads, kDim, kDim, kPageTokens),
                        kNumPages)
            .whole();
    kv.page_table = typed<std::int32_t>(table_);
    kv.max_pages = kMaxPages;
    const Batch batch{host_offsets_, typed<std::int32_t>(offsets_), positions, typed<std::int32_t>(slots_)};
    operators_->append_kv(
        AppendKvArgs<T>{heads(kQueryHeads, kKvHeads), heads(kQueryHeads + kKvHeads, kKvHeads), batch, kv},
        stream);
    const TensorView<T, 3> partial(typed<T>(partial_), {kTokens, kQueryHeads, kDim});
    const TensorView<float, 2> partial_lse(typed<float>(partial_lse_), {kTokens, kQueryHeads});
    operators_->partial_attention(PartialAttentionArgs<T>{heads(0, kQueryHeads),
                                                          batch,
                                                          kv,
                                                          {partial, partial_lse},
                                                          0.1f,
                                                          0,
                                                          0.0f,
                                                          {workspace_.data(), workspace_.size_bytes()}},
                                  stream);
    operators_->lse_combine(LseCombineArgs<T>{{partial.data(), {1, kTokens, kQueryHeads, kDim}},
                                              {partial_lse.data(), {1, kTokens, kQueryHeads}},
                                              nullptr,
                                              {typed<T>(out_), {kTokens, kQueryHeads, kDim}},
                                              {typed<float>(lse_), {kTokens, kQueryHeads}}},
                            stream);
  }

  /// Everything that a step writes. Waits.
  std::vector<std::vector<std::uint8_t>> results(Stream stream) const {
    std::vector<std::vector<std::uint8_t>> all;
    for (const Buffer* buffer : {&qkv_, &pages_, &partial_, &partial_lse_, &out_, &lse_}) {
      auto& bytes = all.emplace_back(buffer->size_bytes());
      operators_->download(bytes.data(), buffer->data(), bytes.size(), stream);
    }
    operators_->synchronize(stream);
    return all;
  }

 private:
  template <class X>
  static X* typed(const Buffer& buffer) {
    return reinterpret_cast<X*>(buffer.data());
  }
  static std::vector<T> numbers(std::mt19937& random, std::size_t count) {
    std::vector<T> values;
    for (std::size_t i = 0; i < count; ++i)
      values.push_back(T(static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f));
    return values;
  }
  template <class X>
  void upload(const Buffer& to, const std::vector<X>& values, Stream stream) const {
    operators_->upload(to.data(), values.data(), values.size() * sizeof(X), stream);
  }

  const Operators<T>* operators_;
  std::vector<std::int32_t> host_offsets_;
  Buffer hidden_, norm_, weight_, normed_, qkv_, pages_, table_, offsets_, slots_, positions_;
  Buffer partial_, partial_lse_, out_, lse_, workspace_;
};

/// Captures the work that `queue_rank` queues for each rank, on a thread and stream of its own, in one graph.
/// The graph begins and ends on the first rank's stream.
template <class QueueRank>
Graph capture_ranks(std::vector<LocalComm> comms, const std::vector<Stream>& streams, QueueRank queue_rank) {
  const Operators<float> operators;
  Event fork = operators.create_event();
  Event join = operators.create_event();
  return Graph::capture(streams[0], [&] {
    operators.record(fork, streams[0]);
    for (std::size_t rank = 1; rank < streams.size(); ++rank) operators.wait(streams[rank], fork);
    run_ranks_or_throw(comms, [&](LocalComm& comm) {
      cuda::use_device(0);
      queue_rank(comm);
    });
    for (std::size_t rank = 1; rank < streams.size(); ++rank) {
      operators.record(join, streams[rank]);
      operators.wait(streams[0], join);
    }
  });
}

}  // namespace

TEMPLATE_TEST_CASE("a replayed graph reads changed inputs, positions and page tables as eager calls do", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const Operators<TestType> operators;
  const Stream stream = operators.create_stream();
  AttentionStep<TestType> eager(operators);
  AttentionStep<TestType> replayed(operators);
  for (AttentionStep<TestType>* step : {&eager, &replayed}) {
    step->fill(stream);
    step->set(0, stream);
  }
  eager.queue(stream);
  const Graph graph = Graph::capture(stream, [&] { replayed.queue(stream); });
  CHECK_FALSE(graph.empty());
  CHECK(graph.num_nodes() >= 5);
  CHECK(eager.results(stream) != replayed.results(stream));  // the capture itself runs nothing
  std::vector<std::vector<std::uint8_t>> last;
  for (unsigned step = 0; step < 6; ++step) {
    CAPTURE(step);
    if (step > 0) {
      eager.set(step, stream);
      eager.queue(stream);
      replayed.set(step, stream);
    }
    graph.replay(stream);
    const auto results = replayed.results(stream);
    CHECK(results == eager.results(stream));
    CHECK(results != last);
    last = results;
  }
  for (int again = 0; again < 3; ++again) graph.replay(stream);  // without waiting in between
  CHECK(replayed.results(stream) == last);
}

TEST_CASE("a failure while a graph is captured leaves the stream usable") {
  HELIX_REQUIRE_GPUS(1);
  const Operators<float> operators;
  const Stream stream = operators.create_stream();
  AttentionStep<float> step(operators);
  step.fill(stream);
  step.set(1, stream);
  step.queue(stream);
  const auto expected = step.results(stream);
  CHECK_THROWS_WITH(Graph::capture(stream,
                                   [&] {
                                     step.queue(stream);
                                     throw std::runtime_error("a deliberate failure");
                                   }),
                    "a deliberate failure");
  step.queue(stream);
  CHECK(step.results(stream) == expected);
  const Graph graph = Graph::capture(stream, [&] { step.queue(stream); });
  graph.replay(stream);
  CHECK(step.results(stream) == expected);
}

TEST_CASE("an empty capture replays as nothing") {
  HELIX_REQUIRE_GPUS(1);
  const Operators<float> operators;
  const Stream stream = operators.create_stream();
  const Graph graph = Graph::capture(stream, [] {});
  CHECK(graph.num_nodes() == 0);
  graph.replay(stream);
  operators.synchronize(stream);
}

TEST_CASE("a capture ends on the device of its stream, whichever device is the thread's") {
  HELIX_REQUIRE_GPUS(2);
  constexpr std::size_t kBytes = 1 << 12;
  cuda::use_device(1);
  const Stream stream = Stream::create();
  const Buffer filled(kBytes);
  cuda::use_device(0);
  const Graph graph = Graph::capture(stream, [&] {
    cuda::use_device(1);
    HELIX_CUDA_CHECK(cudaMemsetAsync(filled.data(), 0xa5, kBytes, stream.handle()));
    cuda::use_device(0);
  });
  int device = -1;
  HELIX_CUDA_CHECK(cudaGetDevice(&device));
  CHECK(device == 0);
  graph.replay(stream);
  std::vector<std::uint8_t> got(kBytes);
  HELIX_CUDA_CHECK(
      cudaMemcpyAsync(got.data(), filled.data(), kBytes, cudaMemcpyDeviceToHost, stream.handle()));
  cuda::synchronize(stream);
  CHECK(got == std::vector<std::uint8_t>(kBytes, 0xa5));
}

TEST_CASE("a captured memset of a second device stays there") {
  HELIX_REQUIRE_GPUS(2);
  constexpr std::size_t kBytes = 1 << 12;
  const Operators<float> here(0);
  const Operators<float> there(1);
  const Stream stream = here.create_stream();
  const Stream other = there.create_stream();
  const Buffer filled = there.allocate(kBytes);
  std::vector<std::uint8_t> bytes(kBytes, 0xa5);
  there.upload(filled.data(), bytes.data(), kBytes, other);
  there.synchronize(other);
  auto fork = here.create_event();
  auto join = there.create_event();
  const Graph graph = Graph::capture(stream, [&] {
    here.record(fork, stream);
    there.wait(other, fork);
    there.fill_zero(filled.data(), kBytes, other);
    there.record(join, other);
    here.wait(stream, join);
  });
  graph.replay(stream);
  here.synchronize(stream);
  there.download(bytes.data(), filled.data(), kBytes, other);
  CHECK(bytes == std::vector<std::uint8_t>(kBytes, 0));
}

TEST_CASE("a default stream is that of the operators' device, whichever device is the thread's") {
  HELIX_REQUIRE_GPUS(2);
  constexpr std::size_t kBytes = 64 << 20;
  const Operators<float> operators(1);
  const Stream stream = Stream::borrow(nullptr);
  const Buffer first = operators.allocate(kBytes);
  const Buffer second = operators.allocate(kBytes);
  auto event = operators.create_event();
  cuda::use_device(0);
  std::vector<std::uint8_t> bytes(kBytes, 0xa5);
  operators.upload(first.data(), bytes.data(), kBytes, stream);
  operators.copy(second.data(), first.data(), kBytes, stream);
  operators.record(event, stream);
  operators.wait(stream, event);
  operators.fill_zero(first.data(), kBytes / 2, stream);
  std::vector<std::uint8_t> got(kBytes);
  operators.download(got.data(), second.data(), kBytes, stream);
  CHECK(got == bytes);

  const Stream own = operators.create_stream();
  const Graph graph = Graph::capture(own, [&] { operators.copy(first.data(), second.data(), kBytes, own); });
  graph.replay(stream);
  operators.download(got.data(), first.data(), kBytes, stream);
  CHECK(got == bytes);
}

TEST_CASE("memsets of a captured graph become kernels that do the same in the same place") {
  HELIX_REQUIRE_GPUS(1);
  constexpr std::size_t kPitch = 64;
  constexpr std::size_t kRows = 5;
  struct Fill {
    unsigned bytes;  ///< of an element
    unsigned value;
    std::size_t width;  ///< elements of a row
    std::size_t rows = kRows - 1;
  };
  const auto element = GENERATE(Fill{1, 0xa5, 7}, Fill{2, 0xbeef, 9}, Fill{4, 0xdeadbeef, 16},
                                Fill{1, 0xa5, 7, 1}, Fill{1, 0xa5, 64, 1}, Fill{2, 0xbeef, 9, 1},
                                Fill{2, 0xbeef, 30, 1}, Fill{4, 0xdeadbeef, 3, 1});
  CAPTURE(element.bytes, element.width, element.rows);
  const Operators<float> operators;
  const Stream stream = operators.create_stream();
  const Buffer source = operators.allocate(kPitch * kRows);
  const Buffer filled = operators.allocate(kPitch * kRows);
  const Buffer copy = operators.allocate(kPitch * kRows);

  // Copy, fill, copy: the copies show that the memset keeps its place between them.
  cudaGraph_t graph = nullptr;
  HELIX_CUDA_CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t first = nullptr;
  cudaGraphNode_t memset = nullptr;
  cudaGraphNode_t last = nullptr;
  HELIX_CUDA_CHECK(cudaGraphAddMemcpyNode1D(&first, graph, nullptr, 0, filled.data(), source.data(),
                                            kPitch * kRows, cudaMemcpyDeviceToDevice));
  const cudaMemsetParams params{filled.data(), kPitch,        element.value,
                                element.bytes, element.width, element.rows};
  HELIX_CUDA_CHECK(cudaGraphAddMemsetNode(&memset, graph, &first, 1, &params));
  HELIX_CUDA_CHECK(cudaGraphAddMemcpyNode1D(&last, graph, &memset, 1, copy.data(), filled.data(),
                                            kPitch * kRows, cudaMemcpyDeviceToDevice));
  cuda::replace_memsets(graph);

  std::array<cudaGraphNode_t, 3> nodes{};
  std::size_t count = nodes.size();
  HELIX_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  REQUIRE(count == 3);
  std::size_t kernels = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    HELIX_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    CHECK(type != cudaGraphNodeTypeMemset);
    kernels += type == cudaGraphNodeTypeKernel ? 1 : 0;
  }
  CHECK(kernels == 1);

  cudaGraphExec_t exec = nullptr;
  HELIX_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (const std::uint8_t seed : {1, 2}) {
    std::vector<std::uint8_t> bytes(kPitch * kRows);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + seed);
    operators.upload(source.data(), bytes.data(), bytes.size(), stream);
    HELIX_CUDA_CHECK(cudaGraphLaunch(exec, stream.handle()));
    std::vector<std::uint8_t> expected = bytes;
    for (std::size_t row = 0; row < element.rows; ++row) {
      for (std::size_t i = 0; i < element.width * element.bytes; ++i)
        expected[row * kPitch + i] = static_cast<std::uint8_t>(element.value >> 8 * (i % element.bytes));
    }
    std::vector<std::uint8_t> got(bytes.size());
    operators.download(got.data(), copy.data(), got.size(), stream);
    operators.synchronize(stream);
    CHECK(got == expected);
  }
  HELIX_CUDA_CHECK(cudaGraphExecDestroy(exec));
  HELIX_CUDA_CHECK(cudaGraphDestroy(graph));
}

TEST_CASE("the collectives of all ranks replay from one graph with new inputs") {
  HELIX_REQUIRE_GPUS(1);
  constexpr int kSize = 4;
  constexpr std::int64_t kCount = 1200;  // per rank, a multiple of the number of ranks
  constexpr std::int64_t kPart = kCount / kSize;
  constexpr std::int64_t kBytes = kCount * 4;
  const Operators<float> operators;
  std::vector<Stream> streams;
  std::vector<std::array<Buffer, 6>> memory(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    streams.push_back(operators.create_stream());
    for (Buffer& buffer : memory[static_cast<std::size_t>(rank)])
      buffer = operators.allocate(static_cast<std::size_t>(kSize * kBytes));
  }
  const Graph graph = capture_ranks(LocalComm::create_group(kSize), streams, [&](LocalComm& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const Stream stream = streams[rank];
    auto& [in, sums, turned, part, all, passed] = memory[rank];
    comm.all_reduce(in.data(), sums.data(), kCount, DType::f32, stream);
    comm.all_to_all(in.data(), turned.data(), kPart * 4, stream);
    comm.reduce_scatter(turned.data(), part.data(), kPart, DType::f32, stream);
    comm.all_gather(part.data(), all.data(), kPart * 4, stream);
    operators.copy(passed.data(), in.data(), static_cast<std::size_t>(kBytes), stream);
    comm.broadcast(passed.data(), kPart * 4, 2, stream);
    if (comm.rank() == 1) comm.send(in.data(), kPart * 4, 3, stream);
    if (comm.rank() == 3) comm.recv(passed.data() + kPart * 4, kPart * 4, 1, stream);
    comm.barrier(stream);
  });
  const Stream first = streams[0];
  for (int replay = 0; replay < 3; ++replay) {
    CAPTURE(replay);
    const auto value = [&](std::int64_t rank, std::int64_t i) {
      return static_cast<float>((i * 7 + rank * 101 + replay * 13) % 1000);  // sums are exact
    };
    for (int rank = 0; rank < kSize; ++rank) {
      std::vector<float> input;
      for (std::int64_t i = 0; i < kCount; ++i) input.push_back(value(rank, i));
      operators.upload(memory[static_cast<std::size_t>(rank)][0].data(), input.data(), kBytes, first);
    }
    graph.replay(first);
    for (int rank = 0; rank < kSize; ++rank) {
      CAPTURE(rank);
      const auto download = [&](std::size_t which) {
        std::vector<float> values(kCount);
        operators.download(values.data(), memory[static_cast<std::size_t>(rank)][which].data(), kBytes,
                           first);
        operators.synchronize(first);
        return values;
      };
      std::vector<float> sums, turned, all(kCount), passed;
      for (std::int64_t i = 0; i < kCount; ++i) {
        float sum = 0.0f;
        for (int from = 0; from < kSize; ++from) sum += value(from, i);
        sums.push_back(sum);
        turned.push_back(value(i / kPart, rank * kPart + i % kPart));
        passed.push_back(i < kPart ? value(2, i)
                                   : value(rank == 3 && i < 2 * kPart ? 1 : rank,
                                           rank == 3 && i < 2 * kPart ? i - kPart : i));
        // Part r is the sum of what rank r sent to each rank.
        float part = 0.0f;
        for (int from = 0; from < kSize; ++from) part += value(i / kPart, from * kPart + i % kPart);
        all[static_cast<std::size_t>(i)] = part;
      }
      CHECK(download(1) == sums);
      CHECK(download(2) == turned);
      CHECK(download(4) == all);
      CHECK(download(5) == passed);
    }
  }
}

TEST_CASE("decode_layer of all ranks replays from one graph, in slices and with other positions") {
  HELIX_REQUIRE_GPUS(1);
  using CudaBackend = cuda::Backend<LocalComm, float>;
  const oracle::Layer layer = random_layer({}, 8);
  Script script;  // equal shapes, as a graph needs, after a prefill
  script.sequences = 5;
  script.steps.push_back(
      {{9, 3, 1, 7, 30}, {0, 0, 0, 0, 0}, RandomMatrices(1).vector(50 * layer.hidden, 1.0)});
  for (std::uint32_t s = 0; s < 4; ++s)
    script.steps.push_back(
        {{1, 1, 1, 1, 1}, {0, 0, 0, 0, 0}, RandomMatrices(s + 2).vector(5 * layer.hidden, 1.0)});
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  const auto size = static_cast<std::size_t>(topo.stage_size());
  for (const int slices : {1, 3}) {
    CAPTURE(slices);
    const LayerRunOptions options{.chunk = 3, .hop_b_slices = slices};
    const auto eager = run_script<CudaBackend, LocalComm>(topo, layer, script, options);
    const std::vector<LocalComm> stage = LocalComm::create_group(topo.stage_size());
    std::vector<std::unique_ptr<CudaBackend>> backends(size);
    std::vector<std::unique_ptr<LayerRank<CudaBackend>>> ranks(size);
    std::vector<std::vector<std::vector<float>>> hidden(size);
    run_ranks_or_throw(stage, [&](LocalComm& comm) {
      const auto me = static_cast<std::size_t>(comm.rank());
      backends[me] = std::make_unique<CudaBackend>(make_backend<CudaBackend>(topo, comm));
      ranks[me] = std::make_unique<LayerRank<CudaBackend>>(*backends[me], topo, layer, script, options);
      hidden[me].push_back(ranks[me]->run(script.steps[0]));
      hidden[me].push_back(ranks[me]->run(script.steps[1]));
      ranks[me]->prepare(script.steps[2]);
      backends[me]->synchronize(ranks[me]->stream());
    });
    std::vector<Stream> streams;
    for (const auto& rank : ranks) streams.push_back(rank->stream());
    const Graph graph = capture_ranks(
        stage, streams, [&](LocalComm& comm) { ranks[static_cast<std::size_t>(comm.rank())]->launch(); });
    for (std::size_t s = 2; s < script.steps.size(); ++s) {
      for (std::size_t r = 0; r < size; ++r) {
        if (s > 2) ranks[r]->prepare(script.steps[s]);
        backends[r]->synchronize(streams[r]);
      }
      graph.replay(streams[0]);
      backends[0]->synchronize(streams[0]);
      for (std::size_t r = 0; r < size; ++r) hidden[r].push_back(ranks[r]->finish(script.steps[s]));
    }
    for (std::size_t r = 0; r < size; ++r) {
      CAPTURE(r);
      CHECK(hidden[r] == eager[r].hidden);
      for (std::size_t b = 0; b < eager[r].kv.size(); ++b) CHECK(ranks[r]->read_kv(b) == eager[r].kv[b]);
    }
  }
}

}  // namespace helix::test
