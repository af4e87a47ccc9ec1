// SPDX-License-Identifier: Apache-2.0
// Reading model.safetensors.index.json.
#include <climits>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include <helix/error.hpp>

#include "checkpoint/checkpoint.hpp"
#include "files/json_events.hpp"
#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.size() <= NAME_MAX && name != "." && name != ".." &&
         name.find_first_of("/\\") == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

/// Takes the members of weight_map and skips everything else. The index of a large model has 100,000 tensors,
/// and a document tree would hold all of them a second time.
class WeightMapReader : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  std::map<std::string, std::string> take() {
    HELIX_EXPECTS(has_map_, ErrorCode::invalid_file, file(), ": weight_map is missing", kExpectedMap);
    HELIX_EXPECTS(!shards_.empty(), ErrorCode::invalid_file, file(), ": weight_map is empty", kExpectedMap);
    return std::move(shards_);
  }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("boolean"); }
  bool number_integer(std::int64_t) override { return value("number"); }
  bool number_unsigned(std::uint64_t) override { return value("number"); }
  bool number_float(double, const std::string&) override { return value("number"); }
  bool start_object(std::size_t) override { return open("object"); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open("array"); }
  bool end_array() override { return close(); }

  bool key(std::string& key) override {
    if (is_in_map()) {
      tensor_ = std::move(key);
    } else if (depth_ == 1) {
      is_map_next_ = key == "weight_map";
      HELIX_EXPECTS(!is_map_next_ || !std::exchange(has_map_, true), ErrorCode::invalid_file, file(),
                    ": weight_map appears twice");
    }
    return true;
  }

  bool string(std::string& name) override {
    if (!is_in_map()) return value("string");
    HELIX_EXPECTS(is_plain_file_name(name), ErrorCode::invalid_file, file(),
                  ": weight_map: ", printable(tensor_), " is in ", printable(name),
                  "; expected the name of a file in the same directory");
    const auto [at, is_new] = shards_.emplace(std::move(tensor_), std::move(name));
    HELIX_EXPECTS(is_new, ErrorCode::invalid_file, file(), ": weight_map: ", printable(at->first),
                  " appears twice");
    return true;
  }

 private:
  bool is_in_map() const { return is_map_open_ && depth_ == 2; }

  static constexpr std::string_view kExpectedMap = "; expected an object of tensor names and files";

  /// Skips a value that is not a shard name in weight_map.
  bool value(std::string_view type) const {
    HELIX_EXPECTS(!is_in_map(), ErrorCode::invalid_file, file(), ": weight_map: ", printable(tensor_),
                  " is a ", type, "; expected a file name");
    HELIX_EXPECTS(!is_map_next_, ErrorCode::invalid_file, file(), ": weight_map is ", type, kExpectedMap);
    return true;
  }

  bool open(std::string_view type) {
    HELIX_EXPECTS(depth_ < kMaxNesting, ErrorCode::invalid_file, file(), ": JSON nested deeper than ",
                  kMaxNesting, " levels");
    if (is_map_next_ && type == "object") {
      is_map_open_ = true;
      is_map_next_ = false;
    } else {
      value(type);
    }
    ++depth_;
    return true;
  }

  bool close() {
    if (is_in_map()) is_map_open_ = false;
    --depth_;
    return true;
  }

  std::map<std::string, std::string> shards_;
  std::string tensor_;
  std::size_t depth_ = 0;
  bool has_map_ = false;
  bool is_map_next_ = false;
  bool is_map_open_ = false;
};

}  // namespace

std::map<std::string, std::string> parse_weight_map(std::string_view json, std::string_view file) {
  WeightMapReader reader(file);
  reader.parse(json);
  return reader.take();
}

}  // namespace helix::decode
