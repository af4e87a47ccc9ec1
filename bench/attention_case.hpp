// SPDX-License-Identifier: Apache-2.0
// A case of attention, the same on CPUs and GPUs: its shape, its name, and the cache that it reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/integers.hpp>
#include <helix/kv_format.hpp>

namespace helix::bench {

/// The memory layout of a pool of K and V.
enum class AttentionLayout {
  head_major,  ///< [page][K, V][head][token][D]: Helix's own.
  /// [K, V][page][token][head][D]: vLLM's layout; with pages of one token, SGLang's.
  token_major,
  latent  ///< [page][token][D]: MLA.
};

/// The sequences of a case.
struct AttentionBatch {
  std::vector<std::int64_t> lengths;           ///< Tokens of each sequence.
  std::vector<std::int32_t> query_offsets{0};  ///< As Batch::query_offsets_host.
  std::vector<std::int64_t> positions;         ///< Of the query tokens.
  std::int64_t num_pages = 0;
  std::int64_t kv_bytes = 0;  ///< K and V of all tokens, which attention reads once.
  /// Floating-point operations of both products, over the visible pairs of query token and cached token.
  double flops = 0.0;
};

/// Attention of a batch of sequences that all have as many query tokens, their last ones; shorter ones have
/// as many as they are long, and the batch's last one may have others.
struct AttentionCase {
  std::int64_t query_heads = 64;
  std::int64_t kv_heads = 8;
  std::int64_t batch = 1;
  /// Length of each sequence, including the query tokens; the maximum length if ragged.
  std::int64_t tokens = 0;
  std::int64_t page_tokens = 64;
  std::int64_t queries = 1;
  /// Query tokens of the last sequence, a prompt beside sequences that decode; 0: as many as the others.
  std::int64_t prompt = 0;
  bool is_ragged = false;  ///< Lengths are random, uniform in [1, tokens].
  AttentionLayout layout = AttentionLayout::head_major;
  std::int64_t head_dim = 128;
  std::int64_t value_dim = head_dim;
  DType kv_dtype = DType::bf16;
  bool is_portable = false;  ///< On a GPU, whether to use the kernels that run on every GPU.

  /// "partial_attention/heads:64:8/batch:8/tokens:131072/page:64/queries:1", then what differs from the
  /// values above: /prompt:N /dim:D /value_dim:Dv /kv:TYPE /ragged /layout:token_major (or latent) /portable.
  std::string name() const;
  /// The case of this name. The first component and those that have the values above may be missing, and all
  /// may come in any order. @throws Error(invalid_argument) that names what is wrong.
  static AttentionCase parse(std::string_view name);

  /// Bytes of K and V of one token.
  std::int64_t token_bytes() const;
  KvFormat format() const;
  /// Bytes of a page, including V's even if V has a pool of its own.
  std::int64_t page_bytes() const;
  /// A view of a pool of `num_pages` pages at `pool`, without a page table.
  KvView view(std::byte* pool, std::int64_t num_pages) const;
  /// Pages of a sequence of `length` tokens.
  std::int64_t pages_of(std::int64_t length) const { return ceil_div(length, page_tokens); }
  /// Pages of a sequence of the greatest length: the width of a page table.
  std::int64_t max_pages() const { return pages_of(tokens); }
  /// Draws the lengths, if they are ragged.
  AttentionBatch draw(std::mt19937& random) const;
  /// Copies of the batch that take turns, so that `cold_bytes` are read between two reads of the same KV.
  /// Pages that are nearly empty do not add up to a pool of any size.
  std::int64_t turns(const AttentionBatch& of, std::int64_t cold_bytes) const;
  /// Page tables [num_turns * sequences, max_pages()] of copies of the batch, whose pages lie in random order
  /// and are the first of the pool. Entries without a page are 0.
  std::vector<std::int32_t> page_tables(const AttentionBatch& of, std::int64_t num_turns,
                                        std::mt19937& random) const;
};

/// Takes "--case=NAME", any number of them, out of the arguments of a program, which are also Google
/// Benchmark's. Returns the cases. Asked for --help, says first what a case is. @throws as
/// AttentionCase::parse().
std::vector<AttentionCase> take_cases(int& argc, char** argv);

}  // namespace helix::bench
