// SPDX-License-Identifier: Apache-2.0
// Opening, reading and mapping files.
#include "files/regular_file.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "a socket";
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& path) : path_(path.string()) {
  // O_NONBLOCK keeps open() from waiting for the writer of a FIFO. It has no effect on regular files.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  // A checkpoint keeps its shards open, hundreds in large ones.
  HELIX_EXPECTS(descriptor_ >= 0, ErrorCode::io, path_, ": cannot open: ", std::strerror(errno),
                errno == EMFILE ? "; raise the limit (ulimit -n)" : "");
  struct stat status = {};
  const bool has_status = ::fstat(descriptor_, &status) == 0;
  if (!has_status || !S_ISREG(status.st_mode)) {
    const std::string kind = has_status ? kind_of(status.st_mode) : std::strerror(errno);
    ::close(std::exchange(descriptor_, -1));
    throw Error(ErrorCode::io, path_, ": not a regular file but ", kind);
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

RegularFile::~RegularFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

RegularFile::RegularFile(RegularFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(std::exchange(other.size_, 0)) {}

RegularFile& RegularFile::operator=(RegularFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}

void RegularFile::read(std::uint64_t offset, std::span<std::byte> target) const {
  constexpr std::size_t kMaxAtOnce = std::size_t{1} << 30;
  std::size_t done = 0;
  while (done < target.size()) {
    const ssize_t count =
        ::pread(descriptor_, target.data() + done, std::min(kMaxAtOnce, target.size() - done),
                static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    HELIX_EXPECTS(count >= 0, ErrorCode::io, path_, ": cannot read at byte ", offset + done, ": ",
                  std::strerror(errno));
    HELIX_EXPECTS(count > 0, ErrorCode::io, path_, ": ends at byte ", offset + done, " of ", size_,
                  ": it shrank while it was read");
    done += static_cast<std::size_t>(count);
  }
}

void RegularFile::expect_whole() const {
  struct stat status = {};
  HELIX_EXPECTS(::fstat(descriptor_, &status) == 0, ErrorCode::io, path_,
                ": cannot be looked at: ", std::strerror(errno));
  HELIX_EXPECTS(static_cast<std::uint64_t>(status.st_size) >= size_, ErrorCode::io, path_, ": has ",
                status.st_size, " bytes of ", size_, ": it shrank while it was in use");
}

}  // namespace helix::decode
