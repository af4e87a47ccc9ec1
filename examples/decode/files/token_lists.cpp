// SPDX-License-Identifier: Apache-2.0
// Reading token ids.
#include "files/token_lists.hpp"

#include <limits>
#include <string>
#include <utility>

#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "files/json_events.hpp"
#include "files/text_file.hpp"

namespace helix::decode {
namespace {

using TokenLists = std::vector<std::vector<std::int32_t>>;

class TokenListReader : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  TokenLists take() { return std::move(lists_); }

  bool number_integer(std::int64_t value) override {
    if (depth_ != 2 || value < std::numeric_limits<std::int32_t>::min()) {
      return JsonEvents::number_integer(value);
    }
    return add(value);
  }

  bool number_unsigned(std::uint64_t value) override {
    if (depth_ != 2 || value > std::numeric_limits<std::int32_t>::max()) {
      return JsonEvents::number_unsigned(value);
    }
    return add(static_cast<std::int64_t>(value));
  }

  bool start_array(std::size_t) override {
    if (depth_ == 2) return unexpected("an array");
    if (++depth_ == 2) {
      HELIX_EXPECTS(std::ssize(lists_) < kMaxSequences, ErrorCode::invalid_file, file(), ": has more than ",
                    kMaxSequences, " sequences; give fewer at once");
      lists_.emplace_back();
    }
    return true;
  }

  bool end_array() override {
    --depth_;
    return true;
  }

 protected:
  bool unexpected(const std::string& what) override {
    if (depth_ == 0) {
      throw Error(ErrorCode::invalid_file, file(), ": is ", what,
                  "; expected a JSON array of arrays of token ids");
    }
    if (depth_ == 1) {
      throw Error(ErrorCode::invalid_file, file(), ": entry ", lists_.size(), " is ", what,
                  ", not an array of token ids");
    }
    throw Error(ErrorCode::invalid_file, file(), ": entry ", lists_.size() - 1, " holds ", what,
                ", not a token id");
  }

 private:
  bool add(std::int64_t id) {
    lists_.back().push_back(static_cast<std::int32_t>(id));
    return true;
  }

  TokenLists lists_;
  int depth_ = 0;
};

}  // namespace

TokenLists parse_token_lists(std::string_view json, std::string_view file) {
  TokenListReader reader(file);
  reader.parse(json);
  return reader.take();
}

TokenLists read_token_lists(const std::filesystem::path& file) {
  constexpr std::uint64_t kMaxBytes = 1'000'000'000;  // enough for the ids of more than 100 million tokens
  return parse_token_lists(read_text(file, kMaxBytes), file.string());
}

}  // namespace helix::decode
