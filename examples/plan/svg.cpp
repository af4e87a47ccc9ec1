// SPDX-License-Identifier: Apache-2.0
// Builds SVG documents.
#include "svg.hpp"

#include <fmt/format.h>

namespace helix::plan_cli {
namespace {

/// Escapes the characters that XML reserves. Anything but printable ASCII becomes '?', which is well-formed
/// whatever the bytes were.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else {
      result += c >= ' ' && c <= '~' ? c : '?';
    }
  }
  return result;
}

}  // namespace

Svg::Svg(double width, double height)
    : body_(fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
                        "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\">\n",
                        width, height)) {
  rectangle(0, 0, width, height, "white");
}

void Svg::rectangle(double x, double y, double width, double height, std::string_view fill) {
  body_ += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"/>\n",
                       x, y, width, height, fill);
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view stroke) {
  body_ += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", x1,
                       y1, x2, y2, stroke);
}

void Svg::polyline(const std::vector<std::pair<double, double>>& points, std::string_view stroke) {
  body_ += "<polyline fill=\"none\" points=\"";
  for (const auto& [x, y] : points) body_ += fmt::format("{:.1f},{:.1f} ", x, y);
  body_ += fmt::format("\" stroke=\"{}\" stroke-width=\"2\"/>\n", stroke);
}

void Svg::circle(double x, double y, double radius, std::string_view fill) {
  body_ +=
      fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\"/>\n", x, y, radius, fill);
}

void Svg::text(double x, double y, std::string_view text, Anchor anchor, double size) {
  constexpr std::string_view kAnchors[] = {"start", "middle", "end"};
  body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{:.0f}\" text-anchor=\"{}\">{}</text>\n",
                       x, y, size, kAnchors[static_cast<int>(anchor)], escaped(text));
}

std::string Svg::document() const {
  return body_ + "</svg>\n";
}

}  // namespace helix::plan_cli
