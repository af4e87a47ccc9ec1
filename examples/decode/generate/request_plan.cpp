// SPDX-License-Identifier: Apache-2.0
// Checks a request, and computes the capacities that it needs.
#include "generate/request_plan.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>
#include <helix/page_ledger.hpp>
#include <helix/plan/memory.hpp>

namespace helix::decode {

namespace {

constexpr std::int64_t kMaxDraftTokens = 64;

void expect_range(const char* name, std::int64_t value, std::int64_t smallest, std::int64_t largest) {
  HELIX_EXPECTS(value >= smallest && value <= largest, ErrorCode::invalid_argument, name, " is ", value,
                "; it must be in [", smallest, ", ", largest, "]");
}

void check_ids(const std::vector<TokenIds>& lists, const char* what, std::int64_t vocab) {
  for (std::size_t i = 0; i < lists.size(); ++i) {
    for (std::size_t j = 0; j < lists[i].size(); ++j) {
      const std::int32_t id = lists[i][j];
      HELIX_EXPECTS(id >= 0 && id < vocab, ErrorCode::invalid_argument, what, " ", i, ", token ", j, ": id ",
                    id, " is outside the vocabulary [0, ", vocab, ")");
    }
  }
}

/// Checks the ids and lengths of the prompts and continuations.
void check_sequences(const GenerationRequest& request, const ModelConfig& model, std::int64_t vocab) {
  check_ids(request.prompts, "prompt", vocab);
  check_ids(request.teacher, "teacher sequence", vocab);
  for (std::int64_t sequence = 0; sequence < request.num_sequences(); ++sequence) {
    const std::int64_t prompt = request.prompt_length(sequence);
    HELIX_EXPECTS(prompt >= 1, ErrorCode::invalid_argument, "prompt ", sequence,
                  " is empty; give at least one token");
    // Synthetic context measures speed and topology, so it may exceed what the model was trained for.
    HELIX_EXPECTS(request.synthetic_context > 0 || request.longest_length(sequence) <= model.max_positions,
                  ErrorCode::invalid_argument, "prompt ", sequence, " has ", prompt, " tokens and ",
                  request.max_new_tokens, " are to follow: ", request.longest_length(sequence),
                  " exceed the model's max_position_embeddings of ", model.max_positions,
                  "; shorten the prompt or --max-new-tokens");
  }
}

void check_serving(const ServeLimits& limits, std::int64_t prefill_tokens, const ModelConfig& model) {
  constexpr std::int64_t kMaxServedSequences = 4096;
  expect_range("max_sequences", limits.max_sequences, 1, kMaxServedSequences);
  HELIX_EXPECTS(limits.max_sequences + prefill_tokens <= kMaxStepTokens, ErrorCode::invalid_argument,
                "max_sequences is ", limits.max_sequences, " and prefill_tokens ", prefill_tokens,
                "; a step takes both, and at most ", kMaxStepTokens, " tokens");
  expect_range("context", limits.max_tokens, 2, model.max_positions);
  expect_range("kv_tokens", limits.kv_tokens, limits.max_tokens, kMaxTokens);
}

}  // namespace

void check_penalties(const Penalties& penalties) {
  constexpr float kMaxPenalty = 100.0f;
  constexpr float kMinRepetition = 1e-6f;  // dividing a logit by less may give infinity
  HELIX_EXPECTS(penalties.repetition >= kMinRepetition && penalties.repetition <= kMaxPenalty,
                ErrorCode::invalid_argument, "repetition_penalty is ", penalties.repetition,
                "; it must be in [", kMinRepetition, ", ", kMaxPenalty, "]");
  HELIX_EXPECTS(std::abs(penalties.presence) <= kMaxPenalty, ErrorCode::invalid_argument,
                "presence_penalty is ", penalties.presence, "; it must be in [-", kMaxPenalty, ", ",
                kMaxPenalty, "]");
  HELIX_EXPECTS(std::abs(penalties.frequency) <= kMaxPenalty, ErrorCode::invalid_argument,
                "frequency_penalty is ", penalties.frequency, "; it must be in [-", kMaxPenalty, ", ",
                kMaxPenalty, "]");
}

void check_sizes(const GenerationRequest& request) {
  expect_range("max_new_tokens", request.max_new_tokens, 1, kMaxTokens);
  expect_range("synthetic_context", request.synthetic_context, 0, kMaxTokens);
  expect_range("draft_tokens", request.draft_tokens, 1, kMaxDraftTokens);
  expect_range("chunk", request.chunk, 1, kMaxChunk);
  expect_range("page_tokens", request.page_tokens, 1, kMaxPageTokens);
  expect_range("prefill_tokens", request.prefill_tokens, 1, kMaxStepTokens);
  expect_range("the number of prompts", std::ssize(request.prompts), 0, kMaxSequences);
  const std::int64_t step_tokens = request.num_sequences() * request.draft_tokens;
  HELIX_EXPECTS(step_tokens <= kMaxStepTokens, ErrorCode::invalid_argument, request.num_sequences(),
                " sequences of ", request.draft_tokens, " draft_tokens make steps of ", step_tokens,
                " tokens; at most ", kMaxStepTokens, " are supported: give fewer of either");
  for (std::int64_t sequence = 0; sequence < request.num_sequences(); ++sequence) {
    HELIX_EXPECTS(request.longest_length(sequence) <= kMaxTokens, ErrorCode::invalid_argument, "prompt ",
                  sequence, " has ", request.prompt_length(sequence), " tokens and ", request.max_new_tokens,
                  " are to follow; a sequence has at most ", kMaxTokens);
  }
}

void check_request(const GenerationRequest& request, const ModelConfig& model, const Topology& topo) {
  HELIX_EXPECTS(request.serving || request.synthetic_context > 0 || !request.prompts.empty(),
                ErrorCode::invalid_argument,
                "no prompts: give --prompt-ids, --prompts, --synthetic-context or --serve");
  check_sizes(request);
  if (request.serving) check_serving(*request.serving, request.prefill_tokens, model);
  HELIX_EXPECTS(request.draft_tokens == 1 || !request.teacher.empty(), ErrorCode::invalid_argument,
                "draft_tokens is ", request.draft_tokens, " but there are no drafts: give --teacher-force");
  HELIX_EXPECTS(request.teacher.empty() || std::ssize(request.teacher) == request.num_sequences(),
                ErrorCode::invalid_argument, "there are ", request.teacher.size(), " teacher sequences for ",
                request.num_sequences(), " prompts; give one each");
  const ModelShape& shape = topo.shape();
  const bool is_mixed = request.kv_dtype == DType::fp8_ds_mla;
  HELIX_EXPECTS(!is_mixed || shape.is_mla(), ErrorCode::invalid_argument,
                "kv_dtype is fp8_ds_mla, but the model has no latent attention; give fp8_e4m3");
  HELIX_EXPECTS(!is_mixed || detail::fits_mixed_rows(shape.head_dim, shape.value_dim),
                ErrorCode::invalid_argument, "kv_dtype is fp8_ds_mla, but the model's latents have ",
                shape.value_dim, " columns and ", shape.head_dim - shape.value_dim,
                " of rope, where a multiple of 4 and an even number are needed; give fp8_e4m3 or bf16");
  check_sampling(request.sampling);
  check_penalties(request.penalties);
  HELIX_EXPECTS(!request.penalties.any() || request.teacher.empty(), ErrorCode::invalid_argument,
                "penalties depend on the tokens drawn, and --teacher-force gives others: drop one of them");
  check_sequences(request, model, topo.shape().vocab);
}

KvCacheSpec plan_cache(const GenerationRequest& request, const Topology& topo, int stage, int replica) {
  const Range mine = replica_sequences(topo, request, replica);
  KvCacheSpec spec;
  spec.dtype = request.kv_dtype;
  spec.num_layers = topo.layers(stage).size();
  spec.page_tokens = request.page_tokens;
  spec.chunk = request.chunk;
  spec.max_sequences = std::max<std::int64_t>(1, mine.size());
  std::vector<std::int64_t> lengths;
  if (request.serving) {
    // The caches of as many ended requests as running ones are kept. Each sequence may leave a page half
    // empty, in addition to the pages of all tokens.
    spec.max_sequences = 2 * request.serving->max_sequences;
    spec.max_tokens = request.serving->max_tokens;
    lengths.assign(static_cast<std::size_t>(spec.max_sequences), 1);
    lengths.push_back(request.serving->kv_tokens);
  }
  for (std::int64_t sequence = mine.begin; sequence < mine.end; ++sequence) {
    lengths.push_back(request.longest_length(sequence));
    spec.max_tokens = std::max(spec.max_tokens, lengths.back());
  }
  const KvLayout layout(topo.kvp(), request.chunk);
  spec.num_pages = std::max<std::int64_t>(1, PageLedger::pages_needed(layout, request.page_tokens, lengths));
  HELIX_EXPECTS(spec.num_pages <= kMaxPages, ErrorCode::capacity, "the KV cache of a rank needs ",
                spec.num_pages, " pages of ", spec.page_tokens, " tokens; at most ", kMaxPages,
                " are supported: use larger pages, fewer tokens or a larger KVP");
  spec.max_tokens = std::max<std::int64_t>(1, spec.max_tokens);
  return spec;
}

MlaPrefill plan_mla_prefill(const GenerationRequest& request, const Topology& topo) {
  constexpr std::int64_t kMaxPrefillStepTokens = 8192;
  MlaPrefill prefill{.form = request.mla_prefill};
  const bool has_chunks = request.serving || request.synthetic_context == 0;
  const bool is_ever_chosen =
      prefill.form == MlaForm::expanded || request.prefill_tokens >= kMinExpandedTokens;
  if (!topo.shape().is_mla() || !has_chunks || !is_ever_chosen || prefill.form == MlaForm::absorbed)
    return {.form = MlaForm::absorbed};
  std::int64_t longest = request.serving ? request.serving->max_tokens : 0;
  for (std::int64_t sequence = 0; sequence < request.num_sequences(); ++sequence)
    longest = std::max(longest, request.longest_length(sequence));
  prefill.max_tokens =
      std::min(kMaxPrefillStepTokens, KvLayout(topo.kvp(), request.chunk).length(longest, 0));
  return prefill;
}

StageLimits plan_limits(const GenerationRequest& request, const Topology& topo, int replica) {
  const std::int64_t sequences = std::max<std::int64_t>(1, replica_sequences(topo, request, replica).size());
  StageLimits limits;
  limits.max_slices = std::max(limits.max_slices, request.hop_b_slices);
  limits.mla_prefill = plan_mla_prefill(request, topo);
  if (request.serving) {
    limits.max_sequences = limits.max_logit_rows = request.serving->max_sequences;
    limits.max_step_tokens = request.serving->max_sequences + request.prefill_tokens;
    return limits;
  }
  limits.max_sequences = sequences;
  limits.max_logit_rows = sequences * request.draft_tokens;
  limits.max_step_tokens = limits.max_logit_rows;
  if (request.synthetic_context == 0) {
    std::int64_t prompt_tokens = 0;
    for (const TokenIds& prompt : request.prompts) prompt_tokens += std::ssize(prompt);
    limits.max_step_tokens =
        std::max(limits.max_step_tokens, std::min(request.prefill_tokens, prompt_tokens));
  }
  return limits;
}

namespace {

/// Two prompt lengths whose expansion uses every block size that a prompt of up to `most` tokens can need.
/// Block sizes are powers of two, of at least 64 rows (detail::for_each_row_block()).
std::vector<std::int64_t> expanded_prompts(std::int64_t most) {
  constexpr std::int64_t kMinRows = 64;
  if (most <= 0) return {};
  const auto largest = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(most)));
  if (largest <= kMinRows) return {most};
  return {largest, largest - kMinRows};
}

}  // namespace

