// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::project_qkv: the product of q, k and v, with rope and the append to the pages as its tail
// if it is a product of few rows, and with its heads shared by the ranks of a KVP group.
#include <algorithm>
#include <cstdint>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/linear/few_rows.hpp"
#include "cuda/linear/few_rows_launch.cuh"
#include "cuda/linear/few_rows_qkv.cuh"
#include "cuda/linear/few_rows_shared_qkv.cuh"
#include "cuda/linear/product.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {
namespace {

using few_rows::Tiles;

/// Bytes of weights that sharing the heads must save a rank, which then waits for its peers, about 2 us.
constexpr std::int64_t kMinSavedBytes = std::int64_t{12} << 20;

/// Whether the tail can do all of prepare_qkv for q, k and v where the product writes them.
template <class T>
bool has_tail(const ProjectQkvArgs<T>& args) {
  const PrepareQkvArgs<T>& prepare = args.prepare;
  const KvFormat& format = prepare.kv.format;
  const TensorView<T, 2>& out = args.linear.out;
  const std::int64_t dim = format.head_dim;
  const std::int64_t q_columns = prepare.q.extent(1) * dim;
  const auto lies_at = [&](const auto& heads, std::int64_t column, std::int64_t count) {
    return heads.data() == out.data() + column && heads.extent(0) == out.extent(0) &&
           heads.extent(1) == count && heads.extent(2) == dim && heads.stride(0) == out.stride(0) &&
           (count == 1 || heads.stride(1) == dim) && heads.stride(2) == 1;
  };
  return !format.is_latent && !format.is_mixed() && format.value_dim == dim &&
         prepare.rope.rotary_dim == dim && prepare.q_norm.empty() && prepare.k_norm.empty() &&
         args.linear.weight.rows == q_columns + 2 * format.num_heads * dim &&
         lies_at(prepare.q, 0, prepare.q.extent(1)) && lies_at(prepare.k, q_columns, format.num_heads) &&
         lies_at(prepare.v, q_columns + format.num_heads * dim, format.num_heads);
}

/// Hash of what two ranks must agree on for their flagged words to match; 1 to 255.
std::uint32_t tag_of(int heads, int pairs, const Tiles& tiles, int rows, int cols) {
  const std::uint32_t tag = call_tag(0, {heads, pairs, tiles.height, tiles.count, tiles.blocks, rows, cols});
  return 1 + (tag >> 16) % 255;
}

/// Queues the product and its tail as one kernel of shape S. False, with nothing queued: there is none for
/// these heads. `channel`: of the KVP group whose ranks share them, or null.
template <class S, class T>
bool multiply_qkv(const ProjectQkvArgs<T>& args, Product<T> product, int num_sms, const PeerChannel* channel,
                  cudaStream_t stream) {
  using namespace few_rows;
  using Tail = Qkv<S::kRows>;
  const PrepareQkvArgs<T>& prepare = args.prepare;
  const KvView& kv = prepare.kv;
  const int ranks = channel == nullptr ? 1 : channel->waits.size;
  const int rank = channel == nullptr ? 0 : channel->waits.rank;
  const int pairs = static_cast<int>(kv.format.head_dim / 2);
  const int all_heads = product.width / (2 * pairs);
  if (all_heads % ranks != 0) return false;
  const int heads = all_heads / ranks;
  int most_blocks = num_sms * S::kBlocksPerSm;
  if (channel != nullptr) {
    most_blocks = std::min(most_blocks, kMaxFlaggedWordBlocks);
    if (channel->waits.most_blocks > 0) most_blocks = std::min(most_blocks, channel->waits.most_blocks);
  }
  const Tiles tiles =
      cut_runs(heads, pairs, Tail::kHalves, product.rows, S::kTileWidth / Tail::kHalves, most_blocks);
  // If heads do not divide well, a block of many tiles reads more than its share: more than the tail saves.
  const int share = ceil_div(heads * pairs, most_blocks);
  const int most = tiles.count * tiles.height;
  if ((tiles.count > 1 && most > share + share / 8) || most > kQkvPairs) return false;
  const std::int64_t row_bytes = product.cols * std::int64_t{sizeof(T)};
  if (channel != nullptr) {
    const std::int64_t saved = row_bytes * 2 * pairs * (all_heads - heads);
    if (saved < kMinSavedBytes || most * product.rows > channel->most_flagged_words) return false;
    HELIX_EXPECTS(fits_few_rows(product), ErrorCode::invalid_argument, "project_qkv: in at ",
                  static_cast<const void*>(product.in), " and weight at ", product.weight,
                  " must be aligned to 16 bytes where ranks reach each other's memory");
  } else {
    // If most of the product's weights are in the ring when it begins, the tail's memory accesses take as
    // long as the rest of the product: TPA 2 of the 8B shape lost 0.2 % of a step with one sequence, 0.8 %
    // with two. After a layer, the tail reads ahead.
    const int stages = tiles.count * ceil_div(product.cols, S::kColumns);
    if (!args.follows_layer && stages < 2 * S::kStages) return false;
  }

  const KvPlaces places(kv);
  const int head_tiles = ceil_div(pairs, tiles.height);
  const int first_head = rank * heads;
  const Tail tail{.head_tiles = head_tiles,
                  .pairs = pairs,
                  .first_head = first_head,
                  .query_heads = static_cast<int>(prepare.q.extent(1)),
                  .kv_heads = static_cast<int>(kv.format.num_heads),
                  .is_interleaved = prepare.rope.is_interleaved,
                  .inverse_frequency = prepare.rope.inverse_frequency,
                  .magnitude = prepare.rope.magnitude,
                  .appended = {prepare.batch, kv},
                  .lists = PageLists(kv),
                  .page_tokens = kv.format.page_tokens,
                  .reads_ahead = args.follows_layer,
                  .keys = {places.k, kv.k_scale},
                  .values = {places.v, kv.v_scale},
                  .stored_dtype = kv.format.dtype};
  product.width = heads * head_tiles * tiles.height;
  product.weight = static_cast<const std::byte*>(product.weight) + first_head * 2 * pairs * row_bytes;
  const std::int64_t between = prepare.rope.is_interleaved ? 1 : pairs;  // between the two rows of a pair
  const std::int64_t next = prepare.rope.is_interleaved ? 2 : 1;         // between pairs
  const CUtensorMap weights =
      rows_map<5>(const_cast<void*>(product.weight), kDTypeOf<T>,
                  {kChunkColumns, pairs, Tail::kHalves, heads, product.cols / kChunkColumns},
                  {row_bytes * next, row_bytes * between, row_bytes * 2 * pairs, kChunkRowBytes},
                  {kChunkColumns, tiles.height, Tail::kHalves, 1, S::kChunks}, kPromotion);
  if (channel == nullptr) {
    launch_product<S>(product, product.rows, weights, tiles, tail, stream);
  } else {
    const std::uint32_t tag = tag_of(all_heads, pairs, tiles, product.rows, product.cols);
    launch_product<S>(product, product.rows, weights, tiles, SharedQkv<S::kRows>{tail, *channel, tag, heads},
                      stream);
  }
  return true;
}

/// multiply_qkv() in the shape for the rows; also false if no product of few rows does what is asked.
/// @throws Error(invalid_argument) if ranks share the heads and this rank's activations or weights are not
/// aligned.
template <class T>
bool multiply_few_rows_qkv(const ProjectQkvArgs<T>& args, int num_sms, const PeerChannel* channel,
                           cudaStream_t stream) {
  const LinearArgs<T>& linear = args.linear;
  const Product<T> product = product_of(linear);
  // The address of the activations is one rank's own, so it must not decide if ranks share the heads.
  const bool fits = channel == nullptr ? fits_few_rows(product) : has_few_rows(product);
  if (linear.weight.dtype != kDTypeOf<T> || !fits || product.accumulate ||
      args.prepare.batch.num_sequences() > few_rows::kQkvSequences || !has_tail(args))
    return false;
  if (product.rows <= few_rows::OneOrTwo::kRows)
    return multiply_qkv<few_rows::OneOrTwo>(args, product, num_sms, channel, stream);
  if (product.rows <= few_rows::UpToEight::kRows)
    return multiply_qkv<few_rows::UpToEight>(args, product, num_sms, channel, stream);
  return multiply_qkv<few_rows::UpToSixteen>(args, product, num_sms, channel, stream);
}

}  // namespace

template <class T>
bool Operators<T>::project_qkv(const PeerChannel* channel, const ProjectQkvArgs<T>& args,
                               Stream stream) const {
  if constexpr (sizeof(T) == 2) {
    if (!state_->is_hopper || args.linear.in.extent(0) == 0) return false;
    check_linear(args.linear);
    const DeviceScope scope(state_->device);
    return multiply_few_rows_qkv(args, state_->num_sms, channel, stream.handle());
  }
  return false;
}

template <class T>
void Operators<T>::project_qkv(const ProjectQkvArgs<T>& args, Stream stream) const {
  if (project_qkv(nullptr, args, stream)) return;
  linear(args.linear, stream);
  prepare_qkv(args.prepare, stream);
}

#define HELIX_INSTANTIATE(T)                                                                           \
  template bool Operators<T>::project_qkv(const PeerChannel*, const ProjectQkvArgs<T>&, Stream) const; \
  template void Operators<T>::project_qkv(const ProjectQkvArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
