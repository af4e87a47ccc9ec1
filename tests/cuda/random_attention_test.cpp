// SPDX-License-Identifier: Apache-2.0
// partial_attention on a GPU of random shapes, types, pools and batches, compared with double precision.
// Finds what no other test combines: a head size with a pool, a window, a shard, a batch and a number of
// blocks. HELIX_FUZZ_SEED chooses other cases, HELIX_TEST_ROUNDS multiplies them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/attention_world.hpp"
#include "cuda/gpu.hpp"
#include "support/catch.hpp"
#include "support/rounds.hpp"

namespace helix::test {
namespace {

constexpr std::uint32_t kCases = 40;  // of each type of q

/// The seed of the first case.
std::uint32_t first_seed() {
  const char* const seed = std::getenv("HELIX_FUZZ_SEED");
  return seed == nullptr ? 1 : static_cast<std::uint32_t>(std::stoul(seed));
}

/// Random choices.
class Dice {
 public:
  explicit Dice(std::uint32_t seed) : random_(seed) {}

  /// In [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  /// In [1, high], small ones as often as large ones.
  std::int64_t up_to(std::int64_t high) {
    const double power = std::log2(static_cast<double>(high)) * static_cast<double>(random_()) / 0x1p32;
    return std::clamp(static_cast<std::int64_t>(std::exp2(power)), std::int64_t{1}, high);
  }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }
  template <class X>
  X one_of(std::initializer_list<X> values) {
    return values.begin()[between(0, static_cast<std::int64_t>(values.size()) - 1)];
  }
  template <class X>
  X one_of(const std::vector<X>& values) {
    return values[at(between(0, static_cast<std::int64_t>(values.size()) - 1))];
  }

 private:
  std::mt19937 random_;
};

void draw_latents(Dice& dice, AttentionCase& c) {
  c.kv_heads = 1;
  c.group = dice.one_of<std::int64_t>({dice.between(1, 16), 16, 32, 64, 128, dice.between(1, 144)});
  c.d = 576;
  c.dv = 512;
  if (c.is_mixed()) {
    c.pool = mixed_latent_pool;
  } else {
    c.pool = dice.one_of(latent_pool_makers());
    if (dice.one_in(8)) c.dv = dice.one_of<std::int64_t>({16, 100, 256, 512});
    if (dice.one_in(8)) c.d = c.dv + dice.one_of<std::int64_t>({8, 32, 64});
  }
}

/// Head sizes are 16 and more: the values of fewer columns may cancel to less than weights of 16 bits
/// resolve.
void draw_heads(Dice& dice, AttentionCase& c) {
  c.kv_heads = dice.one_of<std::int64_t>({1, 2, 4, 8, dice.between(1, 9)});
  c.group = dice.one_of<std::int64_t>({1, 2, 4, 8, dice.between(1, 17)});
  c.d = dice.one_of<std::int64_t>({64, 64, 80, 96, 112, 128, 128, 128, 192, 256, dice.between(16, 300)});
  c.dv = c.d == 192 ? 128 : dice.one_in(8) ? dice.between(16, c.d) : c.d;
  c.pool = dice.one_of(kv_pool_makers());
}

void draw_sequences(Dice& dice, AttentionCase& c) {
  const auto add = [&](std::int64_t length, std::int64_t queries) {
    c.sequences.push_back({length, std::min(length, queries)});
  };
  const auto draw_few = [&](std::int64_t most, std::int64_t longest, std::int64_t most_queries) {
    for (std::int64_t b = dice.between(1, most); b > 0; --b)
      add(dice.up_to(longest), dice.one_in(9) ? 0 : dice.up_to(most_queries));
  };
  c.sequences.clear();
  switch (dice.between(0, 4)) {
    case 0:  // one, long
      add(dice.up_to(20000), dice.up_to(4));
      break;
    case 1:  // drafts
      draw_few(9, 3000, 16);
      break;
    case 2:  // decoding
      draw_few(300, 300, 1);
      break;
    case 3:  // prompts
      draw_few(4, 900, 900);
      break;
    default:  // a chunk of a prompt beside decoding
      draw_few(30, 400, 1);
      add(dice.up_to(1500), dice.up_to(300));
      draw_few(30, 400, 1);
  }
}

/// Multiplications of the reference, and elements of the cache.
double work_of(const AttentionCase& c) {
  double work = 0.0;
  for (const Sequence& s : c.sequences) {
    const double rows = static_cast<double>(s.queries * c.group * c.kv_heads);
    const double elements = static_cast<double>(s.length * (c.d + c.dv));
    work += elements * (rows + static_cast<double>(c.kv_heads));
  }
  return work;
}

template <class T>
AttentionCase random_case(Dice& dice) {
  AttentionCase c;
  c.kv_dtype =
      dice.one_of({kDTypeOf<T>, kDTypeOf<T>, DType::fp8_e4m3, dice.one_of({DType::f16, DType::bf16})});
  if (dice.one_in(3)) {
    if (dice.one_in(6)) c.kv_dtype = DType::fp8_ds_mla;
    draw_latents(dice, c);
  } else {
    draw_heads(dice, c);
  }
  c.page_tokens = dice.one_of<std::int64_t>({1, 2, 4, 8, 16, 32, 64, 64, 128, 256, dice.between(1, 100)});
  c.is_csr = dice.one_in(3);
  c.kvp = dice.one_in(3) ? dice.between(2, 5) : 1;
  c.chunk = dice.up_to(100);
  c.is_scaled = !dice.one_in(4);
  c.sharpness = dice.one_of({0.3f, 1.0f, 3.0f});
  c.soft_cap = dice.one_of({0.0f, 0.0f, 0.0f, 2.0f, 30.0f, 1e6f});
  c.q_pad = dice.one_of<std::int64_t>({0, 0, 0, 8, 64, 3});
  c.q_token_pad = dice.one_of<std::int64_t>({0, 0, 0, 8, 5});
  c.out_pad = dice.one_of<std::int64_t>({0, 0, 0, 8, 4, 1});
  c.is_q_reversed = dice.one_in(8);
  c.follows_prepare = dice.one_in(3);
  constexpr double kMostWork = 4e8;
  do draw_sequences(dice, c);
  while (work_of(c) > kMostWork);
  std::int64_t longest = 0;
  std::int64_t tokens = 0;
  for (const Sequence& s : c.sequences) {
    longest = std::max(longest, s.length);
    tokens += s.queries;
  }
  if (dice.one_in(4)) {
    c.window = dice.up_to(longest + 1);
    c.forgets = dice.one_in(2);
  }
  if (tokens > 0 && dice.one_in(4)) {
    for (std::int64_t i = dice.up_to(10); i > 0; --i) c.padding.push_back(dice.between(0, tokens - 1));
  }
  return c;
}

std::string text_of(const AttentionCase& c) {
  std::ostringstream text;
  text << "kv " << to_string(c.kv_dtype) << ", " << c.kv_heads << " KV heads of " << c.group << ", D " << c.d
       << "/" << c.dv << ", latent " << c.is_latent() << ", pages of " << c.page_tokens << ", csr "
       << c.is_csr << ", kvp " << c.kvp << ", chunk " << c.chunk << ", window " << c.window << ", cap "
       << c.soft_cap << ", sharpness " << c.sharpness << ", pads " << c.q_pad << " " << c.q_token_pad << " "
       << c.out_pad << ", reversed " << c.is_q_reversed << ", ahead " << c.follows_prepare << ", padding "
       << c.padding.size() << ", sequences (length:queries)";
  for (const Sequence& s : c.sequences) text << " " << s.length << ":" << s.queries;
  return text.str();
}

}  // namespace

