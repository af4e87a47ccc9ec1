// SPDX-License-Identifier: Apache-2.0
// The machine of --hardware: a preset or a JSON description.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <helix/plan/hardware.hpp>

namespace helix::plan_cli {

/// The file that load_hardware() reads; empty for a preset.
std::filesystem::path hardware_file(const std::string& name_or_path);

/// A name that ends in ".json" or holds a '/' is read as a file, else it is a preset's.
/// @throws Error naming the file and key, or the known presets.
plan::Hardware load_hardware(const std::string& name_or_path);

/// The description of docs/planning.md. Keys that are absent keep the values of the preset "based_on", if it
/// is given; unknown ones are refused.
/// @throws Error(invalid_file) naming the key, what was expected and what is there.
plan::Hardware parse_hardware(std::string_view text, const std::string& file);

}  // namespace helix::plan_cli
