// SPDX-License-Identifier: Apache-2.0
// Parses the JSON description of a machine.
#include "hardware_source.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "files/strict_json.hpp"
#include "files/text_file.hpp"

namespace helix::plan_cli {
namespace {

using nlohmann::json;

// Outside the range of any machine; keeps products and quotients finite.
constexpr double kSmallest = 1e-9;
constexpr double kLargest = 1e18;

/// One object of the file; its keys are read with their expected types.
class Section {
 public:
  Section(const json& object, std::string where, std::initializer_list<std::string_view> keys)
      : object_(object), where_(std::move(where)) {
    HELIX_EXPECTS(object.is_object(), ErrorCode::invalid_file, where_, ": expected an object, it is ",
                  object.type_name());
    for (const auto& [key, value] : object.items()) {
      HELIX_EXPECTS(std::find(keys.begin(), keys.end(), key) != keys.end(), ErrorCode::invalid_file, where_,
                    ": unknown key ", decode::printable(key), "; see docs/planning.md");
    }
  }

  const json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  const json& at(const char* key) const {
    const json* value = find(key);
    HELIX_EXPECTS(value != nullptr, ErrorCode::invalid_file, where_, ": \"", key, "\" is missing");
    return *value;
  }
  double number(const char* key) const { return number(at(key), named(key)); }
  double positive(const char* key) const {
    const double value = number(key);
    HELIX_EXPECTS(value > 0, ErrorCode::invalid_file, named(key), ": is ", value, "; it must be positive");
    return value;
  }
  plan::Time microseconds(const char* key) const {
    const double value = number(key);
    HELIX_EXPECTS(value >= 0, ErrorCode::invalid_file, named(key), ": is ", value,
                  "; it must not be negative");
    return plan::microseconds(value);
  }
  std::string text(const char* key) const {
    const json& value = at(key);
    HELIX_EXPECTS(value.is_string(), ErrorCode::invalid_file, named(key), ": expected a string, it is ",
                  value.type_name());
    return value.get<std::string>();
  }
  int integer(const char* key) const {
    const double value = number(key);
    HELIX_EXPECTS(value == std::floor(value) && std::abs(value) <= 1e9, ErrorCode::invalid_file, named(key),
                  ": expected a whole number, it is ", value);
    return static_cast<int>(value);
  }
  const json& array(const char* key) const {
    const json& value = at(key);
    HELIX_EXPECTS(value.is_array(), ErrorCode::invalid_file, named(key), ": expected an array, it is ",
                  value.type_name());
    return value;
  }
  std::string named(const char* key) const { return where_ + ": " + key; }

  static double number(const json& value, const std::string& where) {
    HELIX_EXPECTS(value.is_number(), ErrorCode::invalid_file, where, ": expected a number, it is ",
                  value.type_name());
    const double result = value.get<double>();
    const double size = std::abs(result);
    HELIX_EXPECTS(size == 0 || (size >= kSmallest && size <= kLargest), ErrorCode::invalid_file, where,
                  ": is ", result, "; give 0 or a number of ", kSmallest, " to ", kLargest);
    return result;
  }
  /// A pair: [a, b].
  static std::array<double, 2> pair(const json& value, const std::string& where) {
    HELIX_EXPECTS(value.is_array() && value.size() == 2, ErrorCode::invalid_file, where,
                  ": expected pairs of two numbers");
    return {number(value[0], where), number(value[1], where)};
  }

