// SPDX-License-Identifier: Apache-2.0
// Operators::partial_attention: divides a batch into tasks for the threads of the rank, and merges the split
// partials of long sequences.
//
// The division depends only on one sequence's queries and lengths: neither the number of threads nor the rest
// of the batch changes a bit of the result.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/lse.hpp>

#include "cpu/attention/sum_order.hpp"
#include "cpu/attention/task.hpp"
#include "cpu/batch_offsets.hpp"
#include "cpu/kv_rows.hpp"
#include "cpu/target_slot.hpp"
#include "cpu/tuner.hpp"

namespace helix::cpu {
namespace {

constexpr std::int64_t kDraftTokens = 8;  // up to here a task takes all query tokens: K and V are read once
constexpr std::int64_t kTileRows = 128;  // rows of a prefill task: 64 keys against them keep a core in its L2
/// Most query tokens of a prefill task. Where a KV head has few query heads, more of them share its widened
/// keys and values, but leave fewer tasks for the threads.
constexpr std::int64_t kTileTokens = 64;
constexpr std::int64_t kSplitTokens = 1024;  // shortest useful split of a key range
constexpr std::int64_t kMaxSplits = 64;
constexpr std::int64_t kUnitPartials = 128;  // (token, split) pairs of one unit
constexpr std::int64_t kPassPartials = 256;  // (token, split) pairs that the workspace holds at once
constexpr std::int64_t kPassUnits = 256;
constexpr std::int64_t kTileAlign = 256;  // splits are whole key tiles
constexpr std::int64_t kAlignBytes = 64;

constexpr std::int64_t kTasksPerThread = 4;  // tasks take several heads only while this many are left
constexpr std::int64_t kTunedBytes = std::int64_t{8} << 20;  // keys and values; smaller calls say little

/// Ways to read memory, with their names in the tuners. The first suits cores that follow many streams at
/// once. Zen 4 reads 11 GB/s from pages of 16 KB in random order, 20 if the heads of a page are read one
/// after another, and 22 to 24 if they are also prefetched in that order; it takes half of a 512-bit vector
/// per cycle. Zen 5 reads fastest what is prefetched into L1 in the order in which it lies.
constexpr std::array<Variant<AttentionVariant>, 21> kVariants = {{
    {"heads1", {.heads = 1}},
    {"plain", {.heads = 1, .follows_sums = false, .prefetch = Prefetch::none}},
    {"heads2", {.heads = 2}},
    {"heads4", {.heads = 4}},
    {"heads8", {.heads = 8}},
    {"heads8.as_stored", {.heads = 8, .follows_sums = false}},
    {"heads2.straight", {.heads = 2, .prefetch = Prefetch::straight}},
    {"heads4.straight", {.heads = 4, .prefetch = Prefetch::straight}},
    {"heads8.straight", {.heads = 8, .prefetch = Prefetch::straight}},
    {"heads4.along", {.heads = 4, .prefetch = Prefetch::along}},
    {"heads8.along", {.heads = 8, .prefetch = Prefetch::along}},
    {"heads1.short", {.heads = 1, .has_short_passes = true}},
    {"heads4.short", {.heads = 4, .has_short_passes = true}},
    {"heads8.as_stored.straight_l1", {.heads = 8, .follows_sums = false, .prefetch = Prefetch::straight_l1}},
    {"heads8.straight.short", {.heads = 8, .prefetch = Prefetch::straight, .has_short_passes = true}},
    {"heads8.as_stored.linear",
     {.heads = 8, .follows_sums = false, .has_stored_values = true, .prefetch = Prefetch::linear}},
    {"heads1.narrow", {.heads = 1, .is_narrow = true}},
    {"heads4.narrow", {.heads = 4, .is_narrow = true}},
    {"heads8.narrow", {.heads = 8, .is_narrow = true}},
    {"heads4.straight.narrow", {.heads = 4, .prefetch = Prefetch::straight, .is_narrow = true}},
    {"heads8.straight.narrow", {.heads = 8, .prefetch = Prefetch::straight, .is_narrow = true}},
}};
constexpr std::span<const Variant<AttentionVariant>> kAll = kVariants;
constexpr std::span<const Variant<AttentionVariant>> kWide = kAll.first(16);

Tuner f32_tuner("attention.f32", names_of(kWide), kTunedBytes);
Tuner f16_tuner("attention.f16", names_of(kWide), kTunedBytes);
Tuner fp8_tuner("attention.fp8", names_of(kWide), kTunedBytes);
Tuner rows1_tuner("attention.bf16.rows1", names_of(kWide), kTunedBytes);
Tuner rows4_tuner("attention.bf16.rows4", names_of(kWide), kTunedBytes);
Tuner rows8_tuner("attention.bf16.rows8", names_of(kAll), kTunedBytes);

/// The tuner of one token's attention with `group` query heads per KV head.
Tuner& tuner_of(DType dtype, std::int64_t group) {
  switch (dtype) {
    case DType::f32:
      return f32_tuner;
    case DType::f16:
      return f16_tuner;
    case DType::fp8_e4m3:
    case DType::fp8_ds_mla:
      return fp8_tuner;
    case DType::bf16:
      break;
  }
  return group == 1 ? rows1_tuner : group <= 4 ? rows4_tuner : rows8_tuner;
}

std::int64_t tile_tokens(std::int64_t num_tokens, std::int64_t group) {
  return num_tokens <= kDraftTokens ? num_tokens
                                    : std::clamp<std::int64_t>(kTileRows / group, 1, kTileTokens);
}

std::int64_t max_rows(std::int64_t num_tokens, std::int64_t num_query_heads) {
  return std::min(saturating_product(num_tokens, num_query_heads),
                  std::max(kTileRows, kDraftTokens * num_query_heads));
}

std::int64_t max_partials(std::int64_t num_tokens) {
  return std::min(saturating_product(num_tokens, kMaxSplits), kPassPartials);
}

/// Queries of one sequence that share tasks, and the split of their keys.
struct Unit {
  std::int64_t sequence = 0;
  std::int64_t first_token = 0;
  std::int64_t num_tokens = 0;
  std::int64_t begin = 0;  // local tokens that any of its queries sees: [begin, end)
  std::int64_t end = 0;
  std::int64_t num_splits = 1;
  std::int64_t split_tokens = 0;
  std::int64_t task_heads = 1;  // KV heads per task
  std::int64_t first_task = 0;
  std::int64_t first_partial = 0;  // (split, token) rows of the workspace, if num_splits > 1
};

/// One call: its arguments, its workspace, and the units of the current pass.
class PartialAttention {
 public:
  PartialAttention(const PartialAttentionArgs<float>& args, ThreadPool& pool)
      : args_(args),
        pool_(pool),
        heads_(args.kv.format.num_heads),
        query_heads_(args.q.extent(1)),
        group_(query_heads_ / std::max<std::int64_t>(heads_, 1)) {
    const std::int64_t rows = max_rows(args.batch.num_tokens(), query_heads_);
    scratch_floats_ = attention_scratch_floats(rows, args.kv.format.head_dim, args.kv.format.value_dim);
    void* base = args.workspace.data();
    std::size_t space = args.workspace.size();
    base = std::align(static_cast<std::size_t>(kAlignBytes), 1, base, space);
    scratch_ = static_cast<float*>(base);
    partial_out_ = scratch_ + scratch_floats_ * pool.num_threads();
    partial_lse_ =
        partial_out_ + max_partials(args.batch.num_tokens()) * query_heads_ * args.kv.format.value_dim;
  }

