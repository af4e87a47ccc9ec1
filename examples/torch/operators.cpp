// SPDX-License-Identifier: Apache-2.0
// torch.ops.helix: the schemas, and the CPU operators, whose ranks exchange through torch.distributed.
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <helix/cpu/backend.hpp>

#include "group.hpp"
#include "operations.hpp"

namespace helix_torch {
namespace {

/// The communicator functions that an exchange calls, over a process group of any CPU backend of torch.
class GroupComm {
 public:
  explicit GroupComm(const Group& group)
      : name_(group.name()), rank_(static_cast<int>(group.rank())), size_(static_cast<int>(group.size())) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  void all_to_all(const void* in, void* out, std::int64_t bytes, helix::cpu::Stream stream) const {
    stream.enqueue([name = name_, size = size_, in, out, bytes] {
      const at::Tensor sent = at::from_blob(const_cast<void*>(in), {size * bytes}, at::kByte);
      const std::vector<c10::SymInt> splits(static_cast<std::size_t>(size), c10::SymInt(bytes));
      torch::jit::Stack stack{sent, splits, splits, name};
      call("_c10d_functional::all_to_all_single", stack);
      call("_c10d_functional::wait_tensor", stack);
      std::memcpy(out, stack.front().toTensor().const_data_ptr(), static_cast<std::size_t>(size * bytes));
    });
  }

  /// Does nothing: the process group's timeout ends the waits of the other ranks, and torchrun ends the job.
  void abort(std::string_view reason) const noexcept {
    TORCH_WARN("rank ", rank_, " of ", name_, ": ", reason);
  }

 private:
  /// Boxed, because the type of group_name has changed between versions of torch.
  static void call(const char* name, torch::jit::Stack& stack) {
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  }

  std::string name_;
  int rank_, size_;
};

/// One rank of a group: the library's operations, and three lines that select the communicator of its
/// exchanges.
class GroupBackend : public helix::cpu::Operators {
 public:
  using Comm = GroupComm;

  explicit GroupBackend(const Group& group)
      : Operators(at::get_num_threads()), comm_(std::make_shared<GroupComm>(group)) {}

  helix::StageComms<Comm> comms() const { return {comm_.get(), comm_.get()}; }

