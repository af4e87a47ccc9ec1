// SPDX-License-Identifier: Apache-2.0
// Tokens of decode steps: drawn tokens, forced tokens and drafts.
#include "generate/fed_tokens.hpp"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

namespace helix::decode {
namespace {

/// Token `i` of the sequence's continuation in the request, if there is one.
std::optional<std::int32_t> teacher_token(const GenerationRequest& request, const SequenceProgress& sequence,
                                          std::int64_t i) {
  const auto index = static_cast<std::size_t>(sequence.index);
  if (index >= request.teacher.size() || i < 0 || i >= std::ssize(request.teacher[index]))
    return std::nullopt;
  return request.teacher[index][static_cast<std::size_t>(i)];
}

}  // namespace

TokenIds fed_tokens(const GenerationRequest& request, const SequenceProgress& sequence) {
  const std::int64_t generated = sequence.generated();
  if (request.draft_tokens == 1)
    return {teacher_token(request, sequence, generated - 1).value_or(sequence.pending)};
  TokenIds tokens{sequence.pending};
  while (std::ssize(tokens) < request.draft_tokens &&
         generated + std::ssize(tokens) < request.max_new_tokens) {
    const auto draft = teacher_token(request, sequence, generated + std::ssize(tokens) - 1);
    if (!draft) break;
    tokens.push_back(*draft);
  }
  return tokens;
}

bool feeds_drawn_tokens(const GenerationRequest& request) {
  return request.draft_tokens == 1 && request.teacher.empty() && !request.penalties.any();
}

}  // namespace helix::decode
