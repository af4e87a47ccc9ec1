// SPDX-License-Identifier: Apache-2.0
// QueueBackend: device memory, streams and events, what every other capability of a backend stands on.
#pragma once

#include <concepts>
#include <cstddef>

namespace helix {

/// A device's memory and in-order queues. Work is queued on a stream and returns at once; it never waits for
/// the host, and operations allocate nothing (invariant 10), but for what a library makes at its first use
/// and what it keeps for the largest step so far, as CPUs do packed activations.
/// A failure inside queued work is sticky and rethrown by synchronize().
///
/// Buffer owns device memory: data(), size_bytes(); one made by default has none. Stream is a handle, whose
/// copies name the same queue. Activation is the element type of the tensors that operations read and write.
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
  // Host -> device, may allocate. The source may be re-used on return; if it is pinned for a GPU, once the
  // stream has passed the copy.
  backend.upload(target, source, bytes, stream);
};

namespace detail {

/// A type that is never defined, so that the one error of a call with tensors of another activation type than
/// the backend's names both.
template <class Given, class Expected>
struct ActivationMismatch;

/// Satisfied by an activation type that is not the backend's. Operations whose arguments are of such a type
/// call refuse_activation(): an overload that is not there would leave the type to notes.
template <class T, class B>
concept OtherActivation = !std::same_as<T, typename B::Activation>;

/// Does not compile.
template <class T, class B>
constexpr void refuse_activation() {
  (void)sizeof(ActivationMismatch<T, typename B::Activation>);
}

}  // namespace detail

}  // namespace helix
