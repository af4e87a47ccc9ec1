// SPDX-License-Identifier: Apache-2.0
// An unreadable KV view gives an Error that names the wrong field.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/partial_attention.hpp>
#include <helix/prepare_latent.hpp>
#include <helix/prepare_qkv.hpp>
#include <helix/reduce_norm.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test {
namespace {

/// A readable view with everything that it refers to.
struct Readable {
  std::vector<float> pool = std::vector<float>(2 * 4 * 2 * 2 * 8, 0.5f);
  std::vector<float> rope = std::vector<float>(4 * 2 * 8, 0.5f);
  std::int32_t pages[4] = {0, 1, 2, 3};
  std::int32_t begins[2] = {0, 1};
  float scales[2] = {1.0f, 1.0f};
  KvView kv;
  explicit Readable(bool is_latent) {
    kv = is_latent ? flashinfer_mla_kv({.ckv = pool.data(),
                                        .kpe = rope.data(),
                                        .dtype = DType::f32,
                                        .num_pages = 4,
                                        .page_size = 2,
                                        .head_dim_ckv = 8,
                                        .head_dim_kpe = 8})
                   : vllm_kv({.pool = pool.data(),
                              .dtype = DType::f32,
                              .num_blocks = 4,
                              .block_size = 2,
                              .num_kv_heads = 2,
                              .head_size = 8});
    kv = kv.whole();
    kv.page_table = pages;
    kv.max_pages = 4;
  }

  /// Throws the error of partial_attention() for the view.
  void attend() const {
    const std::int32_t offsets[] = {0, 1};
    const std::int64_t position = 1;
    const std::int32_t slot = 0;
    const std::int64_t d = kv.format.is_latent ? 16 : 8;
    std::vector<float> q(static_cast<std::size_t>(2 * d), 1.0f), out(16), lse(2);
    cpu::Backend<cpu::LocalComm> backend;
    auto stream = backend.create_stream();
    std::vector<std::byte> workspace(backend.partial_attention_workspace_bytes(1, 2, d, 8));
    partial_attention(backend,
                      {.q = {q.data(), {1, 2, d}},
                       .batch = {offsets, offsets, &position, &slot},
                       .kv = kv,
                       .target = {.out = {out.data(), {1, 2, 8}}, .lse = {lse.data(), {1, 2}}},
                       .scale = 1.0f,
                       .workspace = workspace},
                      stream);
    backend.synchronize(stream);
  }
};

/// Checks that attention reads a view of two heads, or a latent one, and names each mistake made in it.
void check_views(bool is_latent, std::initializer_list<Mistake<Readable>> mistakes) {
  check_mistakes(
      mistakes, [&] { return Readable(is_latent); }, [](const Readable& readable) { readable.attend(); });
}

TEST_CASE("a field of a KV view that was forgotten or cannot be is an Error that names it") {
  check_views(false,
              {
                  {"page_tokens is 0", [](Readable& r) { r.kv.format.page_tokens = 0; }},
                  {"num_heads is 0", [](Readable& r) { r.kv.format.num_heads = 0; }},
                  {"head_dim is 0", [](Readable& r) { r.kv.format.head_dim = 0; }},
                  {"value_dim is 0", [](Readable& r) { r.kv.format.value_dim = 0; }},
                  {"num_pages is 0", [](Readable& r) { r.kv.num_pages = 0; }},
                  {"max_pages is 0", [](Readable& r) { r.kv.max_pages = 0; }},
                  {"page_table is null", [](Readable& r) { r.kv.page_table = nullptr; }},
                  {"'s k is null", [](Readable& r) { r.kv.k = nullptr; }},
                  {"'s v is null", [](Readable& r) { r.kv.v = nullptr; }},
                  {"k.token stride is 7", [](Readable& r) { r.kv.format.k.token = 7; }},
                  {"k.head stride is 0", [](Readable& r) { r.kv.format.k.head = 0; }},
                  {"k.page stride is 0", [](Readable& r) { r.kv.format.k.page = 0; }},
                  {"v.token stride is 0", [](Readable& r) { r.kv.format.v = {}; }},
                  {"k.page stride is 31, but what lies between takes 32",
                   [](Readable& r) { r.kv.format.k.page = 31; }},
                  {"k.head stride is 8, but what lies between takes 16",
                   [](Readable& r) { r.kv.format.k.token = 8; }},
                  {"v.page stride is 1152921504606846976",
                   [](Readable& r) { r.kv.format.v.page = std::int64_t{1} << 60; }},
                  {"k.page stride is 9223372036854775807",
                   [](Readable& r) { r.kv.format.k.page = std::numeric_limits<std::int64_t>::min(); }},
                  {"v lies 0 bytes behind its k", [](Readable& r) { r.kv.v = r.kv.k; }},
                  {"v lies 32 bytes behind its k", [](Readable& r) { r.kv.v = r.pool.data() + 8; }},
                  {"v lies 4 bytes behind its k", [](Readable& r) { r.kv.v = r.pool.data() + 1; }},
                  {"v lies 508 bytes behind its k", [](Readable& r) { r.kv.v = r.pool.data() + 127; }},
                  {"v lies -508 bytes behind its k",
                   [](Readable& r) {
                     r.kv.k = r.pool.data() + 128;
                     r.kv.v = r.pool.data() + 1;
                   }},
                  {"kvp_rank is 1", [](Readable& r) { r.kv.kvp_rank = 1; }},
                  {"kvp_rank is -2", [](Readable& r) { r.kv.kvp_rank = -2; }},
                  {"has no kvp_rank", [](Readable& r) { r.kv.kvp_rank = KvView().kvp_rank; }},
                  {"has no layout", [](Readable& r) { r.kv.layout = KvView().layout; }},
                  {"has scales", [](Readable& r) { r.kv.k_scale = r.scales; }},
                  {"dtype is bf16",
                   [](Readable& r) {
                     r.kv.format.dtype = DType::bf16;
                     r.kv.v_scale = r.scales;
                   }},
                  {"of fp8_ds_mla, not latent", [](Readable& r) { r.kv.format.dtype = DType::fp8_ds_mla; }},
                  {"names no type", [](Readable& r) { r.kv.format.dtype = static_cast<DType>(77); }},
              });
  check_views(true, {
                        {"value_dim is 17", [](Readable& r) { r.kv.format.value_dim = 17; }},
                        {"rope is null", [](Readable& r) { r.kv.rope = nullptr; }},
                        {"rope lies 0 bytes behind its k", [](Readable& r) { r.kv.rope = r.kv.k; }},
                        {"rope.token stride is 4", [](Readable& r) { r.kv.format.rope.token = 4; }},
                        {"fp8_ds_mla must begin at multiples of 4 bytes",
                         [](Readable& r) {
                           r.kv.format.dtype = DType::fp8_ds_mla;
                           r.kv.k = reinterpret_cast<std::byte*>(r.kv.k) + 1;
                         }},
                        {"of fp8_ds_mla, latent, with 6 latent",
                         [](Readable& r) {
                           r.kv.format.dtype = DType::fp8_ds_mla;
                           r.kv.format.value_dim = 6;
                         }},
                        {"latent with 2 heads",
                         [](Readable& r) {
                           r.kv.format.num_heads = 2;
                           r.kv.format.k.head = r.kv.format.rope.head = 64;
                         }},
                    });
  Readable csr(false);
  csr.kv.max_pages = 0;
  csr.kv.page_begins = csr.begins;
  CHECK_NOTHROW(csr.attend());
}

/// A partial attention of three tokens of two sequences; tests modify it.
struct Attended {
  Readable readable{false};
  std::vector<std::int32_t> offsets{0, 1, 3};
  std::vector<std::int32_t> others = offsets;
  std::vector<std::int64_t> positions{1, 0, 1};
  std::vector<std::int32_t> slots{0, 0};
  std::vector<std::int64_t> lengths{2};
  std::vector<float> q = std::vector<float>(3 * 2 * 8, 1.0f), out = q, lse = std::vector<float>(3 * 2);
  cpu::Backend<cpu::LocalComm> backend{1};
  std::vector<std::byte> workspace =
      std::vector<std::byte>(backend.partial_attention_workspace_bytes(3, 2, 8, 8));
  PartialAttentionArgs<float> args{.q = {q.data(), {3, 2, 8}},
                                   .batch = {offsets, offsets.data(), positions.data(), slots.data()},
                                   .kv = readable.kv,
                                   .target = {.out = {out.data(), {3, 2, 8}}, .lse = {lse.data(), {3, 2}}},
                                   .scale = 1.0f,
                                   .workspace = workspace};

