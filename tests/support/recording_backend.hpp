// SPDX-License-Identifier: Apache-2.0
// RecordingBackend: a cpu::Backend that also records every call, in order, with its stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <helix/backend.hpp>
#include <helix/cpu/backend.hpp>

#include "support/recording.hpp"

namespace helix::test {

/// A second model of Backend. Its results are those of cpu::Backend.
class RecordingBackend {
 public:
  using Comm = RecordingComm;
  using Stream = RecordedStream;
  struct Event {
    cpu::Event inner;
    int id = -1;
  };
  using Buffer = cpu::Buffer;
  using Activation = float;

  RecordingBackend()
      : RecordingBackend(cpu::LocalComm::create_group(1).front(), cpu::LocalComm::create_group(1).front()) {}
  RecordingBackend(cpu::LocalComm stage, cpu::LocalComm kvp)
      : inner_(stage, kvp),
        recording_(std::make_shared<Recording>()),
        stage_(std::make_shared<Comm>(std::move(stage), "stage", recording_)),
        kvp_(std::make_shared<Comm>(std::move(kvp), "kvp", recording_)) {}

  Recording& recording() const { return *recording_; }

  StageComms<Comm> comms() const { return {stage_.get(), kvp_.get()}; }
  Buffer allocate(std::size_t bytes) const {
    recording_->add("allocate", -1, static_cast<std::int64_t>(bytes));
    return inner_.allocate(bytes);
  }
  Stream create_stream() const {
    recording_->add("create_stream", -1);
    return {inner_.create_stream(), recording_->next_stream()};
  }
  Event create_event() const {
    recording_->add("create_event", -1);
    return {inner_.create_event(), recording_->next_event()};
  }
  void record(Event& event, Stream s) const {
    recording_->add("record", s.id, 0, event.id);
    inner_.record(event.inner, s.inner);
  }
  void wait(Stream s, const Event& event) const {
    recording_->add("wait", s.id, 0, event.id);
    inner_.wait(s.inner, event.inner);
  }
  void synchronize(Stream s) const {
    recording_->add("synchronize", s.id);
    inner_.synchronize(s.inner);
  }
  void upload(void* target, const void* source, std::size_t bytes, Stream s) const {
    recording_->add("upload", s.id, static_cast<std::int64_t>(bytes));
    inner_.upload(target, source, bytes, s.inner);
  }
  void download(void* target, const void* source, std::size_t bytes, Stream s) const {
    recording_->add("download", s.id, static_cast<std::int64_t>(bytes));
    inner_.download(target, source, bytes, s.inner);
  }
  void copy(void* target, const void* source, std::size_t bytes, Stream s) const {
    recording_->add("copy", s.id, static_cast<std::int64_t>(bytes));
    inner_.copy(target, source, bytes, s.inner);
  }
  void fill_zero(void* target, std::size_t bytes, Stream s) const {
    recording_->add("fill_zero", s.id, static_cast<std::int64_t>(bytes));
    inner_.fill_zero(target, bytes, s.inner);
  }
  std::size_t partial_attention_workspace_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t d,
                                                std::int64_t dv) const {
    return inner_.partial_attention_workspace_bytes(tokens, heads, d, dv);
  }
  std::size_t expert_ffn_workspace_bytes(std::int64_t tokens, std::int64_t top_k, std::int64_t hidden,
                                         std::int64_t ffn) const {
    return inner_.expert_ffn_workspace_bytes(tokens, top_k, hidden, ffn);
  }

