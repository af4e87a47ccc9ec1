// SPDX-License-Identifier: Apache-2.0
// Draws a plan.
#include "pictures.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <helix/error.hpp>

#include "files/output_file.hpp"
#include "files/strict_json.hpp"
#include "svg.hpp"

namespace helix::plan_cli {
namespace {

using plan::Candidate;
using plan::OperatorTime;

constexpr std::string_view kGrid = "#dddddd";
constexpr std::string_view kAxis = "black";

std::string_view color(plan::Bound bound) {
  constexpr std::array<std::string_view, 4> kColors{"#4c72b0", "#c44e52", "#dd8452", "#999999"};
  return kColors[static_cast<std::size_t>(bound)];
}

std::string_view color(plan::Strategy strategy) {
  constexpr std::array<std::string_view, 4> kColors{"#55a868", "#4c72b0", "#dd8452", "#8172b3"};
  return kColors[static_cast<std::size_t>(strategy)];
}

void legend(Svg& svg, double x, double y, std::string_view fill, std::string_view label) {
  svg.rectangle(x, y - 10, 12, 12, fill);
  svg.text(x + 18, y, label);
}

std::string draw_roofline(const Plan& plan) {
  constexpr double kLeft = 230;
  constexpr double kWidth = 420;
  constexpr double kRow = 22;
  constexpr double kTop = 70;
  const std::vector<OperatorTime>& operators = plan.best.operators;
  Svg svg(kLeft + kWidth + 240, kTop + kRow * static_cast<double>(operators.size()) + 20);
  const Candidate& best = plan.best_candidate();
  svg.text(10, 22,
           fmt::format("{} on {}: {}, batch {}, {:.3f} ms a step", plan.model.model().name,
                       plan.model.hardware().name, best.layout.to_string(), best.totals.batch,
                       in_milliseconds(best.totals.ttl)),
           Anchor::start, 14);
  double x = kLeft;
  for (const plan::Bound bound :
       {plan::Bound::memory, plan::Bound::compute, plan::Bound::network, plan::Bound::overhead}) {
    legend(svg, x, 48, color(bound), to_string(bound));
    x += 110;
  }
  plan::Time longest;
  for (const OperatorTime& op : operators) longest = std::max(longest, op.exposed());
  double y = kTop;
  for (const OperatorTime& op : operators) {
    const std::string name = fmt::format("{}{}{}", to_string(op.op), op.is_moe ? " (MoE)" : "",
                                         op.is_windowed ? " (windowed)" : "");
    const double width = longest > plan::Time{} ? kWidth * (op.exposed() / longest) : 0.0;
    svg.text(kLeft - 8, y + 13, name, Anchor::end);
    svg.rectangle(kLeft, y, width, kRow - 5, color(op.bound));
    svg.text(kLeft + width + 6, y + 13,
             fmt::format("{:.3f} ms, {:.1f} %", in_milliseconds(op.exposed()),
                         100.0 * (op.exposed() / best.totals.ttl)));
    y += kRow;
  }
  return svg.document();
}

/// A logarithmic axis for positive values, with ticks at 1, 2 and 5.
class LogAxis {
 public:
  LogAxis(double smallest, double largest, double from, double to)
      : first_(std::log10(smallest) - 0.05), last_(std::log10(largest) + 0.05), from_(from), to_(to) {}

  double at(double value) const {
    return from_ + (to_ - from_) * (std::log10(value) - first_) / (last_ - first_);
  }
  std::vector<double> ticks() const {
    std::vector<double> values;
    for (int decade = static_cast<int>(std::floor(first_)); decade <= static_cast<int>(last_) + 1; ++decade) {
      for (const double step : {1.0, 2.0, 5.0}) {
        const double value = step * std::pow(10.0, decade);
        if (std::log10(value) >= first_ && std::log10(value) <= last_) values.push_back(value);
      }
    }
    return values;
  }

