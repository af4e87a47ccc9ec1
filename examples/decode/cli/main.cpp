// SPDX-License-Identifier: Apache-2.0
// helix-decode: runs a Llama or DeepSeek checkpoint under a Helix topology, with ranks as threads or
// processes.
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/tuning.hpp>
#include <helix/error.hpp>

#include "checkpoint/mapped_file.hpp"
#include "cli/job.hpp"
#include "cli/launch.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "cli/warnings.hpp"
#include "examples/nccl_environment.hpp"
#include "files/output_file.hpp"
#include "files/reason.hpp"
#include "files/standard_streams.hpp"
#include "files/strict_json.hpp"
#include "serve/frontend.hpp"

namespace helix::decode {
namespace {

/// Gives the threads that this program starts stacks of at least 2 MiB, as the library's own threads have
/// them. A std::thread otherwise gets what `ulimit -s` says, and the one that reads requests keeps 64 KiB
/// there.
void ensure_stacks_of_threads() {
  constexpr std::size_t kLeastBytes = std::size_t{2} << 20;
  pthread_attr_t usual;
  if (pthread_getattr_default_np(&usual) != 0) return;
  std::size_t bytes = 0;
  if (pthread_attr_getstacksize(&usual, &bytes) == 0 && bytes < kLeastBytes &&
      pthread_attr_setstacksize(&usual, kLeastBytes) == 0)
    pthread_setattr_default_np(&usual);
  pthread_attr_destroy(&usual);
}

/// Writes to standard output; a failed write shows when the stream is flushed.
void print(const std::string& text) {
  static_cast<void>(std::fputs(text.c_str(), stdout));
}

/// Prints what is known before a weight is loaded.
void print_plan(const Launcher& launcher, const ModelConfig& config, const Topology& topo,
                const GenerationRequest& request, const LaunchOptions& launch,
                const std::vector<RankMemory>& plan) {
  std::string text;
  if (request.synthetic_context > config.max_positions) {
    text = fmt::format(
        "note: {} tokens of synthetic context exceed the model's {} positions; the limit is lifted for this "
        "run\n",
        request.synthetic_context, config.max_positions);
  }
  text += fmt::format("{}\n{}", topo.to_string(), format_memory(plan, topo));
  const std::string devices = launcher.describe_devices(topo, launch);
  if (!devices.empty()) text += devices + "\n";
  if (request.synthetic_context == 0)
    text += fmt::format("prefill: at most {} prompt tokens a step\n", request.prefill_tokens);
  if (request.serving) {
    print_error(text);  // standard output belongs to the client
  } else {
    print(text);
    flush_standard_output();
  }
}

/// Whether this process can use 16-bit activations and none of its options needs f32.
bool accepts_16_bit(const Options& options) {
  return !options.verify && (options.device == Device::cuda || helix::cpu::has_bf16_products());
}

/// Serves requests until standard input ends or nobody reads standard output.
/// @throws Error(io) if standard output cannot be written.
void serve(const Job& job, Launcher& launcher) {
  std::optional<Frontend> client;
  LaunchOptions launch = job.launch;
  if (launcher.rank() == 0) launch.client = &client.emplace(STDIN_FILENO, STDOUT_FILENO, launch.timeout);
  launcher.run(job.checkpoint, job.config, *job.topo, job.options.request, launch);
  if (!client) return;
  const std::string lost = client->finish();
  HELIX_EXPECTS(lost.empty(), ErrorCode::io, lost);
}

void run(const Job& job, Launcher& launcher) {
  const bool is_root = launcher.rank() == 0;
  const auto& [options, launch, checkpoint, config, defaults, topo, plan] = job;
  const GenerationRequest& request = options.request;
  if (is_root) print_plan(launcher, config, *topo, request, launch, plan);
  if (!options.is_plan_only) expect_memory(launcher, launch, plan);
  for (const std::string& line :
       warnings(launcher, checkpoint, config, defaults, *topo, request, launch, plan))
    print_error(line + "\n");
  if (options.is_plan_only) return;
  const bool is_compared = options.verify && topo->world_size() > 1;
  if (is_root && options.verify && !is_compared)
    print_error("warning: --verify compares with one rank, and there is no other: nothing is compared\n");

  if (request.serving) {
    serve(job, launcher);
    return;
  }
  const GenerationResult result = launcher.run(checkpoint, config, *topo, request, launch);
  if (!is_root) return;
  print(format_result(result) + format_computation(launch));
  if (!options.json.empty()) write_json(options.json, *topo, request, launch, result);
  if (is_compared) {
    const Topology one_rank(TopologySpec{}, config.shape);
    check_same_tokens(result, run_local(checkpoint, config, one_rank, request, launch));
    print(fmt::format("verified: {} ranks give the tokens of one rank\n", topo->world_size()));
  }
}

/// Makes the device's launcher. If that fails and there is an earlier `error`, that error is thrown instead.
std::unique_ptr<Launcher> find_launcher(Device device, std::chrono::seconds timeout,
                                        const std::string& error) {
  try {
    return make_launcher(device, timeout);
  } catch (const std::exception&) {
    if (error.empty()) throw;
    throw Error(ErrorCode::invalid_argument, error);
  }
}

/// Whether the command line has --peer-memory on. This is needed before the options are parsed, because
/// parsing asks the driver for devices and the environment must be set before that.
bool asks_for_peer_memory(std::span<char* const> arguments) {
  constexpr std::string_view kOption = "--peer-memory";
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--peer-memory=on") return true;
    if (argument == kOption && i + 1 < arguments.size() && std::string_view(arguments[i + 1]) == "on")
      return true;
  }
  return false;
}

}  // namespace
}  // namespace helix::decode

