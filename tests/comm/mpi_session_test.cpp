// SPDX-License-Identifier: Apache-2.0
// If a rank stops while MPI itself waits, the job ends within the time limit, and a rank is named.
#include <chrono>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;

struct Job {
  helix::test::Run run;
  double seconds = 0;
};

Job run_job(const std::string& way) {
  Job job;
  const auto begin = std::chrono::steady_clock::now();
  job.run = helix::test::run_command(HELIX_MPIRUN " " HELIX_MPI_RANK " " + way + " 2000", 20);
  job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return job;
}

/// Whether the launcher ended together with the job. In about one of thirty jobs that lose a rank while
/// others wait in its fence, which MPI_Init and MPI_Finalize are, Open MPI 4.1.4's mpirun itself crashes or
/// hangs.
bool is_ended(const Job& job) {
  return job.run.exit_code != 124 && job.run.exit_code < 128 && job.seconds < 12.0;
}

}  // namespace

TEST_CASE("a rank that stops inside a call of MPI ends the job") {
  struct Row {
    const char* way;
    const char* message;
  };
  for (const Row& row : {Row{"init", "world rank 0 has waited in MPI_Init for 2 s for a rank of 4 that"},
                         Row{"duplicate", "one of world ranks 0, 1, 2, 3 did not arrive within 2 s"},
                         Row{"absent", "MpiComm: world rank 2 did not arrive within 2 s; world rank"},
                         Row{"split", "has waited in MPI_Comm_split for 2 s"},
                         Row{"busy", "world rank 2 gave no sign of life for 2 s while world rank 0 waited"},
                         Row{"finalize", "world rank 0 has waited in MPI_Finalize for 2 s"}}) {
    DYNAMIC_SECTION(row.way) {
      const std::string way = row.way;
      int more_attempts = way == "init" || way == "finalize" ? 2 : 0;
      Job job = run_job(way);
      while (!is_ended(job) && more_attempts-- > 0) job = run_job(way);
      CAPTURE(job.run.exit_code, job.run.output, job.seconds);
      CHECK(job.run.exit_code != 0);
      CHECK_THAT(job.run.output, ContainsSubstring(row.message));
      CHECK(is_ended(job));
    }
  }
}

TEST_CASE("a rank that comes late to the end is waited for while it is alive, also if all were suspended") {
  for (const char* way : {"late", "suspended", "none"}) {
    const Job job = run_job(way);
    CAPTURE(way, job.run.output, job.seconds);
    CHECK(job.run.exit_code == 0);
    CHECK(job.run.output.find("helix: ") == std::string::npos);
  }
}
