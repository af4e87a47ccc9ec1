// SPDX-License-Identifier: Apache-2.0
// Loads models by preset name or from config.json.
#include "model_source.hpp"

#include <filesystem>

#include <helix/error.hpp>

#include "files/text_file.hpp"
#include "model/parse_config.hpp"
#include "model/planner_model.hpp"

namespace helix::plan_cli {

std::filesystem::path model_file(const std::string& name_or_path) {
  const std::filesystem::path path = name_or_path;
  std::error_code failure;
  if (std::filesystem::is_directory(path, failure)) return path / "config.json";
  return std::filesystem::exists(path, failure) ? path : std::filesystem::path();
}

plan::Model load_model(const std::string& name_or_path) {
  if (const std::filesystem::path file = model_file(name_or_path); !file.empty()) {
    std::error_code failure;
    HELIX_EXPECTS(std::filesystem::exists(file, failure), ErrorCode::io, file.string(),
                  ": there is no such file");
    plan::Model model =
        decode::planner_model(decode::parse_model_config(decode::read_text(file), file.string()));
    model.name = name_or_path;
    return model;
  }
  HELIX_EXPECTS(name_or_path.find('/') == std::string::npos, ErrorCode::io, name_or_path,
                ": there is no such file or folder");
  return plan::model_preset(name_or_path);
}

}  // namespace helix::plan_cli
