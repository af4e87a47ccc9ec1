// SPDX-License-Identifier: Apache-2.0
// The model of --model: a preset, a config.json, or a folder with one.
#pragma once

#include <filesystem>
#include <string>

#include <helix/plan/model.hpp>

namespace helix::plan_cli {

/// The file that load_model() reads; empty if the name is a preset's.
std::filesystem::path model_file(const std::string& name_or_path);

/// An existing path is read; any other name is a preset's.
/// @throws Error naming the file and key, or the known presets.
plan::Model load_model(const std::string& name_or_path);

}  // namespace helix::plan_cli
