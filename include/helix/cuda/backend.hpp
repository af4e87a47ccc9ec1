// SPDX-License-Identifier: Apache-2.0
// cuda::Backend: every operation of the Backend concept on an NVIDIA GPU.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include <helix/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/cuda/runtime.hpp>
#include <helix/hop_b_model.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/reduce_norm.hpp>
#include <helix/synthetic_kv.hpp>

namespace helix::cuda {

struct PeerChannel;

/// Which kernels partial_attention() and expert_ffn() choose from.
enum class KernelTarget {
  this_gpu,  ///< The fastest kernels that run on this GPU.
  any_gpu,   ///< Kernels that run on every supported GPU.
  least_gpu  ///< As any_gpu, with at most the 99 KiB of shared memory a block that every supported GPU has.
};

/// The operations of one rank on a GPU, without communicators, for activations of type T: float, f16 or bf16.
/// Each is queued on the stream; helix/backend/ says what each computes. Sums are f32 whatever T is; operands
/// of tensor cores are rounded to 16 bits (docs/cuda.md, Numerics). An object belongs to one device and makes
/// it the calling thread's current device where it must.
///
/// float is exact: plain f32 products, results within rounding of cpu::Operators. f16 and bf16 use the tensor
/// cores.
///
/// Threads may queue operations at the same time, each on a stream of its own. The setters, queue_download()
/// and take_download(), and Backend::download(), which uses both, take one thread at a time. Calls of
/// partial_attention() on several streams must be ordered by events.
template <class T>
class HELIX_API Operators {
 public:
  using Stream = cuda::Stream;
  using Event = cuda::Event;
  using Buffer = cuda::Buffer;
  using Activation = T;

  /// All device memory comes from `allocator`: buffers of allocate(), a few small ones made here, and
  /// workspaces of the matrix library. The first two streams that multiply get 32 MiB of workspace each, made
  /// by the first product that the stream queues outside of a capture. Before that, products use algorithms
  /// without a workspace, so run a step once before its capture. Some 20 KiB of pinned host memory come from
  /// CUDA.
  /// @throws Error(unsupported) without a driver, without `device`, or if the build has no code for it;
  /// Error(invalid_argument) if the allocator has only one of its two functions.
  explicit Operators(int device = 0, Allocator allocator = {});
  // With copies declared there are no moves, which would leave a handle to nothing.
  Operators(const Operators&) = default;
  Operators& operator=(const Operators&) = default;

  /// Ordinal of the device.
  int device() const;

  /// Limits the blocks that partial_attention() may hold at once, so that an exchange finds room next to it.
  /// 0: as many as the kernel wants, one or two an SM. @throws Error(invalid_argument) below 0.
  void set_attention_blocks(int blocks);
  /// Says whether kernels of other ranks on this device may wait for kernels of this rank. Their blocks may
  /// leave no room for a cluster, so attention then uses clusters of at most two blocks, and none over
  /// latents. Initially false.
  void set_shares_device(bool shares);
  /// Makes partial_attention() and expert_ffn() run the kernels of other GPUs, for tests and measurements.
  /// Initially this_gpu.
  void set_kernel_target(KernelTarget target);

  Buffer allocate(std::size_t bytes) const;
  Stream create_stream() const;
  Event create_event() const;
  void record(Event& event, Stream stream) const;
  void wait(Stream stream, const Event& event) const;
  /// Waits for the stream. @throws the failure that queued operations have found, again at each call.
  void synchronize(Stream stream) const;
  /// Copies from host memory. Pageable memory may be reused on return; above 64 KiB the call waits for the
  /// copy. Pinned memory is read when the stream gets there: leave it alone until then. Within a capture,
  /// either is read at each replay.
  void upload(void* target, const void* source, std::size_t bytes, Stream stream) const;
  /// Waits for the stream and copies to host memory. @throws what synchronize() throws.
  void download(void* target, const void* source, std::size_t bytes, Stream stream) const;
  void copy(void* target, const void* source, std::size_t bytes, Stream stream) const;
  void fill_zero(void* target, std::size_t bytes, Stream stream) const;

