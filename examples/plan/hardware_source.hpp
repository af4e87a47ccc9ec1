// SPDX-License-Identifier: Apache-2.0
// The machine of --hardware: a preset or a JSON description.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <helix/plan/hardware.hpp>

namespace helix::plan_cli {

/// The file that load_hardware() reads; empty if the name is a preset's.
std::filesystem::path hardware_file(const std::string& name_or_path);

/// A name that ends in ".json" or contains a '/' is a file; any other name is a preset's.
/// @throws Error naming the file and key, or the known presets.
plan::Hardware load_hardware(const std::string& name_or_path);

/// Parses a description in the format of docs/planning.md. Absent keys keep the values of the preset
/// "based_on", if that is given; unknown keys are refused.
/// @throws Error(invalid_file) naming the key, what was expected and what is there.
plan::Hardware parse_hardware(std::string_view text, const std::string& file);

}  // namespace helix::plan_cli
