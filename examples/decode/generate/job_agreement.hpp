// SPDX-License-Identifier: Apache-2.0
// What the processes of a job tell each other before a weight is read: everything that they must have been
// started with alike.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/topology.hpp>

#include "checkpoint/checkpoint.hpp"
#include "generate/generation.hpp"

namespace helix::decode {

/// One thing that must be alike on all ranks.
struct JobField {
  std::string name;        ///< An option, "--seed", or words for what a digest is taken of, "prompt tokens".
  std::string value;       ///< As text.
  bool is_digest = false;  ///< Whether the value is a hash, which tells a reader nothing.
};
using JobFields = std::vector<JobField>;

/// Adds the checkpoint's fingerprint: config.json, and of each file its table of tensors and samples of their
/// contents (4 KB of each of up to 4096 tensors a checkpoint, at offsets that follow from their names). Where
/// the files lie may differ. Other weights of the same shapes have another fingerprint; a change of a few
/// elements only if they are in a sample.
void add_fields(JobFields& fields, const Checkpoint& checkpoint);
/// Adds all of the request.
void add_fields(JobFields& fields, const GenerationRequest& request);
/// Adds all widths.
void add_fields(JobFields& fields, const TopologySpec& topology);

/// What a step may take of prompts where the command line leaves it to each process's memory.
struct PromptRoom {
  std::int64_t tokens = std::numeric_limits<std::int64_t>::max();  ///< Most prompt tokens a step.
  bool can_expand = true;  ///< Whether prompts of latent attention may attend expanded.

  friend bool operator==(const PromptRoom&, const PromptRoom&) = default;
};

/// What one process brings to the agreement.
struct JobStatement {
  JobFields fields;
  std::string error;  ///< Why this process cannot take part; empty: it can.
  /// Whether bf16 activations suit it: its machine multiplies bf16, and nothing it was asked for needs f32.
  bool accepts_bf16 = false;
  PromptRoom room{};
};

/// What follows from all processes' statements, the same on each.
struct JobAgreement {
  bool accepts_bf16 = false;  ///< Whether all do.
  PromptRoom room{};          ///< What all have room for.
};

/// The statement as bytes, for processes of this program.
std::string serialize(const JobStatement& statement);
/// The statement that serialize() wrote; one with an error where the text is none.
JobStatement deserialize_statement(std::string_view text);

/// Checks all processes' statements, by rank; every rank that calls it with the same ones throws the same.
/// @throws Error(invalid_argument) with the first rank that cannot take part and why, without its number if
/// all say the same; else with the first rank that differs from rank 0, what differs, and both values.
JobAgreement expect_agreement(const std::vector<JobStatement>& statements);

/// Every process's text on every process, by rank. Collective, bounded by the bootstrap's timeout.
/// @throws Error(timeout), Error(peer_failed).
std::vector<std::string> gather_texts(comm::Bootstrap& bootstrap, const std::string& mine);

}  // namespace helix::decode
