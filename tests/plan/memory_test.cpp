// SPDX-License-Identifier: Apache-2.0
// Layouts and memory: the rules of the baselines, and the bytes that a real ShardedKVCache takes.
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/plan/memory.hpp>
#include <helix/plan/search.hpp>
#include <helix/sharded_kv_cache.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using namespace helix::plan;
using helix::DType;
using helix::ErrorCode;
using helix::Topology;
using helix::cpu::LocalComm;
using helix::test::failure_of;
using CpuBackend = helix::cpu::Backend<LocalComm>;

/// Three layers of a preset. A head_dim of 192 differs from the value_dim of models without latent attention.
Model small_model(const char* preset, std::int64_t head_dim = 128) {
  Model model = model_preset(preset);
  if (!model.shape.is_mla()) model.shape.head_dim = head_dim;
  model.shape.num_layers = 3;
  model.shape.vocab = 256;
  return model;
}

TEST_CASE("a tied embedding is one table where the first stage is the last, and one a stage elsewhere") {
  const auto weights = [](bool is_tied, int stages) {
    Model model = small_model("llama-3.1-8b");
    model.tie_word_embeddings = is_tied;
    return in_bytes(plan_memory(model, {16, 16, 16}, {.pp = stages}, {.context = tokens(100)}).weights);
  };
  const double table = 2.0 * 256 * static_cast<double>(model_preset("llama-3.1-8b").shape.hidden);
  CHECK(weights(false, 1) - weights(true, 1) == table);
  CHECK(weights(false, 3) == weights(true, 3));
}

TEST_CASE("half a token more takes a page more") {
  const auto kv = [](double context) {
    return plan_memory(small_model("llama-3.1-8b"), {16, 16, 16}, {},
                       {.context = tokens(context), .page_tokens = 64})
        .kv;
  };
  CHECK(kv(64) < kv(64.5));
  CHECK(kv(64.5) == kv(65));
}

TEST_CASE("planned KV bytes are those that ShardedKVCache allocates, on every rank") {
  const std::vector<std::int64_t> lengths{1, 100, 257, 1000};
  for (const Model& model :
       {small_model("llama-3.1-8b"), small_model("llama-3.1-8b", 192), small_model("deepseek-v2-lite")}) {
    const bool is_latent = model.shape.is_mla();
    for (const auto& [kvp, tpa] : std::vector<std::pair<int, int>>{{1, 1}, {4, 1}, {2, 2}, {2, 8}}) {
      if (is_latent && tpa > 1) continue;
      for (const DType dtype : {DType::bf16, DType::fp8_e4m3, DType::fp8_ds_mla}) {
        if (dtype == DType::fp8_ds_mla && !is_latent) continue;
        helix::TopologySpec widths;
        widths.kvp = kvp;
        widths.tpa = tpa;
        widths.allow_uneven_ffn = true;
        const Topology topology(widths, model.shape);
        helix::KvCacheSpec spec;
        spec.dtype = dtype;
        spec.num_layers = 3;
        spec.page_tokens = 24;
        spec.chunk = 10;
        spec.num_pages = 80;
        std::vector<LocalComm> stage = LocalComm::create_group(topology.stage_size());
        for (int rank = 0; rank < topology.stage_size(); ++rank) {
          const int kvp_rank = topology.stage_coordinates(rank).kvp_rank;
          CpuBackend backend(stage[static_cast<std::size_t>(rank)],
                             LocalComm::create_group(kvp)[static_cast<std::size_t>(kvp_rank)]);
          helix::ShardedKVCache cache(backend, topology, spec);
          auto stream = backend.create_stream();
          for (const std::int64_t length : lengths) cache.append(cache.add(), length, stream);
          stream.synchronize();
          const KvPages pages{.element_bits = static_cast<std::int64_t>(8 * size_bytes(dtype)),
                              .row_bytes = dtype == DType::fp8_ds_mla ? 656 : 0,
                              .num_layers = 3,
                              .page_tokens = 24,
                              .chunk = 10};
          INFO("kvp " << kvp << " tpa " << tpa << " rank " << rank << " latent " << is_latent << " head_dim "
                      << model.shape.head_dim);
          CHECK(kv_page_bytes(topology, rank, pages) == static_cast<std::int64_t>(cache.page_bytes()));
          CHECK(kv_page_bytes_used(topology, rank, pages, lengths) ==
                static_cast<std::int64_t>(cache.allocated_bytes()));
        }
      }
    }
  }
}

