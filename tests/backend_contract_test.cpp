// SPDX-License-Identifier: Apache-2.0
// The backend contract over every Backend of this build that needs no GPU.
#include <helix/backend/optional.hpp>
#include <helix/contract/backend.hpp>
#include <helix/cpu/backend.hpp>

#include "support/recording_backend.hpp"
#include "support/reference_backend.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

/// A cpu::Backend whose operations are shared by three threads.
class ThreadedCpuBackend : public CpuBackend {
 public:
  ThreadedCpuBackend() : CpuBackend(3) {}
};

template <class B>
constexpr bool has_no_reduce_norm = requires {
  &helix::detail::WithOptionalNames<B>::reduce_norm;
};
struct WithoutIt {};
struct WithOtherArguments {
  void reduce_norm(int);
};
struct WithTwo {
  void reduce_norm(int);
  void reduce_norm(int, int);
};
struct WithTemplate {
  template <class T>
  requires(sizeof(T) > 100) void reduce_norm(T);
};
class WithPrivate {
  void reduce_norm(int);
};
static_assert(has_no_reduce_norm<WithoutIt> && has_no_reduce_norm<CpuBackend>);
static_assert(!has_no_reduce_norm<WithOtherArguments> && !has_no_reduce_norm<WithTwo>);
static_assert(!has_no_reduce_norm<WithTemplate> && !has_no_reduce_norm<WithPrivate>);

// A macro, because Catch2 takes types only as tokens.
#define HELIX_ALL_BACKENDS CpuBackend, ThreadedCpuBackend, RecordingBackend, ReferenceBackend

TEMPLATE_TEST_CASE("rms_norm keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::rms_norm<TestType>();
}
TEMPLATE_TEST_CASE("linear keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::linear<TestType>();
}
TEMPLATE_TEST_CASE("head_linear keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::head_linear<TestType>();
}
TEMPLATE_TEST_CASE("head_rms_norm keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::head_rms_norm<TestType>();
}
TEMPLATE_TEST_CASE("rope keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::rope<TestType>();
}
TEMPLATE_TEST_CASE("swiglu keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::swiglu<TestType>();
}
TEMPLATE_TEST_CASE("append_kv keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::append_kv<TestType>();
}
TEMPLATE_TEST_CASE("write_kv and read_kv keep the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::write_and_read_kv<TestType>();
}
TEMPLATE_TEST_CASE("read_latents keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::read_latents<TestType>();
}
TEMPLATE_TEST_CASE("partial_attention keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::partial_attention<TestType>();
}
TEMPLATE_TEST_CASE("pack_partial and stamp keep the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::pack_partial_and_stamp<TestType>();
}
TEMPLATE_TEST_CASE("check_exchange keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::check_exchange<TestType>();
}
TEMPLATE_TEST_CASE("lse_combine keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::lse_combine<TestType>();
}
TEMPLATE_TEST_CASE("combine_exchange keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::combine_exchange<TestType>();
}
TEMPLATE_TEST_CASE("prepare_latent keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::prepare_latent<TestType>();
}
TEMPLATE_TEST_CASE("prepare_qkv keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::prepare_qkv<TestType>();
}
TEMPLATE_TEST_CASE("reduce_norm keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::reduce_norm<TestType>();
}
TEMPLATE_TEST_CASE("router_logits keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::router_logits<TestType>();
  contract::route_near_ties<TestType>();
}
TEMPLATE_TEST_CASE("route keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::route<TestType>();
}
TEMPLATE_TEST_CASE("expert_ffn keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::expert_ffn<TestType>();
}
TEMPLATE_TEST_CASE("embed and gather_rows keep the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::embed_and_gather<TestType>();
}
TEMPLATE_TEST_CASE("sample keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::sample<TestType>();
}
TEMPLATE_TEST_CASE("penalize and log_probs keep the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::penalties_and_log_probs<TestType>();
}
TEMPLATE_TEST_CASE("logit_norms keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::logit_norms<TestType>();
}
TEMPLATE_TEST_CASE("advance keeps the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::advance<TestType>();
}
TEMPLATE_TEST_CASE("memory, streams and events keep the backend contract", "", HELIX_ALL_BACKENDS) {
  contract::memory_and_streams<TestType>();
}

TEST_CASE("The contract sees a wrong element, a missing one and a write past the end") {
  const auto difference_after = [](auto vandalism) {
    contract::Workbench<CpuBackend> bench;
    const auto in = bench.random(2 * 6);
    const auto out = bench.poison(6);
    return bench.difference(
        [&](const auto& side) {
          return SwigluArgs<float>{side.view(in, 2, 6), side.view(out, 2, 3)};
        },
        [](const auto& args) { reference::swiglu(args); },
        [&](const auto& args, auto stream) {
          bench.backend().swiglu(args, stream);
          stream.enqueue([out = args.out.data(), vandalism] { vandalism(out); });
        });
  };
  CHECK(difference_after([](float*) {}) == "");
  CHECK(difference_after([](float* out) { out[4] += 1e-3f; }) != "");
  CHECK(difference_after([](float* out) { out[5] = std::nanf(""); }) != "");
  CHECK(difference_after([](float* out) { out[6] = 0.0f; }) != "");
  CHECK(difference_after([](float* out) { out[-1] = 0.0f; }) != "");
}

}  // namespace
}  // namespace helix::test
