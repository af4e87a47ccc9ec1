// SPDX-License-Identifier: Apache-2.0
// Checkpoint: a Hugging Face directory with config.json, one safetensors file or several with an index, and
// optionally generation_config.json.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/safetensors.hpp"

namespace helix::decode {

/// Parses model.safetensors.index.json into a map from tensor name to shard file name. A shard name must be a
/// plain file name: one that leads out of the directory is refused.
/// @throws Error(invalid_file) naming `file` and the entry.
std::map<std::string, std::string> parse_weight_map(std::string_view json, std::string_view file);

/// An opened checkpoint directory. Const functions may be called from many threads at once.
class Checkpoint {
 public:
  /// One tensor and the file that holds it; both belong to the Checkpoint.
  struct Entry {
    const SafetensorsFile* file = nullptr;
    const TensorInfo* tensor = nullptr;
  };

  /// Reads config.json and opens model.safetensors, or every shard of model.safetensors.index.json if that
  /// file does not exist. Reads no tensor data.
  /// @throws Error(io) if a file is missing or cannot be opened, Error(invalid_file) if a file is malformed
  /// or lacks a tensor of the index.
  explicit Checkpoint(std::filesystem::path directory);

  const std::filesystem::path& directory() const { return directory_; }
  std::string config_path() const { return (directory_ / "config.json").string(); }
  const std::string& config_json() const { return config_json_; }
  /// The path of generation_config.json, or of config.json if that file does not exist, because transformers
  /// then reads the same keys from there.
  std::string generation_config_path() const {
    return generation_config_json_ ? (directory_ / kGenerationConfig).string() : config_path();
  }
  const std::string& generation_config_json() const {
    return generation_config_json_ ? *generation_config_json_ : config_json_;
  }

  /// The weight files, by name.
  const std::vector<SafetensorsFile>& files() const { return files_; }

  /// Number of tensors that find() knows.
  std::size_t num_tensors() const;

  /// The tensor named `name`; both members are null if there is none.
  Entry find(std::string_view name) const;
  /// The file that holds a tensor which find() does not know because the index omits it; null if none does.
  const SafetensorsFile* file_of_unlisted(std::string_view name) const;

 private:
  static constexpr std::string_view kGenerationConfig = "generation_config.json";

  /// Whether the checkpoint is one file without an index, whose own table is then searched.
  bool is_single() const { return entries_.empty(); }

  std::filesystem::path directory_;
  std::string config_json_;
  std::optional<std::string> generation_config_json_;
  std::vector<SafetensorsFile> files_;
  // Empty without an index; keys are the names stored in files_.
  std::unordered_map<std::string_view, Entry> entries_;
};

}  // namespace helix::decode
