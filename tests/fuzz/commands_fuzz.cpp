// SPDX-License-Identifier: Apache-2.0
// Any bytes as input to a serving decoder: each line gives an error event or a command, every request ends,
// and all pages are free again.
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "fuzz.hpp"
#include "serve/scheduler.hpp"
#include "serve/serve_request.hpp"

namespace {

using namespace helix;
using namespace helix::decode;

using helix::fuzz::require;

SchedulerSpec small_spec() {
  SchedulerSpec spec;
  spec.ledger = {
      .layout = KvLayout(2, 4), .page_tokens = 4, .num_pages = 20, .max_sequences = 6, .max_tokens = 64};
  spec.max_sequences = 3;
  spec.max_tokens = 64;
  spec.prefill_tokens = 7;
  spec.vocab = 50;
  spec.eos_ids = {9};
  return spec;
}

/// A step in which every row draws a token that depends on its position.
void step(Scheduler& scheduler) {
  const StepOrder order = scheduler.next();
  require(serialize(deserialize_order(serialize(order))) == serialize(order));
  ReplicaResult result;
  const Step& ordered = order.replicas.at(0).step;
  for (const std::uint64_t counter : ordered.draw_counters)
    result.tokens.push_back(static_cast<std::int32_t>(counter * 7 % 50));
  if (ordered.num_best) {
    result.log_probs.assign(result.tokens.size(), -1.0f);
    result.best_ids.assign(result.tokens.size() * static_cast<std::size_t>(*ordered.num_best), 1);
    result.best_log_probs.assign(result.best_ids.size(), -1.0f);
  }
  scheduler.complete({&result, 1});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  std::size_t events = 0;
  Scheduler scheduler(small_spec(), [&](const std::string& event) {
    require(event.ends_with("}\n") && event.find('\n') == event.size() - 1);
    ++events;
  });
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const auto parsed = parse_command(text.substr(0, end), {});
    const std::size_t before = events;
    if (const auto* bad = std::get_if<BadLine>(&parsed)) {
      require(!bad->message.empty());
      scheduler.refuse(*bad);
      require(events == before + 1);
    } else {
      scheduler.take(std::get<ServeCommand>(parsed));
    }
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
    step(scheduler);
  }
  for (int i = 0; !scheduler.is_idle(); ++i) {
    require(i < 100'000);
    step(scheduler);
  }
  scheduler.take(ForgetCommand{});
  step(scheduler);
  require(scheduler.stats().pages_used == 0);
  return 0;
}
