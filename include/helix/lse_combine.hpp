// SPDX-License-Identifier: Apache-2.0
// lse_combine: the exact merge of partial attention over any number of shards.
#pragma once

#include <helix/backend/exchange.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

namespace helix {

/// Merges partials exactly: out = sum_r w_r out_r / (sum_r w_r + exp(sink - m)), w_r = exp(lse_r - m), with m
/// the largest lse (or sink). The sums run in the fixed order of r, so that replays give the same bits
/// (invariant 7). partial_lse is converted from its convention as it is read; the result's lse is natural
/// (invariant 5). A partial with lse = -inf counts 0, whatever its out holds. If all of them are -inf (and
/// there is no sink): out = 0, lse = -inf (invariant 6). See LseCombineArgs for shapes. Local; queued on
/// `stream`, allocates nothing, capturable. Source: paper section 2.1.1; Flash-Decoding.
/// @throws Error(invalid_argument) if shapes contradict each other or limits.hpp, rows of out or lse overlap,
/// an address is missing, or the convention is not a named one.
template <CombineBackend B>
void lse_combine(B& backend, const LseCombineArgs<typename B::Activation>& args, typename B::Stream stream) {
  const auto& out = args.partial_out;
  const auto& lse = args.partial_lse;
  HELIX_EXPECTS(out.extent(0) >= 1 && out.extent(0) == lse.extent(0), ErrorCode::invalid_argument,
                "lse_combine: ", out.extent(0), " partial outputs and ", lse.extent(0),
                " partial lse; give at least one, and as many of each");
  HELIX_EXPECTS(out.extent(0) <= kMaxRanks && out.extent(1) >= 0 && out.extent(1) <= kMaxStepTokens &&
                    out.extent(2) >= 0 && out.extent(2) <= kMaxCount && out.extent(3) >= 0 &&
                    out.extent(3) <= kMaxRowElements,
                ErrorCode::invalid_argument, "lse_combine: the partials are [", out.extent(0), ", ",
                out.extent(1), ", ", out.extent(2), ", ", out.extent(3), "]; at most [", kMaxRanks, ", ",
                kMaxStepTokens, ", ", kMaxCount, ", ", kMaxRowElements, "] are supported, and none below 0");
  HELIX_EXPECTS(out.extent(1) == lse.extent(1) && out.extent(2) == lse.extent(2), ErrorCode::invalid_argument,
                "lse_combine: partial outputs are of ", out.extent(1), " tokens and ", out.extent(2),
                " heads, partial lse of ", lse.extent(1), " and ", lse.extent(2));
  HELIX_EXPECTS(args.out.extent(0) == out.extent(1) && args.out.extent(1) == out.extent(2) &&
                    args.out.extent(2) == out.extent(3),
                ErrorCode::invalid_argument, "lse_combine: out is [", args.out.extent(0), ", ",
                args.out.extent(1), ", ", args.out.extent(2), "]; the partials are [", out.extent(1), ", ",
                out.extent(2), ", ", out.extent(3), "]");
  HELIX_EXPECTS(args.lse.data() == nullptr ||
                    (args.lse.extent(0) == out.extent(1) && args.lse.extent(1) == out.extent(2)),
                ErrorCode::invalid_argument, "lse_combine: lse is [", args.lse.extent(0), ", ",
                args.lse.extent(1), "]; the partials are [", out.extent(1), ", ", out.extent(2), "]");
  HELIX_EXPECTS(args.out.size() == 0 || (out.stride(3) == 1 && args.out.stride(2) == 1),
                ErrorCode::invalid_argument, "lse_combine: last strides must be 1; partials have ",
                out.stride(3), ", out has ", args.out.stride(2));
  detail::check_convention("lse_combine", args.convention);
  if (out.extent(1) == 0 || out.extent(2) == 0) return;
  detail::check_given("lse_combine", "partial_out", out.data(), out.extent(3));
  detail::check_given("lse_combine", "partial_lse", lse.data(), 1);
  detail::check_given("lse_combine", "out", args.out.data(), out.extent(3));
  detail::check_elements_apart("lse_combine", "out", args.out);
  if (args.lse.data() != nullptr) detail::check_elements_apart("lse_combine", "lse", args.lse);
  backend.lse_combine(args, stream);
}

/// Does not compile: the error names T and the activation type of B.
template <CombineBackend B, detail::OtherActivation<B> T>
void lse_combine(B&, const LseCombineArgs<T>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
