// SPDX-License-Identifier: Apache-2.0
// Operators of a decode step on one GPU in bf16. Each launch uses another place of 2 GB so that caches are
// cold, and is compared with reads of as many bytes from as many places.
//
// "bytes" counts each byte read or written once. Reads of a few hundred KB are bound by the launch: the
// ceiling of such a case is the minimum time of a kernel of that size, and an operator that also reads may
// come below it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/backend.hpp>
#include <helix/exchange_layout.hpp>
#include <helix/plan/model.hpp>

#include "cases.hpp"
#include "device_data.hpp"
#include "operator_timing.hpp"

namespace helix::bench {
namespace {

using Operators = cuda::Operators<bf16>;

/// The model whose vector, head and vocabulary sizes the cases use.
const ModelShape kModel = plan::model_preset("llama-3.1-405b").shape;
/// Slices of one buffer that launches use in turn.
class Places {
 public:
  Places(std::size_t bytes, int count, std::uint64_t seed)
      : stride_(place_stride(bytes)),
        buffer_(random_bf16(static_cast<std::int64_t>(stride_) * count / 2, seed)) {}

  template <class T = bf16>
  T* at(int i) const {
    return reinterpret_cast<T*>(buffer_.data() + static_cast<std::size_t>(i) * stride_);
  }

