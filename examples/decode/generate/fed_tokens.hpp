// SPDX-License-Identifier: Apache-2.0
// The tokens that a decode step feeds for a sequence.
#pragma once

#include "generate/generation.hpp"
#include "generate/step_builder.hpp"

namespace helix::decode {

/// The pending token (the continuation's token in teacher forcing), then the draft tokens.
TokenIds fed_tokens(const GenerationRequest& request, const SequenceProgress& sequence);

/// Whether a decode step feeds only the token that the previous step drew, and asks for nothing that depends
/// on which token it is.
bool feeds_drawn_tokens(const GenerationRequest& request);

}  // namespace helix::decode
