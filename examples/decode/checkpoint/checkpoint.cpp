// SPDX-License-Identifier: Apache-2.0
// Opening checkpoint directories.
#include "checkpoint/checkpoint.hpp"

#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "checkpoint/strict_json.hpp"
#include "checkpoint/text_file.hpp"

namespace helix::decode {
namespace {

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of("/\\") == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

}  // namespace

std::map<std::string, std::string> parse_weight_map(std::string_view json, std::string_view file) {
  const nlohmann::json document = parse_strict_json(json, file);
  const auto map = document.is_object() ? document.find("weight_map") : document.end();
  HELIX_EXPECTS(document.is_object() && map != document.end() && map->is_object() && !map->empty(),
                ErrorCode::invalid_file, file,
                ": weight_map is missing; expected an object of tensor names and files");
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    HELIX_EXPECTS(shard.is_string(), ErrorCode::invalid_file, file, ": weight_map: ", printable(tensor),
                  " is a ", shard.type_name(), "; expected a file name");
    const auto& name = shard.get_ref<const std::string&>();
    HELIX_EXPECTS(is_plain_file_name(name), ErrorCode::invalid_file, file,
                  ": weight_map: ", printable(tensor), " is in ", printable(name),
                  "; expected the name of a file in the same directory");
    shards.emplace(tensor, name);
  }
  return shards;
}

Checkpoint::Checkpoint(std::filesystem::path directory) : directory_(std::move(directory)) {
  HELIX_EXPECTS(std::filesystem::is_directory(directory_), ErrorCode::io, directory_.string(),
                ": not a directory; expected one with config.json and model.safetensors");
  config_json_ = read_text(directory_ / "config.json");

  const std::filesystem::path single = directory_ / "model.safetensors";
  const std::filesystem::path index = directory_ / "model.safetensors.index.json";
  if (std::filesystem::exists(single) || !std::filesystem::exists(index)) {
    files_.emplace_back(single.string());
    for (const TensorInfo& tensor : files_.front().tensors()) {
      entries_.emplace(tensor.name, Entry{&files_.front(), &tensor});
    }
    return;
  }

  const std::map<std::string, std::string> shards = parse_weight_map(read_text(index), index.string());
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shards) names.insert(shard);
  files_.reserve(names.size());  // entries_ points into it
  std::map<std::string, const SafetensorsFile*> by_name;
  for (const std::string& name : names) {
    const std::filesystem::path path = directory_ / name;
    HELIX_EXPECTS(std::filesystem::exists(path), ErrorCode::io, path.string(), ": missing, but ",
                  index.string(), " names it; fetch the whole checkpoint");
    by_name.emplace(name, &files_.emplace_back(path.string()));
  }
  for (const auto& [tensor, shard] : shards) {
    const SafetensorsFile* file = by_name.at(shard);
    const TensorInfo* info = file->find(tensor);
    HELIX_EXPECTS(info != nullptr, ErrorCode::invalid_file, file->path(), ": tensor ", printable(tensor),
                  " is missing, but ", index.string(), " says it is there");
    entries_.emplace(info->name, Entry{file, info});
  }
}

Checkpoint::Entry Checkpoint::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? Entry{} : found->second;
}

}  // namespace helix::decode
