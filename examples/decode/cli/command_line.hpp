// SPDX-License-Identifier: Apache-2.0
// What the command lines of the programs have in common: counts, --version, and errors of one line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

// CLI11's, so that only those who declare options include it.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace helix::decode {

/// Makes the option take a count as parse_count() reads it; its range may be checked after it.
CLI::Option* as_count(CLI::Option* option);

/// What --help says of counts.
inline constexpr const char* kCountsHelp =
    "COUNT is a whole number; 1e6 is 1000000, and K, M, G are powers of 1024: 128K is 131072, 1M is 1048576.";

/// The version of the program and what is built into it, one line.
std::string version_text(std::string_view program);

/// Parses the command line of `app`, and knows --version. Returns false after --help and --version, which it
/// prints. @throws Error(invalid_argument) naming the option; one that is unknown with the nearest that
/// there is, and one whose value is empty.
bool parse_command_line(CLI::App& app, int argc, const char* const* argv);

/// The name that `wrong` may have meant, without regard to dashes, case and underscores; empty where none is
/// near.
std::string nearest_name(std::string_view wrong, const std::vector<std::string>& names);

}  // namespace helix::decode
