// SPDX-License-Identifier: Apache-2.0
// What a machine owes: the concepts Backend and Communicator, and the args struct of every operation.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <helix/dtype.hpp>
#include <helix/kv_layout.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

// ---------------------------------------------------------------------------------------------------------------
// Data that operations read. All pointers are device pointers of the backend unless a comment says host.
// ---------------------------------------------------------------------------------------------------------------

/// A weight matrix [rows, cols] as a checkpoint stores it: row-major, one row an output feature.
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::f32;  ///< f32, f16 or bf16
  std::int64_t rows = 0;     ///< output features
  std::int64_t cols = 0;     ///< input features

  bool empty() const { return data == nullptr; }
};

/// One step's tokens. Ragged: sequence b has query tokens [query_offsets[b], query_offsets[b+1]), which index
/// the step's token tensors. A slice of the batch (slice()) keeps those indices and the whole tensors, and
/// covers fewer sequences. Shapes and query_offsets are fixed when a step is captured; the rest is read from
/// device memory (invariant 10).
struct Batch {
  std::span<const std::int32_t> query_offsets_host;  ///< [B + 1], host memory; the slicing of HOP-B needs it
  const std::int32_t* query_offsets = nullptr;       ///< [B + 1], the same on the device
  const std::int64_t* positions = nullptr;       ///< [tokens of the step], global; -1: padding, reads nothing
  const std::int32_t* sequence_slots = nullptr;  ///< [B], rows of the cache's page table

  std::int64_t num_sequences() const {
    return query_offsets_host.empty() ? 0 : static_cast<std::int64_t>(query_offsets_host.size()) - 1;
  }
  std::int64_t first_token() const { return query_offsets_host.empty() ? 0 : query_offsets_host.front(); }
  std::int64_t num_tokens() const {
    return query_offsets_host.empty() ? 0 : query_offsets_host.back() - query_offsets_host.front();
  }

  /// Sequences [begin, begin + count) of this batch.
  Batch slice(std::int64_t begin, std::int64_t count) const {
    return {query_offsets_host.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count) + 1),
            query_offsets + begin, positions, sequence_slots + begin};
  }
};

/// One layer's shard of the paged KV cache. Pages are [page, 2, Hkv/TPA, page_tokens, D], head-major, K
/// before V; with `is_mla` [page, page_tokens, D] and V is the first value_dim elements of each row.
struct KvView {
  void* pages = nullptr;
  DType dtype = DType::f32;
  std::int64_t num_heads = 0;  ///< KV heads stored on this rank
  std::int64_t head_dim = 0;   ///< D
  std::int64_t value_dim = 0;  ///< Dv
  std::int64_t page_tokens = 0;
  std::int64_t num_pages = 0;
  bool is_mla = false;
  const float* k_scale = nullptr;  ///< [num_heads], fp8 only: stored * scale = value; nullptr means 1
  const float* v_scale = nullptr;  ///< [num_heads]; MLA uses k_scale for the whole row
  const std::int32_t* page_table =
      nullptr;                 ///< [max_sequences, max_pages]: page of each page_tokens local tokens
  std::int64_t max_pages = 0;  ///< row length of page_table
  KvLayout layout{1, 1};
  std::int64_t kvp_rank = 0;

  /// Elements of one page, both K and V.
  std::int64_t page_elements() const { return (is_mla ? 1 : 2 * num_heads) * page_tokens * head_dim; }
};

/// Rotary embedding of one model. Angle of pair i at position p: p * inverse_frequency[i].
struct RopeView {
  const float* inverse_frequency = nullptr;  ///< [rotary_dim / 2], after llama3, linear or yarn scaling
  std::int64_t rotary_dim = 0;
  bool is_interleaved = false;  ///< pairs (2i, 2i+1) as DeepSeek stores them, else (i, i + rotary_dim/2)
  float magnitude = 1.0f;       ///< factor on cos and sin (yarn)
};

// ---------------------------------------------------------------------------------------------------------------
// Operations. `T` is the activation type (f32 on the CPU). Shapes follow each field; none may alias unless
// said.
// ---------------------------------------------------------------------------------------------------------------

/// out = residual' / rms(residual') * weight, with residual' = residual + delta written back to residual.
template <class T>
struct RmsNormArgs {
  TensorView<const T, 2> delta;  ///< [rows, M] or empty: nothing is added
  TensorView<T, 2> residual;     ///< [rows, M], read; written when delta is given
  WeightView weight;             ///< [1, M]
  TensorView<T, 2> out;  ///< [rows, M]; may alias residual when delta is empty; empty: only the addition
  float epsilon = 1e-5f;
};

