// SPDX-License-Identifier: Apache-2.0
// What this machine, or the container around this process, gives a job: memory and cores.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

namespace helix::decode {

/// Where the system shows the control groups (v1 and v2), which limit what the processes of a container, a
/// service or a batch job may use.
struct Cgroups {
  /// Folder of the mounted hierarchies: that of v2 is the folder itself, those of v1 are named after their
  /// controllers.
  std::filesystem::path root = "/sys/fs/cgroup";
  /// File of the groups of this process, a line "number:controllers:path" each.
  std::filesystem::path list = "/proc/self/cgroup";
};

/// Finds the line of `text` (/proc/meminfo) that begins with `key`, such as "MemAvailable:   123 kB", and
/// returns its bytes; nullopt if there is no such line.
std::optional<std::int64_t> parse_memory(std::string_view text, std::string_view key);

/// Bytes that this process's groups, and those that contain them, allow it: the least memory.max (v2) or
/// memory.limit_in_bytes (v1); nullopt for no limit.
std::optional<std::int64_t> memory_limit(const Cgroups& cgroups = {});

/// The value under `key` in this machine's /proc/meminfo, but at most memory_limit(); nullopt if neither is
/// known.
std::optional<std::int64_t> machine_memory(std::string_view key);

/// Memory of this machine in bytes, or of the container.
std::int64_t host_memory();

/// Cores that the text of a cgroup's cpu.max ("quota period" in microseconds, or "max period") allows,
/// rounded up; nullopt for no limit.
std::optional<int> parse_cpu_limit(std::string_view text);

/// Cores that this process's groups, and those that contain them, allow it, rounded up: the least cpu.max
/// (v2) or cpu.cfs_quota_us of cpu.cfs_period_us (v1); nullopt for no limit.
std::optional<int> cpu_limit(const Cgroups& cgroups = {});

/// Cores of this machine that this process may use, but at most cpu_limit(); at least 1.
int machine_cores();

}  // namespace helix::decode
