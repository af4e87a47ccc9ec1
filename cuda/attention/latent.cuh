// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents (MLA) by Hopper's warp-group products: 512 columns that are key and value,
// 64 rope columns, q and KV of one 16-bit type.
//
// A block has 64 query rows, and two consumer warp groups share them. Each computes the scores of every
// second KV tile, and each has half of the value columns of all rows in its registers, so that both need the
// weights of both tiles: the lead's and then the follower's go through shared memory, with the rows' max.
// While one group weighs its scores the other's products run.
//
// A KV tile fills a third of the shared memory. It is copied and released in two parts, the value columns of
// one group each. With more than 64 query rows two blocks form a cluster with the same KV tiles, and each
// part of a tile is read by one of them for both: the tensor cores take 2.4 GB of tiles from caches where the
// cluster reads 1.2 GB.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "cuda/attention/combine.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

inline constexpr int kLatentColumns = 512;    ///< Of a key, and all of a value.
inline constexpr int kRopeColumns = 64;       ///< Of a key only.
inline constexpr int kLatentTileTokens = 64;  ///< Of a KV tile.

struct LatentLimits {
  static constexpr int kEpilogueTiles = 3;
  static constexpr int kShortSplitTiles = 2;
  static constexpr int kSplitTiles = 2;
};

/// What a thread knows of its two rows, 8 apart: the local tokens that they see, and the running softmax.
struct LatentRows {
  int low[2];
  int high[2];
  float max[2];  ///< Base 2.
  float sum[2];  ///< Of the weights that this thread has seen.
};

template <class T, int kBlocks>
struct Latent {
  using Plan = SmallAttentionPlan<kLatentTileTokens, LatentLimits, kBlocks>;
  static constexpr int kGroups = 2;  // of consumers
  static constexpr int kConsumers = kGroups * kWarpGroup;
  static constexpr int kThreads = kConsumers + kWarpGroup;
  static constexpr int kGroupColumns = kLatentColumns / kGroups;  // of the values
  static constexpr int kGroupChunks = kGroupColumns / kChunkColumns;
  static constexpr int kValueChunks = kLatentColumns / kChunkColumns;
  static constexpr int kChunks = kValueChunks + kRopeColumns / kChunkColumns;
  static constexpr unsigned kRowBytes = kChunkColumns * 2u;  // in a chunk
  static constexpr unsigned kChunkBytes = kLatentTileTokens * kRowBytes;
  static constexpr unsigned kTileBytes = kChunks * kChunkBytes;
  static constexpr int kSteps = kChunkColumns / kProductDepth;  // of a chunk, or of a tile's tokens

  struct Shared {
    alignas(1024)
        std::byte queries[kTileBytes];  // the last chunk, once it is in registers: the follower's weights
    std::byte kv[2][kTileBytes];
    std::byte weights[kChunkBytes];  // the lead's
    float row[kGroups]
             [kGroupRows];  // max of each group's tile and those before, at the end the sum of weights
    unsigned long long full[2][kGroups];  // of a KV buffer, by the group whose values they are
    unsigned long long empty[2][kGroups];
    Plan plan;
  };
  static_assert(sizeof(Shared) <= 227 * 1024);

  /// Named barriers of the block.
  enum Barrier { kAllConsumers = 1, kLeadsWeights, kFollowersWeights, kOneGroup };

  using Sums = float[kGroupColumns / 2];
  using Scores = float[kLatentTileTokens / 2];
  using Operand = unsigned[kSteps][4];  // 64 rows x 64 columns in the registers of a warp group

  /// The block's part of a work item that belongs to one query tile.
  struct Part {
    QueryTileSpan span;
    int query_tile;
    int first_token;  // local, of the first KV tile
    int count;        // KV tiles
    bool is_first;    // of the query tile
    KvSplits splits;

    __device__ int tile_token(int i) const { return first_token + i * kLatentTileTokens; }
  };

