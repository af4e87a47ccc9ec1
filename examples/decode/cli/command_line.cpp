// SPDX-License-Identifier: Apache-2.0
// CLI11, extended by counts and by error messages that say what to do.
#include "cli/command_line.hpp"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <iostream>
#include <span>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <helix/error.hpp>
#include <helix/version.hpp>

#include "cli/counts.hpp"

namespace helix::decode {
namespace {

/// The option name in lower case, without leading dashes and with dashes instead of underscores.
std::string plain(std::string_view name) {
  name.remove_prefix(std::min(name.find_first_not_of('-'), name.size()));
  std::string text(name);
  for (char& c : text) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// The edit distance from `b` to `a`. Inserting or leaving out a letter, or swapping two neighbours, costs
/// one; replacing a letter costs two. Leaving letters out is the usual mistake: "max-token" is nearer to
/// --max-new-tokens than to --page-tokens.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      const bool is_same = a[i - 1] == b[j - 1];
      edits[i][j] =
          std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, edits[i - 1][j - 1] + (is_same ? 0 : 2)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  }
  return edits[a.size()][b.size()];
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

/// Throws for a word on the command line that is neither an option nor the value of one.
[[noreturn]] void throw_unexpected(const CLI::App& app, const std::vector<std::string>& extras) {
  const auto option = std::find_if(extras.begin(), extras.end(),
                                   [](const std::string& text) { return text.starts_with('-'); });
  HELIX_EXPECTS(option != extras.end(), ErrorCode::invalid_argument, "'", extras.front(),
                "' belongs to no option; see --help");
  const std::string name = option->substr(0, option->find('='));
  const std::string nearest = nearest_name(name, option_names(app));
  throw Error(ErrorCode::invalid_argument, name, " is unknown",
              nearest.empty() ? std::string("; see --help") : "; did you mean " + nearest + "?");
}

/// CLI11's own message only counts the values that it required and received.
void expect_given_once(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->get_items_expected_max() != 1 || option->count() < 2) continue;
    const std::string times = option->count() == 2 ? "twice" : fmt::format("{} times", option->count());
    throw Error(ErrorCode::invalid_argument, option->get_name(), " is given ", times, " (",
                fmt::format("{}", fmt::join(option->results(), ", ")), "); give it once");
  }
}

/// Refuses a value for an option that takes none, such as --serve=no: CLI11 reads it as a number or a truth.
void expect_bare_flags(const CLI::App& app, std::span<const char* const> arguments) {
  for (const std::string_view argument : arguments) {
    const std::size_t end = argument.find('=');
    if (!argument.starts_with("--") || end == std::string_view::npos) continue;
    const std::string name(argument.substr(0, end));
    const CLI::Option* const option = app.get_option_no_throw(name);
    HELIX_EXPECTS(option == nullptr || option->get_items_expected_max() > 0, ErrorCode::invalid_argument,
                  name, " takes no value, and is given '", argument.substr(end + 1), "'; give ", name,
                  " alone, or drop it");
  }
}

/// Whether the option's value is a whole number.
bool is_whole(const CLI::Option& option) {
  return option.get_type_name().find("INT") != std::string::npos;
}

/// Whether `text` is a whole number in decimal: -?(0|[1-9][0-9]*).
bool is_decimal(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  return is_number && (text.size() == 1 || text.front() != '0');
}

/// Refuses values that CLI11 misreads. It takes an empty value for 0 or for no value, a whole number that
/// begins with 0 for octal, even behind a sign or a space, and other numbers in hexadecimal too.
void expect_values(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->count() == 0 || option->get_items_expected_max() == 0) continue;
    const std::vector<std::string> values = option->results();
    HELIX_EXPECTS(std::ranges::find(values, "") == values.end(), ErrorCode::invalid_argument,
                  option->get_name(), " is empty; give a value, or drop it");
    for (const std::string& value : values) {
      HELIX_EXPECTS(option->get_type_name() != "FLOAT" || value.find_first_of("xX") == std::string::npos,
                    ErrorCode::invalid_argument, option->get_name(), " is ", value,
                    "; write numbers in decimal");
      if (!is_whole(*option)) continue;
      HELIX_EXPECTS(is_decimal(value), ErrorCode::invalid_argument, option->get_name(), " is ", value,
                    "; write whole numbers in decimal, without a 0, a + or a space before");
    }
  }
}

/// Reports a value that CLI11 could not convert; the message names the option and its value.
[[noreturn]] void throw_unconverted(const CLI::App& app, const CLI::ConversionError& error) {
  const std::string text = error.what();
  for (const CLI::Option* const option : app.get_options()) {
    if (option->count() == 0 || text.find(option->get_name() + " = ") == std::string::npos) continue;
    throw Error(ErrorCode::invalid_argument, option->get_name(), " is ",
                fmt::format("{}", fmt::join(option->results(), ", ")), "; expected ",
                is_whole(*option) ? "a whole number of moderate size" : "a number");
  }
  throw Error(ErrorCode::invalid_argument, text, "; see --help");
}

}  // namespace

CLI::Option* as_count(CLI::Option* option) {
  return option
      ->transform(CLI::Validator(
          [](std::string& text) -> std::string {
            try {
              text = std::to_string(parse_count(text));
            } catch (const Error& error) {
              return error.what();
            }
            return "";
          },
          ""))
      ->type_name("COUNT");
}

std::string version_text(std::string_view program) {
#ifdef HELIX_DECODE_HAS_CUDA
  constexpr const char* kCuda = "yes";
#else
  constexpr const char* kCuda = "no";
#endif
#ifdef HELIX_DECODE_HAS_MPI
  constexpr const char* kMpi = "yes";
#else
  constexpr const char* kMpi = "no";
#endif
  return fmt::format("{} {}.{}.{} (CUDA: {}, MPI: {})", program, HELIX_VERSION_MAJOR, HELIX_VERSION_MINOR,
                     HELIX_VERSION_PATCH, kCuda, kMpi);
}

bool parse_command_line(CLI::App& app, int argc, const char* const* argv) {
  app.set_version_flag("--version", version_text(app.get_name()), "print the version and what is built in");
  expect_bare_flags(app, {argv, static_cast<std::size_t>(argc)});
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::CallForVersion& version) {
    std::cout << version.what() << '\n';
    return false;
  } catch (const CLI::ParseError& error) {
    // Unknown options come first: an option that seems missing or wrong may follow from a misspelt name.
    const std::vector<std::string> extras = app.remaining();
    if (!extras.empty()) throw_unexpected(app, extras);
    expect_given_once(app);
    if (const auto* const unconverted = dynamic_cast<const CLI::ConversionError*>(&error))
      throw_unconverted(app, *unconverted);
    throw Error(ErrorCode::invalid_argument, error.what(), "; see --help");
  }
  expect_values(app);
  return true;
}

std::string nearest_name(std::string_view wrong, const std::vector<std::string>& names) {
  const std::string given = plain(wrong);
  std::string nearest;
  std::size_t fewest = 0;
  for (const std::string& name : names) {
    const std::string other = plain(name);
    const std::size_t edits = distance(given, other);
    // A name counts as near only if most of its letters stay.
    if (5 * edits > 2 * std::max(given.size(), other.size())) continue;
    if (nearest.empty() || edits < fewest) {
      nearest = name;
      fewest = edits;
    }
  }
  return nearest;
}

}  // namespace helix::decode