  void rms_norm(const RmsNormArgs<float>& a, Stream s) const {
    recording_->add("rms_norm", s.id, a.residual.extent(0));
    inner_.rms_norm(a, s.inner);
  }
  void linear(const LinearArgs<float>& a, Stream s) const {
    recording_->add("linear", s.id, a.weight.rows);
    inner_.linear(a, s.inner);
  }
  void head_linear(const HeadLinearArgs<float>& a, Stream s) const {
    recording_->add("head_linear", s.id, a.weight.rows);
    inner_.head_linear(a, s.inner);
  }
  void head_rms_norm(const HeadRmsNormArgs<float>& a, Stream s) const {
    recording_->add("head_rms_norm", s.id, a.x.extent(1));
    inner_.head_rms_norm(a, s.inner);
  }
  void rope(const RopeArgs<float>& a, Stream s) const {
    recording_->add("rope", s.id, a.in.extent(1));
    inner_.rope(a, s.inner);
  }
  void append_kv(const AppendKvArgs<float>& a, Stream s) const {
    recording_->add("append_kv", s.id, a.batch.num_tokens());
    inner_.append_kv(a, s.inner);
  }
  void write_kv(const WriteKvArgs<float>& a, Stream s) const {
    recording_->add("write_kv", s.id, a.k.extent(0));
    inner_.write_kv(a, s.inner);
  }
  void read_kv(const ReadKvArgs& a, Stream s) const {
    recording_->add("read_kv", s.id, a.k.extent(0));
    inner_.read_kv(a, s.inner);
  }
  void read_latents(const ReadLatentsArgs<float>& a, Stream s) const {
    recording_->add("read_latents", s.id, a.rows.extent(0));
    inner_.read_latents(a, s.inner);
  }
  void partial_attention(const PartialAttentionArgs<float>& a, Stream s) const {
    recording_->add("partial_attention", s.id, a.batch.num_tokens(), -1, a.batch.first_token());
    inner_.partial_attention(a, s.inner);
  }
  void pack_partial(const PackPartialArgs<float>& a, Stream s) const {
    recording_->add("pack_partial", s.id, a.out.extent(0));
    inner_.pack_partial(a, s.inner);
  }
  void stamp(const StampArgs& a, Stream s) const {
    recording_->add("stamp", s.id, a.tokens);
    inner_.stamp(a, s.inner);
  }
  void combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<float>& combine,
                        Stream s) const {
    recording_->add("combine_exchange", s.id, combine.out.extent(0));
    inner_.combine_exchange(check, combine, s.inner);
  }
  void check_exchange(const CheckExchangeArgs& a, Stream s) const {
    recording_->add("check_exchange", s.id);
    inner_.check_exchange(a, s.inner);
  }
  void lse_combine(const LseCombineArgs<float>& a, Stream s) const {
    recording_->add("lse_combine", s.id, a.out.extent(0));
    inner_.lse_combine(a, s.inner);
  }
  void swiglu(const SwigluArgs<float>& a, Stream s) const {
    recording_->add("swiglu", s.id, a.out.extent(1));
    inner_.swiglu(a, s.inner);
  }
  void router_logits(const RouterLogitsArgs<float>& a, Stream s) const {
    recording_->add("router_logits", s.id, a.out.extent(1));
    inner_.router_logits(a, s.inner);
  }
  void route(const RouteArgs& a, Stream s) const {
    recording_->add("route", s.id, a.logits.extent(0));
    inner_.route(a, s.inner);
  }
  void expert_ffn(const ExpertFfnArgs<float>& a, Stream s) const {
    recording_->add("expert_ffn", s.id, static_cast<std::int64_t>(a.local_experts.size()));
    inner_.expert_ffn(a, s.inner);
  }
  void embed(const EmbedArgs<float>& a, Stream s) const {
    recording_->add("embed", s.id, a.out.extent(0));
    inner_.embed(a, s.inner);
  }
  void gather_rows(const GatherRowsArgs<float>& a, Stream s) const {
    recording_->add("gather_rows", s.id, a.out.extent(0));
    inner_.gather_rows(a, s.inner);
  }
  void sample(const SampleArgs<float>& a, Stream s) const {
    recording_->add("sample", s.id, a.logits.extent(1));
    inner_.sample(a, s.inner);
  }
  void penalize(const PenalizeArgs<float>& a, Stream s) const {
    recording_->add("penalize", s.id, a.count);
    inner_.penalize(a, s.inner);
  }
  void log_probs(const LogProbsArgs<float>& a, Stream s) const {
    recording_->add("log_probs", s.id, a.logits.extent(1));
    inner_.log_probs(a, s.inner);
  }
  void logit_norms(const LogitNormsArgs<float>& a, Stream s) const {
    recording_->add("logit_norms", s.id, a.logits.extent(1));
    inner_.logit_norms(a, s.inner);
  }
  void advance(const AdvanceArgs& a, Stream s) const {
    recording_->add("advance", s.id, a.count);
    inner_.advance(a, s.inner);
  }

 private:
  cpu::Backend<cpu::LocalComm> inner_;
  std::shared_ptr<Recording> recording_;
  std::shared_ptr<Comm> stage_;
  std::shared_ptr<Comm> kvp_;
};

static_assert(Communicator<RecordingComm, RecordedStream>);
static_assert(Backend<RecordingBackend>);

}  // namespace helix::test
