// SPDX-License-Identifier: Apache-2.0
// parse_model_config() reads and checks config.json; read_model_config() adds what the tensors decide.
#pragma once

#include <cstddef>
#include <string_view>

#include "checkpoint/checkpoint.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

/// Maximum number of ids in eos_token_id, in config.json and in generation_config.json.
inline constexpr std::size_t kMaxEosIds = 1024;

/// Parses and checks config.json. `absent_dtype` is the model's type if the file has neither dtype nor
/// torch_dtype.
/// @throws Error(invalid_file) naming `file`, the key, its value and what was expected; Error(unsupported)
/// for a model, activation, rope or quantization that is not built.
ModelConfig parse_model_config(std::string_view json, std::string_view file,
                               DType absent_dtype = DType::bf16);

/// The model of a checkpoint: its config.json and, as in transformers, two things that the tensors decide. An
/// LM head that is stored in addition to the embedding is used, whatever tie_word_embeddings says. If the
/// config has no dtype, the embedding's type is used. Reads no tensor data.
/// @throws as parse_model_config() does.
ModelConfig read_model_config(const Checkpoint& checkpoint);

}  // namespace helix::decode
