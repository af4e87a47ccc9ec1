// SPDX-License-Identifier: Apache-2.0
// Properties of partial attention on a GPU with many query rows per KV head, as in prefill and draft steps,
// over KV of q's type and of e4m3, compared with a naive reference.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>

#include "cuda/at.hpp"
#include "cuda/attention_world.hpp"
#include "cuda/gpu.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test {
namespace {

// Chunks that end some query tiles and begin others, draft tokens, one token, and one sequence without query
// tokens.
const std::vector<Sequence> kChunks = {{300, 300}, {41, 2},  {700, 129}, {9, 0},
                                       {1500, 33}, {64, 64}, {70, 1}};

/// Types of KV with q of type T.
template <class T>
constexpr DType kKvTypes[] = {kDTypeOf<T>, DType::fp8_e4m3};

/// A step over e4m3 with random contents: a sequence of 64 query rows, two of one row, another of 64 rows.
/// Where few rows are launched apart, attention takes three runs of launches.
template <class T>
class MixedStep {
 public:
  static constexpr std::int64_t kDim = 64;
  static constexpr std::int64_t kPageTokens = 16;
  static constexpr std::int64_t kPages = 32;  // of a sequence
  static constexpr std::int64_t kSequences = 4;
  static constexpr std::int64_t kTokens = 130;

  explicit MixedStep(const cuda::Operators<T>& operators) : operators_(operators) {
    std::vector<std::uint8_t> pages(at(kv_.num_pages * kv_.format.page_elements()));
    for (std::uint8_t& byte : pages) byte = static_cast<std::uint8_t>(0x20 + random_() % 0x20);
    std::vector<std::int32_t> table(at(kSequences * kPages));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
    std::vector<T> q;
    for (std::int64_t i = 0; i < kTokens * kDim; ++i)
      q.push_back(T(0.01f * static_cast<float>(i % 89) - 0.4f));
    KvView kv = KvView::of_pool(upload(pages), kv_.format, kv_.num_pages).whole();
    kv.page_table = upload(table);
    kv.max_pages = kPages;
    kv_ = kv;
    q_ = upload(q);
    positions_ = upload(std::vector<std::int64_t>(at(kTokens)));
    slots_ = upload(std::vector<std::int32_t>{2, 0, 3, 1});
    device_offsets_ = upload(offsets_);
    exchanges_ = upload(std::vector<std::uint64_t>{0});
    message_ = upload(std::vector<std::uint8_t>(kHeaderBytes + kTokens * (kDim * sizeof(T) + 4)));
    const std::size_t bytes = operators_.partial_attention_workspace_bytes(kTokens, 1, kDim, kDim);
    workspace_ = {reinterpret_cast<std::byte*>(upload(std::vector<std::uint8_t>(bytes))), bytes};
  }

  /// Sets the positions for sequences of these lengths, and clears the message.
  void set(const std::vector<std::int64_t>& lengths) {
    host_positions_.clear();
    for (std::size_t b = 0; b < lengths.size(); ++b)
      for (std::int32_t t = offsets_[b]; t < offsets_[b + 1]; ++t)
        host_positions_.push_back(lengths[b] - offsets_[b + 1] + t);
    operators_.upload(positions_, host_positions_.data(), host_positions_.size() * 8, stream_);
    operators_.fill_zero(message_, kHeaderBytes + kTokens * (kDim * sizeof(T) + 4), stream_);
  }

  PartialAttentionArgs<T> args() const {
    PartialAttentionArgs<T> args;
    args.q = TensorView<const T, 3>(q_, {kTokens, 1, kDim});
    args.batch = {offsets_, device_offsets_, positions_, slots_};
    args.kv = kv_;
    args.target.lse = {reinterpret_cast<float*>(message_ + kHeaderBytes), {kTokens, 1}};
    args.target.out = {reinterpret_cast<T*>(message_ + kHeaderBytes + kTokens * 4), {kTokens, 1, kDim}};
    args.target.headers = {reinterpret_cast<std::byte*>(message_), kTokens, 5, exchanges_, positions_};
    args.scale = 0.1f;
    args.workspace = workspace_;
    return args;
  }

