// SPDX-License-Identifier: Apache-2.0
// However a rank fails under mpirun, the whole job ends soon, with a non-zero exit code and one line that
// names the rank.
#include <chrono>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace {

struct Job {
  helix::test::Run run;
  double seconds = 0;
};

Job run_job(const std::string& way) {
  // `timeout` returns 124 for a job that it had to end.
  const std::string command = HELIX_MPIRUN " " HELIX_MPI_RANK " " + way;
  Job job;
  const auto begin = std::chrono::steady_clock::now();
  job.run = helix::test::run_command(command, 40);
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
      CAPTURE(job.run.output, job.seconds);
      CHECK(job.run.exit_code != 0);
      CHECK(job.run.exit_code != 124);
      CHECK(count(job.run.output, row.message) == 1);
      CHECK(count(job.run.output, "helix: world rank") == 1);
    }
  }
}

TEST_CASE("a rank that dies without a word ends the whole MPI job") {
  for (const char* way : {"exit", "terminate"}) {
    DYNAMIC_SECTION(way) {
      const Job job = run_job(way);
      CAPTURE(job.run.output, job.seconds);
      CHECK(job.run.exit_code != 0);
      CHECK(job.run.exit_code != 124);
    }
  }
}
