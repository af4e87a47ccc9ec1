// SPDX-License-Identifier: Apache-2.0
// Untrusted files that block, shrink, lie about their size or are slow to read on purpose: each costs one
// Error, and little time and memory.
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <helix/error.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/mapped_file.hpp"
#include "decode/model_on_disk.hpp"
#include "files/strict_json.hpp"
#include "files/text_file.hpp"
#include "files/token_lists.hpp"
#include "model/weight_plan.hpp"
#include "model/weight_stream.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

using namespace helix;
using namespace helix::decode;
using namespace helix::decode::test;
using helix::test::required_failure;

namespace {

/// Loads `plan` like a backend whose memory is the host's.
void load_in_memory(const WeightPlan& plan) {
  std::vector<std::vector<std::byte>> buffers;
  std::vector<std::byte*> addresses;
  for (const std::int64_t bytes : plan.buffer_bytes) {
    buffers.emplace_back(static_cast<std::size_t>(bytes));
    addresses.push_back(buffers.back().data());
  }
  cpu::ThreadPool threads(2);
  load_weights(plan, addresses, threads, {});
}

std::string repeated(const std::string& text, std::size_t bytes) {
  std::string result;
  while (result.size() < bytes) result += text;
  return result;
}

/// Documents of one megabyte: with many values per byte, with the deepest legal nesting, with keys to
/// compare.
std::vector<std::string> large_documents() {
  constexpr std::size_t kBytes = 1'000'000;
  std::string keys;
  for (int i = 0; keys.size() < kBytes; ++i) keys.append("\"").append(std::to_string(i)).append("\":1,");
  const auto array = [](const std::string& element) {
    return std::string("[").append(repeated(element + ",", kBytes)).append(element).append("]");
  };
  return {array("{}"),
          array("[]"),
          array("1"),
          array("\"\""),
          array("{\"a\":{\"a\":{\"a\":[[[[[[[[]]]]]]]]}}}"),
          "{" + keys + "\"\":1}",
          repeated("[", kBytes),
          repeated("{\"a\":", kBytes),
          "\"" + repeated("x", kBytes) + "\"",
          repeated(" ", kBytes)};
}

/// Passes `text` to every reader of JSON and ignores the results.
void read_as_everything(const std::string& text) {
  const auto try_to = [](const auto& parse) {
    try {
      parse();
    } catch (const Error&) {
    }
  };
  try_to([&] { parse_strict_json(text, "f"); });
  try_to([&] { parse_weight_map(text, "f"); });
  try_to([&] { parse_weight_map("{\"weight_map\":" + text + "}", "f"); });
  try_to([&] { parse_token_lists(text, "f"); });
  try_to([&] { parse_token_lists("[" + text + "]", "f"); });
}

/// Calls `call` in a child process. Returns the child's wait() status and what it wrote to standard error.
std::pair<int, std::string> in_child(const std::function<void()>& call) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    call();
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string said;
  char buffer[256];
  for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, n);
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return {status, said};
}

/// Writes config.json and a model.safetensors whose data is a hole in the file. Sizes are in elements of
/// bf16.
void write_sparse(const ScratchDirectory& directory, const nlohmann::json& config,
                  const std::vector<std::pair<std::string, std::vector<std::int64_t>>>& tensors) {
  std::string header = "{";
  std::int64_t end = 0;
  for (const auto& [name, shape] : tensors) {
    std::int64_t bytes = 2;
    for (const std::int64_t extent : shape) bytes *= extent;
    header += (end == 0 ? "\"" : ",\"") + name +
              "\":{\"dtype\":\"BF16\",\"shape\":" + nlohmann::json(shape).dump() + ",\"data_offsets\":[" +
              std::to_string(end) + "," + std::to_string(end + bytes) + "]}";
    end += bytes;
  }
  directory.write("config.json", config.dump());
  const std::string path = directory.write("model.safetensors", safetensors_bytes(header + "}", ""));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + static_cast<std::uintmax_t>(end));
}

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a megabyte of any JSON is read in time linear in its size", "[quick]") {
  for (const std::string& text : large_documents()) {
    CAPTURE(text.substr(0, 40));
    CHECK(seconds_of([&] { read_as_everything(text); }) < 10);  // five readers, perhaps under a sanitizer
  }
  CHECK_NOTHROW(parse_strict_json("[" + repeated("{},", 3 * 60000) + "{}]", "f"));
  CHECK_THAT(required_failure([] { parse_strict_json("[" + repeated("1,", 200000) + "1]", "f"); }).what,
             Catch::Matchers::ContainsSubstring("more than 65536"));
}

