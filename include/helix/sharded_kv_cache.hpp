// SPDX-License-Identifier: Apache-2.0
// ShardedKVCache: one rank's pages of every layer, and the sequences in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <helix/backend/attention.hpp>
#include <helix/backend/communicator.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/kv_cache_spec.hpp>
#include <helix/page_ledger.hpp>
#include <helix/page_table.hpp>
#include <helix/topology.hpp>

namespace helix {

/// One rank's shard of the KV cache (invariants 2, 3, 9 and 11). Memory is allocated once, at addresses that
/// never change, and pages stay untouched until tokens are written. Sequences share one pool; a token of one
/// KV head exists on one rank. Each layer has one spare page after the pool's pages, for tokens that are
/// stored in pages which append() has not taken: on a CPU that is an Error(invalid_argument), on a GPU the
/// tokens are lost. Within a sequence's last page nothing notices that append() was forgotten.
///
/// Not collective, but all ranks of a stage must make the same calls with the same numbers. Each rank tracks
/// the pages of all KVP ranks, and so decides as the others do without communicating. A call that is refused,
/// for its arguments or because pages ran out, changes nothing, on all ranks. A call whose device work fails
/// (std::bad_alloc, or what the backend throws) leaves a cache that may only be destroyed.
///
/// Each function throws Error(invalid_argument) for an id that names no sequence and for a layer that does
/// not exist.
///
/// Device work is queued on the given stream. Use one stream, or order several with events: a released page
/// may belong to another sequence at once. Keeps the backend's address. Not thread-safe. After a move each
/// call on the old object that names a sequence, asks for one or counts pages is Error(invalid_argument).
template <AttentionBackend B>
requires StageBackend<B>
class ShardedKVCache {
 public:
  using Stream = typename B::Stream;
  using Activation = typename B::Activation;

  /// Takes this rank's place from the backend's stage communicator. Waits for the upload of its page table
  /// and scales. `spec` must be equal on all ranks of the stage.
  /// @throws Error(invalid_argument) if sizes are out of range or communicators differ from `topology`;
  /// Error(capacity) if the memory cannot be had.
  ShardedKVCache(B& backend, const Topology& topology, const KvCacheSpec& spec)
      : backend_(&backend),
        spec_(detail::checked(spec, topology)),
        stage_rank_(checked_stage_rank(backend, topology)),
        view_{.format = checked_format(spec, topology, stage_rank_)},
        page_bytes_(detail::bytes_of(spec, static_cast<std::size_t>(view_.format.page_elements()),
                                     size_bytes(spec.dtype))),
        layer_bytes_(round_up(
            detail::bytes_of(spec, static_cast<std::size_t>(spec.num_pages) + 1, page_bytes_), kAlignment)),
        pages_(backend.allocate(
            detail::bytes_of(spec, static_cast<std::size_t>(spec.num_layers), layer_bytes_))),
        ledger_(ledger_spec(spec, topology), topology.stage_coordinates(stage_rank_).kvp_rank),
        page_table_(backend, spec.max_sequences, ledger_.max_pages(),
                    static_cast<std::int32_t>(spec.num_pages)) {
    view_.num_pages = spec.num_pages;
    view_.max_pages = ledger_.max_pages();
    view_.num_slots = spec.max_sequences;
    view_.layout = ledger_.spec().layout;
    view_.kvp_rank = ledger_.kvp_rank();
    view_.page_table = page_table_.data();

    const Range heads = topology.kv_heads(stage_rank_);
    k_scales_ = upload_scales(spec.k_scales, heads, topology.shape().num_kv_heads);
    v_scales_ = upload_scales(spec.v_scales, heads, topology.shape().num_kv_heads);
  }

  const KvCacheSpec& spec() const { return spec_; }
  const PageLedger& ledger() const { return ledger_; }
  int stage_rank() const { return stage_rank_; }