 private:
  const json& object_;
  std::string where_;
};

plan::Link parse_link(const json& value, const std::string& where) {
  const Section link(value, where, {"latency_us", "gb_per_s"});
  return {link.microseconds("latency_us"), plan::gigabytes_per_second(link.positive("gb_per_s"))};
}

/// Calls `make` on the values at `where`, and adds the location to its errors.
template <class Make>
auto made_at(const std::string& where, Make&& make) {
  try {
    return make();
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_file, where, ": ", error.what());
  }
}

plan::BandwidthCurve parse_curve(const json& value, const std::string& where) {
  if (value.is_number()) {
    const plan::Bandwidth flat = plan::gigabytes_per_second(Section::number(value, where));
    return made_at(where, [&] { return plan::BandwidthCurve(flat); });
  }
  HELIX_EXPECTS(value.is_array(), ErrorCode::invalid_file, where,
                ": expected GB/s or an array of [bytes, GB/s], it is ", value.type_name());
  std::vector<plan::BandwidthCurve::Point> points;
  for (const json& entry : value) {
    const auto [size, rate] = Section::pair(entry, where);
    points.push_back({plan::bytes(size), plan::gigabytes_per_second(rate)});
  }
  return made_at(where, [&] { return plan::BandwidthCurve(std::move(points)); });
}

plan::Collective parse_collective(const std::string& name, const std::string& where) {
  using plan::Collective;
  for (const Collective collective :
       {Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter, Collective::all_to_all,
        Collective::broadcast, Collective::send}) {
    if (name == to_string(collective)) return collective;
  }
  throw Error(ErrorCode::invalid_file, where, ": ", decode::printable(name),
              " is not all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send");
}

plan::MeasuredCollective parse_measured(const json& value, const std::string& where) {
  const Section section(value, where, {"collective", "ranks", "points"});
  plan::MeasuredCollective measured;
  measured.collective = parse_collective(section.text("collective"), where);
  measured.ranks = section.integer("ranks");
  for (const json& entry : section.array("points")) {
    const auto [size, time] = Section::pair(entry, section.named("points"));
    measured.points.push_back({plan::bytes(size), plan::microseconds(time)});
  }
  return measured;
}

void parse_overheads(const json& value, const std::string& where, plan::Overheads& overheads) {
  const Section section(
      value, where, {"per_operator_us", "per_collective_us", "per_layer_us", "per_slice_us", "per_step_us"});
  const auto set = [&](const char* key, plan::Time& time) {
    if (section.find(key) != nullptr) time = section.microseconds(key);
  };
  set("per_operator_us", overheads.per_operator);
  set("per_collective_us", overheads.per_collective);
  set("per_layer_us", overheads.per_layer);
  set("per_slice_us", overheads.per_slice);
  set("per_step_us", overheads.per_step);
}

}  // namespace

plan::Hardware parse_hardware(std::string_view text, const std::string& file) {
  const json root = decode::parse_strict_json(text, file);
  const Section section(
      root, file,
      {"name", "based_on", "source", "memory_gb", "usable_memory_fraction", "read_gb_per_s",
       "attention_gb_per_s", "peaks", "nvlink_domain", "inside", "outside", "measured", "overheads"});
  plan::Hardware hardware;
  if (section.find("based_on") != nullptr) {
    const std::string preset = section.text("based_on");
    hardware = made_at(section.named("based_on"), [&] { return plan::hardware_preset(preset); });
  } else {
    for (const char* key : {"memory_gb", "read_gb_per_s", "peaks"}) {
      HELIX_EXPECTS(section.find(key) != nullptr, ErrorCode::invalid_file, file, ": \"", key,
                    "\" is missing; give it, or a preset to take it from as \"based_on\"");
    }
  }
  hardware.name = section.find("name") != nullptr ? section.text("name") : file;
  hardware.source = section.find("source") != nullptr ? section.text("source") : file;
  if (section.find("memory_gb") != nullptr) hardware.memory = plan::gigabytes(section.positive("memory_gb"));
  if (section.find("usable_memory_fraction") != nullptr) {
    hardware.usable_memory_fraction = section.positive("usable_memory_fraction");
  }
  if (const json* curve = section.find("read_gb_per_s")) {
    hardware.read = parse_curve(*curve, section.named("read_gb_per_s"));
  }
  if (const json* curve = section.find("attention_gb_per_s")) {
    hardware.attention_read = parse_curve(*curve, section.named("attention_gb_per_s"));
  }
  if (section.find("peaks") != nullptr) {
    hardware.peaks.clear();
    for (const json& entry : section.array("peaks")) {
      const Section peak(entry, section.named("peaks"), {"bits", "tflops"});
      hardware.peaks.push_back({peak.positive("bits"), plan::teraflops_per_second(peak.positive("tflops"))});
    }
  }
  if (section.find("nvlink_domain") != nullptr) hardware.nvlink_domain = section.integer("nvlink_domain");
  if (const json* link = section.find("inside")) hardware.inside = parse_link(*link, section.named("inside"));
  if (const json* link = section.find("outside")) {
    hardware.outside = parse_link(*link, section.named("outside"));
  }
  if (section.find("measured") != nullptr) {
    hardware.measured.clear();
    for (const json& entry : section.array("measured")) {
      hardware.measured.push_back(parse_measured(entry, section.named("measured")));
    }
  }
  if (const json* overheads = section.find("overheads")) {
    parse_overheads(*overheads, section.named("overheads"), hardware.overheads);
  }
  made_at(file, [&] { hardware.check(); });
  return hardware;
}

std::filesystem::path hardware_file(const std::string& name_or_path) {
  const bool is_file = name_or_path.ends_with(".json") || name_or_path.find('/') != std::string::npos;
  return is_file ? std::filesystem::path(name_or_path) : std::filesystem::path();
}

plan::Hardware load_hardware(const std::string& name_or_path) {
  return hardware_file(name_or_path).empty() ? plan::hardware_preset(name_or_path)
                                             : parse_hardware(decode::read_text(name_or_path), name_or_path);
}

}  // namespace helix::plan_cli
