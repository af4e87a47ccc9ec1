// SPDX-License-Identifier: Apache-2.0
// The experts of a few tokens at the memory limit (compute capability 9.0).
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <helix/backend/layer.hpp>

#include "cuda/moe/expert_distances.hpp"

namespace helix::cuda {

struct Choices;

/// Elements that multiply_few_rows_experts() may need in `hidden` for up to `tokens` tokens.
std::int64_t few_rows_hidden_elements(std::int64_t tokens, std::int64_t top_k, std::int64_t ffn);

/// Queues the call; false, with nothing queued, unless it has up to 16 tokens (up to 2, 8 and 16 with up to
/// 32, 64 and 128 choices in all), a multiple of 64 columns in both products and all rows aligned to 16
/// bytes. Weights are of T, `distances` apart. `hidden`: scratch of few_rows_hidden_elements(), aligned to 16
/// bytes.
template <class T>
bool multiply_few_rows_experts(const ExpertFfnArgs<T>& args, const ExpertDistances& distances,
                               const Choices& choices, T* hidden, int num_sms, cudaStream_t stream);

}  // namespace helix::cuda
