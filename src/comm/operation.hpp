// SPDX-License-Identifier: Apache-2.0
// The operations of a communicator, and their names in messages.
#pragma once

#include <string_view>

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
  split,
  allocate_window,
  kernel  ///< Not a collective, but meets the peers like one.
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
    case Operation::allocate_window:
      return "allocate_window";
    case Operation::kernel:
      return "kernel";
  }
  return "unknown";
}

inline bool is_reduction(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce_scatter;
}

}  // namespace helix::comm
