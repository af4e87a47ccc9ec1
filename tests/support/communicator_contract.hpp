// SPDX-License-Identifier: Apache-2.0
// What every Communicator over host memory owes, as bodies that each rank of a group runs. They throw where
// it fails.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <helix/backend.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::test {

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

/// Bytes between canaries: an out-of-range write of a collective is found by check().
class GuardedBytes {
 public:
  explicit GuardedBytes(std::int64_t size, std::uint8_t fill = 0xcd)
      : size_(size), bytes_(static_cast<std::size_t>(size) + 2 * kGuard, kCanary) {
    std::fill_n(bytes_.begin() + kGuard, size, fill);
  }
  std::uint8_t* data() { return bytes_.data() + kGuard; }
  const std::uint8_t* data() const { return bytes_.data() + kGuard; }
  std::uint8_t operator[](std::int64_t i) const { return data()[i]; }
  std::int64_t size() const { return size_; }
  void check(std::string_view what) const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      require(bytes_[i] == kCanary, what, ": byte ", static_cast<int>(i) - static_cast<int>(kGuard),
              " was written");
      require(bytes_[bytes_.size() - 1 - i] == kCanary, what, ": a byte past the end was written");
    }
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::uint8_t kCanary = 0xa5;
  std::int64_t size_;
  std::vector<std::uint8_t> bytes_;
};

/// Byte i of what rank `from` gives to rank `to` in `round`.
inline std::uint8_t pattern(int from, int to, std::int64_t i, int round = 0) {
  return static_cast<std::uint8_t>(from * 37 + to * 101 + i * 7 + i / 251 + round * 13 + 1);
}

inline const std::vector<std::int64_t>& contract_bytes() {
  static const std::vector<std::int64_t> bytes = {0, 1, 3, 64, 4096, 65535, 65536, 65537};
  return bytes;
}

template <class Comm>
void all_gather_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (const std::int64_t bytes : contract_bytes()) {
    for (const bool in_place : {false, true}) {
      GuardedBytes out(comm.size() * bytes);
      GuardedBytes in(bytes);
      std::uint8_t* source = in_place ? out.data() + comm.rank() * bytes : in.data();
      for (std::int64_t i = 0; i < bytes; ++i) source[i] = pattern(comm.rank(), 0, i);
      comm.all_gather(source, out.data(), bytes, stream);
      stream.synchronize();
      out.check("all_gather");
      for (int r = 0; r < comm.size(); ++r) {
        for (std::int64_t i = 0; i < bytes; ++i) {
          require(out[r * bytes + i] == pattern(r, 0, i), "all_gather of ", bytes, " bytes: byte ", i,
                  " of rank ", r, " is wrong, in_place ", in_place);
        }
      }
    }
  }
}

template <class Comm>
void all_to_all_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (const std::int64_t bytes : contract_bytes()) {
    GuardedBytes in(comm.size() * bytes);
    GuardedBytes out(comm.size() * bytes);
    for (int to = 0; to < comm.size(); ++to) {
      for (std::int64_t i = 0; i < bytes; ++i) in.data()[to * bytes + i] = pattern(comm.rank(), to, i);
    }
    comm.all_to_all(in.data(), out.data(), bytes, stream);
    stream.synchronize();
    out.check("all_to_all");
    for (int from = 0; from < comm.size(); ++from) {
      for (std::int64_t i = 0; i < bytes; ++i) {
        require(out[from * bytes + i] == pattern(from, comm.rank(), i), "all_to_all of ", bytes,
                " bytes: byte ", i, " from rank ", from, " is wrong");
      }
    }
  }
}

