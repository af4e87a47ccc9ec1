// SPDX-License-Identifier: Apache-2.0
// BootstrapOptions::from_environment: what torchrun, Open MPI and Slurm tell a process.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>

#include <helix/comm/bootstrap.hpp>
#include <helix/error.hpp>

namespace helix::comm {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

int number(const char* name, const std::string& text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  HELIX_EXPECTS(error == std::errc() && end == text.data() + text.size() && value >= low && value <= high,
                ErrorCode::invalid_argument, "bootstrap: ", name, " is \"", text, "\"; a number from ", low,
                " to ", high, " is needed");
  return value;
}

int number(const char* name, int low, int high) {
  const std::optional<std::string> text = variable(name);
  HELIX_EXPECTS(text.has_value(), ErrorCode::invalid_argument, "bootstrap: ", name,
                " is not set; start the ranks with torchrun, mpirun or srun, or set it");
  return number(name, *text, low, high);
}

/// What one launcher calls the numbers of a process.
struct Launcher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr std::array kLaunchers = {
    Launcher{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    Launcher{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};
constexpr int kMaxRanks = 1 << 16;

}  // namespace

BootstrapOptions BootstrapOptions::from_environment() {
  BootstrapOptions options;
  const auto* launcher = std::find_if(kLaunchers.begin(), kLaunchers.end(),
                                      [](const Launcher& l) { return variable(l.rank).has_value(); });
  if (launcher == kLaunchers.end()) return options;
  options.size = number(launcher->size, 1, kMaxRanks);
  options.rank = number(launcher->rank, 0, options.size - 1);
  // Without it all ranks are taken to be on one machine.
  options.local_rank =
      variable(launcher->local_rank) ? number(launcher->local_rank, 0, kMaxRanks) : options.rank;
  const std::optional<std::string> address = variable("MASTER_ADDR");
  const bool is_one_machine = options.size == 1 ||
                              variable(launcher->local_size) == variable(launcher->size) ||
                              variable("SLURM_NNODES") == "1";
  HELIX_EXPECTS(address || is_one_machine, ErrorCode::invalid_argument,
                "bootstrap: MASTER_ADDR is not set; set it to the host of rank 0 on all ranks");
  if (address) options.address = *address;
  if (const auto port = variable("MASTER_PORT")) {
    const bool is_taken = variable("TORCHELASTIC_RUN_ID").has_value();
    options.port = number("MASTER_PORT", *port, 1, 65534) + (is_taken ? 1 : 0);
  }
  return options;
}

}  // namespace helix::comm
