// SPDX-License-Identifier: Apache-2.0
// FirstLogits: the logits of the first ids, which reports show besides the drawn tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include <helix/backend/vocabulary.hpp>
#include <helix/topology.hpp>

#include "model/decoder_backend.hpp"
#include "model/step.hpp"

namespace helix::decode {

/// Copies the first logits out of a step's logits, which the next step overwrites.
template <DecoderBackend B>
class FirstLogits {
 public:
  using T = typename B::Activation;

  FirstLogits(B& backend, const Topology& topo, std::int64_t max_rows, typename B::Stream stream)
      : backend_(&backend),
        topo_(&topo),
        rows_(backend.allocate(static_cast<std::size_t>(max_rows) * sizeof(std::int32_t))) {
    std::vector<std::int32_t> rows(static_cast<std::size_t>(max_rows));
    std::iota(rows.begin(), rows.end(), 0);
    backend.upload(rows_.data(), rows.data(), rows.size() * sizeof(std::int32_t), stream);
  }

  /// Copies from `logits` ([ranks, rows, width], the shards of the stage's first ranks, which hold all of
  /// these ids) to `to` (device, [rows, kFirstLogits]). If the vocabulary has fewer ids, the rest of `to` is
  /// unchanged. Queued on `stream`.
  void keep(TensorView<const T, 3> logits, T* to, typename B::Stream stream) {
    const std::int64_t rows = logits.extent(1);
    const TensorView<T, 2> kept(to, {rows, std::int64_t{kFirstLogits}});
    for (int rank = 0; rank < logits.extent(0); ++rank) {
      const Range shard = topo_->vocab(rank);
      const std::int64_t width = std::min(shard.end, std::int64_t{kFirstLogits}) - shard.begin;
      if (width <= 0) continue;
      const TensorView<const T, 2> from(logits.data() + rank * logits.stride(0), {rows, width},
                                        {logits.stride(1), 1});
      backend_->gather_rows(GatherRowsArgs<T>{.in = from,
                                              .rows = reinterpret_cast<const std::int32_t*>(rows_.data()),
                                              .out = kept.slice(1, shard.begin, width)},
                            stream);
    }
  }

 private:
  B* backend_;
  const Topology* topo_;
  typename B::Buffer rows_;  // 0, 1, ...: all rows are gathered
};

}  // namespace helix::decode
