// SPDX-License-Identifier: Apache-2.0
// Attention, appends and transfers in the KV layouts of other engines, compared with an attention in double
// that finds rows by its own index arithmetic. Everything that must not be read is NaN, and unused page ids
// are wild.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/partial_attention.hpp>

#include "support/catch.hpp"
#include "support/engine_pools.hpp"
#include "support/stored_step.hpp"

namespace helix::test {
namespace {

constexpr float kScale = 0.3f;

/// Compares the output and log-sum-exp of one head of query token `t`, which belongs to sequence `b`.
void check_query(const StoredStep& step, std::size_t b, std::int64_t t, std::int64_t head, const float* out,
                 float lse) {
  const std::int64_t kv_head = head / (step.asked().query_heads / step.heads());
  const float* q = step.query(t, head);
  std::vector<double> sums(at(step.dv()), 0.0);
  double total = 0.0;  // scores are small enough for exp without a shift
  for (std::int64_t token = 0; token <= step.position(t); ++token) {
    if (token / step.asked().chunk % step.asked().kvp != step.rank()) continue;
    const double* key = step.key(b, token, kv_head);
    const double* value = key + step.asked().d;
    double score = 0.0;
    for (std::int64_t i = 0; i < step.asked().d; ++i) score += static_cast<double>(q[i]) * key[i];
    const double weight = std::exp(score * static_cast<double>(kScale));
    total += weight;
    for (std::int64_t i = 0; i < step.dv(); ++i) sums[at(i)] += weight * value[i];
  }
  INFO("sequence " << b << " token " << t << " head " << head);
  if (total == 0.0) {
    REQUIRE(lse == -std::numeric_limits<float>::infinity());
    for (std::int64_t i = 0; i < step.dv(); ++i) REQUIRE(out[i] == 0.0f);
    return;
  }
  if (!(std::abs(lse - std::log(total)) <= 1e-5)) FAIL("lse is " << lse << ", not " << std::log(total));
  for (std::int64_t i = 0; i < step.dv(); ++i)
    if (!(std::abs(out[i] - sums[at(i)] / total) <= 1e-5))
      FAIL("out[" << i << "] is " << out[i] << ", not " << sums[at(i)] / total);
}

/// Fills the pool and runs attention over it with `threads` threads.
void check_attention(const Layout& layout, const Case& c, std::int64_t rank, int threads) {
  StoredStep step(layout, c, rank);
  step.fill();
  const std::int64_t tokens = step.tokens();
  const std::int64_t heads = c.query_heads;
  std::vector<float> out(at(tokens * heads * step.dv()), std::nanf(""));
  std::vector<float> lse(at(tokens * heads), std::nanf(""));
  cpu::Backend<cpu::LocalComm> backend(threads);
  auto stream = backend.create_stream();
  std::vector<std::byte> workspace(backend.partial_attention_workspace_bytes(tokens, heads, c.d, step.dv()));
  partial_attention(
      backend,
      {.q = {step.query(0, 0), {tokens, heads, c.d}},
       .batch = step.batch(),
       .kv = step.view(),
       .target = {.out = {out.data(), {tokens, heads, step.dv()}}, .lse = {lse.data(), {tokens, heads}}},
       .scale = kScale,
       .workspace = workspace},
      stream);
  backend.synchronize(stream);
  const Batch batch = step.batch();
  for (std::size_t b = 0; b < step.num_sequences(); ++b)
    for (std::int64_t t = batch.query_offsets_host[b]; t < batch.query_offsets_host[b + 1]; ++t)
      for (std::int64_t head = 0; head < heads; ++head)
        check_query(step, b, t, head, &out[at((t * heads + head) * step.dv())], lse[at(t * heads + head)]);
  SUCCEED();  // a mismatch calls FAIL
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::fp8_e4m3};

/// Adapts the case to the layout: a latent has rope columns, other layouts have one width unless they state
/// two.
Case for_layout(const Layout& layout, Case c) {
  if (layout.is_latent) c.dv = c.d - 32;
  return c;
}

TEST_CASE("partial attention reads the KV layout of every engine") {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t query_heads : {2, 4, 16, 40}) {  // every kernel
        for (const std::int64_t d : {64, 96}) {
          CAPTURE(layout.name, to_string(dtype), query_heads, d);
          const Case c = for_layout(layout, {.dtype = dtype, .query_heads = query_heads, .d = d, .dv = 64});
          check_attention(layout, c, 0, 2);
        }
      }
    }
  }
}

