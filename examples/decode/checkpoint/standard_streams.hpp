// SPDX-License-Identifier: Apache-2.0
// The standard streams, which may be closed, full or somebody's file.
#pragma once

#include <string_view>

namespace helix::decode {

/// Opens /dev/null for each of standard input, output and error that is closed: the first files that are
/// opened would take their numbers. What is written to such a standard output still fails. A write to a pipe
/// that nobody reads any more, or beyond the limit of a file's size, fails too from now on, and sends no
/// signal. For programs, first in main.
void prepare_standard_streams();

/// Writes `text` to standard error. Where it cannot be written nobody is left to hear of it.
void print_error(std::string_view text) noexcept;

}  // namespace helix::decode
