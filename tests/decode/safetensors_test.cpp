// SPDX-License-Identifier: Apache-2.0
// Safetensors headers, files and checkpoint directories: valid ones are read back, broken and hostile ones
// give one Error.
#include "checkpoint/safetensors.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <helix/error.hpp>

#include "checkpoint/checkpoint.hpp"
#include "decode/checkpoint_files.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/resident_memory.hpp"
#include "support/skipped.hpp"

using namespace helix;
using namespace helix::decode;
using namespace helix::decode::test;
using helix::test::required_failure;
using helix::test::ResidentMemory;

namespace {

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

SafetensorsHeader parse(const std::string& bytes) {
  return parse_safetensors_header(as_bytes(bytes), bytes.size(), "x.safetensors");
}

std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

/// Writes a file with one tensor of `bytes` zero bytes, which take no disk space. Returns its path.
std::string write_zeros(const ScratchDirectory& directory, std::int64_t bytes) {
  const std::string count = std::to_string(bytes / 4);
  const std::string path = directory.write(
      "model.safetensors", safetensors_bytes("{\"t\":{\"dtype\":\"F32\",\"shape\":[" + count +
                                                 "],\"data_offsets\":[0," + std::to_string(bytes) + "]}}",
                                             ""));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + static_cast<std::uintmax_t>(bytes));
  return path;
}

}  // namespace

TEST_CASE("a sound header gives every tensor's type, shape and range") {
  const std::string bytes =
      safetensors_of({filled("b", 3, 5), filled("a", 0, 7, DType::f32), filled("c", 2, 2, DType::fp8_e4m3)});
  const SafetensorsHeader header = parse(bytes);
  REQUIRE(header.tensors.size() == 3);
  CHECK(header.tensors[0].name == "a");
  CHECK(header.tensors[0].shape == std::vector<std::int64_t>{7});
  CHECK(header.tensors[0].dtype == DType::f32);
  CHECK(header.tensors[0].begin == 30);
  CHECK(header.tensors[0].end == 58);
  CHECK(header.tensors[0].rows() == 1);
  CHECK(header.tensors[0].cols() == 7);
  CHECK(header.tensors[1].name == "b");
  CHECK(header.tensors[1].dtype == DType::bf16);
  CHECK(header.tensors[1].begin == 0);
  CHECK(header.tensors[1].rows() == 3);
  CHECK(header.tensors[2].dtype == DType::fp8_e4m3);
  CHECK(header.data_offset + 62 == bytes.size());
}

TEST_CASE("headers without tensors, scalars, empty tensors and types that nothing reads are legal") {
  CHECK(parse(safetensors_bytes("{}", "")).tensors.empty());
  CHECK(parse(safetensors_bytes("{\"__metadata__\":{}}   ", "")).tensors.empty());
  const SafetensorsHeader header =
      parse(safetensors_bytes(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
                                  "e":{"dtype":"BF16","shape":[0,9],"data_offsets":[4,4]},
                                  "i":{"dtype":"I64","shape":[1,1,2],"data_offsets":[4,20]},
                                  "f":{"dtype":"F4","shape":[4],"data_offsets":[20,22]}})",
                              std::string(22, 'x')));
  REQUIRE(header.tensors.size() == 4);
  CHECK(header.tensors[2].dtype_name == "I64");
  CHECK_FALSE(header.tensors[2].dtype.has_value());
  CHECK(header.tensors[2].cols() == 2);
}

namespace {

/// The bytes of a file, and the expected message.
struct BadFile {
  std::string bytes;
  std::string says;
};

void check_refused(const std::vector<BadFile>& cases) {
  for (const BadFile& c : cases) {
    CAPTURE(c.bytes.substr(0, 200));
    const auto [code, message] = required_failure([&] { parse(c.bytes); });
    CHECK(code == ErrorCode::invalid_file);
    CHECK_THAT(message, Catch::Matchers::ContainsSubstring("x.safetensors") &&
                            Catch::Matchers::ContainsSubstring(c.says));
    CHECK(message.size() < 1000);
  }
}

/// The bytes of a file with one tensor, t, of 8 bytes of data.
std::string tensor(const std::string& body) {
  return safetensors_bytes("{\"t\":" + body + "}", std::string(8, 'x'));
}

const std::string kSound = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";

}  // namespace

