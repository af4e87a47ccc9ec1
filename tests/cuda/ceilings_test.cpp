// SPDX-License-Identifier: Apache-2.0
// The read that measures the benchmarks' ceiling: its bulk copies must deliver the bytes in memory.
#include "cuda/ceilings/ceilings.hpp"

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test {
namespace {

constexpr std::size_t kCacheLineWords = 32;
constexpr std::size_t kCacheLineBytes = kCacheLineWords * sizeof(std::uint32_t);

std::vector<std::uint32_t> random_words(std::size_t count) {
  std::mt19937 random(7);
  std::vector<std::uint32_t> words(count);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  return words;
}

/// Sum of word i % 32 of each whole line i in the `bytes` that begin at word `first`.
std::uint32_t expected_sum(const std::vector<std::uint32_t>& words, std::size_t first, std::size_t bytes) {
  std::uint32_t sum = 0;
  for (std::size_t line = 0; line < bytes / kCacheLineBytes; ++line)
    sum += words[first + line * kCacheLineWords + line % kCacheLineWords];
  return sum;
}

/// Random words on a GPU, and the sum that launch_bulk_read() computes from them.
class BulkRead {
 public:
  explicit BulkRead(std::size_t bytes)
      : words_(random_words(bytes / sizeof(std::uint32_t))),
        data_(operators_.allocate(bytes)),
        sum_(operators_.allocate(sizeof(std::uint32_t))) {
    operators_.upload(data_.data(), words_.data(), bytes, stream_);
    operators_.synchronize(stream_);
  }

  const std::vector<std::uint32_t>& words() const { return words_; }

  /// The kernel's sum over the `bytes` that begin at byte `at`, minus the value that the sum had before.
  std::uint32_t sum(std::size_t at, std::size_t bytes, int blocks_per_sm) {
    constexpr std::uint32_t kBefore = 0xfffffff0u;  // makes the sum overflow
    operators_.upload(sum_.data(), &kBefore, sizeof(kBefore), stream_);
    cuda::bench::launch_bulk_read(data_.data() + at, bytes, blocks_per_sm, sum_.data(), stream_.handle());
    std::uint32_t sum = 0;
    operators_.synchronize(stream_);
    operators_.download(&sum, sum_.data(), sizeof(sum), stream_);
    operators_.synchronize(stream_);
    return sum - kBefore;
  }

 private:
  cuda::Operators<float> operators_;
  cuda::Stream stream_ = operators_.create_stream();
  std::vector<std::uint32_t> words_;
  cuda::Buffer data_;
  cuda::Buffer sum_;
};

}  // namespace

TEST_CASE("a read by bulk copies brings every line once whatever its size") {
  HELIX_REQUIRE_GPUS(1);
  cuda::use_device(0);
  if (!cuda::bench::has_bulk_read()) {
    helix::test::skip("this GPU has no bulk copies, or the build no code for it");
    return;
  }
  // Parts have at most 16 KB, and the rings of a GPU hold about 30 MB, so the largest size goes round them
  // ten times.
  constexpr std::size_t kMax = std::size_t{320} << 20;
  BulkRead read(kMax + 256);
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{16}, kCacheLineBytes - 16, kCacheLineBytes, kCacheLineBytes + 16,
        32 * kCacheLineBytes, 33 * kCacheLineBytes, std::size_t{33280}, std::size_t{1} << 20,
        (std::size_t{2} << 20) + 48, (std::size_t{16} << 20) - 16, (std::size_t{31} << 20) + kCacheLineBytes,
        kMax - kCacheLineBytes, kMax}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{16}, std::size_t{256}}) {
      for (const int blocks_per_sm : {1, 2}) {
        if (at + bytes > kMax + 256) continue;
        CAPTURE(bytes, at, blocks_per_sm);
        REQUIRE(read.sum(at, bytes, blocks_per_sm) ==
                expected_sum(read.words(), at / sizeof(std::uint32_t), bytes));
      }
    }
  }
}

TEST_CASE("a read by bulk copies refuses what the copy engine cannot read") {
  HELIX_REQUIRE_GPUS(1);
  cuda::use_device(0);
  const cuda::Buffer data(4096);
  const auto launch = [&](std::size_t at, std::size_t bytes, int blocks_per_sm) {
    return required_failure(
        [&] { cuda::bench::launch_bulk_read(data.data() + at, bytes, blocks_per_sm, data.data(), nullptr); });
  };
  if (!cuda::bench::has_bulk_read()) {
    CHECK(launch(0, 1024, 1).code == ErrorCode::unsupported);
    return;
  }
  for (const Failure& failure :
       {launch(8, 1024, 1), launch(0, 1000, 1), launch(0, 1024, 0), launch(0, 1024, 3)})
    CHECK(failure.code == ErrorCode::invalid_argument);
}

}  // namespace helix::test
