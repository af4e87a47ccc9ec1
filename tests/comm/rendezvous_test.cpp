// SPDX-License-Identifier: Apache-2.0
// The rendezvous with strangers: silent ones, ones that speak other protocols, other jobs. Needs no GPU.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>

#include "comm/bootstrap_job.hpp"
#include "comm/bootstrap_messages.hpp"
#include "comm/rank_names.hpp"
#include "comm/socket.hpp"
#include "comm/strangers.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::Error;
using helix::ErrorCode;
using helix::comm::Bootstrap;
using helix::comm::BootstrapOptions;
using helix::test::expect;
using helix::test::first_words_of_strangers;
using helix::test::free_port;
using helix::test::Outcome;
using helix::test::run_bootstrap_job;
using helix::test::Stranger;

namespace {

using Resolver = int (*)(const char*, const char*, const addrinfo*, addrinfo**);

}  // namespace

/// Replaces the system's function, so that no test waits for a name server. "unknown" does not exist, "own"
/// is a machine that its hosts table maps to 127.0.1.1, and "twice" stands in two lines of it.
extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  static const auto next = reinterpret_cast<Resolver>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string_view wanted = name == nullptr ? "" : name;
  if (!wanted.ends_with(".helix.test")) return next(name, service, hints, found);
  if (wanted == "unknown.helix.test" || (hints->ai_flags & AI_NUMERICHOST) != 0) return EAI_NONAME;
  if (wanted == "own.helix.test") return next("127.0.1.1", service, hints, found);
  if (const int status = next("127.0.0.1", service, hints, found); status != 0) return status;
  return wanted == "twice.helix.test" ? next("127.0.0.1", service, hints, &(*found)->ai_next) : 0;
}

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// What becomes of a process with these options that only meets the others.
Outcome outcome_of(const BootstrapOptions& options) {
  try {
    Bootstrap bootstrap(options);
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

/// Lowers the limit of this process's open files for a while.
class FewOpenFiles {
 public:
  explicit FewOpenFiles(rlim_t limit) {
    // Sanitizers open files to check objects of a type that they have not seen. So they see those of errors
    // before there are none left.
    expect(!helix::comm::words_of(EMFILE).empty(), "no words of an errno");
    expect(outcome_of({.rank = 2, .size = 2}).code == ErrorCode::invalid_argument, "rank 2 of 2 was taken");
    expect(::getrlimit(RLIMIT_NOFILE, &before_) == 0, "getrlimit");
    const rlimit few{.rlim_cur = limit, .rlim_max = before_.rlim_max};
    expect(::setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
  }
  FewOpenFiles(const FewOpenFiles&) = delete;
  FewOpenFiles& operator=(const FewOpenFiles&) = delete;
  ~FewOpenFiles() { (void)::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

/// A rank 0 that accepts the two connections of one rank and then stays silent.
class MuteRank0 {
 public:
  MuteRank0() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port_));
    const int on = 1;
    ::setsockopt(listener_.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    expect(::bind(listener_.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, "bind");
    expect(::listen(listener_.fd(), 2) == 0, "listen");
    thread_ = std::thread([this] {
      for (Socket& visitor : visitors_) accept_into(visitor);
    });
  }
  ~MuteRank0() { thread_.join(); }
  int port() const { return port_; }

 private:
  using Socket = helix::comm::Socket;

  void accept_into(Socket& visitor) {
    using namespace helix::comm;
    if (!wait_for(listener_.fd(), POLLIN, deadline_after(5s))) return;
    visitor = Socket(::accept(listener_.fd(), nullptr, nullptr));
    const Challenge challenge;
    send_all(visitor.fd(), &challenge, sizeof(challenge), deadline_after(5s), kKeepWaiting);
    Hello hello;
    recv_all(visitor.fd(), &hello, sizeof(hello), deadline_after(5s), kKeepWaiting);
    Reply reply;
    reply.proof = JobKey{}.proof_of(reply, challenge, hello.process);
    send_all(visitor.fd(), &reply, sizeof(reply), deadline_after(5s), kKeepWaiting);
  }

  int port_ = free_port();
  Socket listener_{::socket(AF_INET, SOCK_STREAM, 0)};
  std::array<Socket, 2> visitors_;
  std::thread thread_;
};

}  // namespace

TEST_CASE("strangers who came first neither end a job nor count as its ranks nor hold it up") {
  const int port = free_port();
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> num_connected = 0;
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      3,
      [&](const BootstrapOptions& options) {
        std::vector<Stranger> strangers;
        if (options.rank == 1) {
          for (int round = 0; round < 3; ++round) {
            for (const std::string& words : first_words_of_strangers()) {
              strangers.emplace_back(options.port, words);
              num_connected += strangers.back().is_connected();
            }
          }
        }
        if (options.rank == 2) std::this_thread::sleep_for(300ms);
        Bootstrap bootstrap(options);
        bootstrap.barrier();
      },
      6s, port);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
  CHECK(num_connected == 36);
  CHECK(seconds_since(start) < 3.0);
}

TEST_CASE("a process with another secret or of another job is told so, and the job goes on without it") {
  struct Row {
    const char* name;
    void (*change)(BootstrapOptions&);
  };
  for (const Row& row : {Row{"another secret", [](BootstrapOptions& o) { o.secret = "guess"; }},
                         Row{"no secret", [](BootstrapOptions& o) { o.secret = ""; }},
                         Row{"another job", [](BootstrapOptions& o) { o.job = "8"; }},
                         Row{"all of another job", [](BootstrapOptions& o) {
                               o.job = "8";
                               o.size = 64;
                               o.config_hash = 1;
                             }}}) {
    DYNAMIC_SECTION(row.name) {
      const auto start = std::chrono::steady_clock::now();
      Outcome stranger;
      const std::vector<Outcome> outcomes = run_bootstrap_job(3, [&](BootstrapOptions options) {
        options.secret = "open sesame";
        options.job = "7";
        if (options.rank == 2) {  // a process that believes it is a rank of this job comes first
          BootstrapOptions other = options;
          row.change(other);
          try {
            Bootstrap bootstrap(other);
          } catch (const Error& error) {
            stranger = {error.code(), error.what()};
          }
        }
        Bootstrap bootstrap(options);
        bootstrap.barrier();
      });
      for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
      CHECK(stranger.code == ErrorCode::invalid_argument);
      CHECK_THAT(stranger.message,
                 ContainsSubstring("does not know rank 2 of") && ContainsSubstring("HELIX_JOB_SECRET"));
      CHECK(seconds_since(start) < 2.0);
    }
  }
}

TEST_CASE("two jobs on one port refuse each other") {
  const int port = free_port();
  std::atomic<int> num_refused = 0;
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      4,
      [&](BootstrapOptions options) {
        const bool is_first_job = options.rank < 2;
        options.rank %= 2;
        options.size = 2;
        options.job = is_first_job ? "first" : "second";
        if (is_first_job && options.rank == 1) {  // its rank 0 listens until then
          for (int i = 0; i < 300 && num_refused < 2; ++i) std::this_thread::sleep_for(10ms);
        }
        if (!is_first_job) std::this_thread::sleep_for(200ms);  // its rank 0 finds the port in use
        try {
          Bootstrap bootstrap(options);
          bootstrap.barrier();
        } catch (...) {
          ++num_refused;
          throw;
        }
      },
      5s, port);
  CHECK(outcomes[0].message == "");
  CHECK(outcomes[1].message == "");
  CHECK(outcomes[2].code == ErrorCode::io);
  CHECK_THAT(outcomes[2].message, ContainsSubstring("cannot listen on port " + std::to_string(port)));
  CHECK_THAT(outcomes[3].message, ContainsSubstring("another job"));
}

TEST_CASE("a timeout counts the strangers beside the ranks that are missing") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      3,
      [](BootstrapOptions options) {
        options.secret = options.rank == 1 ? "guess" : "open sesame";
        if (options.rank < 2) Bootstrap bootstrap(options);
      },
      500ms);
  CHECK(outcomes[0].code == ErrorCode::timeout);
  CHECK_THAT(outcomes[0].message,
             ContainsSubstring("ranks 1, 2 of 3 did not connect") &&
                 ContainsSubstring("1 other connections were no ranks of this job, 1 of them") &&
                 ContainsSubstring("secret"));
}

