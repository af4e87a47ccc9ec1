// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::partial_attention: arguments, choice of the kernel, launches.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/workspace.hpp>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/kernel.hpp"
#include "cuda/attention/local_tokens.hpp"
#include "cuda/attention/params.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/workspace.hpp"

namespace helix::cuda {
namespace {

/// Workspace for the split partials of up to `rows` rows at a time: two KV splits of each row, with their max
/// and sum.
struct SplitPartialsMemory {
  std::span<std::byte> out, max, sum, tiles;
  SplitPartialsMemory(WorkspaceArena& arena, std::int64_t rows, std::int64_t value_dim)
      : out(arena.take_bytes(static_cast<std::size_t>(2 * rows * partial_stride(value_dim) * 4))),
        max(arena.take_bytes(static_cast<std::size_t>(2 * rows * 4))),
        sum(arena.take_bytes(static_cast<std::size_t>(2 * rows * 4))),
        tiles(arena.take_bytes(kMaxQueryTiles * sizeof(SplitQueryTile))) {}
};

/// The table of kernels: the first one that fits a call runs.
constexpr const AttentionKernel* kKernels[] = {
    &kWaves,          &kWavesE4m3,    &kTensorPages,  &kTensorBoxes, &kTensorRows, &kTensorPagesE4m3,
    &kTensorRowsE4m3, &kNarrowLatent, &kLatentKernel, &kMmaRest,     &kMma,        &kMmaLatentRest,
    &kWideMmaLatent,  &kMmaLatent,    &kPortable};

const AttentionKernel& kernel_for(const AttentionCall& call) {
  return **std::find_if(std::begin(kKernels), std::end(kKernels),
                        [&](const AttentionKernel* kernel) { return kernel->fits(call); });
}

/// The properties of a call by which the kernel is chosen.
template <class T>
AttentionCall call_of(const PartialAttentionArgs<T>& args, bool is_hopper, const SharedMemory& memory) {
  const KvPlaces places(args.kv);
  std::int64_t longest = 0;
  for (std::size_t b = 0; b + 1 < args.batch.query_offsets_host.size(); ++b)
    longest = std::max<std::int64_t>(longest,
                                     args.batch.query_offsets_host[b + 1] - args.batch.query_offsets_host[b]);
  return {.dtype = kDTypeOf<T>,
          .kv = args.kv,
          .num_sequences = args.batch.num_sequences(),
          .most_rows = longest * (args.q.extent(1) / args.kv.format.num_heads),
          .q_alignment = common_alignment(
              {address_of(args.q.data()), step_of<T>(args.q.stride(0)), step_of<T>(args.q.stride(1))}),
          .has_query_map = is_map_stride(args.q.extent(0), args.q.stride(0) * std::int64_t{sizeof(T)}) &&
                           is_map_stride(args.q.extent(1), args.q.stride(1) * std::int64_t{sizeof(T)}),
          .kv_alignment = std::min(
              {places.k.alignment(args.kv), places.v.alignment(args.kv), places.rope.alignment(args.kv)}),
          .has_tensor_maps = places.k.has_tensor_map(args.kv) && places.v.has_tensor_map(args.kv) &&
                             places.rope.has_tensor_map(args.kv),
          .is_hopper = is_hopper,
          .memory = memory};
}

/// Consecutive sequences of a batch with many query rows each, then with few each, and so on.
struct Runs {
  static constexpr int kMost = 4;   ///< More would cost more launches than they are worth.
  std::int64_t begin[kMost + 1]{};  ///< First sequence of each; then the number of all.
  int count = 1;

