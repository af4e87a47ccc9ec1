// SPDX-License-Identifier: Apache-2.0
// DecoderBackend: what a whole decoder needs from a machine beyond what the library's layers need.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <helix/backend.hpp>
#include <helix/cpu/thread_pool.hpp>

namespace helix::decode {

/// A communicator that can split the world into stages, and carries hidden states and tokens between them.
template <class C, class Stream>
concept PipelineComm = SplittableComm<C> &&
    requires(C& comm, const void* in, void* out, std::int64_t bytes, int rank, Stream stream) {
  comm.send(in, bytes, rank, stream);
  comm.recv(out, bytes, rank, stream);
  comm.broadcast(out, bytes, rank, stream);
};

/// A backend that can copy results to the host, over communicators that form pipelines.
template <class B>
concept DecoderBackend = Backend<B> && PipelineComm<typename B::Comm, typename B::Stream> &&
    requires(B& backend, const void* source, void* target, std::size_t bytes, typename B::Stream stream) {
  backend.download(target, source, bytes, stream);  // device -> host; waits for the stream
};

/// A backend whose memory is the host's: its operations read any host memory in place, including a mapped
/// file, its buffers can be written without a stream, and its threads can share such work.
template <class B>
concept HostMemoryBackend = requires(const B& backend) {
  { backend.thread_pool() } -> std::same_as<cpu::ThreadPool&>;
};

}  // namespace helix::decode
