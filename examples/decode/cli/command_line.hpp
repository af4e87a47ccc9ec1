// SPDX-License-Identifier: Apache-2.0
// What the programs' command lines share: counts, --version, and errors of one line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

// Forward declaration of CLI11's App, so that only files that declare options include CLI11.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace helix::decode {

/// Makes the option accept a count in the syntax of parse_count(). A range check may be added afterwards.
CLI::Option* as_count(CLI::Option* option);

/// The text about counts in --help.
inline constexpr const char* kCountsHelp =
    "COUNT is a whole number; 1e6 is 1000000, and K, M, G are powers of 1024: 128K is 131072, 1M is 1048576.";

/// One line with the version of the program and the features built into it.
std::string version_text(std::string_view program);

/// Parses the command line of `app`, including --version. Returns false after --help and --version, which it
/// prints.
/// @throws Error(invalid_argument) naming the option; for an unknown option it also names the nearest known
/// one, and an empty value or a value of a flag is an error too.
bool parse_command_line(CLI::App& app, int argc, const char* const* argv);

/// The name in `names` that `wrong` may have meant, ignoring dashes, case and underscores; empty if none is
/// near.
std::string nearest_name(std::string_view wrong, const std::vector<std::string>& names);

}  // namespace helix::decode