  void run() {
    const Tuner::Call call(tuner_of(args_.kv.format.dtype, group_), tuned_bytes());
    variant_ = kVariants[static_cast<std::size_t>(call.variant())].value;
    const auto& offsets = args_.batch.query_offsets_host;
    for (std::int64_t sequence = 0; sequence < args_.batch.num_sequences(); ++sequence) {
      const std::int64_t begin = offsets[static_cast<std::size_t>(sequence)];
      const std::int64_t end = offsets[static_cast<std::size_t>(sequence) + 1];
      if (begin == end) continue;
      const std::int64_t tile = tile_tokens(end - begin, group_);
      for (std::int64_t token = begin; token < end; token += tile) {
        Unit unit = make_unit(sequence, token, std::min(tile, end - token));
        const std::int64_t partials = unit.num_splits > 1 ? unit.num_splits * unit.num_tokens : 0;
        if (num_units_ == kPassUnits || num_partials_ + partials > max_partials(args_.batch.num_tokens()))
          flush();
        unit.first_partial = num_partials_;
        num_partials_ += partials;
        units_[static_cast<std::size_t>(num_units_++)] = unit;
      }
    }
    flush();
  }

 private:
  std::int64_t out_row(std::int64_t token) const { return token - args_.target.first_token; }

  /// @throws Error(invalid_argument) if the token's position is beyond all limits.
  TokenRange visible(std::int64_t token) const {
    const std::int64_t position = args_.batch.positions[token];
    HELIX_EXPECTS(position < kMaxTokens, ErrorCode::invalid_argument, "partial_attention: token ", token,
                  " is at position ", position, "; positions are below ", kMaxTokens);
    return args_.kv.layout.visible(position, args_.window, args_.kv.kvp_rank);
  }

