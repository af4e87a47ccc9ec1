// SPDX-License-Identifier: Apache-2.0
// The statements that the processes of a job exchange before a weight is read: everything that must be equal
// in all of them.
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

/// One value that must be equal on all ranks.
struct JobField {
  /// An option such as "--seed", or words for what a digest stands for, such as "prompt tokens".
  std::string name;
  std::string value;       ///< As text.
  bool is_digest = false;  ///< Whether the value is a hash, which is useless to print.
};
using JobFields = std::vector<JobField>;

/// Adds the checkpoint's fingerprint: config.json, and for each file its tensor table and samples of its
/// contents (4 KB from each of up to 4096 tensors per checkpoint, at offsets derived from the tensor names).
/// The paths of the files may differ. Other weights of the same shapes change the fingerprint, but a change
/// of a few elements does so only if a sample holds them.
void add_fields(JobFields& fields, const Checkpoint& checkpoint);
/// Adds all values of the request.
void add_fields(JobFields& fields, const GenerationRequest& request);
/// Adds all widths.
void add_fields(JobFields& fields, const TopologySpec& topology);

/// How prompts may use a step, if the command line leaves it to each process's memory.
struct PromptRoom {
  std::int64_t tokens = std::numeric_limits<std::int64_t>::max();  ///< Maximum prompt tokens per step.
  bool can_expand = true;  ///< Whether prompts may use expanded latent attention.

  friend bool operator==(const PromptRoom&, const PromptRoom&) = default;
};

/// What one process reports to the others.
struct JobStatement {
  JobFields fields;
  std::string error;  ///< Why this process cannot take part; empty if it can.
  /// Whether bf16 activations suit this process: its machine multiplies bf16, and none of its options needs
  /// f32.
  bool accepts_bf16 = false;
  PromptRoom room{};
};

/// What follows from the statements of all processes; equal on each.
struct JobAgreement {
  bool accepts_bf16 = false;  ///< Whether all processes do.
  PromptRoom room{};          ///< The room that all processes have.
};

/// Serializes the statement, for processes of this program.
std::string serialize(const JobStatement& statement);
/// Reads the statement that serialize() wrote; malformed text gives a statement with an error.
JobStatement deserialize_statement(std::string_view text);

/// Checks the statements of all processes, by rank. Every rank that calls it with the same statements throws
/// the same error.
/// @throws Error(invalid_argument) naming the first rank that cannot take part and why, without its number if
/// all say the same; otherwise naming the first rank that differs from rank 0, what differs, and both values.
JobAgreement expect_agreement(const std::vector<JobStatement>& statements);

/// Gathers the text of every process on every process, by rank. Collective, bounded by the bootstrap's
/// timeout.
/// @throws Error(timeout), Error(peer_failed).
std::vector<std::string> gather_texts(comm::Bootstrap& bootstrap, const std::string& mine);

}  // namespace helix::decode
