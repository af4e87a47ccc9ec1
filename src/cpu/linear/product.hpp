// SPDX-License-Identifier: Apache-2.0
// Whole matrix products, divided among the threads of a rank; several at once if they are alike, such as a
// layer's heads or experts.
#pragma once

#include <cstdint>

#include <helix/backend/layer.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/cpu/thread_pool.hpp>

namespace helix::cpu::linear {

/// out[r, n] = in[r] . weight[n] (+ bias[n]) (+ out[r, n]).
struct Product {
  const float* in = nullptr;  ///< [num_rows, weight.cols]
  std::int64_t in_stride = 0;
  std::int64_t num_rows = 0;
  WeightView weight;
  WeightView bias{};     ///< [1, weight.rows] or empty.
  float* out = nullptr;  ///< [num_rows, weight.rows]
  std::int64_t out_stride = 0;
  bool accumulate = false;
};

/// Computes products 0 .. count - 1, which must have equally many weight rows. The result depends neither on
/// the number of threads nor on which products are computed together. Memory for the packed activations is
/// kept for the calling thread's next call. @throws Error(capacity) if there is none.
class Products {
 public:
  Products(ThreadPool& pool, ProductInputs inputs) : pool_(pool), inputs_(inputs) {}

  /// `product_of(i)`: product i.
  template <class ProductOf>
  void multiply(std::int64_t count, const ProductOf& product_of) const {
    run(count, &product_of, [](const void* erased, std::int64_t index) {
      return (*static_cast<const ProductOf*>(erased))(index);
    });
  }

 private:
  using Call = Product (*)(const void* product_of, std::int64_t index);
  void run(std::int64_t count, const void* product_of, Call call) const;

  ThreadPool& pool_;
  ProductInputs inputs_;
};

}  // namespace helix::cpu::linear
