// SPDX-License-Identifier: Apache-2.0
// If processes were started with relevant differences, none decodes, and all report the difference.
#include "generate/job_agreement.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/launch.hpp"
#include "cli/machine.hpp"
#include "cli/options.hpp"
#include "comm/bootstrap_job.hpp"
#include "decode/checkpoint_files.hpp"
#include "decode/golden.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using decode::GenerationRequest;
using decode::JobFields;
using decode::JobStatement;

/// The error if rank 2 of 3 has other fields than the other ranks; empty if there is none.
std::string refusal(const JobFields& rank_0, const JobFields& rank_2) {
  return failure_message([&] { decode::expect_agreement({{rank_0, ""}, {rank_0, ""}, {rank_2, ""}}); });
}

template <class T>
JobFields fields_of(const T& value) {
  JobFields fields;
  decode::add_fields(fields, value);
  return fields;
}

/// A modifiable copy of llama-tiny.
std::filesystem::path copy_model(const ScratchDirectory& scratch, const std::string& name) {
  std::filesystem::create_directory(scratch / name);
  for (const char* file : {"config.json", "model.safetensors"}) {
    std::filesystem::copy_file(data_directory() / "llama-tiny" / file, scratch / name / file);
    std::filesystem::permissions(scratch / name / file, std::filesystem::perms::owner_all);
  }
  return scratch / name;
}

/// Overwrites bytes of the last tensor in the file.
void change_weights(const std::filesystem::path& model) {
  std::fstream file(model / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-64, std::ios::end);
  file.write(std::string(64, '\x11').data(), 64);
}

}  // namespace

TEST_CASE("every member of a request is compared, by the name of its option", "[quick]") {
  struct Row {
    std::function<void(GenerationRequest&)> change;
    const char* part;
  };
  GenerationRequest request;
  request.prompts = {{1, 2, 3}, {4}};
  request.teacher = {{7}, {8}};
  const std::vector<Row> rows = {
      {[](auto& r) {
         r.prompts = {{1, 2}, {3, 4}};
       },
       "different prompt tokens"},
      {[](auto& r) { r.prompts[1] = {5}; }, "different prompt tokens"},
      {[](auto& r) { r.max_new_tokens = 17; }, "--max-new-tokens 17, rank 0 with --max-new-tokens 16"},
      {[](auto& r) { r.ignore_eos = true; }, "--ignore-eos on, rank 0 with --ignore-eos off"},
      {[](auto& r) { r.teacher[0] = {9}; }, "different teacher tokens"},
      {[](auto& r) { r.draft_tokens = 4; }, "--draft-tokens 4"},
      {[](auto& r) { r.synthetic_context = 100; }, "--synthetic-context 100"},
      {[](auto& r) { r.sampling.temperature = 0.5000001f; }, "--temperature 0.5000001"},
      {[](auto& r) { r.sampling.top_p = 0.9f; }, "--top-p 0.9, rank 0 with --top-p 1"},
      {[](auto& r) { r.sampling.min_p = 0.1f; }, "--min-p 0.1"},
      {[](auto& r) { r.sampling.top_k = 7; }, "--top-k 7"},
      {[](auto& r) { r.penalties.repetition = 1.1f; }, "--repetition-penalty 1.1"},
      {[](auto& r) { r.penalties.presence = 1.0f; }, "--presence-penalty 1"},
      {[](auto& r) { r.penalties.frequency = 1.0f; }, "--frequency-penalty 1"},
      {[](auto& r) { r.sampling.seed = 8; }, "rank 2 was started with --seed 8, rank 0 with --seed 0"},
      {[](auto& r) { r.kv_dtype = DType::f32; }, "--kv-dtype f32, rank 0 with --kv-dtype bf16"},
      {[](auto& r) { r.chunk = 1; }, "--chunk 1"},
      {[](auto& r) { r.page_tokens = 16; }, "--page-tokens 16"},
      {[](auto& r) { r.hop_b_slices = 1; }, "--hop-b off, rank 0 with --hop-b auto"},
      {[](auto& r) { r.prefill_tokens = 1; }, "--prefill-tokens 1"},
      {[](auto& r) { r.cuda_graphs = false; }, "--cuda-graphs off"},
      {[](auto& r) { r.mla_prefill = MlaForm::expanded; }, "--mla-prefill expanded"},
      {[](auto& r) { r.mla_prefill = MlaForm::absorbed; }, "absorbed, rank 0 with --mla-prefill auto"},
  };
  CHECK(refusal(fields_of(request), fields_of(request)) == "");
  for (const Row& row : rows) {
    GenerationRequest other = request;
    row.change(other);
    CHECK_THAT(refusal(fields_of(request), fields_of(other)),
               ContainsSubstring(row.part) && ContainsSubstring("rank 2"));
  }
}

