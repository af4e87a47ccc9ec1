// SPDX-License-Identifier: Apache-2.0
// Properties of partial attention on a GPU, with tensor cores and without, against a naive reference in
// double precision, with everything poisoned that must not be read.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/gpu.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

struct Sequence {
  std::int64_t length = 0;   // global tokens, the query tokens included
  std::int64_t queries = 1;  // the last ones; 0: none in this step
};

struct Case {
  DType kv_dtype = DType::f32;
  std::int64_t kv_heads = 2;
  std::int64_t group = 4;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  MakeKvPool pool = helix_pool;
  bool is_csr = false;
  std::int64_t page_tokens = 64;
  std::int64_t kvp = 1;
  std::int64_t chunk = 16;
  std::int64_t window = 0;
  float soft_cap = 0.0f;
  std::int64_t q_pad = 0;  // elements between heads, which are NaN
  std::int64_t out_pad = 0;
  bool forgets = false;  // what no window reaches any more is NaN
  std::vector<Sequence> sequences = {{40, 1}};
  std::vector<std::int64_t> padding;  // query tokens whose position is -1

  bool is_latent() const { return pool == latent_pool || pool == split_latent_pools; }
};

/// Largest relative error of a row of out, in the 2-norm: bf16 and f16 keep 8 and 11 bits of each weight.
template <class T>
constexpr double kOutTolerance = 2e-5;
template <>
constexpr double kOutTolerance<bf16> = 1e-2;
template <>
constexpr double kOutTolerance<f16> = 2e-3;
template <class T>
constexpr double kLseTolerance = sizeof(T) == 2 ? 1e-3 : 1e-5;

