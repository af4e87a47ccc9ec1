// SPDX-License-Identifier: Apache-2.0
// Writes the request and the checkpoint as named values, and compares those of all processes.
#include "generate/job_agreement.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/version.hpp>

namespace helix::decode {
namespace {

constexpr std::size_t kSampleBytes = 4096;
constexpr std::size_t kMaxSamples = 4096;  // per checkpoint; each sample may cost a seek

/// FNV-1a of bytes, texts and numbers.
class Digest {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) hash_ = (hash_ ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3u;
  }
  void add(std::string_view text) {
    add(text.size());
    add(std::as_bytes(std::span(text)));
  }
  void add(std::uint64_t number) { add(std::as_bytes(std::span(&number, 1))); }

  std::uint64_t value() const {
    std::uint64_t mixed = hash_ ^ hash_ >> 32;  // the high bits of FNV depend little on the last bytes
    mixed *= 0x9e3779b97f4a7c15u;
    return mixed ^ mixed >> 29;
  }
  std::string text() const { return std::to_string(value()); }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

std::string digest_of(std::string_view text) {
  Digest digest;
  digest.add(text);
  return digest.text();
}

std::string digest_of(const std::vector<TokenIds>& lists) {
  Digest digest;
  for (const TokenIds& list : lists) {
    digest.add(list.size());
    digest.add(std::as_bytes(std::span(list)));
  }
  return digest.text();
}

/// Offset of a sample in the tensor's data.
std::size_t sample_offset(std::uint64_t name_hash, std::size_t num_bytes) {
  return num_bytes <= kSampleBytes ? 0 : name_hash % (num_bytes - kSampleBytes + 1);
}

class FieldWriter {
 public:
  explicit FieldWriter(JobFields& fields) : fields_(fields) {}

  void add(const char* name, std::string value) { fields_.push_back({name, std::move(value), false}); }
  void add(const char* name, bool value) { add(name, std::string(value ? "on" : "off")); }
  void add(const char* name, DType value) { add(name, std::string(to_string(value))); }
  void add(const char* name, float value) {  // shortest text that identifies the value
    std::array<char, 32> digits;
    add(name, std::string(digits.data(), std::to_chars(digits.begin(), digits.end(), value).ptr));
  }
  template <std::integral Int>
  void add(const char* name, Int value) {
    add(name, std::to_string(value));
  }
  void add_digest(std::string name, std::string digest) {
    fields_.push_back({std::move(name), std::move(digest), true});
  }