/// out[r, n] = sum_k in[r, k] * weight[n, k] (+ bias[n]) (+ out[r, n] when accumulate).
template <class T>
struct LinearArgs {
  TensorView<const T, 2> in;  ///< [rows, K], rows may be strided
  WeightView weight;          ///< [N, K]
  WeightView bias;            ///< [1, N] or empty
  TensorView<T, 2> out;       ///< [rows, N], rows may be strided
  bool accumulate = false;
};

/// Per-head product: out[t, h, n] = sum_k in[t, h, k] * weight[h, n, k]. MLA's W_UK and W_UV.
template <class T>
struct HeadLinearArgs {
  TensorView<const T, 3> in;  ///< [tokens, H, K], any strides with the last one 1
  WeightView weight;          ///< [H * N, K]
  TensorView<T, 3> out;       ///< [tokens, H, N], any strides with the last one 1
};

/// x / rms(x) * weight of each head, in place (the q/k norm of some models).
template <class T>
struct HeadRmsNormArgs {
  TensorView<T, 3> x;  ///< [tokens, H, D], last stride 1, in place
  WeightView weight;   ///< [1, D]
  float epsilon = 1e-5f;
};

/// out = `in` with the first rotary_dim elements of each head rotated and the rest copied.
template <class T>
struct RopeArgs {
  TensorView<const T, 3> in;                ///< [tokens, H, >= rotary_dim], last stride 1
  TensorView<T, 3> out;                     ///< as `in`; may be the same memory
  const std::int64_t* positions = nullptr;  ///< [tokens]
  RopeView rope;
};

/// Stores each token whose owner is kv.kvp_rank (the test runs on the device); drops the others and padding.
template <class T>
struct AppendKvArgs {
  TensorView<const T, 3> k;  ///< [tokens, Hkv/TPA, D]; MLA: the latent rows [tokens, 1, 576]
  TensorView<const T, 3> v;  ///< [tokens, Hkv/TPA, Dv]; MLA: empty
  Batch batch;
  KvView kv;
};

/// Stores those tokens of one sequence that kv.kvp_rank owns; row i is the token at global position
/// first_position + i. Converts as append_kv does: rounds value / scale to the nearest stored value.
template <class T>
struct WriteKvArgs {
  TensorView<const T, 3> k;  ///< [tokens, Hkv/TPA, D], last stride 1
  TensorView<const T, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1; MLA: empty
  std::int64_t first_position = 0;
  std::int32_t sequence_slot = 0;
  KvView kv;
};

/// Reads local tokens [first_local, + rows of k) of one sequence back as values, stored * scale.
struct ReadKvArgs {
  KvView kv;
  std::int32_t sequence_slot = 0;
  std::int64_t first_local = 0;
  TensorView<float, 3> k;  ///< [tokens, Hkv/TPA, D], last stride 1, written
  TensorView<float, 3> v;  ///< [tokens, Hkv/TPA, Dv], last stride 1, written; MLA: empty
};

/// What a packed message begins with; KvpAllToAll says what follows.
struct ExchangeHeader {
  std::uint64_t epoch = 0;  ///< exchange_epoch() of the sender (invariant 13)
  std::uint32_t tokens = 0;
  std::uint32_t sender = 0;  ///< kvp_rank
};

/// What position number `index` of a step adds to the sum in exchange_epoch().
HELIX_HOST_DEVICE constexpr std::uint64_t exchange_epoch_term(std::int64_t position, std::int64_t index) {
  std::uint64_t mixed = static_cast<std::uint64_t>(position) +
                        static_cast<std::uint64_t>(index + 1) * 0x9e3779b97f4a7c15u;  // splitmix64
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return mixed ^ mixed >> 31;
}

/// What a header says of its step: the exchanges that the sender has done, this one included, plus a hash of
/// the positions in the upper half. The count alone cannot tell steps apart: a collective pairs the n-th call
/// of each rank with the n-th of the others, also when one of them has left out a step. The positions of two
/// steps in a row always differ. `terms`: the sum of exchange_epoch_term() over the positions, which threads
/// may share out; 0 without positions.
HELIX_HOST_DEVICE constexpr std::uint64_t exchange_epoch(std::uint64_t exchanges, std::uint64_t terms) {
  return exchanges + (terms >> 32 << 32);
}

/// The same of `positions` [tokens]; nullptr: the count alone.
constexpr std::uint64_t exchange_epoch(std::uint64_t exchanges, const std::int64_t* positions,
                                       std::int64_t tokens) {
  std::uint64_t terms = 0;
  for (std::int64_t i = 0; positions != nullptr && i < tokens; ++i)
    terms += exchange_epoch_term(positions[i], i);
  return exchange_epoch(exchanges, terms);
}