 private:
  std::size_t stride_;
  cuda::Buffer buffer_;
};

void bench_linear(benchmark::State& state, std::int64_t rows, std::int64_t width, std::int64_t cols) {
  const Operators operators;
  const auto weight_bytes = static_cast<std::size_t>(width * cols) * kBf16Bytes;
  const int launches = cold_launches(weight_bytes);
  const Places weights(weight_bytes, launches, kSeed);
  const cuda::Buffer in = random_bf16(rows * cols, kSeed + 1);
  const cuda::Buffer out = operators.allocate(static_cast<std::size_t>(rows * width) * kBf16Bytes);
  const auto arguments = [&]<class T>(const T* from, T* to, int i) {
    LinearArgs<T> args;
    args.in = {from, {rows, cols}};
    args.weight = {weights.at(i), DType::bf16, width, cols};
    args.out = {to, {rows, width}};
    return args;
  };
  measure(
      state, operators, static_cast<double>(weight_bytes) + 2.0 * static_cast<double>(rows * (cols + width)),
      launches,
      [&](int i, cuda::Stream stream) {
        operators.linear(
            arguments(reinterpret_cast<const bf16*>(in.data()), reinterpret_cast<bf16*>(out.data()), i),
            stream);
      },
      [&](cuda::Stream stream) {
        // The reference repeats the last launch with exact f32 products.
        const cuda::Operators<float> exact;
        const cuda::Buffer exact_in =
            on_device(exact, as_floats(on_host<bf16>(operators, in.data(), rows * cols)));
        const cuda::Buffer exact_out = exact.allocate(static_cast<std::size_t>(rows * width) * sizeof(float));
        exact.linear(arguments(reinterpret_cast<const float*>(exact_in.data()),
                               reinterpret_cast<float*>(exact_out.data()), launches - 1),
                     stream);
        exact.synchronize(stream);
        return relative_error(on_host<bf16>(operators, out.data(), rows * width),
                              on_host<float>(exact, exact_out.data(), rows * width));
      });
  state.counters["flop/s"] = 2.0 * static_cast<double>(rows * width * cols) / state.counters["us"] * 1e6;
}

void bench_rms_norm(benchmark::State& state, std::int64_t rows, std::int64_t hidden) {
  const Operators operators;
  const auto row_bytes = static_cast<std::size_t>(rows * hidden) * kBf16Bytes;
  const double bytes = 4.0 * static_cast<double>(row_bytes) + 2.0 * static_cast<double>(hidden);
  const int launches = cold_launches(static_cast<std::size_t>(bytes));
  const Places delta(row_bytes, launches, kSeed);
  const Places residual(row_bytes, launches, kSeed + 1);
  const Places out(row_bytes, launches, kSeed + 2);
  const Places weight(static_cast<std::size_t>(hidden) * kBf16Bytes, launches, kSeed + 3);
  const auto queue = [&](int i, cuda::Stream stream) {
    RmsNormArgs<bf16> args;
    args.delta = {delta.at(i), {rows, hidden}};
    args.residual = {residual.at(i), {rows, hidden}};
    args.weight = {weight.at(i), DType::bf16, 1, hidden};
    args.out = {out.at(i), {rows, hidden}};
    operators.rms_norm(args, stream);
  };
  measure(state, operators, bytes, launches, queue, [&](cuda::Stream stream) {
    const auto host = [&](const bf16* data, std::int64_t count) {
      return on_host<bf16>(operators, data, count);
    };
    const auto old = host(residual.at(0), rows * hidden);
    queue(0, stream);
    operators.synchronize(stream);
    const auto added = host(delta.at(0), rows * hidden);
    const auto factors = host(weight.at(0), hidden);
    std::vector<double> sums;
    for (std::size_t i = 0; i < old.size(); ++i) sums.push_back(to_double(old[i]) + to_double(added[i]));
    const std::vector<double> expected = normed_rows(std::move(sums), factors, 1e-5);
    return relative_error(host(out.at(0), rows * hidden), expected);
  });
}

struct CombineCase {
  const char* name;
  std::int64_t ranks;
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t dim;
};

constexpr CombineCase kCombineCases[] = {
    {"decode", 4, 8, 8, 128},   {"decode", 8, 64, 4, 128},   {"mla", 8, 16, 16, 512},
    {"large", 2, 4096, 8, 128}, {"large", 8, 4096, 16, 128}, {"large", 16, 2048, 16, 512},
};

void bench_lse_combine(benchmark::State& state, const CombineCase& c) {
  const Operators operators;
  const std::int64_t rows = c.tokens * c.heads;
  const double bytes = static_cast<double>((c.ranks + 1) * rows * (2 * c.dim + 4));
  const int launches = cold_launches(static_cast<std::size_t>(bytes));
  const Places partial_out(static_cast<std::size_t>(c.ranks * rows * c.dim) * kBf16Bytes, launches, kSeed);
  const Places out(static_cast<std::size_t>(rows * c.dim) * kBf16Bytes, launches, kSeed + 1);
  const std::size_t lse_bytes = place_stride(static_cast<std::size_t>(rows) * sizeof(float));
  const cuda::Buffer lse = operators.allocate(lse_bytes * static_cast<std::size_t>(launches));
  // Every place holds the same values, because a pair of random bf16 is not a sensible f32.
  const std::size_t partial_lse_bytes =
      place_stride(static_cast<std::size_t>(c.ranks * rows) * sizeof(float));
  const cuda::Buffer partial_lse = operators.allocate(partial_lse_bytes * static_cast<std::size_t>(launches));
  const std::vector<float> lse_values = random_floats(c.ranks * rows, 5.0f, 1);
  const cuda::Buffer one_lse = on_device(operators, lse_values);
  const cuda::Stream setup = operators.create_stream();
  for (int i = 0; i < launches; ++i)
    operators.copy(partial_lse.data() + static_cast<std::size_t>(i) * partial_lse_bytes, one_lse.data(),
                   one_lse.size_bytes(), setup);
  operators.synchronize(setup);

  measure(
      state, operators, bytes, launches,
      [&](int i, cuda::Stream stream) {
        const auto place = static_cast<std::size_t>(i);
        LseCombineArgs<bf16> args;
        args.partial_out = {partial_out.at(i), {c.ranks, c.tokens, c.heads, c.dim}};
        args.partial_lse = {reinterpret_cast<const float*>(partial_lse.data() + place * partial_lse_bytes),
                            {c.ranks, c.tokens, c.heads}};
        args.out = {out.at(i), {c.tokens, c.heads, c.dim}};
        args.lse = {reinterpret_cast<float*>(lse.data() + place * lse_bytes), {c.tokens, c.heads}};
        operators.lse_combine(args, stream);
      },
      [&](cuda::Stream) {
        const int last = launches - 1;
        const auto from = on_host<bf16>(operators, partial_out.at(last), c.ranks * rows * c.dim);
        const auto got = on_host<bf16>(operators, out.at(last), rows * c.dim);
        std::vector<float> expected(got.size());
        const auto dim = static_cast<std::size_t>(c.dim);
        for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
          double total = 0.0;
          std::vector<double> sums(dim, 0.0);
          for (std::size_t rank = 0; rank < static_cast<std::size_t>(c.ranks); ++rank) {
            const std::size_t at = rank * static_cast<std::size_t>(rows) + row;
            const double weight = std::exp(double{lse_values[at]});
            total += weight;
            for (std::size_t i = 0; i < dim; ++i) sums[i] += weight * static_cast<float>(from[at * dim + i]);
          }
          for (std::size_t i = 0; i < dim; ++i) expected[row * dim + i] = static_cast<float>(sums[i] / total);
        }
        return relative_error(got, expected);
      });
}

void bench_pack_partial(benchmark::State& state, std::int64_t kvp, std::int64_t tokens) {
  const std::int64_t heads = kModel.num_query_heads;
  const std::int64_t dim = kModel.value_dim;
  const Operators operators;
  const std::int64_t rows = tokens * heads;
  const ExchangeMessage at(tokens, heads / kvp, dim, kBf16Bytes);
  const double bytes = 2.0 * static_cast<double>(rows * (dim * 2 + 4));
  const int launches = cold_launches(static_cast<std::size_t>(bytes));
  const Places out(static_cast<std::size_t>(rows * dim) * kBf16Bytes, launches, kSeed);
  const Places lse(static_cast<std::size_t>(rows) * sizeof(float), launches, kSeed + 1);
  const Places messages(static_cast<std::size_t>(kvp * at.message_bytes), launches, kSeed + 2);
  const cuda::Buffer exchanges = operators.allocate(sizeof(std::uint64_t));
  std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), std::int64_t{1000});
  const cuda::Buffer positions_at = on_device(operators, positions);
  measure(
      state, operators, bytes, launches,
      [&](int i, cuda::Stream stream) {
        PackPartialArgs<bf16> args;
        args.out = {out.at(i), {tokens, heads, dim}};
        args.lse = {lse.at<float>(i), {tokens, heads}};
        auto* first = messages.at<std::byte>(i);
        args.target.out = {
            reinterpret_cast<bf16*>(first + at.out_begin), {tokens, heads, dim}, {dim, at.head_bytes / 2, 1}};
        args.target.lse = {
            reinterpret_cast<float*>(first + at.lse_begin), {tokens, heads}, {1, at.head_bytes / 4}};
        args.target.headers = {first,
                               tokens,
                               0,
                               reinterpret_cast<std::uint64_t*>(exchanges.data()),
                               reinterpret_cast<const std::int64_t*>(positions_at.data()),
                               kvp,
                               at.message_bytes};
        operators.pack_partial(args, stream);
      },
      [&](cuda::Stream) {
        const int last = launches - 1;
        const auto from = on_host<bf16>(operators, out.at(last), rows * dim);
        const auto lse_from = on_host<float>(operators, lse.at<float>(last), rows);
        std::vector<bf16> got;
        std::vector<bf16> expected;
        double wrong_lse = 0.0;
        for (std::int64_t head = 0; head < heads; ++head) {
          const std::byte* const block = messages.at<std::byte>(last) + head * at.head_bytes;
          const auto outputs = on_host<bf16>(operators, block + at.out_begin, tokens * dim);
          got.insert(got.end(), outputs.begin(), outputs.end());
          const auto sums = on_host<float>(operators, block + at.lse_begin, tokens);
          for (std::int64_t token = 0; token < tokens; ++token)
            wrong_lse += sums[static_cast<std::size_t>(token)] !=
                                 lse_from[static_cast<std::size_t>(token * heads + head)]
                             ? 1.0
                             : 0.0;
          for (std::int64_t token = 0; token < tokens; ++token) {
            const auto begin = from.begin() + (token * heads + head) * dim;
            expected.insert(expected.end(), begin, begin + dim);
          }
        }
        return relative_error(got, expected) + wrong_lse;
      });
}

