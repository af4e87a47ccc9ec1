// SPDX-License-Identifier: Apache-2.0
// Job: what helix-decode knows once its checkpoint is open, from the command line and the launcher.
#pragma once

#include <optional>
#include <vector>

#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "cli/launch.hpp"
#include "cli/options.hpp"
#include "generate/job_agreement.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

struct Job {
  Options options;
  LaunchOptions launch;
  Checkpoint checkpoint;
  ModelConfig config;
  std::optional<Topology> topo;
  std::vector<RankMemory> plan;

  /// Opens the checkpoint, decides what the command line leaves open, and plans memory.
  /// @throws what is wrong with any of them.
  Job(Options given, const Launcher& launcher);

  /// Sets what all ranks agreed upon; elements of another size make another plan.
  void set_activation(DType activation);

  /// The room that prompts have by the command line, or else by this process's memory.
  PromptRoom room() const;
  /// Sets the room that all ranks agreed upon, no larger than room(). What the command line says stays.
  void set_room(const PromptRoom& agreed);

  /// What all processes of the job must have been started with. What each has chosen by its memory is left to
  /// room().
  JobFields fields() const;

 private:
  /// Chooses how prompts are computed where the command line leaves it open, and plans memory.
  void choose_prefill(const Launcher& launcher);
  /// Whether each GPU's ranks leave it some memory. Of all of it, not of what is free, which other
  /// programs change.
  bool is_plan_inside_gpus(const Launcher& launcher) const;
};

/// What activations are where the command line leaves it open, once it is known what all machines can do.
DType choose_activation(const Job& job, const JobAgreement& agreement);

}  // namespace helix::decode
