// SPDX-License-Identifier: Apache-2.0
// Backend: all that a machine may owe. Each primitive asks for the part that it uses, in helix/backend/.
#pragma once

#include <helix/backend/attention.hpp>
#include <helix/backend/communicator.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/backend/layer.hpp>
#include <helix/backend/queue.hpp>
#include <helix/backend/vocabulary.hpp>

namespace helix {

/// One rank's machine: memory, streams, events, the stage's communicators, and every operation. Shapes were
/// checked by the public header that calls an operation; backends trust them.
template <class B>
concept Backend = LayerBackend<B> && VocabularyBackend<B>;

}  // namespace helix
