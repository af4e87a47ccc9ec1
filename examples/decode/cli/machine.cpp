// SPDX-License-Identifier: Apache-2.0
#include "cli/machine.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <system_error>
#include <thread>

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

std::string read_small(const char* file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
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

std::optional<std::int64_t> machine_memory(std::string_view key) {
  std::optional<std::int64_t> bytes = parse_memory(read_small("/proc/meminfo"), key);
  // The container's limit; the text "max" means none.
  const std::string limit_text = read_small("/sys/fs/cgroup/memory.max");
  std::string_view rest = limit_text;
  if (const auto limit = take_number(rest)) bytes = std::min(bytes.value_or(*limit), *limit);
  return bytes;
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

int machine_cores() {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::min(cores, parse_cpu_limit(read_small("/sys/fs/cgroup/cpu.max")).value_or(cores));
}

}  // namespace helix::decode
