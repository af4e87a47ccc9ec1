// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: many tokens of one sequence into the KV pages and back.
#include <algorithm>
#include <functional>

#include <helix/cpu/backend.hpp>

#include "cpu/kv_rows.hpp"

namespace helix::cpu {
namespace {

/// Calls body(local tokens, head) for each head of each page that holds some of `local`, shared among the
/// threads: within one call the rows are consecutive.
template <class Body>
void for_each_page_head(ThreadPool& pool, const KvView& kv, TokenRange local, const Body& body) {
  if (local.size() <= 0) return;
  const std::int64_t first_page = local.begin / kv.page_tokens;
  const std::int64_t num_pages = (local.end - 1) / kv.page_tokens + 1 - first_page;
  const auto task = [&](std::int64_t index, int) {
    const std::int64_t page_begin = (first_page + index / kv.num_heads) * kv.page_tokens;
    body(TokenRange{std::max(local.begin, page_begin), std::min(local.end, page_begin + kv.page_tokens)},
         index % kv.num_heads);
  };
  pool.parallel_for(num_pages * kv.num_heads, std::ref(task));  // by reference: no allocation
}

template <class T>
void write_rows(const WriteKvArgs<float>& args, ThreadPool& pool) {
  const KvView& kv = args.kv;
  const KvRows<T> rows(kv);
  const TokenRange span{args.first_position, args.first_position + args.k.extent(0)};
  for_each_page_head(pool, kv, kv.layout.local_range(span, kv.kvp_rank),
                     [&](TokenRange local, std::int64_t head) {
                       T* k = rows.k(args.sequence_slot, local.begin, head);
                       T* v = kv.is_mla ? nullptr : rows.v(args.sequence_slot, local.begin, head);
                       for (std::int64_t l = local.begin; l < local.end; ++l) {
                         const std::int64_t row = kv.layout.global(kv.kvp_rank, l) - args.first_position;
                         store_row(&args.k(row, head, 0), k, kv.head_dim, scale_of(kv.k_scale, head));
                         k += kv.head_dim;
                         if (kv.is_mla) continue;
                         store_row(&args.v(row, head, 0), v, kv.value_dim, scale_of(kv.v_scale, head));
                         v += kv.head_dim;
                       }
                     });
}

template <class T>
void read_rows(const ReadKvArgs& args, ThreadPool& pool) {
  const KvView& kv = args.kv;
  const KvRows<T> rows(kv);
  const TokenRange wanted{args.first_local, args.first_local + args.k.extent(0)};
  for_each_page_head(pool, kv, wanted, [&](TokenRange local, std::int64_t head) {
    const T* k = rows.k(args.sequence_slot, local.begin, head);
    const T* v = kv.is_mla ? nullptr : rows.v(args.sequence_slot, local.begin, head);
    for (std::int64_t l = local.begin; l < local.end; ++l) {
      load_row(k, &args.k(l - args.first_local, head, 0), kv.head_dim, scale_of(kv.k_scale, head));
      k += kv.head_dim;
      if (kv.is_mla) continue;
      load_row(v, &args.v(l - args.first_local, head, 0), kv.value_dim, scale_of(kv.v_scale, head));
      v += kv.head_dim;
    }
  });
}

}  // namespace

void Operators::write_kv(const WriteKvArgs<float>& args, Stream stream) const {
  if (args.k.extent(0) == 0) return;
  stream.enqueue(
      [args, pool = pool_] { dispatch(args.kv.dtype, [&]<class T>(T*) { write_rows<T>(args, *pool); }); });
}

void Operators::read_kv(const ReadKvArgs& args, Stream stream) const {
  if (args.k.extent(0) == 0) return;
  stream.enqueue(
      [args, pool = pool_] { dispatch(args.kv.dtype, [&]<class T>(T*) { read_rows<T>(args, *pool); }); });
}

}  // namespace helix::cpu