TEST_CASE("a megabyte of any JSON is read in 50 ms and 20 MB") {
  for (const std::string& text : large_documents()) {
    CAPTURE(text.substr(0, 40));
    const auto [status, said] = in_child([&] {
      const auto resident_kb = [] {
        rusage usage{};
        ::getrusage(RUSAGE_SELF, &usage);
        return usage.ru_maxrss;
      };
      const auto processor_ms = [] { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; };
      const long before_kb = resident_kb();
      double best_ms = 1e9;
      for (int i = 0; i < 5; ++i) {
        const double before_ms = processor_ms();
        try {
          parse_strict_json(text, "f");
        } catch (const Error&) {
        }
        best_ms = std::min(best_ms, processor_ms() - before_ms);
      }
      if (best_ms > 50) std::fprintf(stderr, "%.1f ms", best_ms);
      if (resident_kb() - before_kb > 20'000) std::fprintf(stderr, "%ld KB", resident_kb() - before_kb);
    });
    CHECK(status == 0);
    CHECK(said.empty());
  }
}

TEST_CASE("keys that appear twice are found at every depth", "[quick]") {
  for (const std::string text :
       {R"({"a":1,"b":2,"a":3})", R"({"a":{"b":[{"c":1,"c":1}]}})", R"([{"a":1},{"a":{},"a":[]}])"}) {
    CHECK_THAT(
        required_failure([&] { parse_strict_json(text, "f.json"); }).what,
        Catch::Matchers::ContainsSubstring("f.json") && Catch::Matchers::ContainsSubstring("appears twice"));
  }
  CHECK(parse_strict_json(R"([{"a":1,"b":[1,-2,2.5,"x",null,true,{}]},{"a":{"a":[]}}])", "f") ==
        nlohmann::json::parse(R"([{"a":1,"b":[1,-2,2.5,"x",null,true,{}]},{"a":{"a":[]}}])"));
  CHECK(parse_weight_map(
            R"({"x":[{"weight_map":1}],"weight_map":{"t":"f"},"metadata":{"weight_map":{"u":7}}})", "f")
            .size() == 1);
  CHECK_THAT(required_failure([] {
               parse_weight_map(R"({"weight_map":{"t":"f"},"weight_map":{"u":"f"}})", "f");
             }).what,
             Catch::Matchers::ContainsSubstring("weight_map appears twice"));
}

TEST_CASE("lists of tokens are read exactly and refused by entry", "[quick]") {
  CHECK(parse_token_lists("[]", "p").empty());
  CHECK(parse_token_lists("[[], [1, -2,2147483647,-2147483648]]", "p") ==
        std::vector<std::vector<std::int32_t>>{
            {}, {1, -2, 2147483647, std::numeric_limits<std::int32_t>::min()}});
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not valid JSON"},
      {"{}", "is an object; expected a JSON array of arrays"},
      {"7", "is the number 7; expected a JSON array"},
      {"[[1],2]", "entry 1 is the number 2, not an array"},
      {"[[1],\"x\"]", "entry 1 is the string 'x', not an array"},
      {"[[1],{}]", "entry 1 is an object"},
      {"[[1],[2,[3]]]", "entry 1 holds an array, not a token id"},
      {"[[2147483648]]", "entry 0 holds the number 2147483648"},
      {"[[-2147483649]]", "entry 0 holds the number -2147483649"},
      {"[[1.0]]", "entry 0 holds the number '1.0'"},
      {"[[true]]", "entry 0 holds a boolean"},
      {"[[1]", "not valid JSON"},
      {"[[1]]x", "not valid JSON"}};
  for (const auto& [text, says] : cases) {
    CAPTURE(text);
    const auto [code, message] = required_failure([&, text = text] { parse_token_lists(text, "p.json"); });
    CHECK(code == ErrorCode::invalid_file);
    CHECK_THAT(message,
               Catch::Matchers::ContainsSubstring("p.json") && Catch::Matchers::ContainsSubstring(says));
  }
}

TEST_CASE("a text on one line shows its control characters", "[quick]") {
  CHECK(one_line("a b\tc\nd\r\x1b[0m\x7f") == "a b\\tc\\nd\\x0d\\x1b[0m\\x7f");
  CHECK(one_line(std::string_view("\0\xc3\xa4", 3)) == "\\x00\xc3\xa4");
  CHECK(one_line("") == "");
}