int main(int argc, char** argv) {
  using namespace helix::decode;
  prepare_standard_streams();
  ensure_stacks_of_threads();
  guard_mappings("helix-decode");
  helix::turn_nccl_multicast_off();
  helix::promise_nccl_one_graph_at_a_time();
  if (asks_for_peer_memory({argv, static_cast<std::size_t>(argc)})) helix::let_ranks_share_a_gpu();
  std::unique_ptr<Launcher> launcher = make_thread_launcher();  // replaced once the device is known
  try {
    // The other processes wait for this one, so an error is sent to all of them before this process ends.
    JobStatement statement;
    std::optional<Options> options;
    try {
      options = parse_options(argc, argv);
      if (!options) {
        flush_standard_output();
        return 0;
      }
    } catch (const std::exception& error) {
      statement.error = reason_of(error);
    }
    launcher =
        find_launcher(options ? options->device : named_device(argc, argv),
                      std::chrono::seconds(options ? options->timeout_seconds : Options{}.timeout_seconds),
                      statement.error);
    launcher->compare_machines();
    std::optional<Job> job;
    if (options) {
      try {
        if (!options->tuning.empty()) helix::cpu::fix_tuning(options->tuning);
        job.emplace(std::move(*options), *launcher);
        if (launcher->has_processes())
          statement.fields = job->fields(launcher->processor());  // this reads samples of all weights
      } catch (const std::exception& error) {
        statement.error = reason_of(error);
      }
    }
    if (job) {
      statement.accepts_bf16 = accepts_16_bit(job->options);
      statement.room = job->room();
    }
    const JobAgreement agreement = launcher->agree(statement);
    job->set_activation(choose_activation(*job, agreement));
    job->set_room(agreement.room);
    run(*job, *launcher);
    flush_standard_output();
    return 0;
  } catch (const std::exception& error) {
    const bool is_told = launcher->all_fail_alike();
    const std::string reason = one_line(reason_of(error));
    const std::string message = !is_told                ? launcher->fail(reason)
                                : launcher->rank() == 0 ? reason
                                                        : std::string();
    if (!message.empty()) print_error("helix-decode: " + message + "\n");
    return 1;
  }
}
