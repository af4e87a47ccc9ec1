// SPDX-License-Identifier: Apache-2.0
// Messages, their headers and the combine on a GPU: 16-bit partials compared bit for bit or with f32, and
// log-sum-exps of every convention.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/at.hpp"
#include "cuda/gpu.hpp"
#include "cuda/twin_bench.hpp"
#include "support/catch.hpp"

namespace helix::test {

using cuda::Operators;

TEMPLATE_TEST_CASE("messages on a GPU hold 16-bit partials bit for bit", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using T = TestType;
  const Operators<T> operators;
  const cuda::Stream stream = operators.create_stream();
  std::mt19937 random(7);
  for (const std::int64_t kvp : {1, 2, 5}) {
    for (const std::int64_t tokens : {0, 1, 3, 17}) {
      for (const std::int64_t width : {1, 16, 128, 9}) {
        for (const std::int64_t pad : kPads) {
          CAPTURE(kvp, tokens, width, pad);
          const std::int64_t heads = 2;  // heads of a peer
          const std::int64_t all_heads = kvp * heads;
          std::vector<T> out(at(tokens * all_heads * (width + pad)));
          for (T& x : out) x = T::from_bits(static_cast<std::uint16_t>(random()));
          std::vector<float> lse(at(tokens * all_heads));
          for (float& x : lse) x = static_cast<float>(random() % 1000);
          std::vector<std::int64_t> positions(at(tokens));
          for (std::int64_t& x : positions) x = static_cast<std::int64_t>(random() % 5000) - 1;
          const std::uint64_t before = 41;
          // One block per head: header, lse, outputs.
          const std::int64_t lse_bytes = (tokens * 4 + 15) / 16 * 16;
          const std::int64_t block = 16 + lse_bytes + (tokens * width * 2 + 15) / 16 * 16 + pad * 4;
          const std::int64_t message = heads * block;

          std::vector<std::uint8_t> expected(at(kvp * message), 0x7b);
          for (std::int64_t head = 0; head < all_heads; ++head) {
            std::uint8_t* to = expected.data() + head * block;
            const ExchangeHeader header{exchange_epoch(before + 1, positions.data(), tokens),
                                        static_cast<std::uint32_t>(tokens),
                                        static_cast<std::uint32_t>(kvp - 1)};
            if (head % heads == 0) std::memcpy(to, &header, sizeof(header));
            for (std::int64_t t = 0; t < tokens; ++t) {
              const std::int64_t row = t * all_heads + head;
              std::memcpy(to + 16 + t * 4, lse.data() + row, 4);
              std::memcpy(to + 16 + lse_bytes + t * width * 2, out.data() + row * (width + pad),
                          at(width * 2));
            }
          }

          std::deque<cuda::Buffer> memory;
          const auto upload = [&]<class X>(const std::vector<X>& values) {
            cuda::Buffer& buffer = memory.emplace_back(operators.allocate(values.size() * sizeof(X) + 1));
            operators.upload(buffer.data(), values.data(), values.size() * sizeof(X), stream);
            return reinterpret_cast<X*>(buffer.data());
          };
          const T* device_out = upload(out);
          const float* device_lse = upload(lse);
          std::uint64_t* exchanges = upload(std::vector<std::uint64_t>{before});
          const std::int64_t* device_positions = upload(positions);
          auto* messages =
              reinterpret_cast<std::byte*>(upload(std::vector<std::uint8_t>(expected.size(), 0x7b)));
          PackPartialArgs<T> args;
          args.out = TensorView<const T, 3>(device_out, {tokens, all_heads, width},
                                            {all_heads * (width + pad), width + pad, 1});
          args.lse = TensorView<const float, 2>(device_lse, {tokens, all_heads});
          args.target.out = {reinterpret_cast<T*>(messages + 16 + lse_bytes),
                             {tokens, all_heads, width},
                             {width, block / 2, 1}};
          args.target.lse = {reinterpret_cast<float*>(messages + 16), {tokens, all_heads}, {1, block / 4}};
          args.target.headers = {messages, tokens, kvp - 1, exchanges, device_positions, kvp, message};
          operators.pack_partial(args, stream);
          std::vector<std::uint8_t> packed(expected.size());
          std::uint64_t after = 0;
          operators.download(packed.data(), messages, packed.size(), stream);
          operators.download(&after, exchanges, sizeof(after), stream);
          operators.synchronize(stream);
          CHECK(packed == expected);
          CHECK(after == before + 1);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("headers on a GPU are stamped and checked by the 16-bit operators", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  constexpr std::int64_t kTokens = 300;  // more than a warp has threads
  std::vector<std::int64_t> positions(kTokens);
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i * i) - 1;
  for (const int wrong : {-1, 0, 2}) {
    CAPTURE(wrong);
    const Operators<TestType> operators;
    const cuda::Stream stream = operators.create_stream();
    const cuda::Buffer messages = operators.allocate(4 * 48);  // the last message is this rank's own
    const cuda::Buffer counters = operators.allocate(4 * sizeof(std::uint64_t));
    const cuda::Buffer device_positions = operators.allocate(kTokens * sizeof(std::int64_t));
    auto* exchanges = reinterpret_cast<std::uint64_t*>(counters.data());
    const auto* read_positions = reinterpret_cast<const std::int64_t*>(device_positions.data());
    operators.upload(device_positions.data(), positions.data(), device_positions.size_bytes(), stream);
    const std::array<std::uint64_t, 4> counts{8, 8, wrong == 2 ? 9u : 8u, 8};
    operators.upload(exchanges, counts.data(), sizeof(counts), stream);
    for (int peer = 0; peer < 4; ++peer) {
      operators.stamp(StampArgs{messages.data() + 48 * peer, wrong == 0 && peer == 0 ? kTokens - 1 : kTokens,
                                peer, exchanges + peer, read_positions},
                      stream);
    }
    ExchangeHeader header;
    operators.download(&header, messages.data() + 48, sizeof(header), stream);
    operators.synchronize(stream);
    CHECK(header.epoch == exchange_epoch(9, positions.data(), kTokens));
    CHECK((header.tokens == kTokens && header.sender == 1));
    operators.check_exchange(
        CheckExchangeArgs{
            .messages = messages.data(), .message_bytes = 48, .peers = 3, .sent = messages.data() + 3 * 48},
        stream);
    if (wrong < 0) {
      CHECK_NOTHROW(operators.synchronize(stream));
      continue;
    }
    const auto culprit =
        Catch::Matchers::ContainsSubstring("the message from group rank " + std::to_string(wrong));
    CHECK_THROWS_WITH(operators.synchronize(stream), culprit);
    CHECK_THROWS_WITH(operators.synchronize(stream), culprit);  // the failure is sticky
  }
}

TEMPLATE_TEST_CASE("16-bit partials on a GPU combine as f32 ones do", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (const std::int64_t ranks : {1, 2, 5, 32}) {
    for (const std::int64_t width : {1, 33, 64, 128, 512}) {
      for (const std::int64_t pad : kPads) {
        for (const bool has_sink : {false, true}) {
          CAPTURE(ranks, width, pad, has_sink);
          constexpr std::int64_t kTokens = 5;
          constexpr std::int64_t kHeads = 3;
          bench.clear();
          auto out_values = bench.numbers(ranks * kTokens * kHeads * (width + pad));
          auto lse_values = bench.numbers(ranks * kTokens * kHeads, 10.0);
          for (std::size_t i = 0; i < lse_values.size(); ++i) {
            // For every second token only the last rank has visible tokens; for token 3 no rank has.
            const auto token = static_cast<std::int64_t>(i) / kHeads % kTokens;
            const auto rank = static_cast<std::int64_t>(i) / (kHeads * kTokens);
            if ((token % 2 == 0 || rank == ranks - 1) && token != 3) continue;
            lse_values[i] = kNone;
            std::fill_n(out_values.begin() + static_cast<std::int64_t>(i) * (width + pad), width + pad,
                        std::nanf(""));
          }
          const auto partial_out = bench.activations(out_values, width + pad);
          const auto partial_lse = bench.same(lse_values);
          const auto sink = bench.same(bench.numbers(kHeads, 5.0));
          const auto out = bench.poison(kTokens * kHeads, width + pad);
          const auto lse = bench.same(std::vector<float>(at(kTokens * kHeads), std::nanf("")));
          HELIX_CHECK_TWINS(bench, {
            LseCombineArgs<E> args;
            const std::int64_t row = width + pad;
            args.partial_out = TensorView<const E, 4>(side(partial_out), {ranks, kTokens, kHeads, width},
                                                      {kTokens * kHeads * row, kHeads * row, row, 1});
            args.partial_lse = TensorView<const float, 3>(side(partial_lse), {ranks, kTokens, kHeads});
            if (has_sink) args.sinks = side(sink);
            args.out = side.view(out, kTokens, kHeads, width, pad);
            args.lse = {side(lse), {kTokens, kHeads}};
            operators.lse_combine(args, stream);
          });
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("log-sum-exps of other conventions on a GPU are converted as they are read", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using T = TestType;
  constexpr std::int64_t kTokens = 3;
  constexpr std::int64_t kDim = 16;
  const Operators<T> operators;
  const cuda::Stream stream = operators.create_stream();
  std::deque<cuda::Buffer> memory;
  const auto upload = [&]<class X>(const std::vector<X>& values) {
    memory.push_back(operators.allocate(values.size() * sizeof(X)));
    operators.upload(memory.back().data(), values.data(), values.size() * sizeof(X), stream);
    return reinterpret_cast<X*>(memory.back().data());
  };
  const auto download = [&](const float* from, std::int64_t count) {
    std::vector<float> values(at(count));
    operators.download(values.data(), from, values.size() * sizeof(float), stream);
    operators.synchronize(stream);
    return values;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto convention :
       {LseConvention::natural, LseConvention::base2, LseConvention::natural_positive_inf_if_empty}) {
    for (const std::int64_t ranks : {1, 3, 9}) {
      CAPTURE(int(convention), ranks);
      // Token 1 is empty on rank 0, token 2 everywhere.
      std::vector<float> natural(at(ranks * kTokens));
      std::vector<float> given;
      for (std::int64_t i = 0; i < ranks * kTokens; ++i) {
        const bool is_empty = i % kTokens == 2 || i == 1;
        natural[at(i)] = is_empty ? -kInfinity : 0.75f * static_cast<float>(i % 5) - 1.0f;
        given.push_back(convention == LseConvention::base2 ? natural[at(i)] / 0.693147181f : natural[at(i)]);
        if (is_empty && convention == LseConvention::natural_positive_inf_if_empty) given.back() = kInfinity;
      }
      std::vector<T> outs;
      for (std::int64_t i = 0; i < ranks * kTokens * kDim; ++i)
        outs.push_back(
            T(natural[at(i / kDim)] == -kInfinity ? std::nanf("") : static_cast<float>(i / kDim % 7)));
      T* const out = upload(std::vector<T>(at(kTokens * kDim)));
      float* const lse = upload(std::vector<float>(at(kTokens), std::nanf("")));
      LseCombineArgs<T> args;
      args.partial_out = TensorView<const T, 4>(upload(outs), {ranks, kTokens, 1, kDim});
      args.partial_lse = TensorView<const float, 3>(upload(given), {ranks, kTokens, 1});
      args.out = {out, {kTokens, 1, kDim}};
      args.lse = {lse, {kTokens, 1}};
      args.convention = convention;
      operators.lse_combine(args, stream);
      const std::vector<float> got = download(lse, kTokens);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        double sum = 0.0;
        for (std::int64_t r = 0; r < ranks; ++r) sum += std::exp(double{natural[at(r * kTokens + t)]});
        CAPTURE(t);
        if (sum == 0.0) {
          CHECK(got[at(t)] == -kInfinity);
        } else {
          CHECK(std::abs(got[at(t)] - std::log(sum)) < 1e-5);
        }
      }

      PackPartialArgs<T> pack;
      float* const packed = upload(std::vector<float>(at(ranks * kTokens), std::nanf("")));
      T* const packed_out = upload(std::vector<T>(at(ranks * kTokens * kDim)));
      const cuda::Buffer header = operators.allocate(sizeof(ExchangeHeader));
      const cuda::Buffer exchanges = operators.allocate(sizeof(std::uint64_t));
      pack.out = TensorView<const T, 3>(args.partial_out.data(), {ranks * kTokens, 1, kDim});
      pack.lse = TensorView<const float, 2>(args.partial_lse.data(), {ranks * kTokens, 1});
      pack.target.out = {packed_out, {ranks * kTokens, 1, kDim}};
      pack.target.lse = {packed, {ranks * kTokens, 1}};
      pack.target.headers.message = header.data();
      pack.target.headers.exchanges = reinterpret_cast<std::uint64_t*>(exchanges.data());
      pack.convention = convention;
      operators.pack_partial(pack, stream);
      const std::vector<float> packed_lse = download(packed, ranks * kTokens);
      for (std::size_t i = 0; i < natural.size(); ++i) {
        CAPTURE(i);
        CHECK((packed_lse[i] == natural[i] || std::abs(packed_lse[i] - natural[i]) < 1e-6f));
      }
    }
  }
}

}  // namespace helix::test
