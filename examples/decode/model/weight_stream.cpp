// SPDX-License-Identifier: Apache-2.0
// Copying, widening and dequantising the slices of a plan.
#include "model/weight_stream.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include <helix/error.hpp>

#include "checkpoint/strict_json.hpp"

namespace helix::decode {
namespace {

/// Bytes read and staged at a time: they stay in a core's cache on their way. 8 MiB cost 10 % more of a load.
constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;

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

/// `count` elements of type From at `source` to float.
template <class From>
void widen(const std::byte* source, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(load<From>(source + i * static_cast<std::int64_t>(sizeof(From))));
  }
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

/// The part of a tensor that a rectangle is read from.
struct SourceRows {
  const Checkpoint::Entry& source;
  Range rows;
  Range cols;

  std::int64_t element_bytes() const { return bytes_of(*source.tensor->dtype); }
  std::int64_t row_bytes() const { return source.tensor->cols() * element_bytes(); }
  std::int64_t part_bytes() const { return cols.size() * element_bytes(); }
};

/// Reads rectangles of tensors into memory of its own.
class RectangleReader {
 public:
  /// The elements of `part`, rows dense; valid until the next call.
  std::span<const std::byte> read(const SourceRows& part) {
    const std::int64_t part_bytes = part.part_bytes();
    const auto size = static_cast<std::size_t>(part.rows.size() * part_bytes);
    if (dense_.size() < size) dense_.resize(size);
    const std::int64_t row_bytes = part.row_bytes();
    const std::int64_t begin = part.rows.begin * row_bytes + part.cols.begin * part.element_bytes();
    if (part_bytes == row_bytes) {
      read_bytes(part.source, begin, {dense_.data(), size});
    } else if (row_bytes - part_bytes >= kSkippedBytes) {
      for (std::int64_t row = 0; row < part.rows.size(); ++row) {
        read_bytes(part.source, begin + row * row_bytes,
                   {dense_.data() + row * part_bytes, static_cast<std::size_t>(part_bytes)});
      }
    } else {
      read_through(part, begin);
    }
    return {dense_.data(), size};
  }

 private:
  /// A call costs as much as copying this many bytes.
  static constexpr std::int64_t kSkippedBytes = 4096;
  static constexpr std::int64_t kBlockBytes = std::int64_t{256} << 10;

  static void read_bytes(const Checkpoint::Entry& source, std::int64_t offset, std::span<std::byte> target) {
    source.file->read(*source.tensor, static_cast<std::uint64_t>(offset), target);
  }

  /// Reads what lies between the rows' parts too, and drops it.
  void read_through(const SourceRows& part, std::int64_t begin) {
    const std::int64_t row_bytes = part.row_bytes();
    const std::int64_t part_bytes = part.part_bytes();
    const std::int64_t rows_a_block = std::max<std::int64_t>(1, kBlockBytes / row_bytes);
    for (std::int64_t row = 0; row < part.rows.size(); row += rows_a_block) {
      const std::int64_t count = std::min(rows_a_block, part.rows.size() - row);
      block_.resize(static_cast<std::size_t>((count - 1) * row_bytes + part_bytes));
      read_bytes(part.source, begin + row * row_bytes, block_);
      for (std::int64_t i = 0; i < count; ++i) {
        std::memcpy(dense_.data() + (row + i) * part_bytes, block_.data() + i * row_bytes,
                    static_cast<std::size_t>(part_bytes));
      }
    }
  }

  std::vector<std::byte> dense_;
  std::vector<std::byte> block_;
};

/// A router's values decide which experts a token visits; one that is not finite would decide silently.
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

/// Copies slices, one chunk of source rows at a time, through staging buffers.
class SliceStreamer {
 public:
  SliceStreamer(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress)
      : plan_(plan), sink_(sink), progress_(progress), total_(plan.weight_bytes()) {}

  void run() {
    report(0);
    for (const WeightTarget& target : plan_.targets) {
      for (const WeightSlice& slice : target.slices) {
        for (std::int64_t i = 0; i < slice.repeats; ++i) stream(target, slice, i);
      }
    }
  }

 private:
  void stream(const WeightTarget& target, const WeightSlice& slice, std::int64_t repeat) {
    if (slice.rows.size() == 0 || slice.cols.size() == 0) return;
    const std::int64_t target_row = slice.target_row + repeat * slice.target_rows();
    const Range all = slice.rows_of(repeat);
    if (slice.is_transposed) {
      write_transposed(target, slice, all, target_row);
      return;
    }
    const TensorInfo& tensor = *slice.source.tensor;
    const std::int64_t rows_a_chunk = std::max<std::int64_t>(
        1, kChunkBytes / (slice.cols.size() * std::max(bytes_of(*tensor.dtype), bytes_of(target.dtype))));
    for (std::int64_t row = all.begin; row < all.end; row += rows_a_chunk) {
      const Range rows = {row, std::min(row + rows_a_chunk, all.end)};
      write_rows(target, slice, rows, target_row + row - all.begin);
    }
  }

