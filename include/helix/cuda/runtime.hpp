// SPDX-License-Identifier: Apache-2.0
// CUDA streams, events and memory as owned C++ values. Needs no CUDA header: the handles are opaque pointers.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include <helix/error.hpp>
#include <helix/export.hpp>

// The toolkit's own opaque types.
struct CUstream_st;
struct CUevent_st;

namespace helix::cuda {

using StreamHandle = CUstream_st*;  ///< The toolkit's cudaStream_t.
using EventHandle = CUevent_st*;    ///< The toolkit's cudaEvent_t.

/// Number of GPUs that this process may use; 0 without a GPU or a driver, never an error.
HELIX_API int device_count();

/// Why device_count() is 0, as the driver says it; empty if it is not 0.
HELIX_API std::string no_device_reason();

/// Memory of a GPU, as the driver counts it now.
struct DeviceMemory {
  std::size_t free_bytes = 0;   ///< Not yet taken, by whomever.
  std::size_t total_bytes = 0;  ///< All there is.
};

/// The memory of `device`, which becomes the calling thread's. @throws what use_device() does.
HELIX_API DeviceMemory device_memory(int device);

/// Throws Error(unsupported) with the reason unless `device` exists; otherwise makes it the calling thread's.
HELIX_API void use_device(int device);

/// Throws Error for a CUDA status other than success (as int, so that no header is needed): capacity for
/// memory, unsupported for a missing device, internal for the rest, naming the call, where, the device and
/// the driver's words. Clears the thread's last error. HELIX_CUDA_CHECK fills the arguments in.
HELIX_API void throw_on_error(int status, const char* call, const char* file, int line);

/// An in-order queue of one device. A handle: copies name the same queue, which lives as long as one of them.
class HELIX_API Stream {
 public:
  /// A handle to no queue, only to assign to.
  Stream() = default;
  // With copies declared there are no moves, which would leave a handle to nothing.
  Stream(const Stream&) = default;
  Stream& operator=(const Stream&) = default;

  /// A new queue of the calling thread's device. Does not wait for the legacy default stream.
  static Stream create(bool high_priority = false);
  /// An engine's own stream, which it keeps alive and destroys.
  static Stream borrow(StreamHandle handle);

  /// CUDA's handle, null for its legacy default stream, borrowed.
  /// @throws Error(invalid_argument) if this Stream names no queue: null would be the default stream then.
  StreamHandle handle() const {
    HELIX_EXPECTS(handle_.use_count() > 0, ErrorCode::invalid_argument,
                  "this cuda::Stream names no queue: make one with create() or borrow()");
    return handle_.get();
  }

 private:
  explicit Stream(std::shared_ptr<CUstream_st> handle) : handle_(std::move(handle)) {}
  std::shared_ptr<CUstream_st> handle_;
};

/// A point in a stream that others wait for. Moves, does not copy.
class HELIX_API Event {
 public:
  /// No event, only to assign to.
  Event() = default;
  /// A new event of the calling thread's device; `with_timing` for elapsed_ms().
  static Event create(bool with_timing = false);

  EventHandle handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(EventHandle handle) const noexcept;
  };
  explicit Event(EventHandle handle) : handle_(handle) {}
  std::unique_ptr<CUevent_st, Destroy> handle_;
};

/// Puts the event behind what is queued on `stream`.
HELIX_API void record(const Event& event, Stream stream);

/// The host waits for all that is queued on `stream`.
HELIX_API void synchronize(Stream stream);

/// The host waits for what stood before the event when it was recorded.
HELIX_API void synchronize(const Event& event);

/// Milliseconds between two events made with timing, both of which have happened.
HELIX_API float elapsed_ms(const Event& start, const Event& stop);

/// An engine's device memory, for all that Operators allocate. Both functions are given, or neither: CUDA's
/// own then. Copies may outlive the Operators, as buffers free with them.
struct Allocator {
  /// Returns `bytes` (above 0) of the calling thread's device, aligned to 256, that any stream may use at
  /// once; null where there are none. May throw. Called while no stream of these Operators is captured, by
  /// whichever thread allocates.
  std::function<void*(std::size_t bytes)> allocate;
  /// Takes back what allocate() gave, once the device has done all that was queued on it, by whatever stream.
  /// Must not throw.
  std::function<void(void* data, std::size_t bytes)> free;
};

/// Memory of one device. Moves, does not copy. Its end waits for all that is queued on the device, which may
/// touch it, whoever allocated it.
class HELIX_API Buffer {
 public:
  /// No memory.
  Buffer() = default;
  /// Zeroed memory of the calling thread's device, aligned to 256 bytes; from `allocator`, or from CUDA if it
  /// is null. Waits for the legacy default stream.
  /// @throws Error(capacity) with what is free, and what the allocator throws.
  explicit Buffer(std::size_t bytes, std::shared_ptr<const Allocator> allocator = nullptr);
  /// Memory that somebody else keeps alive and frees, as it is.
  static Buffer borrow(void* data, std::size_t bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t size_bytes() const { return data_ ? data_.get_deleter().bytes : 0; }

 private:
  struct Release {
    std::size_t bytes;
    bool is_borrowed;
    int device;
    std::shared_ptr<const Allocator> allocator;
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Release> data_;
};

/// Zeroed host memory that a device reads and writes at the same address. Moves, does not copy.
class HELIX_API PinnedBuffer {
 public:
  /// No memory.
  PinnedBuffer() = default;
  /// `bytes` zeros; 0: no memory.
  explicit PinnedBuffer(std::size_t bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t size_bytes() const { return data_ ? data_.get_deleter().bytes : 0; }

 private:
  struct Release {
    std::size_t bytes;
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Release> data_;
};

}  // namespace helix::cuda

/// Throws helix::Error unless a CUDA runtime call succeeds.
#define HELIX_CUDA_CHECK(call) \
  ::helix::cuda::throw_on_error(static_cast<int>(call), #call, __FILE__, __LINE__)
