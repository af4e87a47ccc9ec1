// SPDX-License-Identifier: Apache-2.0
// Appendix A and figure 3 of the paper, reproduced to the last digit.
#include <cmath>

#include <helix/hop_b_model.hpp>
#include <helix/plan/hardware.hpp>
#include <helix/plan/roofline.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using namespace helix::plan;
using helix::ErrorCode;
using helix::test::failure_of;

const Precision kFp4{4, 4, 4};
const Precision kFp8{8, 8, 8};

/// The dense model of figure 1: Q 128, K 8, Hsz 128, F 65536.
Model figure_1_model() {
  Model model = model_preset("llama-3.1-405b");
  model.shape.ffn = 65536;
  return model;
}

double us(Bytes size) {
  return in_microseconds(size / gigabytes_per_second(8000));
}

double kv_us(RooflineWidths widths) {
  return us(kv_read_bytes(figure_1_model(), kFp4, 8, tokens(1e6), widths));
}

double weights_us(RooflineWidths widths) {
  return us(weight_read_bytes(figure_1_model(), kFp4, widths));
}

TEST_CASE("KV reads of appendix A: TPA helps up to the KV heads, KVP beyond") {
  CHECK(kv_us({.tpa = 1}) == 1024);
  CHECK(kv_us({.tpa = 2}) == 512);
  CHECK(kv_us({.tpa = 8}) == 128);
  CHECK(kv_us({.tpa = 64}) == 128);
  CHECK(kv_us({.tpa = 8, .kvp = 8}) == 16);
  CHECK(kv_us({.tpa = 8, .kvp = 64}) == 2);
}

TEST_CASE("weight reads of appendix A") {
  CHECK(weights_us({.tpa = 1, .tpf = 1}) == 236.978176);
  CHECK(weights_us({.tpa = 8, .tpf = 8}) == 29.622272);
  CHECK(weights_us({.tpa = 64, .tpf = 64}) == 3.932160);
}

TEST_CASE("W_O over TPA is appendix A, over all N ranks is section 2.2") {
  RooflineWidths widths{.tpa = 8, .kvp = 8, .tpf = 64};
  widths.output_projection = OutputProjection::over_tpa;
  CHECK(weights_us(widths) == 7.602176);
  widths.output_projection = OutputProjection::over_stage;
  CHECK(weights_us(widths) == 5.767168);
}

TEST_CASE("values narrower than keys by hand") {
  Model model = figure_1_model();
  model.shape.head_dim = 192;
  RooflineWidths widths{.tpa = 8, .kvp = 4, .tpf = 32};
  CHECK(in_bytes(kv_read_bytes(model, kFp8, 2, tokens(1000), widths)) == 2.0 * (192 + 128) * 1000 / 4);
  // 16 of 128 query heads and one of 8 KV heads; W_O's input is as wide as the values.
  const double projections = 16384.0 * (16 * 192 + 192 + 128);
  const double ffn = 3.0 * 16384 * 65536 / 32;
  CHECK(in_bytes(weight_read_bytes(model, kFp8, widths)) == projections + 16384.0 * 16 * 128 + ffn);
  widths.output_projection = OutputProjection::over_stage;
  CHECK(in_bytes(weight_read_bytes(model, kFp8, widths)) == projections + 16384.0 * 4 * 128 + ffn);
}

TEST_CASE("MLA reads its latent once, however wide TPA is") {
  const Model deepseek = model_preset("deepseek-r1");
  const auto read_us = [&](RooflineWidths widths) {
    return us(kv_read_bytes(deepseek, kFp8, 8, tokens(1e6), widths));
  };
  CHECK(read_us({}) == 576);
  CHECK(read_us({.tpa = 64}) == 576);
  CHECK(read_us({.kvp = 64}) == 9);
}

TEST_CASE("weight reads of MLA and MoE layers by hand") {
  const Model deepseek = model_preset("deepseek-r1");
  const RooflineWidths widths{
      .tpa = 1, .kvp = 64, .tpf = 64, .output_projection = OutputProjection::over_stage};
  const std::int64_t everywhere = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 128 * 128 * 512;
  const std::int64_t over_stage = 128 * 512 * 128 + 128 * 128 * 7168;
  const std::int64_t attention = everywhere + over_stage / 64;
  CHECK(in_bytes(weight_read_bytes(deepseek, kFp8, widths)) ==
        static_cast<double>(attention + 3 * 7168 * 18432 / 64));
  // One token hits exactly 8 experts and the shared one.
  CHECK(in_bytes(moe_weight_read_bytes(deepseek, kFp8, 1, widths)) ==
        Approx(static_cast<double>(attention + 7168 * 256 + 9 * 3 * 7168 * 2048 / 64)).epsilon(1e-13));
  // Enough tokens that every expert is hit.
  CHECK(in_bytes(moe_weight_read_bytes(deepseek, kFp8, 1e6, widths)) ==
        static_cast<double>(attention + 7168 * 256 + 257LL * 3 * 7168 * 2048 / 64));
}

TEST_CASE("figure 3: 25.6 units without HOP-B, and with it 17.2, where the paper prints 17") {
  CHECK(helix::hop_b_time(1, 16, 9.6) == 25.6);
  CHECK(helix::hop_b_time(8, 16, 9.6) == Approx(17.2).epsilon(1e-14));
}

TEST_CASE("the roofline refuses what it has no formula for") {
  const auto routed = failure_of([] { weight_read_bytes(model_preset("mixtral-8x22b"), kFp4, {}); });
  REQUIRE(routed);
  CHECK(routed->code == ErrorCode::unsupported);
  CHECK(routed->says("moe_weight_read_bytes"));
  const auto dense = failure_of([] { moe_weight_read_bytes(figure_1_model(), kFp4, 1, {}); });
  REQUIRE(dense);
  CHECK(dense->says("no experts"));
  const auto zero = failure_of([] { kv_us({.tpa = 8, .kvp = 0}); });
  REQUIRE(zero);
  CHECK(zero->says("KVP 0"));
  const auto negative = failure_of([] { kv_read_bytes(figure_1_model(), kFp4, -1, tokens(10), {}); });
  REQUIRE(negative);
  CHECK(negative->code == ErrorCode::invalid_argument);
  CHECK(negative->says("batch is -1"));
  const auto unknown = failure_of([] { kv_read_bytes(figure_1_model(), kFp4, 1, tokens(std::nan("")), {}); });
  REQUIRE(unknown);
  CHECK(unknown->says("context is nan"));
  const Precision none{.weight_bits = 0, .kv_bits = 0};
  const auto no_kv = failure_of([&] { kv_read_bytes(figure_1_model(), none, 1, tokens(10), {}); });
  REQUIRE(no_kv);
  CHECK(no_kv->code == ErrorCode::invalid_argument);
  CHECK(no_kv->says("bits is 0"));
  CHECK(failure_of([&] { weight_read_bytes(figure_1_model(), none, {}); }) == no_kv);
  CHECK(failure_of([&] { moe_weight_read_bytes(model_preset("deepseek-r1"), none, 1, {}); }) == no_kv);
}

}  // namespace
