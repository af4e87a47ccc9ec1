// SPDX-License-Identifier: Apache-2.0
// project_qkv on a GPU compared with the product followed by prepare_qkv: the same bits, and one kernel
// exactly where that is promised.
#include <cstddef>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/gpu.hpp"
#include "cuda/qkv_projection.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

/// Checks that both ways give the same bits, and that one kernel does everything if and only if `is_one`.
template <class T>
void check(const QkvMachine<T>& machine, const QkvCase& of, bool is_one) {
  CAPTURE(of.tokens.positions, of.tokens.sequences, of.q_heads, of.kv_heads, of.dim, of.hidden, of.rotary,
          of.pad, of.kvp, to_string(of.kv), of.is_interleaved, of.is_token_major, of.has_bias, of.has_norm);
  const auto in_one = [](const auto& by, const auto& args, cuda::Stream stream) {
    by.project_qkv(args, stream);
  };
  QkvProjection<T> projection(machine, of);
  const std::vector<std::byte> expected = projection.run(qkv_in_turn);
  CHECK(projection.run(in_one) == expected);
  CHECK((projection.count(in_one) == 1) == is_one);
  CHECK(projection.count(qkv_in_turn) > 1);
}

}  // namespace

TEMPLATE_TEST_CASE("project_qkv of few tokens on a GPU is one kernel with the bits of two", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const QkvMachine<TestType> machine;
  const bool has_kernel = is_hopper();
  const auto check_both = [&](const QkvCase& of) { check(machine, of, has_kernel); };
  const DType own = kDTypeOf<TestType>;
  for (const QkvTokens& tokens : qkv_tokens()) {
    for (const bool is_interleaved : {false, true}) {
      for (const DType kv : {own, DType::fp8_e4m3, DType::f32}) {
        QkvCase of{.tokens = tokens, .kv = kv, .is_interleaved = is_interleaved};
        check_both(of);
        of.kvp = 2;
        check_both(of);
        of.kvp = 1;
        of.pad = 8;
        of.is_token_major = of.has_bias = true;
        check_both(of);
      }
    }
    // Too short to hide the tail unless weights are prefetched.
    check_both({.tokens = tokens, .hidden = 512, .kv = own, .follows_layer = true});
    // Numbers of heads that tiles or blocks do not divide.
    check_both({.tokens = tokens, .dim = 96, .rotary = 96, .kv = own});
    check_both({.tokens = tokens, .q_heads = 3, .kv_heads = 1, .dim = 44, .rotary = 44, .kv = own});
    check_both({.tokens = tokens, .q_heads = 32, .kv_heads = 8, .hidden = 4096, .kv = own});
    // More heads than blocks. With more than two rows, more pairs than one block per SM prepares.
    QkvCase many{.tokens = tokens, .q_heads = 128, .kv_heads = 8, .hidden = 1024, .kv = own};
    const bool is_one = has_kernel && tokens.positions.size() <= 2;
    check(machine, many, is_one);
    many.q_heads = 300;
    many.kv_heads = 4;
    many.dim = many.rotary = 64;
    many.hidden = 1088;
    check(machine, many, is_one);
  }
}

TEMPLATE_TEST_CASE("project_qkv on a GPU takes what has no such kernel", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const DType own = kDTypeOf<TestType>;
  const QkvMachine<TestType> machine;
  check(machine, {.tokens = qkv_tokens_beyond(), .kv = own}, false);
  check(machine, {.kv = own, .has_norm = true}, false);
  check(machine, {.rotary = 64, .kv = own}, false);
  check(machine, {.hidden = 6152, .kv = own}, false);
  check(machine, {.hidden = 512, .kv = own}, false);  // too short to hide the tail
}

}  // namespace helix::test
