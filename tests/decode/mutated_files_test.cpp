// SPDX-License-Identifier: Apache-2.0
// Passes files of every kind with random damage to their readers: each gives helix::Error or a valid result.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>
#include <helix/plan/step_time.hpp>
#include <helix/topology.hpp>

#include "bench_results.hpp"
#include "calibration.hpp"
#include "check.hpp"
#include "checkpoint/checkpoint.hpp"
#include "decode/model_on_disk.hpp"
#include "files/text_file.hpp"
#include "files/token_lists.hpp"
#include "hardware_source.hpp"
#include "model/weight_plan.hpp"
#include "model/weight_stream.hpp"
#include "support/catch.hpp"

using namespace helix;
using namespace helix::decode;
using namespace helix::decode::test;

namespace {

/// Makes one or two random changes of the kinds that corruption and attackers make.
class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::string operator()(std::string text) {
    const std::size_t changes = 1 + below(2);
    for (std::size_t i = 0; i < changes; ++i) change(text);
    return text;
  }

 private:
  std::size_t below(std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); }

  void change(std::string& text) {
    static const std::vector<std::string> kWords = {"0",
                                                    "-1",
                                                    "1e999",
                                                    "18446744073709551615",
                                                    "9223372036854775807",
                                                    "4294967296",
                                                    "1e-320",
                                                    "null",
                                                    "{}",
                                                    "[]",
                                                    "\"\"",
                                                    "[[",
                                                    "NaN",
                                                    "true",
                                                    "\"\\u0000\"",
                                                    ",",
                                                    ":",
                                                    "}",
                                                    "../",
                                                    "\xff",
                                                    std::string("\0x", 2),
                                                    "\"a\":1,",
                                                    "0.5",
                                                    "-0.0"};
    if (text.empty()) text = "{";
    const std::size_t at = below(text.size());
    const std::size_t length = std::min(text.size() - at, 1 + below(64));
    switch (below(10)) {
      case 0:
        text[at] = static_cast<char>(below(256));
        break;
      case 1:
        text[at] = static_cast<char>(text[at] ^ 1 << below(8));
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(at, length));
        break;
      case 4:
        text.resize(at);
        break;
      case 5:
        text.insert(at, kWords[below(kWords.size())]);
        break;
      default: {  // replaces a number in the text
        const std::size_t digit = text.find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        const std::size_t end = std::min(text.size(), text.find_first_not_of("0123456789.eE", digit));
        text.replace(digit, end - digit, kWords[below(8)]);
      }
    }
  }

  std::mt19937_64 random_;
};

/// A valid `text`, and the function that reads it.
struct Kind {
  std::string name;
  std::string text;
  std::function<void()> read;
};

/// Loads everything in a directory except its weights.
void load(const std::filesystem::path& directory) {
  const Checkpoint checkpoint(directory);
  const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
  const Topology topo({}, config.shape);
  const WeightPlan plan = plan_weights(config, checkpoint, topo, 0);
  std::int64_t bytes = 0;
  stream_weights(plan,
                 [&](std::size_t, std::int64_t, const std::byte*, std::size_t count) {
                   bytes += static_cast<std::int64_t>(count);
                 },
                 {});
  CHECK(bytes == plan.weight_bytes());
  const WeightPlan in_place = plan_weights(config, checkpoint, topo, 0, WeightHome::files);
  CHECK(in_place.weight_bytes() == plan.weight_bytes());
  for (const WeightTarget& target : in_place.targets) {
    if (!target.in_place) continue;
    const std::span<const std::byte> data = target.in_place->data();
    CHECK(reinterpret_cast<std::uintptr_t>(data.data()) % size_bytes(target.dtype) == 0);
    CHECK(static_cast<std::int64_t>(data.size()) == target.size_bytes());
  }
}

/// A machine for helix-plan.
const std::string kMachine =
    R"({"based_on":"h200","memory_gb":100,"read_gb_per_s":[[1,1],[1e6,2000]],"peaks":[{"bits":16,"tflops":990}],
          "inside":{"latency_us":2,"gb_per_s":400},"measured":[{"collective":"all_to_all","ranks":4,
          "points":[[1e4,10],[1e6,20]]}],"overheads":{"per_operator_us":2}})";
/// Measurements for helix-plan.
const std::string kBench =
    R"({"benchmarks":[{"name":"exchange/kvp:4/tokens:8/heads:128/dim:128/manual_time","us":20,"bytes":1e6},
          {"name":"rms_norm/rows:1","us":3,"bytes":1e5,"read_bytes/s":3e12},
          {"name":"decode_layer/kvp:4/tpa:2/layers:8/batch:8/context:524288/hop_b:off","us":900,
           "all_reduce_us":30,"exchange_us":25}]})";

