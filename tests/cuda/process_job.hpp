// SPDX-License-Identifier: Apache-2.0
// A job of processes started by a test: this program again, once per rank.
#pragma once

#include <string>
#include <vector>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <helix/contract/communicator.hpp>

#include "support/free_port.hpp"

namespace helix::test {

/// Starts `size` processes of this program that run its hidden test "one rank of a job", with HELIX_TEST_JOB
/// = `job` and the variables of torchrun. Returns their process ids.
inline std::vector<pid_t> start_job(int size, const std::string& job) {
  const std::string port = std::to_string(free_port());
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> variables = {"HELIX_TEST_JOB=" + job,
                                          "RANK=" + std::to_string(rank),
                                          "WORLD_SIZE=" + std::to_string(size),
                                          "LOCAL_RANK=" + std::to_string(rank),
                                          "MASTER_ADDR=127.0.0.1",
                                          "MASTER_PORT=" + port};
    std::vector<char*> environment;
    for (std::string& variable : variables) environment.push_back(variable.data());
    for (char** variable = environ; *variable != nullptr; ++variable) environment.push_back(*variable);
    environment.push_back(nullptr);
    std::string program = "/proc/self/exe";
    std::string test = "one rank of a job";
    char* arguments[] = {program.data(), test.data(), nullptr};
    pid_t child = 0;
    contract::require(
        ::posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environment.data()) == 0,
        "cannot start a rank");
    ranks.push_back(child);
  }
  return ranks;
}

/// The exit codes of the processes, or 128 plus the signal that ended them.
inline std::vector<int> wait_for_job(const std::vector<pid_t>& ranks) {
  std::vector<int> codes;
  for (const pid_t rank : ranks) {
    int status = 0;
    ::waitpid(rank, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

inline std::vector<int> run_job(int size, const std::string& job) {
  return wait_for_job(start_job(size, job));
}

}  // namespace helix::test
