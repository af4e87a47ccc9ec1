// SPDX-License-Identifier: Apache-2.0
// One rank's call of a collective: the arguments that it brings to a meeting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include <helix/dtype.hpp>

#include "comm/operation.hpp"

namespace helix::comm {

/// What one rank brings to a meeting. It lives on that rank's stack until the rank leaves.
struct Call {
  Operation operation = Operation::barrier;
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;  // elements of a reduction, else bytes
  DType dtype = DType::f32;
  int root = 0;                              // broadcast
  std::size_t multiple = 0;                  // of a window's stride: allocate_window
  const std::int64_t* send_bytes = nullptr;  // all_to_all_v
  const std::int64_t* recv_bytes = nullptr;
  int color = 0;  // split
  int key = 0;
  std::string_view kernel{};             // the kernel's name, for Operation::kernel
  std::optional<std::string> failure{};  // why this rank could not queue its kernel, if so

  std::string_view name() const { return operation == Operation::kernel ? kernel : to_string(operation); }

  std::string describe() const {
    std::ostringstream text;
    text << name();
    if (is_reduction(operation)) {
      text << " of " << count << " x " << helix::to_string(dtype);
    } else if (operation != Operation::all_to_all_v && operation != Operation::barrier &&
               operation != Operation::split && operation != Operation::kernel) {
      text << " of " << count << " bytes";
    }
    if (operation == Operation::allocate_window) text << " in multiples of " << multiple;
    if (operation == Operation::broadcast) text << " from group rank " << root;
    return text.str();
  }
};

}  // namespace helix::comm