TEST_CASE("silent strangers leave the ranks the open files that these need") {
  const int port = free_port();
  const pid_t rank_0 = ::fork();
  if (rank_0 == 0) {
    try {
      const FewOpenFiles few(64);
      Bootstrap bootstrap({.rank = 0, .size = 12, .port = port, .timeout = 20s});
      bootstrap.barrier();
    } catch (const Error& error) {
      (void)!::write(STDERR_FILENO, error.what(), std::string_view(error.what()).size());
      ::_exit(1);
    }
    ::_exit(0);  // after the farewell, which ranks that are still in the barrier look for
  }
  std::atomic<int> num_connected = 0;
  const auto come_silently = [&](std::vector<Stranger>& crowd) {
    for (int i = 0; i < 80; ++i) {
      crowd.emplace_back(port, "", i == 0 ? 10s : 0s);  // once somebody listens
      num_connected += crowd.back().is_connected();
    }
  };
  std::vector<Stranger> first;
  come_silently(first);
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      12,
      [&](const BootstrapOptions& options) {
        if (options.rank == 0) return;  // the other process
        std::vector<Stranger> second;
        if (options.rank == 11) {
          std::this_thread::sleep_for(200ms);  // the others have come
          come_silently(second);
        }
        Bootstrap bootstrap(options);
        bootstrap.barrier();
      },
      20s, port);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
  int status = 0;
  CHECK((::waitpid(rank_0, &status, 0) == rank_0 && status == 0));
  CHECK(num_connected == 160);
}