/// Unequal counts, some of them zero, and the counts' storage is overwritten right after the call.
template <class Comm>
void all_to_all_v_contract(Comm& comm) {
  typename Comm::Stream stream;
  const int size = comm.size();
  for (const std::int64_t unit : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{30000}}) {
    const auto count = [&](int from, int to) { return unit * ((from * 3 + to * 5) % 4); };
    std::vector<std::int64_t> send;
    std::vector<std::int64_t> recv;
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (int peer = 0; peer < size; ++peer) {
      send.push_back(count(comm.rank(), peer));
      recv.push_back(count(peer, comm.rank()));
      sent += send.back();
      received += recv.back();
    }
    GuardedBytes in(sent);
    GuardedBytes out(received);
    std::int64_t offset = 0;
    for (int to = 0; to < size; ++to) {
      for (std::int64_t i = 0; i < count(comm.rank(), to); ++i)
        in.data()[offset++] = pattern(comm.rank(), to, i);
    }
    comm.all_to_all_v(in.data(), send, out.data(), recv, stream);
    std::fill(send.begin(), send.end(), -1);
    std::fill(recv.begin(), recv.end(), -1);
    stream.synchronize();
    out.check("all_to_all_v");
    offset = 0;
    for (int from = 0; from < size; ++from) {
      for (std::int64_t i = 0; i < count(from, comm.rank()); ++i, ++offset) {
        require(out[offset] == pattern(from, comm.rank(), i), "all_to_all_v: byte ", i, " from rank ", from,
                " is wrong, unit ", unit);
      }
    }
  }
}

template <class Comm>
void broadcast_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (const std::int64_t bytes : contract_bytes()) {
    for (int root = 0; root < comm.size(); ++root) {
      GuardedBytes buffer(bytes);
      if (comm.rank() == root) {
        for (std::int64_t i = 0; i < bytes; ++i) buffer.data()[i] = pattern(root, 9, i);
      }
      comm.broadcast(buffer.data(), bytes, root, stream);
      stream.synchronize();
      buffer.check("broadcast");
      for (std::int64_t i = 0; i < bytes; ++i) {
        require(buffer[i] == pattern(root, 9, i), "broadcast of ", bytes, " bytes from ", root, ": byte ", i,
                " is wrong");
      }
    }
  }
}

/// Every pair in both directions, several messages in a row: they match in the order of the calls.
template <class Comm>
void send_recv_contract(Comm& comm) {
  typename Comm::Stream stream;
  const int rank = comm.rank();
  for (int low = 0; low < comm.size(); ++low) {
    for (int high = low + 1; high < comm.size(); ++high) {
      if (rank != low && rank != high) continue;
      const int peer = rank == low ? high : low;
      std::vector<GuardedBytes> sent;
      std::vector<GuardedBytes> received;
      for (const std::int64_t bytes : contract_bytes()) {
        sent.emplace_back(bytes);
        received.emplace_back(bytes);
        for (std::int64_t i = 0; i < bytes; ++i)
          sent.back().data()[i] = pattern(rank, peer, i, static_cast<int>(sent.size()));
      }
      for (std::size_t m = 0; m < sent.size(); ++m) {
        if (rank == low) {
          comm.send(sent[m].data(), sent[m].size(), peer, stream);
          comm.recv(received[m].data(), received[m].size(), peer, stream);
        } else {
          comm.recv(received[m].data(), received[m].size(), peer, stream);
          comm.send(sent[m].data(), sent[m].size(), peer, stream);
        }
      }
      stream.synchronize();
      for (std::size_t m = 0; m < sent.size(); ++m) {
        received[m].check("recv");
        for (std::int64_t i = 0; i < received[m].size(); ++i) {
          require(received[m][i] == pattern(peer, rank, i, static_cast<int>(m) + 1), "message ", m,
                  " from rank ", peer, ": byte ", i, " is wrong");
        }
      }
    }
  }
}

/// Values of all ranks for a reduction, rounded to T, and the exact double sum with the error that float
/// accumulation and one rounding to T may make.
template <class T>
struct ReductionCase {
  std::vector<std::vector<T>> inputs;  ///< [rank][element]
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

/// f32 sums are the left fold in rank order, bit for bit: 1e8, 1, -1e8, 1 show any other order.
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

/// Hundreds of operations without a host wait, on buffers that are re-used at once: any lack of a last
/// rendezvous shows.
template <class Comm>
void back_to_back_contract(Comm& comm, int rounds = 300) {
  typename Comm::Stream stream;
  const int size = comm.size();
  constexpr std::int64_t kCount = 33;
  std::vector<float> values(kCount);
  std::vector<std::uint8_t> in(static_cast<std::size_t>(size) * 8);
  std::vector<std::uint8_t> out(in.size());
  int wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    stream.enqueue([&, round] {
      for (std::int64_t i = 0; i < kCount; ++i) {
        values[static_cast<std::size_t>(i)] = static_cast<float>(comm.rank() + round + i);
      }
      for (int to = 0; to < size; ++to) {
        for (int i = 0; i < 8; ++i)
          in[static_cast<std::size_t>(to * 8 + i)] = pattern(comm.rank(), to, i, round);
      }
    });
    comm.all_reduce(values.data(), values.data(), kCount, DType::f32, stream);
    comm.all_to_all(in.data(), out.data(), 8, stream);
    if (round % 7 == 0) comm.barrier(stream);
    stream.enqueue([&, round] {
      for (std::int64_t i = 0; i < kCount; ++i) {
        const float expected = static_cast<float>(size * (size - 1) / 2 + size * (round + i));
        wrong += values[static_cast<std::size_t>(i)] != expected;
      }
      for (int from = 0; from < size; ++from) {
        for (int i = 0; i < 8; ++i) {
          wrong += out[static_cast<std::size_t>(from * 8 + i)] != pattern(from, comm.rank(), i, round);
        }
      }
    });
  }
  stream.synchronize();
  require(wrong == 0, wrong, " values were wrong in ", rounds, " rounds");
}