  /// Makes an empty sequence with pages reserved for its first `tokens_to_reserve` global tokens, so that
  /// growing it that far cannot fail. @throws Error(capacity) if slots or pages ran out on any KVP rank.
  [[nodiscard]] SequenceId add(std::int64_t tokens_to_reserve = 0) { return ledger_.add(tokens_to_reserve); }

  /// Reserves the pages for `total_tokens` global tokens, including those already there.
  /// @throws Error(capacity) if pages ran out on any KVP rank.
  void reserve(SequenceId id, std::int64_t total_tokens) { ledger_.reserve(id, total_tokens); }
  /// Gives back the reserved pages beyond those that the sequence's tokens take.
  void unreserve(SequenceId id) { ledger_.unreserve(id); }

  /// Makes room for the next `num_tokens` global positions, which append_kv or write() then fill. Queues
  /// nothing while the tokens fit into the last page. Otherwise queues one copy of the changed entries of the
  /// page table, and the copy of the last page if it was shared. @throws Error(capacity) if pages ran out on
  /// any KVP rank.
  void append(SequenceId id, std::int64_t num_tokens, Stream stream) {
    append(std::span<const SequenceId>(&id, 1), std::span<const std::int64_t>(&num_tokens, 1), stream);
  }
  /// Grows all of the sequences for a batch step or, if it throws, none. The page table takes one copy, or
  /// one for each sequence with a new page if more than 64 KiB lie between the first changed entry and the
  /// last. @throws Error(capacity) if pages ran out on any KVP rank; Error(invalid_argument) as
  /// PageLedger::append().
  void append(std::span<const SequenceId> ids, std::span<const std::int64_t> counts, Stream stream) {
    apply(ledger_.append(ids, counts), stream);
  }

  /// Stores those tokens at global positions [first_position, first_position + rows of k) that this rank
  /// owns, for prefill and transfers. Reads k [tokens, Hkv/TPA, D] and v [tokens, Hkv/TPA, Dv] (MLA: v
  /// empty), last stride 1, when the stream gets there.
  /// @throws Error(invalid_argument) unless the positions are within the sequence and in pages that no other
  /// sequence shares.
  void write(SequenceId id, int layer, std::int64_t first_position, TensorView<const Activation, 3> k,
             TensorView<const Activation, 3> v, Stream stream) {
    detail::check_kv_rows("write", view_.format, k, v);
    const std::int64_t length = ledger_.length(id);
    const std::int64_t count = k.extent(0);
    HELIX_EXPECTS(first_position >= 0 && first_position <= length && count <= length - first_position,
                  ErrorCode::invalid_argument, "write: ", count, " tokens from position ", first_position,
                  " leave the sequence of ", length, " tokens; append() first");
    HELIX_EXPECTS(!ledger_.is_shared(id, {first_position, first_position + count}),
                  ErrorCode::invalid_argument, "write: of the ", count, " tokens from position ",
                  first_position, " some lie in pages that another sequence shares; write before fork()");
    backend_->write_kv(WriteKvArgs<Activation>{.k = k,
                                               .v = v,
                                               .first_position = first_position,
                                               .sequence_slot = ledger_.slot(id),
                                               .kv = this->layer(layer)},
                       stream);
  }

  /// Reads this rank's local tokens [local.begin, local.end) back as values: k_out [tokens, Hkv/TPA, D] and
  /// v_out [tokens, Hkv/TPA, Dv] (MLA: empty), device memory, last stride 1.
  /// @throws Error(invalid_argument) if the range leaves this rank's part of the sequence.
  void read(SequenceId id, int layer, TokenRange local, TensorView<float, 3> k_out,
            TensorView<float, 3> v_out, Stream stream) const {
    detail::check_kv_rows("read", view_.format, TensorView<const float, 3>(k_out),
                          TensorView<const float, 3>(v_out));
    const std::int64_t length = local_length(id);
    HELIX_EXPECTS(local.begin >= 0 && local.begin <= local.end && local.end <= length,
                  ErrorCode::invalid_argument, "read: local tokens [", local.begin, ", ", local.end,
                  ") leave the ", length, " that kvp_rank ", ledger_.kvp_rank(), " stores of the sequence");
    HELIX_EXPECTS(k_out.extent(0) == local.size(), ErrorCode::invalid_argument, "read: k_out has ",
                  k_out.extent(0), " rows for ", local.size(), " tokens");
    backend_->read_kv(ReadKvArgs{.kv = this->layer(layer),
                                 .sequence_slot = ledger_.slot(id),
                                 .first_local = local.begin,
                                 .k = k_out,
                                 .v = v_out},
                      stream);
  }

