// SPDX-License-Identifier: Apache-2.0
// Cuts targets into pieces; reads, widens and dequantises one piece.
#include "model/weight_pieces.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include <helix/error.hpp>

#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

/// Bytes of a piece: small enough that the data stays in a core's cache while it is widened. With 8 MiB a
/// load took 10 % longer.
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;

std::int64_t bytes_of(DType dtype) {
  return static_cast<std::int64_t>(size_bytes(dtype));
}

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));  // tensors need not be aligned
  return value;
}

float load_float(DType dtype, const std::byte* bytes) {
  return dispatch(dtype, [&]<class T>(T*) { return static_cast<float>(load<T>(bytes)); });
}

const std::array<float, 256>& fp8_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (unsigned i = 0; i < 256; ++i) {
      table[i] = static_cast<float>(fp8_e4m3::from_bits(static_cast<std::uint8_t>(i)));
    }
    return table;
  }();
  return values;
}

/// `bytes` bytes of scratch memory. The memory never shrinks.
std::span<std::byte> scratch(std::vector<std::byte>& memory, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (memory.size() < size) memory.resize(size);
  return {memory.data(), size};
}

/// Adds the pieces of one slice to `pieces`.
void cut(const WeightTarget& target, const WeightSlice& slice, std::vector<WeightPiece>& pieces) {
  if (slice.rows.size() == 0 || slice.cols.size() == 0) return;
  const std::int64_t element = bytes_of(target.dtype);
  const std::int64_t row_bytes = slice.cols.size() * element;
  const std::int64_t source_row_bytes =
      slice.cols.size() * std::max(element, bytes_of(*slice.source.tensor->dtype));
  const bool is_whole_width = slice.target_cols() == target.cols;
  HELIX_EXPECTS(is_whole_width || !slice.is_transposed, ErrorCode::internal, slice.tensor(),
                ": a transposed slice must fill whole rows of its target");
  // If the slice does not fill whole target rows, its rows are not contiguous in the target: each row is a
  // piece.
  const std::int64_t most_rows =
      is_whole_width ? std::max<std::int64_t>(1, kPieceBytes / source_row_bytes) : 1;
  const bool stays_whole = slice.is_transposed || slice.rows.size() <= most_rows;
  const std::int64_t rows_a_piece = stays_whole ? slice.rows.size() : most_rows;
  const std::int64_t repeats_a_piece =
      stays_whole && is_whole_width ? std::max<std::int64_t>(1, most_rows / slice.rows.size()) : 1;
  for (std::int64_t repeat = 0; repeat < slice.repeats; repeat += repeats_a_piece) {
    const Range repeats = {repeat, std::min(repeat + repeats_a_piece, slice.repeats)};
    const Range all = slice.rows_of(repeat);
    for (std::int64_t row = all.begin; row < all.end; row += rows_a_piece) {
      const Range rows = {row, std::min(row + rows_a_piece, all.end)};
      const std::int64_t target_row = slice.target_row + repeat * slice.target_rows() + (row - all.begin);
      pieces.push_back({.target = &target,
                        .slice = &slice,
                        .repeats = repeats,
                        .rows = rows,
                        .offset = (target_row * target.cols + slice.target_col) * element,
                        .bytes = repeats.size() * rows.size() * row_bytes});
    }
  }
}

}  // namespace

std::vector<WeightPiece> cut_pieces(const WeightPlan& plan) {
  std::vector<WeightPiece> pieces;
  for (const WeightTarget& target : plan.targets) {
    if (target.in_place) continue;
    if (target.zero_cols > 0) {
      WeightPiece zeros;
      zeros.target = &target;
      zeros.bytes = target.zero_cols * bytes_of(target.dtype);
      pieces.push_back(zeros);
    }
    for (const WeightSlice& slice : target.slices) cut(target, slice, pieces);
  }
  return pieces;
}

void check_finite(const WeightTarget& target, const WeightSlice& slice, Range rows,
                  std::span<const std::byte> values) {
  if (target.role != WeightRole::router && target.role != WeightRole::router_bias) return;
  dispatch(target.dtype, [&]<class T>(T*) {
    const auto count = static_cast<std::int64_t>(values.size() / sizeof(T));
    for (std::int64_t i = 0; i < count; ++i) {
      const float value =
          static_cast<float>(load<T>(values.data() + i * static_cast<std::int64_t>(sizeof(T))));
      HELIX_EXPECTS(std::isfinite(value), ErrorCode::invalid_file, slice.source.file->path(), ": tensor ",
                    printable(slice.tensor()), ": element [", rows.begin + i / slice.cols.size(), ", ",
                    slice.cols.begin + i % slice.cols.size(), "] is ", value,
                    "; a router's weights and biases decide experts and must be finite");
    }
  });
}

void PieceReader::read(const WeightPiece& piece, std::span<std::byte> out) {
  if (piece.slice == nullptr) {
    std::fill(out.begin(), out.end(), std::byte{});
    return;
  }
  const auto bytes = static_cast<std::size_t>(piece.bytes / piece.repeats.size());
  for (std::int64_t i = 0; i < piece.repeats.size(); ++i) {
    const std::int64_t shift = i * piece.slice->row_stride;
    read_rows(piece, {piece.rows.begin + shift, piece.rows.end + shift},
              out.subspan(static_cast<std::size_t>(i) * bytes, bytes));
  }
}

