// SPDX-License-Identifier: Apache-2.0
// The limits of a machine and of the control groups around a process, in trees like those of systems and
// containers.
#include "cli/machine.hpp"

#include <filesystem>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::decode {
namespace {

/// A folder of control groups, empty at first, and the file that lists those of a process.
class Tree {
 public:
  explicit Tree(const std::string& list) { folder_.write("list", list); }
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((cgroups().root / file).parent_path());
    test::write_file(cgroups().root / file, text);
  }
  Cgroups cgroups() const { return {.root = folder_ / "cgroup", .list = folder_ / "list"}; }

 private:
  test::ScratchDirectory folder_;
};

}  // namespace

TEST_CASE("memory is what the system's table says", "[quick]") {
  const char* const table = "MemTotal:  8 kB\nMemFree: 2 kB\nMemAvailable:   123 kB\n";
  CHECK(parse_memory(table, "MemAvailable:") == 123 * 1024);
  CHECK(parse_memory(table, "MemTotal:") == 8 * 1024);
  CHECK_FALSE(parse_memory("MemTotal:  8 kB\n", "MemAvailable:"));
  CHECK_FALSE(parse_memory("MemAvailable:", "MemAvailable:"));
  CHECK_FALSE(parse_memory("MemAvailable: lots\n", "MemAvailable:"));
  CHECK_FALSE(parse_memory("", "MemTotal:"));
}

TEST_CASE("the cores of a container are its quota of a period, rounded up", "[quick]") {
  CHECK(parse_cpu_limit("400000 100000\n") == 4);
  CHECK(parse_cpu_limit("150000 100000\n") == 2);
  CHECK(parse_cpu_limit("1000 100000") == 1);
  for (const char* text : {"max 100000\n", "", "100000", "0 100000", "100000 0", "-1 100000", "some 1"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_cpu_limit(text));
  }
  CHECK(machine_cores() >= 1);
}

TEST_CASE("a group of v2 has the least limit on the way to the root", "[quick]") {
  const Tree tree("0::/user.slice/job.scope\n");
  CHECK_FALSE(memory_limit(tree.cgroups()));
  CHECK_FALSE(cpu_limit(tree.cgroups()));
  tree.write("user.slice/job.scope/memory.max", "max\n");
  tree.write("user.slice/job.scope/cpu.max", "max 100000\n");
  CHECK_FALSE(memory_limit(tree.cgroups()));
  CHECK_FALSE(cpu_limit(tree.cgroups()));
  tree.write("user.slice/memory.max", "4096\n");
  tree.write("user.slice/cpu.max", "250000 100000\n");
  CHECK(memory_limit(tree.cgroups()) == 4096);
  CHECK(cpu_limit(tree.cgroups()) == 3);
  tree.write("user.slice/job.scope/memory.max", "8192\n");
  tree.write("user.slice/job.scope/cpu.max", "100000 100000\n");
  CHECK(memory_limit(tree.cgroups()) == 4096);
  CHECK(cpu_limit(tree.cgroups()) == 1);
  // Other groups do not count.
  tree.write("system.slice/memory.max", "1\n");
  tree.write("user.slice/other.scope/memory.max", "1\n");
  CHECK(memory_limit(tree.cgroups()) == 4096);
}

TEST_CASE("a container in a namespace of its own has the limit at the root", "[quick]") {
  // The second is a process whose group is outside of the namespace, the third one whose groups are unknown.
  for (const char* list : {"0::/\n", "0::/../other\n", ""}) {
    CAPTURE(list);
    const Tree tree(list);
    tree.write("memory.max", "123456789\n");
    tree.write("cpu.max", "200000 100000\n");
    tree.write("../other/memory.max", "1\n");
    CHECK(memory_limit(tree.cgroups()) == 123456789);
    CHECK(cpu_limit(tree.cgroups()) == 2);
  }
}

TEST_CASE("a group of v1 has the least limit along the path of its controller", "[quick]") {
  const Tree tree("12:cpu,cpuacct:/docker/a\n11:memory:/docker/a/b\n3:cpuset:/c\n1:name=systemd:/c\n0::/c\n");
  const std::string no_limit = "9223372036854771712\n";
  tree.write("memory/memory.limit_in_bytes", no_limit);
  tree.write("memory/docker/memory.limit_in_bytes", no_limit);
  tree.write("cpu,cpuacct/docker/a/cpu.cfs_quota_us", "-1\n");
  tree.write("cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000\n");
  CHECK_FALSE(memory_limit(tree.cgroups()));
  CHECK_FALSE(cpu_limit(tree.cgroups()));
  tree.write("memory/docker/a/b/memory.limit_in_bytes", "2000\n");
  tree.write("cpu,cpuacct/docker/a/cpu.cfs_quota_us", "350000\n");
  CHECK(memory_limit(tree.cgroups()) == 2000);
  CHECK(cpu_limit(tree.cgroups()) == 4);
  tree.write("memory/docker/a/memory.limit_in_bytes", "1000\n");
  tree.write("cpu,cpuacct/docker/cpu.cfs_quota_us", "50000\n");
  tree.write("cpu,cpuacct/docker/cpu.cfs_period_us", "100000\n");
  CHECK(memory_limit(tree.cgroups()) == 1000);
  CHECK(cpu_limit(tree.cgroups()) == 1);
  // The group of another controller, and another group of this one.
  tree.write("memory/c/memory.limit_in_bytes", "1\n");
  tree.write("cpuset/c/memory.limit_in_bytes", "1\n");
  CHECK(memory_limit(tree.cgroups()) == 1000);
}

TEST_CASE("a container of v1 that sees the path on the host has the limit at its root", "[quick]") {
  const Tree tree("2:memory:/docker/0123abcd\n1:cpuacct,cpu:/docker/0123abcd\n");
  tree.write("memory/memory.limit_in_bytes", "5000\n");
  tree.write("cpu/cpu.cfs_quota_us", "150000\n");  // mounted under its own name alone
  tree.write("cpu/cpu.cfs_period_us", "100000\n");
  CHECK(memory_limit(tree.cgroups()) == 5000);
  CHECK(cpu_limit(tree.cgroups()) == 2);
}

TEST_CASE("control groups that are missing or say nonsense set no limit", "[quick]") {
  const Cgroups nowhere{.root = "/no/such/folder", .list = "/no/such/file"};
  CHECK_FALSE(memory_limit(nowhere));
  CHECK_FALSE(cpu_limit(nowhere));
  for (const char* text : {"", "\n", "max", "max max", "some", "-1", "0", "99999999999999999999", "\n5 5"}) {
    const Tree tree("");
    for (const char* folder : {".", "a", "memory", "memory/a", "cpu"}) {
      for (const char* file :
           {"memory.max", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"}) {
        tree.write(std::filesystem::path(folder) / file, text);
      }
    }
    for (const char* list : {"", "\n\n", "0", "0:", "0::", "::", ":::::", "memory", "4:memory",
                             "4:memory:", "0::a\n4:memory:/a", "\xff"}) {
      CAPTURE(text, list);
      test::write_file(tree.cgroups().list, list);
      CHECK_FALSE(memory_limit(tree.cgroups()));
      CHECK_FALSE(cpu_limit(tree.cgroups()));
    }
  }
  // A folder in the place of each file.
  const Tree tree("0::/memory.max\n");
  tree.write("memory.max/cpu.max/file", "");
  CHECK_FALSE(memory_limit(tree.cgroups()));
  CHECK_FALSE(cpu_limit(tree.cgroups()));
  CHECK_FALSE(memory_limit({.root = tree.cgroups().root, .list = tree.cgroups().root}));
}

}  // namespace helix::decode
