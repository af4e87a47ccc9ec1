// SPDX-License-Identifier: Apache-2.0
// Serializes orders and results.
#include "serve/step_order.hpp"

#include "generate/bytes.hpp"

namespace helix::decode {
namespace {

/// Calls each(field) for every field of a replica's order. Reading and writing share it, so that they cannot
/// differ.
template <class Order, class Each>
void for_each_field_of_order(Order& order, Each& each) {
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

/// Calls each(field) for every field of a result.
template <class Result, class Each>
void for_each_field_of_result(Result& result, Each& each) {
  each(result.tokens);
  each(result.log_probs);
  each(result.best_ids);
  each(result.best_log_probs);
}

}  // namespace

std::vector<std::byte> serialize(const ReplicaResult& result) {
  ByteWriter writer;
  for_each_field_of_result(result, writer);
  return writer.take();
}

ReplicaResult deserialize_result(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  ReplicaResult result;
  for_each_field_of_result(result, reader);
  reader.expect_end();
  return result;
}

std::vector<std::byte> serialize(const StepOrder& order) {
  ByteWriter writer;
  writer(order.is_last);
  writer(static_cast<std::uint64_t>(order.replicas.size()));
  for (const ReplicaOrder& replica : order.replicas) for_each_field_of_order(replica, writer);
  return writer.take();
}

StepOrder deserialize_order(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  StepOrder order;
  reader(order.is_last);
  std::uint64_t replicas = 0;
  reader(replicas);
  for (std::uint64_t i = 0; i < replicas; ++i) for_each_field_of_order(order.replicas.emplace_back(), reader);
  reader.expect_end();
  return order;
}

}  // namespace helix::decode