  void run() {
    const auto stream = backend.create_stream();
    partial_attention(backend, args, stream);
    backend.synchronize(stream);
  }
};

void check_attention(std::initializer_list<Mistake<Attended>> mistakes) {
  check_mistakes(
      mistakes, [] { return Attended(); }, [](Attended& attended) { attended.run(); });
}

TEST_CASE("attention of a batch that cannot be read is an Error that names its field") {
  check_attention({
      {"partial_attention: the batch's query_offsets is null",
       [](Attended& a) { a.args.batch.query_offsets = nullptr; }},
      {"partial_attention: the batch's positions is null",
       [](Attended& a) { a.args.batch.positions = nullptr; }},
      {"partial_attention: the batch's sequence_slots is null",
       [](Attended& a) { a.args.batch.sequence_slots = nullptr; }},
      {"query_offsets_host[0] is -2; it must be in [0, 1048576]", [](Attended& a) { a.offsets[0] = -2; }},
      {"query_offsets_host[0] is -2147483648", [](Attended& a) { a.offsets[0] = INT32_MIN; }},
      {"query_offsets_host[1] is -4; it must be in [0, ", [](Attended& a) { a.offsets[1] = -4; }},
      {"query_offsets_host[2] is 3; it must be in [4, ", [](Attended& a) { a.offsets[1] = 4; }},
      {"query_offsets_host[2] is 2147483647", [](Attended& a) { a.offsets[2] = INT32_MAX; }},
      {"has 2 sequences and 1 in lengths_host", [](Attended& a) { a.args.batch.lengths_host = a.lengths; }},
      {"has 3 tokens by its query_offsets_host and 2 by its query_offsets",
       [](Attended& a) {
         a.others = {0, 1, 2};
         a.args.batch.query_offsets = a.others.data();
       }},
      {"partial_attention: the batch's 3 tokens are divided among its sequences in one way",
       [](Attended& a) {
         a.others = {0, 2, 3};
         a.args.batch.query_offsets = a.others.data();
       }},
      {"token 1 is at position 1099511627776; positions are below 1099511627776",
       [](Attended& a) { a.positions[1] = kMaxTokens; }},
      {"token 0 is at position 9223372036854775807", [](Attended& a) { a.positions[0] = INT64_MAX; }},
  });
}

TEST_CASE(
    "attention of tokens that have no page of the pool is an Error, and pages that nobody sees may be "
    "anything") {
  check_attention({
      {"local token 1 of the sequence in slot 0 has page 4 of the KV pool's 4",
       [](Attended& a) { a.readable.pages[0] = 4; }},
      {"has page -1 of the KV pool's 4", [](Attended& a) { a.readable.pages[0] = -1; }},
      {"has page 2147483647", [](Attended& a) { a.readable.pages[0] = INT32_MAX; }},
      {"local token 2 of the sequence in slot 0 has page 9",
       [](Attended& a) {
         a.positions[2] = 5;
         a.readable.pages[1] = 9;
       }},
      {"local token 0 of the sequence in slot 0 has page 4",  // the first of three pages that are read
       [](Attended& a) {
         std::fill(a.positions.begin(), a.positions.end(), 5);
         a.readable.pages[0] = 4;
       }},
      {"local token 8 of the sequence in slot 0 is in page 4 of the sequence, whose row of the page table "
       "has 4",
       [](Attended& a) { a.positions[2] = 8; }},
      {"is of the sequence in slot -1", [](Attended& a) { a.slots[1] = -1; }},
  });
  Attended unseen;
  unseen.readable.pages[1] = 77;
  unseen.readable.pages[3] = -5;
  CHECK_NOTHROW(unseen.run());
}

TEST_CASE("attention into rows that overlap is an Error that names the stride") {
  const auto with_stride = [](auto& view, std::size_t d, std::int64_t stride) {
    auto strides = view.strides();
    strides[d] = stride;
    view = {view.data(), view.extents(), strides};
  };
  check_attention({
      {"partial_attention: dimension 0 of target.out has extent 3 and stride 0",
       [&](Attended& a) { with_stride(a.args.target.out, 0, 0); }},
      {"target.out", [&](Attended& a) { with_stride(a.args.target.out, 1, 1); }},
      {"partial_attention: dimension 0 of target.lse has extent 3 and stride 0",
       [&](Attended& a) { with_stride(a.args.target.lse, 0, 0); }},
  });
}

TEST_CASE(
    "attention without an address, a finite scale or a possible number of heads is an Error that names it") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto heads = [](std::int64_t count) {
    return [count](Attended& a) {
      a.args.q = TensorView<const float, 3>(a.q.data(), {3, count, 8}, {16, 8, 1});
      a.args.target.out = {a.out.data(), {3, count, 8}, {16, 8, 1}};
      a.args.target.lse = {a.lse.data(), {3, count}, {2, 1}};
    };
  };
  check_attention({
      {"partial_attention: q is null",
       [](Attended& a) {
         a.args.q = TensorView<const float, 3>(nullptr, {3, 2, 8});
       }},
      {"target.out is null",
       [](Attended& a) {
         a.args.target.out = {nullptr, {3, 2, 8}};
       }},
      {"target.lse is null",
       [](Attended& a) {
         a.args.target.lse = {nullptr, {3, 2}};
       }},
      {"workspace is null with ",
       [](Attended& a) {
         a.args.workspace = {static_cast<std::byte*>(nullptr), a.workspace.size()};
       }},
      {"scale is inf", [](Attended& a) { a.args.scale = kInf; }},
      {"scale is nan", [](Attended& a) { a.args.scale = std::nanf(""); }},
      {"soft_cap inf", [](Attended& a) { a.args.soft_cap = kInf; }},
      {"q has 0 heads; there must be 1 to 1048576", heads(0)},
      {"q has -4 heads", heads(-4)},
      {"q has 4611686018427387904 heads", heads(std::int64_t{1} << 62)},
  });
}

