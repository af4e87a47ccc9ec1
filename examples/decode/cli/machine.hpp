// SPDX-License-Identifier: Apache-2.0
// What this machine, or the container around this process, gives a job: memory and cores.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace helix::decode {

/// Finds the line of `text` (/proc/meminfo) that begins with `key`, such as "MemAvailable:   123 kB", and
/// returns its bytes; nullopt if there is no such line.
std::optional<std::int64_t> parse_memory(std::string_view text, std::string_view key);

/// The value under `key` in this machine's /proc/meminfo, but at most the limit of the container (cgroup v2);
/// nullopt if neither is known.
std::optional<std::int64_t> machine_memory(std::string_view key);

/// Memory of this machine in bytes, or of the container.
std::int64_t host_memory();

/// Cores that the text of a cgroup's cpu.max ("quota period" in microseconds, or "max period") allows,
/// rounded up; nullopt for no limit.
std::optional<int> parse_cpu_limit(std::string_view text);

/// Cores of this machine that this process may use, but at most the limit of the container (cgroup v2); at
/// least 1.
int machine_cores();

}  // namespace helix::decode
