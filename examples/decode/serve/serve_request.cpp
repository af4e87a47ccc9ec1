// SPDX-License-Identifier: Apache-2.0
// Parses one line of JSON in one pass, so that a prompt of a million ids is stored only once.
#include "serve/serve_request.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <set>
#include <utility>

#include <helix/backend/vocabulary.hpp>
#include <helix/error.hpp>

#include "files/json_events.hpp"
#include "files/strict_json.hpp"
#include "generate/request_plan.hpp"

namespace helix::decode {
namespace {

constexpr std::size_t kMaxIdBytes = 256;

/// The name of values without a key in error messages.
constexpr std::string_view kWhere = "request";

/// Finds the id of a line that is refused before CommandReader reaches the id. Skips everything else.
class IdReader : public JsonEvents {
 public:
  IdReader() : JsonEvents(kWhere) {}

  /// The id, if it comes before the first malformed JSON; otherwise empty.
  std::string read(std::string_view line) {
    try {
      parse(line);
    } catch (const Error&) {
    }
    return std::move(id_);
  }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string& value) override {
    if (is_id_next_ && depth_ == 1 && id_.empty() && value.size() <= kMaxIdBytes) id_ = std::move(value);
    return true;
  }
  bool start_object(std::size_t) override { return open(); }
  bool key(std::string& name) override {
    is_id_next_ = depth_ == 1 && name == "id";
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override { return close(); }

 private:
  bool open() { return ++depth_ <= kMaxNesting || unexpected("nesting"); }
  bool close() {
    --depth_;
    return true;
  }

  std::string id_;
  std::size_t depth_ = 0;
  bool is_id_next_ = false;
};

/// Reads the keys of one object. Each value goes to the member of its key; anything else is refused.
class CommandReader : public JsonEvents {
 public:
  explicit CommandReader(const ServeDefaults& defaults) : JsonEvents(kWhere) {
    request_.sampling = defaults.sampling;
    request_.penalties = defaults.penalties;
  }

  const std::string& id() const { return request_.id; }

  ServeCommand take() {
    HELIX_EXPECTS(!seen_.empty(), ErrorCode::invalid_file,
                  "the line is an empty object; give a request as {\"id\": \"a\", \"prompt\": [1, 2, 3]}");
    for (const char* const alone : {"cancel", "stats", "forget"}) {
      HELIX_EXPECTS(!seen_.contains(alone) || seen_.size() == 1, ErrorCode::invalid_file, "\"", alone,
                    "\" stands beside other keys; give it alone");
    }
    if (seen_.contains("cancel")) return CancelCommand{std::move(cancelled_)};
    if (seen_.contains("stats")) return StatsCommand{};
    if (seen_.contains("forget")) return ForgetCommand{};
    for (const char* const needed : {"id", "prompt"}) {
      HELIX_EXPECTS(seen_.contains(needed), ErrorCode::invalid_file, "\"", needed,
                    "\" is missing; give a request as {\"id\": \"a\", \"prompt\": [1, 2, 3]}");
    }
    HELIX_EXPECTS(!request_.prompt.empty(), ErrorCode::invalid_file,
                  "\"prompt\" is empty; give at least one token id");
    check_sampling(request_.sampling);
    check_penalties(request_.penalties);
    return std::move(request_);
  }

  bool start_object(std::size_t) override {
    if (is_inside_) return unexpected("an object");
    is_inside_ = true;
    return true;
  }
  bool end_object() override { return true; }

  bool key(std::string& name) override {
    static const std::set<std::string, std::less<>> kKnown{"id",
                                                           "prompt",
                                                           "max_tokens",
                                                           "ignore_eos",
                                                           "stop",
                                                           "temperature",
                                                           "top_p",
                                                           "top_k",
                                                           "min_p",
                                                           "seed",
                                                           "repetition_penalty",
                                                           "presence_penalty",
                                                           "frequency_penalty",
                                                           "log_probs",
                                                           "cancel",
                                                           "stats",
                                                           "forget"};
    if (!kKnown.contains(name)) {
      std::string known;
      for (const std::string& other : kKnown) known += (known.empty() ? "" : ", ") + other;
      throw Error(ErrorCode::invalid_file, "key ", printable(name), " is unknown; known are ", known);
    }
    HELIX_EXPECTS(seen_.insert(name).second, ErrorCode::invalid_file, "\"", name, "\" is given twice");
    key_ = name;
    return true;
  }

