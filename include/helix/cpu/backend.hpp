// SPDX-License-Identifier: Apache-2.0
// cpu::Backend: every operation of the backend concepts on host threads; activations are f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <helix/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/cpu/stream.hpp>
#include <helix/cpu/thread_pool.hpp>

namespace helix::cpu {

struct Pages;

/// Zeroed host memory, aligned to 256 bytes, whose pages are untouched until first written. From 8 MiB on,
/// pages are of 2 MiB where the system has them. Moves, does not copy.
///
/// The memory outlives queued work that may touch it: its pages go back to the system when no stream of the
/// process has a task left that was enqueued before the destructor ran. The destructor does not wait.
class HELIX_API Buffer {
 public:
  /// No memory: data() is null.
  Buffer() = default;
  /// `bytes` of memory; 0 gives none. @throws Error(capacity) if the system has none.
  explicit Buffer(std::size_t bytes);

  std::byte* data() const;
  std::size_t size_bytes() const;

 private:
  struct Retire {
    void operator()(Pages* pages) const noexcept;
  };
  std::unique_ptr<Pages, Retire> pages_;
};

/// How products with bf16 weights take the activations. Products with other weights, attention, norms, the
/// residual stream and all sums are f32 either way.
enum class ProductInputs : std::uint8_t {
  f32,  ///< Activations as they are.
  /// Activations rounded to bf16, as a 16-bit backend has them; twice as fast and more where
  /// has_bf16_products().
  bf16
};

/// Whether this machine multiplies bf16 by bf16 (AVX-512 bf16 or AMX). If not, ProductInputs::bf16 gives the
/// same results up to the order of sums, no faster than f32.
HELIX_API bool has_bf16_products() noexcept;

/// The instruction sets that kernels use on this machine, such as "AVX3_ZEN4 with bf16 dots". Where it is the
/// same, so are the bits of all operations. Ranks whose model routes to experts need the same, see
/// RouterLogitsArgs.
HELIX_API std::string instruction_set();

/// The operations of one rank on host threads, without communicators. Each is queued on the stream and takes
/// one args struct; the struct's header in helix/backend/ says what it computes. Several threads may call an
/// object at the same time.
class HELIX_API Operators {
 public:
  using Stream = cpu::Stream;
  using Event = cpu::Event;
  using Buffer = cpu::Buffer;
  using Activation = float;

  /// Makes operations that `num_threads` threads share (0: all cores). Results do not depend on the number.
  explicit Operators(int num_threads = 1, ProductInputs product_inputs = ProductInputs::f32);
  // With copies declared there are no moves, which would leave a handle to nothing.
  Operators(const Operators&) = default;
  Operators& operator=(const Operators&) = default;

  /// Threads that share an operation, including the one that runs it.
  int num_threads() const { return pool_->num_threads(); }
  /// How linear(), head_linear() and expert_ffn() take the activations. router_logits() takes them as they
  /// are.
  ProductInputs product_inputs() const { return product_inputs_; }
  /// The threads that share operations, for other work of the rank on host memory.
  ThreadPool& thread_pool() const { return *pool_; }

  Buffer allocate(std::size_t bytes) const { return Buffer(bytes); }
  Stream create_stream() const { return {}; }
  Event create_event() const { return {}; }
  void record(Event& event, Stream stream) const { event.record(stream); }
  void wait(Stream stream, const Event& event) const { event.wait(stream); }
  void synchronize(Stream stream) const { stream.synchronize(); }
  /// Copies from host memory, which may be reused when the call returns.
  void upload(void* target, const void* source, std::size_t bytes, Stream stream) const;
  /// Waits for the stream and copies to host memory. @throws as synchronize().
  void download(void* target, const void* source, std::size_t bytes, Stream stream) const;
  void copy(void* target, const void* source, std::size_t bytes, Stream stream) const;
  void fill_zero(void* target, std::size_t bytes, Stream stream) const;

