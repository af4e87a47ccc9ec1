// SPDX-License-Identifier: Apache-2.0
// Ranks are killed or stopped under mpirun at any moment. The job ends in time, either with an error that
// names the rank or with the right tokens, and leaves no process behind. A serving job tells its client.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "decode/golden.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4;
constexpr int kDeadlineSeconds = 3;
constexpr milliseconds kBound{2 * kDeadlineSeconds * 1000};
constexpr milliseconds kSlack{6000};  // time for mpirun to start and to clean up on a busy machine

milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

const std::string kGenerate = " --prompt-ids 1,2,3,4,5 --max-new-tokens 1000 --ignore-eos";

/// A job under mpirun. Its processes are found by a mark in their environment.
class MpiJob {
 public:
  /// `input` is a descriptor that the caller keeps; -1: none.
  explicit MpiJob(const ScratchDirectory& scratch, const std::string& arguments = kGenerate, int input = -1)
      : mark_("HELIX_FAULT_JOB=" + std::to_string(::getpid()) + "." + std::to_string(++count_)),
        output_(scratch / "output.txt") {
    const std::string command =
        with_safe_paths(std::string("exec " HELIX_MPIRUN " " HELIX_DECODE " --model ") +
                        (data_directory() / "llama-tiny").string() + arguments +
                        " --kvp 2 --tpa 2 --timeout " + std::to_string(kDeadlineSeconds));
    launcher_ = ::fork();
    REQUIRE(launcher_ >= 0);
    if (launcher_ == 0) {
      const int out = ::open(output_.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
      ::dup2(input >= 0 ? input : ::open("/dev/null", O_RDONLY), 0);
      ::dup2(out, 1);
      ::dup2(out, 2);
      ::putenv(mark_.data());
      ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      ::_exit(127);
    }
  }

  ~MpiJob() {
    if (!exit_code_) ::kill(launcher_, SIGKILL);
    for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
    if (!exit_code_) ::waitpid(launcher_, nullptr, 0);
  }
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  /// The exit code, or 128 + signal; nullopt if the job still runs after `time`.
  std::optional<int> wait(milliseconds time) {
    const Clock::time_point deadline = Clock::now() + time;
    while (!exit_code_) {
      int status = 0;
      if (::waitpid(launcher_, &status, WNOHANG) == launcher_) {
        exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      } else if (Clock::now() >= deadline) {
        return std::nullopt;
      } else {
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
    return exit_code_;
  }

  /// The process of `rank`, if it has started and not ended.
  std::optional<pid_t> process_of(int rank) const {
    const std::vector<pid_t> found = processes("OMPI_COMM_WORLD_RANK=" + std::to_string(rank));
    return found.empty() ? std::nullopt : std::optional(found.front());
  }

  /// Number of ranks that have started and not ended.
  int num_ranks() const {
    int count = 0;
    for (int rank = 0; rank < kRanks; ++rank) count += process_of(rank) ? 1 : 0;
    return count;
  }

  /// All processes of the job that also have `variable`.
  std::vector<pid_t> processes(const std::string& variable = "") const {
    std::vector<pid_t> found;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string environment = '\0' + read_file(entry.path() / "environ");
      const auto has = [&](const std::string& text) {
        return environment.find('\0' + text + '\0') != std::string::npos;
      };
      if (has(mark_) && (variable.empty() || has(variable)))
        found.push_back(static_cast<pid_t>(std::stol(name)));
    }
    return found;
  }

  std::string output() const { return read_file(output_); }

 private:
  inline static int count_ = 0;
  std::string mark_;
  std::filesystem::path output_;
  pid_t launcher_ = -1;
  std::optional<int> exit_code_;
};

/// The lines of the output that contain tokens.
std::string tokens_in(const std::string& output) {
  std::string tokens;
  for (std::size_t at = output.find("sequence "); at != std::string::npos;
       at = output.find("sequence ", at + 1))
    tokens += output.substr(at, output.find('\n', at) - at + 1);
  return tokens;
}

/// Whether the output contains "rank N", or N in a list after "ranks", because ranks that wait for N do not
/// arrive either.
bool names_rank(const std::string& output, int rank) {
  std::string words = output;
  std::replace(words.begin(), words.end(), '\n', ' ');
  const std::regex named("ranks? (\\d+, )*" + std::to_string(rank) + "\\b");
  return std::regex_search(words, named);
}

/// Sends `signal` to random ranks of `count` jobs at random moments.
void attack(int count, unsigned seed) {
  const ScratchDirectory scratch;
  std::string expected;
  milliseconds life{0};
  {
    MpiJob job(scratch);
    const Clock::time_point start = Clock::now();
    REQUIRE(job.wait(std::chrono::seconds(60)) == 0);
    life = since(start);
    expected = tokens_in(job.output());
    REQUIRE(!expected.empty());
  }
  std::mt19937 random(seed);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int num_hit = 0;
  int num_hung = 0;  // launchers that did not end after a kill
  for (int i = 0; i < count; ++i) {
    const int rank = draw(0, kRanks - 1);
    const int signal = draw(0, 1) == 0 ? SIGKILL : SIGSTOP;
    const milliseconds moment(draw(0, static_cast<int>(life.count())));
    MpiJob job(scratch);
    std::this_thread::sleep_for(moment);
    std::optional<pid_t> victim;
    while (!(victim = job.process_of(rank)) && !job.wait(milliseconds(1))) continue;
    if (victim) ::kill(*victim, signal);
    const Clock::time_point hit = Clock::now();
    const std::optional<int> exit_code = job.wait(kBound + kSlack);
    const std::string output = job.output();
    INFO("job " << i << " of seed " << seed << ": signal " << signal << " to rank " << rank << " after "
                << moment.count() << " ms; ended " << since(hit).count() << " ms later");
    INFO(output);
    const bool is_named = names_rank(output, rank) || output.find("waited in MPI_") != std::string::npos;
    // Inside MPI's own collective calls (MPI_Init, MPI_Comm_split) no rank can know which one is missing. If
    // a rank is killed before it has begun, only the launcher reports it, not always by name.
    const bool is_early = signal == SIGKILL && output.find("helix") == std::string::npos;
    const bool is_right = tokens_in(output) == expected;
    if (!exit_code) {
      // Open MPI 4.1.4's mpirun waits for a stopped rank, and sometimes hangs although all ranks have ended
      // (one of 60 jobs whose rank 0 is killed while mpirun still connects it; see mpi_session_test too).
      // What matters is that no rank waits.
      REQUIRE(job.num_ranks() <= (signal == SIGSTOP ? 1 : 0));
      CHECK((is_named || is_early || is_right));
      ++num_hit;
      num_hung += signal == SIGKILL ? 1 : 0;
      continue;
    }
    if (*exit_code == 0) {
      CHECK(is_right);
    } else {
      ++num_hit;
      CHECK((is_named || is_early));
    }
    for (int wait = 0; wait < 100 && !job.processes().empty(); ++wait)
      std::this_thread::sleep_for(milliseconds(20));
    CHECK(job.processes().empty());
  }
  CHECK(num_hung <= 1 + count / 20);
  CHECK(num_hit >=
        // The other jobs ended before their moment, which is set too late if the first job is slow.
        count / 4);
}

/// Sends `line` to the job that reads `input`.
void say(int input, const std::string& line) {
  std::signal(SIGPIPE, SIG_IGN);  // the job may have ended; the test notices that from missing output
  const std::string text = line + "\n";
  CHECK(::write(input, text.data(), text.size()) == std::ssize(text));
}

/// Whether `done` becomes true in time.
template <class Done>
bool becomes_true(milliseconds longest, const Done& done) {
  const Clock::time_point deadline = Clock::now() + longest;
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(20));
  }
  return true;
}