TEST_CASE("broken and hostile headers give one Error that names the file and the trouble") {
  check_refused({
      {"", "has 0 bytes"},
      {"\x02\0\0", "bytes"},
      {std::string(7, '\0'), "has 7 bytes"},
      {std::string(8, '\0'), "does not start with '{'"},
      {std::string("\x02\0\0\0\0\0\0\0[]", 10), "does not start with '{'"},
      {std::string("\x10\0\0\0\0\0\0\0{}", 10), "header size is 16, but only 2 bytes follow"},
      {std::string("\x03\0\0\0\0\0\0\0{}", 10), "header size is 3, but only 2 bytes follow"},
      {"<!DOCTYPE html><html>", "the format allows at most 100000000: this is no safetensors file"},
      {std::string(8, '\xff') + "{}",
       "header size is 18446744073709551615; the format allows at most 100000000"},
      {std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10), "header size is 100000001"},
      {std::string("\0\xe1\xf5\x05\0\0\0\0{}", 10), "only 2 bytes follow"},
      {safetensors_bytes("{", ""), "not valid JSON"},
      {safetensors_bytes("{}x", ""), "not valid JSON at byte 3: 'syntax error"},
      {safetensors_bytes(std::string("{}\0", 3), ""), "not valid JSON at byte 3"},
      {safetensors_bytes(std::string("{}\0\"t\":1}", 10), ""), "not valid JSON at byte 3"},
      {safetensors_bytes("{\"t\xff\":1}", ""), "not valid JSON"},
      {safetensors_bytes("{}", "x"), "tensors end at byte 0 of the data, which has 1"},
      {safetensors_bytes("{" + repeated("\"a\":{", 100000), ""), "unknown key 'a'"},
      {safetensors_bytes("{\"a\":" + repeated("[", 100000), ""),
       "tensor 'a': is an array; expected an object"},
      {safetensors_bytes("{\"__metadata__\":" + repeated("{\"a\":", 100000), ""),
       "__metadata__: unexpected an object"},
      {safetensors_bytes("{\"__metadata__\":[]}", ""), "unexpected an array"},
      {safetensors_bytes("{\"__metadata__\":{\"a\":1}}", ""), "unexpected the number 1; expected strings"},
      {safetensors_bytes("{\"__metadata__\":{},\"__metadata__\":{}}", ""), "__metadata__ appears twice"},
      {safetensors_bytes("{\"t\":" + kSound + ",\"t\":" + kSound + "}", std::string(8, 'x')),
       "tensor 't' appears twice"},
  });
}

TEST_CASE("broken and hostile entries of a header give one Error that names the file and the trouble") {
  CHECK_NOTHROW(parse(tensor(kSound)));  // the unmodified file is valid
  check_refused({
      {tensor("null"), "tensor 't': is null; expected an object of dtype, shape and data_offsets"},
      {tensor("true"), "tensor 't': is a boolean"},
      {tensor("{}"), "dtype is missing"},
      {tensor(R"({"dtype":"F32"})"), "shape is missing"},
      {tensor(R"({"dtype":"F32","shape":[2]})"), "data_offsets is missing"},
      {tensor(R"({"dtype":"F32","dtype":"F32"})"), "dtype appears twice"},
      {tensor(R"({"dtype":"F32","shape":[2],"shape":[2]})"), "shape appears twice"},
      {tensor(R"({"dtype":"F31","shape":[2],"data_offsets":[0,8]})"), "dtype is 'F31'; expected one of BF16"},
      {tensor(R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})"),
       "dtype is the number 7; expected one of BF16"},
      {tensor(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})"),
       "shape is the number 2; expected an array"},
      {tensor(R"({"dtype":"F32","shape":["2"],"data_offsets":[0,8]})"),
       "shape holds the string '2'; expected whole"},
      {tensor(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "shape holds the negative number -2"},
      {tensor(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), "shape holds the number '2.0'"},
      {tensor(R"({"dtype":"F32","shape":[NaN],"data_offsets":[0,8]})"), "not valid JSON"},
      {tensor(R"({"dtype":"F32","shape":[1e999],"data_offsets":[0,8]})"), "not valid JSON"},
      {tensor(R"({"dtype":"F32","shape":[[2]],"data_offsets":[0,8]})"), "shape holds an array"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":8})"),
       "data_offsets is the number 8; expected [begin, end]"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,"8"]})"),
       "data_offsets holds the string '8'; expected two whole numbers"},
      {tensor(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]})"),
       "more than 16 dimensions"},
      {tensor(R"({"dtype":"F32","shape":[0.)" + repeated("1", 100000) + R"(],"data_offsets":[0,8]})"),
       "shape holds the number '0.111"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"),
       "data_offsets holds 1 numbers; expected 2"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,8]})"), "data_offsets holds more than 2"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "run backwards"},
      {tensor(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})"), "leave the 8 bytes of data"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551615]})"),
       "leave the"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"extra":1})"), "unknown key 'extra'"},
      {tensor(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"),
       "takes 12 bytes, but data_offsets [0, 8] hold 8"},
      {tensor(R"({"dtype":"BF16","shape":[2],"data_offsets":[0,8]})"), "takes 4 bytes"},
      {tensor(R"({"dtype":"F4","shape":[3],"data_offsets":[0,8]})"), "ends inside a byte"},
      {tensor(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]})"),
       "overflows 64 bits"},
      {tensor(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})"),
       "overflows 64 bits"},
      {tensor(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]})"),
       "which no tensor has"},
      {safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                             "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                         std::string(12, 'x')),
       "tensor 'b': data_offsets [4, 12] overlap another tensor that ends at 8"},
      {safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                             "b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})",
                         std::string(20, 'x')),
       "leave a hole: no tensor has bytes [8, 12)"},
      {safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", std::string(8, 'x')),
       "leave a hole: no tensor has bytes [0, 4)"},
  });
}