 private:
  std::shared_ptr<GroupComm> comm_;
};

/// A single rank, for operations that need no other rank. Lives as long as the process.
struct Alone {
  helix::cpu::Backend<helix::cpu::LocalComm> backend{at::get_num_threads()};
  helix::cpu::Stream stream = backend.create_stream();
};

Alone& alone() {
  static auto* const instance = new Alone;
  return *instance;
}

void check_activation(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " is of ", tensor.scalar_type(),
              "; the CPU's activations are Float");
}

/// On the CPU lengths and block ids can be checked here, so a wrong one is an error and not a wild read.
void check_blocks(const AttentionCall& call) {
  const helix::KvView kv = kv_view_of(call);
  const at::Tensor lengths = call.seq_lens.to(at::kLong);
  for (std::int64_t b = 0; b < lengths.size(0); ++b) {
    const std::int64_t tokens =
        kv.layout.length(lengths.const_data_ptr<std::int64_t>()[b * lengths.stride(0)], kv.kvp_rank);
    TORCH_CHECK(tokens <= call.block_table.size(1) * kv.format.page_tokens, "sequence ", b, " has ", tokens,
                " tokens on this rank; its row of block_table holds ", call.block_table.size(1),
                " blocks of ", kv.format.page_tokens);
    for (std::int64_t i = 0; i * kv.format.page_tokens < tokens; ++i) {
      const std::int32_t block = kv.page_table[b * kv.max_pages + i];
      TORCH_CHECK(block >= 0 && block < kv.num_pages, "block_table[", b, "][", i, "] is ", block,
                  "; kv_cache has ", kv.num_pages, " blocks");
    }
  }
}

TensorPair partial_attention_cpu(const at::Tensor& q, const at::Tensor& kv_cache,
                                 const at::Tensor& block_table, const at::Tensor& seq_lens, double scale,
                                 std::int64_t kvp_size, std::int64_t kvp_rank, std::int64_t interleave,
                                 bool block_first, std::int64_t window, double soft_cap) {
  const AttentionCall call{q,        kv_cache,   block_table, seq_lens, scale,   kvp_size,
                           kvp_rank, interleave, block_first, window,   soft_cap};
  check(call);
  check_activation("q", q);
  check_blocks(call);
  return partial_attention(alone().backend, call, alone().stream);
}

Exchange<GroupBackend>& exchange_of(Group& group, const at::Tensor& out, const at::Tensor& lse,
                                    const std::optional<at::Tensor>& positions) {
  check_partials(out, lse, positions);
  check_activation("out", out);
  const auto make = [&] {
    GroupBackend backend(group);
    helix::cpu::Stream stream = backend.create_stream();
    return std::make_shared<Exchange<GroupBackend>>(
        std::move(backend), std::move(stream),
        helix::KvpAllToAllSpec{
            .max_tokens = group.max_tokens(), .num_query_heads = out.size(1), .value_dim = out.size(2)});
  };
  return group.exchange<Exchange<GroupBackend>>(out, make,
                                                [](auto& made) { made.backend.synchronize(made.stream); });
}

TensorPair exchange_cpu(const c10::intrusive_ptr<Group>& group, const at::Tensor& out, const at::Tensor& lse,
                        const std::optional<at::Tensor>& positions) {
  auto& exchange = exchange_of(*group, out, lse, positions);
  return exchange_partials(exchange, out, lse, positions, exchange.stream);
}

TensorPair combine_cpu(const at::Tensor& partial_out, const at::Tensor& partial_lse,
                       const std::optional<at::Tensor>& sink) {
  check_combine(partial_out, partial_lse);
  check_activation("partial_out", partial_out);
  return combine_partials(alone().backend, view_of<const float, 4>(partial_out),
                          view_of<const float, 3>(partial_lse), sink, partial_out.options(), alone().stream);
}

TensorPair exchange_combine_cpu(const c10::intrusive_ptr<Group>& group, const at::Tensor& out,
                                const at::Tensor& lse, const std::optional<at::Tensor>& positions,
                                const std::optional<at::Tensor>& sink) {
  auto& exchange = exchange_of(*group, out, lse, positions);
  const auto received = send(exchange, out, lse, positions, exchange.stream);
  return combine_partials(exchange.backend, received.out, received.lse, sink, out.options(), exchange.stream);
}

}  // namespace
}  // namespace helix_torch

TORCH_LIBRARY(helix, m) {
  using helix_torch::Group;
  m.class_<Group>("Group")
      .def(torch::init<std::string, std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), "",
           {torch::arg("name"), torch::arg("rank"), torch::arg("size"), torch::arg("max_tokens"),
            torch::arg("nccl_comm") = 0})
      .def("synchronize", &Group::synchronize);
  m.def(
      "partial_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, float scale, "
      "int kvp_size=1, int kvp_rank=0, int interleave=1, bool block_first=False, int window=0, "
      "float soft_cap=0.0) -> (Tensor out, Tensor lse)");
  m.def(
      "exchange(__torch__.torch.classes.helix.Group group, Tensor out, Tensor lse, Tensor? positions=None) "
      "-> (Tensor out, Tensor lse)");
  m.def("combine(Tensor partial_out, Tensor partial_lse, Tensor? sink=None) -> (Tensor out, Tensor lse)");
  m.def(
      "exchange_combine(__torch__.torch.classes.helix.Group group, Tensor out, Tensor lse, "
      "Tensor? positions=None, Tensor? sink=None) -> (Tensor out, Tensor lse)");
}

TORCH_LIBRARY_IMPL(helix, CPU, m) {
  m.impl("partial_attention", helix_torch::partial_attention_cpu);
  m.impl("exchange", helix_torch::exchange_cpu);
  m.impl("combine", helix_torch::combine_cpu);
  m.impl("exchange_combine", helix_torch::exchange_combine_cpu);
}
