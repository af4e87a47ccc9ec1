// SPDX-License-Identifier: Apache-2.0
// torch.classes.helix.Group: a KVP group of torch.distributed, which owns the exchanges of its ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <torch/custom_class.h>

namespace helix_torch {

/// Created and released by Python, and released before the process group that it names is destroyed. All
/// ranks must call the exchanges of one group in the same order, with the same sizes, and on one stream.
class Group : public torch::CustomClassHolder {
 public:
  /// `name` is ProcessGroup.group_name. `nccl_comm` is the ncclComm_t of its NCCL backend, for tensors on
  /// GPUs; 0 if there is none. An exchange has at most `max_tokens` tokens.
  Group(std::string name, std::int64_t rank, std::int64_t size, std::int64_t max_tokens,
        std::int64_t nccl_comm)
      : name_(std::move(name)), rank_(rank), size_(size), max_tokens_(max_tokens), nccl_comm_(nccl_comm) {
    TORCH_CHECK(size_ >= 1 && rank_ >= 0 && rank_ < size_, "rank is ", rank_, " of ", size_,
                "; give ProcessGroup.rank() and size()");
    TORCH_CHECK(max_tokens_ >= 1, "max_tokens is ", max_tokens_, "; give the tokens of the largest step");
  }

  const std::string& name() const { return name_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }
  std::int64_t max_tokens() const { return max_tokens_; }
  std::int64_t nccl_comm() const { return nccl_comm_; }

  /// The exchange for tensors like `out`. make() creates it for the first tensor with a new combination of
  /// device, type, heads and columns. synchronize() calls `wait` on it.
  template <class E, class Make, class Wait>
  E& exchange(const at::Tensor& out, Make make, Wait wait) {
    const std::lock_guard lock(mutex_);
    const std::tuple key{out.device().str(), out.scalar_type(), out.size(1), out.size(2)};
    auto found = exchanges_.find(key);
    if (found == exchanges_.end()) {  // make() may throw: nothing is kept then
      std::shared_ptr<E> created = make();
      Made made{created, [exchange = created.get(), wait] { wait(*exchange); }};
      found = exchanges_.emplace(key, std::move(made)).first;
    }
    return *static_cast<E*>(found->second.exchange.get());
  }

  /// Waits for the current stream and throws errors that an exchange found on it: a rank in another step, or
  /// one that has failed. On CPUs each operator has already done both.
  void synchronize() {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, made] : exchanges_) made.wait();
  }

 private:
  struct Made {
    std::shared_ptr<void> exchange;
    std::function<void()> wait;
  };

  std::string name_;
  std::int64_t rank_, size_, max_tokens_, nccl_comm_;
  std::mutex mutex_;
  std::map<std::tuple<std::string, at::ScalarType, std::int64_t, std::int64_t>, Made> exchanges_;
};

}  // namespace helix_torch
