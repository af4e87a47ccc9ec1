// SPDX-License-Identifier: Apache-2.0
// The MPI launcher over cpu::MpiComm.
#include "cli/launch_mpi.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/mpi_comm.hpp>
#include <helix/job_comms.hpp>

#include "cli/machine.hpp"
#include "generate/generate.hpp"

namespace helix::decode {
namespace {

class MpiLauncher : public Launcher {
 public:
  explicit MpiLauncher(std::chrono::milliseconds timeout)
      : timeout_(timeout), session_(nullptr, nullptr, timeout) {}

  bool has_processes() const override { return true; }
  int rank() const override { return session_.world_rank(); }
  int size() const override { return session_.world_size(); }
  std::string describe_devices(const Topology&, const LaunchOptions&) const override { return ""; }

  /// If the launcher does not say how many ranks are local, assumes that all are: then no rank takes too
  /// much.
  int num_local_ranks() const override { return known_local_processes().value_or(size()); }
  std::int64_t rank_memory() const override { return rank_memory_; }

  void compare_machines() override {
    const std::int64_t mine = host_memory() / num_local_ranks();
    std::vector<std::int64_t> of_ranks(static_cast<std::size_t>(size()));
    cpu::Stream stream;
    world().all_gather(&mine, of_ranks.data(), sizeof(mine), stream);
    stream.synchronize();
    rank_memory_ = *std::ranges::min_element(of_ranks);
  }

  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options) override {
    JobComms<cpu::MpiComm> comms = split_world(world(), topo);
    cpu::Backend<cpu::MpiComm> backend(comms.stage, comms.kvp, threads_per_rank(options, topo),
                                       product_inputs(options));
    return generate(backend, world(), comms.pipeline, topo, checkpoint, config, request, root_io(options));
  }

  /// Prints the reason, on only one rank if all fail alike, and ends the whole job with a non-zero exit code.
  std::string fail(std::string_view reason) noexcept override { session_.abort(reason); }

 protected:
  std::vector<std::string> gather_texts(const std::string& mine) override {
    const auto num_ranks = static_cast<std::size_t>(size());
    const auto bytes = static_cast<std::int64_t>(mine.size());
    std::vector<std::int64_t> counts(num_ranks);
    cpu::Stream stream;
    world().all_gather(&bytes, counts.data(), sizeof(bytes), stream);
    stream.synchronize();
    const auto widest = static_cast<std::size_t>(*std::ranges::max_element(counts));
    std::string padded = mine;
    padded.resize(widest);
    std::string all(widest * num_ranks, '\0');
    world().all_gather(padded.data(), all.data(), static_cast<std::int64_t>(widest), stream);
    stream.synchronize();
    std::vector<std::string> texts;
    for (std::size_t rank = 0; rank < num_ranks; ++rank)
      texts.push_back(all.substr(rank * widest, static_cast<std::size_t>(counts[rank])));
    return texts;
  }

 private:
  /// The communicator, created at the first use. Collective.
  cpu::MpiComm& world() {
    if (!world_) world_.emplace(MPI_COMM_WORLD, timeout_);
    return *world_;
  }

  std::chrono::milliseconds timeout_;
  cpu::MpiSession session_;
  std::optional<cpu::MpiComm> world_;
  std::int64_t rank_memory_ = 0;
};

}  // namespace

std::unique_ptr<Launcher> make_mpi_launcher(std::chrono::milliseconds timeout) {
  return std::make_unique<MpiLauncher>(timeout);
}

}  // namespace helix::decode