/// Writes the header of `count` messages, `message_bytes` apart: exchange_epoch(`*epoch` + 1, positions,
/// tokens) (and advances `*epoch`), `tokens`, `sender`.
struct StampArgs {
  std::byte* message = nullptr;  ///< the first one
  std::int64_t tokens = 0;
  std::int64_t sender = 0;
  std::uint64_t* epoch = nullptr;           ///< device counter of the sender
  const std::int64_t* positions = nullptr;  ///< [tokens], of the step's tokens, or nullptr
  std::int64_t count = 1;
  std::int64_t message_bytes = 0;
};

/// Attention of each query over this rank's shard: out = softmax(scale * q k) v, lse = log(sum(exp(scale * q
/// k))). Query at global position p reads local tokens [length(p + 1 - window), length(p + 1)).
template <class T>
struct PartialAttentionArgs {
  TensorView<const T, 3> q;  ///< [tokens of the step, Hq/TPA, D], last stride 1
  Batch batch;               ///< the whole step or a slice; only its tokens' rows of out and lse are written
  KvView kv;
  TensorView<T, 3>
      out;  ///< [tokens of the step, Hq/TPA, Dv], last stride 1; 0 for a query that sees no token
  TensorView<float, 2>
      lse;  ///< [tokens of the step, Hq/TPA], natural log; -inf for a query that sees no token
  float scale = 0.0f;
  std::int64_t window = 0;           ///< tokens that a query sees, itself included; 0 is all of them
  float soft_cap = 0.0f;             ///< score = cap * tanh(score / cap) before the softmax; 0 is none
  std::span<std::byte> workspace;    ///< partial_attention_workspace_bytes()
  std::int64_t first_out_token = 0;  ///< token of the step that row 0 of out and lse belongs to
  StampArgs headers{};  ///< of the messages that out and lse lie in, written too; message null: none
};

/// Copies partials that were not written in place into the messages, and writes their headers.
template <class T>
struct PackPartialArgs {
  TensorView<const T, 3> out;      ///< [tokens, KVP * h, Dv], last stride 1
  TensorView<const float, 2> lse;  ///< [tokens, KVP * h]
  TensorView<T, 3> packed_out;     ///< where they belong in the messages; last stride 1
  TensorView<float, 2> packed_lse;
  StampArgs headers;
};

/// Verifies that every received header carries the epoch of this rank's own, `tokens`, and its sender's rank.
/// A mismatch is an Error(out_of_step) on the stream.
struct CheckExchangeArgs {
  const std::byte* messages = nullptr;  ///< [peers, message_bytes]
  std::int64_t message_bytes = 0;
  std::int64_t peers = 1;
  std::int64_t tokens = 0;
  const std::byte* sent = nullptr;  ///< a message of the same exchange that this rank stamped
};

/// Exact merge of R partials in fixed order: out = sum_r w_r out_r / sum_r w_r (+ exp(sink - max)), w_r =
/// exp(lse_r - max). A partial with lse = -inf has weight 0 whatever its out holds; all of them -inf: out =
/// 0, lse = -inf.
template <class T>
struct LseCombineArgs {
  TensorView<const T, 4> partial_out;      ///< [R, tokens, heads, Dv], any strides with the last one 1
  TensorView<const float, 3> partial_lse;  ///< [R, tokens, heads], natural log, any strides
  const float* sink = nullptr;             ///< [heads] logits that join the denominator once, or nullptr
  TensorView<T, 3> out;                    ///< [tokens, heads, Dv], last stride 1
  TensorView<float, 2> lse;                ///< [tokens, heads] or empty; includes the sink
};

/// out[r, i] = silu(gate_up[r, i]) * gate_up[r, F + i].
template <class T>
struct SwigluArgs {
  TensorView<const T, 2> gate_up;  ///< [rows, 2F]
  TensorView<T, 2> out;            ///< [rows, F]
};

enum class RouterScoring : std::uint8_t {
  softmax,  ///< DeepSeek-V2: scores are softmax(logits), a group counts by its maximum
  sigmoid   ///< DeepSeek-V3: scores are sigmoid(logits), a group counts by the sum of its two best
};

/// Chooses top_k experts a token. Only the choice sees `bias`; the weights are the unbiased scores.
template <class T>
struct RouteArgs {
  TensorView<const T, 2> logits;  ///< [tokens, E], f32
  const float* bias = nullptr;    ///< [E] or nullptr
  RouterScoring scoring = RouterScoring::softmax;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;  ///< experts outside the kept groups score -inf
  bool normalize = false;        ///< divide by (their sum + 1e-20)
  float scale = 1.0f;
  TensorView<std::int32_t, 2> experts;  ///< [tokens, top_k], written, best first
  TensorView<float, 2> weights;         ///< [tokens, top_k], written
};

