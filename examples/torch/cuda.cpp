// SPDX-License-Identifier: Apache-2.0
// torch.ops.helix on GPUs. Uses torch's current stream, its caching allocator, and the ncclComm_t of its
// process group.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/nccl_comm.hpp>

#include "group.hpp"
#include "operations.hpp"

namespace helix_torch {
namespace {

namespace caching_allocator = c10::cuda::CUDACachingAllocator;

/// Torch's allocator, for the few buffers that Helix owns. Memory from it may still be in use by work queued
/// on the current stream, and Helix may use other streams, so it waits: once per buffer, never in a step.
helix::cuda::Allocator torch_allocator() {
  return {.allocate =
              [](std::size_t bytes) {
                void* const data = caching_allocator::raw_alloc(bytes);
                c10::cuda::getCurrentCUDAStream().synchronize();
                return data;
              },
          .free = [](void* data, std::size_t) { caching_allocator::raw_delete(data); }};
}

helix::cuda::Stream current_stream() {
  return helix::cuda::Stream::borrow(c10::cuda::getCurrentCUDAStream().stream());
}

/// Calls function(T{}) with the activation type of a tensor.
template <class Function>
TensorPair with_activation(const char* name, const at::Tensor& tensor, Function function) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return function(float{});
    case at::kHalf:
      return function(helix::f16{});
    case at::kBFloat16:
      return function(helix::bf16{});
    default:
      TORCH_CHECK(false, name, " is of ", tensor.scalar_type(), "; give Float, Half or BFloat16");
  }
}

/// A single rank, for operations that need no other rank. Never destroyed, because CUDA may shut down before
/// static objects are destroyed.
template <class T>
helix::cuda::Backend<helix::cuda::LocalComm, T>& alone(int device) {
  using Backend = helix::cuda::Backend<helix::cuda::LocalComm, T>;
  static std::mutex mutex;
  static auto* const backends = new std::map<int, Backend>;
  const std::lock_guard lock(mutex);
  const auto found = backends->find(device);
  if (found != backends->end()) return found->second;
  return backends->emplace(device, Backend(device, torch_allocator())).first->second;
}

TensorPair partial_attention_cuda(const at::Tensor& q, const at::Tensor& kv_cache,
                                  const at::Tensor& block_table, const at::Tensor& seq_lens, double scale,
                                  std::int64_t kvp_size, std::int64_t kvp_rank, std::int64_t interleave,
                                  bool block_first, std::int64_t window, double soft_cap) {
  const AttentionCall call{q,        kv_cache,   block_table, seq_lens, scale,   kvp_size,
                           kvp_rank, interleave, block_first, window,   soft_cap};
  check(call);
  const c10::cuda::CUDAGuard guard(q.device());
  return with_activation("q", q, [&]<class T>(T) {
    return partial_attention(alone<T>(q.get_device()), call, current_stream());
  });
}

template <class T>
using GroupBackend = helix::cuda::Backend<helix::cuda::NcclComm, T>;

template <class T>
Exchange<GroupBackend<T>>& exchange_of(Group& group, const at::Tensor& out) {
  const auto make = [&] {
    TORCH_CHECK(
        group.nccl_comm() != 0, "out is on ", out.device(),
        " and the Group has no nccl_comm; give it the backend's _comm_ptr() after its first collective");
    auto comm = helix::cuda::NcclComm::borrow(reinterpret_cast<ncclComm*>(group.nccl_comm()));
    TORCH_CHECK(comm.rank() == group.rank() && comm.size() == group.size(), "nccl_comm has rank ",
                comm.rank(), " of ", comm.size(), " and the Group rank ", group.rank(), " of ", group.size(),
                "; give those of one group");
    GroupBackend<T> backend(comm, comm, static_cast<int>(out.get_device()), torch_allocator());
    return std::make_shared<Exchange<GroupBackend<T>>>(
        std::move(backend), helix::cuda::Stream{},
        helix::KvpAllToAllSpec{
            .max_tokens = group.max_tokens(), .num_query_heads = out.size(1), .value_dim = out.size(2)});
  };
  return group.exchange<Exchange<GroupBackend<T>>>(out, make, [](auto& made) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(made.backend.device()));
    made.backend.synchronize(current_stream());
  });
}

TensorPair exchange_cuda(const c10::intrusive_ptr<Group>& group, const at::Tensor& out, const at::Tensor& lse,
                         const std::optional<at::Tensor>& positions) {
  check_partials(out, lse, positions);
  const c10::cuda::CUDAGuard guard(out.device());
  return with_activation("out", out, [&]<class T>(T) {
    return exchange_partials(exchange_of<T>(*group, out), out, lse, positions, current_stream());
  });
}

TensorPair combine_cuda(const at::Tensor& partial_out, const at::Tensor& partial_lse,
                        const std::optional<at::Tensor>& sink) {
  check_combine(partial_out, partial_lse);
  const c10::cuda::CUDAGuard guard(partial_out.device());
  return with_activation("partial_out", partial_out, [&]<class T>(T) {
    return combine_partials(alone<T>(partial_out.get_device()), view_of<const T, 4>(partial_out),
                            view_of<const float, 3>(partial_lse), sink, partial_out.options(),
                            current_stream());
  });
}

TensorPair exchange_combine_cuda(const c10::intrusive_ptr<Group>& group, const at::Tensor& out,
                                 const at::Tensor& lse, const std::optional<at::Tensor>& positions,
                                 const std::optional<at::Tensor>& sink) {
  check_partials(out, lse, positions);
  const c10::cuda::CUDAGuard guard(out.device());
  return with_activation("out", out, [&]<class T>(T) {
    auto& exchange = exchange_of<T>(*group, out);
    const helix::cuda::Stream stream = current_stream();
    const auto received = send(exchange, out, lse, positions, stream);
    return combine_partials(exchange.backend, received.out, received.lse, sink, out.options(), stream);
  });
}

}  // namespace
}  // namespace helix_torch

TORCH_LIBRARY_IMPL(helix, CUDA, m) {
  m.impl("partial_attention", helix_torch::partial_attention_cuda);
  m.impl("exchange", helix_torch::exchange_cuda);
  m.impl("combine", helix_torch::combine_cuda);
  m.impl("exchange_combine", helix_torch::exchange_combine_cuda);
}