TEMPLATE_TEST_CASE("attention on a GPU of random shapes, pools and batches equals the reference", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  using cuda::KernelTarget;
  cuda::Operators<TestType> operators;
  const std::uint32_t first = first_seed();
  for (std::uint32_t seed = first; seed - first < kCases * num_rounds(); ++seed) {
    Dice dice(seed);
    const AttentionCase c = random_case<TestType>(dice);
    const auto target = dice.one_of({KernelTarget::this_gpu, KernelTarget::this_gpu, KernelTarget::this_gpu,
                                     KernelTarget::any_gpu, KernelTarget::least_gpu});
    const auto blocks = static_cast<int>(dice.one_in(2) ? 0 : dice.up_to(300));
    const bool shares_device = dice.one_in(4);
    operators.set_kernel_target(target);
    operators.set_attention_blocks(blocks);
    operators.set_shares_device(shares_device);
    CAPTURE(seed, text_of(c), static_cast<int>(target), blocks, shares_device);
    const AttentionWorld<TestType> world(c, seed);
    std::vector<typename AttentionWorld<TestType>::Result> results;
    for (std::int64_t rank = 0; rank < c.kvp; ++rank) results.push_back(world.run(operators, rank));
    CHECK(world.problem(results) == "");
    CHECK(world.run(operators) == results.front());
    const auto sequences = static_cast<std::int64_t>(c.sequences.size());
    const std::int64_t begin = dice.between(0, sequences - 1);
    const std::int64_t count = dice.between(0, sequences - begin);
    const std::int64_t rank = dice.between(0, c.kvp - 1);
    CAPTURE(begin, count, rank);
    CHECK(world.problem({world.run(operators, rank, begin, count)}, rank, begin, count) == "");
  }
}

}  // namespace helix::test
