// SPDX-License-Identifier: Apache-2.0
// ReferenceBackend: a backend made of the operations of the contract's reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <helix/backend.hpp>
#include <helix/contract/reference.hpp>
#include <helix/cpu/backend.hpp>

namespace helix::test {

namespace reference = contract::reference;

/// A third model of Backend: streams, events and memory of the CPU, with the operations above. It is one rank
/// of a group of threads, or a single rank.
class ReferenceBackend {
 public:
  using Comm = cpu::LocalComm;
  using Stream = cpu::Stream;
  using Event = cpu::Event;
  using Buffer = cpu::Buffer;
  using Activation = float;

  ReferenceBackend()
      : ReferenceBackend(cpu::LocalComm::create_group(1).front(), cpu::LocalComm::create_group(1).front()) {}
  ReferenceBackend(Comm stage, Comm kvp)
      : comms_(std::make_shared<std::pair<Comm, Comm>>(std::move(stage), std::move(kvp))) {}

  StageComms<Comm> comms() const { return {&comms_->first, &comms_->second}; }
  Buffer allocate(std::size_t bytes) const { return Buffer(bytes); }
  Stream create_stream() const {
    Stream stream;
    stream.on_failure([comms = comms_](std::exception_ptr failure) {
      try {
        std::rethrow_exception(failure);
      } catch (const std::exception& error) {
        comms->first.abort(error.what());
        comms->second.abort(error.what());
      }
    });
    return stream;
  }
  Event create_event() const { return {}; }
  void record(Event& event, Stream stream) const { event.record(stream); }
  void wait(Stream stream, const Event& event) const { event.wait(stream); }
  void synchronize(Stream stream) const { stream.synchronize(); }

  void upload(void* target, const void* source, std::size_t bytes, Stream stream) const {
    if (bytes == 0) return;
    const auto* begin = static_cast<const std::byte*>(source);
    stream.enqueue([target, copy = std::vector<std::byte>(begin, begin + bytes)] {
      std::memcpy(target, copy.data(), copy.size());
    });
  }
  void download(void* target, const void* source, std::size_t bytes, Stream stream) const {
    copy(target, source, bytes, stream);
    stream.synchronize();
  }
  void copy(void* target, const void* source, std::size_t bytes, Stream stream) const {
    if (bytes > 0) stream.enqueue([=] { std::memcpy(target, source, bytes); });
  }
  void fill_zero(void* target, std::size_t bytes, Stream stream) const {
    if (bytes > 0) stream.enqueue([=] { std::memset(target, 0, bytes); });
  }
  std::size_t partial_attention_workspace_bytes(std::int64_t, std::int64_t, std::int64_t,
                                                std::int64_t) const {
    return 0;
  }
  std::size_t expert_ffn_workspace_bytes(std::int64_t, std::int64_t, std::int64_t, std::int64_t) const {
    return 0;
  }

  using F = float;
  void rms_norm(const RmsNormArgs<F>& a, Stream s) const { queue(s, a, reference::rms_norm); }
  void linear(const LinearArgs<F>& a, Stream s) const { queue(s, a, reference::linear); }
  void head_linear(const HeadLinearArgs<F>& a, Stream s) const { queue(s, a, reference::head_linear); }
  void head_rms_norm(const HeadRmsNormArgs<F>& a, Stream s) const { queue(s, a, reference::head_rms_norm); }
  void rope(const RopeArgs<F>& a, Stream s) const { queue(s, a, reference::rope); }
  void append_kv(const AppendKvArgs<F>& a, Stream s) const { queue(s, a, reference::append_kv); }
  void write_kv(const WriteKvArgs<F>& a, Stream s) const { queue(s, a, reference::write_kv); }
  void read_kv(const ReadKvArgs& a, Stream s) const { queue(s, a, reference::read_kv); }
  void read_latents(const ReadLatentsArgs<F>& a, Stream s) const { queue(s, a, reference::read_latents); }
  void partial_attention(const PartialAttentionArgs<F>& a, Stream s) const {
    queue(s, a, reference::partial_attention);
  }
  void pack_partial(const PackPartialArgs<F>& a, Stream s) const { queue(s, a, reference::pack_partial); }
  void stamp(const StampArgs& a, Stream s) const { queue(s, a, reference::stamp); }
  void check_exchange(const CheckExchangeArgs& a, Stream s) const { queue(s, a, reference::check_exchange); }
  void lse_combine(const LseCombineArgs<F>& a, Stream s) const { queue(s, a, reference::lse_combine); }
  void combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<F>& combine, Stream s) const {
    check_exchange(check, s);
    lse_combine(combine, s);
  }
  void swiglu(const SwigluArgs<F>& a, Stream s) const { queue(s, a, reference::swiglu); }
  void route(const RouteArgs& a, Stream s) const { queue(s, a, reference::route); }
  void router_logits(const RouterLogitsArgs<F>& a, Stream s) const { queue(s, a, reference::router_logits); }
  void expert_ffn(const ExpertFfnArgs<F>& a, Stream s) const { queue(s, a, reference::expert_ffn); }
  void embed(const EmbedArgs<F>& a, Stream s) const { queue(s, a, reference::embed); }
  void gather_rows(const GatherRowsArgs<F>& a, Stream s) const { queue(s, a, reference::gather_rows); }
  void sample(const SampleArgs<F>& a, Stream s) const { queue(s, a, reference::sample); }
  void penalize(const PenalizeArgs<F>& a, Stream s) const { queue(s, a, reference::penalize); }
  void log_probs(const LogProbsArgs<F>& a, Stream s) const { queue(s, a, reference::log_probs); }
  void logit_norms(const LogitNormsArgs<F>& a, Stream s) const { queue(s, a, reference::logit_norms); }
  void advance(const AdvanceArgs& a, Stream s) const { queue(s, a, reference::advance); }

 private:
  template <class Args>
  static void queue(Stream stream, const Args& args, void (*run)(const Args&)) {
    stream.enqueue([args, run] { run(args); });
  }

  std::shared_ptr<std::pair<Comm, Comm>> comms_;
};

static_assert(Backend<ReferenceBackend>);

}  // namespace helix::test