TEST_CASE("a page of elements that are no whole bytes takes the byte that it ends in") {
  const Model model = model_preset("llama-3.1-8b");  // 2 * 8 * 128 elements a token
  helix::ModelShape narrow = model.shape;
  narrow.num_kv_heads = narrow.num_query_heads = 1;
  narrow.head_dim = narrow.value_dim = 3;  // 6 elements a token
  const Topology topology({}, narrow);
  CHECK(kv_page_bytes(topology, 0, {.element_bits = 1, .num_layers = 1, .page_tokens = 1}) == 1);
  CHECK(kv_page_bytes(topology, 0, {.element_bits = 3, .num_layers = 1, .page_tokens = 1}) == 3);  // 18 bits
  CHECK(kv_page_bytes(topology, 0, {.element_bits = 4, .num_layers = 2, .page_tokens = 3}) == 2 * 9);
}

TEST_CASE("the memory of a pipeline is that of the stage that holds most") {
  Model model = model_preset("llama-3.1-8b");
  model.shape.num_layers = 3;  // 2 and 1
  model.shape.vocab = 0;
  const Workload workload{.context = tokens(1000), .batch = 2};
  Model of_two = model;
  of_two.shape.num_layers = 2;
  const RankMemoryPlan both = plan_memory(model, {}, {.pp = 2}, workload);
  const RankMemoryPlan first = plan_memory(of_two, {}, {}, workload);
  CHECK(both.weights == first.weights);
  CHECK(both.kv == first.kv);
}

TEST_CASE("the plan of a Helix layout counts the same pages") {
  const Model model = model_preset("llama-3.1-405b");
  const Layout layout{.kvp = 8, .tpa = 8, .tpf = 64};
  const Workload workload{.context = tokens(1e6), .batch = 3};
  const RankMemoryPlan plan = plan_memory(model, {.kv_bits = 4}, layout, workload);
  const Topology topology(layout.topology_spec(), model.shape);
  const std::vector<std::int64_t> lengths(3, 1000000);
  CHECK(in_bytes(plan.kv) == static_cast<double>(kv_page_bytes_used(
                                 topology, 0, {.element_bits = 4, .num_layers = 126}, lengths)));
  Model wide_keys = model;
  wide_keys.shape.head_dim = 192;  // with a value_dim of 128, for which the cache reserves 192 columns
  CHECK(in_bytes(plan_memory(wide_keys, {.kv_bits = 4}, layout, workload).kv) == 1.5 * in_bytes(plan.kv));
  // One of 64 ranks holds a 64th of 129.024 GB per request, up to one page per sequence.
  CHECK(in_gigabytes(plan.kv) == Approx(3 * 129.024 / 64).epsilon(0.001));
}

TEST_CASE("weights of a rank by hand: attention over TPA and replicated over KVP, the rest over N") {
  const Model model = model_preset("llama-3.1-8b");
  const Workload workload{.context = tokens(1000)};
  const RankMemoryPlan plan = plan_memory(model, {}, {.kvp = 2, .tpa = 4, .tpf = 8}, workload);
  const double qkv = 4096.0 * (4096 + 2 * 1024) / 4;
  const double output = 4096.0 * 4096 / 8;
  const double ffn = 3.0 * 4096 * 14336 / 8;
  const double vocabulary = 2 * 128256.0 * 4096 / 8;
  CHECK(in_bytes(plan.weights) == 2 * (32 * (qkv + output + ffn + 2 * 4096) + vocabulary));
  // A single rank holds every parameter except the final norm.
  const RankMemoryPlan whole = plan_memory(model, {}, {}, workload);
  CHECK(in_bytes(whole.weights) == 2.0 * static_cast<double>(count_parameters(model).total() - 4096));
}

