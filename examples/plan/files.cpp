// SPDX-License-Identifier: Apache-2.0
// Text files of helix-plan.
#include "files.hpp"

#include <fstream>

#include <helix/error.hpp>

namespace helix::plan_cli {

std::string read_text(const std::filesystem::path& file) {
  constexpr std::uintmax_t kMaxBytes = 64 << 20;
  std::error_code failure;
  HELIX_EXPECTS(std::filesystem::is_regular_file(file, failure), ErrorCode::io, file.string(),
                ": there is no such file");
  const std::uintmax_t size = std::filesystem::file_size(file, failure);
  HELIX_EXPECTS(!failure && size <= kMaxBytes, ErrorCode::invalid_file, file.string(), ": has ", size,
                " bytes; at most ", kMaxBytes, " are read");
  std::ifstream in(file, std::ios::binary);
  std::string text(size, '\0');
  in.read(text.data(), static_cast<std::streamsize>(size));
  HELIX_EXPECTS(in.good(), ErrorCode::io, file.string(), ": cannot be read");
  return text;
}

void write_text(const std::filesystem::path& file, std::string_view text) {
  std::ofstream out(file, std::ios::binary);
  out << text;
  out.close();
  HELIX_EXPECTS(out.good(), ErrorCode::io, file.string(), ": cannot be written");
}

}  // namespace helix::plan_cli
