// SPDX-License-Identifier: Apache-2.0
// Frontend alone: what it takes, what it says at the end, and a client that leaves.
#include "serve/frontend.hpp"

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::Contains;
using decode::Frontend;
using std::chrono::milliseconds;

/// Both ends of what a Frontend reads and writes.
struct Pipes {
  int in[2] = {-1, -1};
  int out[2] = {-1, -1};

  Pipes() {
    REQUIRE(pipe(in) == 0);
    REQUIRE(pipe(out) == 0);
  }
  ~Pipes() {
    for (int* end : {&in[0], &in[1], &out[0], &out[1]}) shut(*end);
  }
  Pipes(const Pipes&) = delete;
  Pipes& operator=(const Pipes&) = delete;

  static void shut(int& end) {
    if (end >= 0) close(end);
    end = -1;
  }
  void say(const std::string& text) const {
    REQUIRE(write(in[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
};

TEST_CASE("lines come in order, the last without an end") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  pipes.say("a\n\nb\nc");
  Pipes::shut(pipes.in[1]);
  std::string text;
  while (!frontend.has_ended()) {
    frontend.wait_for_line(milliseconds(1000));
    while (const std::optional<Frontend::Line> line = frontend.take_line()) text += line->text + "|";
  }
  CHECK(text == "a||b|c|");
  CHECK(frontend.finish().empty());
}

TEST_CASE("the end says what a client that has not left did not read") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(300));
  frontend.write(std::string(std::size_t{1} << 20, 'x'));
  const std::string lost = frontend.finish();
  CHECK_THAT(lost,
             Contains("nobody read standard output for 0.3 s at the end") && Contains("bytes are lost"));
}

TEST_CASE("a client that reads nothing is waited for until its input has ended, and then for so long") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(200));
  frontend.write(std::string(Frontend::kMaxBacklog + (std::size_t{1} << 20), 'x'));
  frontend.wait_for_client(milliseconds(500));
  CHECK(frontend.is_behind());
  CHECK_FALSE(frontend.is_client_gone());
  Pipes::shut(pipes.in[1]);
  frontend.wait_for_client(milliseconds(20000));
  CHECK(frontend.is_client_gone());
  CHECK_THAT(frontend.finish(), Contains("nobody read standard output for 0.2 s at the end"));
}

TEST_CASE(
    "a client that reads nothing is given up although more lines than are kept hide the end of its input") {
  const ScratchDirectory scratch;
  write_file(scratch / "lines", std::string(std::size_t{3} << 20, '\n'));
  Pipes pipes;
  const int lines = open((scratch / "lines").c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(lines >= 0);
  Frontend frontend(lines, pipes.out[1], milliseconds(200));
  frontend.write(std::string(Frontend::kMaxBacklog + (std::size_t{1} << 20), 'x'));
  frontend.wait_for_client(milliseconds(20000));
  CHECK(frontend.is_client_gone());
  CHECK_FALSE(frontend.has_ended());
  CHECK_THAT(frontend.finish(), Contains("nobody read standard output for 0.2 s at the end"));
  close(lines);
}

TEST_CASE("input that cannot be read is no end of it") {
  Pipes pipes;
  const int folder = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  REQUIRE(folder >= 0);
  Frontend frontend(folder, pipes.out[1]);
  frontend.wait_for_line(milliseconds(20000));
  CHECK(frontend.has_ended());
  CHECK_THAT(frontend.finish(), Contains("standard input cannot be read: "));
  close(folder);
}

TEST_CASE("a client that leaves an idle decoder is seen") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  CHECK_FALSE(frontend.is_client_gone());
  Pipes::shut(pipes.out[0]);
  const auto begin = std::chrono::steady_clock::now();
  frontend.wait_for_line(milliseconds(20000));
  CHECK(frontend.is_client_gone());
  CHECK(std::chrono::steady_clock::now() - begin < milliseconds(10000));
  CHECK(frontend.finish().empty());
}

TEST_CASE("lines that nobody takes are left to the client, empty ones too") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  const std::string lines(std::size_t{1} << 16, '\n');
  // What is kept of an empty line is 40 bytes, so a few million fill what a Frontend keeps.
  std::size_t said = 0;
  REQUIRE(fcntl(pipes.in[1], F_SETFL, O_NONBLOCK) == 0);
  for (int waits = 0; waits < 50 && said < (std::size_t{8} << 20);) {
    const ssize_t count = write(pipes.in[1], lines.data(), lines.size());
    if (count > 0) {
      said += static_cast<std::size_t>(count);
      waits = 0;
    } else {
      usleep(10000);
      ++waits;
    }
  }
  CHECK(said < (std::size_t{4} << 20));
}

}  // namespace
}  // namespace helix::test
