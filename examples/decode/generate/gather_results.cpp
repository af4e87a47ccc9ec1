// SPDX-License-Identifier: Apache-2.0
// Sequences to bytes and back.
#include "generate/gather_results.hpp"

#include <cstring>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

template <class T>
void write_value(std::vector<std::byte>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(T));
}

template <class T>
void write_vector(std::vector<std::byte>& out, const std::vector<T>& values) {
  write_value(out, static_cast<std::int64_t>(values.size()));
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  out.insert(out.end(), bytes, bytes + values.size() * sizeof(T));
}

/// Reads what the writers above wrote, in the same order; both ends are this program.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T value() {
    T result;
    std::memcpy(&result, take(sizeof(T)), sizeof(T));
    return result;
  }

  template <class T>
  std::vector<T> vector() {
    std::vector<T> values(static_cast<std::size_t>(value<std::int64_t>()));
    if (!values.empty())
      std::memcpy(values.data(), take(values.size() * sizeof(T)), values.size() * sizeof(T));
    return values;
  }

  bool at_end() const { return bytes_.empty(); }

 private:
  const std::byte* take(std::size_t count) {
    HELIX_EXPECTS(count <= bytes_.size(), ErrorCode::internal, "a gathered result ends ",
                  count - bytes_.size(), " bytes early");
    const std::byte* data = bytes_.data();
    bytes_ = bytes_.subspan(count);
    return data;
  }

  std::span<const std::byte> bytes_;
};

}  // namespace

std::vector<std::byte> serialize(const std::vector<GeneratedSequence>& sequences) {
  std::vector<std::byte> out;
  for (const GeneratedSequence& sequence : sequences) {
    write_vector(out, sequence.prompt);
    write_vector(out, sequence.tokens);
    write_value(out, sequence.logits_first8);
    write_vector(out, sequence.logits_norm);
  }
  return out;
}

std::vector<GeneratedSequence> deserialize(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  std::vector<GeneratedSequence> sequences;
  while (!reader.at_end()) {
    GeneratedSequence& sequence = sequences.emplace_back();
    sequence.prompt = reader.vector<std::int32_t>();
    sequence.tokens = reader.vector<std::int32_t>();
    sequence.logits_first8 = reader.value<decltype(sequence.logits_first8)>();
    sequence.logits_norm = reader.vector<float>();
  }
  return sequences;
}

}  // namespace helix::decode