TEST_CASE("queries are prepared only where rows, rope and epsilon fit") {
  struct Prepared {
    Attended attended;
    Readable of_latents{true};
    std::vector<float> k = std::vector<float>(3 * 2 * 8), frequencies = std::vector<float>(4, 0.5f);
    PrepareQkvArgs<float> args{.q = {attended.q.data(), {3, 2, 8}},
                               .k = {k.data(), {3, 2, 8}},
                               .v = TensorView<const float, 3>(k.data(), {3, 2, 8}),
                               .rope = {.inverse_frequency = frequencies.data(), .rotary_dim = 8},
                               .batch = attended.args.batch,
                               .kv = attended.readable.kv};
  };
  check_mistakes<Prepared>(
      {{"prepare_qkv: q is null",
        [](Prepared& p) {
          p.args.q = {nullptr, {3, 2, 8}};
        }},
       {"prepare_qkv: q is [1, 2, 8]", [](Prepared& p) { p.args.q = p.args.q.slice(0, 0, 1); }},
       {"prepare_qkv: the batch is tokens ",
        [](Prepared& p) {
          const std::int64_t sequences = p.args.batch.num_sequences();
          p.args.batch = p.args.batch.slice(sequences - 1, 1);
        }},
       {"prepare_qkv: the batch is tokens 0 to 1 of k's 3",
        [](Prepared& p) { p.args.batch = p.args.batch.slice(0, 1); }},
       {"prepare_qkv: the cache holds latents", [](Prepared& p) { p.args.kv = p.of_latents.kv; }},
       {"prepare_qkv: q is [3, 0, 8]", [](Prepared& p) { p.args.q = p.args.q.slice(1, 0, 0); }},
       {"prepare_qkv: q is [3, 1048577, 8]",
        [](Prepared& p) {
          p.args.q = {p.attended.q.data(), {3, kMaxCount + 1, 8}, {16, 8, 1}};
        }},
       {"prepare_qkv: q is [3, 2, 8] with a last stride of 2",
        [](Prepared& p) {
          p.args.q = {p.attended.q.data(), {3, 2, 8}, {16, 8, 2}};
        }},
       {"prepare_qkv: q_norm is fp8_e4m3",
        [](Prepared& p) {
          p.args.q_norm = {p.k.data(), DType::fp8_e4m3, 1, 8};
        }},
       {"prepare_qkv: q is [3, 2, 7]", [](Prepared& p) { p.args.q = p.args.q.slice(2, 0, 7); }},
       {"append_kv: k is null",
        [](Prepared& p) {
          p.args.k = {nullptr, {3, 2, 8}};
        }},
       {"append_kv: v is null",
        [](Prepared& p) {
          p.args.v = TensorView<const float, 3>(nullptr, {3, 2, 8});
        }},
       {"prepare_qkv: q_norm is [1, 4]; it must be [1, 8] or empty",
        [](Prepared& p) {
          p.args.q_norm = {p.frequencies.data(), DType::f32, 1, 4};
        }},
       {"prepare_qkv: k_norm is [2, 8]; it must be [1, 8] or empty",
        [](Prepared& p) {
          p.args.k_norm = {p.k.data(), DType::f32, 2, 8};
        }},
       {"rotary_dim is 10; it must be even and in [0, 8]", [](Prepared& p) { p.args.rope.rotary_dim = 10; }},
       {"rotary_dim is 7", [](Prepared& p) { p.args.rope.rotary_dim = 7; }},
       {"rope.inverse_frequency is null", [](Prepared& p) { p.args.rope.inverse_frequency = nullptr; }},
       {"rope.magnitude is nan", [](Prepared& p) { p.args.rope.magnitude = std::nanf(""); }},
       {"epsilon is -1", [](Prepared& p) { p.args.epsilon = -1.0f; }}},
      [] { return Prepared(); },
      [](Prepared& p) {
        const auto stream = p.attended.backend.create_stream();
        prepare_qkv(p.attended.backend, p.args, stream);
        p.attended.backend.synchronize(stream);
      });
}