/// One layer of one model: what every token holds, what each query asks. T: of q and out.
template <class T>
class World {
 public:
  explicit World(const Case& c, unsigned seed = 1) : case_(c), random_(seed) {
    const auto sequences = static_cast<std::int64_t>(c.sequences.size());
    offsets_.push_back(0);
    for (std::int64_t b = 0; b < sequences; ++b) {
      const Sequence& s = c.sequences[at(b)];
      for (std::int64_t t = 0; t < s.queries; ++t) {
        positions_.push_back(s.length - s.queries + t);
        sequence_of_.push_back(at(b));
      }
      offsets_.push_back(static_cast<std::int32_t>(positions_.size()));
      slots_.push_back(static_cast<std::int32_t>(sequences - 1 - b));
    }
    for (const std::int64_t token : c.padding) positions_[at(token)] = -1;
    q_.assign(at(num_tokens() * heads() * q_stride()), kNaN);
    for (std::int64_t row = 0; row < num_tokens() * heads(); ++row)
      for (std::int64_t i = 0; i < c.d; ++i)
        q_[at(row * q_stride() + i)] = static_cast<float>(T(2.0f * uniform()));
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      scales_.push_back(0.5f + 0.25f * static_cast<float>(h));
      scales_.push_back(1.5f - 0.25f * static_cast<float>(h));
    }
    for (const Sequence& s : c.sequences) {
      std::vector<float>& stored = stored_.emplace_back(at(s.length * row_elements()));
      dispatch(c.kv_dtype, [&]<class S>(S*) {
        for (float& x : stored) x = static_cast<float>(S(2.0f * uniform()));
      });
    }
  }

  const Case& what() const { return case_; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  std::int64_t heads() const { return case_.group * case_.kv_heads; }

  /// The whole buffers, guards and gaps included.
  struct Result {
    std::vector<std::uint8_t> out;
    std::vector<std::uint8_t> lse;

    friend bool operator==(const Result&, const Result&) = default;
  };

  /// The code under test on the shard of `kvp_rank`, on sequences [first, first + count) (-1: all). Rows that
  /// no token needs, unused pages, the workspace and the outputs are NaN.
  Result run(const cuda::Operators<T>& operators, std::int64_t kvp_rank = 0, std::int64_t first = 0,
             std::int64_t count = -1) const {
    const Case& c = case_;
    const Shard shard = shard_of(kvp_rank);
    const std::vector<std::uint8_t> bytes_of_q = narrowed(q_);
    cuda::Stream stream = operators.create_stream();
    std::vector<cuda::Buffer> memory;
    const auto upload = [&]<class X>(const std::vector<X>& values) {
      memory.push_back(operators.allocate(values.size() * sizeof(X) + 1));
      operators.upload(memory.back().data(), values.data(), values.size() * sizeof(X), stream);
      return reinterpret_cast<X*>(memory.back().data());
    };
    KvView kv = shard.pool.view(upload(shard.bytes));
    kv.layout = KvLayout(c.kvp, c.chunk);
    kv.kvp_rank = kvp_rank;
    kv.page_table = upload(shard.lists.pages);
    kv.max_pages = shard.lists.max_pages;
    if (c.is_csr) kv.page_begins = upload(shard.lists.begins);
    if (c.kv_dtype == DType::fp8_e4m3) {
      const float* scales = upload(scales_);
      kv.k_scale = scales;
      kv.v_scale = c.is_latent() ? nullptr : scales + c.kv_heads;
    }
    Result result;
    result.out.assign(at(num_tokens() * heads() * out_stride()) * sizeof(T) + kGuard, 0xff);
    result.lse.assign(at(num_tokens() * lse_stride()) * sizeof(float) + kGuard, 0xff);
    auto* out = reinterpret_cast<T*>(upload(result.out));
    auto* lse = reinterpret_cast<float*>(upload(result.lse));

    Batch batch{offsets_, upload(offsets_), upload(positions_), upload(slots_)};
    if (count >= 0) batch = batch.slice(first, count);
    const std::size_t workspace_bytes =
        operators.partial_attention_workspace_bytes(batch.num_tokens(), heads(), c.d, c.dv);
    // The kernel owes nothing to the alignment of the workspace.
    std::vector<std::uint8_t> workspace(1 + workspace_bytes + kGuard, 0xff);
    auto* const scratch = reinterpret_cast<std::byte*>(upload(workspace));

    PartialAttentionArgs<T> args;
    args.q = TensorView<const T, 3>(reinterpret_cast<const T*>(upload(bytes_of_q)),
                                    {num_tokens(), heads(), c.d}, {heads() * q_stride(), q_stride(), 1});
    args.batch = batch;
    args.kv = kv;
    args.sink.out = {out, {num_tokens(), heads(), c.dv}, {heads() * out_stride(), out_stride(), 1}};
    args.sink.lse = {lse, {num_tokens(), heads()}, {lse_stride(), 1}};
    args.scale = scale();
    args.window = c.window;
    args.soft_cap = c.soft_cap;
    args.workspace = {scratch + 1, workspace_bytes};
    operators.partial_attention(args, stream);

    operators.download(result.out.data(), out, result.out.size(), stream);
    operators.download(result.lse.data(), lse, result.lse.size(), stream);
    operators.download(workspace.data(), scratch, workspace.size(), stream);
    operators.synchronize(stream);
    CHECK(std::all_of(workspace.end() - kGuard, workspace.end(), [](std::uint8_t x) { return x == 0xff; }));
    return result;
  }

  /// What is wrong with the results of all ranks (of `only_rank` if that is not -1) for the tokens of
  /// sequences [first, first + count), or with what is written elsewhere. Empty: nothing.
  std::string problem(const std::vector<Result>& results, std::int64_t only_rank = -1, std::int64_t first = 0,
                      std::int64_t count = -1) const {
    const std::int64_t begin = offsets_[at(first)];
    const std::int64_t end = count < 0 ? num_tokens() : offsets_[at(first + count)];
    for (const Result& result : results) {
      const std::string stray = stray_write(result, begin, end);
      if (!stray.empty()) return stray;
    }
    std::string found;
    std::mutex mutex;
    std::atomic<std::int64_t> next = begin * heads();
    const auto work = [&] {
      for (std::int64_t row = next++; row < end * heads(); row = next++) {
        const std::string text = row_problem(results, only_rank, row / heads(), row % heads());
        if (text.empty()) continue;
        const std::lock_guard lock(mutex);
        if (found.empty()) found = text;
        next = end * heads();
      }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < std::min(16u, std::thread::hardware_concurrency()); ++i)
      threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return found;
  }

  /// Every query of every rank, and the merge of all ranks, against the reference.
  std::string check(const cuda::Operators<T>& operators) const {
    std::vector<Result> results;
    for (std::int64_t rank = 0; rank < case_.kvp; ++rank) results.push_back(run(operators, rank));
    return problem(results);
  }

 private:
  static constexpr std::int64_t kGuard = 256;

  /// Elements of a token: [K of every head, V of every head], or the latent row.
  std::int64_t row_elements() const { return (case_.is_latent() ? 1 : 2 * case_.kv_heads) * case_.d; }
  std::int64_t q_stride() const { return case_.d + case_.q_pad; }
  std::int64_t out_stride() const { return case_.dv + case_.out_pad; }
  std::int64_t lse_stride() const { return heads() + case_.out_pad; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.d)); }
  float uniform() { return static_cast<float>(random_() >> 8) * 0x1p-23f - 1.0f; }

  static std::vector<std::uint8_t> narrowed(const std::vector<float>& values) {
    std::vector<std::uint8_t> bytes(values.size() * sizeof(T));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T x(values[i]);
      std::memcpy(bytes.data() + i * sizeof(T), &x, sizeof(T));
    }
    return bytes;
  }

  /// One rank's pool and the pages of its sequences.
  struct Shard {
    KvPool pool;
    std::vector<std::uint8_t> bytes;
    HostPageLists lists;
  };

  /// The shard's pages in random order, and lists that lead to a page of NaN where there is none. All that no
  /// sequence holds is NaN: other layers, gaps between pools, columns after a row.
  Shard shard_of(std::int64_t kvp_rank) const {
    const Case& c = case_;
    const KvLayout layout(c.kvp, c.chunk);
    std::vector<std::int64_t> counts(c.sequences.size());
    std::int64_t num_pages = 1;
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
      const std::int64_t length = layout.length(c.sequences[b].length, kvp_rank);
      num_pages += counts[at(slots_[b])] = (length + c.page_tokens - 1) / c.page_tokens;
    }
    std::vector<std::int32_t> free_pages(at(num_pages));
    std::iota(free_pages.begin(), free_pages.end(), 0);
    std::mt19937 shuffle(5);
    std::shuffle(free_pages.begin(), free_pages.end(), shuffle);
    Shard shard{c.pool({c.kv_dtype, c.kv_heads, c.d, c.dv, c.page_tokens, num_pages}),
                {},
                HostPageLists(counts, c.is_csr, free_pages.front())};
    const KvPool& pool = shard.pool;
    shard.bytes.resize(at(pool.num_elements) * size_bytes(c.kv_dtype));
    dispatch(c.kv_dtype, [&]<class S>(S*) {
      const auto put = [&](std::int64_t i, float value) {
        const S x(value);
        std::memcpy(shard.bytes.data() + at(i) * sizeof(S), &x, sizeof(S));
      };
      for (std::int64_t i = 0; i < pool.num_elements; ++i) put(i, kNaN);
      for (std::size_t b = 0; b < c.sequences.size(); ++b) {
        const Sequence& s = c.sequences[b];
        const std::int64_t forgotten =
            c.forgets ? std::max<std::int64_t>(0, s.length - s.queries + 1 - c.window) : 0;
        for (std::int64_t local = 0; local < layout.length(s.length, kvp_rank); ++local) {
          std::int32_t& page = shard.lists.at(slots_[b], local / c.page_tokens);
          const std::int64_t in_page = local % c.page_tokens;
          if (in_page == 0) {
            page = free_pages.back();
            free_pages.pop_back();
          }
          const std::int64_t token = layout.global(kvp_rank, local);
          if (token < forgotten) continue;
          const float* row = stored_[b].data() + token * row_elements();
          for (std::int64_t head = 0; head < c.kv_heads; ++head) {
            for (std::int64_t i = 0; i < c.d; ++i) put(pool.key(page, head, in_page, i), row[head * c.d + i]);
            for (std::int64_t i = 0; i < c.dv && !c.is_latent(); ++i)
              put(pool.value(page, head, in_page, i), row[(c.kv_heads + head) * c.d + i]);
          }
        }
      }
    });
    return shard;
  }

  /// Bytes outside of the rows of tokens [begin, end) that are no longer 0xff.
  std::string stray_write(const Result& result, std::int64_t begin, std::int64_t end) const {
    const auto look = [&](const std::vector<std::uint8_t>& bytes, std::int64_t row_bytes,
                          std::int64_t used_bytes, std::int64_t first_row, std::int64_t last_row) {
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes.size()); ++i) {
        const std::int64_t row = i / row_bytes;
        const bool is_used = row >= first_row && row < last_row && i % row_bytes < used_bytes;
        if (!is_used && bytes[at(i)] != 0xff) return i;
      }
      return std::int64_t{-1};
    };
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
    const std::int64_t in_out =
        look(result.out, out_stride() * kBytes, case_.dv * kBytes, begin * heads(), end * heads());
    const std::int64_t in_lse = look(result.lse, lse_stride() * 4, heads() * 4, begin, end);
    if (in_out < 0 && in_lse < 0) return "";
    std::ostringstream text;
    text << "byte " << in_out << " of out or " << in_lse << " of lse was written and must not be";
    return text.str();
  }

  std::vector<double> out_row(const Result& result, std::int64_t row) const {
    std::vector<double> values;
    for (std::int64_t i = 0; i < case_.dv; ++i) {
      T x;
      std::memcpy(&x, result.out.data() + at(row * out_stride() + i) * sizeof(T), sizeof(T));
      values.push_back(static_cast<double>(static_cast<float>(x)));
    }
    return values;
  }
  double lse_of(const Result& result, std::int64_t token, std::int64_t head) const {
    float x;
    std::memcpy(&x, result.lse.data() + at(token * lse_stride() + head) * sizeof(float), sizeof(float));
    return x;
  }

  std::string row_problem(const std::vector<Result>& results, std::int64_t only_rank, std::int64_t token,
                          std::int64_t head) const {
    const Case& c = case_;
    const std::vector<float>& stored = stored_[sequence_of_[at(token)]];
    const std::int64_t kv_head = head / c.group;
    const bool is_scaled = c.kv_dtype == DType::fp8_e4m3;
    const double k_scale = is_scaled ? scales_[at(kv_head)] : 1.0;
    const double v_scale = c.is_latent() ? k_scale : is_scaled ? scales_[at(c.kv_heads + kv_head)] : 1.0;
    const std::int64_t position = positions_[at(token)];
    const std::int64_t first = c.window > 0 ? std::max<std::int64_t>(0, position + 1 - c.window) : 0;
    const float* q = q_.data() + (token * heads() + head) * q_stride();
    std::vector<double> scores;
    for (std::int64_t p = first; p <= position; ++p) {
      const float* key = stored.data() + p * row_elements() + (c.is_latent() ? 0 : kv_head * c.d);
      double score = 0.0;
      for (std::int64_t i = 0; i < c.d; ++i) score += double{q[i]} * double{key[i]};
      score *= k_scale * double{scale()};
      if (c.soft_cap > 0.0f) score = double{c.soft_cap} * std::tanh(score / double{c.soft_cap});
      scores.push_back(score);
    }
    /// Over the tokens of one rank, -1: of all.
    const auto expect = [&](std::int64_t rank, std::vector<double>& out) {
      out.assign(at(c.dv), 0.0);
      double highest = -kInfinity;
      const auto is_seen = [&](std::int64_t p) { return rank < 0 || (p / c.chunk) % c.kvp == rank; };
      for (std::int64_t p = first; p <= position; ++p)
        if (is_seen(p)) highest = std::max(highest, scores[at(p - first)]);
      if (highest == -kInfinity) return -kInfinity;
      double total = 0.0;
      for (std::int64_t p = first; p <= position; ++p) {
        if (!is_seen(p)) continue;
        const double weight = std::exp(scores[at(p - first)] - highest);
        const float* value =
            stored.data() + p * row_elements() + (c.is_latent() ? 0 : c.kv_heads + kv_head) * c.d;
        for (std::int64_t i = 0; i < c.dv; ++i) out[at(i)] += weight * double{value[i]};
        total += weight;
      }
      for (double& x : out) x *= v_scale / total;
      return highest + std::log(total);
    };

    std::vector<double> expected;
    std::vector<double> merged(at(c.dv), 0.0);
    double total = 0.0;
    double rounded = 0.0;  // norms that the ranks' roundings are relative to
    // A row of few elements may cancel to almost nothing.
    const double least_scale = 0.01 * std::sqrt(static_cast<double>(c.dv));
    for (std::int64_t rank = 0; rank < c.kvp; ++rank) {
      if (only_rank >= 0 && rank != only_rank) continue;
      const Result& result = results[only_rank >= 0 ? 0 : at(rank)];
      const double expected_lse = expect(rank, expected);
      const std::vector<double> out = out_row(result, token * heads() + head);
      const double lse = lse_of(result, token, head);
      const std::string text = mismatch(out, lse, expected, expected_lse, least_scale);
      if (!text.empty()) return describe(token, head, rank) + text;
      const double weight = std::exp(lse);
      total += weight;
      for (std::size_t i = 0; i < merged.size(); ++i) merged[i] += weight * out[i];
      rounded += weight * norm(out);
    }
    if (c.kvp == 1 || only_rank >= 0 || total == 0.0) return "";
    for (double& x : merged) x /= total;
    const double expected_lse = expect(-1, expected);
    const std::string text = mismatch(merged, std::log(total), expected, expected_lse, rounded / total);
    return text.empty() ? "" : describe(token, head, -1) + text;
  }

  static double norm(const std::vector<double>& values) {
    return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
  }

  std::string describe(std::int64_t token, std::int64_t head, std::int64_t rank) const {
    std::ostringstream text;
    text << "token " << token << " of sequence " << sequence_of_[at(token)] << " at position "
         << positions_[at(token)] << ", head " << head << ", rank " << rank << " (-1: all merged): ";
    return text.str();
  }

  /// `scale`: the least that the error is measured by.
  static std::string mismatch(const std::vector<double>& out, double lse, const std::vector<double>& expected,
                              double expected_lse, double scale) {
    std::ostringstream text;
    const double allowed = kLseTolerance<T> * (sizeof(T) == 2 ? 1.0 : std::max(1.0, std::abs(expected_lse)));
    const bool is_empty = expected_lse == -kInfinity;
    if (is_empty ? lse != expected_lse : !(std::abs(lse - expected_lse) <= allowed))
      text << "lse is " << lse << ", expected " << expected_lse << ". ";
    std::vector<double> errors(out);
    for (std::size_t i = 0; i < errors.size(); ++i) errors[i] -= expected[i];
    if (!(norm(errors) <= kOutTolerance<T> * std::max(scale, norm(expected)))) {
      text << "out differs by " << norm(errors) << " from one of norm " << norm(expected)
           << ", first elements " << out[0] << " and " << expected[0];
    }
    return text.str();
  }

  Case case_;
  std::mt19937 random_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int64_t> positions_;
  std::vector<std::size_t> sequence_of_;  // of each token
  std::vector<float> q_;                  // as T holds them
  std::vector<float> scales_;             // of K, then of V
  std::vector<std::vector<float>> stored_;
};

