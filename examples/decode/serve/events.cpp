// SPDX-License-Identifier: Apache-2.0
// Formats events as JSON.
#include "serve/events.hpp"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <helix/version.hpp>

namespace helix::decode {
namespace {

using Json = nlohmann::ordered_json;

/// Ids are UTF-8, as JSON is. Messages may quote paths of any bytes, of which those that are not UTF-8 become
/// U+FFFD.
std::string line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

/// JSON cannot represent infinities.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
  }
  return "unknown";
}

}  // namespace

std::string ready_event(const ServeAbilities& abilities) {
  return line(
      {{"event", "ready"},
       {"version", fmt::format("{}.{}.{}", HELIX_VERSION_MAJOR, HELIX_VERSION_MINOR, HELIX_VERSION_PATCH)},
       {"topology",
        {{"kvp", abilities.kvp},
         {"tpa", abilities.tpa},
         {"ep", abilities.ep},
         {"pp", abilities.pp},
         {"dp", abilities.dp}}},
       {"activation", abilities.activation},
       {"vocab", abilities.vocab},
       {"eos", abilities.eos_ids},
       {"max_sequences", abilities.max_sequences},
       {"context", abilities.max_tokens},
       {"kv_tokens", abilities.kv_tokens},
       {"temperature", abilities.temperature},
       {"memory",
        {{"weights_bytes", abilities.memory.weights_bytes},
         {"kv_bytes", abilities.memory.kv_bytes},
         {"workspace_bytes", abilities.memory.workspace_bytes}}}});
}

std::string token_event(std::string_view id, std::int64_t index, std::int32_t token,
                        const LogProbs& log_probs) {
  Json event{{"event", "token"}, {"id", id}, {"index", index}, {"token", token}};
  if (!log_probs.chosen.empty()) {
    event["log_prob"] = number(log_probs.chosen.front());
    Json best = Json::array();
    for (std::size_t i = 0; i < log_probs.best.size(); ++i) {
      if (log_probs.best_ids[i] >= 0)
        best.push_back(Json::array({log_probs.best_ids[i], number(log_probs.best[i])}));
    }
    event["best"] = std::move(best);
  }
  return line(event);
}

std::string end_event(std::string_view id, FinishReason reason, const Usage& usage,
                      const RequestTiming& timing) {
  const auto decoded = static_cast<double>(usage.completion_tokens - 1);
  return line({{"event", "end"},
               {"id", id},
               {"reason", to_string(reason)},
               {"usage",
                {{"prompt_tokens", usage.prompt_tokens},
                 {"cached_tokens", usage.cached_tokens},
                 {"completion_tokens", usage.completion_tokens}}},
               {"timing",
                {{"queued_ms", timing.queued_ms},
                 {"prefill_ms", timing.prefill_ms},
                 {"decode_ms", timing.decode_ms},
                 {"ttl_ms", decoded > 0 ? timing.decode_ms / decoded : 0.0}}}});
}

std::string error_event(std::string_view id, std::string_view message) {
  Json event{{"event", "error"}};
  if (!id.empty()) event["id"] = id;
  event["message"] = message;
  return line(event);
}

std::string stats_event(const ServeStats& stats) {
  return line({{"event", "stats"},
               {"queued", stats.queued},
               {"running", stats.running},
               {"retained", stats.retained},
               {"pages", stats.pages},
               {"pages_used", stats.pages_used},
               {"resident_bytes", stats.resident_bytes}});
}

}  // namespace helix::decode
