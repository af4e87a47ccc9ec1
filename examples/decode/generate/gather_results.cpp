// SPDX-License-Identifier: Apache-2.0
// Serializes and deserializes sequences.
#include "generate/gather_results.hpp"

#include "generate/bytes.hpp"

namespace helix::decode {
namespace {

/// Calls each(field) for every field of a sequence. Reading and writing share it, so that they cannot differ.
template <class Sequence, class Each>
void for_each_field(Sequence& sequence, Each& each) {
  each(sequence.prompt);
  each(sequence.tokens);
  each(sequence.logits_first8);
  each(sequence.logits_norm);
}

}  // namespace

std::vector<std::byte> serialize(const std::vector<GeneratedSequence>& sequences) {
  ByteWriter writer;
  for (const GeneratedSequence& sequence : sequences) for_each_field(sequence, writer);
  return writer.take();
}

std::vector<GeneratedSequence> deserialize(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  std::vector<GeneratedSequence> sequences;
  while (!reader.is_at_end()) for_each_field(sequences.emplace_back(), reader);
  return sequences;
}

}  // namespace helix::decode