  /// Sequences of `least_rows` query rows and more have many. One run of all if there are too many runs.
  Runs(const Batch& batch, std::int64_t group, std::int64_t least_rows) {
    const auto& offsets = batch.query_offsets_host;
    int found = 0;
    bool had_many = false;
    for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
      if (offsets[b + 1] == offsets[b]) continue;
      const bool has_many = (offsets[b + 1] - offsets[b]) * group >= least_rows;
      if (found > 0 && has_many == had_many) continue;
      if (found == kMost) {
        found = 1;
        break;
      }
      if (found > 0) begin[found] = static_cast<std::int64_t>(b);
      ++found;
      had_many = has_many;
    }
    count = std::max(found, 1);
    begin[count] = batch.num_sequences();
  }
};

/// The arguments that depend neither on the kernel nor on the part of the batch that a launch covers.
template <class T>
AttentionParams params_of(const PartialAttentionArgs<T>& args) {
  const KvView& kv = args.kv;
  const KvPlaces places(kv);
  const PartialTarget<T>& target = args.target;
  AttentionParams p;
  p.dtype = kDTypeOf<T>;
  p.q = args.q.data();
  p.q_token_stride = args.q.stride(0);
  p.q_head_stride = args.q.stride(1);
  p.out = target.out.data();
  p.out_token_stride = target.out.stride(0);
  p.out_head_stride = target.out.stride(1);
  p.lse = target.lse.data();
  p.lse_token_stride = target.lse.stride(0);
  p.lse_head_stride = target.lse.stride(1);
  p.out_alignment = static_cast<int>(
      common_alignment({address_of(target.out.data()), step_of<T>(target.out.stride(0)),
                        step_of<T>(target.out.stride(1)), static_cast<std::uintptr_t>(target.slot.bytes)}));
  p.first_out_token = static_cast<int>(target.first_token);
  p.headers = target.headers;
  p.exchanges = target.slot.exchanges;
  p.out_slot_stride = target.slot.bytes / static_cast<std::int64_t>(sizeof(T));
  p.lse_slot_stride = target.slot.bytes / static_cast<std::int64_t>(sizeof(float));
  if (const LineRows<std::byte>& lines = target.lines.rows; lines.out != nullptr) {
    p.sends_lines = true;
    p.gave_up = target.lines.gave_up;
    p.line_positions = target.lines.positions;
    p.line_tokens = target.lines.tokens;
    p.out = lines.out;
    p.out_token_stride = lines.token_bytes / static_cast<std::int64_t>(sizeof(T));
    p.out_head_stride = lines.head_bytes / static_cast<std::int64_t>(sizeof(T));
    p.lse = reinterpret_cast<float*>(lines.lse);
    p.lse_token_stride = kLineBytes / static_cast<std::int64_t>(sizeof(float));
    p.lse_head_stride = lines.head_bytes / static_cast<std::int64_t>(sizeof(float));
  }
  p.positions = args.batch.positions;
  p.k = places.k;
  p.v = places.v;
  p.rope = places.rope;
  p.key_columns = static_cast<int>(kv.format.k_columns());
  p.page_tokens = Divisor(static_cast<int>(kv.format.page_tokens));
  p.lists = PageLists(kv);
  p.k_scale = kv.k_scale;
  p.v_scale = kv.format.is_latent ? kv.k_scale : kv.v_scale;
  p.layout = kv.layout;
  p.kvp_rank = kv.kvp_rank;
  p.kv_heads = Divisor(static_cast<int>(kv.format.num_heads));
  p.group = Divisor(static_cast<int>(args.q.extent(1) / kv.format.num_heads));
  p.head_dim = static_cast<int>(kv.format.head_dim);
  p.value_dim = static_cast<int>(kv.format.value_dim);
  p.scale = args.scale;
  p.soft_cap = detail::effective_soft_cap(args.soft_cap);
  p.window = args.window;
  return p;
}

/// Most query tiles of a launch for sequences of up to `most_tokens` local tokens: as many as the kernel can
/// plan, has counters for, and can count the KV tiles of.
int most_launch_tiles(const AttentionKernel& kernel, std::int64_t kv_heads, std::int64_t most_tokens) {
  constexpr auto kCounters = static_cast<std::int64_t>(kAttentionCounters);
  HELIX_EXPECTS(kv_heads <= kCounters, ErrorCode::unsupported, "partial_attention: there are ", kv_heads,
                " KV heads; on a GPU at most ", kCounters, " are supported");
  const std::int64_t most = std::min({std::int64_t{kernel.most_query_tiles}, kCounters / kv_heads,
                                      most_counted_query_tiles(most_tokens, kv_heads)});
  HELIX_EXPECTS(most > 0, ErrorCode::unsupported, "partial_attention: ", kv_heads,
                " KV heads of a sequence that may have ", most_tokens,
                " tokens on this rank are more than a GPU kernel counts: use a larger KVP or TPA, or say by "
                "shorter rows of the page table or by the batch's lengths_host that sequences are shorter");
  return static_cast<int>(most);
}

/// Calls launch() with `p` set to one part of the batch after another. A part has as many sequences as a plan
/// holds and at most `most` query tiles; prefill takes several parts.
template <class Launch>
void for_each_launch(const Batch& batch, bool follows_prepare, AttentionParams& p, int most,
                     const Launch& launch) {
  const auto& offsets = batch.query_offsets_host;
  const auto query_tiles = [&](std::size_t b) {
    return static_cast<int>(((offsets[b + 1] - offsets[b]) * p.group + p.query_tile_rows - 1) /
                            p.query_tile_rows);
  };
  const std::size_t sequences = offsets.size() - 1;
  int skipped = 0;  // query tiles of sequence `first` that earlier launches did
  for (std::size_t first = 0; first < sequences;) {
    std::size_t end = first;
    int count = -skipped;
    p.is_one_query_tile_each = skipped == 0;
    while (end < sequences && end - first < kMaxLaunchSequences && count < most) {
      const int tiles_of_sequence = query_tiles(end++);
      count += tiles_of_sequence;
      p.is_one_query_tile_each = p.is_one_query_tile_each && tiles_of_sequence == 1;
    }
    std::copy(offsets.begin() + static_cast<std::ptrdiff_t>(first),
              offsets.begin() + static_cast<std::ptrdiff_t>(end) + 1, p.query_offsets);
    p.sequence_slots = batch.sequence_slots + first;
    p.num_sequences = static_cast<int>(end - first);
    p.first_query_tile = skipped;
    p.num_query_tiles = std::min(count, most);
    p.reads_ahead = follows_prepare && p.is_one_query_tile_each;
    const bool goes_on = count > most;  // whether the next launch continues the last sequence
    const int done = goes_on ? query_tiles(end - 1) - (count - most) : 0;
    p.first_token = offsets[first] + skipped * p.query_tile_rows / p.group;
    const int end_token =
        goes_on ? offsets[end - 1] + ceil_div(done * p.query_tile_rows, int{p.group}) : offsets[end];
    p.num_tokens = end_token - p.first_token;
    // Sequences without tokens launch nothing.
    if (p.num_query_tiles > 0) launch();
    skipped = done;
    first = goes_on ? end - 1 : end;
  }
}

}  // namespace