TEST_CASE("latents are prepared only where rows, queries, norm and rope fit") {
  struct Prepared {
    Readable readable{true}, of_heads{false};
    std::vector<float> latents = std::vector<float>(3 * 16), q = std::vector<float>(3 * 2 * 8),
                       weights = std::vector<float>(8, 0.5f);
    std::int32_t offsets[2] = {0, 3};
    std::int64_t positions[3] = {0, 1, 2};
    std::int32_t slots[1] = {0};
    PrepareLatentArgs<float> args{
        .latents = {latents.data(), {3, 1, 16}},
        .norm = {weights.data(), DType::f32, 1, 8},
        .q_in = TensorView<const float, 3>(q.data(), {3, 2, 8}),
        .q_out = {q.data(), {3, 2, 8}},
        .rope = {.inverse_frequency = weights.data(), .rotary_dim = 8},
        .batch = {std::span<const std::int32_t>(offsets), offsets, positions, slots},
        .kv = readable.kv};
  };
  check_mistakes<Prepared>(
      {{"prepare_latent: q_in is null",
        [](Prepared& p) {
          p.args.q_in = TensorView<const float, 3>(nullptr, {3, 2, 8});
        }},
       {"prepare_latent: q_in is [1, 2, 8]", [](Prepared& p) { p.args.q_in = p.args.q_in.slice(0, 0, 1); }},
       {"prepare_latent: q_in is [3, 2, 8]", [](Prepared& p) { p.args.q_out = p.args.q_out.slice(1, 0, 1); }},
       {"prepare_latent: q_in is [3, 0, 8]",
        [](Prepared& p) {
          p.args.q_in = p.args.q_in.slice(1, 0, 0);
          p.args.q_out = p.args.q_out.slice(1, 0, 0);
        }},
       {"prepare_latent: q_in is [3, 1048577, 8]",
        [](Prepared& p) {
          p.args.q_in = TensorView<const float, 3>(p.q.data(), {3, kMaxCount + 1, 8}, {16, 8, 1});
          p.args.q_out = {p.q.data(), {3, kMaxCount + 1, 8}, {16, 8, 1}};
        }},
       {"prepare_latent: q_out is [3, 2, 8] with a last stride of 2",
        [](Prepared& p) {
          p.args.q_out = {p.q.data(), {3, 2, 8}, {16, 8, 2}};
        }},
       {"prepare_latent: the batch is tokens 0 to 2 of 3 latents",
        [](Prepared& p) {
          p.offsets[1] = 2;
          p.args.q_in = p.args.q_in.slice(0, 0, 2);
          p.args.q_out = p.args.q_out.slice(0, 0, 2);
        }},
       {"prepare_latent: q_out is [3, 2, 7]",
        [](Prepared& p) { p.args.q_out = p.args.q_out.slice(2, 0, 7); }},
       {"prepare_latent: the cache has keys and values of 2 heads",
        [](Prepared& p) {
          p.args.kv = p.of_heads.kv;
          p.args.latents = {p.latents.data(), {3, 2, 8}};
        }},
       {"append_kv: k is null",
        [](Prepared& p) {
          p.args.latents = {nullptr, {3, 1, 16}};
        }},
       {"prepare_latent: norm is [1, 8], without data; it must be [1, 8]",
        [](Prepared& p) { p.args.norm.data = nullptr; }},
       {"prepare_latent: norm is [1, 7]; it must be [1, 8]", [](Prepared& p) { p.args.norm.cols = 7; }},
       {"prepare_latent: norm is [2, 8]; it must be [1, 8]", [](Prepared& p) { p.args.norm.rows = 2; }},
       {"prepare_latent: norm is fp8_e4m3", [](Prepared& p) { p.args.norm.dtype = DType::fp8_e4m3; }},
       {"rotary_dim is 10; it must be even and in [0, 8]", [](Prepared& p) { p.args.rope.rotary_dim = 10; }},
       {"epsilon is nan", [](Prepared& p) { p.args.epsilon = std::nanf(""); }}},
      [] { return Prepared(); },
      [](Prepared& p) {
        cpu::Backend<cpu::LocalComm> backend;
        const auto stream = backend.create_stream();
        prepare_latent(backend, p.args, stream);
        backend.synchronize(stream);
      });
}