/// Weights of one routed expert's slice on this rank.
struct ExpertWeights {
  WeightView gate_up;  ///< [2 F/TPF, M]: gate rows, then up rows
  WeightView down;     ///< [M, F/TPF]
};

/// out[t] += sum over this rank's chosen experts e of weight * down_e(swiglu(gate_up_e(in[t]))).
template <class T>
struct ExpertFfnArgs {
  TensorView<const T, 2> in;                     ///< [tokens, M]
  TensorView<const std::int32_t, 2> experts;     ///< [tokens, top_k], global expert ids
  TensorView<const float, 2> weights;            ///< [tokens, top_k]
  std::span<const ExpertWeights> local_experts;  ///< host array of this EP rank's experts
  std::int64_t first_expert = 0;                 ///< global id of local_experts[0]
  TensorView<T, 2> out;                          ///< [tokens, M], accumulated into
  std::span<std::byte> workspace;                ///< expert_ffn_workspace_bytes()
};

/// out[t] = table[ids[t] - first_id], or 0 for ids of another shard (an all-reduce then sums the shards).
template <class T>
struct EmbedArgs {
  const std::int32_t* ids = nullptr;  ///< [tokens]
  WeightView table;                   ///< [shard of the vocabulary, M]
  std::int64_t first_id = 0;
  TensorView<T, 2> out;  ///< [tokens, M]
};

/// out[i] = in[rows[i]].
template <class T>
struct GatherRowsArgs {
  TensorView<const T, 2> in;           ///< [n, M]
  const std::int32_t* rows = nullptr;  ///< [out rows]
  TensorView<T, 2> out;                ///< [out rows, M]
};

/// Draws one token a row. temperature 0 is greedy (smallest id on ties). Otherwise the draw is a function of
/// (seed, counters[row]) and the logits alone, so that ranks with equal logits draw equal tokens.
template <class T>
struct SampleArgs {
  TensorView<const T, 3>
      logits;  ///< [shards, rows, width]: shard s holds ids [begins[s], begins[s+1]); rest is padding
  const std::int64_t* shard_begins = nullptr;  ///< [shards + 1], device
  float temperature = 0.0f;
  float top_p = 1.0f;  ///< smallest set of likeliest tokens whose probability reaches top_p
  std::uint64_t seed = 0;
  const std::uint64_t* counters = nullptr;  ///< [rows]; nullptr only when temperature is 0
  std::int32_t* tokens = nullptr;           ///< [rows], written
};

/// norms[r] = L2 norm of row r's logits, summed in f32 or wider: a fingerprint of a step for reports and
/// comparisons.
template <class T>
struct LogitNormsArgs {
  TensorView<const T, 3> logits;               ///< as SampleArgs
  const std::int64_t* shard_begins = nullptr;  ///< as SampleArgs
  float* norms = nullptr;                      ///< [rows], written
};