TEST_CASE("every truncation of a sound file is an Error") {
  const std::string bytes = safetensors_of({filled("a", 3, 5), filled("b", 0, 4, DType::f32)});
  REQUIRE_NOTHROW(parse(bytes));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CAPTURE(size);
    CHECK(required_failure([&] { parse(bytes.substr(0, size)); }).code == ErrorCode::invalid_file);
  }
}

TEST_CASE("a mapped file gives the bytes that were written, at every alignment") {
  const ScratchDirectory directory;
  for (std::size_t shift = 0; shift < 8; ++shift) {
    const std::vector<TensorContent> tensors = {filled("a", 3, 5, DType::fp8_e4m3),
                                                filled("b", 4, 4, DType::f32)};
    const SafetensorsFile file(directory.write("model.safetensors", safetensors_of(tensors, shift)));
    for (const TensorContent& tensor : tensors) {
      const TensorInfo* info = file.find(tensor.name);
      REQUIRE(info != nullptr);
      const auto data = file.data(*info);
      CHECK(std::string(reinterpret_cast<const char*>(data.data()), data.size()) == tensor.data);
      file.release(data);
      CHECK(std::string(reinterpret_cast<const char*>(data.data()), data.size()) == tensor.data);
    }
    CHECK(file.find("c") == nullptr);
  }
}

TEST_CASE("files that cannot be mapped are io errors that name the path") {
  const ScratchDirectory directory;
  const auto [code, message] =
      required_failure([&] { SafetensorsFile((directory.path() / "none.safetensors").string()); });
  CHECK(code == ErrorCode::io);
  CHECK_THAT(message, Catch::Matchers::ContainsSubstring("none.safetensors"));
  CHECK(required_failure([&] { SafetensorsFile(directory.path().string()); }).code == ErrorCode::io);
  CHECK(required_failure([&] { SafetensorsFile(directory.write("empty", "")); }).code ==
        ErrorCode::invalid_file);
}

TEST_CASE("bytes that are made resident are, and those that are gone are an Error") {
  if (!ResidentMemory::if_told()) return helix::test::skip("no /proc/self/statm");
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  const ScratchDirectory directory;
  const std::string path = write_zeros(directory, kBytes);
  const SafetensorsFile file(path);
  const auto half = file.data(file.tensors().front()).first(kBytes / 2);
  const std::int64_t before = ResidentMemory::now().files;
  file.prefault({});
  file.prefault(half);
  const std::int64_t gained = ResidentMemory::now().files - before;
  CHECK(gained > kBytes / 2 - kBytes / 16);
  CHECK(gained < kBytes / 2 + kBytes / 16);
  std::filesystem::resize_file(path, 100000);
  const auto [code, message] = required_failure([&] { file.prefault(half); });
  CHECK(code == ErrorCode::io);
  CHECK_THAT(message,
             Catch::Matchers::ContainsSubstring(path) && Catch::Matchers::ContainsSubstring("shrank"));
}

TEST_CASE("released pages leave resident memory") {
  if (!ResidentMemory::if_told()) return helix::test::skip("no /proc/self/statm");
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  const ScratchDirectory directory;
  const std::string path = write_zeros(directory, kBytes);
  const SafetensorsFile file(path);
  const auto data = file.data(file.tensors().front());
  const std::int64_t before = ResidentMemory::now().files;
  int sum = 0;
  for (std::size_t i = 0; i < data.size(); i += 4096) sum += static_cast<int>(data[i]);
  CHECK(sum == 0);
  CHECK(ResidentMemory::now().files - before > kBytes / 2);  // control: touched pages are counted
  file.release(data);
  CHECK(ResidentMemory::now().files - before < kBytes / 16);
}

