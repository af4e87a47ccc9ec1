// SPDX-License-Identifier: Apache-2.0
// prepare_latent on a GPU compared with its operations one after another: the same bits, and one kernel
// exactly where that is promised.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/prepare_latent.hpp>

#include "cuda/at.hpp"
#include "cuda/gpu.hpp"
#include "cuda/qkv_projection.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

struct LatentCase {
  QkvTokens tokens;
  std::int64_t heads = 16;
  std::int64_t columns = 512;
  std::int64_t rope = 64;
  std::int64_t pad = 0;    // elements between latents
  std::int64_t kvp = 1;    // number of ranks, with chunks of 3 tokens
  DType kv = DType::bf16;  // with scales if it is e4m3
  bool is_interleaved = false;
};

/// One call of prepare_latent that can be made in several ways.
template <class T>
class LatentCall {
 public:
  explicit LatentCall(const LatentCase& of) : case_(of), stream_(operators_.create_stream()) {
    const std::int64_t tokens = num_tokens();
    q_in_ = upload(values<T>(tokens * of.heads * of.rope));
    latents_ = values<T>(tokens * row());
    norm_ = upload(values<T>(of.columns));
    frequencies_ = upload(values<float>(of.rope / 2));
    scale_ = upload(std::vector<float>{0.037f});
    positions_ = upload(of.tokens.positions);
    offsets_ = upload(of.tokens.sequences);
    std::vector<std::int32_t> slots;
    std::vector<std::int32_t> pages;
    for (std::size_t slot = 0; slot + 1 < of.tokens.sequences.size(); ++slot) {
      slots.insert(slots.begin(), static_cast<std::int32_t>(slot));
      for (std::int64_t i = 0; i < kSlotPages; ++i) pages.push_back(static_cast<std::int32_t>(pages.size()));
    }
    slots_ = upload(slots);
    pages_ = upload(pages);
  }

  /// Latents, queries and pages after `queue(operators, args, stream)`; bytes that it must not write are
  /// preset.
  template <class Queue>
  std::vector<std::byte> run(const Queue& queue) {
    return with_memory([&](const PrepareLatentArgs<T>& args) { queue(operators_, args, stream_); });
  }

  /// Number of kernels that `queue` queues.
  template <class Queue>
  std::size_t count(const Queue& queue) {
    std::size_t nodes = 0;
    with_memory([&](const PrepareLatentArgs<T>& args) {
      nodes = cuda::Graph::capture(stream_, [&] { queue(operators_, args, stream_); }).num_nodes();
    });
    return nodes;
  }

