// SPDX-License-Identifier: Apache-2.0
// Reads memory and cores from /proc and from the files of control groups, v1 and v2.
#include "cli/machine.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include <helix/integers.hpp>

namespace helix::decode {
namespace {

/// The number that `text` begins with. Removes it and the spaces before it from `text`.
std::optional<std::int64_t> take_number(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

/// The text of `file`; empty if it cannot be read.
std::string read_small(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

/// Removes the part of `text` up to the next `separator`, or all of it, and returns that part.
std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

bool contains(std::string_view names, std::string_view name) {
  while (!names.empty()) {
    if (take_until(names, ',') == name) return true;
  }
  return false;
}

/// Appends `root` and the folders on the way from it to that of `group`.
void add_folders(std::vector<std::filesystem::path>& folders, const std::filesystem::path& root,
                 std::string_view group) {
  folders.push_back(root);
  for (const std::filesystem::path& part : std::filesystem::path(group).relative_path()) {
    // The group is outside of this process's namespace, whose root is all that it sees.
    if (part == "..") return;
    folders.push_back(folders.back() / part);
  }
}

/// Folders of the groups that limit this process: v2's, and those of v1's `controller`. Some do not exist
/// where a container sees the path of its group on the host but only a part of the host's tree.
std::vector<std::filesystem::path> group_folders(const Cgroups& cgroups, std::string_view controller) {
  std::vector<std::filesystem::path> folders{cgroups.root};
  const std::string list = read_small(cgroups.list);
  for (std::string_view rest = list; !rest.empty();) {
    std::string_view group = take_until(rest, '\n');
    take_until(group, ':');
    const std::string_view controllers = take_until(group, ':');
    if (controllers.empty()) {
      add_folders(folders, cgroups.root, group);
    } else if (contains(controllers, controller)) {
      // A hierarchy of several controllers is mounted under their joint name, a link, or both.
      add_folders(folders, cgroups.root / controllers, group);
      add_folders(folders, cgroups.root / controller, group);
    }
  }
  return folders;
}

/// The lesser of two limits, where nullopt is none.
template <typename Number>
std::optional<Number> least(std::optional<Number> a, std::optional<Number> b) {
  return a && b ? std::min(a, b) : a ? a : b;
}

/// The first line of `file`, without its end.
std::string read_line(const std::filesystem::path& file) {
  const std::string text = read_small(file);
  return text.substr(0, text.find('\n'));
}

/// The positive number of bytes that `text` begins with; nullopt for "max" and for v1's word for no limit, a
/// number close to 2^63.
std::optional<std::int64_t> parse_memory_limit(std::string_view text) {
  const std::optional<std::int64_t> bytes = take_number(text);
  if (!bytes || *bytes <= 0 || *bytes >= std::int64_t{1} << 62) return std::nullopt;
  return bytes;
}

}  // namespace

std::optional<std::int64_t> parse_memory(std::string_view text, std::string_view key) {
  const std::size_t at = text.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + key.size());
  const std::optional<std::int64_t> kilobytes = take_number(text);
  if (!kilobytes) return std::nullopt;
  return *kilobytes * 1024;
}

std::optional<std::int64_t> memory_limit(const Cgroups& cgroups) {
  std::optional<std::int64_t> limit;
  for (const std::filesystem::path& folder : group_folders(cgroups, "memory")) {
    for (const char* file : {"memory.max", "memory.limit_in_bytes"}) {
      limit = least(limit, parse_memory_limit(read_line(folder / file)));
    }
  }
  return limit;
}

std::optional<std::int64_t> machine_memory(std::string_view key) {
  return least(parse_memory(read_small("/proc/meminfo"), key), memory_limit());
}

std::int64_t host_memory() {
  // Where /proc is missing, what sysconf says.
  return machine_memory("MemTotal:")
      .value_or(static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) *
                static_cast<std::int64_t>(sysconf(_SC_PAGESIZE)));
}

std::optional<int> parse_cpu_limit(std::string_view text) {
  const std::optional<std::int64_t> quota = take_number(text);
  const std::optional<std::int64_t> period = take_number(text);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<int>(std::min<std::int64_t>(ceil_div(*quota, *period), std::numeric_limits<int>::max()));
}

std::optional<int> cpu_limit(const Cgroups& cgroups) {
  std::optional<int> limit;
  for (const std::filesystem::path& folder : group_folders(cgroups, "cpu")) {
    limit = least(limit, parse_cpu_limit(read_line(folder / "cpu.max")));
    const std::string quota = read_line(folder / "cpu.cfs_quota_us");  // -1 for none
    limit = least(limit, parse_cpu_limit(quota + " " + read_line(folder / "cpu.cfs_period_us")));
  }
  return limit;
}

int machine_cores() {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::min(cores, cpu_limit().value_or(cores));
}

}  // namespace helix::decode
