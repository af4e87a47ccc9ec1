// SPDX-License-Identifier: Apache-2.0
// Output that is either complete or an error: files that appear as a whole, and standard output.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace helix::decode {

/// A file and what names it for messages: "--json", or "config.json of --model".
struct NamedFile {
  std::string name;
  std::filesystem::path path;
};

/// Checks that writing `output` replaces none of `others`, which need not exist. Pipes and devices may be
/// named more than once.
/// @throws Error(invalid_argument) with both names and the path.
void check_replaces_none(const NamedFile& output, std::span<const NamedFile> others);

/// Checks, before the work is done, that write_output() will be able to write to `path`. Changes nothing.
/// @throws Error(io) naming what is missing or not writable.
void check_output(const std::filesystem::path& path);

/// Like check_output(), for a folder that will be created together with its missing parents.
void check_output_folder(const std::filesystem::path& folder);

/// Writes `text` to `path`. A regular file appears or is replaced as a whole, through a temporary file in the
/// same folder; after a failure the old file is unchanged. Pipes, terminals and devices, including
/// /dev/stdout, are written directly; a FIFO waits one minute for a reader.
/// @throws Error(io) with the system's reason.
void write_output(const std::filesystem::path& path, std::string_view text);

/// Flushes standard output.
/// @throws Error(io) if any output was lost since the program started.
void flush_standard_output();

}  // namespace helix::decode
