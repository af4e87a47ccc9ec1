// SPDX-License-Identifier: Apache-2.0
// What all attention kernels share: the arguments, the schedule and the merge.
//
// Work is a list of tiles: for each row block (up to `rows` query rows of one sequence: query tokens times
// the heads of a KV head's group) and each KV head, the tiles of kTileTokens local tokens that any of its
// rows sees. Each block of a persistent grid takes an equal run of that list, so that one sequence of a
// million tokens and a ragged batch both fill the chip with at most one tile of imbalance. A run that begins
// or ends inside a row block's tiles leaves a partial result in the workspace, and the block that comes last
// merges them, in order of the list: out and lse come from one launch, and the same bits each time. Blocks
// compute the schedule themselves from device memory.
#pragma once

#include <cstdint>

#include <helix/backend.hpp>
#include <helix/kv_layout.hpp>

#include "common.cuh"
#include "exchange_header.cuh"

namespace helix::cuda {

inline constexpr int kTileTokens = 32;
inline constexpr int kBlocksPerSm = 2;     ///< at most: one streams on while the other ends a row block
inline constexpr int kMaxRowBlocks = 256;  ///< of one launch
inline constexpr int kMaxSequences = 256;  ///< of one launch
inline constexpr int kMaxRows = 32;        ///< of a row block
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

struct AttentionParams {
  DType dtype = DType::f32;  ///< of q and out
  const void* q = nullptr;   ///< [tokens, heads, D]
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  void* out = nullptr;  ///< [tokens, heads, Dv]
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 0;
  int first_out_token = 0;  ///< token of the step at row 0 of out and lse
  StampArgs headers{};      ///< of the messages that these lie in

  std::int32_t query_offsets[kMaxSequences + 1];  ///< by value: a trip to memory less
  const std::int64_t* positions = nullptr;
  const std::int32_t* slots = nullptr;
  int num_sequences = 0;
  int first_token = 0;  ///< of the step: the first of the first sequence
  int num_tokens = 0;
  int first_row_block = 0;  ///< of the first sequence's
  int num_row_blocks = 0;

  const std::byte* keys = nullptr;    ///< head 0 of page 0
  const std::byte* values = nullptr;  ///< likewise
  std::int64_t page_bytes = 0;
  std::int64_t head_bytes = 0;  ///< between KV heads in a page
  std::int64_t row_bytes = 0;
  int page_tokens = 0;
  const std::int32_t* page_table = nullptr;
  std::int64_t max_pages = 0;
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
  KvLayout layout{1, 1};
  std::int64_t kvp_rank = 0;

  int kv_heads = 0;
  int group = 0;  ///< query heads a KV head
  int head_dim = 0;
  int value_dim = 0;
  int rows = 0;  ///< of a row block
  float scale = 0.0f;
  float soft_cap = 0.0f;
  std::int64_t window = 0;

  float* partial_out = nullptr;  ///< [2 * blocks, rows, value_dim]
  float* partial_max = nullptr;  ///< [2 * blocks, rows], base 2
  float* partial_sum = nullptr;  ///< [2 * blocks, rows]
  int* counters = nullptr;       ///< [row blocks * KV heads], zero between launches
};

/// Local tokens that a query at `position` sees.
__device__ inline TokenRange visible(const AttentionParams& p, std::int64_t position) {
  if (position < 0) return {0, 0};
  const std::int64_t begin =
      p.window > 0 ? p.layout.length(position + 1 - p.window, p.kvp_rank) : std::int64_t{0};
  return {begin, p.layout.length(position + 1, p.kvp_rank)};
}

/// The schedule, in shared memory.
struct AttentionPlan {
  /// First token of the first tile; tiles lie at multiples of kTileTokens.
  __device__ int first_token_of_tiles(int u) const { return begin_token[u] / kTileTokens * kTileTokens; }

