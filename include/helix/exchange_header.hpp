// SPDX-License-Identifier: Apache-2.0
// What tells the messages of one exchange from all others: headers, the epochs in them, and the tags of rows
// that travel as lines.
#pragma once

#include <cstdint>

#include <helix/error.hpp>
#include <helix/host_device.hpp>
#include <helix/splitmix64.hpp>

namespace helix {

/// The header that a packed message begins with; ExchangeMessage says what follows.
struct ExchangeHeader {
  std::uint64_t epoch = 0;  ///< exchange_epoch() of the sender (invariant 13).
  std::uint32_t tokens = 0;
  std::uint32_t sender = 0;  ///< Rank of the sender in its group.
};

namespace detail {

inline constexpr int kExchangeGroupShift = 24;
inline constexpr int kMaxExchangeGroups = 256;

}  // namespace detail

/// The count of exchanges with which the ranks of KVP group `group` begin: an even number that differs from
/// group to group, up to 256 of them. Headers and lines carry the count, so a message from another group is
/// not taken for one of this group.
constexpr std::uint64_t first_exchange_count(int group) {
  return static_cast<std::uint64_t>(group % detail::kMaxExchangeGroups) << detail::kExchangeGroupShift;
}

/// Term that the position at `index` of a step adds to the sum in exchange_epoch().
HELIX_HOST_DEVICE constexpr std::uint64_t exchange_epoch_term(std::int64_t position, std::int64_t index) {
  return detail::splitmix64_mix(static_cast<std::uint64_t>(position) +
                                static_cast<std::uint64_t>(index + 1) * detail::kSplitmix64Step);
}

/// The epoch in a message header: the count of the sender's exchanges, this one included, plus a hash of the
/// positions in the upper half. `terms` is the sum of exchange_epoch_term() over the positions, which threads
/// may share out; 0 without positions.
///
/// The count alone cannot tell steps apart: a collective pairs the n-th call of each rank with the n-th call
/// of the others, even if one of them has skipped a step. The positions of consecutive steps differ because
/// sequences grow. Where they do not (two prompts of one length in turn, or steps of padding), a rank that
/// skips the first of the two steps goes undetected.
HELIX_HOST_DEVICE constexpr std::uint64_t exchange_epoch(std::uint64_t exchanges, std::uint64_t terms) {
  return exchanges + (terms >> 32 << 32);
}

/// The epoch of a step with `positions` [tokens]; nullptr: the count alone.
constexpr std::uint64_t exchange_epoch(std::uint64_t exchanges, const std::int64_t* positions,
                                       std::int64_t tokens) {
  std::uint64_t terms = 0;
  for (std::int64_t i = 0; positions != nullptr && i < tokens; ++i)
    terms += exchange_epoch_term(positions[i], i);
  return exchange_epoch(exchanges, terms);
}

/// Checks the header of a message from rank `peer` of the group against `own`, a header that this rank has
/// stamped for the same exchange. @throws Error(out_of_step) that says how they differ.
inline void check_exchange_header(std::int64_t peer, const ExchangeHeader& header,
                                  const ExchangeHeader& own) {
  constexpr std::uint32_t kSteps = std::uint32_t{1} << detail::kExchangeGroupShift;
  const auto count = [](std::uint64_t epoch) { return static_cast<std::uint32_t>(epoch); };
  const auto step = [&](std::uint64_t epoch) { return count(epoch) % kSteps; };
  const auto hash = [](std::uint64_t epoch) { return epoch >> 32; };
  HELIX_EXPECTS(
      header.sender == peer, ErrorCode::out_of_step, "out of step: the message in the place of group rank ",
      peer, " names rank ", header.sender,
      " as its sender: ranks exchange different numbers of tokens, the groups differ, or an attention of "
      "an engine's own wrote no headers (PartialTarget::headers)");
  // Ranks of one group never differ by so many exchanges.
  HELIX_EXPECTS(count(header.epoch) == count(own.epoch) || step(header.epoch) != step(own.epoch),
                ErrorCode::out_of_step, "out of step: the message from group rank ", peer,
                " counts exchanges like another KVP group than this rank's: the communicator has ranks of "
                "several KVP groups; make it of the ranks with one TPA rank");
  HELIX_EXPECTS(header.epoch == own.epoch && header.tokens == own.tokens, ErrorCode::out_of_step,
                "out of step: the message from group rank ", peer, " says step ", step(header.epoch), ", ",
                header.tokens, " tokens, positions of hash ", hash(header.epoch), "; expected step ",
                step(own.epoch), ", ", own.tokens, " tokens, positions of hash ", hash(own.epoch),
                ": a rank skipped or repeated a step");
}

/// Tag of row `token` in an exchange of `tokens` tokens that travels as lines. It lies in the row's lse line,
/// next to the number of the exchange. `positions` is [tokens], or nullptr: zeros.
HELIX_HOST_DEVICE constexpr std::uint32_t exchange_row_tag(const std::int64_t* positions, std::int64_t token,
                                                           std::int64_t tokens) {
  const std::int64_t position = positions == nullptr ? 0 : positions[token];
  return static_cast<std::uint32_t>(position) + static_cast<std::uint32_t>(tokens) * 0x9e3779b9u;
}

}  // namespace helix
