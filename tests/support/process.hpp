// SPDX-License-Identifier: Apache-2.0
// Programs run as a user runs them, and the files that they read and write.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <sys/wait.h>

#include "support/catch.hpp"

namespace helix::test {

struct Run {
  int exit_code = -1;  ///< 128 + the signal that ended it
  std::string output;  ///< standard output and error together
};

/// Runs `command`, a program with its arguments, through a shell; killed after `seconds`, with exit code 124.
inline Run run_command(const std::string& command, int seconds = 120) {
  const std::string limited = "timeout -k 5 " + std::to_string(seconds) + " " + command + " 2>&1 < /dev/null";
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

/// A directory that goes away with the test.
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
