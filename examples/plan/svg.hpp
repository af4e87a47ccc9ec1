// SPDX-License-Identifier: Apache-2.0
// The few SVG shapes that the pictures need.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace helix::plan_cli {

enum class Anchor { start, middle, end };

/// A picture. Coordinates are pixels from the upper left corner.
class Svg {
 public:
  Svg(double width, double height);

  void rectangle(double x, double y, double width, double height, std::string_view fill);
  void line(double x1, double y1, double x2, double y2, std::string_view stroke);
  void polyline(const std::vector<std::pair<double, double>>& points, std::string_view stroke);
  void circle(double x, double y, double radius, std::string_view fill);
  void text(double x, double y, std::string_view text, Anchor anchor = Anchor::start, double size = 12);

  /// The whole document, after everything is drawn.
  std::string document() const;

 private:
  std::string body_;
};

}  // namespace helix::plan_cli