/// Reads the slice's columns of source rows `rows`, transposed if the slice says so.
void PieceReader::read_rows(const WeightPiece& piece, Range rows, std::span<std::byte> out) {
  const WeightSlice& slice = *piece.slice;
  const DType dtype = piece.target->dtype;
  const auto size = static_cast<std::int64_t>(out.size());
  const std::span<std::byte> upright = slice.is_transposed ? scratch(upright_, size) : out;
  if (*slice.source.tensor->dtype == dtype) {
    read_rectangle({slice.source, rows, slice.cols}, upright);
  } else {
    HELIX_EXPECTS(dtype == DType::f32, ErrorCode::internal, slice.tensor(), " is widened to ",
                  to_string(dtype));
    widen(slice, rows, reinterpret_cast<float*>(upright.data()));
  }
  check_finite(*piece.target, slice, rows, upright);
  if (!slice.is_transposed) return;
  const std::int64_t element = bytes_of(dtype);
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    const std::byte* from = upright.data() + row * slice.cols.size() * element;
    for (std::int64_t col = 0; col < slice.cols.size(); ++col) {
      std::memcpy(out.data() + (col * rows.size() + row) * element, from + col * element,
                  static_cast<std::size_t>(element));
    }
  }
}

/// Reads the elements of `part` in the file's type, with rows packed densely.
void PieceReader::read_rectangle(const Rectangle& part, std::span<std::byte> out) {
  constexpr std::int64_t kSkippedBytes = 4096;  // a read call costs as much as copying these
  const TensorInfo& tensor = *part.source.tensor;
  const std::int64_t element = bytes_of(*tensor.dtype);
  const std::int64_t part_bytes = part.cols.size() * element;
  const std::int64_t row_bytes = tensor.cols() * element;
  const std::int64_t begin = part.rows.begin * row_bytes + part.cols.begin * element;
  if (part_bytes == row_bytes || part.rows.size() == 1) {
    part.source.file->read(tensor, static_cast<std::uint64_t>(begin), out);
  } else if (row_bytes - part_bytes >= kSkippedBytes) {
    for (std::int64_t row = 0; row < part.rows.size(); ++row) {
      part.source.file->read(
          tensor, static_cast<std::uint64_t>(begin + row * row_bytes),
          out.subspan(static_cast<std::size_t>(row * part_bytes), static_cast<std::size_t>(part_bytes)));
    }
  } else {
    read_through(part, begin, out);
  }
}

/// Also reads the bytes between the parts of the rows, and drops them.
void PieceReader::read_through(const Rectangle& part, std::int64_t begin, std::span<std::byte> out) {
  constexpr std::int64_t kBlockBytes = std::int64_t{256} << 10;
  const TensorInfo& tensor = *part.source.tensor;
  const std::int64_t row_bytes = tensor.cols() * bytes_of(*tensor.dtype);
  const std::int64_t part_bytes = part.cols.size() * bytes_of(*tensor.dtype);
  const std::int64_t rows_a_block = std::max<std::int64_t>(1, kBlockBytes / row_bytes);
  for (std::int64_t row = 0; row < part.rows.size(); row += rows_a_block) {
    const std::int64_t count = std::min(rows_a_block, part.rows.size() - row);
    const std::span<std::byte> block = scratch(block_, (count - 1) * row_bytes + part_bytes);
    part.source.file->read(tensor, static_cast<std::uint64_t>(begin + row * row_bytes), block);
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(out.data() + (row + i) * part_bytes, block.data() + i * row_bytes,
                  static_cast<std::size_t>(part_bytes));
    }
  }
}

/// Reads the slice's columns of source rows `rows` as floats.
void PieceReader::widen(const WeightSlice& slice, Range rows, float* out) {
  const DType type = *slice.source.tensor->dtype;
  const std::int64_t count = rows.size() * slice.cols.size();
  const std::span<std::byte> from = scratch(stored_, count * bytes_of(type));
  read_rectangle({slice.source, rows, slice.cols}, from);
  if (type == DType::fp8_e4m3) {
    widen_fp8(slice, rows, from.data(), out);
    return;
  }
  dispatch(type, [&]<class T>(T*) {
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<float>(load<T>(from.data() + i * static_cast<std::int64_t>(sizeof(T))));
    }
  });
}

/// Multiplies each value by the scale of its block, found by the indices in the full tensor.
void PieceReader::widen_fp8(const WeightSlice& slice, Range rows, const std::byte* from, float* out) {
  const std::array<float, 256>& values = fp8_values();
  const TensorInfo& scale = *slice.scale.tensor;
  const std::int64_t scale_bytes = bytes_of(*scale.dtype);
  const std::int64_t block_rows = plan_->fp8_blocks.block_rows;
  const std::int64_t block_cols = plan_->fp8_blocks.block_cols;
  const Range scale_rows = {rows.begin / block_rows, (rows.end - 1) / block_rows + 1};
  const std::span<std::byte> scales = scratch(scales_, scale_rows.size() * scale.cols() * scale_bytes);
  read_rectangle({slice.scale, scale_rows, {0, scale.cols()}}, scales);
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const std::int64_t scale_row = (row / block_rows - scale_rows.begin) * scale.cols();
    for (std::int64_t col = slice.cols.begin; col < slice.cols.end;) {
      const std::int64_t end = std::min(slice.cols.end, (col / block_cols + 1) * block_cols);
      const float factor =
          load_float(*scale.dtype, scales.data() + (scale_row + col / block_cols) * scale_bytes);
      for (; col < end; ++col) *out++ = values[static_cast<std::size_t>(*from++)] * factor;
    }
  }
}

}  // namespace helix::decode