/// Number of events of this kind for this request; each is a line of JSON.
int num_events(const std::string& output, const std::string& kind, const std::string& id) {
  const std::string begin = R"({"event":")" + kind + R"(","id":")" + id + '"';
  int count = 0;
  for (std::size_t at = 0; (at = output.find(begin, at)) != std::string::npos; ++at) ++count;
  return count;
}

/// Stops `rank` of a serving job, with requests that run, that wait, and that arrive afterwards.
void stop_rank_of_server(int rank) {
  CAPTURE(rank);
  const ScratchDirectory scratch;
  std::array<int, 2> input{};
  REQUIRE(::pipe2(input.data(), O_CLOEXEC) == 0);
  MpiJob job(scratch, " --serve --max-sequences 2", input[0]);
  ::close(input[0]);
  const auto ask = [&](const std::string& id) {
    say(input[1], R"({"id":")" + id + R"(","prompt":[1,2,3],"max_tokens":8000,"ignore_eos":true})");
  };
  for (const char* id : {"a", "b", "waits"}) ask(id);
  const auto run = [&] {
    const std::string events = job.output();
    return num_events(events, "token", "a") > 0 && num_events(events, "token", "b") > 0;
  };
  REQUIRE(becomes_true(milliseconds(60000), run));
  const std::optional<pid_t> victim = job.process_of(rank);
  REQUIRE(victim);
  ::kill(*victim, SIGSTOP);
  ask("late");
  const auto has_told = [&] { return job.output().find("helix: world rank") != std::string::npos; };
  CHECK(becomes_true(kBound + kSlack, has_told));
  const std::optional<int> exit_code = job.wait(kSlack);
  ::close(input[1]);
  const std::string output = job.output();
  INFO(output.substr(std::min(output.size(), output.find(R"({"event":"error")"))));
  if (exit_code) CHECK(*exit_code == 1);  // otherwise mpirun waits for the stopped rank
  for (const char* id : {"a", "b", "waits", "late"}) {
    CAPTURE(id);
    CHECK(num_events(output, "error", id) == 1);
    CHECK(num_events(output, "end", id) == 0);
  }
  CHECK(output.find(R"("message":"the decoder failed: )") != std::string::npos);
}

TEST_CASE("process faults: a rank of a serving job stands still, and each request ends with an error",
          "[mpi]") {
  for (const int rank : {1, 3}) stop_rank_of_server(rank);
}

TEST_CASE("process faults: a killed or stopped rank ends its job", "[mpi]") {
  attack(4, 1);
}

TEST_CASE("process faults: a hundred of them", "[full]") {
  attack(100, 2);
}

}  // namespace
}  // namespace helix::test
