// SPDX-License-Identifier: Apache-2.0
// An engine on GPUs lends Helix its stream, NCCL communicators, allocator and KV pool (in vLLM's layout). It
// uses the partial attention, the exchange and the combine of Helix. One process, one thread per GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <helix/batch_buffer.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>

#include "nccl_environment.hpp"

namespace {

using Backend = helix::cuda::Backend<helix::cuda::NcclComm, helix::bf16>;

constexpr int kHeads = 8, kKvHeads = 2, kDim = 128, kContext = 1000, kBlock = 16, kChunk = 16;

struct Model {  // one query token, and K and V as [token][KV head][dim], rounded to bf16
  std::vector<helix::bf16> q = random(kHeads * kDim), k = random(kContext * kKvHeads * kDim),
                           v = random(kContext * kKvHeads * kDim);

  static std::vector<helix::bf16> random(int count) {
    static std::mt19937 generator(3);
    std::normal_distribution<float> normal;
    std::vector<helix::bf16> values(static_cast<std::size_t>(count));
    for (helix::bf16& x : values) x = helix::bf16(normal(generator));
    return values;
  }
};

void check(cudaError_t status) {
  if (status != cudaSuccess) throw helix::Error(helix::ErrorCode::internal, {cudaGetErrorString(status)});
}

/// The engine's allocator. Here the driver's stream-ordered memory pool stands in for it.
helix::cuda::Allocator engine_allocator() {
  return {.allocate =
              [](std::size_t bytes) {
                void* data = nullptr;
                check(cudaMallocAsync(&data, bytes, nullptr));
                check(cudaStreamSynchronize(nullptr));
                return data;
              },
          .free = [](void* data, std::size_t) { (void)cudaFreeAsync(data, nullptr); }};
}

/// Frees what the engine has of CUDA.
struct Free {
  void operator()(void* data) const { (void)cudaFree(data); }
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
};

template <class T>
std::unique_ptr<T, Free> on_device(const std::vector<T>& host) {
  void* device = nullptr;
  check(cudaMalloc(&device, host.size() * sizeof(T)));
  std::unique_ptr<T, Free> owned(static_cast<T*>(device));
  check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return owned;
}

/// Runs one rank: copies its share of the context into the engine's pool, then attends, exchanges and
/// combines on the engine's stream.
void run_rank(const helix::cuda::NcclComm& comm, const Model& model, std::vector<float>& combined) {
  const int rank = comm.rank();
  const int size = comm.size();
  check(cudaSetDevice(rank));
  cudaStream_t stream_handle = nullptr;
  check(cudaStreamCreateWithFlags(&stream_handle, cudaStreamNonBlocking));
  const std::unique_ptr<CUstream_st, Free> engine_stream(stream_handle);

  const helix::KvLayout layout(size, kChunk);
  const std::int64_t local_tokens = layout.length(kContext, rank);
  // A pool has one block at least, even if no token of a short context lies on this rank.
  const std::int64_t blocks = std::max<std::int64_t>(1, (local_tokens + kBlock - 1) / kBlock);
  const helix::VllmKvArgs pool{.dtype = helix::DType::bf16,
                               .num_blocks = blocks,
                               .block_size = kBlock,
                               .num_kv_heads = kKvHeads,
                               .head_size = kDim};
  std::vector<helix::bf16> host(static_cast<std::size_t>(2 * blocks * kBlock * kKvHeads * kDim));
  std::vector<std::int32_t> table;
  for (std::int64_t i = 0; i < blocks; ++i) table.push_back(static_cast<std::int32_t>(blocks - 1 - i));
  const helix::KvFormat format = helix::vllm_kv(pool).format;
  const std::int64_t values = blocks * format.k.page;
  for (std::int64_t local = 0; local < local_tokens; ++local) {
    for (std::int64_t head = 0; head < kKvHeads; ++head) {
      const std::int64_t from = (layout.global(rank, local) * kKvHeads + head) * kDim;
      const std::int64_t to =
          format.k.at(table[static_cast<std::size_t>(local / kBlock)], head, local % kBlock);
      std::copy_n(model.k.begin() + from, kDim, host.begin() + to);
      std::copy_n(model.v.begin() + from, kDim, host.begin() + values + to);
    }
  }
  const auto engine_pool = on_device(host);
  const auto engine_table = on_device(table);
  const auto engine_q = on_device(model.q);
  helix::VllmKvArgs device_pool = pool;
  device_pool.pool = engine_pool.get();
  helix::KvView kv = helix::vllm_kv(device_pool);
  kv.page_table = engine_table.get();
  kv.max_pages = blocks;
  kv.layout = layout;
  kv.kvp_rank = rank;

  // Stream, memory and communicator are borrowed: Helix destroys none of them.
  Backend backend(comm, comm, rank, engine_allocator());
  const helix::cuda::Stream stream = helix::cuda::Stream::borrow(engine_stream.get());
  helix::BatchBuffer<Backend> batch(backend, 1, 1);
  const std::int32_t offsets[] = {0, 1}, slots[] = {0};
  const std::int64_t positions[] = {kContext - 1};
  batch.set(offsets, positions, slots, stream);
  helix::KvpAllToAll<Backend> exchange(backend,
                                       {.max_tokens = 1, .num_query_heads = kHeads, .value_dim = kDim});
  auto workspace = backend.allocate(backend.partial_attention_workspace_bytes(1, kHeads, kDim, kDim));
  auto out = backend.allocate(kHeads * kDim * sizeof(helix::bf16));
  auto lse = backend.allocate(kHeads * sizeof(float));
  const int heads = kHeads / size;
  auto result = backend.allocate(static_cast<std::size_t>(heads * kDim) * sizeof(helix::bf16));

  const helix::PartialTarget<helix::bf16> target{
      .out = {reinterpret_cast<helix::bf16*>(out.data()), {1, kHeads, kDim}},
      .lse = {reinterpret_cast<float*>(lse.data()), {1, kHeads}}};
  helix::partial_attention(backend,
                           {.q = {engine_q.get(), {1, kHeads, kDim}},
                            .batch = batch.batch(),
                            .kv = kv,
                            .target = target,
                            .scale = 1.0f / std::sqrt(float{kDim}),
                            .workspace = {workspace.data(), workspace.size_bytes()}},
                           stream);
  const auto received = exchange.exchange({target.out, target.lse}, batch.batch().positions, stream);
  helix::lse_combine(backend,
                     {.partial_out = received.out,
                      .partial_lse = received.lse,
                      .out = {reinterpret_cast<helix::bf16*>(result.data()), {1, heads, kDim}}},
                     stream);
  std::vector<helix::bf16> mine(static_cast<std::size_t>(heads * kDim));
  backend.download(mine.data(), result.data(), mine.size() * sizeof(helix::bf16), stream);
  for (std::size_t i = 0; i < mine.size(); ++i)
    combined[static_cast<std::size_t>(rank * heads * kDim) + i] = static_cast<float>(mine[i]);
}

/// Largest difference from attention over the whole context in double precision.
double error_of(const Model& model, const std::vector<float>& combined) {
  const auto at = [](const std::vector<helix::bf16>& x, std::size_t i) {
    return double{static_cast<float>(x[i])};
  };
  double worst = 0.0;
  for (std::size_t h = 0; h < kHeads; ++h) {
    double total = 0.0;
    std::vector<double> sums(kDim, 0.0);
    for (std::size_t t = 0; t < kContext; ++t) {
      const std::size_t row = (t * kKvHeads + h / (kHeads / kKvHeads)) * kDim;
      double score = 0.0;
      for (std::size_t d = 0; d < kDim; ++d) score += at(model.q, h * kDim + d) * at(model.k, row + d);
      const double weight = std::exp(score / std::sqrt(double{kDim}));
      total += weight;
      for (std::size_t d = 0; d < kDim; ++d) sums[d] += weight * at(model.v, row + d);
    }
    for (std::size_t d = 0; d < kDim; ++d) {
      const double difference = std::abs(combined[h * kDim + d] - sums[d] / total);
      worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
    }
  }
  return worst;
}

}  // namespace

