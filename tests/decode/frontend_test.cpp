// SPDX-License-Identifier: Apache-2.0
// Frontend alone: what it reads, what it reports at the end, and a client that leaves.
#include "serve/frontend.hpp"

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <variant>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;
using decode::Frontend;
using std::chrono::milliseconds;

/// Both ends of a Frontend's pipes.
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
  /// May run on any thread. Ignores failures: the test waits for the text at the other end.
  void say(const std::string& text) const { (void)!write(in[1], text.data(), text.size()); }
};

/// Short lines that add up to `bytes`, or slightly more.
std::string lines_of(std::size_t bytes) {
  std::string lines;
  while (lines.size() < bytes) lines += "{\"stats\":true}\n";
  return lines;
}

/// A line in short form: the id of a request, the id of a cancelled one in brackets, or the error message.
std::string said(const decode::ParsedLine& line) {
  if (const auto* bad = std::get_if<decode::BadLine>(&line)) return bad->message;
  const auto& command = std::get<decode::ServeCommand>(line);
  if (const auto* request = std::get_if<decode::ServeRequest>(&command)) return request->id;
  if (const auto* cancel = std::get_if<decode::CancelCommand>(&command)) return "(" + cancel->id + ")";
  return "other";
}

/// The short forms of all lines up to the end of the input.
std::string said_by_all(Frontend& frontend) {
  std::string text;
  while (!frontend.has_ended()) {
    frontend.wait_for_line(milliseconds(1000));
    while (const std::optional<decode::ParsedLine> line = frontend.take_line()) text += said(*line) + "|";
  }
  return text;
}

TEST_CASE("lines come in order, the last without an end, and those of white space are none") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  frontend.start_reading({});
  pipes.say("{\"id\":\"a\",\"prompt\":[1]}\n\n \t\r\n{\"cancel\":\"a\"}\n[]\n{\"cancel\":\"b\"}");
  Pipes::shut(pipes.in[1]);
  CHECK_THAT(said_by_all(frontend), StartsWith("a|(a)|the line is an array") && EndsWith("|(b)|"));
  CHECK(frontend.finish().empty());
}

TEST_CASE("requests have the defaults that reading started with, and wait for it") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  pipes.say("{\"id\":\"a\",\"prompt\":[1]}\n");
  frontend.wait_for_line(milliseconds(300));
  CHECK_FALSE(frontend.take_line());
  frontend.start_reading({.sampling = {.temperature = 0.25f}, .penalties = {.presence = 2.0f}});
  frontend.wait_for_line(milliseconds(20000));
  const std::optional<decode::ParsedLine> line = frontend.take_line();
  REQUIRE(line);
  const auto& request = std::get<decode::ServeRequest>(std::get<decode::ServeCommand>(*line));
  CHECK(request.sampling.temperature == 0.25f);
  CHECK(request.penalties.presence == 2.0f);
}

TEST_CASE("a line that is too long is an error of its own, and the next one is read") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  frontend.start_reading({});
  std::thread client([&] {
    const std::string part(std::size_t{1} << 20, ' ');
    for (std::size_t sent = 0; sent <= Frontend::kMaxLineBytes; sent += part.size()) pipes.say(part);
    pipes.say("\n{\"cancel\":\"a\"}\n");
    Pipes::shut(pipes.in[1]);
  });
  CHECK(said_by_all(frontend) == "a line has more than 67108864 bytes; send shorter ones|(a)|");
  client.join();
}

TEST_CASE("the error of a line that is too long has the id that stands before the limit") {
  struct Row {
    std::string begin;
    std::size_t spaces;
    std::string end;
    const char* id;
  };
  const std::string id = R"("id":"a")";
  const std::size_t most = Frontend::kMaxLineBytes - 1 - id.size();
  for (const auto& [begin, spaces, end, expected] :
       {Row{"{" + id + ",", most, "}", "a"}, Row{"{", most, id + "}", "a"}, Row{"{", most + 1, id + "}", ""},
        Row{"{,", most, id + "}", ""}}) {
    Pipes pipes;
    Frontend frontend(pipes.in[0], pipes.out[1]);
    frontend.start_reading({});
    std::thread client([&, line = begin + std::string(spaces, ' ') + end + "\n"] {
      for (std::size_t sent = 0; sent < line.size(); sent += 65536) pipes.say(line.substr(sent, 65536));
    });
    std::optional<decode::ParsedLine> line;
    for (int i = 0; i < 60 && !line; ++i) {
      frontend.wait_for_line(milliseconds(1000));
      line = frontend.take_line();
    }
    client.join();
    REQUIRE(line);
    const auto* bad = std::get_if<decode::BadLine>(&*line);
    REQUIRE(bad != nullptr);
    INFO(begin << " " << spaces);
    CHECK(bad->id == expected);
    CHECK_THAT(bad->message, StartsWith("a line has more than 67108864 bytes"));
  }
}

TEST_CASE("the client is waited for until it has taken all, but not for longer than is said") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(100));
  frontend.write("a few bytes, for which the pipe has room\n");
  frontend.wait_until_written(milliseconds(20000));
  CHECK(frontend.backlog() == 0);
  frontend.write(std::string(std::size_t{1} << 20, 'x'));
  const auto begin = std::chrono::steady_clock::now();
  frontend.wait_until_written(milliseconds(300));
  const auto waited = std::chrono::steady_clock::now() - begin;
  CHECK(waited >= milliseconds(300));
  CHECK(waited < milliseconds(10000));
  CHECK(frontend.backlog() > 0);
}