  int row_block_begin[kMaxSequences + 1];  ///< of each sequence
  int tile_begin[kMaxRowBlocks + 1];       ///< tiles of one KV head before each row block
  int first_token[kMaxRowBlocks];          ///< of the row block's sequence, in the step
  int first_row[kMaxRowBlocks];
  int num_rows[kMaxRowBlocks];
  int slot[kMaxRowBlocks];
  int begin_token[kMaxRowBlocks];  ///< local token where its keys begin
  int end_token[kMaxRowBlocks];    ///< and where they end
};

/// Exclusive sums in place over x[0, n], x[n] the total, by the first warp.
__device__ inline void exclusive_sum(int* x, int n) {
  if (threadIdx.x >= kWarp) return;
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int i = 0; i < n; i += kWarp) {
    const int value = i + lane < n ? x[i + lane] : 0;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (i + lane < n) x[i + lane] = before + sum - value;
    before += __shfl_sync(~0u, sum, kWarp - 1);
  }
  if (lane == 0) x[n] = before;
}

/// Largest i with x[i] <= value, in x[0, n].
__device__ inline int find_last(const int* x, int n, int value) {
  int low = 0;
  int high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (x[middle] <= value ? low : high) = middle;
  }
  return low;
}

/// Asks for this block's share of the queries.
__device__ inline void prefetch_queries(const AttentionParams& p) {
  constexpr int kLineBytes = 128;
  const int element_bytes = p.dtype == DType::f32 ? 4 : 2;
  const int lines = (p.head_dim * element_bytes + kLineBytes - 1) / kLineBytes;
  const int heads = p.kv_heads * p.group;
  const int count = p.num_tokens * heads * lines;
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  const auto* q = static_cast<const std::byte*>(p.q);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count; i += threads) {
    const int row = i / lines;
    const std::int64_t at = (p.first_token + row / heads) * p.q_token_stride + row % heads * p.q_head_stride;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(q + at * element_bytes + i % lines * kLineBytes));
  }
}

/// Fills the plan; all threads of the block.
__device__ inline void make_plan(const AttentionParams& p, AttentionPlan& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  // Needed as soon as the offsets are known: one round trip to memory less.
  for (int t = thread; t < p.num_tokens; t += threads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.positions + p.first_token + t));
  if (thread < p.num_sequences) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.slots + thread));
  prefetch_queries(p);
  for (int b = thread; b < p.num_sequences; b += threads) {
    const int tokens = p.query_offsets[b + 1] - p.query_offsets[b];
    plan.row_block_begin[b] = (tokens * p.group + p.rows - 1) / p.rows;
  }
  __syncthreads();
  exclusive_sum(plan.row_block_begin, p.num_sequences);
  __syncthreads();
  for (int u = thread; u < p.num_row_blocks; u += threads) {
    const int b = find_last(plan.row_block_begin, p.num_sequences, u + p.first_row_block);
    const int first_token = p.query_offsets[b];
    const int tokens = p.query_offsets[b + 1] - first_token;
    const int row = (u + p.first_row_block - plan.row_block_begin[b]) * p.rows;
    const int last_row = min(row + p.rows, tokens * p.group) - 1;
    std::int64_t begin = INT64_MAX;
    std::int64_t end = 0;
    for (int t = row / p.group; t <= last_row / p.group; ++t) {
      const TokenRange seen = visible(p, p.positions[first_token + t]);
      if (seen.size() <= 0) continue;
      begin = min(begin, seen.begin);
      end = max(end, seen.end);
    }
    const int first = end > 0 ? static_cast<int>(begin / kTileTokens) : 0;
    plan.first_token[u] = first_token;
    plan.first_row[u] = row;
    plan.num_rows[u] = last_row + 1 - row;
    plan.slot[u] = p.slots[b];
    plan.begin_token[u] = end > 0 ? static_cast<int>(begin) : 0;
    plan.end_token[u] = static_cast<int>(end);
    // A row block that sees nothing has a tile of no tokens, so that somebody writes its zeros.
    plan.tile_begin[u] = max(1, static_cast<int>((end + kTileTokens - 1) / kTileTokens) - first);
  }
  __syncthreads();
  exclusive_sum(plan.tile_begin, p.num_row_blocks);
  __syncthreads();
}

/// The list of tiles, shared out in equal runs.
struct TileList {
  int total;
  int workers;  ///< blocks that get some: not more than keep their warps busy

  __device__ explicit TileList(int tiles)
      : total(tiles), workers(min(static_cast<int>(gridDim.x), (tiles + 3) / 4)) {}