TEST_CASE(
    "widths, device, activation and timeout are compared, and threads, GPU, progress and reports are not",
    "[quick]") {
  const auto changed = [](auto value, auto change) {
    const auto before = fields_of(value);
    change(value);
    return refusal(before, fields_of(value));
  };
  CHECK_THAT(changed(TopologySpec{}, [](auto& t) { t.kvp = 2; }),
             ContainsSubstring("--kvp 2, rank 0 with --kvp 1"));
  CHECK_THAT(changed(TopologySpec{}, [](auto& t) { t.dp = 2; }), ContainsSubstring("--dp 2"));
  CHECK_THAT(changed(TopologySpec{}, [](auto& t) { t.allow_uneven_ffn = true; }),
             ContainsSubstring("uneven_ffn on"));
  CHECK_THAT(changed(decode::LaunchOptions{}, [](auto& o) { o.device = decode::Device::cuda; }),
             ContainsSubstring("--device cuda, rank 0 with --device cpu"));
  CHECK_THAT(changed(decode::Options{}, [](auto& o) { o.activation = DType::bf16; }),
             ContainsSubstring("--activation bf16, rank 0 with --activation auto"));
  CHECK(changed(decode::LaunchOptions{}, [](auto& o) {
          o.num_threads = 3;
          o.gpu = 2;
          o.show_progress = true;
        }) == "");
  CHECK(changed(decode::Options{}, [](auto& o) {
          o.json = "rank-2.json";
          o.model = "/scratch/model";
          o.num_threads = 2;
          o.tuning = "linear.*=plain";
        }) == "");
  CHECK_THAT(changed(decode::Options{}, [](auto& o) { o.is_plan_only = true; }),
             ContainsSubstring("--plan-only on"));
  CHECK_THAT(changed(decode::Options{}, [](auto& o) { o.verify = true; }), ContainsSubstring("--verify on"));
  CHECK_THAT(changed(decode::Options{}, [](auto& o) { o.timeout_seconds = 1; }),
             ContainsSubstring("--timeout 1, rank 0 with --timeout 60"));
}

TEST_CASE("a checkpoint is known by its config, tables and contents, wherever it lies, and soon", "[quick]") {
  const ScratchDirectory scratch;
  const auto fields_at = [](const std::filesystem::path& model) {
    return fields_of(decode::Checkpoint(model));
  };
  const JobFields original = fields_at(data_directory() / "llama-tiny");
  CHECK(refusal(original, fields_at(copy_model(scratch, "same"))) == "");
  const auto weights = copy_model(scratch, "weights");
  change_weights(weights);
  CHECK_THAT(refusal(original, fields_at(weights)),
             ContainsSubstring("different weights in model.safetensors"));
  const auto config = copy_model(scratch, "config");
  write_file(config / "config.json", read_file(config / "config.json") + "\n");
  CHECK_THAT(refusal(original, fields_at(config)), ContainsSubstring("different config.json"));

  const decode::Checkpoint checkpoint(data_directory() / "llama-tiny");
  double fastest_ms = HUGE_VAL;  // best of several runs, because the machine is shared
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    (void)fields_of(checkpoint);
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    fastest_ms = std::min(fastest_ms, taken.count());
  }
  CHECK(fastest_ms < 10.0 * 10);  // 10 without a sanitizer

  using decode::test::filled;
  using decode::test::safetensors_of;
  const auto sharded = [&](const std::string& name, std::int64_t cols, const std::string& second) {
    std::filesystem::create_directory(scratch / name);
    write_file(scratch / name / "config.json", "{}");
    write_file(scratch / name / "a.safetensors", safetensors_of({filled("x", 4, 6)}));
    write_file(scratch / name / second, safetensors_of({filled("y", 0, cols)}));
    write_file(scratch / name / "model.safetensors.index.json",
               R"({"weight_map": {"x": "a.safetensors", "y": ")" + second + "\"}}");
    return fields_at(scratch / name);
  };
  const JobFields shards = sharded("shards", 6, "b.safetensors");
  CHECK_THAT(refusal(shards, sharded("longer", 7, "b.safetensors")),
             ContainsSubstring("different tensors in b.safetensors"));
  CHECK_THAT(refusal(shards, sharded("renamed", 6, "c.safetensors")), ContainsSubstring("in c.safetensors"));
}