TEST_CASE("the end says what a client that has not left did not read") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(300));
  frontend.write(std::string(std::size_t{1} << 20, 'x'));
  const std::string lost = frontend.finish();
  CHECK_THAT(lost, ContainsSubstring("nobody read standard output for 0.3 s at the end") &&
                       ContainsSubstring("bytes are lost"));
}

TEST_CASE("a decoder that was suspended waits for its client, which may have been suspended too") {
  constexpr std::size_t kBytes = 300000;  // more than a pipe holds
  Pipes pipes;
  const pid_t decoder = fork();
  REQUIRE(decoder >= 0);
  if (decoder == 0) {
    Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(2000));
    frontend.write(std::string(kBytes, 'x'));
    std::_Exit(frontend.finish().empty() ? 0 : 1);
  }
  Pipes::shut(pipes.out[1]);
  std::this_thread::sleep_for(milliseconds(300));
  REQUIRE(kill(decoder, SIGSTOP) == 0);
  std::this_thread::sleep_for(milliseconds(3000));
  REQUIRE(kill(decoder, SIGCONT) == 0);
  std::this_thread::sleep_for(milliseconds(300));
  std::size_t num_read = 0;
  std::string buffer(65536, '\0');
  for (ssize_t count = 1; count > 0; num_read += static_cast<std::size_t>(count))
    count = read(pipes.out[0], buffer.data(), buffer.size());
  CHECK(num_read == kBytes);
  int status = 0;
  REQUIRE(waitpid(decoder, &status, 0) == decoder);
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("without finish(), as after a failure, a client that reads nothing is waited for only briefly") {
  Pipes pipes;
  const auto begin = std::chrono::steady_clock::now();
  {
    Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(60000));
    frontend.start_reading({});
    frontend.write(std::string(std::size_t{1} << 20, 'x'));
  }
  CHECK(std::chrono::steady_clock::now() - begin < milliseconds(10000));
}

TEST_CASE("a client that reads nothing is waited for until its input has ended, and then for so long") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1], milliseconds(200));
  frontend.start_reading({});
  frontend.write(std::string(Frontend::kMaxBacklog + (std::size_t{1} << 20), 'x'));
  frontend.wait_for_client(milliseconds(500));
  CHECK(frontend.is_behind());
  CHECK_FALSE(frontend.is_client_gone());
  Pipes::shut(pipes.in[1]);
  frontend.wait_for_client(milliseconds(20000));
  CHECK(frontend.is_client_gone());
  CHECK_THAT(frontend.finish(), ContainsSubstring("nobody read standard output for 0.2 s at the end"));
}

TEST_CASE(
    "a client that reads nothing is given up although more lines than are kept hide the end of its input") {
  const ScratchDirectory scratch;
  write_file(scratch / "lines", lines_of(std::size_t{8} << 20));
  Pipes pipes;
  const int lines = open((scratch / "lines").c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(lines >= 0);
  Frontend frontend(lines, pipes.out[1], milliseconds(200));
  frontend.start_reading({});
  frontend.write(std::string(Frontend::kMaxBacklog + (std::size_t{1} << 20), 'x'));
  frontend.wait_for_client(milliseconds(20000));
  CHECK(frontend.is_client_gone());
  CHECK_FALSE(frontend.has_ended());
  CHECK_THAT(frontend.finish(), ContainsSubstring("nobody read standard output for 0.2 s at the end"));
  close(lines);
}

TEST_CASE("input that cannot be read is no end of it") {
  Pipes pipes;
  const int folder = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  REQUIRE(folder >= 0);
  Frontend frontend(folder, pipes.out[1]);
  frontend.start_reading({});
  frontend.wait_for_line(milliseconds(20000));
  CHECK(frontend.has_ended());
  CHECK_THAT(frontend.finish(), ContainsSubstring("standard input cannot be read: "));
  close(folder);
}

TEST_CASE("a client that leaves an idle decoder is seen") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  frontend.start_reading({});
  CHECK_FALSE(frontend.is_client_gone());
  Pipes::shut(pipes.out[0]);
  const auto begin = std::chrono::steady_clock::now();
  frontend.wait_for_line(milliseconds(20000));
  CHECK(frontend.is_client_gone());
  CHECK(std::chrono::steady_clock::now() - begin < milliseconds(10000));
  CHECK(frontend.finish().empty());
}

TEST_CASE("lines that nobody takes are left to the client, short ones too") {
  Pipes pipes;
  Frontend frontend(pipes.in[0], pipes.out[1]);
  frontend.start_reading({});
  const std::string lines = lines_of(std::size_t{1} << 16);
  // Each line takes 200 bytes of memory, so a few hundred thousand lines fill the Frontend's limit.
  std::size_t said = 0;
  REQUIRE(fcntl(pipes.in[1], F_SETFL, O_NONBLOCK) == 0);
  for (int waits = 0; waits < 50 && said < (std::size_t{16} << 20);) {
    const ssize_t count = write(pipes.in[1], lines.data(), lines.size());
    if (count > 0) {
      said += static_cast<std::size_t>(count);
      waits = 0;
    } else {
      usleep(10000);
      ++waits;
    }
  }
  CHECK(said < (std::size_t{8} << 20));
}

}  // namespace
}  // namespace helix::test
