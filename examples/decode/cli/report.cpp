// SPDX-License-Identifier: Apache-2.0
// Formats a generation's result as text and JSON.
#include "cli/report.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <helix/cpu/tuning.hpp>
#include <helix/error.hpp>

#include "files/output_file.hpp"

namespace helix::decode {
namespace {

std::string format_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 2, kUnits[unit]);
}

const char* to_string(cpu::KernelTuning::Source source) {
  using Source = cpu::KernelTuning::Source;
  return source == Source::preset ? "preset" : source == Source::measured ? "measured" : "fixed";
}

}  // namespace

std::string format_bytes(std::int64_t bytes) {
  return bytes < 1024 ? fmt::format("{} B", bytes) : format_bytes(static_cast<double>(bytes));
}

std::string format_memory(const std::vector<RankMemory>& memory, const Topology& topo) {
  std::string text = fmt::format("memory a rank ({} ranks)\n  {:>5} {:>12} {:>12} {:>12} {:>12}\n",
                                 topo.world_size(), "rank", "weights", "KV", "workspace", "sum");
  // Sums are doubles because each part may be of any size.
  double weights = 0;
  double in_place = 0;
  double kv = 0;
  double workspace = 0;
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    const RankMemory& m = memory[rank];
    const auto sum = static_cast<double>(m.weights_bytes) + static_cast<double>(m.kv_bytes) +
                     static_cast<double>(m.workspace_bytes);
    text += fmt::format("  {:>5} {:>12} {:>12} {:>12} {:>12}\n", rank, format_bytes(m.weights_bytes),
                        format_bytes(m.kv_bytes), format_bytes(m.workspace_bytes), format_bytes(sum));
    weights += static_cast<double>(m.weights_bytes);
    in_place += static_cast<double>(m.weights_in_place_bytes);
    kv += static_cast<double>(m.kv_bytes);
    workspace += static_cast<double>(m.workspace_bytes);
  }
  text += fmt::format("  {:>5} {:>12} {:>12} {:>12} {:>12}\n", "all", format_bytes(weights), format_bytes(kv),
                      format_bytes(workspace), format_bytes(weights + kv + workspace));
  if (in_place > 0) {
    text += fmt::format("of the weights {} are used in the checkpoint's files, {} are copied\n",
                        format_bytes(in_place), format_bytes(weights - in_place));
  }
  return text;
}

std::string format_result(const GenerationResult& result) {
  std::string text;
  for (std::size_t i = 0; i < result.sequences.size(); ++i) {
    const GeneratedSequence& sequence = result.sequences[i];
    text += fmt::format("sequence {} ({} prompt tokens): {}\n", i, sequence.prompt.size(),
                        fmt::join(sequence.tokens, " "));
  }
  const GenerationTiming& t = result.timing;
  text += fmt::format(
      "load {:.1f} ms, prefill {:.1f} ms, TTL {:.3f} ms median, {:.3f} ms p99, {:.1f} tokens/s, KV read "
      "{:.2f} GB/s\n",
      t.load_ms, t.prefill_ms, t.ttl_median_ms, t.ttl_p99_ms, t.tokens_per_s, t.kv_gb_per_s);
  text += fmt::format("exchange: {} bytes a rank, layer and decode step\n",
                      result.exchange_bytes_per_rank_per_layer);
  return text;
}

std::string format_computation(const LaunchOptions& launch) {
  std::string text = fmt::format("activations: {}", to_string(launch.activation));
  if (launch.device == Device::cpu) {
    for (const cpu::KernelTuning& kernel : cpu::tuning()) {
      if (kernel.source == cpu::KernelTuning::Source::preset) continue;
      text += fmt::format("; {} {}{}", kernel.kernel, kernel.variant,
                          kernel.source == cpu::KernelTuning::Source::fixed ? " (fixed)" : "");
    }
  }
  return text + "\n";
}

void write_json(const std::filesystem::path& file, const Topology& topo, const GenerationRequest& request,
                const LaunchOptions& launch, const GenerationResult& result) {
  nlohmann::ordered_json json;
  json["topology"] = {{"world_size", topo.world_size()},
                      {"kvp", topo.kvp()},
                      {"tpa", topo.tpa()},
                      {"tpf", topo.tpf()},
                      {"ep", topo.ep()},
                      {"pp", topo.pp()},
                      {"dp", topo.dp()},
                      {"chunk", request.chunk},
                      {"page_tokens", request.page_tokens},
                      {"kv_dtype", std::string(to_string(request.kv_dtype))}};
  json["sequences"] = nlohmann::ordered_json::array();
  for (const GeneratedSequence& sequence : result.sequences) {
    json["sequences"].push_back({{"prompt", sequence.prompt},
                                 {"tokens", sequence.tokens},
                                 {"logits_first8", sequence.logits_first8},
                                 {"logits_norm", sequence.logits_norm}});
  }
  json["memory"]["ranks"] = nlohmann::ordered_json::array();
  for (const RankMemory& memory : result.memory) {
    json["memory"]["ranks"].push_back(
        {{"weights_bytes", memory.weights_bytes},
         {"weights_in_place_bytes", memory.weights_in_place_bytes},
         {"weights_copied_bytes", memory.weights_bytes - memory.weights_in_place_bytes},
         {"kv_bytes", memory.kv_bytes},
         {"workspace_bytes", memory.workspace_bytes},
         {"resident_bytes", memory.resident_bytes}});
  }
  json["device"] = launch.device == Device::cuda ? "cuda" : "cpu";
  json["activation"] = std::string(to_string(launch.activation));
  json["prefill_tokens"] = request.prefill_tokens;
  if (launch.device == Device::cpu) {
    json["tuning"] = nlohmann::ordered_json::object();
    for (const cpu::KernelTuning& kernel : cpu::tuning()) {
      json["tuning"][kernel.kernel] = {{"variant", kernel.variant}, {"source", to_string(kernel.source)}};
    }
  }
  const GenerationTiming& t = result.timing;
  json["timing"] = {{"load_ms", t.load_ms},
                    {"prefill_ms", t.prefill_ms},
                    {"ttl_ms", {{"median", t.ttl_median_ms}, {"p99", t.ttl_p99_ms}}},
                    {"tokens_per_s", t.tokens_per_s},
                    {"kv_gb_per_s", t.kv_gb_per_s}};
  json["exchange"] = {{"bytes_per_rank_per_layer", result.exchange_bytes_per_rank_per_layer}};
  json["captured_steps"] = result.captured_steps;
  write_output(file, json.dump(2) + "\n");
}

void check_same_tokens(const GenerationResult& result, const GenerationResult& one_rank) {
  HELIX_EXPECTS(result.sequences.size() == one_rank.sequences.size(), ErrorCode::internal,
                "verify: ", result.sequences.size(), " sequences, one rank gives ",
                one_rank.sequences.size());
  for (std::size_t i = 0; i < result.sequences.size(); ++i) {
    const TokenIds& a = result.sequences[i].tokens;
    const TokenIds& b = one_rank.sequences[i].tokens;
    const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    HELIX_EXPECTS(at == a.end() && other == b.end(), ErrorCode::internal, "verify: sequence ", i,
                  " differs at step ", at - a.begin(), ": token ", at == a.end() ? -1 : *at,
                  ", one rank gives ", other == b.end() ? -1 : *other);
  }
}

}  // namespace helix::decode
