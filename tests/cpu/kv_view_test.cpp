// SPDX-License-Identifier: Apache-2.0
// A KV view that cannot be read is an Error that names its field.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/partial_attention.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test {
namespace {

/// A view that can be read, and everything around it.
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
    kv.page_table = pages;
    kv.max_pages = 4;
  }

  /// Throws what partial_attention() has to say of the view.
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
                       .sink = {.out = {out.data(), {1, 2, 8}}, .lse = {lse.data(), {1, 2}}},
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
  check_views(false, {
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
                         {"kvp_rank is 1", [](Readable& r) { r.kv.kvp_rank = 1; }},
                         {"kvp_rank is -1", [](Readable& r) { r.kv.kvp_rank = -1; }},
                         {"has scales", [](Readable& r) { r.kv.k_scale = r.scales; }},
                         {"dtype is bf16",
                          [](Readable& r) {
                            r.kv.format.dtype = DType::bf16;
                            r.kv.v_scale = r.scales;
                          }},
                         {"names no type", [](Readable& r) { r.kv.format.dtype = static_cast<DType>(77); }},
                     });
  check_views(true, {
                        {"value_dim is 17", [](Readable& r) { r.kv.format.value_dim = 17; }},
                        {"rope is null", [](Readable& r) { r.kv.rope = nullptr; }},
                        {"rope.token stride is 4", [](Readable& r) { r.kv.format.rope.token = 4; }},
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

TEST_CASE("makers of views pass on what was forgotten, for the operation to name") {
  const auto view = [](KvView (*make)()) {
    return [make](Readable& r) {
      const KvView kv = make();
      r.kv = kv;
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
      });
  CHECK_THROWS_AS(tensorrt_llm_kv({.num_layers = 2, .layer = 2}), Error);
}

}  // namespace
}  // namespace helix::test
