// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: packs, checks and combines partial attention between KVP ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <helix/cpu/backend.hpp>
#include <helix/lse.hpp>

#include "cpu/row_tasks.hpp"
#include "cpu/target_slot.hpp"

namespace helix::cpu {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

/// Merges the partials of one token and head in rank order.
void combine_head(const LseCombineArgs<float>& args, std::int64_t token, std::int64_t head) {
  const std::int64_t ranks = args.partial_lse.extent(0);
  const std::int64_t dim = args.out.extent(2);
  const float sink = args.sinks != nullptr ? args.sinks[head] : kEmpty;
  float max = sink;
  for (std::int64_t rank = 0; rank < ranks; ++rank)
    max = larger_lse(max, to_natural(args.partial_lse(rank, token, head), args.convention));
  float* out = &args.out(token, head, 0);
  float sum = max == kEmpty ? 0.0f : std::exp(sink - max);
  bool is_first = true;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const float lse = to_natural(args.partial_lse(rank, token, head), args.convention);
    if (lse == kEmpty) continue;  // weight 0, whatever its out holds (invariant 6)
    const float weight = std::exp(lse - max);
    sum += weight;
    const float* partial = &args.partial_out(rank, token, head, 0);
    if (is_first) {
      for (std::int64_t d = 0; d < dim; ++d) out[d] = weight * partial[d];
    } else {
      for (std::int64_t d = 0; d < dim; ++d) out[d] += weight * partial[d];
    }
    is_first = false;
  }
  if (is_first) {
    std::fill_n(out, dim, 0.0f);
  } else {
    const float inverse = 1.0f / sum;
    for (std::int64_t d = 0; d < dim; ++d) out[d] *= inverse;
  }
  if (args.lse.data() != nullptr) args.lse(token, head) = max == kEmpty ? kEmpty : max + std::log(sum);
}

void write_headers(const StampArgs& args) {
  const ExchangeHeader header{exchange_epoch(++*args.exchanges, args.positions, args.tokens),
                              static_cast<std::uint32_t>(args.tokens),
                              static_cast<std::uint32_t>(args.sender)};
  for (std::int64_t i = 0; i < args.count; ++i)
    std::memcpy(args.message + i * args.message_bytes, &header, sizeof(header));
}

void check_headers(const CheckExchangeArgs& args) {
  ExchangeHeader own;
  std::memcpy(&own, args.sent, sizeof(own));
  for (std::int64_t peer = 0; peer < args.peers; ++peer) {
    ExchangeHeader header;
    std::memcpy(&header, args.messages + peer * args.message_bytes, sizeof(header));
    check_exchange_header(peer, header, own);
  }
}

}  // namespace

void Operators::pack_partial(const PackPartialArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t tokens = args.out.extent(0);
    const auto bytes = static_cast<std::size_t>(args.out.extent(2)) * sizeof(float);
    const PartialTarget<float> target = in_slot(args.target);
    const auto pack = [&](std::int64_t head, int) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        target.lse(token, head) = to_natural(args.lse(token, head), args.convention);
        std::memcpy(&target.out(token, head, 0), &args.out(token, head, 0), bytes);
      }
    };
    pool->parallel_for(args.out.extent(1), pack);
    if (target.headers.message != nullptr) write_headers(target.headers);
  });
}

void Operators::stamp(const StampArgs& args, Stream stream) const {
  stream.enqueue([args] { write_headers(args); });
}

void Operators::check_exchange(const CheckExchangeArgs& args, Stream stream) const {
  stream.enqueue([args] { check_headers(args); });
}

void Operators::combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<float>& combine,
                                 Stream stream) const {
  check_exchange(check, stream);
  lse_combine(combine, stream);
}

void Operators::lse_combine(const LseCombineArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t heads = args.out.extent(1);
    const std::int64_t elements = args.partial_lse.extent(0) * args.out.extent(2);
    for_each_row(*pool, args.out.extent(0) * heads, elements,
                 [&](std::int64_t row) { combine_head(args, row / heads, row % heads); });
  });
}

}  // namespace helix::cpu
