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

/// Why device_count() is 0, in the driver's words; empty if it is not 0.
HELIX_API std::string no_device_reason();

/// The driver's name of the model of `device`, such as "NVIDIA H200".
/// @throws Error(unsupported) if there is no such device.
HELIX_API std::string device_name(int device);

/// Memory of a GPU, as the driver counts it now.
struct DeviceMemory {
  std::size_t free_bytes = 0;   ///< Bytes that no process has taken.
  std::size_t total_bytes = 0;  ///< Bytes that the device has.
};

/// Returns the memory of `device` and makes it the calling thread's current device.
/// @throws what use_device() throws.
HELIX_API DeviceMemory device_memory(int device);

/// Makes `device` the calling thread's current device. @throws Error(unsupported) with the reason if there is
/// no such device.
HELIX_API void use_device(int device);

/// Throws Error for a CUDA status other than success, which is an int so that no CUDA header is needed:
/// capacity for memory, unsupported for a missing device, device_failed for a fault of a kernel or the
/// device, internal for the rest. The message has the call, its place, the device and the driver's words.
/// Clears the thread's last error. HELIX_CUDA_CHECK fills the arguments in.
HELIX_API void throw_on_error(int status, const char* call, const char* file, int line);

/// A handle to an in-order queue of one device. Copies name the same queue, which lives as long as one of
/// them.
class HELIX_API Stream {
 public:
  /// A handle to no queue, only to assign to.
  Stream() = default;
  // With copies declared there are no moves, which would leave a handle to nothing.
  Stream(const Stream&) = default;
  Stream& operator=(const Stream&) = default;

  /// A new queue of the calling thread's device. Does not wait for the legacy default stream.
  static Stream create(bool high_priority = false);
  /// Wraps an engine's own stream, which the engine keeps alive and destroys.
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
  /// A new event of the calling thread's device; `with_timing` enables elapsed_ms().
  static Event create(bool with_timing = false);

  EventHandle handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(EventHandle handle) const noexcept;
  };
  explicit Event(EventHandle handle) : handle_(handle) {}
  std::unique_ptr<CUevent_st, Destroy> handle_;
};

/// Records the event after all that is queued on `stream`.
HELIX_API void record(const Event& event, Stream stream);

/// Makes the host wait for all that is queued on `stream`, however long that takes. Throws what CUDA reports,
/// not what operations have found: Backend::synchronize() throws both and ends with its group's timeout.
HELIX_API void synchronize(Stream stream);

/// Makes the host wait for the work queued before the event was recorded; else as above.
HELIX_API void synchronize(const Event& event);

/// Milliseconds between two events made with timing, both of which have happened.
HELIX_API float elapsed_ms(const Event& start, const Event& stop);

/// An engine's functions for device memory, used for all that Operators allocate. Give both, or neither to
/// use CUDA's own. Copies may outlive the Operators, because buffers free with them.
struct Allocator {
  /// Returns `bytes` (above 0) of memory of the calling thread's device, aligned to 256, that any stream may
  /// use at once; null if there is none. May throw. Called on whichever thread allocates, and never while
  /// the stream that it allocates for is captured; other threads may capture others.
  std::function<void*(std::size_t bytes)> allocate;
  /// Takes back memory of allocate(), once the device has done all that was queued on it, on any stream. Must
  /// not throw.
  std::function<void(void* data, std::size_t bytes)> free;
};

/// Memory of one device. Moves, does not copy. The destructor waits for all that is queued on the device,
/// which may touch the memory, whoever allocated it.
class HELIX_API Buffer {
 public:
  /// A buffer without memory.
  Buffer() = default;
  /// Allocates zeroed memory of the calling thread's device, aligned to 256 bytes, from `allocator` or, if
  /// that is null, from CUDA. Waits for the legacy default stream.
  /// @throws Error(capacity) with the free bytes, and what the allocator throws.
  explicit Buffer(std::size_t bytes, std::shared_ptr<const Allocator> allocator = nullptr);
  /// Wraps memory that somebody else keeps alive and frees; its content stays as it is.
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
  /// A buffer without memory.
  PinnedBuffer() = default;
  /// Allocates `bytes` bytes of zeros; 0 gives no memory.
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