/// A barrier releases nobody before the last rank is there. All ranks share a machine, so they share its
/// steady clock.
template <class Comm>
void barrier_contract(Comm& comm) {
  typename Comm::Stream stream;
  const auto now = [] {
    return static_cast<std::int64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  };
  for (int late = 0; late < comm.size(); ++late) {
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::int64_t entered = now();
    std::int64_t left = 0;
    std::vector<std::int64_t> entries(static_cast<std::size_t>(comm.size()));
    comm.barrier(stream);
    stream.enqueue([&] { left = now(); });
    comm.all_gather(&entered, entries.data(), sizeof(std::int64_t), stream);
    stream.synchronize();
    require(*std::max_element(entries.begin(), entries.end()) <= left, "rank ", comm.rank(),
            " left the barrier before rank ", late, " entered it");
  }
}

/// Two groups over the same ranks, each used from its own stream at once, as an exchange that overlaps the
/// layer.
template <class Comm>
void two_streams_contract(Comm& comm, int rounds = 200) {
  Comm other = comm.split(0, -comm.rank());  // the reverse order, so that a mix-up of the groups shows
  require(other.size() == comm.size(), "split kept ", other.size(), " of ", comm.size(), " ranks");
  require(other.rank() == comm.size() - 1 - comm.rank(), "split by descending key gave rank ", other.rank());
  typename Comm::Stream first;
  typename Comm::Stream second;
  std::vector<std::int64_t> gathered(static_cast<std::size_t>(comm.size()));
  std::vector<std::int64_t> reversed(static_cast<std::size_t>(comm.size()));
  std::int64_t mine = 0;
  std::int64_t other_mine = 0;
  int wrong = 0;
  int other_wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    first.enqueue([&, round] { mine = comm.rank() * 1000 + round; });
    comm.all_gather(&mine, gathered.data(), sizeof(std::int64_t), first);
    first.enqueue([&, round] {
      for (int r = 0; r < comm.size(); ++r)
        wrong += gathered[static_cast<std::size_t>(r)] != r * 1000 + round;
    });
    second.enqueue([&, round] { other_mine = -(other.rank() * 1000 + round); });
    other.all_gather(&other_mine, reversed.data(), sizeof(std::int64_t), second);
    second.enqueue([&, round] {
      for (int r = 0; r < other.size(); ++r)
        other_wrong += reversed[static_cast<std::size_t>(r)] != -(r * 1000 + round);
    });
  }
  first.synchronize();
  second.synchronize();
  require(wrong == 0 && other_wrong == 0, wrong, " and ", other_wrong, " values were wrong");
}