int main() {
  helix::turn_nccl_multicast_off();
  const int gpus = helix::cuda::device_count();
  if (gpus == 0) {
    std::printf("skipped: %s\n", helix::cuda::no_device_reason().c_str());
    return 0;
  }
  const int size = gpus >= 4 ? 4 : gpus >= 2 ? 2 : 1;
  const Model model;
  std::vector<float> combined(kHeads * kDim);
  std::vector<ncclComm_t> engine_comms(static_cast<std::size_t>(size));
  if (ncclCommInitAll(engine_comms.data(), size, nullptr) != ncclSuccess) return 1;
  // May be aborted, so that no rank waits on the device for one that has failed.
  std::vector<helix::cuda::NcclComm> comms;
  for (ncclComm_t comm : engine_comms) comms.push_back(helix::cuda::NcclComm::borrow(comm, true));
  std::vector<std::thread> ranks;
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(size));
  for (std::size_t rank = 0; rank < comms.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        run_rank(comms[rank], model, combined);
      } catch (const std::exception& error) {
        failures[rank] = std::current_exception();
        for (helix::cuda::NcclComm& comm : comms) comm.abort(error.what());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  comms.clear();
  for (ncclComm_t comm : engine_comms) ncclCommDestroy(comm);
  const double worst = error_of(model, combined);
  std::printf("%d tokens over %d GPUs: largest difference from whole attention %.1e\n", kContext, size,
              worst);
  return worst < 4e-3 ? 0 : 1;
}