TEST_CASE("a job whose ranks need more open files than rank 0 may have ends soon, with the numbers") {
  const auto start = std::chrono::steady_clock::now();
  const auto check_numbers = [](const Outcome& outcome, const std::string& limit) {
    CHECK(outcome.code == ErrorCode::io);
    CHECK_THAT(outcome.message, ContainsSubstring("rank 0 of 100 needs 206 open files (198 connections") &&
                                    ContainsSubstring(" left of its limit of " + limit + ";") &&
                                    ContainsSubstring("ulimit -n"));
  };
  {
    const FewOpenFiles few(64);
    const std::vector<Outcome> outcomes = run_bootstrap_job(3, [](BootstrapOptions options) {
      options.size = 100;
      Bootstrap bootstrap(options);
    });
    for (const Outcome& outcome : outcomes) check_numbers(outcome, "64");
  }
  CHECK(seconds_since(start) < 15.0);  // and not the timeout of 20
  const int port = free_port();
  const FewOpenFiles none(1);  // not even one to listen with
  check_numbers(outcome_of({.rank = 0, .size = 100, .port = port}), "1");
}

TEST_CASE("connections that rank 0 cannot accept are not said to be missing") {
  const int port = free_port();
  Outcome outcome;
  std::thread rank_0([&] { outcome = outcome_of({.rank = 0, .size = 2, .port = port, .timeout = 1s}); });
  CHECK(Stranger(port, "").is_connected());  // it listens now
  const helix::comm::Socket late(::socket(AF_INET, SOCK_STREAM, 0));
  int connected = -1;
  {
    const FewOpenFiles none(3);  // the standard streams; and poll() takes no more entries than the limit
    sockaddr_in target{};
    target.sin_family = AF_INET;
    target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    target.sin_port = htons(static_cast<std::uint16_t>(port));
    connected = ::connect(late.fd(), reinterpret_cast<const sockaddr*>(&target), sizeof(target));
    rank_0.join();
  }
  CHECK(connected == 0);
  CHECK(outcome.code == ErrorCode::io);
  CHECK_THAT(outcome.message,
             ContainsSubstring("rank 1 of 2 could not be admitted within 1 s: connections wait on port " +
                               std::to_string(port)) &&
                 ContainsSubstring(helix::comm::words_of(EMFILE)));
}