/// Whether a file of `kind` is accepted. The decision must come quickly, and a refusal must be one short
/// line.
bool reads(const Kind& kind) {
  const auto start = std::chrono::steady_clock::now();
  bool is_accepted = true;
  try {
    kind.read();
  } catch (const Error& error) {
    is_accepted = false;
    CHECK(error.code() != ErrorCode::internal);
    CHECK(std::string_view(error.what()).size() < 4000);
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  return is_accepted;
}

/// Reads `count` damaged files, of every kind in turn, generated from `seed`.
void read_mutated(int count, std::uint64_t seed) {
  const ModelOnDisk dense(llama());
  const ModelOnDisk latent(deepseek());
  const ScratchDirectory sharded;
  sharded.write("config.json", llama().dump());
  sharded.write("a.safetensors", read_text(dense.directory().path() / "model.safetensors"));
  nlohmann::json index;
  for (const TensorContent& tensor : dense.tensors()) index["weight_map"][tensor.name] = "a.safetensors";
  const ScratchDirectory others;
  const auto path = [&](const char* name) { return (others.path() / name).string(); };
  const auto open = [](const ScratchDirectory& directory, const char* name) {
    return std::pair(&directory, std::string(name));
  };
  const auto config_of = [](const ModelOnDisk& model) {
    return read_text(model.directory().path() / "config.json");
  };
  const auto weights_of = [](const ModelOnDisk& model) {
    return read_text(model.directory().path() / "model.safetensors");
  };
  struct Place {
    std::pair<const ScratchDirectory*, std::string> file;
    Kind kind;
  };
  const std::vector<Place> places = {
      {open(dense.directory(), "config.json"),
       {"config", config_of(dense), [&] { load(dense.directory().path()); }}},
      {open(dense.directory(), "model.safetensors"),
       {"weights", weights_of(dense), [&] { load(dense.directory().path()); }}},
      {open(latent.directory(), "config.json"),
       {"MLA config", config_of(latent), [&] { load(latent.directory().path()); }}},
      {open(latent.directory(), "model.safetensors"),
       {"MLA weights", weights_of(latent), [&] { load(latent.directory().path()); }}},
      {open(sharded, "model.safetensors.index.json"), {"index", index.dump(), [&] { load(sharded.path()); }}},
      {open(others, "prompts.json"),
       {"prompts", "[[1,2,3],[4],[],[5,511,0,-7]]", [&] { read_token_lists(path("prompts.json")); }}},
      {open(others, "machine.json"),
       {"machine", kMachine,
        [&] {
          const plan::StepModel model(plan::model_preset("llama-3.1-8b"), plan::Precision{},
                                      plan_cli::load_hardware(path("machine.json")));
          plan::Layout layout;
          layout.kvp = layout.tpf = 4;
          plan::Workload load;
          load.context = plan::tokens(1e5);
          CHECK(std::isfinite(in_microseconds(model.explain(layout, load).totals.ttl)));
        }}},
      {open(others, "bench.json"), {"measurements", kBench, [&] {
                                      const auto cases = plan_cli::read_bench_results({path("bench.json")});
                                      const auto base = plan::hardware_preset("h200");
                                      for (const auto& row :
                                           plan_cli::check_predictions(base, cases, cases).rows)
                                        CHECK(std::isfinite(row.predicted_us));
                                    }}}};
  Mutator mutate(seed);
  int accepted = 0;
  for (int i = 0; i < count; ++i) {
    const Place& place = places[static_cast<std::size_t>(i) % places.size()];
    // For weights only the header matters, which is a small part of the file.
    const std::string& sound = place.kind.text;
    const bool is_weights = place.file.second.ends_with(".safetensors");
    const std::size_t head = is_weights ? std::min<std::size_t>(sound.size(), 4096) : sound.size();
    const std::string damaged = mutate(sound.substr(0, head)) + sound.substr(head);
    CAPTURE(seed, i, place.kind.name, damaged.substr(0, 2000));
    place.file.first->write(place.file.second, damaged);
    accepted += reads(place.kind) ? 1 : 0;
    place.file.first->write(place.file.second, sound);
  }
  CHECK(accepted > count / 50);  // otherwise the damage is too coarse to get past the first checks
  CHECK(accepted < count);
  for (const Place& place : places) {
    place.file.first->write(place.file.second, place.kind.text);
    CHECK_NOTHROW(place.kind.read());
  }
}

}  // namespace

TEST_CASE("500 damaged files give an Error each, or are sound", "[quick]") {
  read_mutated(500, 1);
}

TEST_CASE("5,000 damaged files give an Error each, or are sound", "[full]") {
  for (std::uint64_t seed = 2; seed < 12; ++seed) read_mutated(500, seed);
}
