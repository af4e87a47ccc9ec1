// SPDX-License-Identifier: Apache-2.0
// How a rank ends all groups of its root; shared by NcclComm and PeerComm.
#pragma once

#include <string>
#include <string_view>

#include "comm/meeting.hpp"

namespace helix::cuda {

/// Ends the family of rank `root_rank`, and the job if there is a Bootstrap.
template <class Family>
void fail_everywhere(Family& family, int root_rank, std::string_view reason) noexcept {
  if (family.bootstrap) family.bootstrap->fail(reason);  // its callback calls family.fail() too
  std::string text;
  try {
    text = comm::Root::failure_of(root_rank, reason);
  } catch (...) {
    // Out of memory for the text: the family fails without it.
  }
  family.fail(text);
}

}  // namespace helix::cuda