 private:
  double first_;
  double last_;
  double from_;
  double to_;
};

std::string draw_frontier(const Plan& plan) {
  constexpr double kLeft = 80;
  constexpr double kRight = 700;
  constexpr double kTop = 60;
  constexpr double kBottom = 460;
  const std::vector<Candidate>& all = plan.result.candidates;
  const auto user = [](const Candidate& at) { return in_tokens_per_second(at.totals.tokens_per_user()); };
  const auto gpu = [](const Candidate& at) { return in_tokens_per_second(at.totals.tokens_per_gpu()); };
  const auto by = [](auto value) {
    return [value](const Candidate& a, const Candidate& b) { return value(a) < value(b); };
  };
  const auto [slow, fast] = std::minmax_element(all.begin(), all.end(), by(user));
  const auto [little, much] = std::minmax_element(all.begin(), all.end(), by(gpu));
  const LogAxis x(user(*slow), user(*fast), kLeft, kRight);
  const LogAxis y(gpu(*little), gpu(*much), kBottom, kTop);

  Svg svg(900, 520);
  svg.text(10, 22,
           fmt::format("{} on {}, {:.0f} tokens, up to {} GPUs", plan.model.model().name,
                       plan.model.hardware().name, in_tokens(plan.options.workload.context),
                       plan.options.space.max_gpus),
           Anchor::start, 14);
  for (const double tick : x.ticks()) {
    svg.line(x.at(tick), kTop, x.at(tick), kBottom, kGrid);
    svg.text(x.at(tick), kBottom + 16, fmt::format("{:g}", tick), Anchor::middle, 11);
  }
  for (const double tick : y.ticks()) {
    svg.line(kLeft, y.at(tick), kRight, y.at(tick), kGrid);
    svg.text(kLeft - 6, y.at(tick) + 4, fmt::format("{:g}", tick), Anchor::end, 11);
  }
  svg.line(kLeft, kBottom, kRight, kBottom, kAxis);
  svg.line(kLeft, kTop, kLeft, kBottom, kAxis);
  svg.text((kLeft + kRight) / 2, kBottom + 40, "tokens/s/user", Anchor::middle);
  svg.text(kLeft, kTop - 10, "tokens/s/GPU", Anchor::middle);
  double legend_y = kTop + 10;
  for (const plan::Strategy strategy :
       {plan::Strategy::tensor_parallel, plan::Strategy::data_parallel_attention, plan::Strategy::medha,
        plan::Strategy::helix}) {
    std::vector<Candidate> own;
    std::copy_if(all.begin(), all.end(), std::back_inserter(own),
                 [&](const Candidate& at) { return at.layout.strategy == strategy; });
    if (own.empty()) continue;
    std::vector<std::pair<double, double>> points;
    for (const std::size_t i : plan::pareto_frontier(own))
      points.emplace_back(x.at(user(own[i])), y.at(gpu(own[i])));
    svg.polyline(points, color(strategy));
    for (const auto& [px, py] : points) svg.circle(px, py, 3, color(strategy));
    legend(svg, kRight + 20, legend_y, color(strategy), to_string(strategy));
    legend_y += 20;
  }
  return svg.document();
}

/// A bar of the timeline. Times count from the beginning of the layer.
struct Span {
  bool is_link = false;
  plan::Time begin{};
  plan::Time end{};
  std::string_view fill;
};

struct Timeline {
  std::vector<Span> spans;
  plan::Time end{};
};

constexpr std::string_view kAttentionColor = "#4c72b0";
constexpr std::string_view kProductColor = "#55a868";
constexpr std::string_view kExchangeColor = "#c44e52";
constexpr std::string_view kCollectiveColor = "#dd8452";

/// The timeline of one layer, with full attention and MoE if the model has such a layer, in order; attention
/// and exchange are shown slice by slice.
Timeline layer_timeline(const plan::StepReport& report, int slices) {
  const auto rank = [](const OperatorTime& op) { return std::pair(!op.is_windowed, op.is_moe); };
  std::pair<bool, bool> shown;
  for (const OperatorTime& op : report.operators) {
    if (op.op == plan::Operator::attention) shown = std::max(shown, rank(op));
  }
  Timeline timeline;
  plan::Time now;
  plan::Time attention;
  plan::Time attention_begin;
  for (const OperatorTime& op : report.operators) {
    const bool is_of_layer =
        op.op >= plan::Operator::attention_norm && op.op <= plan::Operator::hidden_broadcast;
    if (!is_of_layer || rank(op) != shown) continue;
    const bool is_link = op.algorithm != plan::CollectiveAlgorithm::none;
    if (op.op == plan::Operator::kvp_exchange) {
      plan::Time link_free = attention_begin;
      for (int slice = 0; slice < slices; ++slice) {
        const plan::Time ready = attention_begin + attention * (slice + 1) / slices;
        const plan::Time begin = std::max(ready, link_free);
        link_free = begin + op.time / slices;
        timeline.spans.push_back({true, begin, link_free, kExchangeColor});
      }
      now = link_free;
      continue;
    }
    if (op.op == plan::Operator::attention) {
      attention = op.time;
      attention_begin = now;
      for (int slice = 0; slice < slices; ++slice) {
        timeline.spans.push_back(
            {false, now + op.time * slice / slices, now + op.time * (slice + 1) / slices, kAttentionColor});
      }
    } else {
      timeline.spans.push_back({is_link, now, now + op.time, is_link ? kCollectiveColor : kProductColor});
    }
    now += op.time;
  }
  timeline.end = now;
  return timeline;
}

void draw_panel(Svg& svg, double top, const std::string& title, const Timeline& timeline,
                plan::Time longest) {
  constexpr double kLeft = 70;
  constexpr double kWidth = 860;
  constexpr double kBar = 26;
  constexpr double kGap = 0.6;  // between neighbouring bars, in pixels
  svg.text(10, top, title, Anchor::start, 13);
  svg.text(kLeft - 6, top + 28, "GPU", Anchor::end);
  svg.text(kLeft - 6, top + 60, "links", Anchor::end);
  for (const Span& span : timeline.spans) {
    const double x = kLeft + kWidth * (span.begin / longest);
    const double width = std::max(0.3, kWidth * ((span.end - span.begin) / longest) - kGap);
    svg.rectangle(x, top + (span.is_link ? 42 : 10), width, kBar, span.fill);
  }
}

/// nullopt if there is no Helix layout that exchanges.
std::optional<std::string> draw_timeline(const Plan& plan) {
  const std::vector<Candidate>& all = plan.result.candidates;
  std::optional<std::size_t> found;
  for (const std::size_t i : best_layouts(plan, all.size())) {
    if (all[i].layout.strategy == plan::Strategy::helix && all[i].layout.kvp > 1) {
      found = i;
      break;
    }
  }
  if (!found) return std::nullopt;
  plan::Workload workload = plan.options.workload;
  workload.batch = all[*found].totals.batch;
  plan::Layout layout = all[*found].layout;
  layout.hop_b_slices = 0;
  const std::string shown = layout.to_string();  // the layout of both panels
  layout.hop_b_slices = 1;
  const Timeline off = layer_timeline(plan.model.explain(layout, workload), 1);
  layout.hop_b_slices = 0;
  int slices = plan.model.evaluate(layout, workload).hop_b_slices;
  const bool pays = slices > 1;
  constexpr int kShownSlices = 8;
  if (!pays) layout.hop_b_slices = kShownSlices;  // at most the number of sequences
  const plan::StepReport report = plan.model.explain(layout, workload);
  slices = report.totals.hop_b_slices;
  const Timeline on = layer_timeline(report, slices);

  Svg svg(960, 270);
  svg.text(10, 22,
           fmt::format("one layer of {} on {}: {}, batch {}", plan.model.model().name,
                       plan.model.hardware().name, shown, workload.batch),
           Anchor::start, 14);
  const plan::Time longest = std::max(off.end, on.end);
  draw_panel(svg, 55, fmt::format("without HOP-B: {:.1f} us", in_microseconds(off.end)), off, longest);
  draw_panel(svg, 145,
             fmt::format("with HOP-B in {} slice{}: {:.1f} us{}", slices, slices == 1 ? "" : "s",
                         in_microseconds(on.end), pays ? "" : "; it does not pay here"),
             on, longest);
  legend(svg, 70, 250, kAttentionColor, "attention");
  legend(svg, 190, 250, kExchangeColor, "exchange");
  legend(svg, 310, 250, kProductColor, "products and small kernels");
  legend(svg, 540, 250, kCollectiveColor, "other collectives");
  return svg.document();
}

}  // namespace

std::string write_pictures(const std::filesystem::path& folder, const Plan& plan) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  HELIX_EXPECTS(!failure, ErrorCode::io, folder.string(), ": the folder cannot be made: ", failure.message());
  std::string lines;
  const auto write = [&](std::string_view name, const std::string& document) {
    decode::write_output(folder / name, document);
    lines += fmt::format("wrote {}\n", decode::one_line((folder / name).string()));
  };
  const auto [roofline_file, frontier_file, timeline_file] = kPictures;
  write(roofline_file, draw_roofline(plan));
  write(frontier_file, draw_frontier(plan));
  if (const std::optional<std::string> timeline = draw_timeline(plan)) {
    write(timeline_file, *timeline);
  } else {
    lines += "no timeline.svg: no Helix layout with KVP > 1 remained\n";
  }
  return lines;
}

}  // namespace helix::plan_cli