  bool string(std::string& value) override {
    if (key_ != "id" && key_ != "cancel") return unexpected("the string " + printable(value));
    HELIX_EXPECTS(!value.empty() && value.size() <= kMaxIdBytes, ErrorCode::invalid_file, "\"", key_,
                  "\" has ", value.size(), " bytes; give 1 to ", kMaxIdBytes);
    (key_ == "id" ? request_.id : cancelled_) = std::move(value);
    return true;
  }
  bool boolean(bool value) override {
    if (key_ == "ignore_eos") {
      request_.ignore_eos = value;
    } else if ((key_ != "stats" && key_ != "forget") || !value) {
      return unexpected(value ? "true" : "false");
    }
    return true;
  }
  bool number_integer(std::int64_t value) override {
    return real(static_cast<double>(value)) || whole(value);
  }
  bool number_unsigned(std::uint64_t value) override {
    if (key_ == "seed" && !is_array_) {
      request_.seed = value;
      return true;
    }
    if (real(static_cast<double>(value))) return true;
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      return unexpected("the number " + std::to_string(value));
    return whole(static_cast<std::int64_t>(value));
  }
  bool number_float(double value, const std::string& text) override {
    const bool fits = std::abs(value) <= std::numeric_limits<float>::max();
    return (fits && real(value)) || unexpected("the number " + printable(text));
  }

  bool start_array(std::size_t) override {
    if (is_array_ || (key_ != "prompt" && key_ != "stop")) return unexpected("an array");
    is_array_ = true;
    return true;
  }
  bool end_array() override {
    is_array_ = false;
    return true;
  }

 protected:
  bool unexpected(const std::string& what) override {
    if (!is_inside_) {
      throw Error(ErrorCode::invalid_file, "the line is ", what,
                  "; give a request as {\"id\": \"a\", \"prompt\": [1, 2, 3]}");
    }
    throw Error(ErrorCode::invalid_file, "\"", key_, "\" ", is_array_ ? "holds " : "is ", what, "; expected ",
                expectation());
  }

 private:
  /// Whether the current key takes any number; if so, stores `value`.
  bool real(double value) {
    float* const place = real_place();
    if (place == nullptr) return false;
    *place = static_cast<float>(value);
    return true;
  }

  bool whole(std::int64_t value) {
    const auto refuse = [&] { return unexpected("the number " + std::to_string(value)); };
    if (is_array_) {
      if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) return refuse();
      std::vector<std::int32_t>& ids = key_ == "prompt" ? request_.prompt : request_.stop;
      if (key_ == "stop" && ids.size() == kMaxStop)
        return unexpected("more than " + std::to_string(kMaxStop) + " ids");
      ids.push_back(static_cast<std::int32_t>(value));
    } else if (key_ == "max_tokens") {
      if (value < 1) return refuse();
      request_.max_tokens = value;
    } else if (key_ == "log_probs") {
      if (value < 0 || value > kMaxBest) return refuse();
      request_.num_best = value;
    } else if (key_ == "top_k") {
      if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) return refuse();
      request_.sampling.top_k = static_cast<std::int32_t>(value);
    } else {
      return refuse();
    }
    return true;
  }

  /// Where the current key's number is stored, if the key takes a real number.
  float* real_place() {
    if (is_array_) return nullptr;
    if (key_ == "temperature") return &request_.sampling.temperature;
    if (key_ == "top_p") return &request_.sampling.top_p;
    if (key_ == "min_p") return &request_.sampling.min_p;
    if (key_ == "repetition_penalty") return &request_.penalties.repetition;
    if (key_ == "presence_penalty") return &request_.penalties.presence;
    if (key_ == "frequency_penalty") return &request_.penalties.frequency;
    return nullptr;
  }

  std::string expectation() const {
    if (key_ == "id" || key_ == "cancel") return "a string";
    const std::string most = std::to_string(std::numeric_limits<std::int32_t>::max());
    if (key_ == "prompt" || key_ == "stop") return "an array of token ids of 0 to " + most;
    if (key_ == "ignore_eos") return "true or false";
    if (key_ == "stats" || key_ == "forget") return "true";
    if (key_ == "max_tokens") return "a whole number of at least 1";
    if (key_ == "top_k") return "a whole number of 0 to " + most;
    if (key_ == "seed") return "a whole number of 0 to 2^64 - 1";
    if (key_ == "log_probs") return "a whole number of 0 to " + std::to_string(kMaxBest);
    return "a number of -3.4e38 to 3.4e38";
  }

  ServeRequest request_;
  std::string cancelled_;
  std::set<std::string, std::less<>> seen_;
  std::string key_;
  bool is_inside_ = false;
  bool is_array_ = false;
};

}  // namespace

std::string id_of(std::string_view line) {
  return IdReader().read(line);
}

ParsedLine parse_command(std::string_view line, const ServeDefaults& defaults) {
  CommandReader reader(defaults);
  std::string message;
  try {
    reader.parse(line);
    return reader.take();
  } catch (const Error& error) {
    message = error.what();
  } catch (const std::bad_alloc&) {
    message = "no memory for a line of " + std::to_string(line.size()) + " bytes; send shorter ones";
  }
  return BadLine{reader.id().empty() ? id_of(line) : reader.id(), std::move(message)};
}

}  // namespace helix::decode
