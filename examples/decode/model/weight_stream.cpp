// SPDX-License-Identifier: Apache-2.0
// Reads a plan's pieces, and makes resident what is used in place.
#include "model/weight_stream.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "model/weight_pieces.hpp"

namespace helix::decode {
namespace {

/// Bytes of a file that are made resident at a time: large enough for a thread to read ahead, small enough to
/// share among threads.
constexpr std::uint64_t kResidentBytes = std::uint64_t{16} << 20;

/// The runs of files that are used in place, cut into parts.
std::vector<FileBytes> cut_in_place(const WeightPlan& plan) {
  std::vector<FileBytes> runs;
  for (const WeightTarget& target : plan.targets) {
    if (!target.in_place) continue;
    const auto& [file, begin, size] = *target.in_place;
    for (std::uint64_t done = 0; done < size; done += kResidentBytes)
      runs.push_back({file, begin + done, std::min(kResidentBytes, size - done)});
  }
  return runs;
}

/// Checks routers that are used in place, for which no piece is read.
void check_in_place(const WeightPlan& plan) {
  for (const WeightTarget& target : plan.targets) {
    if (!target.in_place) continue;
    std::span<const std::byte> rest = target.in_place->data();
    for (const WeightSlice& slice : target.slices) {
      for (std::int64_t i = 0; i < slice.repeats; ++i) {
        const auto bytes =
            static_cast<std::size_t>(slice.rows.size() * slice.cols.size()) * size_bytes(target.dtype);
        check_finite(target, slice, slice.rows_of(i), rest.first(bytes));
        rest = rest.subspan(bytes);
      }
    }
  }
}

}  // namespace

void load_weights(const WeightPlan& plan, std::span<std::byte* const> buffers, cpu::ThreadPool& threads,
                  const WeightProgress& progress) {
  const std::int64_t total = plan.weight_bytes();
  const std::vector<FileBytes> runs = cut_in_place(plan);
  const std::vector<WeightPiece> pieces = cut_pieces(plan);
  std::vector<PieceReader> readers(static_cast<std::size_t>(threads.num_threads()), PieceReader(plan));
  std::atomic<std::int64_t> done = 0;
  const auto num_runs = static_cast<std::int64_t>(runs.size());
  const auto load = [&](std::int64_t index, int thread) {
    std::int64_t bytes = 0;
    if (index < num_runs) {
      const FileBytes& run = runs[static_cast<std::size_t>(index)];
      run.file->prefault(run.data());
      bytes = static_cast<std::int64_t>(run.size);
    } else {
      const WeightPiece& piece = pieces[static_cast<std::size_t>(index - num_runs)];
      std::byte* const out = buffers[piece.target->buffer] + piece.target->offset + piece.offset;
      readers[static_cast<std::size_t>(thread)].read(piece, {out, static_cast<std::size_t>(piece.bytes)});
      bytes = piece.bytes;
    }
    const std::int64_t all = done.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    if (progress && thread == 0) progress(all, total);
  };
  if (progress) progress(0, total);
  threads.parallel_for(num_runs + static_cast<std::int64_t>(pieces.size()), load);
  check_in_place(plan);
  if (progress) progress(total, total);
}

void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress) {
  const std::int64_t total = plan.weight_bytes() - plan.in_place_bytes();
  std::int64_t done = 0;
  if (progress) progress(done, total);
  PieceReader reader(plan);
  std::vector<std::byte> staging;
  for (const WeightPiece& piece : cut_pieces(plan)) {
    const auto bytes = static_cast<std::size_t>(piece.bytes);
    if (staging.size() < bytes) staging.resize(bytes);
    reader.read(piece, {staging.data(), bytes});
    sink(piece.target->buffer, piece.target->offset + piece.offset, staging.data(), bytes);
    done += piece.bytes;
    if (progress) progress(done, total);
  }
}

}  // namespace helix::decode