/// values[i] += 1 where values[i] >= 0: the positions of one decode step become those of the next, and
/// padding (-1) stays.
struct AdvanceArgs {
  std::int64_t* values = nullptr;  ///< [count]
  std::int64_t count = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// Concepts
// ---------------------------------------------------------------------------------------------------------------

/// Collectives of one group. Asynchronous: each is queued on `stream`, and every rank of the group calls it
/// in the same order with the same sizes. Movement counts bytes, reductions count elements. all_reduce gives
/// the same bits on every rank (invariant 12). A failure is sticky on the stream and aborts the group.
template <class C>
concept Communicator = requires(C& comm, const C& const_comm, const void* in, void* out, std::int64_t n,
                                int peer, std::span<const std::int64_t> per_peer, DType dtype,
                                typename C::Stream stream, std::string_view reason) {
  { const_comm.rank() } -> std::convertible_to<int>;
  { const_comm.size() } -> std::convertible_to<int>;
  comm.all_reduce(in, out, n, dtype, stream);      // sum of n elements; in may equal out
  comm.reduce_scatter(in, out, n, dtype, stream);  // in [size, n] elements -> out [n]
  comm.all_gather(in, out, n, stream);             // in n bytes -> out [size, n]
  comm.all_to_all(in, out, n, stream);             // in [size, n bytes] -> out [size, n bytes]
  comm.all_to_all_v(in, per_peer, out, per_peer,
                    stream);             // bytes sent to and received from each peer, packed
  comm.broadcast(out, n, peer, stream);  // n bytes from root `peer`
  comm.send(in, n, peer, stream);        // n bytes, matched with the peer's recv
  comm.recv(out, n, peer, stream);
  comm.barrier(stream);
  { comm.split(peer, peer) } -> std::same_as<C>;  // (color, key); collective, blocks the host
  comm.abort(reason);                             // wakes every rank with Error(peer_failed) naming this one
};

/// The two groups that one layer talks to.
template <class Comm>
struct StageComms {
  Comm* stage = nullptr;  ///< all N ranks of the stage, by stage_rank
  Comm* kvp = nullptr;    ///< the KVP group, by kvp_rank
};

/// What HopB chooses the number of slices by, as measured: a backend may state its own as `kHopBCosts`.
struct HopBCosts {
  double us_per_mb = 0.0;     ///< that an exchange grows by with 10^6 bytes of a rank's messages
  double hand_over_us = 0.0;  ///< each slice after the first: attention starts and ends once more
};

/// One rank's machine: memory, streams, events, the stage's communicators, and every operation. Operations
/// are queued on the stream and return at once; they allocate nothing and never wait for the host (invariant
/// 10). Shapes were checked by the public header that calls them. A failure inside a queued operation is
/// sticky and rethrown by synchronize().
template <class B>
concept Backend = requires(B& backend, typename B::Stream stream, typename B::Event event, const void* source,
                           void* target, std::size_t bytes, std::int64_t n) {
  requires Communicator<typename B::Comm>;
  requires std::movable<typename B::Buffer>;   // owns device memory: data(), size_bytes()
  requires std::copyable<typename B::Stream>;  // a handle; copies name the same queue
  { backend.comms() } -> std::same_as<StageComms<typename B::Comm>>;
  { backend.allocate(bytes) } -> std::same_as<typename B::Buffer>;  // aligned to 256, zeroed
  { backend.create_stream() } -> std::same_as<typename B::Stream>;
  { backend.create_event() } -> std::same_as<typename B::Event>;
  backend.record(event, stream);
  backend.wait(stream, event);                      // the stream waits, not the host
  backend.synchronize(stream);                      // the host waits; rethrows
  backend.upload(target, source, bytes, stream);    // host -> device; the source may be re-used on return
  backend.download(target, source, bytes, stream);  // device -> host; valid after synchronize
  backend.copy(target, source, bytes, stream);      // device -> device; the two do not overlap
  backend.fill_zero(target, bytes, stream);
  // (tokens, query heads, D, Dv) and (tokens, top_k, M, F/TPF): upper bounds for the caller's workspace.
  { backend.partial_attention_workspace_bytes(n, n, n, n) } -> std::same_as<std::size_t>;
  { backend.expert_ffn_workspace_bytes(n, n, n, n) } -> std::same_as<std::size_t>;
  requires requires(typename B::Activation a) {
    backend.rms_norm(RmsNormArgs<decltype(a)>{}, stream);
    backend.linear(LinearArgs<decltype(a)>{}, stream);
    backend.head_linear(HeadLinearArgs<decltype(a)>{}, stream);
    backend.head_rms_norm(HeadRmsNormArgs<decltype(a)>{}, stream);
    backend.rope(RopeArgs<decltype(a)>{}, stream);
    backend.append_kv(AppendKvArgs<decltype(a)>{}, stream);
    backend.write_kv(WriteKvArgs<decltype(a)>{}, stream);
    backend.read_kv(ReadKvArgs{}, stream);
    backend.partial_attention(PartialAttentionArgs<decltype(a)>{}, stream);
    backend.pack_partial(PackPartialArgs<decltype(a)>{}, stream);
    backend.stamp(StampArgs{}, stream);
    backend.check_exchange(CheckExchangeArgs{}, stream);
    backend.lse_combine(LseCombineArgs<decltype(a)>{}, stream);
    backend.combine_exchange(CheckExchangeArgs{}, LseCombineArgs<decltype(a)>{}, stream);  // both as one
    backend.swiglu(SwigluArgs<decltype(a)>{}, stream);
    backend.route(RouteArgs<decltype(a)>{}, stream);
    backend.expert_ffn(ExpertFfnArgs<decltype(a)>{}, stream);
    backend.embed(EmbedArgs<decltype(a)>{}, stream);
    backend.gather_rows(GatherRowsArgs<decltype(a)>{}, stream);
    backend.sample(SampleArgs<decltype(a)>{}, stream);
    backend.logit_norms(LogitNormsArgs<decltype(a)>{}, stream);
    backend.advance(AdvanceArgs{}, stream);
  };
};

}  // namespace helix