TEST_CASE("a message names up to 16 ranks, and what follows them stays") {
  std::vector<int> ranks;
  std::string names;
  for (int rank = 1; rank <= 16; ++rank) {
    ranks.push_back(rank);
    names += (rank > 1 ? ", " : "") + std::to_string(rank);
  }
  CHECK(helix::comm::rank_names(std::array{2}) == "rank 2");
  CHECK(helix::comm::rank_names(ranks) == "ranks " + names);
  ranks.push_back(99);
  CHECK(helix::comm::rank_names(ranks) == "ranks " + names + " and 1 more");

  const int port = free_port();
  const Outcome outcome = outcome_of({.rank = 0, .size = 200, .port = port, .timeout = 200ms});
  CHECK(outcome.code == ErrorCode::timeout);
  CHECK(outcome.message == "bootstrap: ranks " + names +
                               " and 183 more of 200 did not connect to rank 0 on port " +
                               std::to_string(port) + " within 0.2 s");
}

TEST_CASE("a rank that leaves before all have come ends the rendezvous soon, and is named") {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Outcome> outcomes = run_bootstrap_job(4, [](const BootstrapOptions& options) {
    if (options.rank == 3) return;
    if (options.rank < 2) {
      Bootstrap bootstrap(options);
      return;
    }
    std::this_thread::sleep_for(100ms);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(1);  // dies while it waits for the verdict
      try {
        Bootstrap bootstrap(options);
      } catch (...) {
      }
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
  });
  for (const int rank : {0, 1}) {
    CHECK(outcomes[static_cast<std::size_t>(rank)].code == ErrorCode::peer_failed);
    CHECK_THAT(outcomes[static_cast<std::size_t>(rank)].message,
               ContainsSubstring("rank 2 of 4 closed its connection before all ranks had come"));
  }
  CHECK(seconds_since(start) < 6.0);
}

TEST_CASE("a rank 0 that stands still in the rendezvous is waited for less than twice the timeout") {
  for (const auto& [timeout, waited] : {std::pair(300ms, "0.45 s"), std::pair(400ms, "0.6 s")}) {
    const MuteRank0 rank_0;
    const auto start = std::chrono::steady_clock::now();
    Outcome outcome;
    try {
      Bootstrap bootstrap({.rank = 1, .size = 2, .port = rank_0.port(), .timeout = timeout});
    } catch (const Error& error) {
      outcome = {error.code(), error.what()};
    }
    CHECK(outcome.code == ErrorCode::timeout);
    CHECK_THAT(outcome.message, ContainsSubstring("did not answer rank 1 within " + std::string(waited)));
    CHECK(seconds_since(start) < 1.0);  // less than the two seconds of longer timeouts
  }
}

TEST_CASE("strangers after the rendezvous are ignored") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(2, [](const BootstrapOptions& options) {
    Bootstrap bootstrap(options);
    bootstrap.barrier();
    if (options.rank == 1) {
      for (const std::string& words : first_words_of_strangers()) {
        helix::test::Stranger late(options.port, words, 0ms);
        expect(!late.is_connected(), "somebody still listens");
      }
    }
    bootstrap.barrier();
  });
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("strangers who say anything, seeded, do not disturb a rendezvous") {
  using namespace helix::comm;
  std::mt19937_64 random(20250607);
  const int port = free_port();
  std::atomic<bool> is_over = false;
  std::thread noise([&] {
    std::vector<Stranger> crowd;
    while (!is_over) {
      // A hello with some bytes changed, cut off or appended.
      Hello hello{.channel = random() % 2 == 0 ? Channel::control : Channel::watch,
                  .rank = static_cast<std::int32_t>(random() % 5),
                  .size = static_cast<std::int32_t>(random() % 5)};
      std::string bytes(reinterpret_cast<const char*>(&hello), sizeof(hello));
      for (std::uint64_t change = random() % 4; change > 0; --change)
        bytes[random() % bytes.size()] = static_cast<char>(random());
      bytes.resize(random() % (2 * bytes.size()), static_cast<char>(random()));
      crowd.emplace_back(port, bytes, 0ms);
      if (crowd.size() > 300) crowd.erase(crowd.begin(), crowd.begin() + 100);
      std::this_thread::sleep_for(500us);
    }
  });
  for (int round = 0; round < 10; ++round) {
    const std::vector<Outcome> outcomes = run_bootstrap_job(
        3,
        [&](BootstrapOptions options) {
          options.secret = "open sesame";
          std::this_thread::sleep_for(std::chrono::milliseconds(20 * options.rank));
          Bootstrap bootstrap(options);
          bootstrap.barrier();
        },
        10s, port);
    INFO("round " << round);
    for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
  }
  is_over = true;
  noise.join();
}

