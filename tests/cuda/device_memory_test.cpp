// SPDX-License-Identifier: Apache-2.0
// Where operators on a GPU allocate device memory, and buffers that borrow it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"
#include "support/catch.hpp"

namespace helix::test {

using cuda::Operators;

TEST_CASE("operators on a GPU take all device memory from an engine's allocator and give it back") {
  HELIX_REQUIRE_GPUS(1);
  cuda::use_device(0);
  struct Pool {
    cuda::Buffer memory{std::size_t{80} << 20};
    std::size_t used = 0;
    std::size_t given = 0;
    std::size_t returned = 0;
  };
  const auto pool = std::make_shared<Pool>();
  const cuda::Allocator allocator{[pool](std::size_t bytes) -> void* {
                                    const std::size_t begin = pool->used;
                                    if (bytes > pool->memory.size_bytes() - begin) return nullptr;
                                    pool->used += (bytes + 255) / 256 * 256;
                                    pool->given += bytes;
                                    return pool->memory.data() + begin;
                                  },
                                  [pool](void*, std::size_t bytes) { pool->returned += bytes; }};
  {
    const Operators<bf16> operators(0, allocator);
    const cuda::Stream stream = operators.create_stream();
    const std::size_t made = pool->given;
    CHECK(made > 0);
    const cuda::Buffer buffer = operators.allocate(3000);
    CHECK(pool->given == made + 3000);
    std::vector<std::uint8_t> bytes(3000, 1);
    operators.download(bytes.data(), buffer.data(), bytes.size(), stream);
    operators.synchronize(stream);
    CHECK(std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t x) { return x == 0; }));
    // The first product allocates the library's workspace, once.
    const cuda::Buffer matrices = operators.allocate(3 * 64 * 64 * sizeof(bf16));
    auto* const in = reinterpret_cast<bf16*>(matrices.data());
    const std::size_t before = pool->given;
    const auto multiply = [&] {
      operators.linear({TensorView<const bf16, 2>(in, {64, 64}),
                        {in + 64 * 64, DType::bf16, 64, 64},
                        {},
                        {in + 2 * 64 * 64, {64, 64}}},
                       stream);
    };
    const auto captured = cuda::Graph::capture(stream, multiply);
    CHECK(pool->given == before);  // a capture allocates nothing
    multiply();
    const std::size_t after = pool->given;
    CHECK(after > before);
    multiply();
    CHECK(pool->given == after);
    captured.replay(stream);
    operators.synchronize(stream);
    CHECK_THROWS_AS(operators.allocate(std::size_t{100} << 20), Error);
  }
  CHECK(pool->returned == pool->given);
  CHECK_THROWS_AS(Operators<bf16>(0, {allocator.allocate, nullptr}), Error);
}

TEST_CASE("a borrowed buffer leaves its memory alone") {
  HELIX_REQUIRE_GPUS(1);
  const Operators<float> operators;
  const cuda::Stream stream = operators.create_stream();
  const cuda::Buffer owner = operators.allocate(1024);
  const std::vector<std::uint8_t> ones(1024, 1);
  operators.upload(owner.data(), ones.data(), ones.size(), stream);
  {
    const cuda::Buffer borrowed = cuda::Buffer::borrow(owner.data() + 256, 512);
    CHECK((borrowed.data() == owner.data() + 256 && borrowed.size_bytes() == 512));
  }
  std::vector<std::uint8_t> bytes(1024);
  operators.download(bytes.data(), owner.data(), bytes.size(), stream);
  operators.synchronize(stream);
  CHECK(bytes == ones);
}

}  // namespace helix::test