  /// @throws Error(invalid_argument) if a token sees a position without a page.
  Unit make_unit(std::int64_t sequence, std::int64_t first_token, std::int64_t num_tokens) const {
    Unit unit;
    unit.sequence = sequence;
    unit.first_token = first_token;
    unit.num_tokens = num_tokens;
    unit.begin = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t token = first_token; token < first_token + num_tokens; ++token) {
      const TokenRange seen = visible(token);
      if (seen.size() <= 0) continue;
      check_pages(args_.kv, args_.batch.sequence_slots[sequence], seen);
      unit.begin = std::min(unit.begin, seen.begin);
      unit.end = std::max(unit.end, seen.end);
    }
    unit.begin = std::min(unit.begin, unit.end);
    const std::int64_t length = unit.end - unit.begin;
    const std::int64_t most = std::clamp<std::int64_t>(kUnitPartials / num_tokens, 1, kMaxSplits);
    const std::int64_t wanted = std::clamp<std::int64_t>(ceil_div(length, kSplitTokens), 1, most);
    const std::int64_t even = ceil_div(length, wanted);
    unit.split_tokens = std::max(kTileAlign, round_up(even, kTileAlign));
    unit.num_splits = std::max<std::int64_t>(1, ceil_div(length, unit.split_tokens));
    return unit;
  }

  /// Bytes of keys and values that the batch reads, if every sequence has one token with few rows; otherwise
  /// 0.
  std::int64_t tuned_bytes() const {
    const KvFormat& format = args_.kv.format;
    if (group_ > kDirectRows || format.is_mixed()) return 0;
    const auto& offsets = args_.batch.query_offsets_host;
    std::int64_t rows = 0;
    for (std::int64_t sequence = 0; sequence < args_.batch.num_sequences(); ++sequence) {
      const std::int64_t begin = offsets[static_cast<std::size_t>(sequence)];
      const std::int64_t end = offsets[static_cast<std::size_t>(sequence) + 1];
      if (end > begin + 1) return 0;
      if (end > begin) rows = saturating_sum(rows, std::max<std::int64_t>(0, visible(begin).size()));
    }
    const std::int64_t width = format.head_dim + (format.is_latent ? 0 : format.value_dim);
    return saturating_product(rows, heads_, width, format.element_bytes());
  }