void bench_append_kv(benchmark::State& state, std::int64_t batch) {
  const std::int64_t heads = kModel.num_kv_heads;
  const std::int64_t dim = kModel.head_dim;
  constexpr std::int64_t kPageTokens = 64;
  constexpr std::int64_t kContext = 8192;  // tokens of each sequence
  constexpr std::int64_t kMaxPages = kContext / kPageTokens;
  const Operators operators;
  const std::int64_t elements = batch * heads * dim;
  const double bytes = 4.0 * static_cast<double>(elements) * kBf16Bytes;
  const int launches = cold_launches(static_cast<std::size_t>(bytes));
  const Places k(static_cast<std::size_t>(elements) * kBf16Bytes, launches, kSeed);
  const Places v(static_cast<std::size_t>(elements) * kBf16Bytes, launches, kSeed + 1);
  const std::int64_t pages = batch * kMaxPages;
  const cuda::Buffer pool = random_bf16(pages * 2 * heads * kPageTokens * dim, kSeed + 2);
  std::mt19937 random(1);
  std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(batch) + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  // Each launch writes other tokens, until there are no more.
  std::vector<std::int64_t> tokens(kContext);
  std::iota(tokens.begin(), tokens.end(), std::int64_t{0});
  std::shuffle(tokens.begin(), tokens.end(), random);
  std::vector<std::int64_t> positions;
  for (int i = 0; i < launches; ++i)
    positions.insert(positions.end(), static_cast<std::size_t>(batch), tokens[static_cast<std::size_t>(i)]);
  const cuda::Buffer table_at = on_device(operators, table);
  const cuda::Buffer offsets_at = on_device(operators, offsets);
  const cuda::Buffer positions_at = on_device(operators, positions);

  AppendKvArgs<bf16> args;
  args.kv =
      KvView::of_pool(pool.data(), KvFormat::head_major(DType::bf16, heads, dim, dim, kPageTokens), pages)
          .whole();
  args.kv.max_pages = kMaxPages;
  args.kv.page_table = reinterpret_cast<const std::int32_t*>(table_at.data());
  measure(
      state, operators, bytes, launches,
      [&](int i, cuda::Stream stream) {
        args.k = {k.at(i), {batch, heads, dim}};
        args.v = {v.at(i), {batch, heads, dim}};
        args.batch = {offsets, reinterpret_cast<const std::int32_t*>(offsets_at.data()),
                      reinterpret_cast<const std::int64_t*>(positions_at.data()) + i * batch,
                      reinterpret_cast<const std::int32_t*>(offsets_at.data())};
        operators.append_kv(args, stream);
      },
      [&](cuda::Stream) {
        const int last = launches - 1;
        const auto keys = on_host<bf16>(operators, k.at(last), elements);
        const auto values = on_host<bf16>(operators, v.at(last), elements);
        const std::int64_t position = tokens[static_cast<std::size_t>(last)];
        std::vector<bf16> got;
        std::vector<bf16> expected;
        for (std::int64_t b = 0; b < batch; ++b) {
          const std::int64_t page = table[static_cast<std::size_t>(b * kMaxPages + position / kPageTokens)];
          for (std::int64_t row = 0; row < 2 * heads; ++row) {
            const std::int64_t at = ((page * 2 * heads + row) * kPageTokens + position % kPageTokens) * dim;
            const auto stored =
                on_host<bf16>(operators, pool.data() + static_cast<std::size_t>(at) * kBf16Bytes, dim);
            got.insert(got.end(), stored.begin(), stored.end());
            const auto& source = row < heads ? keys : values;
            const auto begin = source.begin() + (b * heads + row % heads) * dim;
            expected.insert(expected.end(), begin, begin + dim);
          }
        }
        return relative_error(got, expected);
      });
}

