// SPDX-License-Identifier: Apache-2.0
// attend() for one type of KV each, compiled for each instruction set and chosen at run time.
#pragma once

namespace helix::cpu {

struct AttentionTask;

void attend_f32(const AttentionTask* tasks, int num_tasks, float* scratch);
void attend_f16(const AttentionTask* tasks, int num_tasks, float* scratch);
void attend_bf16(const AttentionTask* tasks, int num_tasks, float* scratch);
void attend_e4m3(const AttentionTask* tasks, int num_tasks, float* scratch);

}  // namespace helix::cpu