  /// Divides the collected units into tasks. A task takes as many heads as the variant says, as long as that
  /// leaves enough tasks for all threads.
  void cut_tasks() {
    std::int64_t num_splits = 0;
    for (std::int64_t i = 0; i < num_units_; ++i)
      num_splits += units_[static_cast<std::size_t>(i)].num_splits;
    const auto block_rows = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(group_)));
    std::int64_t most = std::min<std::int64_t>(variant_.heads, kMaxTaskHeads);
    while (most > 1 && (most * block_rows > kTaskRows ||
                        num_splits * ceil_div(heads_, most) < kTasksPerThread * pool_.num_threads())) {
      most /= 2;
    }
    for (std::int64_t i = 0; i < num_units_; ++i) {
      Unit& unit = units_[static_cast<std::size_t>(i)];
      unit.task_heads = unit.num_tokens == 1 ? most : 1;
      unit.first_task = num_tasks_;
      num_tasks_ += unit.num_splits * ceil_div(heads_, unit.task_heads);
    }
  }

  /// Computes the collected units.
  void flush() {
    if (num_units_ == 0) return;
    cut_tasks();
    pool_.parallel_for(num_tasks_, [this](std::int64_t task, int thread) { attend_task(task, thread); });
    if (num_partials_ > 0) {
      pool_.parallel_for(num_units_ * query_heads_, [this](std::int64_t index, int) {
        merge(units_[static_cast<std::size_t>(index / query_heads_)], index % query_heads_);
      });
    }
    num_units_ = num_tasks_ = num_partials_ = 0;
  }

  void attend_task(std::int64_t index, int thread) const {
    const auto after = std::upper_bound(units_.begin(), units_.begin() + num_units_, index,
                                        [](std::int64_t i, const Unit& unit) { return i < unit.first_task; });
    const Unit& unit = *(after - 1);
    const std::int64_t split = (index - unit.first_task) % unit.num_splits;
    const std::int64_t first_head = (index - unit.first_task) / unit.num_splits * unit.task_heads;

    std::array<TokenRange, static_cast<std::size_t>(kTileTokens)> seen;
    const std::int64_t begin = unit.begin + split * unit.split_tokens;
    const std::int64_t end = std::min(unit.end, begin + unit.split_tokens);
    for (std::int64_t t = 0; t < unit.num_tokens; ++t) {
      const TokenRange whole = visible(unit.first_token + t);
      seen[static_cast<std::size_t>(t)] = {std::max(begin, whole.begin), std::min(end, whole.end)};
    }

    std::array<AttentionTask, static_cast<std::size_t>(kMaxTaskHeads)> tasks;
    int num_tasks = 0;
    for (std::int64_t head = first_head; head < std::min(first_head + unit.task_heads, heads_); ++head) {
      AttentionTask& task = tasks[static_cast<std::size_t>(num_tasks++)];
      task.q = args_.q.data() + unit.first_token * args_.q.stride(0) + head * group_ * args_.q.stride(1);
      task.q_token_stride = args_.q.stride(0);
      task.q_head_stride = args_.q.stride(1);
      task.num_tokens = unit.num_tokens;
      task.group = group_;
      task.visible = seen.data();
      task.soft_cap = detail::effective_soft_cap(args_.soft_cap);
      task.variant = variant_;
      task.sum_order = sum_order_;
      set_source(task, unit, head);
      set_target(task, unit, split, head);
    }
    attend(tasks.data(), num_tasks, scratch_ + thread * scratch_floats_);
  }

  StoredRows rows_of(const void* pool, const KvStrides& strides, std::int64_t head) const {
    const std::int64_t element_bytes = args_.kv.format.element_bytes();
    return {static_cast<const std::byte*>(pool) + head * strides.head * element_bytes,
            strides.page * element_bytes, strides.token * element_bytes};
  }

  /// Whether each latent row is followed directly by its rope columns, in the same type.
  bool is_joined_latent() const {
    const KvView& kv = args_.kv;
    const KvFormat& format = kv.format;
    if (format.is_mixed()) return false;
    if (format.rope_columns() == 0) return true;
    return kv.rope == static_cast<const std::byte*>(kv.k) + format.value_dim * format.element_bytes() &&
           format.rope.page == format.k.page && format.rope.token == format.k.token;
  }

  /// Sets what the task reads of the cache.
  void set_source(AttentionTask& task, const Unit& unit, std::int64_t head) const {
    const KvView& kv = args_.kv;
    const KvFormat& format = kv.format;
    task.keys = rows_of(kv.k, format.k, head);
    task.values = format.is_latent ? task.keys : rows_of(kv.v, format.v, head);
    if (format.is_latent && !is_joined_latent()) task.rope = rows_of(kv.rope, format.rope, head);
    task.dtype = format.dtype;
    task.page_tokens = format.page_tokens;
    if (unit.begin < unit.end) {  // else nobody has checked the slot
      task.page_table = kv.page_table + kv.first_page_of(args_.batch.sequence_slots[unit.sequence]);
    }
    task.head_dim = format.head_dim;
    task.value_dim = format.value_dim;
    const float k_scale = scale_of(kv.k_scale, head);
    task.key_scale = args_.scale * k_scale;
    task.value_scale = format.is_latent ? k_scale : scale_of(kv.v_scale, head);
  }

  /// Sets where the task writes: the target, or the workspace if its unit is split.
  void set_target(AttentionTask& task, const Unit& unit, std::int64_t split, std::int64_t head) const {
    if (unit.num_splits == 1) {
      const auto& out = args_.target.out;
      const auto& lse = args_.target.lse;
      const std::int64_t token = out_row(unit.first_token);
      task.out = out.data() + token * out.stride(0) + head * group_ * out.stride(1);
      task.out_token_stride = out.stride(0);
      task.out_head_stride = out.stride(1);
      task.lse = lse.data() + token * lse.stride(0) + head * group_ * lse.stride(1);
      task.lse_token_stride = lse.stride(0);
      task.lse_head_stride = lse.stride(1);
      return;
    }
    const std::int64_t value_dim = args_.kv.format.value_dim;
    const std::int64_t row = (unit.first_partial + split * unit.num_tokens) * query_heads_ + head * group_;
    task.out = partial_out_ + row * value_dim;
    task.out_token_stride = query_heads_ * value_dim;
    task.out_head_stride = value_dim;
    task.lse = partial_lse_ + row;
    task.lse_token_stride = query_heads_;
    task.lse_head_stride = 1;
  }

  /// Merges the splits of one query head, in order. A split that a token does not see has lse = -inf and
  /// weight 0.
  void merge(const Unit& unit, std::int64_t query_head) const {
    if (unit.num_splits == 1) return;
    const std::int64_t value_dim = args_.kv.format.value_dim;
    for (std::int64_t t = 0; t < unit.num_tokens; ++t) {
      const std::int64_t token = unit.first_token + t;
      const auto row = [&](std::int64_t split) {
        return (unit.first_partial + split * unit.num_tokens + t) * query_heads_ + query_head;
      };
      float* out = args_.target.out.data() + out_row(token) * args_.target.out.stride(0) +
                   query_head * args_.target.out.stride(1);
      float highest = -std::numeric_limits<float>::infinity();
      for (std::int64_t split = 0; split < unit.num_splits; ++split)
        highest = larger_lse(highest, partial_lse_[row(split)]);
      std::fill_n(out, value_dim, 0.0f);
      float total = 0.0f;
      for (std::int64_t split = 0; split < unit.num_splits; ++split) {
        const float lse = partial_lse_[row(split)];
        if (lse == -std::numeric_limits<float>::infinity()) continue;
        const float weight = std::exp(lse - highest);
        const float* from = partial_out_ + row(split) * value_dim;
        total += weight;
        for (std::int64_t i = 0; i < value_dim; ++i) out[i] += weight * from[i];
      }
      float lse = highest;
      if (total > 0.0f) {
        for (std::int64_t i = 0; i < value_dim; ++i) out[i] /= total;
        lse += std::log(total);
      }
      args_.target.lse(out_row(token), query_head) = lse;
    }
  }

  const PartialAttentionArgs<float>& args_;
  ThreadPool& pool_;
  std::int64_t heads_;
  std::int64_t query_heads_;
  std::int64_t group_;
  AttentionVariant variant_;
  SumOrder sum_order_ = sum_order();
  std::int64_t scratch_floats_ = 0;  // per thread
  float* scratch_ = nullptr;         // [threads, scratch_floats_]
  float* partial_out_ = nullptr;     // [partials, query heads, Dv]
  float* partial_lse_ = nullptr;     // [partials, query heads]
  std::array<Unit, static_cast<std::size_t>(kPassUnits)> units_;
  std::int64_t num_units_ = 0;
  std::int64_t num_tasks_ = 0;
  std::int64_t num_partials_ = 0;
};

}  // namespace

