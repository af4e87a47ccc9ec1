// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: the row-wise operations of a layer.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include <helix/cpu/backend.hpp>

#include "cpu/row_tasks.hpp"
#include "cpu/swiglu.hpp"

namespace helix::cpu {
namespace {

/// Element `index` of a weight vector, converted from its stored type.
template <class T>
float weight_at(const WeightView& weight, std::int64_t index) {
  return static_cast<float>(static_cast<const T*>(weight.data)[index]);
}

/// Mean of squares, in double: the sum of a long row keeps its low bits. With a single running sum every
/// addition would wait for the last.
float mean_square(const float* x, std::int64_t count) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = x[i + lane];
      lanes[static_cast<std::size_t>(lane)] += value * value;
    }
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  for (; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
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

namespace {

constexpr std::int64_t kPairsAtOnce = 64;  // cosines and sines of a token kept on the stack

/// Cosines and sines of up to kPairsAtOnce pairs at one position.
struct Rotation {
  std::array<float, kPairsAtOnce> cosine;
  std::array<float, kPairsAtOnce> sine;
  std::int64_t count = 0;
};

Rotation rotation_at(const RopeView& rope, std::int64_t position, std::int64_t first_pair) {
  Rotation rotation;
  rotation.count = std::min(kPairsAtOnce, rope.rotary_dim / 2 - first_pair);
  for (std::int64_t i = 0; i < rotation.count; ++i) {
    // The product is rounded to f32, as in the models' own code; its cosine is then exact to f32.
    const float angle = static_cast<float>(position) * rope.inverse_frequency[first_pair + i];
    const auto at = static_cast<std::size_t>(i);
    rotation.cosine[at] = std::cos(angle) * rope.magnitude;
    rotation.sine[at] = std::sin(angle) * rope.magnitude;
  }
  return rotation;
}

/// Rotates pairs (a[i * kStep], b[i * kStep]) in place.
template <std::int64_t kStep>
void rotate(const Rotation& rotation, float* a, float* b) {
  for (std::int64_t i = 0; i < rotation.count; ++i) {
    const float cosine = rotation.cosine[static_cast<std::size_t>(i)];
    const float sine = rotation.sine[static_cast<std::size_t>(i)];
    const float x = a[i * kStep];
    const float y = b[i * kStep];
    a[i * kStep] = x * cosine - y * sine;
    b[i * kStep] = y * cosine + x * sine;
  }
}

}  // namespace

void Operators::rope(const RopeArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t heads = args.in.extent(1);
    const std::int64_t dim = args.in.extent(2);
    const std::int64_t pairs = args.rope.rotary_dim / 2;
    for_each_row(*pool, args.in.extent(0), heads * dim, [&](std::int64_t token) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const float* in = &args.in(token, head, 0);
        float* out = &args.out(token, head, 0);
        if (in != out) std::memcpy(out, in, static_cast<std::size_t>(dim) * sizeof(float));
      }
      const std::int64_t position = pairs > 0 ? args.positions[token] : -1;
      if (position < 0) return;  // padding
      for (std::int64_t pair = 0; pair < pairs; pair += kPairsAtOnce) {
        const Rotation rotation = rotation_at(args.rope, position, pair);
        for (std::int64_t head = 0; head < heads; ++head) {
          float* x = &args.out(token, head, 0);
          if (args.rope.is_interleaved) {
            rotate<2>(rotation, x + 2 * pair, x + 2 * pair + 1);
          } else {
            rotate<1>(rotation, x + pair, x + pairs + pair);
          }
        }
      }
    });
  });
}

void Operators::swiglu(const SwigluArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const std::int64_t width = args.out.extent(1);
    for_each_row(*pool, args.out.extent(0), width, [&](std::int64_t row) {
      const float* gate = &args.gate_up(row, 0);
      swiglu_row(gate, gate + width, &args.out(row, 0), width);
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
      HELIX_EXPECTS(args.rows[row] >= 0 && args.rows[row] < args.in.extent(0), ErrorCode::invalid_argument,
                    "gather_rows: rows[", row, "] is ", args.rows[row], "; the input has rows [0, ",
                    args.in.extent(0), ")");
      std::memcpy(&args.out(row, 0), &args.in(args.rows[row], 0),
                  static_cast<std::size_t>(width) * sizeof(float));
    });
  });
}

void Operators::advance(const AdvanceArgs& args, Stream stream) const {
  stream.enqueue([args] {
    for (std::int64_t i = 0; i < args.count; ++i) args.values[i] += args.values[i] >= 0 ? 1 : 0;
  });
}

}  // namespace helix::cpu
