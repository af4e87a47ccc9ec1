// SPDX-License-Identifier: Apache-2.0
// PageTable: one rank's page table on the device, kept up to date from a PageLedger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include <helix/backend/queue.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/page_ledger.hpp>

namespace helix {

/// One rank's page table, [max_sequences, max_pages] int32, on the device and on the host. Its device address
/// never changes. Entries without a page name `spare_page`. An entry that loses its page names
/// `spare_page` on the device before another sequence can be given that page.
template <QueueBackend B>
class PageTable {
 public:
  /// Fills the table with `spare_page` and waits for its upload. @throws Error(capacity) if the memory cannot
  /// be had.
  PageTable(B& backend, std::int64_t max_sequences, std::int64_t max_pages, std::int32_t spare_page)
      : backend_(&backend),
        max_pages_(max_pages),
        spare_page_(spare_page),
        host_(host_table(max_sequences, max_pages, spare_page)),
        lost_(lost_places(max_sequences)),
        device_(backend.allocate(host_.size() * sizeof(std::int32_t))) {
    const auto stream = backend.create_stream();
    // A backend may copy what it uploads, so upload in pieces.
    constexpr std::size_t kPiece = std::size_t{1} << 20;
    for (std::size_t begin = 0; begin < host_.size(); begin += kPiece) {
      upload({begin, smaller(begin + kPiece, host_.size())}, stream);
      backend.synchronize(stream);
    }
  }

  const std::int32_t* data() const { return reinterpret_cast<const std::int32_t*>(device_.data()); }

  /// Uploads the changed entries: one copy from the first to the last of them, or one a sequence if more than
  /// 64 KiB lie between. Entries between two changed ones are rewritten with their own content. Without
  /// writes nothing is queued, and the changes of forget() wait for the next call with writes.
  void update(const PageLedger& ledger, std::span<const PageLedger::TableWrite> writes,
              typename B::Stream stream) {
    Entries all{host_.size(), 0};
    for (const PageLedger::TableWrite& write : writes) {
      const Entries changed = entries_of(write);
      const auto pages = ledger.pages(write.slot);
      for (std::size_t i = changed.begin; i < changed.end; ++i)
        host_[i] = pages[static_cast<std::size_t>(write.begin) + (i - changed.begin)];
      all = all.with(changed);
    }
    if (all.begin >= all.end) return;
    for (const std::int32_t slot : lost_.slots) all = all.with(lost_.entries[static_cast<std::size_t>(slot)]);
    if (all.end - all.begin <= kMaxSpan) {
      upload(all, stream);
    } else {
      for (const PageLedger::TableWrite& write : writes) upload(entries_of(write), stream);
      for (const std::int32_t slot : lost_.slots)
        upload(lost_.entries[static_cast<std::size_t>(slot)], stream);
    }
    for (const std::int32_t slot : lost_.slots) lost_.entries[static_cast<std::size_t>(slot)] = {};
    lost_.slots.clear();
  }

  /// Leaves the sequence in `slot` only its first `kept` pages. Queues nothing and does not throw: no other
  /// sequence is given one of its other pages without an update() with writes.
  void forget(std::int32_t slot, std::int64_t kept) noexcept {
    const auto row = static_cast<std::size_t>(slot * max_pages_);
    Entries gone{row + static_cast<std::size_t>(kept), row + static_cast<std::size_t>(kept)};
    while (gone.end < row + static_cast<std::size_t>(max_pages_) && host_[gone.end] != spare_page_)
      host_[gone.end++] = spare_page_;
    if (gone.begin == gone.end) return;
    Entries& lost = lost_.entries[static_cast<std::size_t>(slot)];
    if (lost.begin == lost.end) {
      lost = gone;
      lost_.slots.push_back(slot);  // does not allocate: within the reserved capacity
    } else {
      lost = lost.with(gone);
    }
  }

 private:
  // Most entries of one copy that spans several sequences: on a GPU a copy costs the host about 3 us, and one
  // of up to 64 KiB does not wait for the stream.
  static constexpr std::size_t kMaxSpan = 65536 / sizeof(std::int32_t);

  struct Entries {
    std::size_t begin = 0;
    std::size_t end = 0;

    /// The smallest range that covers both.
    Entries with(const Entries& more) const {
      if (more.begin == more.end) return *this;
      return {smaller(begin, more.begin), larger(end, more.end)};
    }
  };

  /// Entries that name the spare page on the host and may not on the device.
  struct Lost {
    std::vector<Entries> entries;     // by slot
    std::vector<std::int32_t> slots;  // slots that have lost entries
  };
  static Lost lost_places(std::int64_t max_sequences) {
    Lost lost;
    lost.entries.resize(static_cast<std::size_t>(max_sequences));
    lost.slots.reserve(static_cast<std::size_t>(max_sequences));
    return lost;
  }

  static std::vector<std::int32_t> host_table(std::int64_t max_sequences, std::int64_t max_pages,
                                              std::int32_t spare_page) {
    const std::size_t count = entries(max_sequences, max_pages);
    try {
      return std::vector<std::int32_t>(count, spare_page);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::capacity, "no memory for a page table of ", max_sequences,
                  " sequences of up to ", max_pages,
                  " pages; build the KV cache with smaller max_sequences or max_tokens");
    }
  }

  static std::size_t entries(std::int64_t max_sequences, std::int64_t max_pages) {
    constexpr std::int64_t kMax = std::int64_t{1}
                                  << 40;  // far above any memory, and its bytes fit in 64 bits
    HELIX_EXPECTS(max_pages == 0 || max_sequences <= kMax / max_pages, ErrorCode::capacity,
                  "a page table of ", max_sequences, " sequences of ", max_pages,
                  " pages exceeds the address space");
    return static_cast<std::size_t>(max_sequences * max_pages);
  }

  Entries entries_of(const PageLedger::TableWrite& write) const {
    const std::int64_t row = write.slot * max_pages_;
    return {static_cast<std::size_t>(row + write.begin), static_cast<std::size_t>(row + write.end)};
  }

  void upload(const Entries& entries, typename B::Stream stream) {
    if (entries.begin >= entries.end) return;
    const std::size_t begin_bytes = entries.begin * sizeof(std::int32_t);
    backend_->upload(device_.data() + begin_bytes, host_.data() + entries.begin,
                     entries.end * sizeof(std::int32_t) - begin_bytes, stream);
  }

  B* backend_;
  std::int64_t max_pages_;
  std::int32_t spare_page_;
  std::vector<std::int32_t> host_;
  Lost lost_;
  typename B::Buffer device_;
};

}  // namespace helix
