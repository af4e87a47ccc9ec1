// SPDX-License-Identifier: Apache-2.0
// Which kernel, in what order the activations, how many weight rows a task, and how they are read.
#include "cpu/linear/product.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "cpu/amx.hpp"
#include "cpu/linear/task.hpp"
#include "cpu/tuner.hpp"

namespace helix::cpu {

bool has_bf16_products() noexcept {
  return linear::has_bf16_dots() || amx::available();
}

namespace linear {
namespace {

constexpr std::size_t kAlignBytes = 64;
/// Below, handing the rows over to threads takes longer than packing them.
constexpr std::int64_t kSharedPackElements = 65536;
/// Rows up to which memory sets the pace, and the way of reading matters.
constexpr std::int64_t kFewRows = 2 * kBlockRows;
/// Weights that are read often enough to be timed, and do not stay in a cache.
constexpr std::int64_t kTunedBytes = std::int64_t{2} << 20;

constexpr Reading kVectorReadings[] = {Reading::ahead, Reading::plain, Reading::near};
constexpr Reading kDotReadings[] = {Reading::ahead, Reading::ahead_pairs, Reading::plain};
constexpr Reading kRowReadings[] = {Reading::rows2, Reading::rows4, Reading::ahead, Reading::plain};

/// By stored type and class of rows: 1, 2, up to 4, up to 8.
Tuner g_vector_tuners[4][4] = {{{"linear.f32.rows1", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.f32.rows2", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.f32.rows4", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.f32.rows8", {"ahead", "plain", "near"}, kTunedBytes}},
                               {{"linear.f16.rows1", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.f16.rows2", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.f16.rows4", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.f16.rows8", {"ahead", "plain", "near"}, kTunedBytes}},
                               {{"linear.bf16.rows1", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.bf16.rows2", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.bf16.rows4", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.bf16.rows8", {"ahead", "plain", "near"}, kTunedBytes}},
                               {{"linear.fp8.rows1", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.fp8.rows2", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.fp8.rows4", {"ahead", "plain", "near"}, kTunedBytes},
                                {"linear.fp8.rows8", {"ahead", "plain", "near"}, kTunedBytes}}};
Tuner g_dot_tuners[4] = {{"linear.bf16_dots.rows1", {"rows2", "rows4", "ahead", "plain"}, kTunedBytes},
                         {"linear.bf16_dots.rows2", {"ahead", "ahead_pairs", "plain"}, kTunedBytes},
                         {"linear.bf16_dots.rows4", {"ahead", "ahead_pairs", "plain"}, kTunedBytes},
                         {"linear.bf16_dots.rows8", {"ahead", "ahead_pairs", "plain"}, kTunedBytes}};

std::size_t type_index(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0;
    case DType::f16:
      return 1;
    case DType::bf16:
      return 2;
    case DType::fp8_e4m3:
      break;
  }
  return 3;
}

std::size_t rows_class(std::int64_t num_rows) {
  return num_rows == 1 ? 0 : num_rows == 2 ? 1 : num_rows <= kBlockRows ? 2 : 3;
}

Kernel kernel_for(DType weight, std::int64_t num_rows, ProductInputs inputs) {
  if (weight != DType::bf16) return Kernel::vectors;
  if (num_rows >= amx::kMinRows && amx::available()) return Kernel::tiles;
  return inputs == ProductInputs::bf16 && has_bf16_dots() ? Kernel::bf16_dots : Kernel::vectors;
}

/// Weight rows of a task: enough that threads seldom meet, few enough to share out. `share`: those of a
/// thread, over all products.
std::int64_t task_weight_rows(Kernel kernel, std::int64_t num_rows, std::int64_t share) {
  if (kernel == Kernel::tiles) {
    // Further activation rows read the weights of a chunk again: then these stay in L2.
    const std::int64_t largest = num_rows <= amx::kRows ? 1024 : 256;
    return std::clamp(share / 2 / amx::kMaxRows * amx::kMaxRows, std::int64_t{64}, largest);
  }
  constexpr std::int64_t kUnit = 48;  // whole groups of any kernel
  return std::clamp(share / 4 / kUnit * kUnit, kUnit, 5 * kUnit);
}

/// Memory of the calling thread, kept for its next products.
class Scratch {
 public:
  std::byte* take(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignBytes})));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept {
      ::operator delete (memory, std::align_val_t{kAlignBytes});
    }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

/// The products of one call, their activations in order.
class Batch {
 public:
  Batch(ThreadPool& pool, ProductInputs inputs, std::int64_t count, const void* product_of,
        Product (*call)(const void*, std::int64_t))
      : pool_(pool), inputs_(inputs), count_(count), product_of_(product_of), call_(call) {
    thread_local Scratch kept_rows;
    thread_local std::vector<std::int64_t> kept_places;
    first_row_ = &kept_places;
    first_row_->assign(static_cast<std::size_t>(count + 1), 0);
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const Product product = at(i);
      (*first_row_)[static_cast<std::size_t>(i)] = rows;
      rows += packed_rows(product.num_rows);
      most_rows_ = std::max(most_rows_, product.num_rows);
      weight_rows_ = std::max(weight_rows_, product.weight.rows);
      weight_bytes_ += product.weight.rows * product.weight.cols *
                       static_cast<std::int64_t>(size_bytes(product.weight.dtype));
      cols_ = std::max(cols_, product.weight.cols);
      needs_rounding_ |= is_rounded(product) && kernel_of(product) != Kernel::bf16_dots;
    }
    first_row_->back() = rows;
    row_bytes_ = static_cast<std::size_t>(packed_cols(cols_)) * sizeof(float);
    const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes_;
    packed_ = kept_rows.take(needs_rounding_ ? 2 * bytes : bytes);
    rounded_ = packed_ + bytes;
  }

  void run() {
    if (cols_ > 0) pack();
    const std::int64_t share = weight_rows_ * count_ / pool_.num_threads();
    const DType dtype = at(0).weight.dtype;
    const Kernel kernel = kernel_for(dtype, most_rows_, inputs_);
    const std::int64_t task_rows = task_weight_rows(kernel, most_rows_, share);
    if (kernel == Kernel::tiles || most_rows_ > kFewRows) return multiply(task_rows, Reading::plain);
    const std::size_t rows = rows_class(most_rows_);
    if (kernel == Kernel::bf16_dots) {
      const Tuner::Call call(g_dot_tuners[rows], weight_bytes_);
      multiply(task_rows, (rows == 0 ? kRowReadings : kDotReadings)[call.variant()]);
    } else {
      const Tuner::Call call(g_vector_tuners[type_index(dtype)][rows], weight_bytes_);
      multiply(task_rows, kVectorReadings[call.variant()]);
    }
  }

 private:
  Product at(std::int64_t i) const { return call_(product_of_, i); }
  Kernel kernel_of(const Product& product) const {
    return kernel_for(product.weight.dtype, product.num_rows, inputs_);
  }
  bool is_rounded(const Product& product) const {
    return inputs_ == ProductInputs::bf16 && product.weight.dtype == DType::bf16;
  }

  std::byte* place(std::byte* memory, std::int64_t i, std::int64_t row) const {
    const auto at_row = static_cast<std::size_t>((*first_row_)[static_cast<std::size_t>(i)] + row);
    return memory + at_row * row_bytes_;
  }

  void pack() {
    const std::int64_t blocks = (first_row_->back() + kBlockRows - 1) / kBlockRows;
    if (count_ == 1 && blocks * kBlockRows * cols_ >= kSharedPackElements) {
      pool_.parallel_for(blocks, [&](std::int64_t block, int) { pack_block(0, block * kBlockRows); });
    } else if (count_ > 1 && first_row_->back() * cols_ >= kSharedPackElements) {
      pool_.parallel_for(count_, [&](std::int64_t i, int) { pack_product(i); });
    } else {
      for (std::int64_t i = 0; i < count_; ++i) pack_product(i);
    }
  }

  void pack_product(std::int64_t i) const {
    const std::int64_t rows = at(i).num_rows;
    for (std::int64_t row = 0; row < rows; row += kBlockRows) pack_block(i, row);
  }

  /// Rows [row, row + kBlockRows) of product `i`.
  void pack_block(std::int64_t i, std::int64_t row) const {
    const Product product = at(i);
    const std::int64_t count = std::min(kBlockRows, product.num_rows - row);
    if (count <= 0) return;
    const std::int64_t cols = product.weight.cols;
    const float* in = product.in + row * product.in_stride;
    std::int64_t stride = product.in_stride;
    const Kernel kernel = kernel_of(product);
    if (kernel == Kernel::bf16_dots) {
      pack_for_bf16_dots(in, stride, count, cols, reinterpret_cast<bf16*>(packed_place(i, row, kernel)));
      return;
    }
    if (is_rounded(product)) {
      auto* to = reinterpret_cast<float*>(place(rounded_, i, row));
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t c = 0; c < cols; ++c)
          to[r * packed_cols(cols) + c] = static_cast<float>(bf16(in[r * stride + c]));
      }
      in = to;
      stride = packed_cols(cols);
    }
    if (kernel == Kernel::vectors)
      pack_for_vectors(product.weight.dtype, in, stride, count, cols,
                       reinterpret_cast<float*>(packed_place(i, row, kernel)));
  }

  /// Rows of a product lie packed one behind the other: of its own columns, and of its kernel's type.
  std::byte* packed_place(std::int64_t i, std::int64_t row, Kernel kernel) const {
    const std::size_t element = kernel == Kernel::bf16_dots ? sizeof(bf16) : sizeof(float);
    return place(packed_, i, 0) + static_cast<std::size_t>(row * packed_cols(at(i).weight.cols)) * element;
  }

  void multiply(std::int64_t task_rows, Reading reading) const {
    const std::int64_t tasks_a_product = (weight_rows_ + task_rows - 1) / task_rows;
    pool_.parallel_for(count_ * tasks_a_product, [&](std::int64_t index, int) {
      multiply_task(index / tasks_a_product, index % tasks_a_product * task_rows, task_rows, reading);
    });
  }

  /// Weight rows [first, first + rows) of product `i`, as far as there are any.
  void multiply_task(std::int64_t i, std::int64_t first, std::int64_t rows, Reading reading) const {
    const Product product = at(i);
    const WeightView& weight = product.weight;
    if (product.num_rows == 0 || first >= weight.rows) return;
    const auto element = [](const WeightView& view, std::int64_t index) {
      return static_cast<const std::byte*>(view.data) +
             index * static_cast<std::int64_t>(size_bytes(view.dtype));
    };
    Task task;
    task.kernel = kernel_of(product);
    task.reading = reading;
    task.in_stride = product.in_stride;
    if (task.kernel != Kernel::tiles) {
      task.in = packed_place(i, 0, task.kernel);
    } else if (is_rounded(product)) {
      task.in = place(rounded_, i, 0);
      task.in_stride = packed_cols(weight.cols);
    } else {
      task.in = product.in;
    }
    task.num_rows = product.num_rows;
    task.weight = element(weight, first * weight.cols);
    task.dtype = weight.dtype;
    task.cols = weight.cols;
    task.num_weight_rows = std::min(rows, weight.rows - first);
    if (!product.bias.empty()) {
      task.bias = element(product.bias, first);
      task.bias_dtype = product.bias.dtype;
    }
    task.out = product.out + first;
    task.out_stride = product.out_stride;
    task.accumulate = product.accumulate;
    linear::multiply(task);
  }

  ThreadPool& pool_;
  ProductInputs inputs_;
  std::int64_t count_;
  const void* product_of_;
  Product (*call_)(const void*, std::int64_t);
  std::vector<std::int64_t>* first_row_ = nullptr;  // of each product, among all packed rows
  std::int64_t most_rows_ = 0;
  std::int64_t weight_rows_ = 0;
  std::int64_t weight_bytes_ = 0;
  std::int64_t cols_ = 0;
  bool needs_rounding_ = false;
  std::size_t row_bytes_ = 0;
  std::byte* packed_ = nullptr;
  std::byte* rounded_ = nullptr;
};

}  // namespace

void multiply(const Task& task) {
  if (task.cols > 0) {
    switch (task.kernel) {
      case Kernel::vectors:
        multiply_vectors(task);
        break;
      case Kernel::bf16_dots:
        multiply_bf16_dots(task);
        break;
      case Kernel::tiles:
        multiply_tiles(task);
        break;
    }
  } else if (!task.accumulate) {
    // An FFN slice of no width: the kernels walk columns and would leave `out` as it was.
    for (std::int64_t r = 0; r < task.num_rows; ++r)
      std::fill_n(task.out + r * task.out_stride, task.num_weight_rows, 0.0f);
  }
  if (task.bias == nullptr) return;
  dispatch(task.bias_dtype, [&]<class T>(T*) {
    const T* bias = static_cast<const T*>(task.bias);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
      for (std::int64_t n = 0; n < task.num_weight_rows; ++n)
        task.out[r * task.out_stride + n] += static_cast<float>(bias[n]);
    }
  });
}

void Products::run(std::int64_t count, const void* product_of, Call call) const {
  if (count == 0) return;
  Batch(pool_, inputs_, count, product_of, call).run();
}

}  // namespace linear
}  // namespace helix::cpu
