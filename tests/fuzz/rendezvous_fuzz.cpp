// SPDX-License-Identifier: Apache-2.0
// Any bytes as a message of the rendezvous or the watch are refused, or valid, but are never accepted as a
// proof of the job's secret.
#include <cstdint>
#include <cstring>
#include <span>

#include "comm/bootstrap_messages.hpp"
#include "fuzz.hpp"

namespace {

using namespace helix::comm;

using helix::fuzz::require;

template <std::size_t kSize>
bool ends(const std::array<char, kSize>& text) {
  return std::memchr(text.data(), 0, text.size()) != nullptr;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const JobKey key{.secret = "known to ranks alone", .name = "7"};
  const Challenge challenge{.nonce = {1, 2, 3}};
  if (const auto hello = read_hello(bytes)) {
    require(hello->magic == kMagic && hello->channel <= Channel::watch);
    require(!key.is_proven(*hello, challenge, hello->process));
  }
  if (const auto reply = read_reply(bytes)) {
    require(reply->magic == kMagic && reply->answer <= Answer::stranger);
    require(!key.is_proven(*reply, challenge, Nonce{}));
  }
  if (const auto greeting = read_challenge(bytes)) require(greeting->magic == kMagic);
  if (const auto verdict = read_verdict(bytes)) {
    require(verdict->error_code >= -1 && ends(verdict->text));
    if (verdict->error_code >= 0)
      require(helix::to_string(static_cast<helix::ErrorCode>(verdict->error_code)) != "unknown");
  }
  if (const auto beat = read_beat(bytes)) {
    require(beat->rank >= 0 && ends(beat->operation) && ends(beat->text));
    require(beat->kind == BeatKind::alive || beat->kind == BeatKind::farewell ||
            beat->kind == BeatKind::failure);
  }
  return 0;
}
