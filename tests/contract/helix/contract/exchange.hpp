// SPDX-License-Identifier: Apache-2.0
// Packing, checking and combining partial attention, compared with their definitions in double.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <helix/contract/workbench.hpp>
#include <helix/error.hpp>

namespace helix::contract {

inline constexpr std::array kConventions{LseConvention::natural, LseConvention::natural_positive_inf_if_empty,
                                         LseConvention::base2};

/// The value that a convention reports for no tokens.
constexpr float none_of(LseConvention convention) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return convention == LseConvention::natural_positive_inf_if_empty ? kInfinity : -kInfinity;
}

template <TestableBackend B>
void pack_partial_and_stamp() {
  for (const std::int64_t kvp : {1, 2, 5}) {
    for (const std::int64_t tokens : {0, 1, 3}) {
      for (const std::int64_t heads : {1, 3}) {
        for (const std::int64_t width : {1, 16}) {
          CAPTURE(kvp, tokens, heads, width);
          Workbench<B> bench;
          const std::int64_t all_heads = kvp * heads;
          const auto out = bench.random(tokens * all_heads * (width + 3));
          const LseConvention convention = kConventions[static_cast<std::size_t>(kvp / 2)];
          std::vector<float> lse_values;  // powers of two, whose conversion rounds equally everywhere
          for (std::int64_t i = 0; i < tokens * all_heads; ++i)
            lse_values.push_back(i % 4 == 3 ? none_of(convention)
                                            : static_cast<float>(std::int64_t{1} << i % 5));
          const auto lse = bench.array(lse_values);
          const auto exchanges = bench.array(std::vector<std::uint64_t>{41});
          const auto ended = bench.array(std::vector<std::uint64_t>{41});
          const auto positions = bench.array(std::vector<std::int64_t>{100, -1, 7});
          // One block per head: header, lse, outputs, and some unused words.
          const std::int64_t block = 4 + tokens + tokens * width + 8;
          const std::int64_t slot_bytes = all_heads * block * 4;
          const auto messages =
              bench.array(std::vector<std::byte>(static_cast<std::size_t>(2 * slot_bytes), std::byte{7}));
          HELIX_CHECK_OPERATION(
              bench, pack_partial, ([&](const auto& side) {
                PackPartialArgs<float> args;
                args.out = TensorView<const float, 3>(side(out), {tokens, all_heads, width},
                                                      {all_heads * (width + 3), width + 3, 1});
                args.lse = side.view(lse, tokens, all_heads);
                args.convention = convention;
                auto* first = reinterpret_cast<float*>(side(messages));
                args.target.lse = {first + 4, {tokens, all_heads}, {1, block}};
                args.target.out = {first + 4 + tokens, {tokens, all_heads, width}, {width, block, 1}};
                args.target.headers.message = side(messages);
                args.target.headers.tokens = tokens;
                args.target.headers.sender = kvp - 1;
                args.target.headers.exchanges = side(exchanges);
                if (kvp != 2) args.target.headers.positions = side(positions);
                args.target.headers.count = kvp;
                args.target.headers.message_bytes = heads * block * 4;
                if (kvp == 5) args.target.slot = {side(ended), slot_bytes};  // the second slot
                return args;
              }));
        }
      }
    }
  }
  for (const bool has_positions : {false, true}) {
    CAPTURE(has_positions);
    Workbench<B> bench;
    const auto exchanges = bench.array(std::vector<std::uint64_t>{6});
    const auto positions = bench.array(std::vector<std::int64_t>{5, 6, 7, 1000000});
    const auto message = bench.array(std::vector<std::byte>(40, std::byte{9}));
    HELIX_CHECK_OPERATION(
        bench, stamp, ([&](const auto& side) {
          return StampArgs{side(message), 4, 3, side(exchanges), has_positions ? side(positions) : nullptr};
        }));
  }
}

