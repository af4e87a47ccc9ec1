// SPDX-License-Identifier: Apache-2.0
// Writing files so that they appear as a whole.
#include "files/output_file.hpp"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, const char* what, int reason) {
  throw Error(ErrorCode::io, path.string(), ": ", what, ": ", std::strerror(reason));
}

/// Writes all of `text`. Returns 0 or an errno value.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return 0;
}

/// The descriptor of standard output or standard error if `status` is the same file, else -1. Such a file
/// must not be replaced: later output would go to the deleted file.
int standard_descriptor(const struct stat& status) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat open = {};
    if (::fstat(descriptor, &open) == 0 && open.st_dev == status.st_dev && open.st_ino == status.st_ino) {
      return descriptor;
    }
  }
  return -1;
}

/// Opens an existing file that is not a regular file. With O_NONBLOCK, opening a FIFO without a reader fails.
int open_in_place(const fs::path& path) {
  constexpr auto kPatience = std::chrono::seconds(60);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (descriptor >= 0) {
      ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
      return descriptor;
    }
    if (errno != ENXIO) fail(path, "cannot be opened", errno);
    if (std::chrono::steady_clock::now() - start > kPatience) fail(path, "nobody reads the FIFO", ENXIO);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

/// A new file in the folder of `path`, which is later renamed to `path`. Its own name is short, because the
/// name in `path` may already have the maximum length.
struct FileBeside {
  fs::path path;
  int descriptor = -1;

  explicit FileBeside(const fs::path& target) {
    // Lower numbers may be taken: by processes with the same id, as in containers, or by killed ones.
    constexpr int kNames = 100;
    for (int i = 0; i < kNames && descriptor < 0 && (i == 0 || errno == EEXIST); ++i) {
      path = folder_of(target) / (".helix." + std::to_string(::getpid()) + "." + std::to_string(i) + ".part");
      descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    if (descriptor < 0)
      fail(target, ("cannot be written: " + path.string() + " cannot be made").c_str(), errno);
  }
};

/// Writes to a temporary file in the same folder, then renames it to `path`.
void replace(const fs::path& path, std::string_view text, const struct stat* old) {
  const FileBeside beside(path);
  if (old != nullptr) static_cast<void>(::fchmod(beside.descriptor, old->st_mode & 07777));
  int reason = write_all(beside.descriptor, text);
  if (::close(beside.descriptor) != 0 && reason == 0) reason = errno;
  if (reason == 0 && ::rename(beside.path.c_str(), path.c_str()) != 0) reason = errno;
  if (reason == 0) return;
  ::unlink(beside.path.c_str());
  fail(path, "cannot be written", reason);
}

/// The file that `path` leads to: a link stays and its target is replaced. A link without a target is itself
/// replaced, as /dev/stdout is where standard output is closed.
fs::path target_of(const fs::path& path) {
  std::error_code failure;
  const fs::path target = fs::canonical(path, failure);
  if (!failure) return target;
  std::error_code ignored;
  if (fs::is_symlink(fs::symlink_status(path, ignored)))
    fail(path, "is a link that leads nowhere", failure.value());
  return path;
}

void check_folder(const fs::path& folder, const fs::path& path) {
  std::error_code failure;
  HELIX_EXPECTS(fs::is_directory(folder, failure), ErrorCode::io, path.string(),
                ": cannot be written: there is no folder ", folder.string());
  if (::access(folder.c_str(), W_OK | X_OK) != 0) fail(path, "its folder cannot be written", errno);
}

/// Creates and removes a file to find out: a folder's permissions do not tell everything.
void check_replaceable(const fs::path& path) {
  const fs::path target = target_of(path);
  check_folder(folder_of(target), path);
  const FileBeside beside(target);
  ::close(beside.descriptor);
  ::unlink(beside.path.c_str());
}

/// Whether output to `a` would replace or overwrite `b`. Never true for pipes and devices.
bool is_same_file(const fs::path& a, const fs::path& b) {
  std::error_code failure;
  const bool is_same =
      fs::weakly_canonical(a, failure) == fs::weakly_canonical(b, failure) || fs::equivalent(a, b, failure);
  if (!is_same) return false;
  const fs::file_type type = fs::status(a, failure).type();
  return type == fs::file_type::not_found || type == fs::file_type::regular ||
         type == fs::file_type::directory;
}

}  // namespace

void check_replaces_none(const NamedFile& output, std::span<const NamedFile> others) {
  for (const NamedFile& other : others) {
    HELIX_EXPECTS(!is_same_file(output.path, other.path), ErrorCode::invalid_argument, other.name, " and ",
                  output.name, " are both ", output.path.string(), "; give each a file of its own");
  }
}

void check_output(const fs::path& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) fail(path, "cannot be written", errno);
    HELIX_EXPECTS(path.has_filename(), ErrorCode::io, path.string(), ": is no name of a file");
    check_replaceable(path);
    return;
  }
  HELIX_EXPECTS(!S_ISDIR(status.st_mode), ErrorCode::io, path.string(),
                ": cannot be written: it is a folder; give a file's name");
  if (::access(path.c_str(), W_OK) != 0) fail(path, "cannot be written", errno);
  if (S_ISREG(status.st_mode) && standard_descriptor(status) < 0) check_replaceable(path);
}

void check_output_folder(const fs::path& folder) {
  fs::path there = fs::absolute(folder);
  std::error_code failure;
  while (!fs::exists(there, failure) && there.has_relative_path()) there = there.parent_path();
  check_folder(there, folder);
}

void write_output(const fs::path& path, std::string_view text) {
  struct stat status = {};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  const int standard = exists ? standard_descriptor(status) : -1;
  if (standard >= 0) {
    flush_standard_output();
    if (const int reason = write_all(standard, text)) fail(path, "cannot be written", reason);
    return;
  }
  if (!exists || S_ISREG(status.st_mode)) {
    replace(target_of(path), text, exists ? &status : nullptr);
    return;
  }
  const int descriptor = open_in_place(path);
  int reason = write_all(descriptor, text);
  if (::close(descriptor) != 0 && reason == 0) reason = errno;
  if (reason != 0) fail(path, "cannot be written", reason);
}

void flush_standard_output() {
  errno = 0;
  const bool is_lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  const int reason = errno;
  HELIX_EXPECTS(!is_lost, ErrorCode::io, "standard output cannot be written",
                reason == 0 ? "" : std::string(": ") + std::strerror(reason));
}

}  // namespace helix::decode