  void rms_norm(const RmsNormArgs<T>& args, Stream stream) const;
  void linear(const LinearArgs<T>& args, Stream stream) const;
  void head_linear(const HeadLinearArgs<T>& args, Stream stream) const;
  void head_rms_norm(const HeadRmsNormArgs<T>& args, Stream stream) const;
  void rope(const RopeArgs<T>& args, Stream stream) const;
  void append_kv(const AppendKvArgs<T>& args, Stream stream) const;
  void prepare_latent(const PrepareLatentArgs<T>& args, Stream stream) const;
  void prepare_qkv(const PrepareQkvArgs<T>& args, Stream stream) const;
  void project_qkv(const ProjectQkvArgs<T>& args, Stream stream) const;
  /// Runs project_qkv() in one kernel. Returns false, with nothing queued, for shapes without such a kernel.
  /// With a `channel` the call is collective over the windows of its group: each rank multiplies its share of
  /// the heads and sends it to the others. All ranks must give equal arguments, except for their pages. A
  /// null `channel` means one rank alone. @throws Error(invalid_argument) with several ranks, if `in` or the
  /// weight is not aligned to 16 bytes.
  [[nodiscard]] bool project_qkv(const PeerChannel* channel, const ProjectQkvArgs<T>& args,
                                 Stream stream) const;
  void write_kv(const WriteKvArgs<T>& args, Stream stream) const;
  void read_kv(const ReadKvArgs& args, Stream stream) const;
  void read_latents(const ReadLatentsArgs<T>& args, Stream stream) const;
  void fill_synthetic_kv(const SyntheticKvArgs& args, Stream stream) const;
  void partial_attention(const PartialAttentionArgs<T>& args, Stream stream) const;
  void pack_partial(const PackPartialArgs<T>& args, Stream stream) const;
  void stamp(const StampArgs& args, Stream stream) const;
  void check_exchange(const CheckExchangeArgs& args, Stream stream) const;
  void lse_combine(const LseCombineArgs<T>& args, Stream stream) const;
  void combine_exchange(const CheckExchangeArgs& check, const LseCombineArgs<T>& combine,
                        Stream stream) const;
  /// Ends an exchange over the windows of `channel`'s group and combines its partials. Collective over the
  /// group.
  void combine_window(const PeerChannel& channel, const WindowExchangeArgs& window,
                      const LseCombineArgs<T>& combine, Stream stream) const;
  /// Runs helix::reduce_norm() in one kernel over the windows of `channel`'s group. Collective over the
  /// group. Returns false on all ranks, with nothing queued, for shapes that it is not built for.
  /// @throws Error(invalid_argument) unless all tensors and the weight are aligned to 16 bytes.
  [[nodiscard]] bool reduce_norm(const PeerChannel& channel, const ReduceNormArgs<T>& args,
                                 Stream stream) const;
  void swiglu(const SwigluArgs<T>& args, Stream stream) const;
  void linear_swiglu(const LinearSwigluArgs<T>& args, Stream stream) const;
  void router_logits(const RouterLogitsArgs<T>& args, Stream stream) const;
  void route(const RouteArgs& args, Stream stream) const;
  void expert_ffn(const ExpertFfnArgs<T>& args, Stream stream) const;
  void embed(const EmbedArgs<T>& args, Stream stream) const;
  void gather_rows(const GatherRowsArgs<T>& args, Stream stream) const;
  void sample(const SampleArgs<T>& args, Stream stream) const;
  /// Makes the choice of ChooseGreedyArgs in one kernel: collective over the windows of `channel`'s group, or
  /// on one rank alone if `channel` is null.
  void choose_greedy(const PeerChannel* channel, const ChooseGreedyArgs<T>& args, Stream stream) const;
  void penalize(const PenalizeArgs<T>& args, Stream stream) const;
  void log_probs(const LogProbsArgs<T>& args, Stream stream) const;
  void logit_norms(const LogitNormsArgs<T>& args, Stream stream) const;
  void advance(const AdvanceArgs& args, Stream stream) const;

  /// First half of download(): queues the copy, through pinned memory, and does not wait. One at a time.
  /// Returns whether the copy was queued: there is room for a step's results and no more.
  [[nodiscard]] bool queue_download(const void* source, std::size_t bytes, Stream stream) const;
  /// Second half of download(): waits for the copy, but not for what was queued after it.
  /// @throws what synchronize() throws; Error(invalid_argument) if fewer than `bytes` were queued.
  void take_download(void* target, std::size_t bytes) const;

