// SPDX-License-Identifier: Apache-2.0
// for_each_row: divides independent rows among the threads of a rank, in tasks large enough to be worth it.
#pragma once

#include <algorithm>
#include <cstdint>

#include <helix/cpu/thread_pool.hpp>
#include <helix/integers.hpp>

namespace helix::cpu {

/// Elements per task: some microseconds of work, which outweighs handing it to a thread.
inline constexpr std::int64_t kElementsPerTask = 16384;

/// Calls body(row) once for each row. Groups rows of `elements_a_row` elements into tasks. Allocates nothing.
template <class Body>
void for_each_row(ThreadPool& pool, std::int64_t rows, std::int64_t elements_a_row, const Body& body) {
  const std::int64_t rows_a_task =
      std::max<std::int64_t>(1, kElementsPerTask / std::max<std::int64_t>(1, elements_a_row));
  const auto task = [&](std::int64_t index, int) {
    const std::int64_t end = std::min(rows, (index + 1) * rows_a_task);
    for (std::int64_t row = index * rows_a_task; row < end; ++row) body(row);
  };
  pool.parallel_for(ceil_div(rows, rows_a_task), task);
}

}  // namespace helix::cpu
