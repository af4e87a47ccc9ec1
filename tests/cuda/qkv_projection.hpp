// SPDX-License-Identifier: Apache-2.0
// A projection of q, k and v on a GPU that can be made in several ways, which must give the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include <helix/contract/communicator/guarded_bytes.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>

#include "cuda/at.hpp"

namespace helix::test {

/// The tokens of a step: their positions, and the sequences that they belong to.
struct QkvTokens {
  std::vector<std::int64_t> positions;  // negative: padding
  std::vector<std::int32_t> sequences;  // first token of each sequence, and the end
};

/// A projection of the newest tokens of some sequences, wide enough for the fused kernel.
struct QkvCase {
  QkvTokens tokens{{7}, {0, 1}};
  std::int64_t q_heads = 8;
  std::int64_t kv_heads = 2;
  std::int64_t dim = 128;
  std::int64_t hidden = 6144;
  std::int64_t rotary = 128;
  std::int64_t pad = 0;  // elements between output rows
  std::int64_t kvp = 1;  // number of ranks, with chunks of 3 tokens
  int kvp_rank = 0;
  DType kv = DType::bf16;  // with scales if it is e4m3
  bool is_interleaved = false;
  bool is_token_major = false;
  bool has_bias = false;
  bool has_norm = false;
  bool follows_layer = false;
};

/// One to 16 tokens: of as many sequences, several of one sequence, padding, and sequences without tokens.
inline std::vector<QkvTokens> qkv_tokens() {
  return {{{7}, {0, 1}},
          {{11, 2}, {0, 1, 2}},
          {{4, 5}, {0, 2}},
          {{-1, 5}, {0, 0, 1, 1, 2, 2}},
          {{0, -1}, {0, 1, 2}},
          {{4, 5, 6, 0, 1}, {0, 3, 3, 5}},
          {{7, 3, 9, -1, 11, 2, 5, 8}, {0, 1, 2, 3, 4, 5, 6, 7, 8}},
          {{0, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3, 4, 8, 9, 10, 11}, {0, 4, 8, 12, 16}}};
}

/// More tokens than the kernel takes.
inline QkvTokens qkv_tokens_beyond() {
  return {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5}, {0, 11, 17}};
}

/// The reference for project_qkv: the product, then prepare_qkv.
inline constexpr auto qkv_in_turn = [](const auto& by, const auto& args, cuda::Stream stream) {
  by.linear(args.linear, stream);
  by.prepare_qkv(args.prepare, stream);
};

/// Equal on all ranks.
template <class T>
std::vector<T> qkv_elements(std::int64_t count, float spread) {
  std::mt19937 random(5);
  std::vector<T> values(at(count));
  for (T& x : values) x = T(spread * (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f));
  return values;
}

/// Operators, and the weights that all cases share.
template <class T>
struct QkvMachine {
  cuda::Operators<T> operators;
  cuda::Buffer weights = operators.allocate(sizeof(T) * kWeights);

  static constexpr std::int64_t kWeights = 48 * 128 * 4096;

  explicit QkvMachine(const cuda::Operators<T>& of = cuda::Operators<T>()) : operators(of) {
    const cuda::Stream stream = operators.create_stream();
    operators.upload(weights.data(), qkv_elements<T>(kWeights, 0.1f).data(), sizeof(T) * kWeights, stream);
    operators.synchronize(stream);
  }
};

template <class T>
class QkvProjection {
 public:
  static constexpr std::int64_t kPages = 64;
  static constexpr std::int64_t kPageTokens = 4;
  static constexpr std::int64_t kSlotPages = 3;

  QkvProjection(const QkvMachine<T>& machine, const QkvCase& of)
      : case_(of),
        operators_(machine.operators),
        stream_(operators_.create_stream()),
        weight_(reinterpret_cast<const T*>(machine.weights.data())) {
    const std::int64_t tokens = num_tokens();
    const std::int64_t width = (of.q_heads + 2 * of.kv_heads) * of.dim;
    contract::require(width * of.hidden <= QkvMachine<T>::kWeights, "too few weights");
    in_ = upload(qkv_elements<T>(tokens * of.hidden, 1.0f));
    bias_ = upload(qkv_elements<T>(width, 1.0f));
    norm_ = upload(qkv_elements<T>(of.dim, 1.0f));
    std::vector<float> frequencies(at(of.rotary / 2));
    for (std::size_t i = 0; i < frequencies.size(); ++i)
      frequencies[i] = 1.0f / static_cast<float>(1 + 3 * i);
    frequencies_ = upload(frequencies);
    k_scales_ = upload(std::vector<float>(at(of.kv_heads), 0.037f));
    v_scales_ = upload(std::vector<float>(at(of.kv_heads), 0.11f));
    positions_ = upload(of.tokens.positions);
    const auto sequences = static_cast<std::int32_t>(of.tokens.sequences.size()) - 1;
    std::vector<std::int32_t> slots;
    std::vector<std::int32_t> pages;
    for (std::int32_t slot = 0; slot < sequences; ++slot) {
      slots.push_back(sequences - 1 - slot);
      for (std::int64_t i = 0; i < max_pages(); ++i)
        pages.push_back(static_cast<std::int32_t>((kSlotPages * slot + i) % kPages));
    }
    contract::require(max_pages() <= kSlotPages, "two sequences share a page");
    offsets_ = upload(of.tokens.sequences);
    slots_ = upload(slots);
    pages_ = upload(pages);
  }