  /// Workspace bytes of partial_attention(): enough for up to so many tokens, at any positions.
  std::size_t partial_attention_workspace_bytes(std::int64_t num_tokens, std::int64_t num_query_heads,
                                                std::int64_t head_dim, std::int64_t value_dim) const;
  /// Workspace bytes of expert_ffn(): enough for up to so many tokens, whichever experts they choose.
  std::size_t expert_ffn_workspace_bytes(std::int64_t num_tokens, std::int64_t top_k, std::int64_t hidden,
                                         std::int64_t expert_ffn) const;

 protected:
  /// Event recorded after the copy of queue_download().
  const Event& downloaded() const;

 private:
  struct State;  // cuda/runtime/operators_state.hpp
  std::shared_ptr<State> state_;
};

extern template class HELIX_API Operators<float>;
extern template class HELIX_API Operators<f16>;
extern template class HELIX_API Operators<bf16>;

/// A communicator whose ranks reach each other's memory in kernels of this library.
template <class C>
concept HasPeerChannel = WindowComm<C> && requires(const C& comm, const char* operation, Stream stream) {
  { comm.shares_device() } -> std::same_as<bool>;
  {
    comm.queue_kernel(operation, stream, [](const PeerChannel&) { return true; })
    } -> std::same_as<bool>;
};

/// One rank: the operations and the stage's communicators, which it owns. Queue operations that use the
/// communicators from one thread a rank, in the same order on all ranks. Its own synchronize(), download(),
/// take_download(), project_qkv() and reduce_norm() hide those of Operators, which know no other ranks: pass
/// it on as a Backend.
template <class CommType, class T>
requires Communicator<CommType, Stream>
class Backend : public Operators<T> {
 public:
  using Comm = CommType;
  using Graph = cuda::Graph;

  /// Measured over NVLink between H200s: an exchange takes 9 us and 3 to 4 us a megabyte, and each further
  /// slice costs a layer 20 to 34 us.
  static constexpr HopBCosts kHopBCosts{.us_per_mb = 3.5, .hand_over_us = 30.0};
  /// Measured on an H100: the time in us that expansion saves a layer. A prompt of 8192 tokens with 128 heads
  /// saves 387, 1114 and 2583 a chunk in steps of 512, 1024 and 2048 tokens. 2048 tokens at once save 1217,
  /// with 16 heads 143; 1024 at once 460 and 27; 512 at once 200 and -47 (docs/measurements/attention.md).
  static constexpr MlaPrefillCosts kMlaPrefillCosts{
      .expanded_time = 1.4, .launch_work = 1.1e10, .absorbed_keys = 384.0};

  /// The backend of a rank without others.
  explicit Backend(int device = 0, Allocator allocator = {}) requires std::same_as<Comm, LocalComm>
      : Backend(LocalComm::create_group(1).front(), LocalComm::create_group(1).front(), device,
                std::move(allocator)) {}

  /// The backend of one rank of a stage. `stage`: all N ranks, by stage_rank. `kvp`: this rank's KVP group,
  /// by kvp_rank (stage.split(tpa_rank, kvp_rank)).
  Backend(Comm stage, Comm kvp, int device = 0, Allocator allocator = {})
      : Operators<T>(device, std::move(allocator)),
        comms_(std::make_shared<Comms>(Comms{std::move(stage), std::move(kvp)})) {
    if constexpr (HasPeerChannel<Comm>)
      this->set_shares_device(comms_->stage.shares_device() || comms_->kvp.shares_device());
  }
  // With copies declared there are no moves, which would leave a handle to nothing.
  Backend(const Backend&) = default;
  Backend& operator=(const Backend&) = default;

  StageComms<Comm> comms() const { return {&comms_->stage, &comms_->kvp}; }

  /// Most bytes of a rank's partials in a step, lse included, that travel as lines; see LineRows. Measured:
  /// docs/measurements/exchange.md.
  static constexpr std::int64_t kMaxLineBytes = 3 << 19;