TEST_CASE("messages of no process of ours are not read") {
  using namespace helix::comm;
  const auto bytes_of_message = [](const auto& message) { return std::as_bytes(std::span(&message, 1)); };
  CHECK(read_hello(bytes_of_message(Hello{})));
  CHECK(read_challenge(bytes_of_message(Challenge{})));
  CHECK(read_reply(bytes_of_message(Reply{})));
  CHECK(read_verdict(bytes_of_message(Verdict{})));
  CHECK(read_beat(bytes_of_message(Beat{})));
  CHECK(!read_hello(bytes_of_message(Hello{}).first(sizeof(Hello) - 1)));
  CHECK(!read_hello(bytes_of_message(Hello{.magic = 1})));
  CHECK(!read_hello(bytes_of_message(Hello{.channel = static_cast<Channel>(2)})));
  CHECK(!read_challenge(bytes_of_message(Challenge{.magic = 1})));
  CHECK(!read_reply(bytes_of_message(Reply{.answer = static_cast<Answer>(7)})));
  CHECK(!read_verdict(bytes_of_message(Verdict{.error_code = -2})));
  CHECK(!read_verdict(bytes_of_message(Verdict{.error_code = 1000})));
  Verdict endless;
  endless.text.fill('x');
  CHECK(!read_verdict(bytes_of_message(endless)));
  CHECK(!read_beat(bytes_of_message(Beat{.kind = static_cast<BeatKind>(9)})));
  CHECK(!read_beat(bytes_of_message(Beat{.rank = -1})));
  Beat unnamed;
  unnamed.operation.fill('x');
  CHECK(!read_beat(bytes_of_message(unnamed)));
}

TEST_CASE("HMAC-SHA-256 gives the values of RFC 4231, and a proof fits one key, challenge and message") {
  using namespace helix::comm;
  const auto hex = [](const Digest& digest) {
    std::string text;
    for (const std::uint8_t byte : digest) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    return text;
  };
  CHECK(hex(Sha256().finish()) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), bytes_of("Hi There"))) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", bytes_of("what do ya want for nothing?"))) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'),
                        bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  const JobKey key{.secret = "open sesame", .name = "7"};
  const Challenge challenge{.nonce = {1, 2, 3}};
  Hello hello{.rank = 1, .size = 2};
  hello.proof = key.proof_of(hello, challenge, hello.process);
  CHECK(key.is_proven(hello, challenge, hello.process));
  CHECK(!key.is_proven(hello, Challenge{.nonce = {1, 2, 4}}, hello.process));
  CHECK(!JobKey{"open sesam", "e7"}.is_proven(hello, challenge, hello.process));
  CHECK(!JobKey{"open sesame", "8"}.is_proven(hello, challenge, hello.process));
  hello.rank = 2;
  CHECK(!key.is_proven(hello, challenge, hello.process));
}

