// SPDX-License-Identifier: Apache-2.0
// Sums over ranks, compared with exact sums in double, with equal bits on all ranks.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string_view>
#include <type_traits>
#include <vector>

#include <helix/contract/communicator/guarded_bytes.hpp>
#include <helix/dtype.hpp>

namespace helix::contract {

/// Values of all ranks for a reduction, rounded to T; the exact sum in double; and the error allowed for
/// float accumulation and one rounding to T.
template <class T>
struct ReductionCase {
  std::vector<std::vector<T>> inputs;  // [rank][element]
  std::vector<double> sum;
  std::vector<double> tolerance;

  ReductionCase(int size, std::int64_t count, unsigned seed) {
    const double unit = std::is_same_v<T, float> ? 0x1p-23 : std::is_same_v<T, f16> ? 0x1p-10 : 0x1p-7;
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
    inputs.resize(static_cast<std::size_t>(size));
    sum.resize(static_cast<std::size_t>(count));
    std::vector<double> magnitude(sum.size());
    for (std::vector<T>& input : inputs) {
      for (std::size_t i = 0; i < sum.size(); ++i) {
        input.emplace_back(uniform(generator));
        const double value = static_cast<double>(static_cast<float>(input.back()));
        sum[i] += value;
        magnitude[i] += std::abs(value);
      }
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      tolerance.push_back(magnitude[i] * 0x1p-23 * size + std::abs(sum[i]) * unit + 1e-7);
    }
  }
};

template <class Comm>
void require_equal_bits_on_all_ranks(Comm& comm, const void* data, std::int64_t bytes,
                                     std::string_view what) {
  typename Comm::Stream stream;
  std::vector<std::uint8_t> all(static_cast<std::size_t>(comm.size() * bytes));
  comm.all_gather(data, all.data(), bytes, stream);
  stream.synchronize();
  for (int r = 1; r < comm.size(); ++r) {
    require(
        bytes == 0 || std::memcmp(all.data(), all.data() + r * bytes, static_cast<std::size_t>(bytes)) == 0,
        what, ": rank ", r, " has other bits than rank 0");
  }
}

template <class T, class Comm>
void reduction_contract_of(Comm& comm) {
  typename Comm::Stream stream;
  constexpr std::int64_t kWidth = sizeof(T);
  for (const std::int64_t count : {0, 1, 2, 7, 1023, 1024, 1025, 8191, 8193}) {
    const ReductionCase<T> reduction(comm.size(), count, static_cast<unsigned>(count + comm.size()));
    const auto check = [&](const std::uint8_t* out, std::int64_t begin, std::int64_t length,
                           std::string_view what) {
      for (std::int64_t i = 0; i < length; ++i) {
        T value;
        std::memcpy(&value, out + i * kWidth, sizeof(T));
        const auto at = static_cast<std::size_t>(begin + i);
        const double got = static_cast<double>(static_cast<float>(value));
        require(std::abs(got - reduction.sum[at]) <= reduction.tolerance[at], what, " of ", count, " x ",
                to_string(kDTypeOf<T>), ": element ", at, " is ", got, ", expected ", reduction.sum[at]);
      }
    };
    const std::vector<T>& input = reduction.inputs[static_cast<std::size_t>(comm.rank())];
    const auto fill = [&](GuardedBytes& target) {
      if (count > 0) std::memcpy(target.data(), input.data(), input.size() * sizeof(T));
    };
    for (const bool in_place : {false, true}) {
      GuardedBytes in(count * kWidth);
      GuardedBytes out(count * kWidth, 0xff);  // NaN in each type
      fill(in_place ? out : in);
      comm.all_reduce(in_place ? out.data() : in.data(), out.data(), count, kDTypeOf<T>, stream);
      stream.synchronize();
      out.check("all_reduce");
      check(out.data(), 0, count, "all_reduce");
      require_equal_bits_on_all_ranks(comm, out.data(), count * kWidth, "all_reduce");
    }
    const std::int64_t slice = count / comm.size();
    GuardedBytes in(count * kWidth);
    GuardedBytes out(slice * kWidth, 0xff);
    fill(in);
    comm.reduce_scatter(in.data(), out.data(), slice, kDTypeOf<T>, stream);
    stream.synchronize();
    out.check("reduce_scatter");
    check(out.data(), comm.rank() * slice, slice, "reduce_scatter");
  }
}

template <class Comm>
void reduction_contract(Comm& comm) {
  reduction_contract_of<float>(comm);
  reduction_contract_of<f16>(comm);
  reduction_contract_of<bf16>(comm);
}

/// f32 sums are the left fold in rank order, bit for bit: 1e8, 1, -1e8, 1 reveal any other order.
template <class Comm>
void rank_order_contract(Comm& comm) {
  typename Comm::Stream stream;
  constexpr std::array<float, 4> kValues = {1e8f, 1.0f, -1e8f, 1.0f};
  float expected = kValues[0];
  for (int r = 1; r < comm.size(); ++r) expected += kValues[static_cast<std::size_t>(r % 4)];
  const float in = kValues[static_cast<std::size_t>(comm.rank() % 4)];
  float out = std::numeric_limits<float>::quiet_NaN();
  comm.all_reduce(&in, &out, 1, DType::f32, stream);
  stream.synchronize();
  require(out == expected, "all_reduce is ", out, ", the sum in rank order is ", expected);
}

}  // namespace helix::contract