  static __device__ unsigned at(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  static __device__ int block() { return static_cast<int>(blockIdx.x) / kBlocks; }
  /// The group's part of KV tiles whose copies this block asks for.
  static __device__ bool asks_for(int group) {
    return kBlocks == 1 || cluster_rank() == static_cast<unsigned>(group);
  }

  static __device__ void init_barriers(Shared& s) {
    constexpr unsigned kWarpsOfGroup = kWarpGroup / kWarp;
    for (int buffer = 0; buffer < 2; ++buffer) {
      for (int group = 0; group < kGroups; ++group) {
        barrier_init(at(&s.full[buffer][group]), 1);
        barrier_init(at(&s.empty[buffer][group]), asks_for(group) ? kBlocks * kWarpsOfGroup : kWarpsOfGroup);
      }
    }
    fence_barrier_init();
  }

  /// Tells the compiler that all lanes have the same `x`: products in a branch that lanes may leave one by
  /// one would wait for each other.
  static __device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  /// Calls with(part) for each query tile that the block's work item belongs to.
  template <class With>
  static __device__ __forceinline__ void for_each_part(const AttentionParams& p, const Shared& s,
                                                       const With& with) {
    const Schedule<Plan> schedule(p, s.plan);
    WorkItem item = schedule.work_item(block());
    item.count = uniform(item.count);
    KvTileCursor at = item.start;
    for (int done = 0, count = 0; done < item.count; done += count) {
      count = uniform(min(item.count - done, at.num_kv_tiles - at.kv_tile));
      Part part;
      part.span = span_of_tile(p, s.plan, at.query_tile);
      part.query_tile = at.query_tile;
      part.first_token = (part.span.begin_token / kLatentTileTokens + at.kv_tile) * kLatentTileTokens;
      part.count = count;
      part.is_first = at.kv_tile == 0;
      part.splits = schedule.splits_of(at.query_tile, at.head);
      with(part);
      at.advance(p, s.plan, count);
    }
  }

  /// One warp: asks for KV tiles as their places become free.
  struct Producer {
    const AttentionParams& p;
    Shared& s;
    const CUtensorMap& latents;
    const CUtensorMap& ropes;
    int box_tokens;
    unsigned uses[2] = {0, 0};

    /// Pages of boxes `lane` and `lane` + kWarp of a KV tile.
    struct Pages {
      std::int32_t of[2];
    };
    __device__ Pages pages_of(const QueryTileSpan& span, int token) const {
      Pages pages{};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int begin = token + (static_cast<int>(threadIdx.x) % kWarp + k * kWarp) * box_tokens;
        if (begin < min(span.end_token, token + kLatentTileTokens) && begin + box_tokens > span.begin_token)
          pages.of[k] = p.lists.pages[span.first_page + begin / p.page_tokens];
      }
      return pages;
    }

    __device__ void run() {
      for_each_part(p, s, [&](const Part& part) {
        Pages pages = pages_of(part.span, part.tile_token(0));
        for (int i = 0; i < part.count; ++i) {
          const Pages next = i + 1 < part.count ? pages_of(part.span, part.tile_token(i + 1)) : Pages{};
          copy_tile(part.span, part.tile_token(i), pages, i % 2);
          pages = next;
        }
      });
    }

    __device__ void copy_tile(const QueryTileSpan& span, int token, const Pages& pages, int buffer) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      // Boxes that hold a token which is seen.
      const int first = max(0, span.begin_token - token) / box_tokens;
      const int last = (min(kLatentTileTokens, max(0, span.end_token - token)) + box_tokens - 1) / box_tokens;
      const int boxes = max(0, last - first);
      const unsigned parity = (uses[buffer]++ & 1u) ^ 1u;
      for (int group = 0; group < kGroups; ++group) {
        const int chunks = kGroupChunks + (group == kGroups - 1 ? kChunks - kValueChunks : 0);
        const unsigned full = at(&s.full[buffer][group]);
        barrier_wait_cluster(at(&s.empty[buffer][group]), parity);
        if (lane == 0) barrier_expect(full, static_cast<unsigned>(boxes * box_tokens * chunks) * kRowBytes);
        __syncwarp();
        if (!asks_for(group)) continue;
        for (int i = 0; i < boxes * chunks; i += kWarp) {
          const int box = first + min(i + lane, boxes * chunks - 1) / chunks;
          const int chunk = group * kGroupChunks + (i + lane) % chunks;
          const int low = __shfl_sync(~0u, pages.of[0], box % kWarp);
          const int high = __shfl_sync(~0u, pages.of[1], box % kWarp);
          if (i + lane >= boxes * chunks) continue;
          const bool is_rope = chunk == kValueChunks;
          const unsigned to = at(s.kv[buffer]) + static_cast<unsigned>(chunk) * kChunkBytes +
                              static_cast<unsigned>(box * box_tokens) * kRowBytes;
          const int in_page = (token + box * box_tokens) % p.page_tokens;
          copy(to, is_rope ? ropes : latents, is_rope ? 0 : chunk * kChunkColumns, in_page,
               box < kWarp ? low : high, full);
        }
      }
    }