/// Groups by color, ranks by (key, old rank); the parts work at once and do not disturb each other or the
/// parent.
template <class Comm>
void split_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (int num_colors = 1; num_colors <= comm.size(); ++num_colors) {
    const int color = comm.rank() % num_colors;
    Comm part =
        comm.split(color, comm.rank() / num_colors % 2);  // keys 0, 1, 0, 1 ... so that old ranks break ties
    std::vector<std::pair<int, int>> expected;            // (key, old rank)
    for (int r = color; r < comm.size(); r += num_colors) expected.emplace_back(r / num_colors % 2, r);
    std::sort(expected.begin(), expected.end());
    require(part.size() == static_cast<int>(expected.size()), "color ", color, " of ", num_colors, " has ",
            part.size(), " ranks, expected ", expected.size());
    const std::int64_t old_rank = comm.rank();
    std::vector<std::int64_t> members(expected.size());
    part.all_gather(&old_rank, members.data(), sizeof(std::int64_t), stream);
    std::vector<std::int64_t> everybody(static_cast<std::size_t>(comm.size()));
    comm.all_gather(&old_rank, everybody.data(), sizeof(std::int64_t), stream);
    stream.synchronize();
    require(members[static_cast<std::size_t>(part.rank())] == old_rank, "rank ", part.rank(),
            " of the part is not me");
    for (std::size_t i = 0; i < members.size(); ++i) {
      require(members[i] == expected[i].second, "member ", i, " of color ", color, " is rank ", members[i],
              ", expected ", expected[i].second);
    }
    for (int r = 0; r < comm.size(); ++r) {
      require(everybody[static_cast<std::size_t>(r)] == r, "the parent group mixes up rank ", r);
    }
    Comm part_of_part = part.split(0, 0);
    require(part_of_part.size() == part.size() && part_of_part.rank() == part.rank(),
            "a split of a split differs");
  }
}

/// Arguments that one rank can judge alone are refused by the call itself, and the group goes on.
template <class Comm>
void refusal_contract(Comm& comm) {
  typename Comm::Stream stream;
  std::array<float, 4> data{};
  const std::vector<std::int64_t> too_many(static_cast<std::size_t>(comm.size()) + 1, 0);
  const std::vector<std::int64_t> fitting(static_cast<std::size_t>(comm.size()), 0);
  std::vector<std::int64_t> negative = fitting;
  negative.front() = -1;
  const auto refused = [&](std::string_view what, const std::function<void()>& call) {
    try {
      call();
    } catch (const Error&) {
      return;
    }
    require(false, what, " was not refused");
  };
  void* p = data.data();
  refused("a negative count", [&] { comm.all_reduce(p, p, -1, DType::f32, stream); });
  refused("a negative slice", [&] { comm.reduce_scatter(p, p, -1, DType::f32, stream); });
  refused("an fp8 sum", [&] { comm.all_reduce(p, p, 1, DType::fp8_e4m3, stream); });
  refused("a null input", [&] { comm.all_gather(nullptr, p, 1, stream); });
  refused("a null output", [&] { comm.all_to_all(p, nullptr, 1, stream); });
  refused("a count too many", [&] { comm.all_to_all_v(p, too_many, p, fitting, stream); });
  refused("a negative peer count", [&] { comm.all_to_all_v(p, fitting, p, negative, stream); });
  refused("a root past the end", [&] { comm.broadcast(p, 1, comm.size(), stream); });
  refused("a negative root", [&] { comm.broadcast(p, 1, -1, stream); });
  refused("a send to oneself", [&] { comm.send(p, 1, comm.rank(), stream); });
  refused("a recv past the end", [&] { comm.recv(p, 1, comm.size(), stream); });
  comm.barrier(stream);
  stream.synchronize();
}

template <class Comm>
struct ContractRow {
  const char* name;
  std::function<void(Comm&)> body;
};

/// Every row of the contract, to be run on all ranks of a group, in this order.
template <Communicator Comm>
std::vector<ContractRow<Comm>> communicator_contract() {
  return {
      {"all_gather gathers in rank order, also in place", all_gather_contract<Comm>},
      {"all_to_all transposes ranks and slices", all_to_all_contract<Comm>},
      {"all_to_all_v moves unequal and empty counts", all_to_all_v_contract<Comm>},
      {"broadcast copies from every root", broadcast_contract<Comm>},
      {"send and recv match in order", send_recv_contract<Comm>},
      {"reductions equal the double sum, with equal bits on all ranks", reduction_contract<Comm>},
      {"f32 sums are in rank order", rank_order_contract<Comm>},
      {"many operations follow each other without a host wait",
       [](Comm& comm) { back_to_back_contract(comm); }},
      {"a barrier waits for the last rank", barrier_contract<Comm>},
      {"two groups work at once on two streams", [](Comm& comm) { two_streams_contract(comm); }},
      {"split groups by color and orders by key", split_contract<Comm>},
      {"bad arguments are refused at once", refusal_contract<Comm>},
  };
}

}  // namespace helix::test