  /// The message: header, lse and out. Waits.
  std::vector<std::uint8_t> message() const {
    std::vector<std::uint8_t> bytes(kHeaderBytes + kTokens * (kDim * sizeof(T) + 4));
    operators_.download(bytes.data(), message_, bytes.size(), stream_);
    return bytes;
  }
  std::uint64_t exchanges() const {
    std::uint64_t count = 0;
    operators_.download(&count, exchanges_, sizeof(count), stream_);
    return count;
  }
  ExchangeHeader expected_header(std::uint64_t exchange) const {
    return {exchange_epoch(exchange, host_positions_.data(), kTokens), kTokens, 5};
  }
  const cuda::Stream& stream() const { return stream_; }

 private:
  static constexpr std::size_t kHeaderBytes = sizeof(ExchangeHeader);

  template <class X>
  X* upload(const std::vector<X>& values) {
    memory_.push_back(operators_.allocate(values.size() * sizeof(X)));
    operators_.upload(memory_.back().data(), values.data(), values.size() * sizeof(X), stream_);
    return reinterpret_cast<X*>(memory_.back().data());
  }

  const cuda::Operators<T>& operators_;
  cuda::Stream stream_ = operators_.create_stream();
  std::mt19937 random_{3};
  std::deque<cuda::Buffer> memory_;
  std::vector<std::int32_t> offsets_{0, 64, 65, 66, 130};
  std::vector<std::int64_t> host_positions_;
  KvView kv_{.format = KvFormat::head_major(DType::fp8_e4m3, 1, kDim, kDim, kPageTokens),
             .num_pages = kSequences * kPages};
  T* q_ = nullptr;
  std::int64_t* positions_ = nullptr;
  std::int32_t* slots_ = nullptr;
  std::int32_t* device_offsets_ = nullptr;
  std::uint64_t* exchanges_ = nullptr;
  std::uint8_t* message_ = nullptr;
  std::span<std::byte> workspace_;
};

}  // namespace

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows serves every grouping of heads and number of query tokens", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 96, 128, 192, 256}) {
    for (const std::int64_t group : {1, 3, 4, 8, 16, 20, 64, 150}) {
      AttentionCase c = case_of<TestType>(d);
      if (d == 192) c.dv = 128;
      c.group = group;
      c.kv_heads = group > 16 ? 1 : 2;
      CAPTURE(d, group);
      const auto check = [&](DType kv_dtype, std::int64_t rows) {
        const std::int64_t queries = (rows + group - 1) / group;
        c.sequences = {{queries, queries}, {200 + queries, queries}, {128, 1}};
        c.kv_dtype = kv_dtype;
        CAPTURE(queries, to_string(kv_dtype));
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      };
      for (const std::int64_t rows : {33, 63, 64, 65, 127, 128, 129, 260}) check(kDTypeOf<TestType>, rows);
      for (const std::int64_t rows : {64, 127, 260}) check(DType::fp8_e4m3, rows);
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows: shards combine to the whole for any chunk, page and pool", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  // Page sizes that allow boxes of 8 to 128 tokens, and some that allow none.
  constexpr std::int64_t kPages[] = {1, 8, 16, 17, 24, 48, 64, 100, 128, 256};
  constexpr std::int64_t kDims[] = {64, 128, 192, 256, 96, 80, 112};
  const auto pools = kv_pool_makers();
  std::size_t turn = 0;
  for (const std::int64_t kvp : {1, 2, 4}) {
    for (const std::int64_t chunk : {1, 3, 16, 64}) {
      for (int i = 0; i < 3; ++i, ++turn) {
        AttentionCase c = case_of<TestType>(kDims[turn % 7]);
        if (c.d == 192) c.dv = 128;
        c.page_tokens = kPages[turn % 10];
        c.pool = pools[turn % pools.size()];
        c.is_csr = turn % 4 == 1;
        c.kvp = kvp;
        c.chunk = chunk;
        c.sequences = kChunks;
        for (const DType kv_dtype : kKvTypes<TestType>) {
          c.kv_dtype = kv_dtype;
          CAPTURE(kvp, chunk, c.page_tokens, c.d, turn % pools.size(), to_string(kv_dtype));
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows honours windows and soft caps, and reads nothing before them", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t window : {0, 1, 5, 100, 1000}) {
    for (const float soft_cap : {0.0f, 0.5f, 30.0f, 1e6f}) {
      for (const std::int64_t kvp : {1, 3}) {
        AttentionCase c = case_of<TestType>(window == 5 ? 64 : window == 1 ? 256 : 128);
        c.window = window;
        c.soft_cap = soft_cap;
        c.kvp = kvp;
        c.chunk = 3;
        c.forgets = window > 0;
        c.sequences = kChunks;
        for (const DType kv_dtype : kKvTypes<TestType>) {
          c.kv_dtype = kv_dtype;
          CAPTURE(window, soft_cap, kvp, to_string(kv_dtype));
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows gives padding and empty shards an output of 0 and an lse of -inf", "",
    f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const DType kv_dtype : kKvTypes<TestType>) {
    AttentionCase c = case_of<TestType>(128);
    c.kv_dtype = kv_dtype;
    CAPTURE(to_string(kv_dtype));
    c.group = 8;
    c.kvp = 4;
    c.sequences = {{7, 7}, {20, 15}, {1, 1}, {40, 33}};
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.kvp = 2;
    c.sequences = {{100, 100}, {60, 20}};
    c.padding = {0, 4, 9, 10, 11, 12, 30, 61, 119};
    for (std::int64_t token = 64; token < 100; ++token) c.padding.push_back(token);  // whole query tiles
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.padding.clear();
    for (std::int64_t token = 0; token < 120; ++token) c.padding.push_back(token);
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.padding.clear();  // ranks without any page
    c.kvp = 4;
    c.chunk = 128;
    c.sequences = {{128, 128}, {60, 20}};
    for (const std::int64_t page_tokens : {16, 1}) {
      c.page_tokens = page_tokens;
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows deals out query tiles of any lengths", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(64);
  const auto check = [&](std::int64_t kv_heads, std::int64_t group, const std::vector<Sequence>& sequences) {
    c.kv_heads = kv_heads;
    c.group = group;
    c.sequences = sequences;
    for (const DType kv_dtype : kKvTypes<TestType>) {
      c.kv_dtype = kv_dtype;
      CAPTURE(kv_heads, group, sequences.size(), to_string(kv_dtype));
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  };
  check(1, 8, {{20000, 5}});             // split over the whole GPU
  check(2, 16, {{9000, 8}, {300, 8}});   // one long and one short sequence
  check(9, 4, {{1500, 490}});            // one wave, and a few query tiles shared by all blocks
  check(1, 64, {{900, 300}});            // more than a wave of one head
  check(2, 40, {{40, 1}, {1100, 400}});  // more query tiles than a wave
  check(1, 150, {{470, 460}, {33, 1}});  // more query tiles than one launch takes
  check(33, 4, {{64, 64}, {640, 16}});   // many heads
  // Sequences of many rows and of few in turn, four times and more often: few rows may be launched apart.
  check(2, 4, {{300, 1}, {500, 40}, {9, 1}, {64, 64}});
  check(2, 4, {{64, 64}, {300, 1}, {500, 40}, {9, 1}, {5, 0}, {80, 20}, {70, 1}});
  check(6, 8, {{20000, 40}});  // more keys than the L2 cache holds: 3 heads at a time
  // Prompts of all lengths, which are dealt out by length: whole, in passes, and with a rest in shares.
  check(3, 8, {{700, 700}, {650, 600}, {16, 16}, {1000, 900}, {120, 120}});
  check(6, 8, {{3000, 500}, {20000, 40}});
  check(1, 8, std::vector<Sequence>(19, {300, 300}));
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows gives the same result on few blocks, and the same bits twice", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = attention_operators<TestType>();
  std::vector<AttentionWorld<TestType>> worlds;
  for (const std::int64_t d : {64, 128, 256}) {
    for (const DType kv_dtype : kKvTypes<TestType>) {
      AttentionCase c = case_of<TestType>(d);
      c.kv_dtype = kv_dtype;
      c.sequences = kChunks;
      worlds.emplace_back(c);
    }
  }
  AttentionCase draft = case_of<TestType>(128);
  draft.group = 8;
  draft.sequences = {{5000, 9}, {40, 9}};
  worlds.emplace_back(draft, 7);
  draft.kv_dtype = DType::fp8_e4m3;
  worlds.emplace_back(draft, 7);
  AttentionCase passes = case_of<TestType>(64);
  passes.kv_heads = 6;
  passes.group = 8;
  passes.sequences = {{20000, 40}, {15000, 20}};
  worlds.emplace_back(passes);
  for (const int blocks : {1, 7, 0}) {
    operators.set_attention_blocks(blocks);
    CAPTURE(blocks);
    std::vector<typename AttentionWorld<TestType>::Result> results;
    for (const auto& world : worlds) {
      results.push_back(world.run(operators));
      CHECK(world.problem({results.back()}) == "");
    }
    for (std::size_t i = 0; i < worlds.size(); ++i) CHECK(worlds[i].run(operators) == results[i]);
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows takes strided queries and outputs, aligned or not", "",
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 112, 128, 256}) {
    for (const std::int64_t q_pad : {0, 8}) {
      for (const std::int64_t out_pad : {0, 8, 1}) {
        AttentionCase c = case_of<TestType>(d);
        c.q_pad = q_pad;
        c.out_pad = out_pad;
        c.sequences = {{300, 1}, {70, 35}, {33, 33}};
        for (const DType kv_dtype : kKvTypes<TestType>) {
          c.kv_dtype = kv_dtype;
          CAPTURE(d, q_pad, out_pad, to_string(kv_dtype));
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows takes queries whose last token lies first", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    AttentionCase c = case_of<TestType>(d);
    c.is_q_reversed = true;
    c.sequences = {{300, 1}, {70, 35}, {33, 33}};
    for (const DType kv_dtype : kKvTypes<TestType>) {
      c.kv_dtype = kv_dtype;
      CAPTURE(d, to_string(kv_dtype));
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows of a slice of the batch writes that slice's rows only",
                   "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(128);
  c.kvp = 2;
  c.sequences = kChunks;
  const AttentionWorld<TestType> world(c);
  for (const std::int64_t first : {0, 2, 4}) {
    CAPTURE(first);
    CHECK(world.problem({world.run(operators, 1, first, 2)}, 1, first, 2) == "");
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows and of few in turn serves every head size, shard and slice", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 96, 128, 192, 256}) {
    for (const std::int64_t group : {1, 7, 8}) {
      for (const std::int64_t kvp : {1, 3}) {
        AttentionCase c = case_of<TestType>(d);
        if (d == 192) c.dv = 128;
        c.kv_dtype = DType::fp8_e4m3;
        c.group = group;
        c.kvp = kvp;
        c.window = kvp == 1 ? 0 : 100;
        const std::int64_t many = (64 + group - 1) / group;
        const std::int64_t few = many - 1;
        c.sequences = {{9, 0}, {300, 1}, {200, few}, {500, many}, {1, 1}, {90, 0}, {300, 3 * many}, {7, 0}};
        CAPTURE(d, group, kvp);
        const AttentionWorld<TestType> world(c);
        CHECK(world.check(operators) == "");
        for (const std::int64_t first : {1, 3, 5}) {
          if (kvp > 1) break;
          CAPTURE(first);
          CHECK(world.problem({world.run(operators, 0, first, 3)}, 0, first, 3) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of a prompt beside more sequences of one token than one launch holds",
                   "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(64);
  c.kv_dtype = DType::fp8_e4m3;
  c.sequences.assign(300, {33, 1});
  c.sequences.push_back({700, 300});
  c.sequences.insert(c.sequences.end(), 260, {5, 1});
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  c.sequences.insert(c.sequences.begin(), {400, 390});
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows and of few writes one header, and replays with other lengths", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  MixedStep<TestType> step(operators);
  std::uint64_t exchanges = 0;
  const auto check_header = [&](const std::vector<std::uint8_t>& message) {
    CHECK(step.exchanges() == ++exchanges);
    ExchangeHeader header;
    std::memcpy(&header, message.data(), sizeof(header));
    const ExchangeHeader expected = step.expected_header(exchanges);
    CHECK(header.epoch == expected.epoch);
    CHECK((header.tokens == expected.tokens && header.sender == expected.sender));
  };
  const std::vector<std::vector<std::int64_t>> lengths = {
      {64, 1, 300, 70}, {512, 512, 1, 512}, {80, 33, 500, 64}};
  std::vector<std::vector<std::uint8_t>> results;
  for (const auto& of_step : lengths) {
    step.set(of_step);
    operators.partial_attention(step.args(), step.stream());
    results.push_back(step.message());
    check_header(results.back());
  }
  const auto graph =
      cuda::Graph::capture(step.stream(), [&] { operators.partial_attention(step.args(), step.stream()); });
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    CAPTURE(i);
    step.set(lengths[i]);
    graph.replay(step.stream());
    const auto replayed = step.message();
    check_header(replayed);
    constexpr auto kHeader = static_cast<std::ptrdiff_t>(sizeof(ExchangeHeader));
    CHECK(std::equal(replayed.begin() + kHeader, replayed.end(), results[i].begin() + kHeader));
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of sequences too long to count queues nothing, however they are cut",
                   "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  MixedStep<TestType> step(operators);
  step.set({64, 1, 300, 70});
  PartialAttentionArgs<TestType> args = step.args();
  constexpr std::int64_t kHeads = 2048;
  constexpr std::int64_t kLongest = std::int64_t{1} << 25;
  const KvFormat& format = args.kv.format;
  const cuda::Buffer pool = operators.allocate(at(kHeads * 2 * format.page_tokens * format.head_dim));
  const std::int64_t max_pages = kLongest / format.page_tokens;
  const cuda::Buffer table = operators.allocate(at(step.kSequences * max_pages) * sizeof(std::int32_t));
  const cuda::Buffer rows = operators.allocate(at(2 * step.kTokens * kHeads * step.kDim) * sizeof(TestType));
  const cuda::Buffer lse = operators.allocate(at(step.kTokens * kHeads) * sizeof(float));
  for (const cuda::Buffer* buffer : {&pool, &table, &rows, &lse})
    operators.fill_zero(buffer->data(), buffer->size_bytes(), step.stream());
  args.kv = KvView::of_pool(
                pool.data(),
                KvFormat::head_major(DType::fp8_e4m3, kHeads, step.kDim, step.kDim, format.page_tokens), 1)
                .whole();
  args.kv.page_table = reinterpret_cast<const std::int32_t*>(table.data());
  args.kv.max_pages = max_pages;
  auto* const q = reinterpret_cast<TestType*>(rows.data());
  args.q = TensorView<const TestType, 3>(q, {step.kTokens, kHeads, step.kDim});
  args.target.out = {q + step.kTokens * kHeads * step.kDim, {step.kTokens, kHeads, step.kDim}};
  args.target.lse = {reinterpret_cast<float*>(lse.data()), {step.kTokens, kHeads}};
  // The first run is short enough for all of its heads.
  const std::vector<std::int64_t> lengths{64, 1, kLongest, 70};
  args.batch.lengths_host = lengths;
  const auto failure = failure_of([&] { operators.partial_attention(args, step.stream()); });
  REQUIRE(failure.has_value());
  CHECK(failure->code == ErrorCode::unsupported);
  CHECK(step.exchanges() == 0);
}

}  // namespace helix::test