void Operators::partial_attention(const PartialAttentionArgs<float>& args, Stream stream) const {
  const std::size_t needed = partial_attention_workspace_bytes(
      args.batch.num_tokens(), args.q.extent(1), args.kv.format.head_dim, args.kv.format.value_dim);
  HELIX_EXPECTS(args.workspace.size() >= needed, ErrorCode::capacity, "partial_attention: the workspace has ",
                args.workspace.size(), " bytes, ", args.batch.num_tokens(), " tokens of ", args.q.extent(1),
                " heads need ", needed, "; see partial_attention_workspace_bytes()");
  if (args.batch.num_tokens() == 0) return;
  PartialAttentionArgs<float> queued = args;  // refers to offsets that the caller need not keep
  queued.batch.query_offsets_host = {args.batch.query_offsets, args.batch.query_offsets_host.size()};
  stream.enqueue([args = queued, host_offsets = BatchOffsets(args.batch), pool = pool_] {
    host_offsets.check("partial_attention", args.batch.query_offsets_host);
    PartialAttentionArgs<float> now = args;
    now.target = in_slot(args.target);
    PartialAttention(now, *pool).run();
  });
  if (args.target.headers.message != nullptr) stamp(args.target.headers, stream);
}

std::size_t Operators::partial_attention_workspace_bytes(std::int64_t num_tokens,
                                                         std::int64_t num_query_heads, std::int64_t head_dim,
                                                         std::int64_t value_dim) const {
  if (num_tokens <= 0) return 0;
  if (num_query_heads > kMaxCount || head_dim > kMaxRowElements || value_dim > kMaxRowElements)
    return static_cast<std::size_t>(kSaturated);
  const std::int64_t scratch = saturating_product(
      attention_scratch_floats(max_rows(num_tokens, num_query_heads), head_dim, value_dim), num_threads());
  const std::int64_t partials = saturating_product(max_partials(num_tokens), num_query_heads, value_dim + 1);
  const std::int64_t bytes =
      saturating_product(saturating_sum(scratch, partials), std::int64_t{sizeof(float)});
  return static_cast<std::size_t>(saturating_sum(bytes, kAlignBytes));
}

}  // namespace helix::cpu
