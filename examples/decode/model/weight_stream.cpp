// SPDX-License-Identifier: Apache-2.0
// Copying, widening and dequantising the slices of a plan.
#include "model/weight_stream.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

namespace helix::decode {
namespace {

/// Bytes staged at a time, which bound the pages that stay resident.
constexpr std::int64_t kChunkBytes = std::int64_t{8} << 20;

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

/// Copies slices, one chunk of source rows at a time, through a staging buffer.
class SliceStreamer {
 public:
  SliceStreamer(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress)
      : plan_(plan), sink_(sink), progress_(progress), total_(plan.weight_bytes()) {}

  void run() {
    report(0);
    for (const WeightTarget& target : plan_.targets) {
      for (const WeightSlice& slice : target.slices) stream(target, slice);
    }
  }

 private:
  void stream(const WeightTarget& target, const WeightSlice& slice) {
    if (slice.rows.size() == 0 || slice.cols.size() == 0) return;
    const TensorInfo& tensor = *slice.source.tensor;
    const std::int64_t source_row_bytes = tensor.cols() * bytes_of(*tensor.dtype);
    if (slice.is_transposed) {
      write_transposed(target, slice);
      release_rows(slice, slice.rows, source_row_bytes);
      return;
    }
    const std::int64_t rows_a_chunk = std::max<std::int64_t>(
        1, kChunkBytes / std::max(source_row_bytes, slice.cols.size() * bytes_of(target.dtype)));
    for (std::int64_t row = slice.rows.begin; row < slice.rows.end; row += rows_a_chunk) {
      const Range rows = {row, std::min(row + rows_a_chunk, slice.rows.end)};
      write_rows(target, slice, rows);
      release_rows(slice, rows, source_row_bytes);
    }
  }

  void release_rows(const WeightSlice& slice, Range rows, std::int64_t row_bytes) const {
    const std::span<const std::byte> data = slice.source.file->data(*slice.source.tensor);
    slice.source.file->release(data.subspan(static_cast<std::size_t>(rows.begin * row_bytes),
                                            static_cast<std::size_t>(rows.size() * row_bytes)));
  }

  void write_rows(const WeightTarget& target, const WeightSlice& slice, Range rows) {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::byte* source = slice.source.file->data(tensor).data();
    const std::int64_t element = bytes_of(*tensor.dtype);
    const std::int64_t part = slice.cols.size();
    const std::int64_t target_element = bytes_of(target.dtype);
    const std::int64_t target_row = slice.target_row + rows.begin - slice.rows.begin;
    const std::int64_t target_begin = (target_row * target.cols + slice.target_col) * target_element;

    const bool is_plain = *tensor.dtype == target.dtype;
    if (is_plain && part == tensor.cols() && part == target.cols) {
      emit(target, target_begin, source + rows.begin * part * element, rows.size() * part * element);
      return;
    }
    staging_.resize(static_cast<std::size_t>(rows.size() * part * target_element));
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const std::byte* from = source + (row * tensor.cols() + slice.cols.begin) * element;
      std::byte* to = staging_.data() + (row - rows.begin) * part * target_element;
      if (is_plain) {
        std::memcpy(to, from, static_cast<std::size_t>(part * element));
      } else {
        widen_row(slice, row, slice.cols, reinterpret_cast<float*>(to));
      }
    }
    if (part == target.cols) {
      emit(target, target_begin, staging_.data(), static_cast<std::int64_t>(staging_.size()));
      return;
    }
    for (std::int64_t row = 0; row < rows.size(); ++row) {  // joined biases: one row, beside another
      emit(target, target_begin + row * target.cols * target_element,
           staging_.data() + row * part * target_element, part * target_element);
    }
  }

  /// A head of W_UK: small enough to stage whole.
  void write_transposed(const WeightTarget& target, const WeightSlice& slice) {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::byte* source = slice.source.file->data(tensor).data();
    const std::int64_t element = bytes_of(*tensor.dtype);
    const std::int64_t target_element = bytes_of(target.dtype);
    const std::int64_t rows = slice.rows.size();
    const std::int64_t cols = slice.cols.size();
    const bool is_plain = *tensor.dtype == target.dtype;
    staging_.resize(static_cast<std::size_t>(rows * cols * target_element));
    row_.resize(static_cast<std::size_t>(cols));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::byte* from =
          source + ((slice.rows.begin + row) * tensor.cols() + slice.cols.begin) * element;
      if (!is_plain) {
        widen_row(slice, slice.rows.begin + row, slice.cols, row_.data());
        from = reinterpret_cast<const std::byte*>(row_.data());
      }
      for (std::int64_t col = 0; col < cols; ++col) {
        std::memcpy(staging_.data() + (col * rows + row) * target_element, from + col * target_element,
                    static_cast<std::size_t>(target_element));
      }
    }
    emit(target, (slice.target_row * target.cols + slice.target_col) * target_element, staging_.data(),
         static_cast<std::int64_t>(staging_.size()));
  }

  /// Columns `cols` of source row `row` as floats; fp8 times the scale of its block, found by the full
  /// tensor's indices.
  void widen_row(const WeightSlice& slice, std::int64_t row, Range cols, float* out) const {
    const TensorInfo& tensor = *slice.source.tensor;
    const std::int64_t element = bytes_of(*tensor.dtype);
    const std::byte* from =
        slice.source.file->data(tensor).data() + (row * tensor.cols() + cols.begin) * element;
    switch (*tensor.dtype) {
      case DType::f32:
        return widen<float>(from, cols.size(), out);
      case DType::f16:
        return widen<f16>(from, cols.size(), out);
      case DType::bf16:
        return widen<bf16>(from, cols.size(), out);
      case DType::fp8_e4m3:
        break;
    }
    const std::array<float, 256>& values = fp8_values();
    const TensorInfo& scale = *slice.scale.tensor;
    const std::byte* scales = slice.scale.file->data(scale).data();
    const std::int64_t block_cols = plan_.fp8_blocks.block_cols;
    const std::int64_t scale_row = row / plan_.fp8_blocks.block_rows * scale.cols();
    for (std::int64_t col = cols.begin; col < cols.end;) {
      const std::int64_t end = std::min(cols.end, (col / block_cols + 1) * block_cols);
      const float factor =
          load_float(*scale.dtype, scales + (scale_row + col / block_cols) * bytes_of(*scale.dtype));
      for (; col < end; ++col) *out++ = values[static_cast<std::size_t>(*from++)] * factor;
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
  std::vector<std::byte> staging_;
  std::vector<float> row_;
};

}  // namespace

void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress) {
  SliceStreamer(plan, sink, progress).run();
}

}  // namespace helix::decode
