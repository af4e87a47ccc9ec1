// SPDX-License-Identifier: Apache-2.0
// cpu::Buffer on anonymous pages of the operating system.
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <sys/mman.h>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "cpu/retired_memory.hpp"

namespace helix::cpu {

// Small pages on purpose. With MADV_HUGEPAGE sequential reads and 16 KB page reads of 1 GiB gained less than
// 6 % (10.0 to 10.3 and 8.1 to 8.5 GB/s), and a sparsely filled page pool would become resident by 2 MiB at a
// time.
Buffer::Buffer(std::size_t bytes) {
  if (bytes == 0) return;
  std::unique_ptr<Pages, Retire> pages(new Pages);
  const auto map = [bytes] {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  };
  void* data = map();
  if (data == MAP_FAILED) {
    free_retired();
    data = map();
  }
  HELIX_EXPECTS(data != MAP_FAILED, ErrorCode::capacity, "cannot allocate a buffer of ", bytes,
                " bytes: ", std::strerror(errno), "; free memory or ask for fewer pages or sequences");
  pages->data = static_cast<std::byte*>(data);
  pages->bytes = bytes;
  pages_ = std::move(pages);
}

std::byte* Buffer::data() const {
  return pages_ ? pages_->data : nullptr;
}

std::size_t Buffer::size_bytes() const {
  return pages_ ? pages_->bytes : 0;
}

void Buffer::Retire::operator()(Pages* pages) const noexcept {
  retire(pages);
}

}  // namespace helix::cpu