WarmUp plan_warm_up(const GenerationRequest& request, const Topology& topo, int replica) {
  const std::int64_t most_expanded = plan_mla_prefill(request, topo).room() * topo.kvp();
  if (request.serving) {
    return {.prefill_tokens = request.prefill_tokens,
            .prompts = expanded_prompts(std::min(most_expanded, request.serving->max_tokens)),
            .sequences = 1};
  }
  const Range mine = replica_sequences(topo, request, replica);
  WarmUp shapes{.sequences = mine.size(),
                .decode_tokens = std::min(request.draft_tokens, request.max_new_tokens),
                .is_random = request.sampling.temperature > 0.0f};
  std::int64_t longest = 0;
  for (std::int64_t i = mine.begin; i < mine.end && request.synthetic_context == 0; ++i) {
    const std::int64_t tokens = std::ssize(request.prompts[static_cast<std::size_t>(i)]);
    shapes.prefill_tokens += tokens;
    longest = std::max(longest, tokens);
  }
  shapes.prefill_tokens = std::min(shapes.prefill_tokens, request.prefill_tokens);
  shapes.prompts = expanded_prompts(std::min(longest, most_expanded));
  return shapes;
}

namespace {

plan::KvPages pages_of(const GenerationRequest& request, const Topology& topo, std::int64_t layers) {
  const ModelShape& shape = topo.shape();
  return {
      .element_bits = 8 * static_cast<std::int64_t>(size_bytes(request.kv_dtype)),
      .row_bytes = shape.is_mla() ? latent_row_bytes(request.kv_dtype, shape.head_dim, shape.value_dim) : 0,
      .num_layers = layers,
      .page_tokens = request.page_tokens,
      .chunk = request.chunk};
}

}  // namespace

