// SPDX-License-Identifier: Apache-2.0
// However a rank fails under mpirun, the whole job ends soon, with a non-zero exit and one line that names
// the rank.
#include <array>
#include <chrono>
#include <cstdio>
#include <string>

#include <sys/wait.h>

#include "support/catch.hpp"

namespace {

struct Job {
  int status = -1;
  std::string output;
  double seconds = 0;
};

Job run_job(const std::string& way) {
  // 124 is how `timeout` reports a job that it had to end.
  const std::string command =
      "timeout --kill-after=5 40 " HELIX_MPIRUN " " HELIX_MPI_RANK " " + way + " 2>&1";
  Job job;
  const auto begin = std::chrono::steady_clock::now();
  std::FILE* pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 512> chunk;
  while (const std::size_t read = std::fread(chunk.data(), 1, chunk.size(), pipe))
    job.output.append(chunk.data(), read);
  const int status = ::pclose(pipe);
  job.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return job;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace

TEST_CASE("a failing rank ends the whole MPI job with one message") {
  struct Row {
    const char* way;
    const char* message;
  };
  for (const Row& row : {Row{"throw", "helix: world rank 2 failed: bad rank"},
                         Row{"stream", "helix: world rank 2 failed: bad task"},
                         Row{"leave", "helix: world rank 2 failed: an exception left main()"},
                         Row{"all", "helix: world rank 0 failed: all ranks agree to fail"},
                         Row{"absent", "failed: barrier: world rank 2 did not arrive within 1 s"}}) {
    DYNAMIC_SECTION(row.way) {
      const Job job = run_job(row.way);
      CAPTURE(job.output, job.seconds);
      CHECK(job.status != 0);
      CHECK(job.status != 124);
      CHECK(count(job.output, row.message) == 1);
      CHECK(count(job.output, "helix: world rank") == 1);
    }
  }
}

TEST_CASE("a rank that dies without a word ends the whole MPI job") {
  for (const char* way : {"exit", "terminate"}) {
    DYNAMIC_SECTION(way) {
      const Job job = run_job(way);
      CAPTURE(job.output, job.seconds);
      CHECK(job.status != 0);
      CHECK(job.status != 124);
    }
  }
}