TEST_CASE("memory of DeepSeek-R1 on two stages of KVP 8, EP 8 by hand") {
  const Model model = model_preset("deepseek-r1");
  const Layout layout{.kvp = 8, .ep = 8, .pp = 2};
  REQUIRE(violations(layout, model).empty());
  const RankMemoryPlan plan = plan_memory(model, {.weight_bits = 4, .kv_bits = 8, .activation_bits = 16},
                                          layout, {.context = tokens(1100), .batch = 3, .step_tokens = 2});
  // Each rank has W_DQ, W_UQ, the two matrices of the latent and W_UK of all 128 heads, and W_UV and W_O of
  // 16 heads.
  const double attention = 7168.0 * 1536 + 1536.0 * 128 * 192 + 7168.0 * 576 + 128.0 * 128 * 512 +
                           16.0 * 512 * 128 + 16.0 * 128 * 7168 + 2 * 7168;
  // 32 of 256 experts, an eighth of the shared expert, and the whole router.
  const double moe = 3.0 * 7168 * (32 * 2048 + 2048 / 8) + 7168.0 * 256;
  // 31 and 30 layers. The first stage has the 3 dense layers, so the second stage with 30 MoE layers and the
  // head is larger.
  CHECK(in_bytes(plan.weights) == (30 * (attention + moe) + 129280.0 / 8 * 7168) / 2);
  // Of 1100 tokens in chunks of 16, rank 0 has 8 chunks from whole periods of 128 tokens and one more: 144
  // tokens, 3 pages. All three sequences are cached, in the 31 layers of the first stage.
  CHECK(in_bytes(plan.kv) == 3.0 * 64 * 576 * 3 * 31);
  // Two micro-batches of two sequences each, so 4 tokens at a time. Hidden states twice, query and latent;
  // three times the outputs of 128 heads; hidden states, dense FFN and shared expert; and 8 experts per
  // token, all of them on this rank.
  const double activations = 4 * (2 * 7168 + 128 * 576 + 576) + 3.0 * 4 * 128 * 512 +
                             4 * (7168 + 2 * 18432 / 8 + 2 * 2048 / 8) + 4 * 8 * (7168 + 2 * 2048);
  CHECK(in_bytes(plan.workspace) == 2 * activations + 4.0 * 4 * 129280 / 8);
}

TEST_CASE("more KVP never raises the KV bytes of a rank") {
  for (const char* name : {"llama-3.1-405b", "deepseek-r1", "gpt-oss-120b"}) {
    const Model model = model_preset(name);
    for (const double context : {1.0, 15.0, 17.0, 4097.0, 99999.0, 1e6}) {
      for (const std::int64_t chunk : {1, 16, 1000}) {
        Bytes last = Bytes::unlimited();
        for (int kvp = 1; kvp <= 70; ++kvp) {
          const Workload workload{.context = tokens(context), .batch = 3, .chunk = chunk};
          const Bytes kv = plan_memory(model, {}, {.kvp = kvp, .tpf = kvp}, workload).kv;
          INFO(name << " context " << context << " chunk " << chunk << " kvp " << kvp);
          CHECK(kv <= last);
          last = kv;
        }
      }
    }
  }
}

TEST_CASE("Helix layouts are legal exactly where Topology says so") {
  for (const char* name : {"llama-3.1-8b", "deepseek-r1", "mixtral-8x22b", "llama-4-maverick"}) {
    const Model model = model_preset(name);
    int legal = 0;
    for (int kvp = 1; kvp <= 8; ++kvp) {
      for (int tpa = 1; tpa <= 10; ++tpa) {
        for (int ep = 1; ep <= 8; ++ep) {
          if (kvp * tpa % ep != 0) continue;
          const Layout layout{.kvp = kvp, .tpa = tpa, .tpf = kvp * tpa / ep, .ep = ep};
          bool builds = true;
          try {
            const Topology topology(layout.topology_spec(), model.shape);
          } catch (const helix::Error&) {
            builds = false;
          }
          INFO(name << " " << layout.to_string());
          CHECK(is_legal(layout, model) == builds);
          CHECK(violations(layout, model).empty() == builds);
          legal += builds;
        }
      }
    }
    CHECK(legal > 5);
    for (const int n : {1, 2, 4, 8}) {
      const std::size_t known = Topology::legal_topologies(model.shape, n).size();
      CHECK(legal_layouts(Strategy::helix, model, n).size() == known);
    }
  }
}

TEST_CASE("the widest layout has the ranks of the widest topology") {
  Model model = model_preset("llama-3.1-8b");
  model.shape.num_query_heads = model.shape.ffn = std::int64_t{1} << 17;
  Layout layout{.kvp = 1 << 13, .tpa = 8, .tpf = 1 << 16};
  CHECK(is_legal(layout, model));
  CHECK_NOTHROW(Topology(layout.topology_spec(), model.shape));
  CHECK(legal_layouts(Strategy::helix, model, layout.stage_size()).size() == 4);  // TPA 1, 2, 4 and 8
  CHECK_NOTHROW(SearchSpace{.max_gpus = layout.stage_size()}.check());
  layout = {.kvp = 1 << 14, .tpa = 8, .tpf = 1 << 17};
  CHECK_FALSE(is_legal(layout, model));
  CHECK(violations(layout, model) == std::vector<std::string>{"TPF is 131072; it must be in [1, 65536]"});
  CHECK_THROWS_AS(Topology(layout.topology_spec(), model.shape), helix::Error);
  layout.strategy = Strategy::tensor_parallel;
  layout.kvp = layout.tpa = 1;
  layout.tpf = layout.ep = 1 << 16;
  CHECK(violations(layout, model).front() == "TPF 65536 * EP 65536 differs from the 1 ranks of the FFN");
}