TEST_CASE("a process that cannot take part is named, unless all say the same", "[quick]") {
  const JobFields fields = {{"--seed", "7"}};
  const auto said = [](const std::vector<JobStatement>& statements) -> std::string {
    try {
      decode::expect_agreement(statements);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(said({{fields, ""}, {fields, ""}}) == "");
  CHECK(said({{{}, "no model"}, {{}, "no model"}}) == "no model");
  CHECK(said({{fields, ""}, {{}, "no model"}}) == "rank 1: no model");
  CHECK(said({{{}, "no seed"}, {{}, "no model"}}) == "rank 0: no seed");
  CHECK_THAT(said({{fields, ""}, {{}, ""}}), ContainsSubstring("rank 1 was started with --seed (none)"));
  const auto accepted = [](bool first, bool second) {
    return decode::expect_agreement({{{}, "", first}, {{}, "", second}}).accepts_bf16;
  };
  CHECK((accepted(true, true) && !accepted(true, false) && !accepted(false, true)));
  const decode::PromptRoom most{.tokens = 2048, .can_expand = true};
  for (const decode::PromptRoom& least :
       {decode::PromptRoom{2048, true}, decode::PromptRoom{256, true}, decode::PromptRoom{256, false}}) {
    CHECK(decode::expect_agreement({{{}, "", true, most}, {{}, "", true, least}}).room == least);
    CHECK(decode::expect_agreement({{{}, "", true, least}, {{}, "", true, most}}).room == least);
  }
  // A process that has room for few tokens but can expand does not say that another process can expand many
  // tokens.
  CHECK(decode::expect_agreement({{{}, "", true, {256, true}}, {{}, "", true, {2048, false}}}).room ==
        decode::PromptRoom{256, false});
  const JobStatement whole{{{"a", "1"}, {"b", "2", true}}, "why", true, {256, false}};
  const std::string text = decode::serialize(whole);
  const JobStatement read = decode::deserialize_statement(text);
  CHECK((read.error == "why" && read.accepts_bf16 && read.fields.size() == 2 && read.fields[1].is_digest));
  CHECK(read.room == whole.room);
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    CHECK_NOTHROW(decode::deserialize_statement(std::string_view(text).substr(0, cut)));
  }
}

TEST_CASE("texts of all processes come to all of them over a bootstrap", "[quick]") {
  for (const int size : {1, 2, 5}) {
    const std::vector<Outcome> outcomes = run_bootstrap_job(size, [](const comm::BootstrapOptions& options) {
      comm::Bootstrap bootstrap(options);
      const auto text_of = [](int rank) { return std::string(static_cast<std::size_t>(rank * 1000), 'x'); };
      const std::vector<std::string> texts = decode::gather_texts(bootstrap, text_of(options.rank));
      for (int rank = 0; rank < options.size; ++rank)
        expect(texts[static_cast<std::size_t>(rank)] == text_of(rank), "another text");
    });
    for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
  }
}

#ifdef HELIX_MPIRUN
namespace {

/// Four processes with the options `common`; rank 2 also has `odd`, the others `usual`.
Run run_job(const std::string& common, const std::string& usual, const std::string& odd) {
  return run_command(std::string(HELIX_MPIRUN) +
                     " sh -c 'if test $OMPI_COMM_WORLD_RANK = 2; then exec " HELIX_DECODE " " + common + " " +
                     odd + "; else exec " HELIX_DECODE " " + common + " " + usual + "; fi'");
}

}  // namespace

TEST_CASE("processes that differ in what matters decode nothing and name the first difference", "[mpi]") {
  struct Row {
    const char* name;
    std::string usual;
    std::string odd;
    std::string part;
  };
  const ScratchDirectory scratch;
  const std::string model = " --model " + (data_directory() / "llama-tiny").string() + " ";
  const auto other_weights = copy_model(scratch, "other_weights");
  change_weights(other_weights);
  const std::string other_model = " --model " + other_weights.string() + " ";
  write_file(scratch / "a.json", "[[5, 6, 7]]");
  write_file(scratch / "b.json", "[[5, 6, 8]]");
  const std::string a = "--teacher-force " + (scratch / "a.json").string();
  const std::string b = "--teacher-force " + (scratch / "b.json").string();
  const std::string ids = "--prompt-ids 1,2,3 ";
  const std::string drawn = ids + "--temperature 1 ";
  const std::vector<Row> rows = {
      {"prompt", model + ids, model + "--prompt-ids 1,2,4", "different prompt tokens"},
      {"seed", model + drawn + "--seed 7", model + drawn + "--seed 8",
       "rank 2 was started with --seed 8, rank 0 with --seed 7"},
      {"teacher", model + ids + a, model + ids + b, "different teacher tokens"},
      {"weights", model + ids, other_model + ids, "different weights in model.safetensors"},
      {"kv dtype", model + ids, model + ids + "--kv-dtype f32",
       "--kv-dtype f32, rank 0 with --kv-dtype bf16"},
      {"prefill tokens", model + ids, model + ids + "--prefill-tokens 256",
       "--prefill-tokens 256, rank 0 with --prefill-tokens auto"},
      {"topology", model + ids, model + ids + "--kvp 2 --tpa 2", "--kvp 2, rank 0 with --kvp 4"},
      {"timeout", model + ids, model + ids + "--timeout 59",
       "rank 2 was started with --timeout 59, rank 0 with --timeout 60"},
      {"no such option", model + ids, model + ids + "--sede 7", "rank 2: "},
      {"no such model", model + ids, "--model /nonexistent " + ids, "rank 2: /nonexistent"},
  };
  for (const Row& row : rows) {
    DYNAMIC_SECTION(row.name) {
      const bool is_topology = std::string_view(row.name) == "topology";
      const auto start = std::chrono::steady_clock::now();
      const Run run =
          run_job("--max-new-tokens 4", row.usual + " --kvp 4", row.odd + (is_topology ? "" : " --kvp 4"));
      INFO(run.output);
      CHECK(run.exit_code == 1);
      CHECK_THAT(run.output, ContainsSubstring(row.part) && !ContainsSubstring("sequence 0"));
      CHECK(run.output.find("helix-decode: ") == run.output.rfind("helix-decode: "));  // only one rank prints
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
    }
  }
}

TEST_CASE("topologies by auto are alike where machines have unequal parts of their memory for a rank",
          "[mpi]") {
  // Each of 4 ranks needs three tenths of a machine's memory. That fits if each rank has a machine of its
  // own, but not if the ranks other than rank 0 share a machine of 64 ranks.
  const auto planned = [](const std::string& local_ranks, std::int64_t tokens) {
    return run_command(std::string(HELIX_MPIRUN) + " sh -c '" + local_ranks +
                       "; exec " HELIX_DECODE " --model " + (data_directory() / "llama-tiny").string() +
                       " --kv-dtype f32 --topology auto --plan-only --synthetic-context " +
                       std::to_string(tokens) + "'");
  };
  const std::string alone = "OMPI_COMM_WORLD_LOCAL_SIZE=1; export OMPI_COMM_WORLD_LOCAL_SIZE";
  const std::string unequal =
      "test $OMPI_COMM_WORLD_RANK = 0 || OMPI_COMM_WORLD_LOCAL_SIZE=64; export OMPI_COMM_WORLD_LOCAL_SIZE";
  const std::int64_t token_bytes = 2 * 2 * 2 * 64 * 4;  // layers, K and V, heads, head_dim, f32
  const std::int64_t tokens = 4 * (decode::host_memory() * 3 / 10) / token_bytes;
  const Run each = planned(alone, tokens);
  INFO(each.output);
  CHECK(each.exit_code == 0);
  const Run some = planned(unequal, tokens);
  INFO(some.output);
  CHECK(some.exit_code == 1);
  CHECK_THAT(some.output, !ContainsSubstring("was started with"));
  // One rank prints for all.
  CHECK(some.output.find("helix-decode: ") == some.output.rfind("helix-decode: "));
}

TEST_CASE("processes may differ in their report, their threads and where their model lies", "[mpi]") {
  const ScratchDirectory scratch;
  const std::string here = " --model " + (data_directory() / "llama-tiny").string();
  const std::string there = " --model " + copy_model(scratch, "copy").string();
  const Run run = run_job("--prompt-ids 1,2,3 --max-new-tokens 4 --kvp 4",
                          here + " --threads 1 --json " + (scratch / "a.json").string(),
                          there + " --threads 2 --json " + (scratch / "b.json").string());
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK(nlohmann::json::parse(read_file(scratch / "a.json")).at("sequences").size() == 1);
}
#endif

}  // namespace helix::test
