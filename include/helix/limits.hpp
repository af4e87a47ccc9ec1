// SPDX-License-Identifier: Apache-2.0
// The largest sizes that the library accepts, orders of magnitude beyond any model or machine.
#pragma once

#include <cstdint>

namespace helix {

// Sizes that a public header has checked against these limits cannot overflow int64 afterwards. The largest
// products:
// - a position on a rank, its chunk times KVP: kMaxTokens * kMaxRanks = 2^56;
// - a page's elements: kMaxPageTokens * kMaxRowElements = 2^55, and its bits: 2^60;
// - a step's widest buffer, the chosen experts' inputs, products and outputs: kMaxStepTokens * kMaxTopK * 4 *
//   kMaxWidth = 2^58 elements, 2^60 bytes; logits of a step: kMaxStepTokens * kMaxVocabulary = 2^48.
//
// Sums over layers, pages and sequences may come to more: they saturate (integers.hpp) and are refused.

/// Most tokens of a sequence, of a chunk of KvLayout, and of all pages of a stage.
inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
/// Most local tokens of a page.
inline constexpr std::int64_t kMaxPageTokens = std::int64_t{1} << 24;
/// Most tokens of a chunk in a KV cache; kernels count them in 32 bits.
inline constexpr std::int64_t kMaxChunk = (std::int64_t{1} << 31) - 1;
/// Most pages of a rank; page tables name them in 32 bits.
inline constexpr std::int64_t kMaxPages = (std::int64_t{1} << 31) - 1;
/// Most sequences of a job.
inline constexpr std::int64_t kMaxSequences = std::int64_t{1} << 20;
/// Most query tokens of a step, over all sequences.
inline constexpr std::int64_t kMaxStepTokens = std::int64_t{1} << 20;
/// Most ranks of a job, and of each of its groups.
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 16;
/// Most layers, heads or experts of a model.
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 20;
/// Most experts that a token visits.
inline constexpr std::int64_t kMaxTopK = std::int64_t{1} << 12;
/// Most routed experts that the backends of this library choose from.
inline constexpr std::int64_t kMaxRoutedExperts = std::int64_t{1} << 12;
/// Largest hidden size and FFN slice of a model, in elements.
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 24;
/// Most elements of a token's queries, keys or values over all heads.
inline constexpr std::int64_t kMaxRowElements = std::int64_t{1} << 31;
/// Most ids of a vocabulary.
inline constexpr std::int64_t kMaxVocabulary = std::int64_t{1} << 28;

}  // namespace helix