/// A projection of three tokens; tests modify it.
struct Projected {
  Attended attended;
  std::vector<float> in = std::vector<float>(3 * 5, 1.0f), weight = std::vector<float>(48 * 5, 1.0f);
  std::vector<float> qkv = std::vector<float>(3 * 48, 7.0f), frequencies = std::vector<float>(4, 0.5f);
  ProjectQkvArgs<float> args{
      .linear = {.in = {in.data(), {3, 5}},
                 .weight = {weight.data(), DType::f32, 48, 5},
                 .bias = {},
                 .out = {qkv.data(), {3, 48}}},
      .prepare = {.q = {qkv.data(), {3, 2, 8}, {48, 8, 1}},
                  .k = {qkv.data() + 16, {3, 2, 8}, {48, 8, 1}},
                  .v = TensorView<const float, 3>(qkv.data() + 32, {3, 2, 8}, {48, 8, 1}),
                  .rope = {.inverse_frequency = frequencies.data(), .rotary_dim = 8},
                  .batch = attended.args.batch,
                  .kv = attended.readable.kv}};
};

/// Waits for what was queued, even after an error.
void project(Projected& projected) {
  const auto stream = projected.attended.backend.create_stream();
  try {
    project_qkv(projected.attended.backend, projected.args, stream);
  } catch (const Error&) {
    projected.attended.backend.synchronize(stream);
    throw;
  }
  projected.attended.backend.synchronize(stream);
}

TEST_CASE("q, k and v are projected only where rows and shapes of the product fit, and nothing before") {
  check_mistakes<Projected>(
      {{"prepare_qkv: q is null",
        [](Projected& p) {
          p.args.prepare.q = {nullptr, {3, 2, 8}};
        }},
       {"project_qkv: in is [2, 5]",
        [](Projected& p) { p.args.linear.in = p.args.linear.in.slice(0, 0, 2); }},
       {"project_qkv: in is [3, 4]",
        [](Projected& p) { p.args.linear.in = p.args.linear.in.slice(1, 0, 4); }},
       {"out [3, 47], weight [48, 5]",
        [](Projected& p) { p.args.linear.out = p.args.linear.out.slice(1, 0, 47); }},
       {"out [3, 48] (accumulated)", [](Projected& p) { p.args.linear.accumulate = true; }},
       {"out [2, 48], weight [48, 5]",
        [](Projected& p) { p.args.linear.out = p.args.linear.out.slice(0, 0, 2); }},
       {"project_qkv: out is null",
        [](Projected& p) {
          p.args.linear.out = {nullptr, {3, 48}};
        }},
       {"project_qkv: bias is [2, 48]; it must be [1, 48] or empty",
        [](Projected& p) {
          p.args.linear.bias = {p.weight.data(), DType::f32, 2, 48};
        }},
       {"project_qkv: bias is fp8_e4m3",
        [](Projected& p) {
          p.args.linear.bias = {p.weight.data(), DType::fp8_e4m3, 1, 48};
        }},
       {"project_qkv: bias is [1, 47]; it must be [1, 48] or empty",
        [](Projected& p) {
          p.args.linear.bias = {p.weight.data(), DType::f32, 1, 47};
        }},
       {"project_qkv: weight is fp8_e4m3",
        [](Projected& p) { p.args.linear.weight.dtype = DType::fp8_e4m3; }},
       {"project_qkv: weight is null", [](Projected& p) { p.args.linear.weight.data = nullptr; }},
       {"project_qkv: in is null",
        [](Projected& p) {
          p.args.linear.in = {nullptr, {3, 5}};
        }},
       {"in has a last stride of 3 and out of 1; both must be 1",
        [](Projected& p) {
          p.args.linear.in = {p.in.data(), {3, 5}, {1, 3}};
        }},
       {"in has a last stride of 1 and out of 3",
        [](Projected& p) {
          p.args.linear.out = {p.qkv.data(), {3, 48}, {1, 3}};
        }},
       {"project_qkv: q is [3, 2, 8] with strides [48, 8, 1] from element -1 of out on",
        [](Projected& p) {
          p.args.linear.out = {p.qkv.data() + 1, {3, 48}};
        }},
       {"project_qkv: k is [3, 2, 8] with strides [16, 8, 1] from element 16 of out on",
        [](Projected& p) {
          p.args.prepare.k = {p.qkv.data() + 16, {3, 2, 8}};
        }},
       {"project_qkv: k is [3, 2, 8] with strides [48, 7, 1]",
        [](Projected& p) {
          p.args.prepare.k = {p.qkv.data() + 16, {3, 2, 8}, {48, 7, 1}};
        }},
       {"project_qkv: v is [3, 2, 8] with strides [48, 8, 1] from element 33 of out on, which is [3, 48] "
        "with "
        "a row stride of 48; its heads must be columns of out",
        [](Projected& p) {
          p.args.prepare.v = TensorView<const float, 3>(p.qkv.data() + 33, {3, 2, 8}, {48, 8, 1});
        }}},
      [] { return Projected(); },
      [](Projected& p) {
        try {
          project(p);
        } catch (const Error&) {
          CHECK(p.qkv.front() == 7.0f);
          throw;
        }
        CHECK(p.qkv.front() != 7.0f);
      });
}