  /// Ends an exchange over the windows of the KVP group, which must have them, and combines its partials; see
  /// WindowExchangeArgs.
  void combine_window(const WindowExchangeArgs& window, const LseCombineArgs<T>& combine,
                      Stream stream) const requires HasPeerChannel<Comm> {
    comms_->kvp.queue_kernel("exchange", stream, [&](const PeerChannel& channel) {
      Operators<T>::combine_window(channel, window, combine, stream);
      return true;
    });
  }

  /// Runs helix::project_qkv(). If the KVP group has windows, its ranks share the heads of up to 16 tokens.
  void project_qkv(const ProjectQkvArgs<T>& args, Stream stream) {
    if constexpr (HasPeerChannel<Comm>) {
      Comm& kvp = comms_->kvp;
      if (kvp.size() > 1 && kvp.has_windows() &&
          kvp.queue_kernel("project_qkv", stream, [&](const PeerChannel& channel) {
            return Operators<T>::project_qkv(&channel, args, stream);
          }))
        return;
    }
    Operators<T>::project_qkv(args, stream);
  }

  /// Runs helix::reduce_norm(), in one kernel if the stage has windows, else in two operations. Sums of up to
  /// 256 KiB of rows a rank (between up to six ranks; with more ranks, of less) go in one shot, and their
  /// messages carry neither sizes nor type. Ranks that give different sizes then end in Error(timeout); equal
  /// bytes of another type give wrong sums.
  void reduce_norm(const ReduceNormArgs<T>& args, Stream stream) {
    if constexpr (HasPeerChannel<Comm>) {
      Comm& stage = comms_->stage;
      if (stage.size() > 1 && stage.has_windows() &&
          stage.queue_kernel("reduce_norm", stream, [&](const PeerChannel& channel) {
            return Operators<T>::reduce_norm(channel, args, stream);
          }))
        return;
    }
    detail::reduce_then_norm(*this, args, stream);
  }

  /// Makes the choice of ChooseGreedyArgs, on a rank without others or over the windows of the stage. Returns
  /// false, with nothing queued, if the stage has several ranks and no windows.
  bool choose_greedy(const ChooseGreedyArgs<T>& args, Stream stream) {
    Comm& stage = comms_->stage;
    const auto choose = [&](const PeerChannel* channel) {
      Operators<T>::choose_greedy(channel, args, stream);
      return true;
    };
    if (stage.size() == 1) return choose(nullptr);
    if constexpr (HasPeerChannel<Comm>) {
      if (stage.has_windows())
        return stage.queue_kernel("choose_greedy", stream,
                                  [&](const PeerChannel& channel) { return choose(&channel); });
    }
    return false;
  }

  /// Waits for the stream as Operators::synchronize() does. A failure aborts the stage's groups, so that no
  /// other rank waits for this one. If the communicator can end a wait for ranks that have failed, it does
  /// the waiting.
  void synchronize(Stream stream) const {
    wait_for(stream, [&] { Operators<T>::synchronize(stream); });
  }

  /// Second half of download(), as Operators::take_download(), with the wait of synchronize().
  void take_download(void* target, std::size_t bytes) const {
    wait_for(this->downloaded(), [&] { Operators<T>::take_download(target, bytes); });
  }

  /// Copies to host memory as Operators::download() does, with the wait of synchronize().
  void download(void* target, const void* source, std::size_t bytes, Stream stream) const {
    if (this->queue_download(source, bytes, stream)) {
      take_download(target, bytes);
    } else {
      synchronize(stream);
      Operators<T>::download(target, source, bytes, stream);
    }
  }

 private:
  /// Waits for `work`, a stream or an event, then calls finish(), which may wait too.
  template <class Work, class Finish>
  void wait_for(const Work& work, const Finish& finish) const {
    try {
      if constexpr (requires(const Comm& comm) { comm.synchronize(work); }) {
        comms_->stage.synchronize(work);
        comms_->kvp.synchronize(work);  // may have a root of its own, whose failures are not the stage's
      }
      finish();
    } catch (const std::exception& error) {
      comms_->stage.abort(error.what());
      comms_->kvp.abort(error.what());
      throw;
    }
  }

  struct Comms {
    Comm stage;
    Comm kvp;
  };
  std::shared_ptr<Comms> comms_;
};

}  // namespace helix::cuda
