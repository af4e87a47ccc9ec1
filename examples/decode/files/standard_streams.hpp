// SPDX-License-Identifier: Apache-2.0
// Prepares the standard streams, which may be closed, full or redirected to a file.
#pragma once

#include <string_view>

namespace helix::decode {

/// Opens /dev/null for each of standard input, output and error that is closed; otherwise the first opened
/// files would get these descriptors. Writing to a standard output that was closed still fails. Also ignores
/// the signals for writing to a pipe without a reader and beyond the file size limit, so that such writes
/// fail with an error. Call it first in main of a program.
void prepare_standard_streams();

/// Writes `text` to standard error. Ignores failures: there is nowhere left to report them.
void print_error(std::string_view text) noexcept;

}  // namespace helix::decode
