// SPDX-License-Identifier: Apache-2.0
// Job: everything that helix-decode knows from its command line, launcher and opened checkpoint.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "cli/launch.hpp"
#include "cli/options.hpp"
#include "generate/generation_defaults.hpp"
#include "generate/job_agreement.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

struct Job {
  Options options;
  LaunchOptions launch;
  Checkpoint checkpoint;
  ModelConfig config;
  GenerationDefaults defaults;
  std::optional<Topology> topo;
  std::vector<RankMemory> plan;

  /// Opens the checkpoint, decides what the command line leaves open, and plans memory.
  /// @throws Error for anything wrong with these.
  Job(Options given, const Launcher& launcher);

  /// Sets the activation type that all ranks agreed upon; another element size changes the memory plan.
  void set_activation(DType activation);

  /// The room for prompts that the command line asks for, or else that this process's memory allows.
  PromptRoom room() const;
  /// Sets the room that all ranks agreed upon, which is at most room(). Values from the command line stay as
  /// they are.
  void set_room(const PromptRoom& agreed);

  /// The values that must be equal in all processes of the job. Values that each process chose by its memory
  /// are not among them: room() holds those. `processor` is Launcher::processor().
  JobFields fields(const std::string& processor) const;

 private:
  /// Chooses how prompts are computed if the command line leaves it open, and plans memory.
  void choose_prefill(const Launcher& launcher);
  /// Whether the ranks of each GPU leave some of its memory unused. Compares with the total memory, because
  /// other programs change the free memory.
  bool is_plan_inside_gpus(const Launcher& launcher) const;
};

/// The activation type: the command line's, or else the one that suits what all machines can do.
DType choose_activation(const Job& job, const JobAgreement& agreement);

}  // namespace helix::decode