std::int64_t planned_pool_bytes(const GenerationRequest& request, const Topology& topo,
                                const RankCoordinates& at) {
  const KvCacheSpec cache = plan_cache(request, topo, at.stage, at.replica);
  const plan::KvPages pages = pages_of(request, topo, cache.num_layers);
  return saturating_product(cache.num_pages, plan::kv_page_bytes(topo, at.stage_rank, pages));
}

std::int64_t planned_kv_bytes(const GenerationRequest& request, const Topology& topo,
                              const RankCoordinates& at, std::int64_t sequence) {
  const plan::KvPages pages = pages_of(request, topo, topo.layers(at.stage).size());
  const std::int64_t length = request.longest_length(sequence);
  return plan::kv_page_bytes_used(topo, at.stage_rank, pages, {&length, 1});
}

std::int64_t kv_bytes_per_token(const GenerationRequest& request, const Topology& topo) {
  const ModelShape& shape = topo.shape();
  const std::int64_t row_bytes =
      shape.is_mla() ? latent_row_bytes(request.kv_dtype, shape.head_dim, shape.value_dim)
                     : shape.kv_elements() * static_cast<std::int64_t>(size_bytes(request.kv_dtype));
  return shape.num_layers * row_bytes * topo.kv_copies();
}

}  // namespace helix::decode
