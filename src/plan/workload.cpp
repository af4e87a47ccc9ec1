// SPDX-License-Identifier: Apache-2.0
// Checks of Workload.

#include <helix/error.hpp>
#include <helix/limits.hpp>
#include <helix/plan/workload.hpp>

namespace helix::plan {

void Workload::check() const {
  const double length = in_tokens(context);
  HELIX_EXPECTS(length >= 1 && length <= static_cast<double>(kMaxTokens), ErrorCode::invalid_argument,
                "the context is ", length, " tokens; it must be in [1, ", kMaxTokens, "]");
  const auto check_count = [&](const char* name, std::int64_t value) {
    HELIX_EXPECTS(value >= 1 && value <= kMaxWorkloadCount, ErrorCode::invalid_argument, name, " is ", value,
                  "; it must be in [1, ", kMaxWorkloadCount, "]");
  };
  check_count("batch", batch);
  check_count("step_tokens", step_tokens);
  check_count("chunk", chunk);
  check_count("page_tokens", page_tokens);
  HELIX_EXPECTS(static_cast<double>(step_tokens) <= length, ErrorCode::invalid_argument, "step_tokens is ",
                step_tokens, " but the context has ", length, " tokens, which include them");
}

}  // namespace helix::plan
