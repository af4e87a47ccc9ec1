// SPDX-License-Identifier: Apache-2.0
// Orders as bytes. All ranks are of one program, so values are copied as they lie in memory.
#include "serve/step_order.hpp"

#include <type_traits>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

class Writer {
 public:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof(T));
  }
  template <class T>
  void add(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    add(static_cast<std::uint64_t>(values.size()));
    const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
    bytes_.insert(bytes_.end(), bytes, bytes + values.size() * sizeof(T));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <class T>
  void get(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
  }
  template <class T>
  void get(std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::uint64_t size = 0;
    get(size);
    HELIX_EXPECTS(size <= left_.size() / sizeof(T), ErrorCode::internal, "an order ends in its middle");
    const auto bytes = take(size * sizeof(T));
    values.resize(size);
    if (size > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  bool is_empty() const { return left_.empty(); }

 private:
  std::span<const std::byte> take(std::size_t size) {
    HELIX_EXPECTS(size <= left_.size(), ErrorCode::internal, "an order ends in its middle");
    const auto taken = left_.first(size);
    left_ = left_.subspan(size);
    return taken;
  }

  std::span<const std::byte> left_;
};

/// Calls each(field) for all that a replica's order holds, so that reading and writing cannot differ.
template <class Order, class Each>
void for_each_field_of_order(Order& order, const Each& each) {
  each(order.cache_calls);
  each(order.step.tokens);
  each(order.step.positions);
  each(order.step.query_offsets);
  each(order.step.sequences);
  each(order.step.logit_rows);
  each(order.step.draw_counters);
  each(order.step.sampling);
  each(order.step.penalties);
  each(order.step.num_best);
  each(order.step.is_decode);
}

/// As above, of a result.
template <class Result, class Each>
void for_each_field_of_result(Result& result, const Each& each) {
  each(result.tokens);
  each(result.log_probs);
  each(result.best_ids);
  each(result.best_log_probs);
}

}  // namespace

std::vector<std::byte> serialize(const ReplicaResult& result) {
  Writer writer;
  for_each_field_of_result(result, [&](const auto& field) { writer.add(field); });
  return writer.take();
}

ReplicaResult deserialize_result(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  ReplicaResult result;
  for_each_field_of_result(result, [&](auto& field) { reader.get(field); });
  HELIX_EXPECTS(reader.is_empty(), ErrorCode::internal, "a result has bytes behind its end");
  return result;
}

std::vector<std::byte> serialize(const StepOrder& order) {
  Writer writer;
  writer.add(order.is_last);
  writer.add(static_cast<std::uint64_t>(order.replicas.size()));
  for (const ReplicaOrder& replica : order.replicas)
    for_each_field_of_order(replica, [&](const auto& field) { writer.add(field); });
  return writer.take();
}

StepOrder deserialize_order(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  StepOrder order;
  reader.get(order.is_last);
  std::uint64_t replicas = 0;
  reader.get(replicas);
  for (std::uint64_t i = 0; i < replicas; ++i)
    for_each_field_of_order(order.replicas.emplace_back(), [&](auto& field) { reader.get(field); });
  HELIX_EXPECTS(reader.is_empty(), ErrorCode::internal, "an order has bytes behind its end");
  return order;
}

}  // namespace helix::decode
