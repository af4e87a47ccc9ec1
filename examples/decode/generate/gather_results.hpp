// SPDX-License-Identifier: Apache-2.0
// Results of all ranks on every rank: bytes of unequal length over all_gather, and sequences as bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "generate/generation.hpp"
#include "model/decoder_backend.hpp"

namespace helix::decode {

/// Every rank's bytes on every rank, by rank. Collective.
template <DecoderBackend B>
std::vector<std::vector<std::byte>> gather_bytes(B& backend, typename B::Comm& comm,
                                                 std::span<const std::byte> mine, typename B::Stream stream) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto my_bytes = static_cast<std::int64_t>(mine.size());
  auto counts_device = backend.allocate((size + 1) * sizeof(std::int64_t));
  backend.upload(counts_device.data(), &my_bytes, sizeof(my_bytes), stream);
  comm.all_gather(counts_device.data(), counts_device.data() + sizeof(std::int64_t), sizeof(std::int64_t),
                  stream);
  std::vector<std::int64_t> counts(size);
  backend.download(counts.data(), counts_device.data() + sizeof(std::int64_t), size * sizeof(std::int64_t),
                   stream);

  const std::int64_t widest = std::max<std::int64_t>(1, *std::max_element(counts.begin(), counts.end()));
  auto device = backend.allocate(static_cast<std::size_t>(widest) * (size + 1));
  backend.upload(device.data(), mine.data(), mine.size(), stream);
  comm.all_gather(device.data(), device.data() + widest, widest, stream);
  std::vector<std::vector<std::byte>> all(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    all[rank].resize(static_cast<std::size_t>(counts[rank]));
    backend.download(all[rank].data(), device.data() + widest * (static_cast<std::int64_t>(rank) + 1),
                     all[rank].size(), stream);
  }
  return all;
}

/// The sequences as bytes, for ranks of this program.
std::vector<std::byte> serialize(const std::vector<GeneratedSequence>& sequences);
/// The sequences that serialize() wrote. @throws Error(internal) if bytes are missing.
std::vector<GeneratedSequence> deserialize(std::span<const std::byte> bytes);

/// Every rank's memory, by rank. Collective.
template <DecoderBackend B>
std::vector<RankMemory> gather_memory(B& backend, typename B::Comm& comm, const RankMemory& mine,
                                      typename B::Stream stream) {
  std::vector<RankMemory> all;
  for (const auto& bytes : gather_bytes(backend, comm, std::as_bytes(std::span(&mine, 1)), stream)) {
    std::memcpy(&all.emplace_back(), bytes.data(), sizeof(RankMemory));
  }
  return all;
}

/// The sequences of all ranks, by rank. Collective.
template <DecoderBackend B>
std::vector<GeneratedSequence> gather_sequences(B& backend, typename B::Comm& comm,
                                                const std::vector<GeneratedSequence>& mine,
                                                typename B::Stream stream) {
  std::vector<GeneratedSequence> all;
  for (const auto& bytes : gather_bytes(backend, comm, serialize(mine), stream)) {
    for (GeneratedSequence& sequence : deserialize(bytes)) all.push_back(std::move(sequence));
  }
  return all;
}

}  // namespace helix::decode