void bench_sample(benchmark::State& state, std::int64_t rows, bool is_greedy) {
  const Operators operators;
  const double bytes = static_cast<double>(rows * kModel.vocab) * kBf16Bytes;
  const int launches = cold_launches(static_cast<std::size_t>(bytes));
  const Places logits(static_cast<std::size_t>(rows * kModel.vocab) * kBf16Bytes, launches, kSeed);
  const cuda::Buffer begins = on_device(operators, std::vector<std::int64_t>{0, kModel.vocab});
  std::vector<std::uint64_t> counters(static_cast<std::size_t>(rows));
  std::iota(counters.begin(), counters.end(), std::uint64_t{7});
  const cuda::Buffer counters_at = on_device(operators, counters);
  const SamplingConfig config{.temperature = is_greedy ? 0.0f : 0.1f,  // the logits are in (-1, 1)
                              .top_p = is_greedy ? 1.0f : 0.9f,
                              .seed = 3};
  const cuda::Buffer configs_at =
      on_device(operators, std::vector<SamplingConfig>(static_cast<std::size_t>(rows), config));
  const cuda::Buffer tokens = operators.allocate(static_cast<std::size_t>(rows) * sizeof(std::int32_t));
  const cuda::Buffer exact_tokens = operators.allocate(tokens.size_bytes());
  const auto arguments = [&]<class T>(const T* from, const cuda::Buffer& to) {
    SampleArgs<T> args;
    args.logits = {from, {1, rows, kModel.vocab}};
    args.shard_begins = reinterpret_cast<const std::int64_t*>(begins.data());
    args.configs = reinterpret_cast<const SamplingConfig*>(configs_at.data());
    args.counters = reinterpret_cast<const std::uint64_t*>(counters_at.data());
    args.tokens = reinterpret_cast<std::int32_t*>(to.data());
    return args;
  };
  measure(
      state, operators, bytes, launches,
      [&](int i, cuda::Stream stream) {
        operators.sample(arguments(static_cast<const bf16*>(logits.at(i)), tokens), stream);
      },
      [&](cuda::Stream stream) {
        // The same logits as f32 must give the same tokens.
        const auto got = on_host<std::int32_t>(operators, tokens.data(), rows);
        const auto values = as_floats(on_host<bf16>(operators, logits.at(launches - 1), rows * kModel.vocab));
        const cuda::Operators<float> exact;
        const cuda::Buffer exact_logits = on_device(exact, values);
        exact.sample(arguments(reinterpret_cast<const float*>(exact_logits.data()), exact_tokens), stream);
        exact.synchronize(stream);
        bool is_right = got == on_host<std::int32_t>(operators, exact_tokens.data(), rows);
        for (std::int64_t row = 0; is_greedy && row < rows; ++row) {
          const auto begin = values.begin() + row * kModel.vocab;
          is_right = is_right && std::max_element(begin, begin + kModel.vocab) - begin ==
                                     got[static_cast<std::size_t>(row)];
        }
        return is_right ? 0.0 : 1.0;
      });
}

}  // namespace