TEST_CASE("strides between heads or tokens of which there is one are not looked at") {
  Projected one_head;
  one_head.args.prepare.q = {one_head.qkv.data(), {3, 1, 8}, {48, 0, 1}};
  CHECK_NOTHROW(project(one_head));

  Projected one_token;
  one_token.args.linear.in = one_token.args.linear.in.slice(0, 0, 1);
  one_token.args.linear.out = one_token.args.linear.out.slice(0, 0, 1);
  PrepareQkvArgs<float>& prepare = one_token.args.prepare;
  prepare.batch = prepare.batch.slice(0, 1);
  prepare.q = {one_token.qkv.data(), {1, 2, 8}, {16, 8, 1}};
  prepare.k = {one_token.qkv.data() + 16, {1, 2, 8}, {16, 8, 1}};
  prepare.v = TensorView<const float, 3>(one_token.qkv.data() + 32, {1, 2, 8}, {16, 8, 1});
  CHECK_NOTHROW(project(one_token));
}

TEST_CASE("sums are normed only by a weight as wide as they are") {
  struct Normed {
    cpu::Backend<cpu::LocalComm> backend;
    std::vector<float> summand = std::vector<float>(2 * 32, 1.0f), residual = summand, weight = summand,
                       out = summand;
    ReduceNormArgs<float> args{.summand = {summand.data(), {2, 32}},
                               .residual = {residual.data(), {2, 32}},
                               .weight = {weight.data(), DType::f32, 1, 32},
                               .out = {out.data(), {2, 32}}};
  };
  check_mistakes<Normed>(
      {{"reduce_norm: weight is [1, 4]; it must be [1, 32]", [](Normed& n) { n.args.weight.cols = 4; }},
       {"reduce_norm: weight is [2, 32]", [](Normed& n) { n.args.weight.rows = 2; }},
       {"reduce_norm: weight is fp8_e4m3", [](Normed& n) { n.args.weight.dtype = DType::fp8_e4m3; }},
       {"reduce_norm: epsilon is nan", [](Normed& n) { n.args.epsilon = std::nanf(""); }},
       {"reduce_norm: summand is null",
        [](Normed& n) {
          n.args.summand = {nullptr, {2, 32}};
        }},
       {"reduce_norm: residual is null",
        [](Normed& n) {
          n.args.residual = {nullptr, {2, 32}};
        }},
       {"reduce_norm: out is null",
        [](Normed& n) {
          n.args.out = {nullptr, {2, 32}};
        }},
       {"reduce_norm: summand is [1, 32] with strides [32, 1], residual [2, 32]",
        [](Normed& n) { n.args.summand = n.args.summand.slice(0, 0, 1); }},
       {"reduce_norm: summand is [2, 32] with strides [16, 1]",
        [](Normed& n) {
          n.args.summand = {n.summand.data(), {2, 32}, {16, 1}};
        }},
       {"residual [2, 32] with [16, 1]",
        [](Normed& n) {
          n.args.residual = {n.residual.data(), {2, 32}, {16, 1}};
        }},
       {"out [2, 31] with [32, 1]", [](Normed& n) { n.args.out = n.args.out.slice(1, 0, 31); }},
       {"reduce_norm: dimension 0 of out has extent 2 and stride 16",
        [](Normed& n) {
          n.args.out = {n.out.data(), {2, 32}, {16, 1}};
        }},
       {"out [2, 32] with [64, 2]",
        [](Normed& n) {
          n.args.out = {n.out.data(), {2, 32}, {64, 2}};
        }}},
      [] { return Normed(); },
      [](Normed& n) {
        const auto stream = n.backend.create_stream();
        reduce_norm(n.backend, n.args, stream);
        n.backend.synchronize(stream);
      });
}

TEST_CASE("a sum without a stage to sum over is refused") {
  struct LoneBackend : cpu::Backend<cpu::LocalComm> {
    StageComms<cpu::LocalComm> comms() { return {}; }
  };
  LoneBackend backend;
  std::vector<float> x(8);
  const auto failure = failure_of([&] {
    reduce_norm(backend, {.summand = {x.data(), {1, 8}}, .residual = {x.data(), {1, 8}}},
                backend.create_stream());
  });
  REQUIRE(failure);
  CHECK(failure->code == ErrorCode::invalid_argument);
  CHECK(failure->says("reduce_norm: the backend's comms().stage is null"));
  CHECK_NOTHROW(reduce_norm(backend, {.summand = {x.data(), {0, 8}}, .residual = {x.data(), {0, 8}}},
                            backend.create_stream()));  // nothing to sum
}

