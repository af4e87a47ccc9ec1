// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: stores tokens in the KV pages and reads them back.
#include <algorithm>

#include <helix/cpu/backend.hpp>

#include "cpu/batch_offsets.hpp"
#include "cpu/kv_rows.hpp"
#include "cpu/row_tasks.hpp"

namespace helix::cpu {
namespace {

/// Calls body(local tokens, head) for each head of each page that holds some of `local`, on all threads. The
/// rows of one call are consecutive in memory.
template <class Body>
void for_each_page_head(ThreadPool& pool, const KvView& kv, TokenRange local, const Body& body) {
  if (local.size() <= 0) return;
  const std::int64_t first_page = local.begin / kv.format.page_tokens;
  const std::int64_t num_pages = (local.end - 1) / kv.format.page_tokens + 1 - first_page;
  const auto task = [&](std::int64_t index, int) {
    const std::int64_t page_begin = (first_page + index / kv.format.num_heads) * kv.format.page_tokens;
    body(TokenRange{std::max(local.begin, page_begin),
                    std::min(local.end, page_begin + kv.format.page_tokens)},
         index % kv.format.num_heads);
  };
  pool.parallel_for(num_pages * kv.format.num_heads, task);
}

template <class Rows>
void write_rows(const Rows& rows, const WriteKvArgs<float>& args, ThreadPool& pool) {
  const KvView& kv = args.kv;
  const TokenRange span{args.first_position, args.first_position + args.k.extent(0)};
  for_each_page_head(pool, kv, kv.layout.local_range(span, kv.kvp_rank),
                     [&](TokenRange local, std::int64_t head) {
                       for (std::int64_t l = local.begin; l < local.end; ++l) {
                         const std::int64_t row = kv.layout.global(kv.kvp_rank, l) - args.first_position;
                         rows.store(args.sequence_slot, l, head, args.k, args.v, row);
                       }
                     });
}

template <class Rows>
void read_rows(const Rows& rows, const ReadKvArgs& args, ThreadPool& pool) {
  const TokenRange wanted{args.first_local, args.first_local + args.k.extent(0)};
  for_each_page_head(pool, args.kv, wanted, [&](TokenRange local, std::int64_t head) {
    for (std::int64_t l = local.begin; l < local.end; ++l)
      rows.load(args.sequence_slot, l, head, args.k, args.v, l - args.first_local);
  });
}

template <class Rows>
void read_latent_rows(const Rows& rows, const ReadLatentsArgs<float>& args, ThreadPool& pool) {
  const TensorView<float, 3> k(args.rows.data(), {args.rows.extent(0), 1, args.rows.extent(1)},
                               {args.rows.stride(0), 0, 1});
  const TokenRange wanted{args.first_local, args.first_local + args.rows.extent(0)};
  for_each_page_head(pool, args.kv, wanted, [&](TokenRange local, std::int64_t head) {
    for (std::int64_t l = local.begin; l < local.end; ++l)
      rows.load(*args.sequence_slot, l, head, k, {}, l - args.first_local);
  });
}

}  // namespace

void Operators::append_kv(const AppendKvArgs<float>& args, Stream stream) const {
  detail::check_append_kv(args);
  const std::int64_t tokens = args.batch.num_tokens();
  if (tokens == 0) return;
  stream.enqueue([args, tokens, host_offsets = BatchOffsets(args.batch), pool = pool_] {
    const KvView& kv = args.kv;
    with_kv_rows(kv, [&](const auto& rows) {
      const std::int32_t* offsets = args.batch.query_offsets;
      const std::int64_t sequences = args.batch.num_sequences();
      host_offsets.check("append_kv", {offsets, static_cast<std::size_t>(sequences + 1)});
      const std::int64_t first = offsets[0];
      const std::int64_t row_elements =
          args.k.extent(1) * args.k.extent(2) + args.v.extent(1) * args.v.extent(2);
      for_each_row(*pool, tokens, row_elements, [&](std::int64_t row) {
        const std::int64_t token = first + row;
        const std::int64_t position = args.batch.positions[token];
        if (position < 0 || kv.layout.owner(position) != kv.kvp_rank) return;
        // The last sequence that begins at or before the token: empty ones begin where the next does.
        const std::int32_t* next = std::upper_bound(offsets, offsets + sequences, token);
        const std::int32_t slot = args.batch.sequence_slots[next - offsets - 1];
        const std::int64_t local = kv.layout.local(position);
        for (std::int64_t head = 0; head < kv.format.num_heads; ++head)
          rows.store(slot, local, head, args.k, args.v, token);
      });
    });
  });
}

void Operators::write_kv(const WriteKvArgs<float>& args, Stream stream) const {
  detail::check_write_kv(args);
  if (args.k.extent(0) == 0) return;
  stream.enqueue([args, pool = pool_] {
    with_kv_rows(args.kv, [&](const auto& rows) { write_rows(rows, args, *pool); });
  });
}

void Operators::read_kv(const ReadKvArgs& args, Stream stream) const {
  detail::check_read_kv(args);
  if (args.k.extent(0) == 0) return;
  stream.enqueue([args, pool = pool_] {
    with_kv_rows(args.kv, [&](const auto& rows) { read_rows(rows, args, *pool); });
  });
}

void Operators::read_latents(const ReadLatentsArgs<float>& args, Stream stream) const {
  detail::check_read_latents(args);
  if (args.rows.extent(0) == 0) return;
  stream.enqueue([args, pool = pool_] {
    with_kv_rows(args.kv, [&](const auto& rows) { read_latent_rows(rows, args, *pool); });
  });
}

}  // namespace helix::cpu
