// SPDX-License-Identifier: Apache-2.0
// Optional members of backends. Library code calls them where a call compiles, and else does without. A
// member of that name that takes other arguments is refused, as it would be passed over silently; in a class
// that is final it is.
#pragma once

#include <type_traits>

namespace helix::detail {

struct OptionalNames {
  int project_qkv, prepare_qkv, prepare_latent, combine_exchange, reduce_norm, linear_swiglu, read_latents,
      choose_greedy;
};

struct NoMembers {};

/// Never made: `&WithOptionalNames<B>::name` is ambiguous exactly if B has a member of that name, whatever
/// its arguments and whoever may call it.
template <class B>
struct WithOptionalNames : std::conditional_t<std::is_final_v<B>, NoMembers, B>, OptionalNames {};

}  // namespace helix::detail

/// Does not compile if backend B, which cannot be called as name(arguments), has a member `name`.
#define HELIX_EXPECT_NO_MEMBER(B, name, arguments)                \
  static_assert(                                                  \
      requires { &::helix::detail::WithOptionalNames<B>::name; }, \
      "the backend has a member " #name ", but it cannot be called as " #name #arguments)
