// SPDX-License-Identifier: Apache-2.0
// Wraps a GPU communicator as one of host memory, so that it can run the communicator contract.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/contract/communicator.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/cuda/runtime.hpp>

namespace helix::test {

using contract::require;

inline void wait_for(cuda::LocalComm&, cuda::Stream stream) {
  HELIX_CUDA_CHECK(cudaStreamSynchronize(stream.handle()));
}
inline void wait_for(cuda::NcclComm& comm, cuda::Stream stream) {
  comm.synchronize(std::move(stream));
}

inline void wait_for(cuda::PeerComm& comm, cuda::Stream stream) {
  comm.synchronize(std::move(stream));
}

/// Each call uploads its input and the present contents of its output, communicates on the device, waits, and
/// downloads. Writes outside the output throw. Invalid arguments reach the communicator unchanged.
template <class DeviceComm>
class HostComm {
 public:
  class Stream {
   public:
    Stream() : device_(cuda::Stream::create()) {}
    template <class Task>
    void enqueue(Task&& task) {
      task();
    }
    void synchronize() {}
    cuda::Stream device() const { return device_; }

   private:
    cuda::Stream device_;
  };

  explicit HostComm(DeviceComm comm) : HostComm(std::move(comm), std::make_shared<Scratch>()) {}

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }

  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(size_bytes(dtype));
    staged(
        in, bytes, out, bytes, stream,
        [&](const void* i, void* o) { comm_.all_reduce(i, o, count, dtype, stream.device()); },
        size_bytes(dtype));
  }
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(size_bytes(dtype));
    staged(
        in, size() * bytes, out, bytes, stream,
        [&](const void* i, void* o) { comm_.reduce_scatter(i, o, count, dtype, stream.device()); },
        size_bytes(dtype));
  }
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
    staged(in, bytes, out, size() * bytes, stream,
           [&](const void* i, void* o) { comm_.all_gather(i, o, bytes, stream.device()); });
  }
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
    staged(in, size() * bytes, out, size() * bytes, stream,
           [&](const void* i, void* o) { comm_.all_to_all(i, o, bytes, stream.device()); });
  }
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream) {
    const auto total = [](std::span<const std::int64_t> bytes) {
      if (std::any_of(bytes.begin(), bytes.end(), [](std::int64_t n) { return n < 0; }))
        return std::int64_t{-1};
      return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
    };
    staged(in, total(send_bytes), out, total(recv_bytes), stream, [&](const void* i, void* o) {
      comm_.all_to_all_v(i, send_bytes, o, recv_bytes, stream.device());
    });
  }
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
    staged(buffer, bytes, buffer, bytes, stream,
           [&](const void*, void* o) { comm_.broadcast(o, bytes, root, stream.device()); });
  }
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
    staged(buffer, bytes, nullptr, 0, stream,
           [&](const void* i, void*) { comm_.send(i, bytes, peer, stream.device()); });
  }
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
    staged(nullptr, 0, buffer, bytes, stream,
           [&](const void*, void* o) { comm_.recv(o, bytes, peer, stream.device()); });
  }
  void barrier(Stream stream) {
    comm_.barrier(stream.device());
    wait_for(comm_, stream.device());
  }
  HostComm split(int color, int key) { return HostComm(comm_.split(color, key), scratch_); }
  void abort(std::string_view reason) noexcept { comm_.abort(reason); }

 private:
  static constexpr std::int64_t kCapacity = 4 << 20;
  static constexpr std::int64_t kGuard = 64;
  static constexpr std::uint8_t kCanary = 0xa5;

  // Allocated before the first call, because cudaFree waits for the device, including messages in flight.
  struct Scratch {
    cuda::Buffer in{kCapacity};
    cuda::Buffer out{kCapacity};
  };

  HostComm(DeviceComm comm, std::shared_ptr<Scratch> scratch)
      : comm_(std::move(comm)), scratch_(std::move(scratch)) {}

  /// Calls body(in, out) with copies on the device. `in` may lie inside `out`. Addresses that are not
  /// multiples of `width` must be refused.
  template <class Body>
  void staged(const void* in, std::int64_t in_bytes, void* out, std::int64_t out_bytes, Stream& stream,
              Body&& body, std::size_t width = 1) {
    const auto address = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
    const bool is_refused = width == 0 || in_bytes < 0 || out_bytes < 0 || (in == nullptr && in_bytes > 0) ||
                            (out == nullptr && out_bytes > 0) || (address(in) | address(out)) % width != 0;
    if (is_refused) return body(in, out);
    require(std::max(in_bytes, out_bytes) + 2 * kGuard <= kCapacity, "the scratch is too small");
    const cudaStream_t queue = stream.device().handle();
    std::vector<std::uint8_t> image(static_cast<std::size_t>(out_bytes + 2 * kGuard), kCanary);
    if (out_bytes > 0) std::memcpy(image.data() + kGuard, out, static_cast<std::size_t>(out_bytes));
    HELIX_CUDA_CHECK(
        cudaMemcpyAsync(scratch_->out.data(), image.data(), image.size(), cudaMemcpyHostToDevice, queue));
    std::byte* const device_out = scratch_->out.data() + kGuard;
    const std::byte* device_in = scratch_->in.data();
    const auto offset = static_cast<std::int64_t>(address(in)) - static_cast<std::int64_t>(address(out));
    if (in_bytes > 0 && out_bytes > 0 && offset >= 0 && offset + in_bytes <= out_bytes) {
      device_in = device_out + offset;
    } else if (in_bytes > 0) {
      HELIX_CUDA_CHECK(cudaMemcpyAsync(scratch_->in.data(), in, static_cast<std::size_t>(in_bytes),
                                       cudaMemcpyHostToDevice, queue));
    }
    body(device_in, device_out);
    wait_for(comm_, stream.device());
    HELIX_CUDA_CHECK(
        cudaMemcpyAsync(image.data(), scratch_->out.data(), image.size(), cudaMemcpyDeviceToHost, queue));
    HELIX_CUDA_CHECK(cudaStreamSynchronize(queue));
    for (std::int64_t i = 0; i < kGuard; ++i) {
      require(image[static_cast<std::size_t>(i)] == kCanary, "a byte before the output was written");
      require(image[static_cast<std::size_t>(kGuard + out_bytes + i)] == kCanary,
              "a byte past the output was written");
    }
    if (out_bytes > 0) std::memcpy(out, image.data() + kGuard, static_cast<std::size_t>(out_bytes));
  }

  DeviceComm comm_;
  std::shared_ptr<Scratch> scratch_;
};

}  // namespace helix::test
