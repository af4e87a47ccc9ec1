// SPDX-License-Identifier: Apache-2.0
// cuda::Graph: captures a stream's work, instantiates it without memsets, and replays it.
#include <cuda_runtime_api.h>

#include <helix/cuda/graph.hpp>

#include "cuda/runtime/device_gate.hpp"
#include "cuda/runtime/device_scope.hpp"
#include "cuda/runtime/graph_nodes.hpp"

namespace helix::cuda {
namespace {

/// The stream's device, or the calling thread's if the driver is too old to tell.
int device_of(const Stream& stream) {
  int device = 0;
  cudaError_t status = cudaStreamGetDevice(stream.handle(), &device);
  if (status == cudaErrorCallRequiresNewerDriver) {
    (void)cudaGetLastError();
    status = cudaGetDevice(&device);
  }
  HELIX_CUDA_CHECK(status);
  return device;
}

}  // namespace

void Graph::Destroy::operator()(CUgraphExec_st* exec) const noexcept {
  const DeviceGate::Waiting section;
  (void)cudaGraphExecDestroy(exec);
}

void Graph::begin(Stream stream) {
  // Relaxed mode: other threads of the process, such as other ranks, may allocate meanwhile.
  HELIX_CUDA_CHECK(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeRelaxed));
}

Graph Graph::end(Stream stream) {
  cudaGraph_t captured = nullptr;
  HELIX_CUDA_CHECK(cudaStreamEndCapture(stream.handle(), &captured));
  const std::unique_ptr<CUgraph_st, decltype([](CUgraph_st* graph) { (void)cudaGraphDestroy(graph); })> graph(
      captured);
  Graph result;
  result.device_ = device_of(stream);
  const DeviceScope scope(result.device_);
  replace_memsets(graph.get());
  HELIX_CUDA_CHECK(cudaGraphGetNodes(graph.get(), nullptr, &result.num_nodes_));
  cudaGraphExec_t exec = nullptr;
  const DeviceGate::Waiting section;
  HELIX_CUDA_CHECK(cudaGraphInstantiate(&exec, graph.get(), 0));
  result.exec_.reset(exec);
  return result;
}

void Graph::abandon(Stream stream) noexcept {
  cudaGraph_t captured = nullptr;
  if (cudaStreamEndCapture(stream.handle(), &captured) == cudaSuccess) {
    (void)cudaGraphDestroy(captured);
  } else {
    (void)cudaGetLastError();
  }
}

void Graph::replay(Stream stream) const {
  HELIX_EXPECTS(!empty(), ErrorCode::invalid_argument,
                "Graph::replay: the graph is empty; capture() gives one with work");
  const DeviceScope scope(device_);  // whose default stream `stream` may be
  HELIX_CUDA_CHECK(cudaGraphLaunch(exec_.get(), stream.handle()));
}

}  // namespace helix::cuda