 private:
  static constexpr std::int64_t kPages = 64;
  static constexpr std::int64_t kPageTokens = 4;
  static constexpr std::int64_t kSlotPages = 3;

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(case_.tokens.positions.size()); }
  std::int64_t row() const { return case_.columns + case_.rope + case_.pad; }
  KvFormat format() const {
    return KvFormat::latent(case_.kv, case_.columns + case_.rope, case_.columns, kPageTokens);
  }

  template <class Use>
  std::vector<std::byte> with_memory(const Use& use) {
    const LatentCase& c = case_;
    const std::int64_t tokens = num_tokens();
    const std::int64_t q_row = c.columns + c.rope;
    const std::size_t q_bytes = at(tokens * c.heads * q_row) * sizeof(T);
    const std::size_t latent_bytes = latents_.size() * sizeof(T);
    const std::size_t pool_at = (q_bytes + latent_bytes + 255) / 256 * 256;
    std::vector<std::byte> bytes(pool_at + at(kPages * format().page_elements() * format().element_bytes()),
                                 std::byte{0x5a});
    std::copy_n(reinterpret_cast<const std::byte*>(latents_.data()), latent_bytes, bytes.data() + q_bytes);
    std::byte* const memory = upload(bytes);
    PrepareLatentArgs<T> args;
    args.latents = {reinterpret_cast<T*>(memory + q_bytes), {tokens, 1, q_row}, {row(), q_row, 1}};
    args.norm = {norm_, kDTypeOf<T>, 1, c.columns};
    args.epsilon = 1e-6f;
    args.q_in = TensorView<const T, 3>(q_in_, {tokens, c.heads, c.rope});
    args.q_out = {
        reinterpret_cast<T*>(memory) + c.columns, {tokens, c.heads, c.rope}, {c.heads * q_row, q_row, 1}};
    args.rope = {.inverse_frequency = frequencies_,
                 .rotary_dim = c.rope,
                 .is_interleaved = c.is_interleaved,
                 .magnitude = 1.25f};
    args.batch = {c.tokens.sequences, offsets_, positions_, slots_};
    args.kv = KvView::of_pool(memory + pool_at, format(), kPages);
    args.kv.page_table = pages_;
    args.kv.max_pages = kSlotPages;
    if (c.kv == DType::fp8_e4m3) args.kv.k_scale = scale_;
    args.kv.layout = KvLayout(c.kvp, 3);
    args.kv.kvp_rank = c.kvp - 1;
    use(std::as_const(args));
    operators_.download(bytes.data(), memory, bytes.size(), stream_);
    memory_.pop_back();
    return bytes;
  }

  template <class X>
  std::vector<X> values(std::int64_t count) {
    std::vector<X> all(at(count));
    for (X& x : all) x = X(static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f);
    return all;
  }
  template <class X>
  X* upload(const std::vector<X>& from) {
    memory_.push_back(operators_.allocate(from.size() * sizeof(X)));
    operators_.upload(memory_.back().data(), from.data(), from.size() * sizeof(X), stream_);
    operators_.synchronize(stream_);
    return reinterpret_cast<X*>(memory_.back().data());
  }

  LatentCase case_;
  cuda::Operators<T> operators_;
  cuda::Stream stream_;
  std::deque<cuda::Buffer> memory_;
  std::mt19937 random_{7};
  std::vector<T> latents_;
  const T* q_in_;
  const T* norm_;
  const float* frequencies_;
  const float* scale_;
  const std::int64_t* positions_;
  const std::int32_t* offsets_;
  const std::int32_t* slots_;
  const std::int32_t* pages_;
};

/// Checks that both ways give the same bits, and that one kernel does everything if and only if `is_one`.
template <class T>
void check(const LatentCase& of, bool is_one) {
  CAPTURE(of.tokens.positions, of.tokens.sequences, of.heads, of.columns, of.rope, of.pad, of.kvp,
          to_string(of.kv), of.is_interleaved);
  const auto in_turn = [](const auto& by, const auto& args, cuda::Stream stream) {
    detail::prepare_latent_in_turn(by, args, stream);
  };
  const auto in_one = [](const auto& by, const auto& args, cuda::Stream stream) {
    by.prepare_latent(args, stream);
  };
  LatentCall<T> call(of);
  CHECK(call.run(in_one) == call.run(in_turn));
  CHECK(call.count(in_turn) == 4);
  CHECK(call.count(in_one) == (is_one ? 1 : 4));
}

}  // namespace

TEMPLATE_TEST_CASE("prepare_latent on a GPU is one kernel with the bits of four", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  std::vector<QkvTokens> steps = qkv_tokens();
  steps.push_back(qkv_tokens_beyond());
  for (const QkvTokens& tokens : steps) {
    for (const bool is_interleaved : {false, true}) {
      for (const DType kv : {kDTypeOf<TestType>, DType::fp8_e4m3, DType::fp8_ds_mla, DType::f32}) {
        LatentCase of{.tokens = tokens, .kv = kv, .is_interleaved = is_interleaved};
        check<TestType>(of, true);
        of.kvp = 2;
        of.heads = 128;
        check<TestType>(of, true);
        of.kvp = 1;
        of.heads = 1;
        of.pad = 8;
        check<TestType>(of, true);
        of.columns = 768;  // as many columns as a block has threads for, with other pairs
        of.rope = 24;
        of.heads = 19;
        check<TestType>(of, true);
      }
    }
  }
}

TEMPLATE_TEST_CASE("prepare_latent on a GPU takes what has no such kernel", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const QkvTokens tokens = qkv_tokens().back();
  check<TestType>({.tokens = tokens, .pad = 3}, false);
  check<TestType>({.tokens = tokens, .rope = 2}, false);
  check<TestType>({.tokens = tokens, .rope = 512}, false);
  check<TestType>({.tokens = tokens, .columns = 4096}, false);
}

}  // namespace helix::test
