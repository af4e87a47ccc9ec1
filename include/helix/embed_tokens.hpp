// SPDX-License-Identifier: Apache-2.0
// embed_tokens: token embedding, split over the vocabulary.
#pragma once

#include <cstdint>

#include <helix/backend/vocabulary.hpp>
#include <helix/error.hpp>
#include <helix/topology.hpp>

namespace helix {

/// Embeds tokens: out[t] = embedding of ids[t], equal on all N ranks. `table` holds this rank's rows,
/// Topology::vocab. The caller must have checked the ids against the vocabulary: an id outside gives a zero
/// row. Collective over the stage, with equal ids on all ranks; queued on `stream`, allocates nothing,
/// capturable. After an error of one rank alone its caller must call the stage's abort(), as for
/// VocabularyHead.
/// @throws Error(invalid_argument) if the stage communicator is not the topology's, the table is not this
/// rank's shard or not f32, f16 or bf16, or an address is missing.
template <VocabularyBackend B>
void embed_tokens(B& backend, const Topology& topology, const std::int32_t* ids, const WeightView& table,
                  TensorView<typename B::Activation, 2> out, typename B::Stream stream) {
  using T = typename B::Activation;
  auto* stage = &detail::given_comm("embed_tokens", "stage", backend.comms().stage);
  detail::check_stage_size("embed_tokens", *stage, topology.stage_size());
  const Range shard = topology.vocab(stage->rank());
  HELIX_EXPECTS(table.rows == shard.size() && table.cols == topology.shape().hidden,
                ErrorCode::invalid_argument, "embed_tokens: the table is [", table.rows, ", ", table.cols,
                "]; this rank's shard of the vocabulary is [", shard.size(), ", ", topology.shape().hidden,
                "]");
  HELIX_EXPECTS(out.extent(1) == table.cols && out.is_contiguous(), ErrorCode::invalid_argument,
                "embed_tokens: out is [", out.extent(0), ", ", out.extent(1), "] with strides [",
                out.stride(0), ", ", out.stride(1), "]; give [tokens, ", table.cols, "], contiguous");
  detail::check_weight_data("embed_tokens", "the table", table);
  detail::check_given("embed_tokens", "the table", table.data, table.rows);
  detail::check_given("embed_tokens", "ids", ids, out.extent(0));
  detail::check_given("embed_tokens", "out", out.data(), out.extent(0));
  if (out.extent(0) == 0) return;
  backend.embed(EmbedArgs<T>{.ids = ids, .table = table, .first_id = shard.begin, .out = out}, stream);
  stage->all_reduce(out.data(), out.data(), out.size(), kDTypeOf<T>, stream);
}

/// Does not compile: the error names T and the activation type of B.
template <VocabularyBackend B, detail::OtherActivation<B> T>
void embed_tokens(B&, const Topology&, const std::int32_t*, const WeightView&, TensorView<T, 2>,
                  typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