TEST_CASE("what is no JSON is told by byte, by line where there are several, and by what is expected",
          "[quick]") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"",
       "f: not valid JSON at byte 1: 'syntax error while parsing value - unexpected end of input; expected"},
      {"[1,\n2,\n",
       "f: not valid JSON at byte 8: 'line 3, column 1: syntax error while parsing value - unexpected"},
      {"[1e400]", "f: not valid JSON at byte 6: 'number overflow parsing '1e400''"}};
  for (const auto& [text, says] : cases) {
    CAPTURE(text);
    CHECK_THAT(required_failure([&, text = text] { parse_strict_json(text, "f"); }).what,
               Catch::Matchers::StartsWith(says));
  }
}

TEST_CASE("a NUL is no end of a text", "[quick]") {
  const auto with_nul = [](const std::string& text) { return text + std::string("\0 ,", 3); };
  for (const std::string text : {"{}", "[[1]]", R"({"weight_map":{"t":"f"}})", "\"x\"", "7", "{", ""}) {
    CAPTURE(text);
    const std::string at = "not valid JSON at byte " + std::to_string(text.size() + 1);
    CHECK_THAT(required_failure([&] { parse_strict_json(with_nul(text), "f"); }).what,
               Catch::Matchers::ContainsSubstring(at));
  }
  CHECK_THAT(required_failure([&] { parse_token_lists(with_nul("[[1]]"), "f"); }).what,
             Catch::Matchers::ContainsSubstring("f: not valid JSON at byte 6"));
  CHECK_THAT(required_failure([&] { parse_weight_map(with_nul(R"({"weight_map":{"t":"f"}})"), "f"); }).what,
             Catch::Matchers::ContainsSubstring("f: not valid JSON at byte 25"));
}

TEST_CASE("a generation_config.json that is empty or leads nowhere is refused, one that is not there is not",
          "[quick]") {
  const ScratchDirectory model;
  model.write("config.json", "{}");
  model.write("model.safetensors", safetensors_of({filled("t", 1, 1)}));
  const auto open = [&] { const Checkpoint checkpoint(model.path()); };
  CHECK_NOTHROW(open());
  model.write("generation_config.json", "");
  const auto [code, message] = required_failure(open);
  CHECK(code == ErrorCode::invalid_file);
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring("generation_config.json: is empty"));
  const std::filesystem::path path = model.path() / "generation_config.json";
  for (const char* target : {"nowhere", "generation_config.json"}) {
    std::filesystem::remove(path);
    std::filesystem::create_symlink(target, path);
    CHECK_THAT(required_failure(open).what,
               Catch::Matchers::ContainsSubstring("generation_config.json: cannot open: "));
  }
}

TEST_CASE("names that lead to themselves or are too long are refused", "[quick]") {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    const ScratchDirectory model;
    model.write("config.json", "{}");
    std::filesystem::create_symlink(name, model.path() / name);
    const auto [code, message] = required_failure([&] { const Checkpoint checkpoint(model.path()); });
    CHECK(code == ErrorCode::io);
    CHECK_THAT(message, Catch::Matchers::ContainsSubstring(std::string(name) + ": cannot open: "));
  }
  const ScratchDirectory model;
  model.write("config.json", "{}");
  model.write("model.safetensors.index.json", "{\"weight_map\":{\"t\":\"" + std::string(300, 'x') + "\"}}");
  const auto too_long = required_failure([&] { const Checkpoint checkpoint(model.path()); });
  CHECK(too_long.code == ErrorCode::invalid_file);
  CHECK_THAT(too_long.what, Catch::Matchers::ContainsSubstring("index.json: weight_map: 't' is in 'xxx"));
  std::filesystem::create_symlink("loop", model.path() / "loop");
  CHECK_THAT(required_failure([&] { const Checkpoint checkpoint(model.path() / "loop"); }).what,
             Catch::Matchers::ContainsSubstring("loop: not a directory"));
}

