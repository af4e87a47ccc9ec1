// SPDX-License-Identifier: Apache-2.0
// How many files a process has open, and how many it may have.
#pragma once

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <limits>
#include <memory>
#include <string_view>

#include <dirent.h>
#include <sys/resource.h>

namespace helix::comm {

struct OpenFiles {
  std::size_t limit = 0;   // descriptors are smaller than this (ulimit -n)
  std::size_t in_use = 0;  // of these

  std::size_t left() const { return limit - std::min(limit, in_use); }
};

/// The open files of this process at the moment. Where /proc cannot be read none count as open.
inline OpenFiles open_files() {
  OpenFiles files{.limit = std::numeric_limits<std::size_t>::max(), .in_use = 0};
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    files.limit = limit.rlim_cur;
  const auto close = [](DIR* folder) { ::closedir(folder); };
  const std::unique_ptr<DIR, decltype(close)> folder(::opendir("/proc/self/fd"), close);
  if (!folder) {
    if (errno == EMFILE) files.in_use = files.limit;
    return files;
  }
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;  // a number, "." or ".."
    int descriptor = -1;
    (void)std::from_chars(name.data(), name.data() + name.size(), descriptor);
    if (descriptor >= 0 && descriptor != ::dirfd(folder.get()) &&
        static_cast<std::size_t>(descriptor) < files.limit)
      ++files.in_use;
  }
  return files;
}

}  // namespace helix::comm
