// SPDX-License-Identifier: Apache-2.0
// What the processes of a job send each other before and beside their work: plain structs of one size each.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace helix::comm {

/// Opens a Hello; also tells a machine of another byte order.
inline constexpr std::uint64_t kMagic = 0x31706174'73746f6f;

/// Copies `text`, cut to what fits, with a closing zero.
inline void set_text(std::span<char> target, std::string_view text) {
  const std::size_t length = std::min(text.size(), target.size() - 1);
  std::copy_n(text.data(), length, target.data());
  target[length] = '\0';
}

enum class Channel : std::uint32_t { control, watch };

struct Hello {
  std::uint64_t magic = kMagic;
  Channel channel = Channel::control;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t unused = 0;
  std::uint64_t config_hash = 0;
};

/// Rank 0's answer to a Hello on the control channel, once all are there.
struct Verdict {
  std::int32_t error_code = -1;  // -1: welcome
  std::array<char, 508> text{};
};

enum class BeatKind : std::uint32_t { alive, farewell, failure };

/// Everything on the watch channel has this one size.
struct Beat {
  BeatKind kind = BeatKind::alive;
  std::int32_t rank = 0;
  std::uint64_t step = 0;
  std::uint64_t operations = 0;
  std::uint32_t waited_ms = 0;  // in one wait at this step and operation; 0: not waiting
  std::array<char, 36> operation{};
  std::array<char, 448> text{};  // of a failure
};
static_assert(sizeof(Beat) == 512 && std::is_trivially_copyable_v<Beat>);

}  // namespace helix::comm
