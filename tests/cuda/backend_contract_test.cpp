// SPDX-License-Identifier: Apache-2.0
// The backend contract over cuda::Backend with f32 activations: the same cases as on the CPU.
#include <helix/contract/backend.hpp>
#include <helix/cuda/backend.hpp>

#include "cuda/gpu.hpp"

namespace helix::test {
namespace {

using CudaBackend = cuda::Backend<cuda::LocalComm, float>;

TEST_CASE("rms_norm keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::rms_norm<CudaBackend>();
}
TEST_CASE("linear keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::linear<CudaBackend>();
}
TEST_CASE("head_linear keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::head_linear<CudaBackend>();
}
TEST_CASE("head_rms_norm keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::head_rms_norm<CudaBackend>();
}
TEST_CASE("rope keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::rope<CudaBackend>();
}
TEST_CASE("swiglu keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::swiglu<CudaBackend>();
}
TEST_CASE("append_kv keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::append_kv<CudaBackend>();
}
TEST_CASE("write_kv and read_kv keep the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::write_and_read_kv<CudaBackend>();
}
TEST_CASE("read_latents keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::read_latents<CudaBackend>();
}
TEST_CASE("partial_attention keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::partial_attention<CudaBackend>();
}
TEST_CASE("pack_partial and stamp keep the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::pack_partial_and_stamp<CudaBackend>();
}
TEST_CASE("check_exchange keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::check_exchange<CudaBackend>();
}
TEST_CASE("lse_combine keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::lse_combine<CudaBackend>();
}
TEST_CASE("combine_exchange keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::combine_exchange<CudaBackend>();
}
TEST_CASE("prepare_latent keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::prepare_latent<CudaBackend>();
}
TEST_CASE("prepare_qkv keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::prepare_qkv<CudaBackend>();
}
TEST_CASE("reduce_norm keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::reduce_norm<CudaBackend>();
}
TEST_CASE("router_logits keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::router_logits<CudaBackend>();
  contract::route_near_ties<CudaBackend>();
}
TEST_CASE("route keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::route<CudaBackend>();
}
TEST_CASE("expert_ffn keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::expert_ffn<CudaBackend>();
}
TEST_CASE("embed and gather_rows keep the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::embed_and_gather<CudaBackend>();
}
TEST_CASE("sample keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::sample<CudaBackend>();
}
TEST_CASE("penalize and log_probs keep the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::penalties_and_log_probs<CudaBackend>();
}
TEST_CASE("logit_norms keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::logit_norms<CudaBackend>();
}
TEST_CASE("advance keeps the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::advance<CudaBackend>();
}
TEST_CASE("memory, streams and events keep the backend contract on a GPU") {
  HELIX_REQUIRE_GPUS(1);
  contract::memory_and_streams<CudaBackend>();
}

}  // namespace
}  // namespace helix::test