TEST_CASE("what is no regular file is refused at once by every reader", "[quick]") {
  const ScratchDirectory directory;
  const std::string fifo = (directory.path() / "fifo").string();
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  const std::vector<std::pair<std::string, std::string>> others = {
      {fifo, "a FIFO"}, {"/dev/zero", "a device"}, {directory.path().string(), "a directory"}};
  for (const auto& [path, kind] : others) {
    const auto check = [&, path = path, kind = kind](const std::function<void()>& read) {
      const auto [code, message] = required_failure(read);
      CHECK(code == ErrorCode::io);
      CHECK_THAT(message,
                 Catch::Matchers::ContainsSubstring(path) && Catch::Matchers::ContainsSubstring(kind));
    };
    check([&, path = path] { read_text(path); });
    check([&, path = path] { read_token_lists(path); });
    check([&, path = path] { SafetensorsFile{path}; });
  }
  for (const char* name :
       {"config.json", "model.safetensors", "model.safetensors.index.json", "a.safetensors"}) {
    const ScratchDirectory model;
    model.write("config.json", "{}");
    model.write("model.safetensors.index.json", R"({"weight_map":{"t":"a.safetensors"}})");
    std::filesystem::remove(model.path() / name);
    REQUIRE(::mkfifo((model.path() / name).c_str(), 0600) == 0);
    CHECK_THAT(required_failure([&] { const Checkpoint checkpoint(model.path()); }).what,
               Catch::Matchers::ContainsSubstring(name) && Catch::Matchers::ContainsSubstring("a FIFO"));
  }
}

TEST_CASE("a file for which there is no descriptor says which limit to raise", "[quick]") {
  const ScratchDirectory directory;
  directory.write("shard", "{}");
  const std::string path = (directory.path() / "shard").string();
  rlimit usual{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &usual) == 0);
  const rlimit none{0, usual.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::exception_ptr thrown;  // looked at when there are descriptors again, which a sanitizer needs for it
  try {
    read_text(path);
  } catch (...) {
    thrown = std::current_exception();
  }
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &usual) == 0);
  REQUIRE(thrown != nullptr);
  const auto [code, says] = required_failure([&] { std::rethrow_exception(thrown); });
  CHECK(code == ErrorCode::io);
  CHECK(says == path + ": cannot open: Too many open files; raise the limit (ulimit -n)");
}

TEST_CASE("a weight file that shrinks while it is loaded is an Error", "[quick]") {
  const ModelOnDisk model(llama());
  model.align(0);
  const Checkpoint checkpoint = model.checkpoint();
  const ModelConfig config = model.config();
  const WeightPlan plan = plan_weights(config, checkpoint, Topology({.kvp = 2, .tpa = 2}, config.shape), 1);
  const auto path = model.directory().path() / "model.safetensors";
  const auto load = [&] { stream_weights(plan, [](auto...) {}, {}); };
  const WeightPlan in_place =
      plan_weights(config, checkpoint, Topology({}, config.shape), 0, WeightHome::files);
  const auto load_in_place = [&] { load_in_memory(in_place); };
  REQUIRE_NOTHROW(load());
  REQUIRE_NOTHROW(load_in_place());
  REQUIRE(in_place.allocated_bytes() == 0);
  for (const double part : {0.9, 0.5, 0.1, 0.0}) {
    std::filesystem::resize_file(
        path, static_cast<std::uintmax_t>(part * static_cast<double>(std::filesystem::file_size(path))));
    const auto [code, message] = required_failure(load);
    CHECK(code == ErrorCode::io);
    CHECK_THAT(message, Catch::Matchers::ContainsSubstring("model.safetensors") &&
                            Catch::Matchers::ContainsSubstring("shrank"));
  }
  const auto [code, message] = required_failure(load_in_place);
  CHECK(code == ErrorCode::io);
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring("model.safetensors") &&
                          Catch::Matchers::ContainsSubstring("shrank"));
}

TEST_CASE("touching a mapped file that shrank ends a guarded program with one line", "[quick]") {
  const int others = GENERATE(0, 600);  // files that are mapped before it
  CAPTURE(others);
  const ScratchDirectory directory;
  const std::string path =
      directory.write("w.safetensors", safetensors_of({filled("a", 64, 1024), filled("b", 64, 1024)}));
  const std::string other = directory.write("other.safetensors", safetensors_of({filled("a", 1, 1)}));
  const auto [status, said] = in_child([&] {
    guard_mappings("some-program");
    std::deque<SafetensorsFile> before;
    for (int i = 0; i < others; ++i) before.emplace_back(other);
    const SafetensorsFile file(path);
    const volatile std::byte* last = &file.data(*file.find("b")).back();
    static_cast<void>(*last);
    std::filesystem::resize_file(path, 100);
    static_cast<void>(*last);
  });
  CAPTURE(said);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 1);
  CHECK(said == "some-program: " + path + ": shrank or became unreadable while it was in use\n");
}

