// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: the row-wise operations of a layer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include <helix/cpu/backend.hpp>

#include "cpu/kv_rows.hpp"

namespace helix::cpu {
namespace {

/// Rows a task: enough work to outweigh handing it to a thread.
constexpr std::int64_t kElementsPerTask = 16384;

/// Calls body(row) for every row, shared among the threads when there are many elements.
template <class Body>
void for_each_row(ThreadPool& pool, std::int64_t rows, std::int64_t elements_a_row, const Body& body) {
  const std::int64_t rows_a_task =
      std::max<std::int64_t>(1, kElementsPerTask / std::max<std::int64_t>(1, elements_a_row));
  const auto task = [&](std::int64_t index, int) {
    const std::int64_t end = std::min(rows, (index + 1) * rows_a_task);
    for (std::int64_t row = index * rows_a_task; row < end; ++row) body(row);
  };
  pool.parallel_for((rows + rows_a_task - 1) / rows_a_task, std::ref(task));  // by reference: no allocation
}

/// Element `index` of a weight vector in its stored type.
template <class T>
float weight_at(const WeightView& weight, std::int64_t index) {
  return static_cast<float>(static_cast<const T*>(weight.data)[index]);
}

/// Mean of squares, in double: the sum of a long row keeps its low bits.
float mean_square(const float* x, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
  return static_cast<float>(sum / static_cast<double>(count));
}

/// out = x / rms(x) * weight; out may be x.
template <class T>
void normalize_row(const float* x, const WeightView& weight, float epsilon, float* out, std::int64_t count) {
  const float scale = 1.0f / std::sqrt(mean_square(x, count) + epsilon);
  for (std::int64_t i = 0; i < count; ++i) out[i] = x[i] * scale * weight_at<T>(weight, i);
}

/// Calls body.operator()<T>() for the weight's element type.
template <class Body>
void with_weight_type(const WeightView& weight, const Body& body) {
  dispatch(weight.dtype, [&]<class T>(T*) { body.template operator()<T>(); });
}

}  // namespace

void Operators::rms_norm(const RmsNormArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t width = args.residual.extent(1);
    const bool adds = args.delta.data() != nullptr;
    const bool normalizes = args.out.data() != nullptr;
    with_weight_type(args.weight, [&]<class T>() {
      for_each_row(*pool, args.residual.extent(0), width, [&](std::int64_t row) {
        float* residual = &args.residual(row, 0);
        if (adds) {
          const float* delta = &args.delta(row, 0);
          for (std::int64_t i = 0; i < width; ++i) residual[i] += delta[i];
        }
        if (normalizes) normalize_row<T>(residual, args.weight, args.epsilon, &args.out(row, 0), width);
      });
    });
  });
}

void Operators::head_rms_norm(const HeadRmsNormArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t heads = args.x.extent(1);
    const std::int64_t dim = args.x.extent(2);
    with_weight_type(args.weight, [&]<class T>() {
      for_each_row(*pool, args.x.extent(0), heads * dim, [&](std::int64_t token) {
        for (std::int64_t head = 0; head < heads; ++head) {
          float* x = &args.x(token, head, 0);
          normalize_row<T>(x, args.weight, args.epsilon, x, dim);
        }
      });
    });
  });
}

void Operators::rope(const RopeArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t heads = args.in.extent(1);
    const std::int64_t dim = args.in.extent(2);
    const std::int64_t pairs = args.rope.rotary_dim / 2;
    const std::int64_t step = args.rope.is_interleaved ? 2 : 1;
    const std::int64_t partner = args.rope.is_interleaved ? 1 : pairs;
    for_each_row(*pool, args.in.extent(0), heads * dim, [&](std::int64_t token) {
      const std::int64_t position = args.positions[token];
      for (std::int64_t head = 0; head < heads; ++head) {
        const float* in = &args.in(token, head, 0);
        float* out = &args.out(token, head, 0);
        if (in != out) std::memcpy(out, in, static_cast<std::size_t>(dim) * sizeof(float));
      }
      if (position < 0) return;  // padding
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        // The product rounds to f32 as the models were trained with it; its cosine is then exact to f32.
        const float angle = static_cast<float>(position) * args.rope.inverse_frequency[pair];
        const float cosine = std::cos(angle) * args.rope.magnitude;
        const float sine = std::sin(angle) * args.rope.magnitude;
        for (std::int64_t head = 0; head < heads; ++head) {
          float* a = &args.out(token, head, pair * step);
          float* b = a + partner;
          const float x = *a;
          const float y = *b;
          *a = x * cosine - y * sine;
          *b = y * cosine + x * sine;
        }
      }
    });
  });
}

void Operators::append_kv(const AppendKvArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const KvView& kv = args.kv;
    dispatch(kv.dtype, [&]<class T>(T*) {
      const KvRows<T> rows(kv);
      const std::int64_t sequences = args.batch.num_sequences();
      for_each_row(*pool, sequences, kElementsPerTask, [&](std::int64_t b) {
        const std::int32_t slot = args.batch.sequence_slots[b];
        for (std::int64_t token = args.batch.query_offsets[b]; token < args.batch.query_offsets[b + 1];
             ++token) {
          const std::int64_t position = args.batch.positions[token];
          if (position < 0 || kv.layout.owner(position) != kv.kvp_rank) continue;
          const std::int64_t local = kv.layout.local(position);
          for (std::int64_t head = 0; head < kv.num_heads; ++head) {
            store_row(&args.k(token, head, 0), rows.k(slot, local, head), kv.head_dim,
                      scale_of(kv.k_scale, head));
            if (kv.is_mla) continue;
            store_row(&args.v(token, head, 0), rows.v(slot, local, head), kv.value_dim,
                      scale_of(kv.v_scale, head));
          }
        }
      });
    });
  });
}

void Operators::swiglu(const SwigluArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t width = args.out.extent(1);
    for_each_row(*pool, args.out.extent(0), width, [&](std::int64_t row) {
      const float* gate = &args.gate_up(row, 0);
      const float* up = gate + width;
      float* out = &args.out(row, 0);
      for (std::int64_t i = 0; i < width; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    });
  });
}

void Operators::embed(const EmbedArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t width = args.out.extent(1);
    with_weight_type(args.table, [&]<class T>() {
      for_each_row(*pool, args.out.extent(0), width, [&](std::int64_t token) {
        float* out = &args.out(token, 0);
        const std::int64_t row = args.ids[token] - args.first_id;
        if (row < 0 || row >= args.table.rows) {
          std::fill_n(out, width, 0.0f);
          return;
        }
        for (std::int64_t i = 0; i < width; ++i) out[i] = weight_at<T>(args.table, row * width + i);
      });
    });
  });
}

void Operators::gather_rows(const GatherRowsArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t width = args.out.extent(1);
    for_each_row(*pool, args.out.extent(0), width, [&](std::int64_t row) {
      std::memcpy(&args.out(row, 0), &args.in(args.rows[row], 0),
                  static_cast<std::size_t>(width) * sizeof(float));
    });
  });
}

}  // namespace helix::cpu