/// A case for the kernel of T: on tensor cores if T is of 16 bits, as q and KV then have one type.
template <class T>
Case case_of(std::int64_t d = 64) {
  Case c;
  c.kv_dtype = kDTypeOf<T>;
  c.d = c.dv = d;
  return c;
}

std::vector<Sequence> uniform(std::int64_t count, Sequence sequence) {
  return std::vector<Sequence>(at(count), sequence);
}

// 1 to 8 drafted tokens, prefills that fill query tiles and leave some over, one sequence that rests.
const std::vector<Sequence> kRagged = {{40, 1}, {41, 2}, {5, 3}, {70, 4},  {31, 5}, {32, 6},
                                       {33, 7}, {9, 0},  {8, 8}, {90, 17}, {96, 70}};

}  // namespace

TEMPLATE_TEST_CASE("attention on a GPU serves every grouping of heads and number of query tokens", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t group : {1, 2, 4, 5, 8, 16, 20}) {
      Case c = case_of<TestType>(d);
      c.group = group;
      CAPTURE(d, group);
      for (const std::int64_t queries : {1, 2, 3, 8}) {
        CAPTURE(queries);
        c.sequences = {{37 + queries, queries}, {queries, queries}};
        CHECK(World<TestType>(c).check(operators) == "");
      }
      c.sequences = kRagged;
      CHECK(World<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU: shards combine to the whole for any chunk and page size", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  constexpr std::int64_t kPages[] = {16, 17, 32, 48, 64, 256};
  constexpr std::int64_t kDims[] = {64, 128, 256};
  std::size_t turn = 0;
  for (const std::int64_t kvp : {1, 2, 4, 8}) {
    for (const std::int64_t chunk : {1, 3, 16, 64}) {
      for (int i = 0; i < 3; ++i, ++turn) {
        Case c = case_of<TestType>(kDims[turn % 3]);
        c.page_tokens = kPages[(turn + turn / 6) % 6];
        c.kvp = kvp;
        c.chunk = chunk;
        c.sequences = {{70, 1}, {333, 4}, {20, 8}, {5, 5}, {700, 2}};
        CAPTURE(kvp, chunk, c.page_tokens, c.d);
        CHECK(World<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU splits ranges exactly at every edge of its tiles", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  const std::int64_t lengths[] = {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000};
  for (const std::int64_t d : {64, 128, 256}) {
    Case c = case_of<TestType>(d);
    c.kv_heads = 1;
    c.group = 8;
    c.sequences.clear();
    for (const std::int64_t length : lengths) c.sequences.push_back({length, 1});
    CAPTURE(d);
    CHECK(World<TestType>(c).check(operators) == "");
    c.kv_heads = 2;
    c.page_tokens = 17;
    for (const std::int64_t length : lengths) {  // alone, the whole GPU shares its tiles
      CAPTURE(length);
      c.sequences = {{length, 1}};
      CHECK(World<TestType>(c).check(operators) == "");
    }
    c.sequences = {{5000, 7}, {1, 1}, {4999, 5}};
    CHECK(World<TestType>(c).check(operators) == "");
  }
}

TEMPLATE_TEST_CASE("attention on a GPU shares blocks out among sequences of any lengths", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  Case c = case_of<TestType>(128);
  const auto check = [&](std::int64_t kv_heads, const std::vector<Sequence>& sequences) {
    c.kv_heads = kv_heads;
    c.sequences = sequences;
    CAPTURE(kv_heads, sequences.size());
    CHECK(World<TestType>(c).check(operators) == "");
  };
  check(1, {{20000, 1}});  // more KV splits than a warp has lanes
  check(8, {{3000, 1}});
  check(2, {{5000, 1}, {4000, 1}, {300, 1}});  // blocks of their own, in proportion
  check(2, {{8000, 1}, {31, 1}, {1, 1}, {1, 1}});
  check(3, {{2000, 8}, {1999, 8}, {2000, 1}});  // query tiles of several tokens
  check(1, {{900, 0}, {40, 0}, {700, 17}});     // as many query tiles as sequences, but not one each
  // Too few blocks for one each: work items across query tiles.
  std::vector<Sequence> few_long = uniform(110, {33, 1});
  for (int i = 0; i < 10; ++i) few_long.insert(few_long.begin() + i * 11, {2500, 1});
  check(2, few_long);
}

TEMPLATE_TEST_CASE("attention on a GPU honours windows and soft caps", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t window : {0, 1, 5, 100}) {
    for (const float soft_cap : {0.0f, 0.5f, 30.0f}) {
      for (const std::int64_t kvp : {1, 3}) {
        Case c = case_of<TestType>(window == 5 ? 64 : window == 1 ? 256 : 128);
        c.window = window;
        c.soft_cap = soft_cap;
        c.kvp = kvp;
        c.chunk = 3;
        c.sequences = kRagged;
        c.sequences.push_back({1234, 3});
        CAPTURE(window, soft_cap, kvp);
        CHECK(World<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads nothing that lies before all windows", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t window : {1, 5, 100}) {
    for (const std::int64_t kvp : {1, 2}) {
      Case c = case_of<TestType>(128);
      c.window = window;
      c.kvp = kvp;
      c.forgets = true;
      c.sequences = {{1234, 3}, {250, 1}, {97, 4}, {640, 8}};
      CAPTURE(window, kvp);
      CHECK(World<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU gives padding and empty shards an output of 0 and an lse of -inf", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  Case c = case_of<TestType>(128);
  c.kvp = 4;
  c.sequences = {{7, 1}, {20, 3}, {1, 1}, {40, 17}};
  CHECK(World<TestType>(c).check(operators) == "");
  c.sequences = kRagged;
  c.kvp = 2;
  c.padding = {0, 4, 9, 10, 11, 12, 30, 61};
  for (std::int64_t token = 70; token < 100; ++token) c.padding.push_back(token);  // whole query tiles
  CHECK(World<TestType>(c).check(operators) == "");
  c.padding.clear();
  for (std::int64_t token = 0; token < 123; ++token) c.padding.push_back(token);
  CHECK(World<TestType>(c).check(operators) == "");
  c.sequences = uniform(3, {9, 0});
  c.padding.clear();
  CHECK(World<TestType>(c).check(operators) == "");
}

TEMPLATE_TEST_CASE("attention on a GPU of more sequences and rows than one launch holds", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t sequences : {1, 3, 70, 256, 257, 600}) {
    Case c = case_of<TestType>(64);
    c.page_tokens = 16;
    c.kvp = sequences == 600 ? 2 : 1;
    c.sequences.clear();
    for (std::int64_t b = 0; b < sequences; ++b) c.sequences.push_back({b * 37 % 90 + 2, b % 5 == 3 ? 0 : 1});
    CAPTURE(sequences);
    CHECK(World<TestType>(c).check(operators) == "");
  }
  Case c = case_of<TestType>(64);  // a prefill of several launches, between and beside others
  c.kv_heads = 1;
  c.group = 20;
  c.window = 100;
  c.sequences = uniform(40, {33, 1});
  c.sequences.push_back({900, 700});
  c.sequences.push_back({50, 3});
  c.sequences.push_back({460, 450});
  for (int i = 0; i < 300; ++i) c.sequences.push_back({i % 40 + 1, 1});
  CHECK(World<TestType>(c).check(operators) == "");
}

TEST_CASE("attention on a GPU of so many heads that they limit the query tiles of a launch") {
  HELIX_REQUIRE_GPUS(1);
  Case c = case_of<float>(16);
  c.kv_heads = 300;
  c.group = 1;
  c.window = 5;
  c.sequences = {{20, 1}, {1800, 1795}, {3, 3}};
  CHECK(World<float>(c).check(cuda::Operators<float>()) == "");
}

TEMPLATE_TEST_CASE("attention on a GPU gives the same result on few blocks, and the same bits twice", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  cuda::Operators<TestType> operators;
  std::vector<World<TestType>> worlds;
  for (const std::int64_t d : {64, 128, 256}) {
    Case c = case_of<TestType>(d);
    c.sequences = kRagged;
    c.sequences.push_back({1500, 3});
    worlds.emplace_back(c);
  }
  Case prefill = case_of<TestType>(128);
  prefill.sequences = {{300, 300}, {40, 1}};
  worlds.emplace_back(prefill, 7);
  for (const int blocks : {1, 7, 0}) {
    operators.set_attention_blocks(blocks);
    CAPTURE(blocks);
    std::vector<typename World<TestType>::Result> results;
    for (const auto& world : worlds) {
      results.push_back(world.run(operators));
      CHECK(world.problem({results.back()}) == "");
    }
    // Calls of other shapes came between: the counters that they share are zero again after each.
    for (std::size_t i = 0; i < worlds.size(); ++i) CHECK(worlds[i].run(operators) == results[i]);
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of a slice of the batch writes that slice's rows only", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  Case c = case_of<TestType>(128);
  c.kvp = 2;
  c.sequences = kRagged;
  const World<TestType> world(c);
  for (const std::int64_t first : {0, 3, 7, 10}) {
    for (const std::int64_t count : {0, 1}) {
      CAPTURE(first, count);
      CHECK(world.problem({world.run(operators, 1, first, count)}, 1, first, count) == "");
    }
  }
  CHECK(world.problem({world.run(operators, 0, 2, 6)}, 0, 2, 6) == "");
}

TEMPLATE_TEST_CASE("attention on a GPU takes strided queries and outputs, aligned or not", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t q_pad : {0, 8, 3}) {
      for (const std::int64_t out_pad : {0, 8, 1}) {
        Case c = case_of<TestType>(d);
        c.q_pad = q_pad;
        c.out_pad = out_pad;
        c.sequences = {{300, 1}, {70, 5}, {33, 33}};
        CAPTURE(d, q_pad, out_pad);
        CHECK(World<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads every storage type and head size", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  const std::int64_t dims[][2] = {{1, 1},   {7, 5},    {48, 16},   {64, 64},   {80, 80},
                                  {96, 64}, {128, 64}, {128, 128}, {192, 128}, {256, 256}};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const auto& [d, dv] : dims) {
      // One or a few elements may cancel when ranks merge: their norm is no scale for 16-bit rounding.
      if (!std::is_same_v<TestType, float> && dv < 16) continue;
      Case c = case_of<TestType>(d);
      c.kv_dtype = dtype;
      c.dv = dv;
      c.kvp = 2;
      c.group = 5;
      c.sequences = {{150, 1}, {41, 4}};
      CAPTURE(to_string(dtype), d, dv);
      CHECK(World<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU serves MLA rows, whose values are the first elements of the keys", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const std::int64_t heads : {1, 8, 16, 128}) {
      Case c = case_of<TestType>(576);
      c.kv_dtype = dtype;
      c.dv = 512;
      c.pool = latent_pool;
      c.kv_heads = 1;
      c.group = heads;
      c.kvp = 2;
      c.sequences = {{150, 1}, {20, 2}};
      CAPTURE(to_string(dtype), heads);
      CHECK(World<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads the pools of other engines where they lie", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  constexpr std::int64_t kDims[] = {64, 128, 256};
  std::size_t turn = 0;
  for (const MakeKvPool pool : kv_pool_makers()) {
    for (const std::int64_t page_tokens : {1, 16, 17, 64}) {
      for (const bool is_csr : {false, true}) {
        for (const std::int64_t window : {0, 100}) {
          Case c = case_of<TestType>(kDims[turn % 3]);
          c.pool = pool;
          c.is_csr = is_csr;
          c.page_tokens = page_tokens;
          c.window = window;
          c.forgets = window > 0;
          c.kvp = turn % 2 == 0 ? 1 : 2;
          c.kv_heads = turn % 5 == 0 ? 1 : 3;
          c.group = turn % 4 == 0 ? 20 : 4;
          c.sequences = {{70, 1}, {333, 4}, {20, 8}, {5, 0}, {700, 2}};
          ++turn;
          CAPTURE(pool({c.kv_dtype, c.kv_heads, c.d, c.dv, page_tokens, 1}).name, page_tokens, is_csr, window,
                  c.d, c.kvp, c.kv_heads, c.group);
          CHECK(World<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU splits token-major ranges exactly at every edge of its tiles", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t page_tokens : {1, 17, 64}) {
      Case c = case_of<TestType>(d);
      c.pool = vllm_pool;
      c.page_tokens = page_tokens;
      c.sequences.clear();
      for (const std::int64_t length : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000})
        c.sequences.push_back({length, 1});
      CAPTURE(d, page_tokens);
      CHECK(World<TestType>(c).check(operators) == "");
      c.sequences = {{20000, 1}};
      CHECK(World<TestType>(c).check(operators) == "");
      c.sequences = {{300, 300}, {5000, 7}};
      CHECK(World<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads foreign pools of every storage type and of unequal head sizes",
                   "", float, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  constexpr std::int64_t kDims[][2] = {{48, 16}, {96, 64}, {128, 128}, {192, 128}};
  std::size_t turn = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const auto& [d, dv] : kDims) {
      for (const MakeKvPool pool : kv_pool_makers()) {
        Case c = case_of<TestType>(d);
        c.kv_dtype = dtype;
        // A pool of one tensor has places of D columns for V, too.
        c.dv = dv;
        c.pool = pool;
        c.is_csr = turn % 2 == 0;
        c.page_tokens = turn % 3 == 0 ? 1 : 16;
        c.kvp = 2;
        c.sequences = {{150, 1}, {41, 4}};
        ++turn;
        CAPTURE(pool({dtype, c.kv_heads, d, dv, 1, 1}).name, to_string(dtype), d, dv, c.page_tokens);
        CHECK(World<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads latents whose rope columns lie apart", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const DType dtype : {kDTypeOf<TestType>, DType::fp8_e4m3}) {
    for (const MakeKvPool pool : latent_pool_makers()) {
      for (const std::int64_t page_tokens : {1, 17, 64}) {
        for (const bool is_csr : {false, true}) {
          Case c = case_of<TestType>(576);
          c.kv_dtype = dtype;
          c.dv = 512;
          c.pool = pool;
          c.is_csr = is_csr;
          c.page_tokens = page_tokens;
          c.kv_heads = 1;
          c.group = 16;
          c.kvp = 2;
          c.sequences = {{150, 1}, {20, 2}};
          CAPTURE(to_string(dtype), page_tokens, is_csr);
          CHECK(World<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

// Negative control: a row that lies elsewhere than the view says shows.
TEST_CASE("attention on a GPU of a pool in other places than its view says is wrong") {
  HELIX_REQUIRE_GPUS(1);
  Case c = case_of<bf16>(128);
  c.sequences = {{100, 1}};
  c.pool = [](const KvPoolSizes& sizes) {
    KvPool pool = vllm_pool(sizes);
    std::swap(pool.format.v.token, pool.format.v.head);
    return pool;
  };
  CHECK(World<bf16>(c).check(cuda::Operators<bf16>()) != "");
}

}  // namespace helix::test
