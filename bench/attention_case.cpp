// SPDX-License-Identifier: Apache-2.0
#include "attention_case.hpp"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <numeric>
#include <system_error>

#include <helix/error.hpp>
#include <helix/limits.hpp>

namespace helix::bench {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 16;  // heads and columns
constexpr double kMaxBytes = 0x1p46;                      // KV of a case
constexpr std::string_view kPrefix = "partial_attention/";
constexpr std::string_view kGrammar =
    "a case is written like "
    "heads:64:8/batch:8/tokens:131072/page:64/queries:1/dim:128/value_dim:128/kv:bf16, "
    "then /prompt:512 for other query tokens of the last sequence, /ragged, /layout:token_major, "
    "/layout:latent or /portable; only tokens must be given";

[[noreturn]] void refuse(std::string_view part, std::string_view why) {
  throw Error(ErrorCode::invalid_argument,
              "'" + std::string(part) + "' " + std::string(why) + "; " + std::string(kGrammar));
}

/// Removes the text up to the first `separator` from the front of `text`, and the separator. Returns it.
std::string_view take(std::string_view& text, char separator) {
  const std::string_view front = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(text.size(), front.size() + 1));
  return front;
}

std::int64_t size_of(std::string_view part, std::string_view digits, std::int64_t most) {
  std::int64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc{} || stop != end || value < 1 || value > most)
    refuse(part, "has no number from 1 to " + std::to_string(most));
  return value;
}

void set_part(AttentionCase& c, std::string_view part) {
  std::string_view value = part;
  const std::string_view key = take(value, ':');
  const auto size = [&](std::int64_t most) { return size_of(part, value, most); };
  if (key == "heads") {
    c.query_heads = size_of(part, take(value, ':'), kMaxSize);
    c.kv_heads = size(kMaxSize);
  } else if (key == "batch") {
    c.batch = size(kMaxSequences);
  } else if (key == "tokens") {
    c.tokens = size(kMaxTokens);
  } else if (key == "page") {
    c.page_tokens = size(kMaxPageTokens);
  } else if (key == "queries") {
    c.queries = size(kMaxStepTokens);
  } else if (key == "prompt") {
    c.prompt = size(kMaxStepTokens);
  } else if (key == "dim") {
    c.head_dim = size(kMaxSize);
  } else if (key == "value_dim") {
    c.value_dim = size(kMaxSize);
  } else if (key == "kv") {
    const auto dtype = parse_dtype(value);
    if (!dtype) refuse(part, "names no type of KV");
    c.kv_dtype = *dtype;
  } else if (part == "ragged") {
    c.is_ragged = true;
  } else if (part == "layout:token_major") {
    c.layout = AttentionLayout::token_major;
  } else if (part == "layout:latent") {
    c.layout = AttentionLayout::latent;
  } else if (part == "portable") {
    c.is_portable = true;
  } else {
    refuse(part, "is no part of a case");
  }
}

}  // namespace

std::string AttentionCase::name() const {
  std::string name = std::string(kPrefix) + "heads:" + std::to_string(query_heads) + ":" +
                     std::to_string(kv_heads) + "/batch:" + std::to_string(batch) +
                     "/tokens:" + std::to_string(tokens) + "/page:" + std::to_string(page_tokens) +
                     "/queries:" + std::to_string(queries);
  if (prompt != 0) name += "/prompt:" + std::to_string(prompt);
  if (head_dim != 128) name += "/dim:" + std::to_string(head_dim);
  if (value_dim != head_dim) name += "/value_dim:" + std::to_string(value_dim);
  if (kv_dtype != DType::bf16) name += "/kv:" + std::string(to_string(kv_dtype));
  if (is_ragged) name += "/ragged";
  if (layout == AttentionLayout::token_major) name += "/layout:token_major";
  if (layout == AttentionLayout::latent) name += "/layout:latent";
  if (is_portable) name += "/portable";
  return name;
}

AttentionCase AttentionCase::parse(std::string_view name) {
  std::string_view rest = name;
  if (rest.starts_with(kPrefix)) rest.remove_prefix(kPrefix.size());
  AttentionCase c;
  c.value_dim = 0;
  while (!rest.empty()) set_part(c, take(rest, '/'));
  if (c.value_dim == 0) c.value_dim = c.head_dim;
  const bool is_latent = c.layout == AttentionLayout::latent;
  const double tokens = static_cast<double>(c.batch) * static_cast<double>(c.tokens);
  if (c.tokens == 0) refuse(name, "has no tokens");
  if (std::max(c.queries, c.prompt) > c.tokens) refuse(name, "has more query tokens than tokens");
  if (c.query_heads % c.kv_heads != 0) refuse(name, "has query heads that KV heads do not divide");
  if (is_latent && (c.kv_heads != 1 || c.value_dim > c.head_dim))
    refuse(name, "has latents, and so needs one KV head and values that are columns of the keys");
  if (c.kv_dtype == DType::fp8_ds_mla && !is_latent) refuse(name, "has a type for latents alone");
  if (tokens * static_cast<double>(c.token_bytes()) > kMaxBytes ||
      c.batch * c.queries + c.prompt > kMaxStepTokens)
    refuse(name, "is larger than any machine");
  return c;
}

