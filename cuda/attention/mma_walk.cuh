// SPDX-License-Identifier: Apache-2.0
// The main loop of a block of the kernels of mma.cuh and mma_latent.cuh.
#pragma once

#include "cuda/attention/combine.cuh"
#include "cuda/attention/schedule.cuh"

namespace helix::cuda {

/// Makes the plan and walks the block's work item. attend(schedule, at, query tile, count) attends to `count`
/// KV tiles of one query tile and KV head from `at` on, writes the result, and returns the splits to which it
/// belongs. They are combined once all are there. All threads of the block.
template <class Plan, class Attend>
__device__ __forceinline__ void walk_work_item(const AttentionParams& p, Plan& plan, const Attend& attend) {
  make_plan(p, plan);
  const Schedule<Plan> schedule(p, plan);
  const WorkItem item = schedule.work_item(static_cast<int>(blockIdx.x));
  KvTileCursor at = item.start;
  for (int done = 0, count = 0; done < item.count; done += count) {
    count = ::min(item.count - done, at.num_kv_tiles - at.kv_tile);
    const QueryTile query_tile = plan.query_tiles[at.query_tile];
    const SplitPartials partials = attend(schedule, at, query_tile, count);
    combine_splits(partials, query_tile, at.query_tile, at.head);
    at.advance(p, plan, count);
    __syncthreads();
  }
}

}  // namespace helix::cuda