  void write_rows(const WeightTarget& target, const WeightSlice& slice, Range rows, std::int64_t target_row) {
    const std::int64_t part = slice.cols.size();
    const std::int64_t target_element = bytes_of(target.dtype);
    const std::int64_t target_begin = (target_row * target.cols + slice.target_col) * target_element;
    const std::span<const std::byte> values = read(target, slice, rows);
    if (part == target.cols) {
      emit(target, target_begin, values.data(), static_cast<std::int64_t>(values.size()));
      return;
    }
    for (std::int64_t row = 0; row < rows.size(); ++row) {  // joined biases: one row, beside another
      emit(target, target_begin + row * target.cols * target_element,
           values.data() + row * part * target_element, part * target_element);
    }
  }

  /// A head of W_UK: small enough to stage whole.
  void write_transposed(const WeightTarget& target, const WeightSlice& slice, Range rows,
                        std::int64_t target_row) {
    const std::int64_t target_element = bytes_of(target.dtype);
    const std::int64_t num_cols = slice.cols.size();
    const std::span<const std::byte> values = read(target, slice, rows);
    transposed_.resize(values.size());
    for (std::int64_t row = 0; row < rows.size(); ++row) {
      const std::byte* from = values.data() + row * num_cols * target_element;
      for (std::int64_t col = 0; col < num_cols; ++col) {
        std::memcpy(transposed_.data() + (col * rows.size() + row) * target_element,
                    from + col * target_element, static_cast<std::size_t>(target_element));
      }
    }
    emit(target, (target_row * target.cols + slice.target_col) * target_element, transposed_.data(),
         static_cast<std::int64_t>(transposed_.size()));
  }

  /// The slice's columns of source rows `rows` in the target's type, rows dense.
  std::span<const std::byte> read(const WeightTarget& target, const WeightSlice& slice, Range rows) {
    const DType type = *slice.source.tensor->dtype;
    std::span<const std::byte> values = source_.read({slice.source, rows, slice.cols});
    if (type != target.dtype) {
      widened_.resize(static_cast<std::size_t>(rows.size() * slice.cols.size()));
      if (type == DType::fp8_e4m3) {
        widen_fp8(slice, rows, values.data());
      } else {
        dispatch(type, [&]<class T>(T*) {
          widen<T>(values.data(), static_cast<std::int64_t>(widened_.size()), widened_.data());
        });
      }
      values = std::as_bytes(std::span(widened_));
    }
    check_finite(target, slice, rows, values);
    return values;
  }

  /// Each value times the scale of its block, found by the full tensor's indices.
  void widen_fp8(const WeightSlice& slice, Range rows, const std::byte* from) {
    const std::array<float, 256>& values = fp8_values();
    const TensorInfo& scale = *slice.scale.tensor;
    const std::int64_t block_rows = plan_.fp8_blocks.block_rows;
    const std::int64_t block_cols = plan_.fp8_blocks.block_cols;
    const Range scale_rows = {rows.begin / block_rows, (rows.end - 1) / block_rows + 1};
    const std::byte* scales = scales_.read({slice.scale, scale_rows, {0, scale.cols()}}).data();
    float* out = widened_.data();
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const std::int64_t scale_row = (row / block_rows - scale_rows.begin) * scale.cols();
      for (std::int64_t col = slice.cols.begin; col < slice.cols.end;) {
        const std::int64_t end = std::min(slice.cols.end, (col / block_cols + 1) * block_cols);
        const float factor =
            load_float(*scale.dtype, scales + (scale_row + col / block_cols) * bytes_of(*scale.dtype));
        for (; col < end; ++col) *out++ = values[static_cast<std::size_t>(*from++)] * factor;
      }
    }
  }

  void emit(const WeightTarget& target, std::int64_t offset, const std::byte* data, std::int64_t bytes) {
    for (std::int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
      const std::int64_t count = std::min(kChunkBytes, bytes - begin);
      sink_(target.buffer, target.offset + offset + begin, data + begin, static_cast<std::size_t>(count));
      report(count);
    }
  }

  void report(std::int64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  const WeightPlan& plan_;
  const WeightSink& sink_;
  const WeightProgress& progress_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  RectangleReader source_;
  RectangleReader scales_;
  std::vector<float> widened_;
  std::vector<std::byte> transposed_;
};

}  // namespace

void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress) {
  SliceStreamer(plan, sink, progress).run();
}

}  // namespace helix::decode
