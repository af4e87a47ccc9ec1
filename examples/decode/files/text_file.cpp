// SPDX-License-Identifier: Apache-2.0
// Reads a text file, and recognises the pointer that Git LFS leaves in place of a file.
#include "files/text_file.hpp"

#include <span>

#include <helix/error.hpp>

#include "files/regular_file.hpp"

namespace helix::decode {

std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const RegularFile file(path);
  HELIX_EXPECTS(file.size() <= max_bytes, ErrorCode::invalid_file, file.path(), ": has ", file.size(),
                " bytes; expected at most ", max_bytes);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  expect_no_lfs_pointer(text, file.path());
  return text;
}

void expect_no_lfs_pointer(std::string_view begin, std::string_view file) {
  HELIX_EXPECTS(!begin.starts_with("version "), ErrorCode::invalid_file, file,
                ": is a Git LFS pointer in place of the file; run git lfs pull in its folder");
}

}  // namespace helix::decode