TEST_CASE("partial attention reads head sizes that are no multiple of a vector in every layout") {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      CAPTURE(layout.name, to_string(dtype));
      check_attention(layout, for_layout(layout, {.dtype = dtype, .d = 41, .dv = 23}), 0, 1);
    }
  }
}

TEST_CASE("partial attention reads page lists in CSR form in every layout") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(layout.name);
    check_attention(layout, for_layout(layout, {.dtype = DType::bf16, .is_csr = true}), 0, 2);
  }
}

TEST_CASE("partial attention reads shards interleaved as decode context parallelism leaves them") {
  for (const Layout& layout : kLayouts) {
    for (const std::int64_t interleave : {1, 4, 16}) {
      for (std::int64_t rank = 0; rank < 3; ++rank) {
        CAPTURE(layout.name, interleave, rank);
        check_attention(layout, for_layout(layout, {.kvp = 3, .chunk = interleave, .is_csr = rank == 1}),
                        rank, 2);
      }
    }
  }
}

TEST_CASE("partial attention follows the page table where small pages only nearly lie in order") {
  for (const Layout& layout : kLayouts) {
    for (const std::int64_t query_heads : {4, 32}) {
      CAPTURE(layout.name, query_heads);
      Case c = for_layout(layout, {.dtype = DType::bf16, .query_heads = query_heads});
      c.is_nearly_in_order = true;
      c.sequences = {{170, 2}};
      check_attention(layout, c, 0, 1);
    }
  }
}

TEST_CASE("partial attention splits long sequences in every layout") {
  for (const Layout& layout : kLayouts) {
    for (const std::int64_t query_heads : {2, 24}) {
      CAPTURE(layout.name, query_heads);
      const Case c = for_layout(layout, {.dtype = DType::bf16,
                                         .query_heads = query_heads,
                                         .heads = 1,
                                         .d = 64,
                                         .dv = 32,
                                         .sequences = {{2300, 2}}});
      check_attention(layout, c, 0, 2);
    }
  }
}

/// Calls visit(step) for steps on each of two ranks, in every layout and type.
template <class Visit>
void for_each_step_to_store(const Visit& visit) {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t rank : {0, 1}) {
        CAPTURE(layout.name, to_string(dtype), rank);
        const Case c = for_layout(
            layout, {.dtype = dtype, .d = 48, .dv = 24, .kvp = 2, .chunk = 3, .is_csr = rank == 1});
        visit(StoredStep(layout, c, rank));
      }
    }
  }
}

/// K and V of some tokens: input of append_kv and write_kv, output of read_kv.
struct Rows {
  std::vector<float> k, v;

  /// Rows of `count` tokens, all NaN.
  Rows(const StoredStep& step, std::int64_t count) : step_(&step), count_(count) {
    k.assign(at(count * step.heads() * step.asked().d), std::nanf(""));
    v.assign(at(count * step.heads() * step.dv()), std::nanf(""));
  }
  /// Rows of `tokens` (sequence, token) with the given values.
  Rows(const StoredStep& step, const std::vector<std::pair<std::size_t, std::int64_t>>& tokens)
      : Rows(step, static_cast<std::int64_t>(tokens.size())) {
    k.clear();
    v.clear();
    for (const auto& [b, token] : tokens)
      for (std::int64_t head = 0; head < step.heads(); ++head) {
        for (std::int64_t i = 0; i < step.asked().d; ++i) k.push_back(step.given(b, token, head, false, i));
        for (std::int64_t i = 0; i < step.dv(); ++i) v.push_back(step.given(b, token, head, true, i));
      }
  }