void register_operators() {
  struct Weight {
    std::int64_t rows;
    std::int64_t cols;
  };
  for (const Weight weight :
       {Weight{kModel.hidden / 4, kModel.hidden}, Weight{kModel.hidden, kModel.hidden}}) {
    for (const std::int64_t rows : {1, 8, 16, 64}) {
      register_case("linear/" + std::to_string(rows) + "/weight:" + std::to_string(weight.rows) + "x" +
                        std::to_string(weight.cols),
                    [=](benchmark::State& state) { bench_linear(state, rows, weight.rows, weight.cols); });
    }
  }
  for (const std::int64_t rows : {1, 8, 64}) {
    register_case("rms_norm/rows:" + std::to_string(rows) + "/hidden:" + std::to_string(kModel.hidden),
                  [=](benchmark::State& state) { bench_rms_norm(state, rows, kModel.hidden); });
  }
  for (const CombineCase& c : kCombineCases) {
    register_case(std::string("lse_combine/") + c.name + "/ranks:" + std::to_string(c.ranks) +
                      "/tokens:" + std::to_string(c.tokens) + "/heads:" + std::to_string(c.heads) +
                      "/dim:" + std::to_string(c.dim),
                  [c](benchmark::State& state) { bench_lse_combine(state, c); });
  }
  for (const std::int64_t tokens : {1, 8, 64}) {
    register_case("pack_partial/kvp:4/tokens:" + std::to_string(tokens) + "/heads:" +
                      std::to_string(kModel.num_query_heads) + "/dim:" + std::to_string(kModel.value_dim),
                  [=](benchmark::State& state) { bench_pack_partial(state, 4, tokens); });
  }
  for (const std::int64_t batch : {8, 64}) {
    register_case("append_kv/batch:" + std::to_string(batch) + "/heads:" +
                      std::to_string(kModel.num_kv_heads) + "/dim:" + std::to_string(kModel.head_dim),
                  [=](benchmark::State& state) { bench_append_kv(state, batch); });
  }
  for (const std::int64_t rows : {1, 8, 64}) {
    for (const bool is_greedy : {true, false}) {
      register_case("sample/rows:" + std::to_string(rows) + "/vocabulary:" + std::to_string(kModel.vocab) +
                        (is_greedy ? "/greedy" : "/top_p:0.9"),
                    [=](benchmark::State& state) { bench_sample(state, rows, is_greedy); });
    }
  }
}

}  // namespace helix::bench