TEST_CASE("tokens outside of their row of the page table are refused, and harm no sequence") {
  Readable readable(false);
  readable.kv.max_pages = 2;  // two sequences of up to 4 tokens
  const bool is_csr = GENERATE(false, true);
  const std::int32_t begins[] = {0, 2, 4};
  if (is_csr) readable.kv.page_begins = begins;
  const std::vector<float> before = readable.pool;
  std::vector<float> rows(2 * 8, 0.25f);
  const TensorView<float, 3> row(rows.data(), {1, 2, 8});
  const cpu::Operators operators;
  const auto failure = [&](std::int64_t position, std::int32_t slot) {
    const std::int32_t offsets[] = {0, 1};
    const auto stream = operators.create_stream();
    return required_failure([&] {
      operators.append_kv({row, row, {offsets, offsets, &position, &slot}, readable.kv}, stream);
      operators.synchronize(stream);
    });
  };
  CHECK(
      failure(4, 0).says("local token 4 of the sequence in slot 0 is in page 2 of the sequence, whose row of "
                         "the page table has 2"));
  CHECK(failure(std::numeric_limits<std::int64_t>::max(), 1).says("slot 1 is in page 4611686018427387903"));
  CHECK(failure(0, -7).says("local token 0 is of the sequence in slot -7; slots count from 0"));
  const auto stream = operators.create_stream();
  CHECK(required_failure([&] {
          operators.read_kv({readable.kv, 0, 4, row, row}, stream);
          operators.synchronize(stream);
        }).says("whose row of the page table has 2"));
  const std::int32_t before_table[] = {-3, 0, 4};
  readable.kv.page_begins = before_table;
  CHECK(failure(0, 0).says("the sequence in slot 0 begin at place -3 of the page table"));
  CHECK(readable.pool == before);
}

TEST_CASE("tokens are refused whose rows, view or batch do not fit") {
  const Readable readable(false);
  std::vector<float> rows(3 * 2 * 8, 0.25f);
  const std::int32_t offsets[] = {0, 2};
  const std::int32_t negative[] = {-2, 2};
  const std::int64_t positions[] = {0, 1};
  const std::int32_t slot = 0;
  const cpu::Operators operators;
  const auto stream = operators.create_stream();
  const TensorView<float, 3> good(rows.data(), {2, 2, 8});
  const TensorView<float, 3> narrow(rows.data(), {2, 2, 7});
  const TensorView<float, 3> short_by_one(rows.data(), {1, 2, 8});

  using Append = AppendKvArgs<float>;
  check_mistakes<Append>(
      {{"append_kv: the KV view's k is null", [](Append& a) { a.kv.k = nullptr; }},
       {"append_kv: k is [2, 2, 7]; it must be [2, 2, 8]", [&](Append& a) { a.k = narrow; }},
       {"append_kv: v is [1, 2, 8]; it must be [2, 2, 8]", [&](Append& a) { a.v = short_by_one; }},
       {"append_kv: v has a last stride of 2",
        [&](Append& a) {
          a.v = TensorView<const float, 3>(rows.data(), {2, 2, 8}, {0, 16, 2});
        }},
       {"append_kv: the batch has tokens [0, 2); k has 1", [&](Append& a) { a.k = a.v = short_by_one; }},
       {"append_kv: the batch's positions is null", [](Append& a) { a.batch.positions = nullptr; }},
       {"append_kv: the batch's query_offsets is null", [](Append& a) { a.batch.query_offsets = nullptr; }},
       {"append_kv: the batch's sequence_slots is null", [](Append& a) { a.batch.sequence_slots = nullptr; }},
       {"append_kv: the batch's query_offsets_host[0] is -2",
        [&](Append& a) { a.batch.query_offsets_host = negative; }}},
      [&] {
        return Append{good, good, {offsets, offsets, positions, &slot}, readable.kv};
      },
      [&](const Append& a) { operators.append_kv(a, stream); });

  using Write = WriteKvArgs<float>;
  check_mistakes<Write>(
      {{"write_kv: the KV view's page_tokens is 0", [](Write& a) { a.kv.format.page_tokens = 0; }},
       {"write_kv: v is [2, 2, 7]; it must be [2, 2, 8]", [&](Write& a) { a.v = narrow; }},
       {"write_kv: k is null",
        [](Write& a) {
          a.k = TensorView<const float, 3>(nullptr, {2, 2, 8});
        }},
       {"write_kv: first_position is -1", [](Write& a) { a.first_position = -1; }},
       {"write_kv: first_position is 9223372036854775807",
        [](Write& a) { a.first_position = std::numeric_limits<std::int64_t>::max(); }},
       {"write_kv: local token 8 is in page 4 of the sequence, whose row of the page table has 4",
        [](Write& a) { a.first_position = 7; }},
       {"write_kv: sequence_slot is -1", [](Write& a) { a.sequence_slot = -1; }},
       {"write_kv: sequence_slot is 3 of 3",
        [](Write& a) {
          a.kv.num_slots = 3;
          a.sequence_slot = 3;
        }}},
      [&] {
        return Write{good, good, 0, 0, readable.kv};
      },
      [&](const Write& a) { operators.write_kv(a, stream); });

  check_mistakes<ReadKvArgs>(
      {{"read_kv: the KV view's page_table is null", [](ReadKvArgs& a) { a.kv.page_table = nullptr; }},
       {"read_kv: k is [2, 2, 7]; it must be [2, 2, 8]", [&](ReadKvArgs& a) { a.k = narrow; }},
       {"read_kv: v is null",
        [](ReadKvArgs& a) {
          a.v = {nullptr, {2, 2, 8}};
        }},
       {"read_kv: first_local is -1", [](ReadKvArgs& a) { a.first_local = -1; }},
       {"read_kv: local token 9 is in page 4 of the sequence, whose row of the page table has 4",
        [](ReadKvArgs& a) { a.first_local = 8; }},
       {"read_kv: sequence_slot is 2 of 2",
        [](ReadKvArgs& a) {
          a.kv.num_slots = 2;
          a.sequence_slot = 2;
        }}},
      [&] {
        return ReadKvArgs{readable.kv, 0, 0, good, good};
      },
      [&](const ReadKvArgs& a) { operators.read_kv(a, stream); });

  operators.synchronize(stream);
}

