// SPDX-License-Identifier: Apache-2.0
// Backend: all operations of a machine. Each primitive asks only for the part that it uses, in
// helix/backend/.
#pragma once

#include <helix/backend/attention.hpp>
#include <helix/backend/communicator.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/backend/layer.hpp>
#include <helix/backend/queue.hpp>
#include <helix/backend/vocabulary.hpp>

namespace helix {

/// One rank's machine: memory, streams, events, the stage's communicators, and every operation. The public
/// header that calls an operation has checked the shapes; backends trust them.
template <class B>
concept Backend = LayerBackend<B> && VocabularyBackend<B>;

}  // namespace helix
