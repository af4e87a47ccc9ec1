// SPDX-License-Identifier: Apache-2.0
// The exchange and the combine, by their definitions in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <helix/backend/exchange.hpp>
#include <helix/contract/reference/elements.hpp>
#include <helix/error.hpp>

namespace helix::contract::reference {

inline void stamp(const StampArgs& args) {
  *args.exchanges += 1;
  const ExchangeHeader header{exchange_epoch(*args.exchanges, args.positions, args.tokens),
                              static_cast<std::uint32_t>(args.tokens),
                              static_cast<std::uint32_t>(args.sender)};
  for (std::int64_t i = 0; i < args.count; ++i)
    std::memcpy(args.message + i * args.message_bytes, &header, sizeof(header));
}

/// The natural log-sum-exp, by the definition of the convention.
inline double natural_lse(double lse, LseConvention convention) {
  if (convention == LseConvention::base2) return std::isinf(lse) ? kMinusInfinity : std::log(std::exp2(lse));
  if (convention == LseConvention::natural_positive_inf_if_empty && std::isinf(lse)) return kMinusInfinity;
  return lse;
}

/// The target whose out and lse are in the slot that its TargetSlot selects.
inline PartialTarget<float> in_slot(PartialTarget<float> target) {
  if (target.slot.exchanges == nullptr || *target.slot.exchanges % 2 == 0) return target;
  const std::int64_t floats = target.slot.bytes / static_cast<std::int64_t>(sizeof(float));
  target.out = {target.out.data() + floats, target.out.extents(), target.out.strides()};
  target.lse = {target.lse.data() + floats, target.lse.extents(), target.lse.strides()};
  return target;
}

inline void pack_partial(const PackPartialArgs<float>& args) {
  const PartialTarget<float> target = in_slot(args.target);
  for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.out.extent(1); ++h) {
      target.lse(t, h) = static_cast<float>(natural_lse(args.lse(t, h), args.convention));
      for (std::int64_t i = 0; i < args.out.extent(2); ++i) target.out(t, h, i) = args.out(t, h, i);
    }
  }
  stamp(args.target.headers);
}

inline void check_exchange(const CheckExchangeArgs& args) {
  ExchangeHeader own;
  std::memcpy(&own, args.sent, sizeof(own));
  const std::uint64_t epoch = own.epoch;
  for (std::int64_t peer = 0; peer < args.peers; ++peer) {
    ExchangeHeader header;
    std::memcpy(&header, args.messages + peer * args.message_bytes, sizeof(header));
    HELIX_EXPECTS(header.epoch == epoch && header.tokens == own.tokens && header.sender == peer,
                  ErrorCode::out_of_step, "message of peer ", peer, " carries epoch ", header.epoch, ", ",
                  header.tokens, " tokens, sender ", header.sender, "; expected ", epoch, ", ", own.tokens,
                  ", ", peer);
  }
}

inline void lse_combine(const LseCombineArgs<float>& args) {
  const auto partials = [&](std::int64_t r, std::int64_t t, std::int64_t h) {
    return natural_lse(args.partial_lse(r, t, h), args.convention);
  };
  const std::int64_t ranks = args.partial_lse.extent(0);
  for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.out.extent(1); ++h) {
      double highest = args.sinks != nullptr ? double{args.sinks[h]} : kMinusInfinity;
      for (std::int64_t r = 0; r < ranks; ++r) highest = std::max(highest, partials(r, t, h));
      double total = args.sinks != nullptr ? std::exp(args.sinks[h] - highest) : 0.0;
      std::vector<double> sums(static_cast<std::size_t>(args.out.extent(2)), 0.0);
      for (std::int64_t r = 0; r < ranks; ++r) {
        if (std::isinf(partials(r, t, h))) continue;
        const double weight = std::exp(partials(r, t, h) - highest);
        total += weight;
        for (std::size_t i = 0; i < sums.size(); ++i)
          sums[i] += weight * args.partial_out(r, t, h, static_cast<std::int64_t>(i));
      }
      for (std::size_t i = 0; i < sums.size(); ++i)
        args.out(t, h, static_cast<std::int64_t>(i)) =
            total > 0.0 ? static_cast<float>(sums[i] / total) : 0.0f;
      if (args.lse.data() != nullptr)
        args.lse(t, h) = static_cast<float>(total > 0.0 ? highest + std::log(total) : kMinusInfinity);
    }
  }
}

}  // namespace helix::contract::reference