TEST_CASE("latents are refused whose rows or view do not fit") {
  const Readable readable(false);
  std::vector<float> rows(2 * 8);
  const std::int32_t slot = 0;
  const cpu::Operators operators;
  const auto stream = operators.create_stream();
  using ReadLatents = ReadLatentsArgs<float>;
  const KvFormat latent = KvFormat::latent(DType::f32, 8, 6, readable.kv.format.page_tokens);
  KvView latents = KvView::of_pool(readable.kv.k, latent, 1).whole();
  latents.page_table = readable.kv.page_table;
  latents.max_pages = 1;
  check_mistakes<ReadLatents>(
      {{"read_latents: the KV view's page_table is null", [](ReadLatents& a) { a.kv.page_table = nullptr; }},
       {"read_latents: the cache holds K and V", [&](ReadLatents& a) { a.kv = readable.kv; }},
       {"read_latents: rows are 7 wide", [](ReadLatents& a) { a.rows = a.rows.slice(1, 0, 7); }},
       {"a last stride of 2",
        [&](ReadLatents& a) {
          a.rows = {a.rows.data(), {1, 8}, {16, 2}};
        }},
       {"read_latents: rows is null",
        [](ReadLatents& a) {
          a.rows = {nullptr, {2, 8}};
        }},
       {"read_latents: first_local is -1", [](ReadLatents& a) { a.first_local = -1; }},
       {"read_latents: local token 2 is in page 1 of the sequence, whose row of the page table has 1",
        [](ReadLatents& a) { a.first_local = 1; }},
       {"sequence_slot is null", [](ReadLatents& a) { a.sequence_slot = nullptr; }}},
      [&] {
        return ReadLatents{latents, &slot, 0, {rows.data(), {2, 8}}};
      },
      [&](const ReadLatents& a) { operators.read_latents(a, stream); });
  operators.synchronize(stream);
}

TEST_CASE("makers of views pass on what was forgotten, for the operation to name") {
  const auto view = [](KvView (*make)()) {
    return [make](Readable& r) {
      r.kv = make().whole();
      r.kv.page_table = r.pages;
      r.kv.max_pages = 4;
    };
  };
  check_views(
      false,
      {
          {"num_heads is 0", view([] { return vllm_kv({}); })},
          {"head_dim is 0", view([] { return flashinfer_nhd_kv({.num_kv_heads = 2}); })},
          {"page_tokens is 0", view([] { return flashinfer_hnd_kv({.num_kv_heads = 2, .head_dim = 8}); })},
          {"page_tokens is 0", view([] {
             return sglang_kv({.page_size = 0, .num_kv_heads = 2, .head_dim = 8, .v_head_dim = 8});
           })},
          {"k is null", view([] {
             return sglang_kv({.num_slots = 8, .num_kv_heads = 2, .head_dim = 8, .v_head_dim = 8});
           })},
          {"k is null", view([] {
             return flashinfer_mla_kv({.num_pages = 1, .page_size = 2, .head_dim_ckv = 8, .head_dim_kpe = 8});
           })},
          {"head_dim is 9223372036854775807", view([] {
             return vllm_diffkv_kv({.num_blocks = 4,
                                    .block_size = 2,
                                    .num_kv_heads = 2,
                                    .head_size = kSaturated,
                                    .head_size_v = 8});
           })},
          {"head_dim is 9223372036854775807", view([] {
             constexpr std::int64_t kHalf = std::int64_t{1} << 62;
             return flashinfer_mla_kv(
                 {.num_pages = 1, .page_size = 2, .head_dim_ckv = kHalf, .head_dim_kpe = kHalf});
           })},
          {"page_tokens is 9223372036854775807", view([] {
             return sglang_kv({.num_slots = 8,
                               .page_size = kSaturated,
                               .num_kv_heads = 2,
                               .head_dim = 8,
                               .v_head_dim = 8});
           })},
      });
  CHECK(KvFormat::head_major(DType::f32, 2, 8, 8, kSaturated).page_elements() == kSaturated);
  CHECK(KvFormat::latent(DType::fp8_ds_mla, kSaturated, kSaturated, 16).page_elements() == kSaturated);
  CHECK_THROWS_AS(tensorrt_llm_kv({.num_layers = 2, .layer = 2}), Error);
  CHECK_THROWS_AS(tensorrt_llm_mla_kv({.num_layers = 2, .layer = -1}), Error);
  using enum KvAxis;
  CHECK_THROWS_AS(dense_kv({}, {page, layer, half, head, head}), Error);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t layers : {std::int64_t{1} << 33, kMax}) {
    CAPTURE(layers);
    CHECK_THROWS_AS(tensorrt_llm_kv({.num_layers = layers, .layer = layers - 1}), Error);
    CHECK_THROWS_AS(tensorrt_llm_mla_kv({.num_layers = layers, .layer = layers - 1}), Error);
  }
  for (const std::int64_t size : {std::int64_t{1} << 62, kMax}) {
    CAPTURE(size);
    CHECK_THROWS_AS(vllm_kv({.num_blocks = size, .block_size = 2, .num_kv_heads = 2, .head_size = 8}), Error);
    CHECK_THROWS_AS(vllm_kv({.num_blocks = 4, .block_size = size, .num_kv_heads = 2, .head_size = 8}), Error);
  }
}

}  // namespace
}  // namespace helix::test