  /// Where the run of `block` begins.
  __device__ int run_begin(int block) const {
    return block >= workers ? total
                            : static_cast<int>(divide(std::uint64_t(total) * std::uint64_t(block), workers));
  }
  /// The block whose run holds tile `tile`.
  __device__ int block_of(int tile) const {
    return static_cast<int>(divide((std::uint64_t(tile) + 1) * std::uint64_t(workers) - 1, total));
  }

 private:
  static __device__ std::uint64_t divide(std::uint64_t x, int by) {
    const auto low = static_cast<std::uint32_t>(x);
    return low == x ? low / static_cast<std::uint32_t>(by) : x / static_cast<std::uint64_t>(by);
  }
};

/// A walk along the list of tiles.
struct TileCursor {
  int row_block = 0;
  int head = 0;
  int tile = 0;   ///< of the row block and head
  int tiles = 0;  ///< that these have

  __device__ void start(const AttentionParams& p, const AttentionPlan& plan, int position) {
    // tile_begin counts one head's tiles; heads repeat them.
    row_block = find_last(plan.tile_begin, p.num_row_blocks, position / p.kv_heads);
    tiles = plan.tile_begin[row_block + 1] - plan.tile_begin[row_block];
    const int rest = position - plan.tile_begin[row_block] * p.kv_heads;
    head = rest / tiles;
    tile = rest % tiles;
  }

  /// `count` tiles on. At the end of the list it stays past the last row block.
  __device__ void advance(const AttentionParams& p, const AttentionPlan& plan, int count) {
    tile += count;
    while (tile >= tiles && row_block < p.num_row_blocks) {
      tile -= tiles;
      if (++head == p.kv_heads) {
        head = 0;
        ++row_block;
        if (row_block < p.num_row_blocks) tiles = plan.tile_begin[row_block + 1] - plan.tile_begin[row_block];
      }
    }
  }
};

/// Where the rows of a row block are.
struct RowBlock {
  int first_token;  ///< of the sequence, in the step
  int first_row;    ///< row / group is the token after first_token
  int num_rows;

  __device__ RowBlock(const AttentionPlan& plan, int u)
      : first_token(plan.first_token[u]), first_row(plan.first_row[u]), num_rows(plan.num_rows[u]) {}
  __device__ int token(const AttentionParams& p, int row) const {
    return first_token + (first_row + row) / p.group;
  }
  __device__ int query_head(const AttentionParams& p, int head, int row) const {
    return head * p.group + (first_row + row) % p.group;
  }
};

/// Element `i` of q or out at `data`.
__device__ inline float load_element(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  if (dtype == DType::bf16) return to_float(static_cast<const bf16*>(data)[i]);
  return to_float(static_cast<const f16*>(data)[i]);
}
__device__ inline void store_element(void* data, DType dtype, std::int64_t i, float x) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == DType::bf16) {
    static_cast<bf16*>(data)[i] = from_float<bf16>(x);
  } else {
    static_cast<f16*>(data)[i] = from_float<f16>(x);
  }
}

/// What a block found for a row block and head, in shared memory: sums (unnormalised) as `parts` arrays
/// [rows, stride] to be added, and of each row the max (base 2) and the sum of weights.
struct BlockResult {
  float* sums;
  int parts;
  int part_stride;
  int stride;
  float* max;
  float* sum;

  __device__ float get(int row, int column) const {
    float total = 0.0f;
    for (int part = 0; part < parts; ++part) total += sums[part * part_stride + row * stride + column];
    return total;
  }
};

/// Writes a whole result.
__device__ inline void write_rows(const AttentionParams& p, const RowBlock& rows, int head,
                                  const BlockResult& from) {
  for (int row = static_cast<int>(threadIdx.x) / kWarp; row < rows.num_rows;
       row += static_cast<int>(blockDim.x) / kWarp) {
    const std::int64_t token = rows.token(p, row) - p.first_out_token;
    const std::int64_t query_head = rows.query_head(p, head, row);
    const float max = from.max[row];
    const float sum = from.sum[row];
    const bool is_empty = !(max > -kInfinity) && sum == 0.0f;
    const float inverse = is_empty ? 0.0f : 1.0f / sum;
    const std::int64_t to = token * p.out_token_stride + query_head * p.out_head_stride;
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < p.value_dim; i += kWarp)
      store_element(p.out, p.dtype, to + i, is_empty ? 0.0f : from.get(row, i) * inverse);
    if (threadIdx.x % kWarp == 0) {
      p.lse[token * p.lse_token_stride + query_head * p.lse_head_stride] =
          is_empty ? -kInfinity : (max + log2f(sum)) * kLn2;
    }
  }
}