TEST_CASE("a checkpoint finds tensors in one file and in shards alike") {
  const std::vector<TensorContent> tensors = {filled("a", 3, 5), filled("b", 2, 2), filled("c", 0, 4)};
  const ScratchDirectory one;
  one.write("config.json", "{}");
  one.write("model.safetensors", safetensors_of(tensors));
  const ScratchDirectory sharded;
  sharded.write("config.json", "{}");
  sharded.write("model-1.safetensors", safetensors_of({tensors[0]}));
  sharded.write("model-2.safetensors", safetensors_of({tensors[1], tensors[2]}));
  sharded.write(
      "model.safetensors.index.json",
      R"({"metadata":{"total_size":46},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors",
                    "c":"model-2.safetensors"}})");
  for (const ScratchDirectory* directory : {&one, &sharded}) {
    const Checkpoint checkpoint(directory->path());
    CHECK(checkpoint.num_tensors() == 3);
    CHECK(checkpoint.config_json() == "{}");
    for (const TensorContent& tensor : tensors) {
      const Checkpoint::Entry entry = checkpoint.find(tensor.name);
      REQUIRE(entry.tensor != nullptr);
      const auto data = entry.file->data(*entry.tensor);
      CHECK(std::string(reinterpret_cast<const char*>(data.data()), data.size()) == tensor.data);
    }
    CHECK(checkpoint.find("d").tensor == nullptr);
  }
}

TEST_CASE("an index that leaves its directory or is malformed is refused") {
  const auto map = [](const std::string& json) {
    return required_failure([&] { parse_weight_map(json, "i.json"); });
  };
  for (const std::string& shard : {std::string("../x.safetensors"), std::string("/etc/passwd"),
                                   std::string("a/b"), std::string(".."), std::string("."), std::string(),
                                   std::string("a\\\\b"), std::string("a\\u0000b"), std::string(5000, 'x')}) {
    CAPTURE(shard);
    const auto [code, message] = map(R"({"weight_map":{"t":")" + shard + "\"}}");
    CHECK(code == ErrorCode::invalid_file);
    CHECK_THAT(message,
               Catch::Matchers::ContainsSubstring("i.json") && Catch::Matchers::ContainsSubstring("'t'"));
    CHECK(message.size() < 300);
  }
  for (const std::string json :
       {"", "[]", "{}", "7", "{\"weight_map\":7}", "{\"weight_map\":{}}", "{\"weight_map\":{\"t\":7}}",
        "{\"weight_map\":{\"t\":\"a\",\"t\":\"b\"}}", "{\"weight_map\":null}"}) {
    CAPTURE(json);
    CHECK(map(json).code == ErrorCode::invalid_file);
  }
  CHECK_THAT(map("{}").what, Catch::Matchers::ContainsSubstring("weight_map is missing"));
  CHECK_THAT(map("{\"weight_map\":{}}").what, Catch::Matchers::ContainsSubstring("weight_map is empty"));
  CHECK_THAT(map("{\"weight_map\":[]}").what, Catch::Matchers::ContainsSubstring("weight_map is array"));
  CHECK_THAT(map(repeated("[", 100000)).what, Catch::Matchers::ContainsSubstring("nested deeper"));
  CHECK(parse_weight_map(R"({"weight_map":{"t":"a.safetensors"}})", "i.json").at("t") == "a.safetensors");
}

TEST_CASE("missing parts of a checkpoint are named") {
  const ScratchDirectory directory;
  const auto open = [&] { return required_failure([&] { const Checkpoint checkpoint(directory.path()); }); };
  CHECK(required_failure([] { const Checkpoint checkpoint("/nonexistent/helix"); }).code == ErrorCode::io);
  CHECK(open().code == ErrorCode::io);
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring("config.json"));
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
  directory.write("config.json", pointer);
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring("config.json: is a Git LFS pointer"));
  directory.write("config.json", "{}");
  CHECK(open().code == ErrorCode::io);
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring("model.safetensors: cannot open"));
  directory.write("model-00001-of-00002.safetensors", "");
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring(
                              "model.safetensors.index.json: missing, but the folder has model-*"));
  std::filesystem::remove(directory.path() / "model-00001-of-00002.safetensors");
  for (const char* pickled : {"pytorch_model.bin.index.json", "pytorch_model.bin"}) {
    directory.write(pickled, "");
    CHECK(open().code == ErrorCode::invalid_file);
    CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring(std::string("has ") + pickled +
                                                               " but no model.safetensors"));
  }
  directory.write("model.safetensors", pointer);
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring("model.safetensors: is a Git LFS pointer"));
  std::filesystem::remove(directory.path() / "model.safetensors");
  directory.write("model.safetensors.index.json", R"({"weight_map":{"a":"model-1.safetensors"}})");
  CHECK(open().code == ErrorCode::io);
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring("model-1.safetensors") &&
                              Catch::Matchers::ContainsSubstring("index.json"));
  directory.write("model-1.safetensors", safetensors_of({filled("b", 2, 2)}));
  CHECK(open().code == ErrorCode::invalid_file);
  CHECK_THAT(open().what, Catch::Matchers::ContainsSubstring("'a' is missing"));
  directory.write("model-1.safetensors", safetensors_of({filled("a", 2, 2)}));
  CHECK_NOTHROW(Checkpoint(directory.path()));
}
