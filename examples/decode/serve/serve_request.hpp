// SPDX-License-Identifier: Apache-2.0
// What a line of JSON asks of a serving decoder. docs/decoding.md describes the keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <helix/backend/vocabulary.hpp>

#include "generate/generation.hpp"

namespace helix::decode {

/// Most ids of which log-probabilities are told beside a token's.
inline constexpr std::int64_t kMaxBest = 20;
inline constexpr std::size_t kMaxStop = 1024;  ///< Ids of "stop".

/// One prompt to complete.
struct ServeRequest {
  std::string id;  ///< Names its events; of no other request that is not ended.
  TokenIds prompt;
  std::optional<std::int64_t> max_tokens;  ///< nullopt: what the context leaves, at most the default.
  bool ignore_eos = false;
  TokenIds stop;  ///< Ids that end it, beside the checkpoint's.
  std::optional<std::uint64_t> seed;
  SamplingConfig sampling;  ///< Its seed is the request's once it is taken.
  Penalties penalties;
  std::optional<std::int64_t> num_best;  ///< Log-probabilities of each token and of so many likeliest ids.
};

/// Ends a request before its time.
struct CancelCommand {
  std::string id;
};
/// Asks for a stats event.
struct StatsCommand {};
/// Gives back the memory of ended requests, whose prefixes later ones could have shared.
struct ForgetCommand {};

using ServeCommand = std::variant<ServeRequest, CancelCommand, StatsCommand, ForgetCommand>;

/// What requests have that do not say.
struct ServeDefaults {
  SamplingConfig sampling;
  Penalties penalties;
};

/// A line that is no command; `id` is that of the request, if it says one before it ceases to be JSON.
struct BadLine {
  std::string id;
  std::string message;
};

/// What a line says, or what is wrong with it.
using ParsedLine = std::variant<ServeCommand, BadLine>;

/// The command that `line` holds. A line that there is no memory for is a bad one. Throws only where not even
/// that can be said for want of memory.
ParsedLine parse_command(std::string_view line, const ServeDefaults& defaults);

}  // namespace helix::decode