    __device__ void copy(unsigned to, const CUtensorMap& map, int column, int token, int page,
                         unsigned full) const {
      if constexpr (kBlocks == 1) {
        copy_box(to, map, column, token, 0, page, full);
      } else {
        copy_box_to_blocks(to, map, column, token, 0, page, full, (1u << kBlocks) - 1u);
      }
    }
  };

  /// What both consumer groups do alike; kGroup is 0 for the lead, 1 for the follower.
  template <int kGroup>
  struct Consumer {
    const AttentionParams& p;
    Shared& s;
    float factor;  // of a score in the exponent
    unsigned uses[2] = {0, 0};
    LatentRows rows;
    TokenRange inner;  // what all rows of the block see
    Operand rope;      // of the queries
    Operand weights;   // of this group's tile

    static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
    static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
    /// The first of this thread's rows in the block.
    static __device__ int row() { return warp() * 16 + lane() / 4; }
    static __device__ int first_row() {
      return kBlocks == 1 ? 0 : static_cast<int>(cluster_rank()) * kGroupRows;
    }
    /// Where this lane's row of the four matrices of step `step` lies in a chunk of 64 rows.
    static __device__ unsigned matrix_row(int step) {
      return swizzled(static_cast<unsigned>(warp() * 16 + lane() % 16),
                      static_cast<unsigned>(step * 2 + lane() / 16));
    }

    __device__ Consumer(const AttentionParams& params, Shared& shared)
        : p(params), s(shared), factor(params.soft_cap > 0.0f ? kLog2E : params.scale * kLog2E) {}

    /// The block's query rows into shared memory, their rope columns into registers.
    __device__ void begin(const Part& part, Sums& sums) {
      const QueryTile& tile = part.span.query_tile;
      constexpr int kParts = kChunks * 8;  // of 16 bytes
      const T* q = static_cast<const T*>(p.q);
#pragma unroll 6
      for (int i = static_cast<int>(threadIdx.x); i < kGroupRows * kParts; i += kConsumers) {
        const int r = i / kParts;
        const int c = i % kParts;
        uint4 x{0, 0, 0, 0};
        if (first_row() + r < tile.num_rows)
          x = *reinterpret_cast<const uint4*>(q + tile.token(p, first_row() + r) * p.q_token_stride +
                                              tile.query_head(p, 0, first_row() + r) * p.q_head_stride +
                                              c * 8);
        *reinterpret_cast<uint4*>(s.queries + static_cast<unsigned>(c / 8) * kChunkBytes +
                                  swizzled(static_cast<unsigned>(r), static_cast<unsigned>(c % 8))) = x;
      }
      find_bounds(part);
      fence_before_copy();
      group_sync(kAllConsumers, kConsumers);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        load_matrices(rope[step], at(s.queries) + kValueChunks * kChunkBytes + matrix_row(step));
#pragma unroll
      for (int i = 0; i < kGroupColumns / 2; ++i) sums[i] = 0.0f;
    }

    __device__ void find_bounds(const Part& part) {
      const QueryTile& tile = part.span.query_tile;
      const int num_rows = min(tile.num_rows - first_row(), kGroupRows);
      inner = {0, INT64_MAX};
      for (int t = tile.token(p, first_row()); num_rows > 0 && t <= tile.token(p, first_row() + num_rows - 1);
           ++t) {
        const TokenRange seen = visible(p, p.positions[t]);
        inner.begin = ::max(inner.begin, seen.begin);
        inner.end = ::min(inner.end, seen.end);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row() + 8 * h;
        TokenRange seen{0, 0};
        if (r < num_rows) seen = visible(p, p.positions[tile.token(p, first_row() + r)]);
        rows.low[h] = static_cast<int>(seen.begin);
        rows.high[h] = static_cast<int>(seen.end);
        rows.max[h] = -kInfinity;
        rows.sum[h] = 0.0f;
      }
    }

    /// Asks for the scores of the queries and the keys of the tile that comes to `buffer`.
    __device__ void multiply_keys(int buffer, Scores& scores) {
      const unsigned parity = uses[buffer]++ & 1u;
      const unsigned kv = at(s.kv[buffer]);
      barrier_wait(at(&s.full[buffer][0]), parity);
      products_fence();
      const std::uint64_t queries_at = rows_operand(at(s.queries));
      const std::uint64_t keys_at = rows_operand(kv);
#pragma unroll
      for (int chunk = 0; chunk < kValueChunks; ++chunk) {
        if (chunk == kGroupChunks) {
          barrier_wait(at(&s.full[buffer][1]), parity);
          products_fence();
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const unsigned offset =
              (static_cast<unsigned>(chunk) * kChunkBytes + static_cast<unsigned>(step) * 32u) / 16u;
          product<T, kLatentTileTokens, false>(scores, queries_at + offset, keys_at + offset,
                                               chunk + step > 0);
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const unsigned offset = (kValueChunks * kChunkBytes + static_cast<unsigned>(step) * 32u) / 16u;
        product<T, kLatentTileTokens, false>(scores, rope[step], keys_at + offset, 1);
      }
      products_commit();
    }

    /// Puts zeros where tile `i` holds tokens that no row sees, and anything may lie.
    /// Not while products are on their way.
    __device__ void clear_unseen(const Part& part, int i) {
      const unsigned parity = uses[i % 2] & 1u;
      const int token = part.tile_token(i);
      const int first = ::max(0, part.span.begin_token - token);
      const int last = ::max(0, part.span.end_token - token);
      if (first == 0 && last >= kLatentTileTokens) return;
      for (int group = 0; group < kGroups; ++group) barrier_wait(at(&s.full[i % 2][group]), parity);
      for (int k = static_cast<int>(threadIdx.x) % kWarpGroup; k < kLatentTileTokens * kChunks * 8;
           k += kWarpGroup) {
        const int r = k / (kChunks * 8);
        if (r >= first && r < last) continue;
        const int c = k % (kChunks * 8);
        *reinterpret_cast<uint4*>(s.kv[i % 2] + static_cast<unsigned>(c / 8) * kChunkBytes +
                                  static_cast<unsigned>(r) * kRowBytes + static_cast<unsigned>(c % 8) * 16u) =
            uint4{0, 0, 0, 0};
      }
      fence_before_copy();
      group_sync(kOneGroup + kGroup, kWarpGroup);
    }

    /// Scores of tile `i` become weights, in registers and in shared memory for the other group. Returns by
    /// what the sums so far shrink.
    __device__ void weigh(const Part& part, int i, Scores& scores, float (&shrink)[2]) {
      const int token = part.tile_token(i);
      if (p.soft_cap > 0.0f) {
#pragma unroll
        for (float& x : scores) x = p.soft_cap * fast_tanh(x * (p.scale / p.soft_cap));
      }
      if (token < inner.begin || token + kLatentTileTokens > inner.end) mask(token, scores);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -kInfinity;
#pragma unroll
        for (int j = 0; j < kLatentTileTokens / 8; ++j)
          top = fmaxf(top, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        shrink[h] = raise_max(h, top * factor);
        const float pivot = rows.max[h] == -kInfinity ? 0.0f : rows.max[h];
        float added = 0.0f;
#pragma unroll
        for (int j = 0; j < kLatentTileTokens / 8; ++j) {
          const float x = fast_exp2(fmaf(scores[4 * j + 2 * h], factor, -pivot));
          const float y = fast_exp2(fmaf(scores[4 * j + 2 * h + 1], factor, -pivot));
          added += x + y;
          weights[j / 2][j % 2 * 2 + h] = pack<T>(x, y);
        }
        rows.sum[h] += added;
        if (lane() % 4 == 0) s.row[kGroup][row() + 8 * h] = rows.max[h];
      }
      const unsigned to = kGroup == 0 ? at(s.weights) : at(s.queries) + kValueChunks * kChunkBytes;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        store_matrices(to + matrix_row(step), weights[step][0], weights[step][1], weights[step][2],
                       weights[step][3]);
      fence_before_copy();
    }

    /// The max of row `h` is at least `top` from here on. Returns by what the sums so far shrink.
    __device__ float raise_max(int h, float top) {
      top = fmaxf(top, rows.max[h]);
      const float shrink = fast_exp2(rows.max[h] - (top == -kInfinity ? 0.0f : top));
      rows.max[h] = top;
      rows.sum[h] *= shrink;
      return shrink;
    }

    /// The other group's weights and max are in shared memory.
    __device__ void wait_for_weights() const {
      group_sync(kGroup == 0 ? kFollowersWeights : kLeadsWeights, kConsumers);
    }

    /// The other group's tile raised the max.
    __device__ void scale_to_other(Sums& sums) {
      float shrink[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) shrink[h] = raise_max(h, s.row[1 - kGroup][row() + 8 * h]);
      scale_sums(sums, shrink);
    }

    /// Weighs the scores of this group's tile `i`, tells the other group, and adds the tile's values.
    __device__ void add_own_tile(const Part& part, int i, Scores& scores, Sums& sums) {
      float shrink[2];
      weigh(part, i, scores, shrink);
      group_arrive(kGroup == 0 ? kLeadsWeights : kFollowersWeights, kConsumers);
      scale_sums(sums, shrink);
      add_own_values(kGroup, sums);
      finish(sums);
      release(kGroup);
    }

    __device__ void mask(int token, Scores& scores) const {
#pragma unroll
      for (int k = 0; k < kLatentTileTokens / 2; ++k) {
        const int column = token + k / 4 * 8 + lane() % 4 * 2 + k % 2;
        if (column < rows.low[k / 2 % 2] || column >= rows.high[k / 2 % 2]) scores[k] = -kInfinity;
      }
    }

    static __device__ void scale_sums(Sums& sums, const float (&shrink)[2]) {
      if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
      for (int k = 0; k < kGroupColumns / 2; ++k) sums[k] *= shrink[k / 2 % 2];
    }

    /// Asks for sums += weights values with the group's own weights, of the tile in `buffer`.
    __device__ void add_own_values(int buffer, Sums& sums) {
      products_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        product<T, kGroupColumns, true>(sums, weights[step], values(buffer, step), 1);
      products_commit();
    }
    /// The same with the other group's weights.
    __device__ void add_other_values(int buffer, Sums& sums) {
      barrier_wait(at(&s.full[buffer][kGroup]),
                   uses[buffer]++ & 1u);  // long past, but this group has not seen it
      const std::uint64_t from =
          rows_operand(kGroup == 1 ? at(s.weights) : at(s.queries) + kValueChunks * kChunkBytes);
      products_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        product<T, kGroupColumns, true>(sums, from + static_cast<unsigned>(step) * 2u, values(buffer, step),
                                        1);
      products_commit();
    }
    /// This group's value columns of 16 tokens.
    __device__ std::uint64_t values(int buffer, int step) const {
      return columns_operand(at(s.kv[buffer]) + kGroup * kGroupChunks * kChunkBytes, kChunkBytes) +
             static_cast<unsigned>(step) * (16u * kRowBytes / 16u);
    }

    /// This group reads its part of the tile no more. No branch: the other products of the warp group go on.
    __device__ void release(int buffer) {
      const unsigned empty = at(&s.empty[buffer][kGroup]);
      const bool is_first = lane() == 0;
      barrier_arrive_if(is_first, empty);
      if constexpr (kBlocks > 1) barrier_arrive_at_if(is_first && !asks_for(kGroup), empty, kGroup);
    }

    /// Writes the group's columns of the block's rows: out and lse, or split partials.
    __device__ void end(const Part& part, const Sums& sums) {
      group_sync(kAllConsumers, kConsumers);  // nobody needs a max any more
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 1);
        rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 2);
        if (lane() % 4 == 0) s.row[kGroup][row() + 8 * h] = rows.sum[h];
      }
      group_sync(kAllConsumers, kConsumers);
      const SplitPartials partials{p, part.splits};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = first_row() + row() + 8 * h;
        if (r >= part.span.query_tile.num_rows) continue;
        const float sum = s.row[0][row() + 8 * h] + s.row[1][row() + 8 * h];
        if (part.splits.count == 1) {
          write_row(part.span.query_tile, r, rows.max[h], sum, sums, h);
        } else {
          write_partial(partials, r, rows.max[h], sum, sums, h);
        }
      }
      if (kGroup == 0 && part.is_first && first_row() == 0 && threadIdx.x == 0)
        p.split_tiles[part.query_tile] = {part.span.query_tile, part.splits};
    }

    __device__ void write_row(const QueryTile& tile, int r, float max, float sum, const Sums& sums,
                              int h) const {
      const std::int64_t token = tile.token(p, r) - p.first_out_token;
      const std::int64_t head = tile.query_head(p, 0, r);
      const bool is_empty = !(max > -kInfinity) && sum == 0.0f;
      const float inverse = is_empty ? 0.0f : 1.0f / sum;
      if (kGroup == 0 && lane() % 4 == 0)
        p.lse[token * p.lse_token_stride + head * p.lse_head_stride] =
            is_empty ? -kInfinity : (max + log2f(sum)) * kLn2;
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride +
               kGroup * kGroupColumns + lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < kGroupColumns / 8; ++j) {
        const unsigned pair = pack<T>(sums[4 * j + 2 * h] * inverse, sums[4 * j + 2 * h + 1] * inverse);
        if (p.is_out_aligned) {
          *reinterpret_cast<unsigned*>(out + 8 * j) = pair;
        } else {
          out[8 * j].bits = static_cast<std::uint16_t>(pair);
          out[8 * j + 1].bits = static_cast<std::uint16_t>(pair >> 16);
        }
      }
    }

    __device__ void write_partial(const SplitPartials& to, int r, float max, float sum, const Sums& sums,
                                  int h) const {
      const int i = block() - to.splits.first_block;
      auto* out = reinterpret_cast<float2*>(to.out(i, r, kGroup * kGroupColumns)) + lane() % 4;
#pragma unroll
      for (int j = 0; j < kGroupColumns / 8; ++j)
        __stcg(out + 4 * j, float2{sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]});
      if (kGroup == 0 && lane() % 4 == 0) {
        __stcg(to.max(i, r), max);
        __stcg(to.sum(i, r), sum);
      }
    }
  };

  static __device__ void attend(const AttentionParams& p, const CUtensorMap& latents,
                                const CUtensorMap& ropes, int box_tokens) {
    extern __shared__ __align__(1024) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) init_barriers(s);
    make_plan(p, s.plan);
    if constexpr (kBlocks > 1) sync_cluster();  // no copy before the barriers of both are there
    if (threadIdx.x >= kConsumers) {
      give_registers<24>();
      if (threadIdx.x < kConsumers + kWarp) Producer{p, s, latents, ropes, box_tokens}.run();
    } else if (threadIdx.x < kWarpGroup) {
      take_registers<240>();
      lead(p, s);
    } else {
      take_registers<240>();
      follow(p, s);
    }
    if constexpr (kBlocks > 1) sync_cluster();  // nor an end while the other's copies and arrivals come
  }

 private:
  /// Nothing that was asked for is on its way any more. The compiler serialises products that are on their
  /// way where branches of which it cannot tell that a warp takes them as one meet, so there none is.
  template <class... Registers>
  static __device__ __forceinline__ void finish(Registers&... registers) {
    products_wait<0>();
    (pin(registers), ...);
  }

  /// The consumer of even tiles: its weights go to the follower first.
  static __device__ void lead(const AttentionParams& p, Shared& s) {
    Consumer<0> self(p, s);
    Sums sums;
    Scores scores;
    for_each_part(p, s, [&](const Part& part) {
      self.begin(part, sums);
      self.clear_unseen(part, 0);
      self.multiply_keys(0, scores);
      finish(scores);
      int i = 0;
#pragma unroll 1
      for (; i + 2 < part.count; i += 2) {
        self.add_own_tile(part, i, scores, sums);
        self.clear_unseen(part, i + 2);
        self.wait_for_weights();
        self.scale_to_other(sums);
        self.add_other_values(1, sums);
        self.multiply_keys(0, scores);
        products_wait<1>();
        self.release(1);
        finish(scores, sums);
      }
      self.add_own_tile(part, i, scores, sums);
      if (i + 1 < part.count) {
        self.wait_for_weights();
        self.scale_to_other(sums);
        self.add_other_values(1, sums);
        finish(sums);
        self.release(1);
      }
      self.end(part, sums);
    });
  }

  /// The consumer of odd tiles.
  static __device__ void follow(const AttentionParams& p, Shared& s) {
    Consumer<1> self(p, s);
    Sums sums;
    Scores scores;
    for_each_part(p, s, [&](const Part& part) {
      self.begin(part, sums);
      int i = 0;
#pragma unroll 1
      for (; i + 1 < part.count; i += 2) {
        self.clear_unseen(part, i + 1);
        self.wait_for_weights();
        self.scale_to_other(sums);
        self.add_other_values(0, sums);
        self.multiply_keys(1, scores);
        products_wait<1>();
        self.release(0);
        finish(scores, sums);
        self.add_own_tile(part, i + 1, scores, sums);
      }
      if (i < part.count) {
        self.wait_for_weights();
        self.scale_to_other(sums);
        self.add_other_values(0, sums);
        finish(sums);
        self.release(0);
      }
      self.end(part, sums);
    });
  }
};

template <class T, int kBlocks>
__global__ __launch_bounds__(Latent<T, kBlocks>::kThreads, 1)
    __cluster_dims__(kBlocks, 1, 1) void attend_latent(const __grid_constant__ AttentionParams p,
                                                       const __grid_constant__ CUtensorMap latents,
                                                       const __grid_constant__ CUtensorMap ropes,
                                                       int box_tokens) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  prefetch_params(p);
  wait_for_previous();
  Latent<T, kBlocks>::attend(p, latents, ropes, box_tokens);
  finish_messages(p);
#endif
}

}  // namespace helix::cuda