  TensorView<float, 3> keys() { return {k.data(), {count_, step_->heads(), step_->asked().d}}; }
  /// The V rows; empty in a latent layout.
  TensorView<float, 3> values() {
    if (step_->view().format.is_latent) return {};
    return {v.data(), {count_, step_->heads(), step_->dv()}};
  }

 private:
  const StoredStep* step_;
  std::int64_t count_;
};

TEST_CASE("append_kv stores the step's own tokens in every layout and touches nothing else") {
  for_each_step_to_store([](const StoredStep& step) {
    const std::vector<Sequence>& sequences = step.asked().sequences;
    std::vector<std::pair<std::size_t, std::int64_t>> appended;
    for (std::size_t b = 0; b < sequences.size(); ++b)
      for (std::int64_t i = sequences[b].queries; i > 0; --i)
        appended.emplace_back(b, sequences[b].length - i);
    Rows rows(step, appended);
    const cpu::Operators operators(2);
    const auto stream = operators.create_stream();
    operators.append_kv(
        AppendKvArgs<float>{.k = rows.keys(), .v = rows.values(), .batch = step.batch(), .kv = step.view()},
        stream);
    operators.synchronize(stream);
    step.check_pool([&](std::size_t b, std::int64_t token) {
      return token >= sequences[b].length - sequences[b].queries;
    });
  });
}

TEST_CASE("write_kv stores a span of a sequence in every layout, and read_kv brings it back") {
  for_each_step_to_store([](const StoredStep& step) {
    constexpr std::size_t kSequence = 1;
    constexpr std::int64_t kBegin = 5;
    const std::int64_t end = step.length(kSequence) - 1;
    std::vector<std::pair<std::size_t, std::int64_t>> written;
    for (std::int64_t token = kBegin; token < end; ++token) written.emplace_back(kSequence, token);
    Rows rows(step, written);
    const cpu::Operators operators(2);
    const auto stream = operators.create_stream();
    operators.write_kv(WriteKvArgs<float>{.k = rows.keys(),
                                          .v = rows.values(),
                                          .first_position = kBegin,
                                          .sequence_slot = step.slot(kSequence),
                                          .kv = step.view()},
                       stream);
    operators.synchronize(stream);
    step.check_pool(
        [&](std::size_t b, std::int64_t token) { return b == kSequence && token >= kBegin && token < end; });

    const TokenRange local = step.split().local_range({kBegin, end}, step.rank());
    Rows read(step, local.size());
    operators.read_kv({.kv = step.view(),
                       .sequence_slot = step.slot(kSequence),
                       .first_local = local.begin,
                       .k = read.keys(),
                       .v = read.values()},
                      stream);
    operators.synchronize(stream);
    bool is_equal = true;
    const auto compare = [&](TensorView<const float, 3> found, std::int64_t row, std::int64_t token,
                             std::int64_t head, bool is_value) {
      for (std::int64_t i = 0; i < found.extent(2); ++i)
        is_equal &=
            static_cast<double>(found(row, head, i)) == step.stored(kSequence, token, head, is_value, i);
    };
    for (std::int64_t l = local.begin; l < local.end; ++l) {
      const std::int64_t token = step.split().global(step.rank(), l);
      for (std::int64_t head = 0; head < step.heads(); ++head) {
        compare(read.keys(), l - local.begin, token, head, false);
        compare(read.values(), l - local.begin, token, head, true);
      }
    }
    CHECK(is_equal);
  });
}

TEST_CASE("Helix's own pools read the same through strides of another engine, bit for bit") {
  const Case c{.dtype = DType::bf16, .query_heads = 16};
  StoredStep step({.name = "FlashInfer HND", .make = flashinfer<true>}, c, 0);
  step.fill();
  const KvView& view = step.view();
  const KvView own = KvView::of_pool(
      view.k, KvFormat::head_major(DType::bf16, c.heads, c.d, c.d, view.format.page_tokens), view.num_pages);
  CHECK(own.v == view.v);
  CHECK(own.format.k == view.format.k);
  CHECK(own.format.v == view.format.v);
}

}  // namespace
}  // namespace helix::test