TEST_CASE("a terabyte of claims is planned in no time", "[quick]") {
  // With a million heads, each layer's W_UK and W_UV are a million rectangles of one tensor.
  constexpr std::int64_t kHeads = std::int64_t{1} << 20;
  nlohmann::json config = deepseek();
  config["num_attention_heads"] = kHeads;
  config["num_hidden_layers"] = 16;
  config["first_k_dense_replace"] = 16;
  config["hidden_size"] = 2048;
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors = {
      {"model.embed_tokens.weight", {37, 2048}},
      {"lm_head.weight", {37, 2048}},
      {"model.norm.weight", {2048}}};
  for (int layer = 0; layer < 16; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
      tensors.emplace_back(prefix + name, std::move(shape));
    };
    add("input_layernorm.weight", {2048});
    add("post_attention_layernorm.weight", {2048});
    add("self_attn.q_a_proj.weight", {10, 2048});
    add("self_attn.q_a_layernorm.weight", {10});
    add("self_attn.q_b_proj.weight", {kHeads * 9, 10});
    add("self_attn.kv_a_proj_with_mqa.weight", {16, 2048});
    add("self_attn.kv_a_layernorm.weight", {12});
    add("self_attn.kv_b_proj.weight", {kHeads * 12, 12});
    add("self_attn.o_proj.weight", {2048, kHeads * 7});
    add("mlp.gate_proj.weight", {48, 2048});
    add("mlp.up_proj.weight", {48, 2048});
    add("mlp.down_proj.weight", {2048, 48});
  }
  const ScratchDirectory directory;
  write_sparse(directory, config, tensors);
  const double seconds = seconds_of([&] {
    const Checkpoint checkpoint(directory.path());
    const ModelConfig parsed = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
    const WeightPlan plan = plan_weights(parsed, checkpoint, Topology({}, parsed.shape), 0);
    CHECK(plan.weight_bytes() > std::int64_t{400} << 30);
    for (const WeightTarget& target : plan.targets) CHECK(target.slices.size() <= 3);
  });
  CHECK(seconds < 2);
}

TEST_CASE("a header of more tensors than any checkpoint has is refused early", "[quick]") {
  std::string header = "{";
  for (std::size_t i = 0; i <= kMaxTensors; ++i) {
    header.append(i == 0 ? "\"" : ",\"").append(std::to_string(i));
    header += R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  const ScratchDirectory directory;
  const std::string path = directory.write("model.safetensors", safetensors_bytes(header + "}", ""));
  CHECK_THAT(required_failure([&] { SafetensorsFile{path}; }).what,
             Catch::Matchers::ContainsSubstring("more than 524288 tensors"));
}

TEST_CASE("a router that is not finite is refused with tensor and element", "[quick]") {
  for (const char* name :
       {"model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight"}) {
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()}) {
      for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        const ModelOnDisk model(deepseek(), type);
        std::vector<TensorContent> tensors = model.tensors();
        for (TensorContent& tensor : tensors) {
          if (tensor.name != name) continue;
          dispatch(type, [&]<class T>(T*) {
            const T bad(value);
            std::memcpy(tensor.data.data() + 2 * sizeof(T), &bad, sizeof(T));
          });
        }
        model.directory().write("model.safetensors", safetensors_at(0, tensors));
        const Checkpoint checkpoint = model.checkpoint();
        const ModelConfig config = model.config();
        for (int rank = 0; rank < 2; ++rank) {
          const WeightPlan plan = plan_weights(config, checkpoint, Topology({.kvp = 2}, config.shape), rank);
          const auto [code, message] = required_failure([&] { stream_weights(plan, [](auto...) {}, {}); });
          CHECK(code == ErrorCode::invalid_file);
          CHECK_THAT(message, Catch::Matchers::ContainsSubstring(name) &&
                                  Catch::Matchers::ContainsSubstring("element [0, 2] is "));
          const WeightPlan in_place =
              plan_weights(config, checkpoint, Topology({.kvp = 2}, config.shape), rank, WeightHome::files);
          const auto failed = required_failure([&] { load_in_memory(in_place); });
          CHECK(failed.code == code);
          CHECK(failed.what == message);
        }
      }
    }
  }
}
