// SPDX-License-Identifier: Apache-2.0
// Opening checkpoint directories.
#include "checkpoint/checkpoint.hpp"

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include <helix/error.hpp>

#include "files/strict_json.hpp"
#include "files/text_file.hpp"

namespace helix::decode {

namespace {

namespace fs = std::filesystem;

/// Whether `path` exists. A path that cannot be examined counts as existing, so that opening it reports the
/// reason.
bool is_there(const fs::path& path) {
  std::error_code failure;
  return fs::status(path, failure).type() != fs::file_type::not_found;
}

/// Like is_there(), but also true for a link whose target does not exist.
bool is_named(const fs::path& path) {
  std::error_code failure;
  return fs::symlink_status(path, failure).type() != fs::file_type::not_found;
}

/// Whether the folder has files named like the parts of a checkpoint of several files.
bool has_shards(const fs::path& directory) {
  std::error_code failure;
  for (fs::directory_iterator entry(directory, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("model-") && name.ends_with(".safetensors")) return true;
  }
  return false;
}

constexpr std::uint64_t kMaxIndexBytes = 100'000'000;  // enough for a million tensors

/// Totals over the weight files. Their limits bound what a plan costs and keep sums of weights far inside
/// int64.
class Totals {
 public:
  explicit Totals(std::string directory) : directory_(std::move(directory)) {}

  void add(const SafetensorsFile& file) {
    constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 50;
    constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{1} << 27;
    tensors_ += file.tensors().size();
    header_bytes_ += file.header_bytes();
    bytes_ += file.size();  // cannot overflow: the sum so far is at most 2^50, and a file is below 2^63
    HELIX_EXPECTS(tensors_ <= kMaxTensors && header_bytes_ <= kMaxHeaderBytes && bytes_ <= kMaxBytes,
                  ErrorCode::invalid_file, directory_, ": up to ", file.path(), " the weight files have ",
                  tensors_, " tensors, ", header_bytes_, " bytes of headers and ", bytes_,
                  " bytes in all; at most ", kMaxTensors, ", ", kMaxHeaderBytes, " and ", kMaxBytes,
                  " are read");
  }

 private:
  std::string directory_;
  std::uint64_t tensors_ = 0;
  std::uint64_t header_bytes_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace

Checkpoint::Checkpoint(std::filesystem::path directory) : directory_(std::move(directory)) {
  std::error_code failure;
  HELIX_EXPECTS(fs::is_directory(directory_, failure), ErrorCode::io, directory_.string(),
                ": not a directory; expected one with config.json and model.safetensors");
  Totals totals(directory_.string());
  const fs::path config = directory_ / "config.json";
  HELIX_EXPECTS(is_named(config), ErrorCode::io, config.string(), ": cannot open: No such file or directory",
                "; give the folder that holds config.json (in a Hugging Face cache: snapshots/<revision>)");
  config_json_ = read_text(config);
  if (const fs::path generation = directory_ / kGenerationConfig; is_named(generation)) {
    generation_config_json_ = read_text(generation);
    HELIX_EXPECTS(!generation_config_json_->empty(), ErrorCode::invalid_file, generation.string(),
                  ": is empty; expected an object");
  }

  const fs::path single = directory_ / "model.safetensors";
  const fs::path index = directory_ / "model.safetensors.index.json";
  if (is_there(single) || !is_there(index)) {
    for (const char* pickled : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
      HELIX_EXPECTS(is_there(single) || !is_there(directory_ / pickled), ErrorCode::invalid_file,
                    directory_.string(), ": has ", pickled,
                    " but no model.safetensors, and only safetensors are read; save it with transformers' "
                    "save_pretrained(safe_serialization=True)");
    }
    HELIX_EXPECTS(is_there(single) || !has_shards(directory_), ErrorCode::io, index.string(),
                  ": missing, but the folder has model-*.safetensors files, which it lists; fetch the whole "
                  "checkpoint");
    totals.add(files_.emplace_back(single.string()));
    return;
  }

  const std::map<std::string, std::string> shards =
      parse_weight_map(read_text(index, kMaxIndexBytes), index.string());
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shards) names.insert(shard);
  files_.reserve(names.size());  // entries_ points into files_, so it must not reallocate
  std::map<std::string, const SafetensorsFile*> by_name;
  for (const std::string& name : names) {
    const fs::path path = directory_ / name;
    HELIX_EXPECTS(is_there(path), ErrorCode::io, path.string(), ": missing, but ", index.string(),
                  " names it; fetch the whole checkpoint");
    const SafetensorsFile& file = files_.emplace_back(path.string());
    totals.add(file);
    by_name.emplace(name, &file);
  }
  entries_.reserve(shards.size());
  for (const auto& [tensor, shard] : shards) {
    const SafetensorsFile* file = by_name.at(shard);
    const TensorInfo* info = file->find(tensor);
    HELIX_EXPECTS(info != nullptr, ErrorCode::invalid_file, file->path(), ": tensor ", printable(tensor),
                  " is missing, but ", index.string(), " says it is there");
    entries_.emplace(info->name, Entry{file, info});
  }
}

std::size_t Checkpoint::num_tensors() const {
  return is_single() ? files_.front().tensors().size() : entries_.size();
}

Checkpoint::Entry Checkpoint::find(std::string_view name) const {
  if (is_single()) {
    const TensorInfo* tensor = files_.front().find(name);
    return tensor == nullptr ? Entry{} : Entry{&files_.front(), tensor};
  }
  const auto found = entries_.find(name);
  return found == entries_.end() ? Entry{} : found->second;
}

const SafetensorsFile* Checkpoint::file_of_unlisted(std::string_view name) const {
  const auto file =
      std::ranges::find_if(files_, [&](const auto& each) { return each.find(name) != nullptr; });
  return file == files_.end() ? nullptr : &*file;
}

}  // namespace helix::decode