 private:
  JobFields& fields_;
};

void write(std::string& out, std::string_view text) {
  const std::uint64_t size = text.size();
  out.append(reinterpret_cast<const char*>(&size), sizeof(size));
  out.append(text);
}

/// Takes the next text from `rest`; false if it is truncated.
bool read(std::string_view& rest, std::string& text) {
  std::uint64_t size = 0;
  if (rest.size() < sizeof(size)) return false;
  std::memcpy(&size, rest.data(), sizeof(size));
  rest.remove_prefix(sizeof(size));
  if (size > rest.size()) return false;
  text = rest.substr(0, static_cast<std::size_t>(size));
  rest.remove_prefix(static_cast<std::size_t>(size));
  return true;
}

[[noreturn]] void refuse(const JobField& field, int rank, const std::string& value,
                         const std::string& root_value) {
  if (field.is_digest)
    throw Error(ErrorCode::invalid_argument, "rank ", rank, " and rank 0 were started with different ",
                field.name, "; give all ranks of the job the same");
  throw Error(ErrorCode::invalid_argument, "rank ", rank, " was started with ", field.name, " ", value,
              ", rank 0 with ", field.name, " ", root_value, "; give all ranks of the job the same");
}

/// Compares two lists of fields that the same program wrote in the same order.
void expect_same(const JobFields& root, const JobFields& other, int rank) {
  for (std::size_t i = 0; i < std::max(root.size(), other.size()); ++i) {
    // A list that ends early, or continues with another name, lacks a file that the other list has.
    if (i >= other.size()) refuse(root[i], rank, "(none)", root[i].value);
    if (i >= root.size() || root[i].name != other[i].name) refuse(other[i], rank, other[i].value, "(none)");
    if (root[i].value != other[i].value) refuse(root[i], rank, other[i].value, root[i].value);
  }
}

}  // namespace

void add_fields(JobFields& fields, const Checkpoint& checkpoint) {
  FieldWriter writer(fields);
  writer.add("helix version", HELIX_VERSION);
  writer.add_digest("config.json", digest_of(checkpoint.config_json()));
  // With many tensors, the hash of the name decides which are sampled: a fair choice that is equal on all
  // ranks.
  const std::uint64_t one_in = ceil_div<std::uint64_t>(checkpoint.num_tensors(), kMaxSamples);
  for (const SafetensorsFile& file : checkpoint.files()) {
    Digest table;
    Digest contents;
    std::vector<std::byte> sample;
    for (const TensorInfo& tensor : file.tensors()) {
      table.add(tensor.name);
      table.add(tensor.dtype_name);
      for (const std::int64_t size : tensor.shape) table.add(static_cast<std::uint64_t>(size));
      table.add(tensor.begin);
      table.add(tensor.end);
      Digest name;
      name.add(tensor.name);
      if (one_in > 1 && name.value() % one_in != 0) continue;
      const auto size = static_cast<std::size_t>(tensor.end - tensor.begin);
      sample.resize(std::min(size, kSampleBytes));
      file.read(tensor, sample_offset(name.value(), size), sample);
      contents.add(sample);
    }
    const std::string file_name = std::filesystem::path(file.path()).filename().string();
    writer.add_digest("tensors in " + file_name, table.text());
    writer.add_digest("weights in " + file_name, contents.text());
  }
}

void add_fields(JobFields& fields, const GenerationRequest& request) {
  FieldWriter writer(fields);
  // Structured bindings of all members: a new member does not compile until someone decides here whether it
  // must agree.
  const auto& [prompts, max_new_tokens, ignore_eos, teacher, draft_tokens, synthetic_context, sampling,
               penalties, kv_dtype, chunk, page_tokens, hop_b_slices, prefill_tokens, serving, cuda_graphs,
               mla_prefill] = request;
  const auto& [temperature, top_p, min_p, top_k, seed] = sampling;
  const auto& [repetition, presence, frequency] = penalties;
  writer.add_digest("prompt tokens (--prompt-ids, --prompts)", digest_of(prompts));
  writer.add("--max-new-tokens", max_new_tokens);
  writer.add("--ignore-eos", ignore_eos);
  writer.add_digest("teacher tokens (--teacher-force)", digest_of(teacher));
  writer.add("--draft-tokens", draft_tokens);
  writer.add("--synthetic-context", synthetic_context);
  writer.add("--temperature", temperature);
  writer.add("--top-p", top_p);
  writer.add("--min-p", min_p);
  writer.add("--top-k", top_k);
  writer.add("--seed", seed);
  writer.add("--repetition-penalty", repetition);
  writer.add("--presence-penalty", presence);
  writer.add("--frequency-penalty", frequency);
  writer.add("--kv-dtype", kv_dtype);
  writer.add("--chunk", chunk);
  writer.add("--page-tokens", page_tokens);
  writer.add("--hop-b", hop_b_slices == 0   ? std::string("auto")
                        : hop_b_slices == 1 ? std::string("off")
                                            : std::to_string(hop_b_slices));
  writer.add("--prefill-tokens", prefill_tokens);
  writer.add("--cuda-graphs", cuda_graphs);
  writer.add("--mla-prefill", mla_prefill == MlaForm::automatic  ? std::string("auto")
                              : mla_prefill == MlaForm::absorbed ? std::string("absorbed")
                                                                 : std::string("expanded"));
  writer.add("--serve", serving.has_value());
  if (serving) {
    const auto& [max_sequences, max_tokens, kv_tokens] = *serving;
    writer.add("--max-sequences", max_sequences);
    writer.add("--context", max_tokens);
    writer.add("--kv-tokens", kv_tokens);
  }
}

void add_fields(JobFields& fields, const TopologySpec& topology) {
  FieldWriter writer(fields);
  const auto& [kvp, tpa, tpf, ep, pp, dp, attn_dp, allow_kv_duplication, allow_uneven_ffn] = topology;
  writer.add("--kvp", kvp);
  writer.add("--tpa", tpa);
  writer.add("--tpf", tpf);
  writer.add("--ep", ep);
  writer.add("--pp", pp);
  writer.add("--dp", dp);
  writer.add("attn_dp", attn_dp);
  writer.add("allow_kv_duplication", allow_kv_duplication);
  writer.add("allow_uneven_ffn", allow_uneven_ffn);
}

std::string serialize(const JobStatement& statement) {
  std::string out;
  write(out, statement.error);
  write(out, statement.accepts_bf16 ? "bf16" : "");
  write(out, std::to_string(statement.room.tokens));
  write(out, statement.room.can_expand ? "expanded" : "");
  for (const auto& [name, value, is_digest] : statement.fields) {
    write(out, name);
    write(out, value);
    write(out, is_digest ? "digest" : "");
  }
  return out;
}

JobStatement deserialize_statement(std::string_view text) {
  JobStatement statement;
  std::string products;
  std::string tokens;
  std::string form;
  bool is_whole =
      read(text, statement.error) && read(text, products) && read(text, tokens) && read(text, form);
  statement.accepts_bf16 = !products.empty();
  const auto [end, code] =
      std::from_chars(tokens.data(), tokens.data() + tokens.size(), statement.room.tokens);
  is_whole = is_whole && code == std::errc() && end == tokens.data() + tokens.size();
  statement.room.can_expand = !form.empty();
  while (is_whole && !text.empty()) {
    JobField& field = statement.fields.emplace_back();
    std::string kind;
    is_whole = read(text, field.name) && read(text, field.value) && read(text, kind);
    field.is_digest = !kind.empty();
  }
  if (!is_whole) statement.error = "its statement cannot be read: it runs another version of this program";
  return statement;
}

JobAgreement expect_agreement(const std::vector<JobStatement>& statements) {
  const auto same_error = [&](const JobStatement& other) { return other.error == statements.front().error; };
  if (std::ranges::all_of(statements, same_error) && !statements.front().error.empty())
    throw Error(ErrorCode::invalid_argument, statements.front().error);
  for (std::size_t rank = 0; rank < statements.size(); ++rank) {
    HELIX_EXPECTS(statements[rank].error.empty(), ErrorCode::invalid_argument, "rank ", rank, ": ",
                  statements[rank].error);
  }
  for (std::size_t rank = 1; rank < statements.size(); ++rank) {
    expect_same(statements.front().fields, statements[rank].fields, static_cast<int>(rank));
  }
  JobAgreement agreement{.accepts_bf16 = std::ranges::all_of(statements, &JobStatement::accepts_bf16)};
  for (const JobStatement& statement : statements) {
    agreement.room.tokens = std::min(agreement.room.tokens, statement.room.tokens);
    agreement.room.can_expand = agreement.room.can_expand && statement.room.can_expand;
  }
  return agreement;
}

std::vector<std::string> gather_texts(comm::Bootstrap& bootstrap, const std::string& mine) {
  std::string packed;
  for (const auto& bytes : bootstrap.gather(std::as_bytes(std::span(mine))))
    write(packed, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  std::uint64_t size = packed.size();
  bootstrap.broadcast(std::as_writable_bytes(std::span(&size, 1)));
  packed.resize(static_cast<std::size_t>(size));
  bootstrap.broadcast(std::as_writable_bytes(std::span(packed)));
  std::vector<std::string> texts(static_cast<std::size_t>(bootstrap.size()));
  std::string_view rest = packed;
  for (std::string& text : texts) {
    HELIX_EXPECTS(read(rest, text), ErrorCode::internal, "rank 0's collection of texts ends early");
  }
  return texts;
}

}  // namespace helix::decode
