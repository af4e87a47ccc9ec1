// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/text_file.hpp"

#include <span>

#include <helix/error.hpp>

#include "checkpoint/regular_file.hpp"

namespace helix::decode {

std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const RegularFile file(path);
  HELIX_EXPECTS(file.size() <= max_bytes, ErrorCode::invalid_file, file.path(), ": has ", file.size(),
                " bytes; expected at most ", max_bytes);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace helix::decode
