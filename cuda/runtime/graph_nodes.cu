// SPDX-License-Identifier: Apache-2.0
// Replaces a memset of a captured graph by a kernel with the same neighbours.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/runtime/device_scope.hpp"
#include "cuda/runtime/graph_nodes.hpp"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kMaxBlocks = 256;

/// Does the work of a memset: `height` rows, `pitch` bytes apart, of `width` elements of `element_bytes`
/// bytes.
__global__ void __launch_bounds__(kThreads)
    fill_kernel(std::byte* to, std::size_t pitch, unsigned value, unsigned element_bytes, std::size_t width,
                std::size_t height) {
  const std::size_t threads = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < width * height; i += threads) {
    std::byte* element = to + i / width * pitch + i % width * element_bytes;
    if (element_bytes == 4) {
      *reinterpret_cast<std::uint32_t*>(element) = value;
    } else if (element_bytes == 2) {
      *reinterpret_cast<std::uint16_t*>(element) = static_cast<std::uint16_t>(value);
    } else {
      *element = static_cast<std::byte>(value);
    }
  }
}

// CUDA 13 added edge data to the parameters of functions that CUDA 12 has without it.
using Nodes = std::vector<cudaGraphNode_t>;

/// The nodes that `list` (cudaGraphNodeGetDependencies or cudaGraphNodeGetDependentNodes) returns for `node`.
template <class List>
Nodes neighbours(const List& list, cudaGraphNode_t node) {
  const auto call = [&](cudaGraphNode_t* nodes, std::size_t& count) {
#if CUDART_VERSION >= 13000
    HELIX_CUDA_CHECK(list(node, nodes, nullptr, &count));
#else
    HELIX_CUDA_CHECK(list(node, nodes, &count));
#endif
  };
  std::size_t count = 0;
  call(nullptr, count);
  Nodes nodes(count);
  call(nodes.data(), count);
  return nodes;
}

void add_edge(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to) {
#if CUDART_VERSION >= 13000
  HELIX_CUDA_CHECK(cudaGraphAddDependencies(graph, &from, &to, nullptr, 1));
#else
  HELIX_CUDA_CHECK(cudaGraphAddDependencies(graph, &from, &to, 1));
#endif
}

/// The same memset by words, if it is of whole words that lie one after another.
cudaMemsetParams by_words(cudaMemsetParams memset) {
  constexpr unsigned kWord = sizeof(std::uint32_t);
  const std::size_t bytes = memset.width * memset.elementSize;
  const auto address = reinterpret_cast<std::uintptr_t>(memset.dst);
  if (memset.height != 1 || bytes % kWord != 0 || address % kWord != 0) return memset;
  if (memset.elementSize == 1) memset.value = (memset.value & 0xffu) * 0x01010101u;
  if (memset.elementSize == 2) memset.value = (memset.value & 0xffffu) * 0x00010001u;
  memset.elementSize = kWord;
  memset.width = bytes / kWord;
  return memset;
}

/// The device whose memory `data` is; for any other memory, the current one.
int device_of(const void* data) {
  cudaPointerAttributes attributes{};
  HELIX_CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  if (attributes.type == cudaMemoryTypeDevice) return attributes.device;
  int current = 0;
  HELIX_CUDA_CHECK(cudaGetDevice(&current));
  return current;
}

void replace_memset(cudaGraph_t graph, cudaGraphNode_t node) {
  cudaMemsetParams memset{};
  HELIX_CUDA_CHECK(cudaGraphMemsetNodeGetParams(node, &memset));
  memset = by_words(memset);
  const DeviceScope scope(device_of(memset.dst));  // kernels are added for the current device
  auto* to = static_cast<std::byte*>(memset.dst);
  void* arguments[] = {&to, &memset.pitch, &memset.value, &memset.elementSize, &memset.width, &memset.height};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(fill_kernel);
  const std::size_t blocks = ceil_div<std::size_t>(memset.width * memset.height, kThreads);
  kernel.gridDim = dim3(static_cast<unsigned>(std::clamp<std::size_t>(blocks, 1, kMaxBlocks)));
  kernel.blockDim = dim3(kThreads);
  kernel.kernelParams = arguments;
  const Nodes before = neighbours(cudaGraphNodeGetDependencies, node);
  cudaGraphNode_t fill = nullptr;
  HELIX_CUDA_CHECK(cudaGraphAddKernelNode(&fill, graph, before.data(), before.size(), &kernel));
  for (const cudaGraphNode_t after : neighbours(cudaGraphNodeGetDependentNodes, node))
    add_edge(graph, fill, after);
  HELIX_CUDA_CHECK(cudaGraphDestroyNode(node));
}

}  // namespace

void replace_memsets(cudaGraph_t graph) {
  std::size_t count = 0;
  HELIX_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  Nodes nodes(count);
  HELIX_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    HELIX_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeMemset) replace_memset(graph, node);
  }
}

}  // namespace helix::cuda