TEST_CASE("rank 0 listens where its address says, and says what to do where that is not its own") {
  const auto start_alone = [](BootstrapOptions options) {
    options.size = 2;
    options.port = free_port();
    options.timeout = 300ms;
    try {
      Bootstrap bootstrap(options);
    } catch (const Error& error) {
      return Outcome{error.code(), error.what()};
    }
    return Outcome{};
  };
  const Outcome foreign = start_alone({.address = "192.0.2.1"});
  CHECK(foreign.code == ErrorCode::io);
  CHECK_THAT(foreign.message,
             ContainsSubstring("MASTER_ADDR is \"192.0.2.1\", which is no address of rank 0's machine") &&
                 ContainsSubstring("HELIX_LISTEN_ADDR"));
  const Outcome unknown = start_alone({.address = "unknown.helix.test"});
  CHECK(unknown.code == ErrorCode::io);
  CHECK_THAT(unknown.message, ContainsSubstring("cannot resolve MASTER_ADDR \"unknown.helix.test\""));
  // It listens, so that only rank 1 is missing.
  const Outcome elsewhere = start_alone({.address = "192.0.2.1", .listen_address = "0.0.0.0"});
  CHECK(elsewhere.code == ErrorCode::timeout);
  CHECK_THAT(elsewhere.message, ContainsSubstring("rank 1 of 2 did not connect"));

  const auto meets_at = [](const std::string& address, const std::string& way_of_rank_1, bool is_one_machine,
                           std::chrono::milliseconds timeout = 20s) {
    std::string text;
    for (const Outcome& outcome : run_bootstrap_job(
             2,
             [&](BootstrapOptions options) {
               options.address = options.rank == 0 ? address : way_of_rank_1;
               options.is_one_machine = is_one_machine;
               Bootstrap bootstrap(options);
             },
             timeout)) {
      text += outcome.message;
    }
    return text;
  };
  CHECK(meets_at("localhost", "localhost", false) == "");
  CHECK(meets_at("twice.helix.test", "127.0.0.1", true) == "");
  CHECK_THAT(meets_at("127.0.0.2", "127.0.0.1", false, 700ms), ContainsSubstring("did not connect"));
  // If a machine's own name maps to 127.0.1.1 in its hosts table, other machines reach it by another address.
  CHECK(meets_at("own.helix.test", "127.0.0.1", false) == "");
  CHECK(meets_at("own.helix.test", "own.helix.test", true) == "");
  CHECK_THAT(meets_at("own.helix.test", "127.0.0.1", true, 700ms), ContainsSubstring("did not connect"));
}

