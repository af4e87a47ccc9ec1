// SPDX-License-Identifier: Apache-2.0
// Memory mappings, and the SIGBUS handler that knows them.
#include "checkpoint/mapped_file.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <helix/error.hpp>

#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

/// A mapping as the signal handler reads it. The handler may interrupt anything, so there is no lock and no
/// allocation.
struct Known {
  static constexpr std::size_t kMaxName = 4096;  // Linux's PATH_MAX

  std::atomic<std::uintptr_t> begin{0};  // 0: free, 1: being written
  std::atomic<std::uintptr_t> end{0};
  std::array<char, kMaxName> name{};
};

/// Mappings, and the next ones if there are more. Blocks are never freed, so the handler may walk them.
struct KnownBlock {
  std::array<Known, 256> mappings;
  std::atomic<KnownBlock*> next{nullptr};
};

KnownBlock g_known;
const char* g_program = "";

/// The block after `block`, which is made if there is none.
KnownBlock& block_after(KnownBlock& block) {
  KnownBlock* next = block.next.load();
  if (next != nullptr) return *next;
  auto made = std::make_unique<KnownBlock>();
  if (!block.next.compare_exchange_strong(next, made.get())) return *next;  // another thread was faster
  return *made.release();
}

void enter(std::span<const std::byte> bytes, const std::string& path) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::string name = one_line(path);
  for (KnownBlock* block = &g_known;; block = &block_after(*block)) {
    for (Known& known : block->mappings) {
      std::uintptr_t expected = 0;
      if (!known.begin.compare_exchange_strong(expected, 1)) continue;
      std::strncpy(known.name.data(), name.c_str(), known.name.size() - 1);
      known.end.store(begin + bytes.size());
      known.begin.store(begin);
      return;
    }
  }
}

/// Calls use(known) for each place of each block.
template <class Use>
void for_each_known(const Use& use) {
  for (KnownBlock* block = &g_known; block != nullptr; block = block->next.load()) {
    for (Known& known : block->mappings) use(known);
  }
}

void leave(std::span<const std::byte> bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  for_each_known([&](Known& known) {
    if (known.begin.load() == begin) known.begin.store(0);
  });
}

/// Ends the process with one line, written by one call, however many threads get here at once.
[[noreturn]] void end_process(const char* file) {
  static std::atomic_flag is_ending = ATOMIC_FLAG_INIT;
  while (is_ending.test_and_set()) ::pause();
  const auto part = [](const char* text) { return iovec{const_cast<char*>(text), std::strlen(text)}; };
  const std::array line = {part(g_program), part(": "), part(file),
                           part(": shrank or became unreadable while it was in use\n")};
  const ssize_t ignored = ::writev(STDERR_FILENO, line.data(), static_cast<int>(line.size()));
  static_cast<void>(ignored);
  ::_exit(1);
}

/// Calls madvise() on the pages that hold `bytes`. Rounding outwards is safe: the mapping is read-only, so a
/// dropped neighbouring page comes back from the page cache.
int advise(std::span<const std::byte> bytes, int advice) noexcept {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(bytes.data()) + bytes.size();
  return ::madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for_each_known([&](const Known& known) {
    const std::uintptr_t begin = known.begin.load();
    if (begin > 1 && address >= begin && address < known.end.load()) end_process(known.name.data());
  });
  // The handler returns, the access repeats, and the default action ends the process.
  std::signal(signal, SIG_DFL);
}

}  // namespace

MappedFile::MappedFile(const RegularFile& file) {
  if (file.size() == 0) return;
  const auto size = static_cast<std::size_t>(file.size());
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  HELIX_EXPECTS(address != MAP_FAILED, ErrorCode::io, file.path(), ": cannot map: ", std::strerror(errno));
  bytes_ = {static_cast<const std::byte*>(address), size};
  try {
    enter(bytes_, file.path());
  } catch (...) {  // out of memory
    ::munmap(address, size);
    throw;
  }
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  leave(bytes_);
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void MappedFile::prefault(std::span<const std::byte> bytes) const noexcept {
  if (bytes.empty()) return;
  // Each touch maps the 64 KiB around it, as far as they are in the page cache. For 2.4 GB cached in small
  // folios this takes two threads 100 ms; MADV_POPULATE_READ took two threads 200 ms and one thread 150 ms.
  // When reading from disk nothing was faster.
  constexpr std::size_t kAround = std::size_t{64} << 10;
  const volatile std::byte* const data = bytes.data();
  for (std::size_t i = 0; i < bytes.size(); i += kAround) static_cast<void>(data[i]);
  static_cast<void>(data[bytes.size() - 1]);
}

void MappedFile::release(std::span<const std::byte> bytes) const noexcept {
  if (!bytes.empty()) advise(bytes, MADV_DONTNEED);
}

void guard_mappings(const char* program) {
  g_program = program;
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace helix::decode
