// SPDX-License-Identifier: Apache-2.0
// One rank's side of a collective: what it asks of those that it meets.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include <helix/dtype.hpp>

namespace helix::comm {

enum class Operation {
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  all_to_all_v,
  broadcast,
  send,
  recv,
  barrier,
  split
};

inline std::string_view to_string(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::all_gather:
      return "all_gather";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::all_to_all_v:
      return "all_to_all_v";
    case Operation::broadcast:
      return "broadcast";
    case Operation::send:
      return "send";
    case Operation::recv:
      return "recv";
    case Operation::barrier:
      return "barrier";
    case Operation::split:
      return "split";
  }
  return "unknown";
}

inline bool is_reduction(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce_scatter;
}

/// What one rank brings to a meeting. Lives on its stack until it leaves.
struct Call {
  Operation operation = Operation::barrier;
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;  // elements of a reduction, else bytes
  DType dtype = DType::f32;
  int root = 0;
  const std::int64_t* send_bytes = nullptr;  // all_to_all_v
  const std::int64_t* recv_bytes = nullptr;
  int color = 0;  // split
  int key = 0;

  std::string describe() const {
    std::ostringstream text;
    text << to_string(operation);
    if (is_reduction(operation)) {
      text << " of " << count << " x " << helix::to_string(dtype);
    } else if (operation != Operation::all_to_all_v && operation != Operation::barrier &&
               operation != Operation::split) {
      text << " of " << count << " bytes";
    }
    if (operation == Operation::broadcast) text << " from group rank " << root;
    return text.str();
  }
};

}  // namespace helix::comm
