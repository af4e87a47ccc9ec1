// SPDX-License-Identifier: Apache-2.0
// QueueBackend: device memory, streams and events, which all other backend concepts build on.
#pragma once

#include <concepts>
#include <cstddef>
#include <string_view>

#include <helix/error.hpp>

namespace helix {

/// A device's memory and in-order queues. Operations are queued on a stream and return at once; queued work
/// never waits for the host. Operations allocate nothing (invariant 10), except what a library creates at its
/// first use and buffers kept for the largest step so far, such as packed activations on CPUs. A failure
/// inside queued work is sticky, and synchronize() rethrows it.
///
/// Buffer owns device memory: data(), size_bytes(); a default-constructed one has none. Stream is a handle
/// whose copies name the same queue. Activation is the element type of the tensors that operations read and
/// write.
template <class B>
concept QueueBackend = requires(B& backend, typename B::Stream stream, typename B::Event event,
                                const typename B::Buffer& buffer, const void* source, void* target,
                                std::size_t bytes) {
  typename B::Activation;
  requires std::movable<typename B::Buffer> && std::default_initializable<typename B::Buffer>;
  requires std::copyable<typename B::Stream>;
  requires std::movable<typename B::Event>;
  { buffer.data() } -> std::same_as<std::byte*>;
  { buffer.size_bytes() } -> std::convertible_to<std::size_t>;
  { backend.allocate(bytes) } -> std::same_as<typename B::Buffer>;  // aligned to 256, zeroed
  { backend.create_stream() } -> std::same_as<typename B::Stream>;
  { backend.create_event() } -> std::same_as<typename B::Event>;
  backend.record(event, stream);
  backend.wait(stream, event);  // the stream waits, not the host
  backend.synchronize(stream);  // the host waits; rethrows
  // Host -> device, may allocate. The source may be reused on return; pinned memory of a GPU only once the
  // stream has passed the copy.
  backend.upload(target, source, bytes, stream);
};

namespace detail {

/// Throws Error(invalid_argument) if an object of class `name` was moved from: `data`, memory that it owns
/// for all its life, is then null.
inline void check_not_moved(std::string_view name, const void* data) {
  HELIX_EXPECTS(data != nullptr, ErrorCode::invalid_argument, name,
                ": this object was moved from; use the one that it was moved to");
}

/// Never defined: a call with tensors of another activation type than the backend's fails with one error,
/// which names both types.
template <class Given, class Expected>
struct ActivationMismatch;

/// An activation type that is not the backend's. Operations have an overload for such types that calls
/// refuse_activation(). Without it the compiler would name the type in its notes only.
template <class T, class B>
concept OtherActivation = !std::same_as<T, typename B::Activation>;

/// Does not compile: the error names T and the activation type of B.
template <class T, class B>
constexpr void refuse_activation() {
  (void)sizeof(ActivationMismatch<T, typename B::Activation>);
}

}  // namespace detail

}  // namespace helix
