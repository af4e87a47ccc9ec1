// SPDX-License-Identifier: Apache-2.0
// The state of one attend(), and where the rows of its tokens lie. Compiled once a Highway target, hence the
// toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_STATE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_STATE_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_STATE_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_STATE_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>

#include <hwy/highway.h>

#include <helix/mixed_row.hpp>

#include "cpu/attention/scratch.hpp"
#include "cpu/attention/task.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = std::numbers::log2e_v<float>;
constexpr float kLn2 = std::numbers::ln2_v<float>;
/// Rows of the widest block: with half as many rows as lanes a widened key serves enough rows, and a value
/// pass has kLanes accumulators, two vectors a row.
constexpr int kMaxRows = kLanes / 2;

/// Rows of the block that starts where `rest` rows are left.
HWY_INLINE int block_rows(std::int64_t rest) {
  int rows = 1;
  while (rows < rest && rows < kMaxRows) rows *= 2;
  return rows;
}

/// Rows of the blocks that hold `num_rows`.
HWY_INLINE std::int64_t rows_of_blocks(std::int64_t num_rows) {
  std::int64_t rows = 0;
  while (rows < num_rows) rows += block_rows(num_rows - rows);
  return rows;
}

/// The state of one KV head's rows.
struct State {
  const AttentionTask& task;
  std::int64_t d;   ///< head_dim, padded to pairs: stride of q and of widened keys
  std::int64_t dv;  ///< value_dim, padded to pairs: stride of acc
  float* q;
  float* acc;
  float* max;
  float* sum;
  float* correction;
  float* scores;
  float* read_scores;  ///< Scores of several heads, in the order in which keys are read.
  float* keys;
  float* values;
  const void** key_rows;  ///< Key rows of the current tile.
  const void** value_rows;
  const void** next_key_rows;
  const void** next_value_rows;
  std::byte* joined;       ///< Joined rows of a split latent.
  std::int64_t row_bytes;  ///< bytes of a key row's head_dim elements
  std::byte* amx;
};

/// The heads that a task takes at once: each has its own rows of the scratch.
struct Heads {
  const State& first;
  const AttentionTask* tasks;
  int count;
  std::int64_t rows = 0;        ///< query rows of each head
  std::int64_t block_rows = 0;  ///< query rows of each head, rounded up to whole blocks
  HWY_INLINE State operator[](std::int64_t head) const {
    const std::int64_t row = head * rows;
    const std::int64_t block_row = head * block_rows;
    return {tasks[head],
            first.d,
            first.dv,
            first.q + block_row * first.d,
            first.acc + row * first.dv,
            first.max + row,
            first.sum + row,
            first.correction + row,
            first.scores,
            first.read_scores + block_row * kDirectTile,
            first.keys,
            first.values,
            first.key_rows,
            first.value_rows,
            first.next_key_rows,
            first.next_value_rows,
            first.joined,
            first.row_bytes,
            first.amx};
  }
};

/// Joins the latent and rope parts of `count` rows in s.joined, and points `rows` there. Before, `rows`
/// points at the latent parts. Rows of DType::fp8_ds_mla are widened to f32.
HWY_NOINLINE void join_rows(const State& s, std::int64_t begin, std::int64_t count, const void** rows) {
  const AttentionTask& task = s.task;
  const std::int64_t element = s.row_bytes / task.head_dim;
  const auto latent_bytes = static_cast<std::size_t>(task.value_dim * element);
  const auto rope_bytes = static_cast<std::size_t>(s.row_bytes) - latent_bytes;
  std::byte* to = s.joined;
  for (std::int64_t i = 0; i < count; ++i, to += s.row_bytes) {
    const std::int64_t page = task.page_table[(begin + i) / task.page_tokens];
    const std::byte* const rope = task.rope.at(page, (begin + i) % task.page_tokens);
    if (task.dtype == DType::fp8_ds_mla) {
      load_mixed_row(static_cast<const std::byte*>(rows[i]), rope, task.head_dim, task.value_dim,
                     reinterpret_cast<float*>(to));
    } else {
      std::memcpy(to, rows[i], latent_bytes);
      std::memcpy(to + latent_bytes, rope, rope_bytes);
    }
    rows[i] = to;
  }
}

/// Looks up the rows of tokens [begin, begin + count), and repeats the last one up to a whole block. Rows of
/// a split latent are joined, and valid until the next call.
HWY_NOINLINE void find_rows(const State& s, std::int64_t begin, std::int64_t count) {
  const AttentionTask& task = s.task;
  const void** key_rows = s.key_rows;
  const void** value_rows = s.value_rows;
  std::int64_t page = begin / task.page_tokens;
  std::int64_t slot = begin % task.page_tokens;
  for (std::int64_t i = 0; i < count; ++page, slot = 0) {
    const std::int64_t run = std::min(count - i, task.page_tokens - slot);
    const std::byte* key = task.keys.at(task.page_table[page], slot);
    const std::byte* value = task.values.at(task.page_table[page], slot);
    for (const std::int64_t end = i + run; i < end; ++i) {
      key_rows[i] = key;
      value_rows[i] = value;
      key += task.keys.token_bytes;
      value += task.values.token_bytes;
    }
  }
  if (task.is_split_latent()) {
    join_rows(s, begin, count, key_rows);
    std::copy_n(key_rows, count, value_rows);
  }
  std::fill_n(key_rows + count, kPair, key_rows[count - 1]);
  std::fill_n(value_rows + count, kPair, value_rows[count - 1]);
}

/// Looks up the key rows of tokens [begin, begin + count), and repeats the last one up to a whole block. A
/// whole tile is ordered as `streams` interleaved runs. The order of keys is free, and where hardware
/// prefetchers look only so far ahead in each run, reading one after the other drew 60 % of the bandwidth
/// that a core reaches (Xeon). One stream is the order of the tokens.
HWY_NOINLINE void find_interleaved_keys(const AttentionTask& task, std::int64_t begin, std::int64_t count,
                                        std::int64_t streams, const void** key_rows) {
  if (count < kDirectTile) streams = 1;
  const std::int64_t run = count / streams;
  std::int64_t page = begin / task.page_tokens;
  std::int64_t slot = begin % task.page_tokens;
  for (std::int64_t stream = 0; stream < streams; ++stream) {
    const void** to = key_rows + stream;
    for (std::int64_t rest = run; rest > 0;) {
      const std::int64_t rows = std::min(rest, task.page_tokens - slot);
      const std::byte* key = task.keys.at(task.page_table[page], slot);
      for (std::int64_t i = 0; i < rows; ++i, to += streams, key += task.keys.token_bytes) *to = key;
      rest -= rows;
      slot += rows;
      if (slot == task.page_tokens) {
        slot = 0;
        ++page;
      }
    }
  }
  std::fill_n(key_rows + count, kPair, key_rows[count - 1]);
}

/// A block of query rows.
struct Block {
  std::int64_t row;  ///< Row of the task: indexes max, sum, correction and acc.
  int valid;         ///< rows that exist; the rest of the block is computed and dropped
  const float* q;    ///< [pair][R][kPair]
  float* scores;     ///< [key][R]
};

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
