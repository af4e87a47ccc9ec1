// SPDX-License-Identifier: Apache-2.0
// The contract of every communicator over host memory, as functions that each rank of a group runs. A
// violation throws.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include <helix/comm/collectives.hpp>
#include <helix/contract/communicator/data_movement.hpp>
#include <helix/contract/communicator/guarded_bytes.hpp>
#include <helix/contract/communicator/ordering.hpp>
#include <helix/contract/communicator/reductions.hpp>
#include <helix/contract/communicator/splits.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::contract {

/// Errors in arguments that one rank can detect alone are thrown by the call itself, and the group remains
/// usable.
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
  refused("a sum without a type", [&] { comm.all_reduce(p, p, 1, static_cast<DType>(77), stream); });
  refused("an fp8 sum", [&] { comm.all_reduce(p, p, 1, DType::fp8_e4m3, stream); });
  refused("a sum between elements",
          [&] { comm.all_reduce(static_cast<std::byte*>(p) + 1, p, 1, DType::f32, stream); });
  refused("a slice between elements",
          [&] { comm.reduce_scatter(p, static_cast<std::byte*>(p) + 1, 1, DType::bf16, stream); });
  refused("a null input", [&] { comm.all_gather(nullptr, p, 1, stream); });
  refused("a null output", [&] { comm.all_to_all(p, nullptr, 1, stream); });
  refused("a count too many", [&] { comm.all_to_all_v(p, too_many, p, fitting, stream); });
  refused("a negative peer count", [&] { comm.all_to_all_v(p, fitting, p, negative, stream); });
  std::vector<std::int64_t> more_to_itself = fitting;
  ++more_to_itself[static_cast<std::size_t>(comm.rank())];
  refused("more to oneself than from oneself",
          [&] { comm.all_to_all_v(p, more_to_itself, p, fitting, stream); });
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

/// All parts of the contract, to be run on all ranks of a group in this order.
template <comm::CollectiveComm Comm>
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

}  // namespace helix::contract