  /// Drops the tokens from `new_length` on, such as rejected drafts. Queues nothing: a page shared with
  /// another sequence is copied when a token is next appended to it. @throws what PageLedger::truncate()
  /// throws.
  void truncate(SequenceId id, std::int64_t new_length) {
    ledger_.truncate(id, new_length);
    page_table_.forget(id.slot, static_cast<std::int64_t>(ledger_.pages(id.slot).size()));
  }

  /// Makes a sequence from the first `prefix_tokens` of `parent`, which must have been written in all layers.
  /// Shares whole pages up to a multiple of ledger().shared_unit() tokens and queues copies of the rest.
  /// @throws what PageLedger::fork() throws.
  [[nodiscard]] SequenceId fork(SequenceId parent, std::int64_t prefix_tokens, Stream stream) {
    const SequenceId child = ledger_.fork(parent, prefix_tokens);
    apply(ledger_.changes(), stream);
    return child;
  }

  /// Ends the sequence; its id stays invalid for ever.
  void release(SequenceId id) {
    ledger_.release(id);
    page_table_.forget(id.slot, 0);
  }

  /// The view through which operations read and write layer `layer` of this stage. Its addresses never
  /// change.
  KvView layer(int layer) const {
    HELIX_EXPECTS(layer >= 0 && layer < spec_.num_layers, ErrorCode::invalid_argument, "layer ", layer,
                  " is outside the KV cache's ", spec_.num_layers, " layers");
    KvView view = view_;
    const KvView pool = KvView::of_pool(pages_.data() + static_cast<std::size_t>(layer) * layer_bytes_,
                                        view_.format, view_.num_pages);
    view.k = pool.k;
    view.v = pool.v;
    view.rope = pool.rope;
    const auto scales = [&](const typename B::Buffer& buffer) {
      return buffer.size_bytes() == 0
                 ? nullptr
                 : reinterpret_cast<const float*>(buffer.data()) + layer * view_.format.num_heads;
    };
    view.k_scale = scales(k_scales_);
    view.v_scale = scales(v_scales_);
    return view;
  }

  std::int32_t slot(SequenceId id) const { return ledger_.slot(id); }      ///< Row of the page table.
  std::int64_t length(SequenceId id) const { return ledger_.length(id); }  ///< Global tokens
  std::int64_t local_length(SequenceId id) const {                         ///< Tokens that this rank stores
    return ledger_.spec().layout.length(ledger_.length(id), ledger_.kvp_rank());
  }

  /// Pages of this rank that any sequence may take: neither used nor reserved.
  std::int64_t pages_free() const { return ledger_.pages_free(ledger_.kvp_rank()); }
  /// Pages of this rank that hold tokens; a shared page counts once.
  std::int64_t pages_used() const { return ledger_.pages_used(ledger_.kvp_rank()); }

  /// Bytes of one page in all layers.
  std::size_t page_bytes() const { return page_bytes_ * static_cast<std::size_t>(spec_.num_layers); }
  /// Bytes of the pages that hold tokens.
  std::size_t allocated_bytes() const { return static_cast<std::size_t>(pages_used()) * page_bytes(); }
  /// Bytes of all pages that sequences can have. The pool has one page more in each layer, and layers begin
  /// at multiples of 256 bytes.
  std::size_t capacity_bytes() const { return static_cast<std::size_t>(spec_.num_pages) * page_bytes(); }

