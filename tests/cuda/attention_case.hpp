// SPDX-License-Identifier: Apache-2.0
// AttentionCase: the shape of one layer of paged attention, its pool and its batch, for tests on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/dtype.hpp>

#include "cuda/kv_pools.hpp"

namespace helix::test {

/// One sequence of the batch.
struct Sequence {
  std::int64_t length = 0;   ///< Global tokens, including the query tokens.
  std::int64_t queries = 1;  ///< Query tokens, which are the last ones; 0: none in this step.
};

/// A shape of attention: sizes, pool, split over KVP ranks, batch.
struct AttentionCase {
  DType kv_dtype = DType::f32;
  std::int64_t kv_heads = 2;
  std::int64_t group = 4;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  MakeKvPool pool = helix_pool;
  bool is_csr = false;
  std::int64_t page_tokens = 64;
  std::int64_t kvp = 1;
  std::int64_t chunk = 16;
  std::int64_t window = 0;
  float soft_cap = 0.0f;
  float sharpness = 1.0f;  // factor on the scores
  // If not 0, the first token of a sequence has 2^loudness times the weight of any other.
  float loudness = 0.0f;
  // If not 0, each score is about its square before scaling, so that all weights are equal.
  float root_score = 0.0f;
  std::int64_t q_pad = 0;        // elements between heads, which are NaN
  std::int64_t q_token_pad = 0;  // elements between tokens, which are NaN
  std::int64_t out_pad = 0;
  bool is_q_reversed = false;  // the last token is stored first
  bool is_scaled = true;       // e4m3 only: K and V have scales
  // e4m3 only: of two KV heads, one has q larger by 2^q_power and the other smaller; k_scale is the inverse.
  int q_power = 0;
  bool follows_prepare = false;
  bool forgets = false;         // tokens that no window reaches any more are NaN
  std::int64_t nan_tokens = 0;  // the first tokens of each sequence, which are NaN though they are seen
  std::vector<Sequence> sequences = {{40, 1}};
  std::vector<std::int64_t> padding;  // query tokens whose position is -1

  bool is_mixed() const { return kv_dtype == DType::fp8_ds_mla; }
  bool is_latent() const { return is_mixed() || pool == latent_pool || pool == split_latent_pools; }
};

/// A case for the kernel of T: on tensor cores if T has 16 bits, because q and KV then have the same type.
template <class T>
AttentionCase case_of(std::int64_t d = 64) {
  AttentionCase c;
  c.kv_dtype = kDTypeOf<T>;
  c.d = c.dv = d;
  return c;
}

}  // namespace helix::test