  void rms_norm(const RmsNormArgs<float>& args, Stream stream) const;
  void linear(const LinearArgs<float>& args, Stream stream) const;
  void head_linear(const HeadLinearArgs<float>& args, Stream stream) const;
  void head_rms_norm(const HeadRmsNormArgs<float>& args, Stream stream) const;
  void rope(const RopeArgs<float>& args, Stream stream) const;
  void append_kv(const AppendKvArgs<float>& args, Stream stream) const;
  void write_kv(const WriteKvArgs<float>& args, Stream stream) const;
  void read_kv(const ReadKvArgs& args, Stream stream) const;
  void read_latents(const ReadLatentsArgs<float>& args, Stream stream) const;
  void partial_attention(const PartialAttentionArgs<float>& args, Stream stream) const;
  void pack_partial(const PackPartialArgs<float>& args, Stream stream) const;
  void stamp(const StampArgs& args, Stream stream) const;
  void check_exchange(const CheckExchangeArgs& args, Stream stream) const;
  void lse_combine(const LseCombineArgs<float>& args, Stream stream) const;
  void combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<float>& combine,
                        Stream stream) const;
  void swiglu(const SwigluArgs<float>& args, Stream stream) const;
  void router_logits(const RouterLogitsArgs<float>& args, Stream stream) const;
  void route(const RouteArgs& args, Stream stream) const;
  void expert_ffn(const ExpertFfnArgs<float>& args, Stream stream) const;
  void embed(const EmbedArgs<float>& args, Stream stream) const;
  void gather_rows(const GatherRowsArgs<float>& args, Stream stream) const;
  void sample(const SampleArgs<float>& args, Stream stream) const;
  void penalize(const PenalizeArgs<float>& args, Stream stream) const;
  void log_probs(const LogProbsArgs<float>& args, Stream stream) const;
  void logit_norms(const LogitNormsArgs<float>& args, Stream stream) const;
  void advance(const AdvanceArgs& args, Stream stream) const;

  /// Bytes of workspace that partial_attention() needs for up to `num_tokens` tokens at any positions, in any
  /// layout of the cache.
  std::size_t partial_attention_workspace_bytes(std::int64_t num_tokens, std::int64_t num_query_heads,
                                                std::int64_t head_dim, std::int64_t value_dim) const;
  /// Bytes of workspace that expert_ffn() needs for up to `num_tokens` tokens, whatever experts they chose.
  std::size_t expert_ffn_workspace_bytes(std::int64_t num_tokens, std::int64_t top_k, std::int64_t hidden,
                                         std::int64_t expert_ffn) const;

 private:
  std::shared_ptr<ThreadPool> pool_;
  ProductInputs product_inputs_;
};

/// One rank: the operations and the stage's communicators, which it owns. Queue operations that use the
/// communicators from one thread a rank, in the same order on all ranks.
template <class CommType>
requires Communicator<CommType, Stream>
class Backend : public Operators {
 public:
  using Comm = CommType;

  /// The backend of a rank without others.
  explicit Backend(int num_threads = 1,
                   ProductInputs product_inputs = ProductInputs::f32) requires std::same_as<Comm, LocalComm>
      : Backend(LocalComm::create_group(1).front(), LocalComm::create_group(1).front(), num_threads,
                product_inputs) {}

  /// The backend of one rank of a stage. `stage`: all N ranks, by stage_rank. `kvp`: this rank's KVP group,
  /// by kvp_rank (stage.split(tpa_rank, kvp_rank)).
  Backend(Comm stage, Comm kvp, int num_threads = 1, ProductInputs product_inputs = ProductInputs::f32)
      : Operators(num_threads, product_inputs),
        comms_(std::make_shared<Comms>(std::move(stage), std::move(kvp))) {}
  // With copies declared there are no moves, which would leave a handle to nothing.
  Backend(const Backend&) = default;
  Backend& operator=(const Backend&) = default;

  /// The communicators of this rank, borrowed.
  StageComms<Comm> comms() const { return {&comms_->stage, &comms_->kvp}; }

  /// A stream whose first failure aborts the stage's groups at once, so that no other rank waits for this
  /// one. With streams made elsewhere that happens in synchronize() and download().
  Stream create_stream() const {
    Stream stream;
    stream.on_failure([comms = comms_](std::exception_ptr failure) { comms->abort(failure); });
    return stream;
  }

  /// Waits for the stream. A failure aborts the stage's groups.
  void synchronize(Stream stream) const {
    wait_for([&] { Operators::synchronize(stream); });
  }
  /// Waits for the stream and copies to `target`. A failure aborts the stage's groups.
  void download(void* target, const void* source, std::size_t bytes, Stream stream) const {
    wait_for([&] { Operators::download(target, source, bytes, stream); });
  }

 private:
  template <class Wait>
  void wait_for(const Wait& wait) const {
    try {
      wait();
    } catch (...) {
      comms_->abort(std::current_exception());
      throw;
    }
  }

  struct Comms {
    Comm stage;
    Comm kvp;
    Comms(Comm s, Comm k) : stage(std::move(s)), kvp(std::move(k)) {}
    void abort(std::exception_ptr failure) noexcept {
      try {
        std::rethrow_exception(failure);
      } catch (const std::exception& error) {
        stage.abort(error.what());
        kvp.abort(error.what());
      } catch (...) {
        stage.abort("unknown failure");
        kvp.abort("unknown failure");
      }
    }
  };
  std::shared_ptr<Comms> comms_;
};

}  // namespace helix::cpu
