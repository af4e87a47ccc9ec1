// SPDX-License-Identifier: Apache-2.0
// attend(): chooses the kernels for the type of KV (attend-inl.hpp).
#include <cstdint>

#include "cpu/attention/attend_types.hpp"
#include "cpu/attention/scratch.hpp"
#include "cpu/attention/task.hpp"

namespace helix::cpu {

std::int64_t attention_scratch_floats(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim) {
  return round_up(ScratchLayout(rows, head_dim, value_dim).total, 16);
}

void attend(const AttentionTask* tasks, int num_tasks, float* scratch) {
  switch (tasks[0].dtype) {
    case DType::f32:
    case DType::fp8_ds_mla:  // join_rows() widens rows to f32
      return attend_f32(tasks, num_tasks, scratch);
    case DType::f16:
      return attend_f16(tasks, num_tasks, scratch);
    case DType::bf16:
      return attend_bf16(tasks, num_tasks, scratch);
    case DType::fp8_e4m3:
      return attend_e4m3(tasks, num_tasks, scratch);
  }
}

}  // namespace helix::cpu
