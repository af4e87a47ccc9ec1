// SPDX-License-Identifier: Apache-2.0
// LayerBackend: norms, products, rope and experts, the operations of a layer besides exchange and attention.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <helix/backend/attention.hpp>
#include <helix/backend/batch.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

/// A weight matrix [rows, cols] as a checkpoint stores it: row-major, one row an output feature.
struct WeightView {
  /// Device memory, like all that views and arguments point to, except what is named _host and lists of
  /// experts. At a multiple of the element's size.
  const void* data = nullptr;
  DType dtype = DType::f32;  ///< Element type: f32, f16 or bf16.
  std::int64_t rows = 0;     ///< Output features.
  std::int64_t cols = 0;     ///< Input features.

  bool empty() const { return data == nullptr; }
};

/// Rotary embedding of one model. The angle of pair i at position p is float(p) * inverse_frequency[i],
/// rounded to f32, as the models' own code has it: off by up to 2^-24 of the angle, or twice that beyond
/// position 2^24, from where on neighbouring positions may share an angle. Keys that another engine stores
/// must follow the same rule.
struct RopeView {
  /// [rotary_dim / 2], device memory, with llama3, linear or yarn scaling applied.
  const float* inverse_frequency = nullptr;
  std::int64_t rotary_dim = 0;  ///< Columns of a head that are rotated, even; 0: none.
  bool is_interleaved = false;  ///< Pairs (2i, 2i+1) as DeepSeek stores them, else (i, i + rotary_dim/2).
  float magnitude = 1.0f;       ///< Factor on cos and sin (yarn).
};

namespace detail {

/// Throws Error(invalid_argument) unless the weight is absent, or of a type that backends multiply and at a
/// multiple of its size.
inline void check_weight_data(std::string_view operation, std::string_view name, const WeightView& weight) {
  HELIX_EXPECTS(weight.empty() || is_arithmetic(weight.dtype), ErrorCode::invalid_argument, operation, ": ",
                name, " is ", to_string(weight.dtype),
                "; weights are f32, f16 or bf16: convert them when loading");
  const std::size_t bytes = weight.empty() ? 1 : size_bytes(weight.dtype);
  HELIX_EXPECTS(reinterpret_cast<std::uintptr_t>(weight.data) % bytes == 0, ErrorCode::invalid_argument,
                operation, ": ", name, " is at ", weight.data, ", which is no multiple of the ", bytes,
                " bytes of its ", to_string(weight.dtype), ": copy it to aligned memory when loading");
}

/// Throws Error(invalid_argument) unless rope rotates an even number of a head's `dim` columns, with given
/// frequencies and a finite magnitude.
inline void check_rope(std::string_view operation, const RopeView& rope, std::int64_t dim) {
  HELIX_EXPECTS(rope.rotary_dim >= 0 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= dim,
                ErrorCode::invalid_argument, operation, ": rotary_dim is ", rope.rotary_dim,
                "; it must be even and in [0, ", dim, "]");
  check_given(operation, "rope.inverse_frequency", rope.inverse_frequency, rope.rotary_dim);
  HELIX_EXPECTS(is_finite(rope.magnitude), ErrorCode::invalid_argument, operation, ": rope.magnitude is ",
                rope.magnitude, "; it must be finite");
}

/// Throws Error(invalid_argument) unless the epsilon of a norm (called `name`) is finite and at least 0.
inline void check_epsilon(std::string_view operation, std::string_view name, float epsilon) {
  HELIX_EXPECTS(is_finite(epsilon) && epsilon >= 0.0f, ErrorCode::invalid_argument, operation, ": ", name,
                " is ", epsilon, "; it must be finite and at least 0");
}

}  // namespace detail

// `T` is the activation type (f32 on the CPU). The comment of each field gives its shape. Tensors must not
// alias unless a comment allows it.

/// Arguments of rms_norm(): out = residual' / rms(residual') * weight, where residual' = residual + delta is
/// written back to residual. Rows of all tensors may be strided; last strides are 1.
template <class T>
struct RmsNormArgs {
  TensorView<const T, 2> delta{};  ///< [rows, M] or empty: nothing is added.
  TensorView<T, 2> residual;       ///< [rows, M], read; written when delta is given.
  WeightView weight;               ///< [1, M].
  /// [rows, M]; may alias residual if delta is empty. Empty: only the addition is done.
  TensorView<T, 2> out;
  float epsilon = 1e-5f;
};

/// Arguments of linear(): out[r, n] = sum_k in[r, k] * weight[n, k] (+ bias[n]) (+ out[r, n] when
/// accumulate).
template <class T>
struct LinearArgs {
  TensorView<const T, 2> in;  ///< [rows, K], rows may be strided.
  WeightView weight;          ///< [N, K].
  WeightView bias{};          ///< [1, N] or empty.
  TensorView<T, 2> out;       ///< [rows, N], rows may be strided.
  bool accumulate = false;
};

