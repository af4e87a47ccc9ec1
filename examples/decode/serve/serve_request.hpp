// SPDX-License-Identifier: Apache-2.0
// What a line of JSON asks of a serving decoder. docs/decoding.md describes the keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include <helix/backend/vocabulary.hpp>

#include "generate/generation.hpp"

namespace helix::decode {

/// Maximum number of ids whose log-probabilities are reported with a token's.
inline constexpr std::int64_t kMaxBest = 20;
inline constexpr std::size_t kMaxStop = 1024;  ///< Maximum number of ids in "stop".

/// One prompt to complete.
struct ServeRequest {
  /// Identifies its events. No other unfinished request may have it.
  std::string id;
  TokenIds prompt;
  std::optional<std::int64_t> max_tokens;  ///< nullopt: what the context leaves, but at most the default.
  bool ignore_eos = false;
  TokenIds stop;  ///< Ids that end the output, in addition to the checkpoint's.
  std::optional<std::uint64_t> seed;
  SamplingConfig sampling;  ///< When the request is taken, the seed here becomes the request's own.
  Penalties penalties;
  /// Report the log-probabilities of each token and of this many likeliest ids.
  std::optional<std::int64_t> num_best;
};

/// Ends a request early.
struct CancelCommand {
  std::string id;
};
/// Asks for a stats event.
struct StatsCommand {};
/// Gives back the memory of ended requests, whose prefixes later requests could have shared.
struct ForgetCommand {};

using ServeCommand = std::variant<ServeRequest, CancelCommand, StatsCommand, ForgetCommand>;

/// Values of requests that leave them open.
struct ServeDefaults {
  SamplingConfig sampling;
  Penalties penalties;
};

/// A line that is not a command. `id` is the request's id, if it comes before the first malformed JSON.
struct BadLine {
  std::string id;
  std::string message;
};

/// The command of a line, or its error.
using ParsedLine = std::variant<ServeCommand, BadLine>;

/// The id of the request in a line, or in the beginning of one, if it comes before the first malformed JSON;
/// otherwise empty.
std::string id_of(std::string_view line);

/// Parses the command in `line`. A line for which there is not enough memory becomes a BadLine. Throws only
/// if there is no memory even for that.
ParsedLine parse_command(std::string_view line, const ServeDefaults& defaults);

}  // namespace helix::decode