  /// The output rows and the pages after `queue(operators, args, stream)`; bytes that it must not write are
  /// preset.
  template <class Queue>
  std::vector<std::byte> run(const Queue& queue) {
    const std::size_t out_bytes = at(num_tokens() * row()) * sizeof(T);
    std::vector<std::byte> bytes(out_bytes + pool_bytes(), std::byte{0x5a});
    std::byte* memory = upload(bytes);
    queue(operators_, args(reinterpret_cast<T*>(memory), memory + out_bytes), stream_);
    operators_.download(bytes.data(), memory, bytes.size(), stream_);
    memory_.pop_back();
    return bytes;
  }

  /// Number of kernels that `queue` queues.
  template <class Queue>
  std::size_t count(const Queue& queue) {
    const std::size_t out_bytes = at(num_tokens() * row()) * sizeof(T);
    std::byte* memory = upload(std::vector<std::byte>(out_bytes + pool_bytes()));
    const ProjectQkvArgs<T> all = args(reinterpret_cast<T*>(memory), memory + out_bytes);
    queue(operators_, all, stream_);  // makes the library create its workspace before the capture
    const cuda::Graph graph = cuda::Graph::capture(stream_, [&] { queue(operators_, all, stream_); });
    operators_.synchronize(stream_);
    memory_.pop_back();
    return graph.num_nodes();
  }

 private:
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(case_.tokens.positions.size()); }
  std::int64_t row() const { return (case_.q_heads + 2 * case_.kv_heads) * case_.dim + case_.pad; }
  std::int64_t max_pages() const {
    const std::int64_t last = *std::max_element(case_.tokens.positions.begin(), case_.tokens.positions.end());
    return std::max<std::int64_t>(last, 0) / kPageTokens + 1;
  }
  KvFormat kv_format() const {
    return case_.is_token_major
               ? KvFormat::token_major(case_.kv, case_.kv_heads, case_.dim, case_.dim, kPageTokens)
               : KvFormat::head_major(case_.kv, case_.kv_heads, case_.dim, case_.dim, kPageTokens);
  }

  /// Size of the pool of keys, or of keys and values if they share one.
  std::size_t one_pool_bytes() const {
    return at(kPages * kv_format().page_elements() * kv_format().element_bytes());
  }
  std::size_t pool_bytes() const { return one_pool_bytes() * (case_.is_token_major ? 2 : 1); }

  ProjectQkvArgs<T> args(T* out, std::byte* pool) const {
    const QkvCase& c = case_;
    const KvFormat format = kv_format();
    const std::int64_t tokens = num_tokens();
    const auto weight_of = [](const T* data, std::int64_t rows, std::int64_t cols) {
      return WeightView{data, kDTypeOf<T>, rows, cols};
    };
    const auto heads_from = [&](std::int64_t head, std::int64_t heads) {
      return TensorView<T, 3>(out + head * c.dim, {tokens, heads, c.dim}, {row(), c.dim, 1});
    };
    const std::int64_t width = row() - c.pad;
    ProjectQkvArgs<T> args;
    args.follows_layer = c.follows_layer;
    args.linear = {.in = {in_, {tokens, c.hidden}, {c.hidden, 1}},
                   .weight = weight_of(weight_, width, c.hidden),
                   .bias = c.has_bias ? weight_of(bias_, 1, width) : WeightView{},
                   .out = {out, {tokens, width}, {row(), 1}}};
    args.prepare.q = heads_from(0, c.q_heads);
    args.prepare.k = heads_from(c.q_heads, c.kv_heads);
    args.prepare.v = heads_from(c.q_heads + c.kv_heads, c.kv_heads);
    if (c.has_norm) args.prepare.q_norm = args.prepare.k_norm = weight_of(norm_, 1, c.dim);
    args.prepare.rope = {.inverse_frequency = frequencies_,
                         .rotary_dim = c.rotary,
                         .is_interleaved = c.is_interleaved,
                         .magnitude = 1.25f};
    args.prepare.batch = {case_.tokens.sequences, offsets_, positions_, slots_};
    KvView& kv = args.prepare.kv;
    kv = KvView::of_pool(pool, format, kPages);
    if (c.is_token_major) kv.v = pool + one_pool_bytes();
    kv.page_table = pages_;
    kv.max_pages = max_pages();
    if (c.kv == DType::fp8_e4m3) {
      kv.k_scale = k_scales_;
      kv.v_scale = v_scales_;
    }
    kv.layout = KvLayout(c.kvp, 3);
    kv.kvp_rank = c.kvp_rank;
    return args;
  }

  template <class X>
  X* upload(const std::vector<X>& values) {
    memory_.push_back(operators_.allocate(values.size() * sizeof(X)));
    operators_.upload(memory_.back().data(), values.data(), values.size() * sizeof(X), stream_);
    operators_.synchronize(stream_);
    return reinterpret_cast<X*>(memory_.back().data());
  }

  QkvCase case_;
  const cuda::Operators<T>& operators_;
  cuda::Stream stream_;
  std::deque<cuda::Buffer> memory_;
  const T* weight_;
  const T* in_;
  const T* bias_;
  const T* norm_;
  const float* frequencies_;
  const float* k_scales_;
  const float* v_scales_;
  const std::int64_t* positions_;
  const std::int32_t* offsets_;
  const std::int32_t* slots_;
  const std::int32_t* pages_;
};

}  // namespace helix::test
