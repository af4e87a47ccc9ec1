// SPDX-License-Identifier: Apache-2.0
// The messages of the rendezvous and of the heartbeats: plain structs of fixed size, and functions that
// validate them from untrusted bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <helix/error.hpp>

#include "comm/hmac.hpp"

namespace helix::comm {

/// First word of every rendezvous message. It also detects a machine of another byte order.
inline constexpr std::uint64_t kMagic = 0x32706174'73746f6f;

/// Copies `text` with a closing zero, truncated to fit.
inline void set_text(std::span<char> target, std::string_view text) {
  const std::size_t length = std::min(text.size(), target.size() - 1);
  std::copy_n(text.data(), length, target.data());
  target[length] = '\0';
}

/// Random bytes, unique to a connection or a process.
using Nonce = std::array<std::uint8_t, 16>;

/// Rank 0's first message on each connection.
struct Challenge {
  std::uint64_t magic = kMagic;
  Nonce nonce{};  // unique to this connection
};

enum class Channel : std::uint32_t { control, watch };

/// A rank's answer to the Challenge.
struct Hello {
  std::uint64_t magic = kMagic;
  Channel channel = Channel::control;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t unused = 0;
  std::uint64_t config_hash = 0;
  Nonce process{};  // unique to the process, equal on both of its connections
  Digest proof{};   // see proof_of()
};

enum class Answer : std::uint32_t { accepted, stranger };

/// Rank 0's immediate answer to a Hello. A connection lost before this answer does no harm.
struct Reply {
  std::uint64_t magic = kMagic;
  Answer answer = Answer::accepted;
  std::uint32_t unused = 0;
  Digest proof{};
};

/// Rank 0's last message of the rendezvous, sent on the control channel once all ranks are there.
struct Verdict {
  std::int32_t error_code = -1;  // -1: welcome
  std::array<char, 508> text{};
};

enum class BeatKind : std::uint32_t { alive, farewell, failure };

/// The one message of the watch channel.
struct Beat {
  BeatKind kind = BeatKind::alive;
  std::int32_t rank = 0;
  std::uint64_t step = 0;
  std::uint64_t operations = 0;
  std::uint32_t waited_ms = 0;  // in one wait at this step and operation; 0: not waiting
  std::array<char, 36> operation{};
  std::array<char, 448> text{};  // of a failure
};

// No padding: every byte that is sent was written.
static_assert(sizeof(Challenge) == 24 && sizeof(Hello) == 80 && sizeof(Reply) == 48);
static_assert(sizeof(Verdict) == 512 && sizeof(Beat) == 512);

/// The bytes as a Message if the size fits; nothing else is checked.
template <class Message>
std::optional<Message> message_from(std::span<const std::byte> bytes) {
  static_assert(std::is_trivially_copyable_v<Message>);
  if (bytes.size() != sizeof(Message)) return std::nullopt;
  Message message;
  std::memcpy(&message, bytes.data(), sizeof(message));
  return message;
}

/// Nothing if no process of ours can have sent the bytes. The numbers of a Hello may still contradict the
/// job's.
inline std::optional<Challenge> read_challenge(std::span<const std::byte> bytes) {
  auto message = message_from<Challenge>(bytes);
  return message && message->magic == kMagic ? message : std::nullopt;
}
inline std::optional<Hello> read_hello(std::span<const std::byte> bytes) {
  auto message = message_from<Hello>(bytes);
  const bool is_sound = message && message->magic == kMagic &&
                        (message->channel == Channel::control || message->channel == Channel::watch);
  return is_sound ? message : std::nullopt;
}
inline std::optional<Reply> read_reply(std::span<const std::byte> bytes) {
  auto message = message_from<Reply>(bytes);
  const bool is_sound = message && message->magic == kMagic &&
                        (message->answer == Answer::accepted || message->answer == Answer::stranger);
  return is_sound ? message : std::nullopt;
}
inline std::optional<Verdict> read_verdict(std::span<const std::byte> bytes) {
  auto message = message_from<Verdict>(bytes);
  const bool is_sound = message && message->error_code >= -1 &&
                        message->error_code <= static_cast<std::int32_t>(ErrorCode::internal) &&
                        message->text.back() == '\0';
  return is_sound ? message : std::nullopt;
}
inline std::optional<Beat> read_beat(std::span<const std::byte> bytes) {
  auto message = message_from<Beat>(bytes);
  const bool is_sound = message && message->kind <= BeatKind::failure && message->rank >= 0 &&
                        message->operation.back() == '\0' && message->text.back() == '\0';
  return is_sound ? message : std::nullopt;
}

/// The secret and the name that the ranks of one job share.
struct JobKey {
  std::string secret;
  std::string name;

  /// Proves on the connection of `challenge` that the sender of `message` knows the key: HMAC-SHA-256 of the
  /// job's name, the challenge, `process` (whose Hello this is or answers) and the message without its proof.
  template <class Message>
  Digest proof_of(const Message& message, const Challenge& challenge, const Nonce& process) const {
    Message bare = message;
    bare.proof = {};
    std::string text = std::to_string(sizeof(Message)) + " " + std::to_string(name.size()) + " " + name;
    const auto append = [&](const void* data, std::size_t bytes) {
      text.append(static_cast<const char*>(data), bytes);
    };
    append(&challenge, sizeof(challenge));
    append(process.data(), process.size());
    append(&bare, sizeof(bare));
    return hmac_sha256(secret, bytes_of(text));
  }

  template <class Message>
  bool is_proven(const Message& message, const Challenge& challenge, const Nonce& process) const {
    return equal_in_constant_time(message.proof, proof_of(message, challenge, process));
  }
};

}  // namespace helix::comm
