// SPDX-License-Identifier: Apache-2.0
// The operations of cpu::Operators that copy bytes.
#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

namespace helix::cpu {
namespace {

constexpr std::size_t kInlineUploadBytes = 512;  // stored inside the task: a step's positions, ids and tables

int threads_or_all_cores(int num_threads) {
  HELIX_EXPECTS(num_threads >= 0, ErrorCode::invalid_argument, "num_threads is ", num_threads,
                "; use 0 for all cores or a count of at least 1");
  return num_threads > 0 ? num_threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Storage for a copy of `size` bytes; the rest stays uninitialised.
struct InlineBytes {
  std::size_t size;
  std::array<std::byte, kInlineUploadBytes> bytes;

  InlineBytes(const void* source, std::size_t count) noexcept : size(count) {
    std::memcpy(bytes.data(), source, size);
  }
  InlineBytes(const InlineBytes& other) noexcept : InlineBytes(other.bytes.data(), other.size) {}
  InlineBytes& operator=(const InlineBytes&) = delete;
};

}  // namespace

Operators::Operators(int num_threads, ProductInputs product_inputs)
    : pool_(std::make_shared<ThreadPool>(threads_or_all_cores(num_threads))),
      product_inputs_(product_inputs) {}

void Operators::upload(void* target, const void* source, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  if (bytes <= kInlineUploadBytes) {
    stream.enqueue(
        [target, copy = InlineBytes(source, bytes)] { std::memcpy(target, copy.bytes.data(), copy.size); });
    return;
  }
  auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::memcpy(copy.get(), source, bytes);
  stream.enqueue([target, copy = std::move(copy), bytes] { std::memcpy(target, copy.get(), bytes); });
}

void Operators::download(void* target, const void* source, std::size_t bytes, Stream stream) const {
  stream.synchronize();
  if (bytes > 0) std::memcpy(target, source, bytes);
}

void Operators::copy(void* target, const void* source, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  stream.enqueue([target, source, bytes] { std::memcpy(target, source, bytes); });
}

void Operators::fill_zero(void* target, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  stream.enqueue([target, bytes] { std::memset(target, 0, bytes); });
}

}  // namespace helix::cpu
