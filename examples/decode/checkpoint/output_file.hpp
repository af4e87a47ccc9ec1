// SPDX-License-Identifier: Apache-2.0
// Output that is either whole or an error: files under their final name, and standard output.
#pragma once

#include <filesystem>
#include <string_view>

namespace helix::decode {

/// Checks before the work that write_output() may write to `path` after it. Changes nothing.
/// @throws Error(io) naming what is missing or not writable.
void check_output(const std::filesystem::path& path);

/// As check_output(), for a folder that is to be made with what is missing above it.
void check_output_folder(const std::filesystem::path& folder);

/// Writes `text` to `path`. A file appears or is replaced as a whole, by a file written beside it; after a
/// failure what was there is as before. Pipes, terminals and devices, /dev/stdout too, are written as they
/// are; a FIFO waits a minute for its reader. @throws Error(io) with the system's reason.
void write_output(const std::filesystem::path& path, std::string_view text);

/// Flushes standard output. @throws Error(io) if any of it was lost since the program started.
void flush_standard_output();

}  // namespace helix::decode