std::int64_t AttentionCase::token_bytes() const {
  return layout == AttentionLayout::latent
             ? latent_row_bytes(kv_dtype, head_dim, value_dim)
             : kv_heads * (head_dim + value_dim) * static_cast<std::int64_t>(size_bytes(kv_dtype));
}

KvFormat AttentionCase::format() const {
  switch (layout) {
    case AttentionLayout::head_major:
      return KvFormat::head_major(kv_dtype, kv_heads, head_dim, value_dim, page_tokens);
    case AttentionLayout::token_major:
      return KvFormat::token_major(kv_dtype, kv_heads, head_dim, value_dim, page_tokens);
    case AttentionLayout::latent:
      return KvFormat::latent(kv_dtype, head_dim, value_dim, page_tokens);
  }
  return {};
}

std::int64_t AttentionCase::page_bytes() const {
  const KvFormat kv_format = format();
  const std::int64_t elements = layout == AttentionLayout::token_major ? kv_format.k.page + kv_format.v.page
                                                                       : kv_format.page_elements();
  return elements * kv_format.element_bytes();
}

KvView AttentionCase::view(std::byte* pool, std::int64_t num_pages) const {
  const KvFormat kv_format = format();
  if (layout != AttentionLayout::token_major) return KvView::of_pool(pool, kv_format, num_pages).whole();
  KvView kv;
  kv.format = kv_format;
  kv.num_pages = num_pages;
  kv.k = pool;
  kv.v = pool + num_pages * kv_format.k.page * kv_format.element_bytes();
  return kv.whole();
}

AttentionBatch AttentionCase::draw(std::mt19937& random) const {
  AttentionBatch drawn;
  drawn.lengths.assign(static_cast<std::size_t>(batch), tokens);
  if (is_ragged) {
    for (auto& length : drawn.lengths)
      length = std::uniform_int_distribution<std::int64_t>(1, tokens)(random);
  }
  double visible_pairs = 0.0;  // of a head
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = drawn.lengths[static_cast<std::size_t>(b)];
    const std::int64_t count = std::min(length, prompt > 0 && b == batch - 1 ? prompt : queries);
    for (std::int64_t q = 0; q < count; ++q) {
      drawn.positions.push_back(length - count + q);
      visible_pairs += static_cast<double>(drawn.positions.back() + 1);
    }
    drawn.query_offsets.push_back(static_cast<std::int32_t>(drawn.positions.size()));
    drawn.num_pages += pages_of(length);
    drawn.kv_bytes += length * token_bytes();
  }
  drawn.flops = 2.0 * visible_pairs * static_cast<double>(query_heads * (head_dim + value_dim));
  return drawn;
}

std::int64_t AttentionCase::turns(const AttentionBatch& of, std::int64_t cold_bytes) const {
  return 1 + std::min(cold_bytes / of.kv_bytes, 4 * cold_bytes / (of.num_pages * page_bytes()));
}

std::vector<std::int32_t> AttentionCase::page_tables(const AttentionBatch& of, std::int64_t num_turns,
                                                     std::mt19937& random) const {
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_turns * of.num_pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::int32_t> tables(static_cast<std::size_t>(num_turns * batch * max_pages()), 0);
  auto next = order.begin();
  auto row = tables.begin();
  for (std::int64_t turn = 0; turn < num_turns; ++turn) {
    for (const std::int64_t length : of.lengths) {
      std::copy_n(next, pages_of(length), row);
      next += pages_of(length);
      row += max_pages();
    }
  }
  return tables;
}

std::vector<AttentionCase> take_cases(int& argc, char** argv) {
  constexpr std::string_view kFlag = "--case=";
  std::vector<AttentionCase> cases;
  char** const end = std::remove_if(argv + 1, argv + argc, [&](std::string_view argument) {
    if (argument == "--help")
      std::cout << "--case=NAME, any number of times, times attention over these cases and nothing else;\n"
                << kGrammar << ".\n";
    if (!argument.starts_with(kFlag)) return false;
    cases.push_back(AttentionCase::parse(argument.substr(kFlag.size())));
    return true;
  });
  argc = static_cast<int>(end - argv);
  return cases;
}

}  // namespace helix::bench
