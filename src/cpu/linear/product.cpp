// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel, packs activations, and divides weight rows into tasks.
#include "cpu/linear/product.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <vector>

#include <helix/integers.hpp>

#include "cpu/amx.hpp"
#include "cpu/linear/readings.hpp"
#include "cpu/linear/task.hpp"

namespace helix::cpu {

bool has_bf16_products() noexcept {
  return linear::has_bf16_dots() || amx::available();
}

namespace linear {
namespace {

/// With fewer elements, handing rows to threads takes longer than packing them.
constexpr std::int64_t kSharedPackElements = 65536;
/// Most threads that have tasks of their own; further threads take what these leave.
constexpr std::int64_t kMaxShares = 64;

Kernel kernel_for(DType weight, std::int64_t num_rows, ProductInputs inputs) {
  if (weight != DType::bf16) return Kernel::vectors;
  if (num_rows >= amx::kMinRows && amx::available())
    return inputs == ProductInputs::bf16 ? Kernel::bf16_tiles : Kernel::tiles;
  return inputs == ProductInputs::bf16 && has_bf16_dots() ? Kernel::bf16_dots : Kernel::vectors;
}

/// Weight rows per task: enough that threads seldom contend, few enough to divide evenly. `share`: weight
/// rows per thread, over all products.
std::int64_t task_weight_rows(Kernel kernel, std::int64_t num_rows, std::int64_t share) {
  if (kernel == Kernel::tiles || kernel == Kernel::bf16_tiles) {
    // More activation rows read a chunk's weights again, so these must stay in L2.
    const std::int64_t largest = num_rows <= amx::kRows ? 1024 : 256;
    return std::clamp(share / 2 / amx::kMaxRows * amx::kMaxRows, std::int64_t{64}, largest);
  }
  constexpr std::int64_t kUnit = 48;  // a multiple of every kernel's group
  return std::clamp(share / 4 / kUnit * kUnit, kUnit, 5 * kUnit);
}

/// The products of one call, with packed activations. Consecutive products of the same activations (as for
/// all heads of a latent) share one packed copy.
class Batch {
 public:
  Batch(ThreadPool& pool, ProductInputs inputs, std::int64_t count, const void* product_of,
        Product (*call)(const void*, std::int64_t))
      : pool_(pool), inputs_(inputs), count_(count), product_of_(product_of), call_(call) {
    thread_local Buffer kept_rows;
    thread_local std::vector<std::int64_t> kept_places;
    first_row_ = &kept_places;
    first_row_->assign(static_cast<std::size_t>(count + 1), 0);
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const Product product = at(i);
      if (has_rows_of_last(i)) {
        (*first_row_)[static_cast<std::size_t>(i)] = (*first_row_)[static_cast<std::size_t>(i - 1)];
      } else {
        (*first_row_)[static_cast<std::size_t>(i)] = rows;
        rows += rows_of_place(product);
        ++num_places_;
      }
      most_rows_ = std::max(most_rows_, product.num_rows);
      weight_rows_ = std::max(weight_rows_, product.weight.rows);
      weight_bytes_ += product.weight.rows * product.weight.cols *
                       static_cast<std::int64_t>(size_bytes(product.weight.dtype));
      cols_ = std::max(cols_, product.weight.cols);
      needs_rounding_ |= is_rounded(product) && !takes_packed_bf16(kernel_of(product));
    }
    first_row_->back() = rows;
    row_bytes_ = static_cast<std::size_t>(packed_cols(cols_)) * sizeof(float);
    const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes_;
    const std::size_t needed = needs_rounding_ ? 2 * bytes : bytes;
    if (kept_rows.size_bytes() < needed) kept_rows = Buffer(needed);
    packed_ = kept_rows.data();
    rounded_ = packed_ + bytes;
  }

  void run() {
    if (cols_ > 0) pack();
    const std::int64_t share = weight_rows_ * count_ / pool_.num_threads();
    const DType dtype = at(0).weight.dtype;
    const Kernel kernel = kernel_for(dtype, most_rows_, inputs_);
    const std::int64_t task_rows = task_weight_rows(kernel, most_rows_, share);
    const ChosenReading reading(kernel, dtype, most_rows_, weight_bytes_);
    multiply(task_rows, reading.value());
  }

 private:
  Product at(std::int64_t i) const { return call_(product_of_, i); }
  /// Whether product `i` has the same activations as the one before it, packed the same way.
  bool has_rows_of_last(std::int64_t i) const {
    if (i == 0) return false;
    const Product product = at(i);
    const Product last = at(i - 1);
    return product.in == last.in && product.in_stride == last.in_stride &&
           product.num_rows == last.num_rows && product.weight.cols == last.weight.cols &&
           product.weight.dtype == last.weight.dtype;
  }
  Kernel kernel_of(const Product& product) const {
    return kernel_for(product.weight.dtype, product.num_rows, inputs_);
  }
  bool is_rounded(const Product& product) const {
    return inputs_ == ProductInputs::bf16 && product.weight.dtype == DType::bf16;
  }

  static bool is_tiled(Kernel kernel) { return kernel == Kernel::tiles || kernel == Kernel::bf16_tiles; }
  /// Bytes per column of kTileRows packed rows.
  static std::int64_t tile_bytes(Kernel kernel) {
    return kernel == Kernel::tiles ? kTileBytes : kTileRows * static_cast<std::int64_t>(sizeof(bf16));
  }
  static bool takes_packed_bf16(Kernel kernel) {
    return kernel == Kernel::bf16_dots || kernel == Kernel::bf16_tiles;
  }
  /// Number of f32 rows that a product's packed activations occupy.
  std::int64_t rows_of_place(const Product& product) const {
    const Kernel kernel = kernel_of(product);
    if (!is_tiled(kernel)) return packed_rows(product.num_rows);
    const std::int64_t blocks = ceil_div(product.num_rows, kTileRows);
    return blocks * tile_bytes(kernel) / static_cast<std::int64_t>(sizeof(float));
  }
  /// Activation rows that are packed together.
  std::int64_t rows_of_block(const Product& product) const {
    return is_tiled(kernel_of(product)) ? kTileRows : kBlockRows;
  }

