// SPDX-License-Identifier: Apache-2.0
// Faults in a generation on CPU rank threads: every fault ends all ranks in time, the error names the faulty
// rank, and the threads can generate again.
#include "faults/rank_faults.hpp"

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

#include "cli/rank_threads.hpp"
#include "decode/serve_client.hpp"

namespace helix::test {
namespace {

struct CpuThreads {
  using Comm = cpu::LocalComm;
  /// How long ranks wait for a rank that has stopped; long enough for a healthy one on a busy machine.
  static constexpr std::chrono::milliseconds kDeadline{1000};
  static constexpr std::array kFaults = {
      Fault::host_exception, Fault::queue_exception, Fault::no_memory, Fault::host_stop,
      Fault::queue_stop,     Fault::mismatch,        Fault::skip};

  static std::vector<Comm> create_group(int size, std::chrono::milliseconds timeout) {
    return Comm::create_group(size, timeout);
  }
  static auto make_backend(const JobComms<FaultyComm<Comm>>& comms, const std::shared_ptr<FaultPoint>& point,
                           int /*rank*/) {
    return FaultyBackend<cpu::Backend<FaultyComm<Comm>>>(comms, point);
  }
};

struct JobSpec {
  const char* model;
  TopologySpec topology;
};
const std::vector<JobSpec> kJobs = {
    {"llama-tiny", {.kvp = 2, .tpa = 2}},
    {"llama-tiny", {.kvp = 2, .pp = 2}},
    {"deepseek-tiny", {.kvp = 4}},
};

TEST_CASE("faults: each ends all ranks, is named, and the threads work afterwards") {
  for (const JobSpec& spec : kJobs) inject<CpuThreads>(Job(spec.model, spec.topology), 12, 1);
}

TEST_CASE("faults: a serving decoder's requests, also those that wait, end with an error each") {
  const ReferenceModel model("llama-tiny");
  const Topology topo({.kvp = 2}, model.config.shape);
  decode::GenerationRequest request;
  request.serving = {.max_sequences = 2, .max_tokens = 4096, .kv_tokens = 8192};
  request.kv_dtype = DType::f32;
  request.page_tokens = 16;
  for (const int failing : {0, 1}) {
    CAPTURE(failing);
    ServeClient client([&](decode::Frontend& frontend) {
      decode::RootIo io;
      io.client = &frontend;
      std::vector<std::shared_ptr<FaultPoint>> points;
      std::vector<FaultyComm<cpu::LocalComm>> world;
      for (cpu::LocalComm& comm : cpu::LocalComm::create_group(2, std::chrono::seconds(10))) {
        points.push_back(std::make_shared<FaultPoint>(
            comm.rank() == failing ? Injection{.fault = Fault::host_exception, .call = 50000} : Injection{}));
        world.emplace_back(comm, points.back());
      }
      decode::run_rank_threads(
          std::move(world),
          [&](int rank, const JobComms<FaultyComm<cpu::LocalComm>>& comms) {
            return CpuThreads::make_backend(comms, points[static_cast<std::size_t>(rank)], rank);
          },
          model.checkpoint, model.config, topo, request, io);
    });
    for (const char* id : {"a", "b", "waits"})
      client.send({{"id", id}, {"prompt", {1, 2, 3}}, {"max_tokens", 4000}, {"ignore_eos", true}});
    std::map<std::string, int> tokens;
    std::map<std::string, std::string> errors;
    while (const auto event = client.next_event()) {
      INFO(event->dump());
      REQUIRE((*event)["event"] != "end");
      if ((*event)["event"] == "token") ++tokens[(*event)["id"]];
      if ((*event)["event"] == "error") REQUIRE(errors.emplace((*event)["id"], (*event)["message"]).second);
    }
    CHECK_THROWS_WITH(client.rethrow(), Catch::Matchers::ContainsSubstring("injected before call 50001"));
    CHECK(tokens["a"] > 0);
    CHECK(tokens["waits"] == 0);
    for (const char* id : {"a", "b", "waits"}) {
      CAPTURE(id);
      CHECK_THAT(errors[id], Catch::Matchers::StartsWith("the decoder failed: "));
      CHECK_THAT(errors[id], Catch::Matchers::ContainsSubstring("injected before call 50001"));
    }
  }
}

TEST_CASE("faults: a thousand of them", "[full]") {
  for (const JobSpec& spec : kJobs) inject<CpuThreads>(Job(spec.model, spec.topology), 334, 2);
}

}  // namespace
}  // namespace helix::test