/// The partial results of one row block and head: those of the blocks [first_block, first_block + count).
struct Contributions {
  const AttentionParams& p;
  int first_block;
  int count;

  /// A block's run has at most two unfinished ends: what it continues, and what it begins.
  __device__ std::int64_t slot(int i) const { return 2 * std::int64_t{first_block + i} + (i == 0 ? 1 : 0); }
  __device__ float max(int i, int row) const { return __ldcg(p.partial_max + slot(i) * p.rows + row); }
  __device__ float sum(int i, int row) const { return __ldcg(p.partial_sum + slot(i) * p.rows + row); }
  __device__ const float* out(int i, int row) const {
    return p.partial_out + (slot(i) * p.rows + row) * p.value_dim;
  }
};

inline constexpr int kMergeChunk = 40;  ///< contributions that are merged at once: most row blocks have fewer

/// What a merge keeps in shared memory.
struct MergeScratch {
  float weights[kMaxRows][kMergeChunk];  ///< of the chunk; before that the contributions' max
  float sums[kMaxRows][kMergeChunk];
  float shrink[kMaxRows];  ///< of what earlier chunks added up
};

/// to.sums = to.sums * shrink + sum over the chunk of weights[row][c] * out(begin + c, row), kVectors vectors
/// V a thread at a time, 24 loads in flight: two or three round trips to memory in all.
template <class V, int kVectors>
__device__ void merge_rows(const Contributions& from, int begin, int count, const MergeScratch& scratch,
                           int num_rows, const BlockResult& to) {
  constexpr int kWidth = sizeof(V) / sizeof(float);
  constexpr int kBatch = 24 / kVectors;
  const int columns = from.p.value_dim / kWidth;
  const int total = num_rows * columns;
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < total; first += kVectors * threads) {
    int row[kVectors];
    int offset[kVectors];
    float acc[kVectors][kWidth] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = min(first + v * threads, total - 1);
      row[v] = i / columns;
      offset[v] = i % columns * kWidth;
    }
#pragma unroll 1
    for (int c = 0; c < count; c += kBatch) {
      V parts[kBatch][kVectors];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const float* out = from.out(begin + min(c + k, count - 1), 0);
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          parts[k][v] = __ldcg(reinterpret_cast<const V*>(out + row[v] * from.p.value_dim + offset[v]));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const float weight = c + k < count ? scratch.weights[row[v]][c + k] : 0.0f;
#pragma unroll
          for (int j = 0; j < kWidth; ++j)
            acc[v][j] = fmaf(weight, reinterpret_cast<const float*>(&parts[k][v])[j], acc[v][j]);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * threads >= total) continue;
      float* sums = to.sums + row[v] * to.stride + offset[v];
      const float shrink = scratch.shrink[row[v]];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[j] = (begin == 0 ? 0.0f : sums[j] * shrink) + acc[v][j];
    }
  }
}

/// Merges all contributions into `to`, of one part, in order; all threads of the block.
template <int kVectors>
__device__ void merge(const Contributions& from, int num_rows, const BlockResult& to) {
  __shared__ MergeScratch scratch;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int row = thread; row < num_rows; row += threads) {
    to.max[row] = -kInfinity;
    to.sum[row] = 0.0f;
  }