  std::byte* place(std::byte* memory, std::int64_t i, std::int64_t row) const {
    const auto at_row = static_cast<std::size_t>((*first_row_)[static_cast<std::size_t>(i)] + row);
    return memory + at_row * row_bytes_;
  }

  void pack() {
    const std::int64_t block_rows = rows_of_block(at(0));
    const std::int64_t blocks = ceil_div(at(0).num_rows, block_rows);
    if (num_places_ == 1 && blocks * block_rows * cols_ >= kSharedPackElements) {
      pool_.parallel_for(blocks, [&](std::int64_t block, int) { pack_block(0, block * block_rows); });
    } else if (num_places_ > 1 && first_row_->back() * cols_ >= kSharedPackElements) {
      pool_.parallel_for(count_, [&](std::int64_t i, int) { pack_product(i); });
    } else {
      for (std::int64_t i = 0; i < count_; ++i) pack_product(i);
    }
  }

  void pack_product(std::int64_t i) const {
    if (has_rows_of_last(i)) return;
    const Product product = at(i);
    const std::int64_t rows = rows_of_block(product);
    for (std::int64_t row = 0; row < product.num_rows; row += rows) pack_block(i, row);
  }

  /// Packs a block of product `i`'s rows, starting at `row`.
  void pack_block(std::int64_t i, std::int64_t row) const {
    const Product product = at(i);
    const std::int64_t count = std::min(rows_of_block(product), product.num_rows - row);
    const std::int64_t cols = product.weight.cols;
    const float* in = product.in + row * product.in_stride;
    std::int64_t stride = product.in_stride;
    const Kernel kernel = kernel_of(product);
    if (kernel != Kernel::vectors) {
      const auto pack = kernel == Kernel::tiles        ? pack_for_tiles
                        : kernel == Kernel::bf16_tiles ? pack_for_bf16_tiles
                                                       : pack_for_bf16_dots;
      return pack(in, stride, count, cols, reinterpret_cast<bf16*>(packed_place(i, row, kernel)));
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
    pack_for_vectors(product.weight.dtype, in, stride, count, cols,
                     reinterpret_cast<float*>(packed_place(i, row, kernel)));
  }

  /// Where row `row` is packed. A product's rows are contiguous, with its own columns and its kernel's type.
  std::byte* packed_place(std::int64_t i, std::int64_t row, Kernel kernel) const {
    const std::int64_t cols = packed_cols(at(i).weight.cols);
    const auto element = static_cast<std::int64_t>(takes_packed_bf16(kernel) ? sizeof(bf16) : sizeof(float));
    const std::int64_t bytes =
        is_tiled(kernel) ? row / kTileRows * cols * tile_bytes(kernel) : row * cols * element;
    return place(packed_, i, 0) + bytes;
  }

  /// A thread's tasks are contiguous in memory, so that the end of one prefetches the beginning of the next.
  /// Threads that are done take tasks that others have left.
  void multiply(std::int64_t task_rows, Reading reading) const {
    struct alignas(64) Share {
      std::atomic<std::int64_t> next{0};
    };
    const std::int64_t tasks_a_product = ceil_div(weight_rows_, task_rows);
    const std::int64_t tasks = count_ * tasks_a_product;
    const std::int64_t num_threads = std::min<std::int64_t>(tasks, pool_.num_threads());
    const std::int64_t num_shares = std::min(num_threads, kMaxShares);
    std::array<Share, static_cast<std::size_t>(kMaxShares)> shares;
    const auto begin_of = [&](std::int64_t share) { return tasks * share / num_shares; };
    pool_.parallel_for(num_threads, [&](std::int64_t own, int) {
      for (std::int64_t i = 0; i < num_shares; ++i) {
        const std::int64_t share = (own + i) % num_shares;
        const std::int64_t end = begin_of(share + 1);
        for (;;) {
          const std::int64_t task = begin_of(share) + shares[static_cast<std::size_t>(share)].next.fetch_add(
                                                          1, std::memory_order_relaxed);
          if (task >= end) break;
          multiply_task(task / tasks_a_product, task % tasks_a_product * task_rows, task_rows, reading,
                        task + 1 < end);
        }
      }
    });
  }

  /// Multiplies weight rows [first, first + rows) of product `i`, as far as they exist. `goes_on`: whether
  /// the thread will probably take the next ones.
  void multiply_task(std::int64_t i, std::int64_t first, std::int64_t rows, Reading reading,
                     bool goes_on) const {
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
    task.in = packed_place(i, 0, task.kernel);
    task.num_rows = product.num_rows;
    task.weight = element(weight, first * weight.cols);
    task.dtype = weight.dtype;
    task.cols = weight.cols;
    task.num_weight_rows = std::min(rows, weight.rows - first);
    task.goes_on = goes_on && first + rows < weight.rows;
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
  std::vector<std::int64_t>* first_row_ = nullptr;  // per product, its first row among all packed rows
  std::int64_t most_rows_ = 0;
  std::int64_t num_places_ = 0;
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
      case Kernel::bf16_tiles:
        multiply_bf16_tiles(task);
        break;
    }
  } else if (!task.accumulate) {
    // An FFN slice of zero width: the kernels loop over columns and would not write `out`.
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
