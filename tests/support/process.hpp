// SPDX-License-Identifier: Apache-2.0
// Runs programs as a user does, with the files that they read and write.
#pragma once

#include <array>
#include <cctype>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/wait.h>

#include "support/catch.hpp"

namespace helix::test {

struct Run {
  int exit_code = -1;  ///< 128 + the signal that ended the process
  std::string output;  ///< standard output and standard error together
};

/// `text` with each `what` replaced by `by`.
inline std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
    text.replace(at, what.size(), by);
  return text;
}

/// A shell command that was written without regard to spaces in this project's paths, made safe for them.
inline std::string with_safe_paths(std::string command) {
  for (const std::string folder : {HELIX_TEST_BINARY_DIR, HELIX_TEST_SOURCE_DIR}) {
    std::string safe;
    for (const char c : folder) {
      const bool is_plain =
          std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("/._-+", c) != nullptr;
      if (!is_plain) safe += '\\';
      safe += c;
    }
    if (safe != folder) command = replaced(std::move(command), folder, safe);
  }
  return command;
}

/// Runs `command`, a program with its arguments, through a shell. It is killed after `seconds`, with exit
/// code 124.
inline Run run_command(const std::string& command, int seconds = 120) {
  const std::string limited =
      "timeout -k 5 " + std::to_string(seconds) + " " + with_safe_paths(command) + " 2>&1 < /dev/null";
  Run run;
  std::FILE* pipe = popen(limited.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> chunk;
  while (const std::size_t n = std::fread(chunk.data(), 1, chunk.size(), pipe))
    run.output.append(chunk.data(), n);
  const int status = pclose(pipe);
  run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return run;
}

/// Arguments of a program, and the words that its one-line error must contain.
struct BadInput {
  std::string arguments;
  std::vector<std::string> words;
};

/// Checks that `program`, which calls itself `name`, exits with 1 for each input, with one error line at the
/// end of its output that contains the words.
inline void check_refused(const std::string& program, const std::string& name,
                          const std::vector<BadInput>& cases) {
  for (const BadInput& bad : cases) {
    const Run run = run_command(program + " " + bad.arguments);
    INFO(bad.arguments << "\n" << run.output);
    CHECK(run.exit_code == 1);
    const std::size_t message = run.output.find(name + ": ");
    REQUIRE(message != std::string::npos);
    CHECK(run.output.find('\n', message) == run.output.size() - 1);
    CHECK(run.output.find('\x1b') == std::string::npos);
    for (const std::string& word : bad.words)
      CHECK_THAT(run.output.substr(message), Catch::Matchers::ContainsSubstring(word));
  }
}

/// A directory that is deleted at the end of the test.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "helix-test-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  /// Writes a file and returns its path.
  std::string write(const std::string& name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace helix::test
