// SPDX-License-Identifier: Apache-2.0
// Operators::linear and head_linear: weight rows shared out over the threads of the rank.
#include <algorithm>
#include <cstdint>

#include <helix/cpu/backend.hpp>
#include <helix/dtype.hpp>

#include "cpu/linear_kernels.hpp"

namespace helix::cpu {
namespace {

const std::byte* element(const WeightView& weight, std::int64_t index) {
  return static_cast<const std::byte*>(weight.data) +
         index * static_cast<std::int64_t>(size_bytes(weight.dtype));
}

}  // namespace

void Operators::linear(const LinearArgs<float>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  stream.enqueue([args, pool = pool_] {
    const std::int64_t task_rows =
        linear_task_rows(args.weight.dtype, args.in.extent(0), args.weight.rows, pool->num_threads());
    const std::int64_t tasks = (args.weight.rows + task_rows - 1) / task_rows;
    pool->parallel_for(tasks, [&args, task_rows](std::int64_t index, int) {
      const std::int64_t first = index * task_rows;
      LinearTask task;
      task.in = args.in.data();
      task.in_stride = args.in.stride(0);
      task.num_rows = args.in.extent(0);
      task.weight = element(args.weight, first * args.weight.cols);
      task.dtype = args.weight.dtype;
      task.cols = args.weight.cols;
      task.num_weight_rows = std::min(task_rows, args.weight.rows - first);
      if (!args.bias.empty()) {
        task.bias = element(args.bias, first);
        task.bias_dtype = args.bias.dtype;
      }
      task.out = args.out.data() + first;
      task.out_stride = args.out.stride(0);
      task.accumulate = args.accumulate;
      multiply(task);
    });
  });
}

void Operators::router_logits(const RouterLogitsArgs<float>& args, Stream stream) const {
  linear({.in = args.in, .weight = args.weight, .bias = {}, .out = args.out}, stream);
}

void Operators::head_linear(const HeadLinearArgs<float>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  stream.enqueue([args, pool = pool_] {
    const std::int64_t heads = args.in.extent(1);
    const std::int64_t width = args.out.extent(2);
    const std::int64_t task_rows =
        linear_task_rows(args.weight.dtype, args.in.extent(0), args.weight.rows, pool->num_threads());
    const std::int64_t tasks_a_head = (width + task_rows - 1) / task_rows;
    const auto body = [&](std::int64_t index, int) {
      const std::int64_t head = index / tasks_a_head;
      const std::int64_t first = index % tasks_a_head * task_rows;
      LinearTask task;
      task.in = args.in.data() + head * args.in.stride(1);
      task.in_stride = args.in.stride(0);
      task.num_rows = args.in.extent(0);
      task.weight = element(args.weight, (head * width + first) * args.weight.cols);
      task.dtype = args.weight.dtype;
      task.cols = args.weight.cols;
      task.num_weight_rows = std::min(task_rows, width - first);
      task.out = args.out.data() + head * args.out.stride(1) + first;
      task.out_stride = args.out.stride(0);
      multiply(task);
    };
    pool->parallel_for(heads * tasks_a_head, body);
  });
}

}  // namespace helix::cpu
