// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::reduce_norm over windows: divides a call, and launches it.
#include <algorithm>
#include <cstdint>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "cuda/comm/peer_reduce_norm.cuh"
#include "cuda/comm/peer_reduce_norm_shares.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/weight_type.hpp"

namespace helix::cuda {
namespace {

/// Packets of a row per block of a cluster, if rows are few.
constexpr int kPartPackets = 256;
/// Packets of a row that one block takes alone. Between products, a cluster of two costs more than its faster
/// sends gain: eight layers of the 8B shape (rows of 512 packets) take 0.760 ms with clusters and 0.749
/// without at KVP 2, 0.675 and 0.667 at TPA 2. Alone in a graph larger clusters are faster (rows of 1024
/// packets in clusters of four: 4.4 us).
constexpr int kWholePackets = kPeerNormThreads;
constexpr int kMaxParts = 8;  // blocks of a cluster, on any device of compute capability 9.0
constexpr std::int64_t kMaxSealedBytes = 256 << 10;  // of a rank's rows
/// If a rank would send more bytes, all_reduce and rms_norm take over, over NCCL if there is one.
constexpr std::int64_t kMaxSentBytes = 4 << 20;
/// Cost of a second trip to the peers, in bytes that a rank could have sent: 3 us at 300 GB/s.
constexpr std::int64_t kTripBytes = 900 << 10;

/// Bytes that a rank sends for `bytes` of rows: in one shot, and in two (its parts of the others' shares,
/// then the sums of its own share to all).
constexpr std::int64_t one_shot_bytes(std::int64_t bytes, int ranks) {
  return bytes * (ranks - 1);
}
constexpr std::int64_t two_shot_bytes(std::int64_t bytes, int ranks) {
  return 2 * bytes * (ranks - 1) / ranks;
}

/// Divides `rows` rows of `packets` packets. False: no plan fits the slots, or NCCL is faster.
bool make_plan(const PeerChannel& channel, std::int64_t rows, std::int64_t packets, bool has_clusters,
               PeerNormPlan& plan) {
  const std::int64_t bytes = rows * packets * 16;
  const int ranks = channel.waits.size;
  plan.has_shares = two_shot_bytes(bytes, ranks) + kTripBytes < one_shot_bytes(bytes, ranks);
  if ((plan.has_shares ? two_shot_bytes(bytes, ranks) : one_shot_bytes(bytes, ranks)) > kMaxSentBytes)
    return false;
  const auto row_packets = [&](int parts) { return (packets + parts - 1) / parts; };
  const auto is_whole = [&](int parts) { return (parts - 1) * row_packets(parts) < packets; };
  int parts = 1;
  while (has_clusters && packets > kWholePackets && parts < kMaxParts && row_packets(parts) > kPartPackets &&
         rows * parts * 2 <= channel.channels && is_whole(2 * parts))
    parts *= 2;
  plan.parts = parts;
  plan.row_packets = static_cast<int>(row_packets(parts));
  plan.groups = static_cast<int>(std::min<std::int64_t>(rows, channel.channels / parts));
  plan.is_sealed = bytes <= kMaxSealedBytes && plan.row_packets <= kPeerNormThreads && !plan.has_shares;
  plan.rows_a_round = static_cast<int>(
      std::min<std::int64_t>(channel.piece / (std::int64_t{plan.row_packets} * 16),
                             plan.has_shares ? ceil_div(rows, std::int64_t{plan.groups} * ranks) : rows));
  plan.threads = static_cast<int>(std::clamp<std::int64_t>(
      round_up(plan.row_packets, kWarp), round_up(channel.waits.size, kWarp), kPeerNormThreads));
  return plan.rows_a_round > 0 && plan.row_packets <= kPeerNormPackets * plan.threads;
}

/// Hash of what two ranks must agree on for their messages to match.
std::uint32_t tag_of(std::int64_t rows, std::int64_t width, DType dtype, const PeerNormPlan& plan) {
  return call_tag(0x6e6f726d, {rows, width, static_cast<std::int64_t>(dtype), plan.groups, plan.parts,
                               plan.rows_a_round, plan.has_shares});
}

template <class Block, class T, class W>
void launch(const PeerChannel& channel, const PeerNormRows<T, W>& rows, const PeerNormPlan& plan,
            bool is_hopper, StreamHandle stream) {
  launch_with(is_hopper ? LaunchAttributes().early().clusters(plan.parts) : LaunchAttributes(),
              peer_norm_kernel<Block, T, W>, static_cast<unsigned>(plan.groups * plan.parts), plan.threads, 0,
              stream, channel, rows, plan);
}

}  // namespace

template <class T>
bool Operators<T>::reduce_norm(const PeerChannel& channel, const ReduceNormArgs<T>& args,
                               Stream stream) const {
  const std::int64_t rows = args.residual.extent(0);
  const std::int64_t width = args.residual.extent(1);
  const bool has_norm = !args.weight.empty();
  if (rows == 0 || width == 0) return true;
  // By values that all ranks share: their messages must match.
  PeerNormPlan plan;
  if (width % kVector<T> != 0 || args.weight.dtype == DType::fp8_e4m3 ||
      (has_norm && !args.out.is_contiguous()) ||
      !make_plan(channel, rows, width / kVector<T>, state_->is_hopper, plan))
    return false;
  HELIX_EXPECTS(
      common_alignment({address_of(args.summand.data()), address_of(args.residual.data()),
                        address_of(has_norm ? args.out.data() : nullptr), address_of(args.weight.data)}) ==
          16,
      ErrorCode::invalid_argument, "reduce_norm: summand at ", static_cast<const void*>(args.summand.data()),
      ", residual at ", static_cast<const void*>(args.residual.data()), ", weight at ", args.weight.data,
      " and out at ", static_cast<const void*>(args.out.data()),
      " must be aligned to 16 bytes where ranks reach each other's memory");
  plan.tag = tag_of(rows, width, kDTypeOf<T>, plan);
  const DeviceScope scope(state_->device);
  dispatch_weight(has_norm ? args.weight.dtype : DType::f32, [&]<class W>(W*) {
    const PeerNormRows<T, W> all{args.summand.data(),
                                 args.residual.data(),
                                 static_cast<const W*>(args.weight.data),
                                 has_norm ? args.out.data() : nullptr,
                                 rows,
                                 width,
                                 args.epsilon};
    const auto queue = [&]<class Block>(Block*) {
      launch<Block>(channel, all, plan, state_->is_hopper, stream.handle());
    };
    const bool is_once = plan.row_packets <= plan.threads;
    constexpr int kMany = kPeerNormPackets;
    if (plan.has_shares) {
      is_once ? queue(static_cast<PeerNormShares<T, W, 1>*>(nullptr))
              : queue(static_cast<PeerNormShares<T, W, kMany>*>(nullptr));
    } else if (plan.is_sealed) {
      queue(static_cast<PeerNormBlock<T, W, true, 1>*>(nullptr));
    } else {
      is_once ? queue(static_cast<PeerNormBlock<T, W, false, 1>*>(nullptr))
              : queue(static_cast<PeerNormBlock<T, W, false, kMany>*>(nullptr));
    }
  });
  return true;
}

#define HELIX_INSTANTIATE(T) \
  template bool Operators<T>::reduce_norm(const PeerChannel&, const ReduceNormArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