 private:
  static constexpr std::size_t kAlignment = 256;  // of each layer's pages

  static int checked_stage_rank(B& backend, const Topology& topology) {
    const auto comms = backend.comms();
    const auto& stage = detail::given_comm("ShardedKVCache", "stage", comms.stage);
    const auto& kvp = detail::given_comm("ShardedKVCache", "kvp", comms.kvp);
    detail::check_stage_size("ShardedKVCache", stage, topology.stage_size());
    const int kvp_rank = topology.stage_coordinates(stage.rank()).kvp_rank;
    HELIX_EXPECTS(kvp.size() == topology.kvp() && kvp.rank() == kvp_rank, ErrorCode::invalid_argument,
                  "ShardedKVCache: the KVP communicator has rank ", kvp.rank(), " of ", kvp.size(),
                  "; the topology places stage_rank ", stage.rank(), " at kvp_rank ", kvp_rank, " of ",
                  topology.kvp());
    return stage.rank();
  }

  static PageLedgerSpec ledger_spec(const KvCacheSpec& spec, const Topology& topology) {
    return {.layout = KvLayout(topology.kvp(), spec.chunk),
            .page_tokens = spec.page_tokens,
            .num_pages = spec.num_pages,
            .max_sequences = spec.max_sequences,
            .max_tokens = spec.max_tokens,
            .tag = spec.tag};
  }

  static KvFormat checked_format(const KvCacheSpec& spec, const Topology& topology, int stage_rank) {
    detail::check_sizes(ledger_spec(spec, topology));
    const ModelShape& shape = topology.shape();
    if (shape.is_mla())
      return KvFormat::latent(spec.dtype, shape.head_dim, shape.value_dim, spec.page_tokens);
    return KvFormat::head_major(spec.dtype, topology.kv_heads(stage_rank).size(), shape.head_dim,
                                shape.value_dim, spec.page_tokens);
  }

  typename B::Buffer upload_scales(const std::vector<float>& scales, Range heads, std::int64_t num_kv_heads) {
    const std::vector<float> expanded =
        detail::expanded_scales(scales, spec_.num_layers, heads, num_kv_heads);
    if (expanded.empty()) return {};
    typename B::Buffer buffer = backend_->allocate(expanded.size() * sizeof(float));
    Stream stream = backend_->create_stream();
    backend_->upload(buffer.data(), expanded.data(), expanded.size() * sizeof(float), stream);
    backend_->synchronize(stream);
    return buffer;
  }

  void apply(const PageLedger::Changes& changes, Stream stream) {
    for (const PageLedger::PageCopy& copy : changes.copies) {
      for (std::int64_t layer = 0; layer < spec_.num_layers; ++layer) {
        std::byte* const pages = pages_.data() + static_cast<std::size_t>(layer) * layer_bytes_;
        backend_->copy(pages + static_cast<std::size_t>(copy.target) * page_bytes_,
                       pages + static_cast<std::size_t>(copy.source) * page_bytes_, page_bytes_, stream);
      }
    }
    page_table_.update(ledger_, changes.table, stream);
  }

  B* backend_;
  KvCacheSpec spec_;
  int stage_rank_;
  KvView view_;               // of layer 0, without its addresses
  std::size_t page_bytes_;    // of one layer
  std::size_t layer_bytes_;   // from one layer's pages to the next
  typename B::Buffer pages_;  // [layers][pages + 1][page_elements]: the last page is the spare one
  PageLedger ledger_;         // after pages_: sizes that are too large fail there, before the ledger is made
  PageTable<B> page_table_;
  typename B::Buffer k_scales_;  // [layers, heads of this rank], or empty
  typename B::Buffer v_scales_;
};

}  // namespace helix
