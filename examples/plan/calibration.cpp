// SPDX-License-Identifier: Apache-2.0
// Calibrates a hardware description with bench cases.
#include "calibration.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "files/strict_json.hpp"

namespace helix::plan_cli {
namespace {

using plan::Bytes;
using plan::Collective;
using plan::Time;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// Keeps the order of times although a curve stores bandwidths, which are rounded.
constexpr double kJustMore = 1 + 1e-9;

/// Merges points whose sizes differ by at most 5 %: they repeat one measurement.
std::vector<plan::TimedSize> merged(std::vector<plan::TimedSize> samples) {
  constexpr double kSameSize = 1.05;
  std::sort(samples.begin(), samples.end(),
            [](const plan::TimedSize& a, const plan::TimedSize& b) { return a.size < b.size; });
  std::vector<plan::TimedSize> points;
  for (std::size_t begin = 0; begin < samples.size();) {
    std::vector<double> sizes;
    std::vector<double> times;
    std::size_t i = begin;
    for (; i < samples.size() && samples[i].size <= samples[begin].size * kSameSize; ++i) {
      sizes.push_back(in_bytes(samples[i].size));
      times.push_back(in_microseconds(samples[i].time));
    }
    begin = i;
    Time time = plan::microseconds(median(times));
    // Noise may make a larger size look faster, but in the model no larger size is.
    if (!points.empty()) time = std::max(time, points.back().time * kJustMore);
    points.push_back({plan::bytes(median(sizes)), time});
  }
  return points;
}

/// Plain reads of the bytes of each case; for attention cases, reads of up to 8 GiB.
std::vector<plan::TimedSize> plain_reads(const std::vector<BenchCase>& cases) {
  constexpr double kAttentionRead = 8.0 * (1 << 30);
  std::vector<plan::TimedSize> samples;
  for (const BenchCase& at : cases) {
    if (!at.has("read_bytes/s")) continue;
    if (at.family != "partial_attention" && !at.has("bytes")) continue;
    const double size = at.family == "partial_attention" ? kAttentionRead : at.value("bytes");
    samples.push_back({plan::bytes(size), plan::seconds(size / at.value("read_bytes/s"))});
  }
  return merged(std::move(samples));
}

/// A kernel or read of at most this size counts as small: most of its time is launch time.
constexpr double kSmallBytes = 4e6;

/// Read bandwidth by size. Sizes below the smallest read take its time if that read is small. Otherwise
/// `base` decides; if `base` is flat, one point just below the smallest read represents it.
plan::BandwidthCurve read_curve(const plan::BandwidthCurve& base, const std::vector<plan::TimedSize>& reads) {
  const plan::TimedSize& smallest = reads.front();
  std::vector<plan::BandwidthCurve::Point> points;
  if (smallest.size > plan::bytes(kSmallBytes)) {
    const auto keep = [&](Bytes size) {
      const Time time = base.time(size);
      if (size < smallest.size && time * kJustMore < smallest.time) points.push_back({size, size / time});
    };
    if (base.points().size() == 1 && base.points().front().size == Bytes{}) {
      keep(smallest.size / kJustMore);
    } else {
      for (const plan::BandwidthCurve::Point& point : base.points()) keep(point.size);
    }
  } else if (smallest.size > plan::bytes(1)) {
    points.push_back({plan::bytes(1), plan::bytes(1) * kJustMore / smallest.time});
  }
  for (const plan::TimedSize& read : reads) points.push_back({read.size, read.size / read.time});
  return plan::BandwidthCurve(std::move(points));
}

/// Median excess of small kernels over a read of their bytes; nullopt if no small kernel was measured.
std::optional<Time> operator_overhead(const plan::BandwidthCurve& read, const std::vector<BenchCase>& cases) {
  std::vector<double> excess;
  for (const BenchCase& at : cases) {
    const bool is_kernel = at.family == "rms_norm" || at.family == "lse_combine" ||
                           at.family == "pack_partial" || at.family == "append_kv";
    if (!is_kernel || at.value("bytes") > kSmallBytes) continue;
    excess.push_back(at.value("us") - in_microseconds(read.time(plan::bytes(at.value("bytes")))));
  }
  if (excess.empty()) return std::nullopt;
  return plan::microseconds(std::max(0.0, median(excess)));
}

/// Bandwidth of attention by size of the KV that it reads. Has no points if it was not measured.
plan::BandwidthCurve attention_curve(const std::vector<BenchCase>& cases) {
  std::vector<plan::TimedSize> samples;
  for (const BenchCase& at : cases) {
    if (!is_step_attention(at) || at.parameter("queries", kMaxStepTokens) != 1) continue;
    const Time time = plan::microseconds(at.value("us"));
    samples.push_back({plan::bytes(at.value("bytes/s") * in_seconds(time)), time});
  }
  if (samples.empty()) return {};
  const std::vector<plan::TimedSize> sizes = merged(std::move(samples));
  std::vector<plan::BandwidthCurve::Point> points;
  if (sizes.size() > 1) {
    // Attention has a fixed start and end cost: extrapolate the line through the two smallest sizes to zero
    // bytes.
    const double slope = (sizes[1].time - sizes[0].time) / plan::microseconds(1) /
                         ((sizes[1].size - sizes[0].size) / plan::bytes(1));
    const double start = in_microseconds(sizes[0].time) - slope * in_bytes(sizes[0].size);
    if (start > 0) points.push_back({plan::bytes(1), plan::bytes(1) / plan::microseconds(start)});
  }
  for (const plan::TimedSize& at : sizes) points.push_back({at.size, at.size / at.time});
  return plan::BandwidthCurve(std::move(points));
}

using MeasuredKey = std::pair<Collective, int>;

/// Adds the exchange's part of `time`, which KvpAllToAll and combine of `size` bytes per rank take together.
/// The combine reads all bytes and writes 1/KVP of them; its modelled time is subtracted. Adds nothing if
/// that exceeds `time`.
void add_exchange(const plan::Hardware& hardware, Time time, Bytes size, std::int64_t kvp,
                  std::vector<plan::TimedSize>& samples) {
  const Bytes moved = size * (static_cast<double>(kvp + 1) / static_cast<double>(kvp));
  const Time combine = hardware.read.time(moved) + hardware.overheads.per_operator;
  if (time > combine) samples.push_back({size, time - combine});
}

/// Whether the case sends over NCCL rather than over windows.
bool is_over_nccl(const BenchCase& at) {
  return !at.parameters.contains("windows");
}

/// Collectives that the cases measured alone, over one transport: NCCL, or windows if nothing was measured
/// over NCCL.
std::map<MeasuredKey, std::vector<plan::TimedSize>> collectives(const plan::Hardware& hardware,
                                                                const std::vector<BenchCase>& all) {
  const auto has_collective = [](const BenchCase& at) {
    if (at.family == "exchange") return true;
    return at.family == "decode_layer" && (at.ranks("kvp") > 1 || at.ranks("tpa") > 1);
  };
  std::vector<BenchCase> cases;
  std::copy_if(all.begin(), all.end(), std::back_inserter(cases), has_collective);
  if (std::any_of(cases.begin(), cases.end(), is_over_nccl)) std::erase_if(cases, std::not_fn(is_over_nccl));

  std::map<MeasuredKey, std::vector<plan::TimedSize>> found;
  std::set<MeasuredKey> has_own_case;
  for (const BenchCase& at : cases) {
    if (at.family != "exchange") continue;
    const std::int64_t kvp = at.ranks("kvp");
    const MeasuredKey key{Collective::all_to_all, static_cast<int>(kvp)};
    const Bytes size = plan::bytes(at.value("bytes"));
    has_own_case.insert(key);
    add_exchange(hardware, plan::microseconds(at.value("us")), size, kvp, found[key]);
  }
  for (const BenchCase& at : cases) {
    if (at.family != "decode_layer") continue;
    const std::int64_t kvp = at.ranks("kvp");
    const std::int64_t tpa = at.ranks("tpa");
    const std::int64_t batch = at.parameter("batch", kMaxSequences);
    HELIX_EXPECTS(kvp * tpa <= kMaxRanks, ErrorCode::invalid_file, at.where(), ": its kvp * tpa is ",
                  kvp * tpa, "; a job has at most ", kMaxRanks, " ranks");
    const Bytes hidden =
        plan::bytes(static_cast<double>(batch * BenchShape::kHidden) * BenchShape::kElementBytes);
    found[{Collective::all_reduce, static_cast<int>(kvp * tpa)}].push_back(
        {hidden, plan::microseconds(at.value("all_reduce_us"))});
    const MeasuredKey key{Collective::all_to_all, static_cast<int>(kvp)};
    if (kvp > 1 && !has_own_case.contains(key)) {
      const Bytes size = partial_bytes(batch, BenchShape::kHeads / tpa, BenchShape::kDim);
      add_exchange(hardware, plan::microseconds(at.value("exchange_us")), size, kvp, found[key]);
    }
  }
  std::erase_if(found, [](const auto& samples) { return samples.second.empty(); });
  return found;
}

}  // namespace

Bytes partial_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  constexpr double kLseBytes = 4;
  return plan::bytes(static_cast<double>(tokens) * static_cast<double>(heads) *
                     (static_cast<double>(dim) * BenchShape::kElementBytes + kLseBytes));
}

