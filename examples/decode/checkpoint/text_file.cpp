// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/text_file.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <system_error>

#include <helix/error.hpp>

namespace helix::decode {

std::string read_text(const std::filesystem::path& file) {
  constexpr std::uintmax_t kMaxBytes = 100'000'000;
  std::error_code failure;
  const std::uintmax_t size = std::filesystem::file_size(file, failure);
  HELIX_EXPECTS(!failure, ErrorCode::io, file.string(), ": cannot open: ", failure.message());
  HELIX_EXPECTS(size <= kMaxBytes, ErrorCode::invalid_file, file.string(), ": has ", size,
                " bytes; expected at most ", kMaxBytes);
  std::ifstream in(file, std::ios::binary);
  HELIX_EXPECTS(in.good(), ErrorCode::io, file.string(), ": cannot open: ", std::strerror(errno));
  std::string text(static_cast<std::size_t>(size), '\0');
  in.read(text.data(), static_cast<std::streamsize>(size));
  HELIX_EXPECTS(in.gcount() == static_cast<std::streamsize>(size), ErrorCode::io, file.string(), ": read ",
                in.gcount(), " of ", size, " bytes");
  return text;
}

void write_text(const std::filesystem::path& file, std::string_view text) {
  std::ofstream out(file, std::ios::binary);
  out << text;
  out.close();
  HELIX_EXPECTS(out.good(), ErrorCode::io, file.string(), ": cannot be written");
}

}  // namespace helix::decode