/// Arguments of head_linear(), a product for each head: out[t, h, n] = sum_k in[t, h, k] * weight[h, n, k].
/// It applies MLA's W_UK and W_UV.
template <class T>
struct HeadLinearArgs {
  TensorView<const T, 3> in;  ///< [tokens, H, K], any strides with the last one 1.
  WeightView weight;          ///< [H * N, K].
  TensorView<T, 3> out;       ///< [tokens, H, N], any strides with the last one 1.
};

/// Arguments of head_rms_norm(): x / rms(x) * weight of each head, in place (the q/k norm of some models).
template <class T>
struct HeadRmsNormArgs {
  TensorView<T, 3> x;  ///< [tokens, H, D], last stride 1, in place.
  WeightView weight;   ///< [1, D].
  float epsilon = 1e-5f;
};

/// Arguments of rope(): out = `in` with the first rotary_dim elements of each head rotated and the rest
/// copied. Tokens at a position below 0 are copied.
template <class T>
struct RopeArgs {
  TensorView<const T, 3> in;  ///< [tokens, H, >= rotary_dim], last stride 1; heads may share one row.
  TensorView<T, 3> out;       ///< Shape of `in`; may be the same memory.
  const std::int64_t* positions = nullptr;  ///< [tokens]; not read with rotary_dim 0.
  RopeView rope{};
};

/// Arguments of prepare_qkv(): norm of q and k, rope on both, and the append of owned k and v, in one
/// operation. A backend may have prepare_qkv(args, stream); otherwise prepare_qkv() of prepare_qkv.hpp calls
/// the three.
template <class T>
struct PrepareQkvArgs {
  TensorView<T, 3> q;        ///< [tokens, Hq/TPA, D], last stride 1, in place.
  TensorView<T, 3> k;        ///< [tokens, Hkv/TPA, D], last stride 1, in place.
  TensorView<const T, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1.
  WeightView q_norm{};       ///< [1, D] or empty: no norm.
  WeightView k_norm{};       ///< [1, D] or empty: no norm.
  float epsilon = 1e-5f;     ///< The epsilon of both norms.
  RopeView rope;
  Batch batch;
  KvView kv;
};

/// Arguments of prepare_latent(): norm of latents, rope on the latents and on their queries, and the append
/// of owned latents, in one operation. A backend may have prepare_latent(args, stream); otherwise
/// prepare_latent() of prepare_latent.hpp calls the four.
template <class T>
struct PrepareLatentArgs {
  TensorView<T, 3> latents;     ///< [tokens, 1, kv_lora + rope], last stride 1, in place.
  WeightView norm;              ///< [1, kv_lora], norm of the first kv_lora columns.
  float epsilon = 1e-5f;        ///< Epsilon of the norm.
  TensorView<const T, 3> q_in;  ///< [tokens, Hq, rope], last stride 1: the queries' rope columns.
  TensorView<T, 3> q_out;       ///< [tokens, Hq, rope], q_in rotated; overlaps neither q_in nor the latents.
  RopeView rope;                ///< Rotation of the latents' last columns and of the queries.
  Batch batch;
  KvView kv;
};

/// Arguments of project_qkv(): linear(), then prepare_qkv() of the q, k and v that are columns of its output.
/// A backend may have project_qkv(args, stream); otherwise project_qkv() of prepare_qkv.hpp calls the two.
template <class T>
struct ProjectQkvArgs {
  LinearArgs<T> linear;  ///< The product; must not accumulate. The last strides of `in` and `out` are 1.
  /// The preparation; its tokens are the rows of linear.out, and its q, k and v are columns of it.
  PrepareQkvArgs<T> prepare;
  /// Whether the work queued just before is project_qkv of the same batch and page table, followed by
  /// attention and the rest of the layer. The backend may then read positions, slots and page lists while
  /// that work still runs.
  bool follows_layer = false;
};

/// Arguments of swiglu(): out[r, i] = silu(gate_up[r, i]) * gate_up[r, F + i].
template <class T>
struct SwigluArgs {
  TensorView<const T, 2> gate_up;  ///< [rows, 2F].
  TensorView<T, 2> out;            ///< [rows, F].
};

/// Arguments of linear_swiglu(): out = swiglu(linear(in)). A backend may have linear_swiglu(args, stream);
/// otherwise ffn_block calls the two.
template <class T>
struct LinearSwigluArgs {
  TensorView<const T, 2> in;  ///< [rows, K], rows may be strided.
  WeightView weight;          ///< [2F, K]: gate rows, then up rows.
  WeightView bias;            ///< [1, 2F] or empty.
  TensorView<T, 2> gate_up;   ///< [rows, 2F], scratch for the product before swiglu.
  TensorView<T, 2> out;       ///< [rows, F].
};

/// How router logits become scores.
enum class RouterScoring : std::uint8_t {
  softmax,  ///< DeepSeek-V2: scores are softmax(logits); the score of a group is its maximum.
  sigmoid   ///< DeepSeek-V3: scores are sigmoid(logits); the score of a group is the sum of its two best.
};

