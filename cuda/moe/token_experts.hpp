// SPDX-License-Identifier: Apache-2.0
// The experts of one token at the memory limit (compute capability 9.0).
#pragma once

#include <cuda_runtime_api.h>

#include <helix/backend/layer.hpp>

namespace helix::cuda {

struct Choices;

/// The call; false, and nothing queued, unless it has one token of up to 32 choices, weights of T that lie at
/// equal distances in the order of the experts, a multiple of 64 columns in both products, all aligned to 16
/// bytes. `hidden`: [top_k, F], scratch, aligned to 16 bytes.
template <class T>
bool multiply_token_experts(const ExpertFfnArgs<T>& args, const Choices& choices, T* hidden, int num_sms,
                            cudaStream_t stream);

}  // namespace helix::cuda