TEST_CASE("baselines keep their own rules") {
  const Model llama = model_preset("llama-3.1-405b");
  const Model deepseek = model_preset("deepseek-r1");
  const auto layout = [](Strategy strategy) {
    Layout result;
    result.strategy = strategy;
    return result;
  };
  Layout tp = layout(Strategy::tensor_parallel);
  tp.tpa = tp.tpf = 64;
  CHECK(is_legal(tp, llama));
  CHECK(is_legal(tp, deepseek));
  tp.tpa = tp.tpf = 12;
  CHECK_FALSE(is_legal(tp, llama));
  CHECK(violations(tp, llama).size() == 3);  // query heads, KV heads, FFN
  tp.tpa = tp.tpf = 8;
  tp.pp = static_cast<int>(llama.shape.num_layers);
  CHECK(is_legal(tp, llama));
  ++tp.pp;
  CHECK_FALSE(is_legal(tp, llama));
  // The shared expert stays with the 2 ranks that attend to a token; routed ones go over all 4.
  Model narrow = deepseek;
  narrow.shape.moe->shared_ffn = 2;
  Layout few = layout(Strategy::data_parallel_attention);
  few.attn_dp = few.tpa = few.tpf = few.ep = 2;
  CHECK(is_legal(few, narrow));
  narrow.shape.moe->shared_ffn = 3;
  CHECK_FALSE(is_legal(few, narrow));

  Layout dp = layout(Strategy::data_parallel_attention);
  dp.attn_dp = 64;
  dp.ep = 64;
  CHECK(is_legal(dp, deepseek));
  CHECK_FALSE(is_legal(dp, llama));  // the model has no experts

  Layout medha = layout(Strategy::medha);
  medha.kvp = 8;
  medha.tpa = medha.tpf = 8;
  CHECK(is_legal(medha, llama));
  medha.tpf = 64;
  CHECK_FALSE(is_legal(medha, llama));
  Layout routed = layout(Strategy::medha);
  routed.kvp = 2;
  routed.tpa = routed.tpf = 4;
  CHECK(is_legal(routed, model_preset("mixtral-8x22b")));
  routed.tpf = routed.ep = 2;
  CHECK(violations(routed, model_preset("mixtral-8x22b")) ==
        std::vector<std::string>{"EP is 2; the strategy splits experts by TPF: use 1"});
  CHECK(legal_layouts(Strategy::medha, deepseek, 64).size() == 1);
  CHECK(legal_layouts(Strategy::medha, deepseek, 64, true).size() > 1);

  Layout bad = layout(Strategy::helix);
  bad.kvp = 0;
  bad.pp = -1;
  CHECK(violations(bad, llama).size() == 2);
  bad = layout(Strategy::tensor_parallel);
  bad.tpa = 1 << 30;
  CHECK_FALSE(is_legal(bad, llama));
}

TEST_CASE("the memory of a layout whose widths cannot be is refused with the value") {
  const auto refuses = [](const Layout& layout, const char* says) {
    const auto failure =
        failure_of([&] { plan_memory(model_preset("llama-3.1-8b"), {}, layout, {.context = tokens(100)}); });
    return failure && failure->code == ErrorCode::invalid_argument && failure->says(says);
  };
  CHECK(refuses({.kvp = 0}, "KVP is 0"));
  CHECK(refuses({.tpa = -1}, "TPA -1"));
  CHECK(refuses({.dp = 0}, "DP 0"));
  CHECK(refuses({.kvp = 1 << 16, .tpa = 1 << 16}, "is 4294967296"));
}

TEST_CASE("absurd workloads are refused with the value") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refuses = [](Workload workload, const char* says) {
    const auto failure = failure_of([&] { workload.check(); });
    return failure && failure->code == ErrorCode::invalid_argument && failure->says(says) &&
           failure_of([&] { plan_memory(model_preset("llama-3.1-8b"), {}, {}, workload); }) == failure;
  };
  CHECK(refuses({.context = tokens(0)}, "context is 0"));
  CHECK(refuses({.context = tokens(nan)}, "context is nan"));
  CHECK(refuses({.context = tokens(1e15)}, "context is 1e+15"));
  CHECK(refuses({.context = tokens(10), .batch = 0}, "batch is 0"));
  CHECK(refuses({.context = tokens(10), .batch = -5}, "batch is -5"));
  CHECK(refuses({.context = tokens(10), .step_tokens = 11}, "step_tokens is 11"));
  CHECK(refuses({.context = tokens(10), .page_tokens = 0}, "page_tokens is 0"));
}

}  // namespace
