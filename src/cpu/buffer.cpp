// SPDX-License-Identifier: Apache-2.0
// cpu::Buffer on anonymous pages of the operating system.
#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

namespace helix::cpu {

// Small pages on purpose. With MADV_HUGEPAGE sequential reads and 16 KB page reads of 1 GiB gained less than
// 6 % (10.0 to 10.3 and 8.1 to 8.5 GB/s), and a sparsely filled page pool would become resident by 2 MiB at a
// time.
Buffer::Buffer(std::size_t bytes) {
  if (bytes == 0) return;
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  HELIX_EXPECTS(pages != MAP_FAILED, ErrorCode::capacity, "cannot allocate a buffer of ", bytes,
                " bytes: ", std::strerror(errno), "; free memory or ask for fewer pages or sequences");
  data_ = std::unique_ptr<std::byte, Release>(static_cast<std::byte*>(pages), Release{bytes});
}

void Buffer::Release::operator()(std::byte* data) const noexcept {
  ::munmap(data, bytes);
}

}  // namespace helix::cpu
