// SPDX-License-Identifier: Apache-2.0
// BootstrapOptions::from_environment: reads the variables of torchrun, Open MPI and Slurm.
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "comm/socket.hpp"

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

/// The names of one launcher's environment variables.
struct Launcher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* job;
  const char* step = nullptr;  // step of the job, if the launcher has steps
};
constexpr std::array kLaunchers = {
    Launcher{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    Launcher{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    Launcher{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID",
             "SLURM_STEP_ID"},
};
constexpr int kMaxWorldSize = static_cast<int>(kMaxRanks);
constexpr std::size_t kMaxSecretBytes = 4096;

/// The job's name as this launcher gives it. Outer launchers' variables are ignored: their steps may differ
/// by rank.
std::string job_name(const Launcher& launcher) {
  std::string name = variable(launcher.job).value_or("");
  if (!name.empty() && launcher.step != nullptr)
    name.append("/").append(variable(launcher.step).value_or(""));
  return name;
}

/// Contents of the file that HELIX_JOB_SECRET_FILE names, without trailing line ends.
std::string secret_in(const char* file) {
  const std::string subject = message({"bootstrap: HELIX_JOB_SECRET_FILE is \"", file, "\", which "});
  // O_NONBLOCK: opening a FIFO does not wait for a writer; regular files ignore it.
  const Socket descriptor(::open(file, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  HELIX_EXPECTS(descriptor.is_open(), ErrorCode::io, subject, "cannot be opened: ", words_of(errno));
  struct stat status = {};
  HELIX_EXPECTS(::fstat(descriptor.fd(), &status) == 0 && S_ISREG(status.st_mode), ErrorCode::io, subject,
                "is not a regular file");
  constexpr std::size_t kLineEnd = 2;
  std::string secret(kMaxSecretBytes + kLineEnd + 1, '\0');
  const ssize_t num_bytes = ::pread(descriptor.fd(), secret.data(), secret.size(), 0);
  HELIX_EXPECTS(num_bytes >= 0, ErrorCode::io, subject, "cannot be read: ", words_of(errno));
  secret.resize(static_cast<std::size_t>(num_bytes));
  HELIX_EXPECTS(secret.size() <= kMaxSecretBytes + kLineEnd, ErrorCode::io, subject, "has ", status.st_size,
                " bytes; a secret of 1 to ", kMaxSecretBytes, " and the end of its line are needed");
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  return secret;
}

/// The job's secret, from the variable or the file; empty if neither is set.
std::string job_secret() {
  const char* direct = std::getenv("HELIX_JOB_SECRET");
  const char* file = std::getenv("HELIX_JOB_SECRET_FILE");
  HELIX_EXPECTS(direct == nullptr || file == nullptr, ErrorCode::invalid_argument,
                "bootstrap: HELIX_JOB_SECRET and HELIX_JOB_SECRET_FILE are both set; unset one");
  if (direct == nullptr && file == nullptr) return "";
  const std::string secret = direct != nullptr ? direct : secret_in(file);
  HELIX_EXPECTS(!secret.empty() && secret.size() <= kMaxSecretBytes, ErrorCode::invalid_argument,
                "bootstrap: the secret of ", direct != nullptr ? "HELIX_JOB_SECRET" : file, " has ",
                secret.size(), " bytes; 1 to ", kMaxSecretBytes, " are needed");
  return secret;
}

}  // namespace

BootstrapOptions BootstrapOptions::from_environment() {
  BootstrapOptions options;
  const auto* launcher = std::find_if(kLaunchers.begin(), kLaunchers.end(),
                                      [](const Launcher& l) { return variable(l.rank).has_value(); });
  if (launcher == kLaunchers.end()) return options;
  options.size = number(launcher->size, 1, kMaxWorldSize);
  options.rank = number(launcher->rank, 0, options.size - 1);
  // Without a local rank all ranks are taken to be on one machine.
  options.local_rank =
      variable(launcher->local_rank) ? number(launcher->local_rank, 0, kMaxWorldSize) : options.rank;
  const std::optional<std::string> address = variable("MASTER_ADDR");
  options.is_one_machine = options.size == 1 || variable(launcher->local_size) == variable(launcher->size) ||
                           variable("SLURM_NNODES") == "1";
  HELIX_EXPECTS(address || options.is_one_machine, ErrorCode::invalid_argument,
                "bootstrap: MASTER_ADDR is not set; set it to the host of rank 0 on all ranks");
  if (address) options.address = *address;
  if (const auto port = variable("MASTER_PORT")) {
    const bool is_taken = variable("TORCHELASTIC_RUN_ID").has_value();
    options.port = number("MASTER_PORT", *port, 1, 65534) + (is_taken ? 1 : 0);
  }
  options.listen_address = variable("HELIX_LISTEN_ADDR").value_or("");
  options.job = job_name(*launcher);
  options.secret = job_secret();
  return options;
}

}  // namespace helix::comm
