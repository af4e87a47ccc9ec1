// SPDX-License-Identifier: Apache-2.0
// What a decode step feeds of a sequence.
#pragma once

#include "generate/generation.hpp"
#include "generate/step_builder.hpp"

namespace helix::decode {

/// The pending token (or the teacher's, when forcing), then drafts.
TokenIds fed_tokens(const GenerationRequest& request, const SequenceProgress& sequence);

/// Whether decode steps feed nothing but the token that the step before drew, whatever it is, and ask for
/// nothing that depends on it.
bool feeds_drawn_tokens(const GenerationRequest& request);

}  // namespace helix::decode
