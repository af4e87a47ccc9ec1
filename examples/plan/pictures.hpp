// SPDX-License-Identifier: Apache-2.0
// Draws pictures of a plan as SVG files.
#pragma once

#include <array>
#include <filesystem>
#include <string>
#include <string_view>

#include "report.hpp"

namespace helix::plan_cli {

/// Names of the files that write_pictures() writes.
inline constexpr std::array<std::string_view, 3> kPictures{"roofline.svg", "frontier.svg", "timeline.svg"};

/// Creates `folder` and writes three files to it. roofline.svg shows each operator's part of a step and what
/// bounds it; frontier.svg shows tokens/s/user against tokens/s/GPU for each strategy; timeline.svg shows a
/// layer of the best Helix layout with KVP > 1, if there is one, with and without HOP-B. Returns a line for
/// each file, for the user.
/// @throws Error(io).
std::string write_pictures(const std::filesystem::path& folder, const Plan& plan);

}  // namespace helix::plan_cli
