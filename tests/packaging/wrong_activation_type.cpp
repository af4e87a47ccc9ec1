// SPDX-License-Identifier: Apache-2.0
// Must not compile: HELIX_CALL selects a call that passes tensors of one activation type to a backend of
// another. The error is one line that names the type.
#include <helix/cpu/backend.hpp>
#include <helix/decode_layer.hpp>
#include <helix/embed_tokens.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>
#include <helix/prepare_latent.hpp>
#include <helix/prepare_qkv.hpp>
#include <helix/reduce_norm.hpp>

using Backend = helix::cpu::Backend<helix::cpu::LocalComm>;
using helix::bf16;

template <class Args>
const Args& given();

void call(Backend& backend, helix::cpu::Stream stream) {
#if HELIX_CALL == 1
  helix::lse_combine(backend, given<helix::LseCombineArgs<bf16>>(), stream);
#elif HELIX_CALL == 2
  helix::partial_attention(backend, given<helix::PartialAttentionArgs<bf16>>(), stream);
#elif HELIX_CALL == 3
  helix::reduce_norm(backend, given<helix::ReduceNormArgs<bf16>>(), stream);
#elif HELIX_CALL == 4
  helix::prepare_qkv(backend, given<helix::PrepareQkvArgs<bf16>>(), stream);
#elif HELIX_CALL == 5
  helix::decode_layer(backend, given<helix::RankShape>(), given<helix::LayerConfig>(),
                      given<helix::LayerWeights>(), given<helix::KvView>(), given<helix::Batch>(),
                      given<helix::TensorView<bf16, 2>>(), given<helix::DecodeLayerOptions<Backend>>(),
                      stream);
#elif HELIX_CALL == 6
  helix::embed_tokens(backend, given<helix::Topology>(), nullptr, given<helix::WeightView>(),
                      given<helix::TensorView<bf16, 2>>(), stream);
#elif HELIX_CALL == 7
  helix::project_qkv(backend, given<helix::ProjectQkvArgs<bf16>>(), stream);
#elif HELIX_CALL == 8
  helix::prepare_latent(backend, given<helix::PrepareLatentArgs<bf16>>(), stream);
#endif
}