TEST_CASE("the secret comes from a variable or a file, the job's name from the launcher") {
  const auto options_from = [](const std::vector<std::pair<const char*, std::string>>& variables) {
    for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
    const auto restore = [&](void*) {
      for (const auto& [name, value] : variables) ::unsetenv(name);
    };
    const std::unique_ptr<void, decltype(restore)> guard(const_cast<char*>(""), restore);
    return BootstrapOptions::from_environment();
  };
  const helix::test::ScratchDirectory scratch;
  helix::test::write_file(scratch / "secret", "open sesame\n");
  helix::test::write_file(scratch / "empty", "\n");
  const std::string file = (scratch / "secret").string();
  const BootstrapOptions torchrun = options_from({{"RANK", "0"},
                                                  {"WORLD_SIZE", "2"},
                                                  {"LOCAL_WORLD_SIZE", "2"},
                                                  {"TORCHELASTIC_RUN_ID", "run-7"},
                                                  {"SLURM_JOB_ID", "9"},
                                                  {"HELIX_LISTEN_ADDR", "0.0.0.0"},
                                                  {"HELIX_JOB_SECRET_FILE", file}});
  CHECK((torchrun.job == "run-7" && torchrun.secret == "open sesame"));
  CHECK((torchrun.listen_address == "0.0.0.0" && torchrun.is_one_machine));
  const BootstrapOptions slurm = options_from({{"SLURM_PROCID", "0"},
                                               {"SLURM_NTASKS", "2"},
                                               {"SLURM_LOCALID", "0"},
                                               {"SLURM_JOB_ID", "9"},
                                               {"SLURM_STEP_ID", "1"},
                                               {"MASTER_ADDR", "host"},
                                               {"HELIX_JOB_SECRET", "s"}});
  CHECK((slurm.job == "9/1" && slurm.secret == "s" && !slurm.is_one_machine));
  const std::vector<std::pair<const char*, std::string>> two = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}};
  const auto refused = [&](std::vector<std::pair<const char*, std::string>> variables) {
    variables.insert(variables.end(), two.begin(), two.end());
    try {
      (void)options_from(variables);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_THAT(refused({{"HELIX_JOB_SECRET", "s"}, {"HELIX_JOB_SECRET_FILE", file}}),
             ContainsSubstring("both set"));
  CHECK_THAT(refused({{"HELIX_JOB_SECRET", ""}}), ContainsSubstring("HELIX_JOB_SECRET has 0 bytes"));
  CHECK_THAT(refused({{"HELIX_JOB_SECRET_FILE", (scratch / "empty").string()}}),
             ContainsSubstring("has 0 bytes"));
  CHECK_THAT(refused({{"HELIX_JOB_SECRET_FILE", (scratch / "none").string()}}),
             ContainsSubstring("cannot be opened"));
  REQUIRE(::mkfifo((scratch / "fifo").c_str(), 0600) == 0);
  for (const std::string& irregular :
       {(scratch / "fifo").string(), (scratch / ".").string(), std::string("/dev/zero")}) {
    CHECK_THAT(refused({{"HELIX_JOB_SECRET_FILE", irregular}}),
               ContainsSubstring("\"" + irregular + "\", which is not a regular file"));
  }
  helix::test::write_file(scratch / "longest", std::string(4096, 'x') + "\r\n");
  helix::test::write_file(scratch / "too long", std::string(4097, 'x') + "\n");
  helix::test::write_file(scratch / "huge", std::string(4096, 'x') + std::string(1'000'000, '\n') + "y");
  CHECK(refused({{"HELIX_JOB_SECRET_FILE", (scratch / "longest").string()}}) == "");
  CHECK_THAT(refused({{"HELIX_JOB_SECRET_FILE", (scratch / "too long").string()}}),
             ContainsSubstring("has 4097 bytes"));
  CHECK_THAT(refused({{"HELIX_JOB_SECRET_FILE", (scratch / "huge").string()}}),
             ContainsSubstring("has 1004097 bytes; a secret of 1 to 4096"));
}

namespace {

/// Comes to rank 0 as rank 1 of 2, over one channel only.
void come_by_one_channel(int port) {
  using namespace helix::comm;
  const Stranger visitor(port, "");
  Challenge challenge;
  recv_all(visitor.fd(), &challenge, sizeof(challenge), deadline_after(5s), kKeepWaiting);
  Hello hello{.channel = Channel::control, .rank = 1, .size = 2};
  hello.proof = JobKey{}.proof_of(hello, challenge, hello.process);
  send_all(visitor.fd(), &hello, sizeof(hello), deadline_after(5s), kKeepWaiting);
  Verdict verdict;
  recv_all(visitor.fd(), &verdict, sizeof(verdict), deadline_after(5s), kKeepWaiting);
}

}  // namespace

TEST_CASE("a rank that has come by one of its two connections has not come") {
  const int port = free_port();
  std::thread rank_1([&] { come_by_one_channel(port); });
  const Outcome outcome = outcome_of({.rank = 0, .size = 2, .port = port, .timeout = 700ms});
  rank_1.join();
  CHECK(outcome.code == ErrorCode::timeout);
  CHECK_THAT(outcome.message, ContainsSubstring("rank 1 of 2 did not connect to rank 0"));
}

TEST_CASE("ranks beyond those that rank 0 knows hear of the other size too") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      4,
      [](BootstrapOptions options) {
        if (options.rank == 0) options.size = 2;
        if (options.rank > 1) std::this_thread::sleep_for(300ms);
        Bootstrap bootstrap(options);
      },
      5s);
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.code == ErrorCode::invalid_argument);
    CHECK_THAT(outcome.message, ContainsSubstring("says the job has 4 ranks, rank 0 says 2"));
  }
}

TEST_CASE("what listens in rank 0's place without the job's secret is not taken for rank 0") {
  using namespace helix::comm;
  const MuteRank0 other;  // proves the empty secret
  const Outcome outcome =
      outcome_of({.rank = 1, .size = 2, .port = other.port(), .secret = "of the job", .timeout = 700ms});
  CHECK(outcome.code == ErrorCode::timeout);
  CHECK_THAT(outcome.message, ContainsSubstring("could not connect to rank 0"));
}
