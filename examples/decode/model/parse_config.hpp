// SPDX-License-Identifier: Apache-2.0
// parse_model_config: config.json, read and checked; read_model_config: with what the tensors decide.
#pragma once

#include <cstddef>
#include <string_view>

#include "checkpoint/checkpoint.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

/// Most ids of eos_token_id, in config.json and in generation_config.json.
inline constexpr std::size_t kMaxEosIds = 1024;

/// Parses and checks config.json. `absent_dtype`: the model's type where neither dtype nor torch_dtype is
/// given.
/// @throws Error(invalid_file) naming `file`, the key, its value and what was expected; Error(unsupported)
/// for a model, activation, rope or quantization that is not built.
ModelConfig parse_model_config(std::string_view json, std::string_view file,
                               DType absent_dtype = DType::bf16);

/// The model of a checkpoint: its config.json, and two things that the tensors decide, as in transformers. An
/// LM head that is stored beside the embedding is used, whatever tie_word_embeddings says; where the config
/// gives no dtype it is the embedding's. Reads no tensor data.
/// @throws as parse_model_config().
ModelConfig read_model_config(const Checkpoint& checkpoint);

}  // namespace helix::decode