template <class T>
std::size_t Operators<T>::partial_attention_workspace_bytes(std::int64_t num_tokens,
                                                            std::int64_t num_query_heads,
                                                            std::int64_t head_dim,
                                                            std::int64_t value_dim) const {
  if (num_tokens <= 0 || num_query_heads <= 0) return 0;
  int rows = 0;
  for (const AttentionKernel* kernel : kKernels) rows = std::max(rows, kernel->sm_rows(head_dim, value_dim));
  WorkspaceArena arena;
  SplitPartialsMemory(arena, std::int64_t{rows} * state_->num_sms, value_dim);
  return arena.used_bytes() + WorkspaceArena::kAlignment;
}

template <class T>
void Operators<T>::partial_attention(const PartialAttentionArgs<T>& args, Stream stream) const {
  if (args.batch.num_tokens() == 0 || args.q.extent(1) == 0) return;
  const std::int64_t most_tokens = most_local_tokens(args.batch, args.kv);
  check_local_tokens(most_tokens, args.kv);
  const DeviceScope scope(state_->device);
  const AttentionCall call =
      call_of(args, state_->runs_hopper_kernels(),
              state_->kernel_target == KernelTarget::least_gpu ? kMinSharedMemory : state_->shared_memory);
  constexpr std::int64_t kMaxQueryRows = kMaxLocalTokens;  // query rows are counted in an int too
  HELIX_EXPECTS(call.most_rows <= kMaxQueryRows, ErrorCode::unsupported, "partial_attention: a sequence has ",
                call.most_rows, " query rows of a KV head; a GPU kernel counts up to ", kMaxQueryRows,
                ": give fewer tokens a step");
  const AttentionKernel& kernel = kernel_for(call);
  // Throws before anything is queued, for the kernels of all runs too: none has longer sequences.
  const int most_tiles = most_launch_tiles(kernel, args.kv.format.num_heads, most_tokens);
  if (kernel.least_rows > 0) {
    const Runs runs(args.batch, args.q.extent(1) / args.kv.format.num_heads, kernel.least_rows);
    if (runs.count > 1) {
      PartialAttentionArgs<T> part = args;
      for (int i = 0; i < runs.count; ++i) {
        part.batch = args.batch.slice(runs.begin[i], runs.begin[i + 1] - runs.begin[i]);
        partial_attention(part, stream);
        part.target.headers.message = nullptr;  // only the first run writes them
      }
      return;
    }
  }
  AttentionParams p = params_of(args);
  const std::int64_t rows = kernel.query_tile_rows(p.head_dim, p.value_dim);
  p.query_tile_rows =
      Divisor(static_cast<int>(kernel.has_fixed_query_tile ? rows : std::min(rows, call.most_rows)));
  const int all_blocks = kBlocksPerSm * state_->num_sms;
  const int blocks =
      state_->attention_blocks > 0 ? std::min(all_blocks, state_->attention_blocks) : all_blocks;

  WorkspaceArena arena(aligned_part(args.workspace));
  const SplitPartialsMemory partials(
      arena, std::int64_t{kernel.sm_rows(p.head_dim, p.value_dim)} * state_->num_sms, p.value_dim);
  p.partial_out = reinterpret_cast<float*>(partials.out.data());
  p.partial_max = reinterpret_cast<float*>(partials.max.data());
  p.partial_sum = reinterpret_cast<float*>(partials.sum.data());
  p.split_tiles = reinterpret_cast<SplitQueryTile*>(partials.tiles.data());
  p.counters = reinterpret_cast<int*>(state_->attention_counters.data());
  for_each_launch(args.batch, args.follows_prepare, p, most_tiles, [&] {
    kernel.launch(p, call, {blocks, blocks == all_blocks, state_->shares_device, stream.handle()});
    p.headers.message = nullptr;  // only the first launch writes them
  });
}

#define HELIX_INSTANTIATE(T)                                                                       \
  template void Operators<T>::partial_attention(const PartialAttentionArgs<T>&, Stream) const;     \
  template std::size_t Operators<T>::partial_attention_workspace_bytes(std::int64_t, std::int64_t, \
                                                                       std::int64_t, std::int64_t) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