bool is_step_attention(const BenchCase& at) {
  // Shorter sequences take a kernel's time for each of them, more than for their bytes.
  constexpr std::int64_t kLeastTokens = 1024;
  // Other parameters mean another head size, KV type, KV layout, or the kernel of other GPUs.
  static const std::set<std::string> kParameters{"heads", "batch", "tokens", "page", "queries", "ragged"};
  return at.family == "partial_attention" && at.has("bytes/s") &&
         (!at.parameters.contains("tokens") || at.parameter("tokens", kMaxTokens) >= kLeastTokens) &&
         std::all_of(at.parameters.begin(), at.parameters.end(),
                     [](const auto& parameter) { return kParameters.contains(parameter.first); });
}

namespace {

/// The files of the cases as text: "a.json, b.json".
std::string files_of(const std::vector<BenchCase>& cases) {
  std::string files;
  std::set<std::string> seen;
  for (const BenchCase& at : cases) {
    if (!seen.insert(at.file).second) continue;
    files += (files.empty() ? "" : ", ") + at.file;
  }
  return files.empty() ? "the results" : files;
}

/// `base` updated with the measurements of the cases; nullopt if there are none.
std::optional<plan::Hardware> with_measurements(const plan::Hardware& base,
                                                const std::vector<BenchCase>& cases) {
  plan::Hardware hardware = base;
  const std::vector<plan::TimedSize> reads = plain_reads(cases);
  if (!reads.empty()) {
    hardware.read = read_curve(hardware.read, reads);
    if (const auto overhead = operator_overhead(hardware.read, cases)) {
      hardware.overheads.per_operator = *overhead;
      hardware.overheads.per_slice = *overhead + hardware.read.time(plan::bytes(1));
    }
  }
  plan::BandwidthCurve curve = attention_curve(cases);
  const bool has_curve = !curve.points().empty();
  if (has_curve) hardware.attention_read = std::move(curve);
  const auto found = collectives(hardware, cases);
  if (reads.empty() && found.empty() && !has_curve) return std::nullopt;
  for (const auto& [key, samples] : found) {
    const auto [collective, ranks] = key;
    std::erase_if(hardware.measured, [kind = collective, size = ranks](const plan::MeasuredCollective& old) {
      return old.collective == kind && old.ranks == size;
    });
    hardware.measured.push_back({key.first, key.second, merged(samples)});
  }
  hardware.source = "calibrated by measurements; the rest: " + hardware.source;
  hardware.name += ", calibrated";
  hardware.check();
  return hardware;
}

}  // namespace

plan::Hardware calibrate(const plan::Hardware& base, const std::vector<BenchCase>& cases) {
  try {
    const std::optional<plan::Hardware> hardware = with_measurements(base, cases);
    HELIX_EXPECTS(hardware.has_value(), ErrorCode::invalid_file, files_of(cases),
                  ": neither reads nor collectives to calibrate with; give the results of bench/run_gpu.sh");
    return *hardware;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_file) throw;
    throw Error(ErrorCode::invalid_file, files_of(cases), ": ", error.what());
  }
}

plan::Hardware calibrate_without(const plan::Hardware& base, std::vector<BenchCase> cases,
                                 const std::string& name) {
  std::erase_if(cases, [&](const BenchCase& at) { return at.name == name; });
  return with_measurements(base, cases).value_or(base);
}

}  // namespace helix::plan_cli