/// Three messages. Message `wrong` has one field off by one; 3 means none has. Field 3 is a token's position.
template <TestableBackend B>
void run_check_exchange(int wrong, int field) {
  Workbench<B> bench;
  const std::vector<std::int64_t> position_values{0, 1, 2, 3, 77, 5, 6, -1, 8};
  std::vector<std::byte> bytes(3 * 48, std::byte{1});
  for (int peer = 0; peer < 3; ++peer) {
    std::vector<std::int64_t> theirs = position_values;
    if (peer == wrong && field == 3) theirs[8] += 1;
    ExchangeHeader header{exchange_epoch(5, theirs.data(), 9), 9, static_cast<std::uint32_t>(peer)};
    if (peer == wrong && field == 0) header.epoch += 1;
    if (peer == wrong && field == 1) header.tokens += 1;
    if (peer == wrong && field == 2) header.sender += 1;
    std::memcpy(bytes.data() + peer * 48, &header, sizeof(header));
  }
  const auto messages = bench.array(bytes);
  std::vector<std::byte> own(16);
  const ExchangeHeader header{exchange_epoch(5, position_values.data(), 9), 9, 1};
  std::memcpy(own.data(), &header, sizeof(header));
  const auto sent = bench.array(own);
  bench.upload();
  const auto side = bench.device_side();
  bench.backend().check_exchange(
      CheckExchangeArgs{.messages = side(messages), .message_bytes = 48, .peers = 3, .sent = side(sent)},
      bench.stream());
  const auto code = [&] {
    try {
      bench.backend().synchronize(bench.stream());
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::internal;  // stands for no error
  };
  if (wrong == 3) {
    CHECK(code() == ErrorCode::internal);
    return;
  }
  CHECK(code() == ErrorCode::out_of_step);
  // The failure is sticky: it stays visible whatever is queued next.
  bench.backend().fill_zero(side(messages), 16, bench.stream());
  CHECK(code() == ErrorCode::out_of_step);
}

template <TestableBackend B>
void check_exchange() {
  run_check_exchange<B>(3, 0);
  for (int peer = 0; peer < 3; ++peer) {
    for (int field = 0; field < 4; ++field) {
      CAPTURE(peer, field);
      run_check_exchange<B>(peer, field);
    }
  }
}

template <TestableBackend B>
void lse_combine() {
  for (const std::int64_t ranks : {1, 2, 5}) {
    for (const std::int64_t tokens : {0, 1, 4}) {
      for (const std::int64_t heads : {1, 3}) {
        for (const std::int64_t width : {1, 16, 33}) {
          for (const bool has_sink : {false, true}) {
            for (const bool wants_lse : {false, true}) {
              const LseConvention convention = kConventions[static_cast<std::size_t>(width % 3)];
              CAPTURE(ranks, tokens, heads, width, has_sink, wants_lse, int(convention));
              Workbench<B> bench;
              auto out_values = bench.random_values(ranks * tokens * heads * width);
              auto lse_values = bench.random_values(ranks * tokens * heads, 30.0);
              for (std::size_t i = 0; i < lse_values.size(); ++i) {
                // For every second token only the last rank has visible tokens; for token 3 no rank has.
                const auto token = static_cast<std::int64_t>(i) / heads % tokens;
                const auto rank = static_cast<std::int64_t>(i) / (heads * tokens);
                if ((token % 2 == 0 || rank == ranks - 1) && token != 3) continue;
                lse_values[i] = none_of(convention);
                std::fill_n(out_values.begin() + static_cast<std::int64_t>(i) * width, width, std::nanf(""));
              }
              const auto partial_out = bench.array(out_values);
              const auto partial_lse = bench.array(lse_values);
              const auto sink = bench.random(heads, 20.0);
              const auto out = bench.poison(tokens * heads * (width + 1));
              const auto lse = bench.poison(tokens * heads);
              HELIX_CHECK_OPERATION(
                  bench, lse_combine, ([&](const auto& side) {
                    LseCombineArgs<float> args;
                    args.partial_out = side.view(partial_out, ranks, tokens, heads, width);
                    args.partial_lse = side.view(partial_lse, ranks, tokens, heads);
                    args.convention = convention;
                    if (has_sink) args.sinks = side(sink);
                    args.out = {side(out), {tokens, heads, width}, {heads * (width + 1), width + 1, 1}};
                    if (wants_lse) args.lse = side.view(lse, tokens, heads);
                    return args;
                  }));
            }
          }
        }
      }
    }
  }
}

/// The two operations of an exchange separately: the combine of partials inside messages, and the check of
/// their headers.
template <TestableBackend B>
void combine_exchange() {
  constexpr std::int64_t kPeers = 3, kTokens = 2, kHeads = 3, kWidth = 16;
  constexpr std::int64_t kBlock = 4 + 4 + kTokens * kWidth;  // floats per head
  for (const std::int64_t wrong : {-1, 0, 2}) {
    CAPTURE(wrong);
    Workbench<B> bench;
    auto values = bench.random_values(kPeers * kHeads * kBlock, 3.0);
    const std::vector<std::int64_t> position_values{40, 41};
    for (std::int64_t peer = 0; peer < kPeers; ++peer) {
      const ExchangeHeader header{
          exchange_epoch(9, position_values.data(), kTokens) + (peer == wrong ? 1 : 0), kTokens,
          static_cast<std::uint32_t>(peer)};
      std::memcpy(values.data() + peer * kHeads * kBlock, &header, sizeof(header));
    }
    const auto messages = bench.array(values);
    std::vector<std::byte> own(16);
    const ExchangeHeader header{exchange_epoch(9, position_values.data(), kTokens), kTokens, 1};
    std::memcpy(own.data(), &header, sizeof(header));
    const auto sent = bench.array(own);
    const auto out = bench.poison(kTokens * kHeads * kWidth);
    const auto check_on = [&](const auto& side) {
      return CheckExchangeArgs{.messages = reinterpret_cast<const std::byte*>(side(messages)),
                               .message_bytes = kHeads * kBlock * 4,
                               .peers = kPeers,
                               .sent = side(sent)};
    };
    const auto combine_on = [&](const auto& side) {
      LseCombineArgs<float> args;
      args.partial_lse = {side(messages) + 4, {kPeers, kTokens, kHeads}, {kHeads * kBlock, 1, kBlock}};
      args.partial_out = {
          side(messages) + 8, {kPeers, kTokens, kHeads, kWidth}, {kHeads * kBlock, kWidth, kBlock, 1}};
      args.out = side.view(out, kTokens, kHeads, kWidth);
      return args;
    };
    if (wrong < 0) {
      bench.check(
          combine_on, [](const auto& args) { reference::lse_combine(args); },
          [&](const auto& args, auto stream) {
            bench.backend().combine_exchange(check_on(bench.device_side()), args, stream);
          });
      continue;
    }
    bench.upload();
    bench.backend().combine_exchange(check_on(bench.device_side()), combine_on(bench.device_side()),
                                     bench.stream());
    try {
      bench.backend().synchronize(bench.stream());
      FAIL("a message of another step went unseen");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::out_of_step);
    }
  }
}

}  // namespace helix::contract
