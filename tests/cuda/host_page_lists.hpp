// SPDX-License-Identifier: Apache-2.0
// Page lists of some sequences on the host, as engines keep them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace helix::test {

/// Page ids of some sequences, as rows of a table or as a CSR list. Each row has one entry more than its
/// sequence needs, which is `unused_page`.
struct HostPageLists {
  std::vector<std::int32_t> pages;
  std::vector<std::int32_t> begins;  ///< CSR: [slots + 1]; empty for a table.
  std::int64_t max_pages = 0;

  /// Slot s gets counts[s] pages.
  HostPageLists(const std::vector<std::int64_t>& counts, bool is_csr, std::int32_t unused_page) {
    if (is_csr) {
      begins.push_back(0);
      for (const std::int64_t count : counts)
        begins.push_back(begins.back() + static_cast<std::int32_t>(count) + 1);
      pages.assign(static_cast<std::size_t>(begins.back()), unused_page);
    } else {
      for (const std::int64_t count : counts) max_pages = std::max(max_pages, count + 1);
      pages.assign(counts.size() * static_cast<std::size_t>(max_pages), unused_page);
    }
  }

  std::int32_t& at(std::int64_t slot, std::int64_t i) {
    const std::int64_t first =
        begins.empty() ? slot * max_pages : std::int64_t{begins[static_cast<std::size_t>(slot)]};
    return pages[static_cast<std::size_t>(first + i)];
  }
};

}  // namespace helix::test