#pragma unroll 1
  for (int begin = 0; begin < from.count; begin += kMergeChunk) {
    const int count = min(kMergeChunk, from.count - begin);
#pragma unroll 4
    for (int i = thread; i < num_rows * count; i += threads) {
      const int row = i / count;
      const int c = i % count;
      scratch.weights[row][c] = from.max(begin + c, row);
      scratch.sums[row][c] = from.sum(begin + c, row);
    }
    __syncthreads();
#pragma unroll 1
    for (int row = thread / kWarp; row < num_rows; row += threads / kWarp) {
      const int lane = thread % kWarp;
      const float before = to.max[row];
      float top = before;
      for (int c = lane; c < count; c += kWarp) top = fmaxf(top, scratch.weights[row][c]);
      top = warp_max(top);
      const float pivot = top == -kInfinity ? 0.0f : top;
      float sum = 0.0f;
      for (int c = lane; c < count; c += kWarp) {
        const float weight = exp2f(scratch.weights[row][c] - pivot);
        scratch.weights[row][c] = weight;
        sum = fmaf(weight, scratch.sums[row][c], sum);
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        scratch.shrink[row] = exp2f(before - pivot);
        to.max[row] = top;
        to.sum[row] = fmaf(to.sum[row], scratch.shrink[row], sum);
      }
    }
    __syncthreads();
    if (from.p.value_dim % 4 == 0) {
      merge_rows<float4, kVectors>(from, begin, count, scratch, num_rows, to);
    } else {
      merge_rows<float, kVectors>(from, begin, count, scratch, num_rows, to);
    }
    __syncthreads();
  }
}

/// Ends a block's tiles of one row block and head. Writes the result, or leaves a partial one and, as the
/// last of the contributors, merges them. All threads of the block, which see `found` and may overwrite it
/// afterwards. kVectors: of 16 bytes that each thread merges at a time.
template <int kVectors = 2>
__device__ void finish_row_block(const AttentionParams& p, const AttentionPlan& plan, int row_block, int head,
                                 const TileList& list, const BlockResult& found) {
  __shared__ bool is_last;
  const RowBlock rows(plan, row_block);
  const int tiles = plan.tile_begin[row_block + 1] - plan.tile_begin[row_block];
  const int first = plan.tile_begin[row_block] * p.kv_heads + head * tiles;
  const int first_block = list.block_of(first);
  const Contributions all{p, first_block, list.block_of(first + tiles - 1) - first_block + 1};
  BlockResult result = found;
  if (all.count > 1) {
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
    const std::int64_t slot = all.slot(static_cast<int>(blockIdx.x) - first_block);
    float* to = p.partial_out + slot * p.rows * p.value_dim;
    for (int row = thread / kWarp; row < rows.num_rows; row += threads / kWarp) {
      for (int i = thread % kWarp; i < p.value_dim; i += kWarp) to[row * p.value_dim + i] = found.get(row, i);
    }
    for (int i = thread; i < rows.num_rows; i += threads) {
      p.partial_max[slot * p.rows + i] = found.max[i];
      p.partial_sum[slot * p.rows + i] = found.sum[i];
    }
    __syncthreads();
    if (thread == 0) {
      // What the block wrote goes before its count, and what the others counted before what is read here.
      int* counter = p.counters + row_block * p.kv_heads + head;
      __threadfence();
      is_last = atomicAdd(counter, 1) == all.count - 1;
      __threadfence();
      if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    result.parts = 1;
    merge<kVectors>(all, rows.num_rows, result);
  }
  write_rows(p, rows, head, result);
  __syncthreads();
}

/// The headers of the messages that the results lie in, by one warp of the grid.
__device__ inline void finish_messages(const AttentionParams& p) {
  if (p.headers.message != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x < kWarp)
    write_headers(p.headers);
}

/// Queues the kernel for any sizes and types; p.rows must be portable_rows().
void launch_portable_attention(const AttentionParams& p, DType kv_dtype, int blocks, StreamHandle stream);
int portable_rows(std::int64_t head_dim, std::int64_t value_dim);

/// The tensor-core kernel (compute capability 9.0): q, out and KV of one 16-bit type, equal head sizes that
/// it was built for.
bool has_tensor_attention(DType dtype, DType kv_dtype, std::int64_t head_dim, std::int64_t value_dim);
int tensor_rows(std::int64_t head_dim);  ///< at most, of a row block
/// On `blocks` half SMs; `is_whole`: on all of the device, nothing beside it.
void launch_tensor_attention(const AttentionParams& p, int blocks, bool is_whole, StreamHandle stream);

}  // namespace helix::cuda