/// Arguments of router_logits(): out[t, e] = sum_k in[t, k] * weight[e, k], in f32 whatever T is. Rounded to
/// 16 bits, logits that lie close together would choose experts by their rounding. Every rank of a stage
/// routes for itself, and all must choose the same experts: the bits of out may depend only on the values of
/// `in` and `weight` and on what all ranks have alike. On GPUs that includes how addresses are aligned and
/// which streams products run on, which the engine keeps alike (docs/cuda.md, "Memory").
template <class T>
struct RouterLogitsArgs {
  TensorView<const T, 2> in;  ///< [tokens, M].
  WeightView weight;          ///< [E, M].
  TensorView<float, 2> out;   ///< [tokens, E], dense, written.
};

/// Arguments of route(), which chooses top_k different experts for each token: those with the largest score +
/// bias, the smaller id on ties. Only the choice uses `bias`; the weights are the unbiased scores. In the
/// choice a NaN, as score + bias of an expert or as score of a group, counts as -inf, so it comes last. If an
/// expert whose score is NaN is chosen all the same, its weight is NaN. The backends of this library take up
/// to kMaxRoutedExperts experts; more is Error(unsupported).
struct RouteArgs {
  TensorView<const float, 2> logits;  ///< [tokens, E].
  const float* bias = nullptr;        ///< [E] or nullptr.
  RouterScoring scoring = RouterScoring::softmax;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;  ///< Groups whose experts may be chosen; scores of the others count as -inf.
  bool normalize = false;        ///< Divide the weights by (their sum + 1e-20).
  float scale = 1.0f;            ///< Factor on the weights, after normalize.
  TensorView<std::int32_t, 2> experts;  ///< [tokens, top_k], written, best first.
  TensorView<float, 2> weights;         ///< [tokens, top_k], written.
};

namespace detail {

/// Checks what backends require of RouteArgs. Throws Error(unsupported) above kMaxRoutedExperts,
/// Error(invalid_argument) if groups are unequal or the kept groups hold too few experts.
inline void check_route(const RouteArgs& args) {
  const std::int64_t experts = args.logits.extent(1);
  const std::int64_t top_k = args.experts.extent(1);
  HELIX_EXPECTS(experts <= kMaxRoutedExperts, ErrorCode::unsupported, "route: ", experts,
                " experts; this backend is built for up to ", kMaxRoutedExperts);
  HELIX_EXPECTS(args.num_groups >= 1 && experts % args.num_groups == 0 && args.groups_kept >= 1 &&
                    args.groups_kept <= args.num_groups &&
                    top_k <= experts / args.num_groups * args.groups_kept,
                ErrorCode::invalid_argument, "route: ", top_k, " of ", experts, " experts in ",
                args.num_groups, " groups of which ", args.groups_kept,
                " are kept; groups must be equal and the kept ones hold that many experts");
}

}  // namespace detail

/// Weights of one routed expert's slice on this rank.
struct ExpertWeights {
  WeightView gate_up;  ///< [2 F/TPF, M]: gate rows, then up rows.
  WeightView down;     ///< [M, F/TPF].
};

/// Arguments of expert_ffn(): out[t] += sum over this rank's chosen experts e of weight *
/// down_e(swiglu(gate_up_e(in[t]))). A backend throws Error(unsupported) for sizes that it is not built for,
/// such as more local experts than RouteArgs allows.
template <class T>
struct ExpertFfnArgs {
  TensorView<const T, 2> in;                  ///< [tokens, M].
  TensorView<const std::int32_t, 2> experts;  ///< [tokens, top_k], global expert ids.
  TensorView<const float, 2> weights;         ///< [tokens, top_k].
  /// Experts of this EP rank, host memory. The list is read when the operation is queued or when it runs.
  std::span<const ExpertWeights> local_experts;
  std::int64_t first_expert = 0;   ///< Global id of local_experts[0].
  TensorView<T, 2> out;            ///< [tokens, M], accumulated into.
  std::span<std::byte> workspace;  ///< Scratch of expert_ffn_workspace_bytes().
};

/// A backend with all that decode_layer needs: the exchange, attention, and everything between.
template <class B>
concept LayerBackend = ExchangeBackend<B> && AttentionBackend<B> &&
    ReduceComm<typename B::Comm, typename B::Stream> &&
    requires(B& backend, typename B::Stream stream, typename B::Activation a, void* target, std::size_t bytes,
             std::int64_t n) {
  backend.fill_zero(target, bytes, stream);
  backend.rms_norm(RmsNormArgs<decltype(a)>{}, stream);
  backend.linear(LinearArgs<decltype(a)>{}, stream);
  backend.head_linear(HeadLinearArgs<decltype(a)>{}, stream);
  backend.head_rms_norm(HeadRmsNormArgs<decltype(a)>{}, stream);
  backend.rope(RopeArgs<decltype(a)>{}, stream);
  backend.swiglu(SwigluArgs<decltype(a)>{}, stream);
  backend.router_logits(RouterLogitsArgs<decltype(a)>{}, stream);
  backend.route(RouteArgs{}, stream);
  backend.expert_ffn(ExpertFfnArgs<decltype(a)>{}, stream);
  // (tokens, top_k, M, F/TPF): enough for any step of up to so many tokens.
  { backend.expert_ffn_workspace_bytes(n, n, n, n) } -> std::same_as<std::size_t>;
};

}  // namespace helix
