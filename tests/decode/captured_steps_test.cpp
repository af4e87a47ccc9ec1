// SPDX-License-Identifier: Apache-2.0
// Decode steps that are captured, whose inputs the device prepares, and that are queued one step ahead, over
// a CPU backend that supports all of this.
#include "model/captured_steps.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

#include "cli/rank_threads.hpp"
#include "decode/golden.hpp"
#include "generate/generate.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

using decode::GenerationRequest;
using decode::GenerationResult;

/// Threads as ranks; each rank captures a graph of its own.
struct CapturableComm : cpu::LocalComm {
  static constexpr bool kCapturesAlone = true;

  explicit CapturableComm(cpu::LocalComm comm) : LocalComm(std::move(comm)) {}
  CapturableComm split(int color, int key) { return CapturableComm(LocalComm::split(color, key)); }
};

/// The CPU backend with captured steps. A replay queues the function that was captured, which then uses the
/// shapes of the capture. Counts uploads and replays of all ranks.
class CapturableBackend : public cpu::Backend<CapturableComm> {
 public:
  class Graph {
   public:
    static Graph capture(Stream, std::function<void()> queue) {
      Graph graph;
      graph.queue_ = std::move(queue);
      return graph;
    }
    bool empty() const { return queue_ == nullptr; }
    void replay(Stream) const {
      ++num_replays;
      queue_();
    }

   private:
    std::function<void()> queue_;
  };

  using cpu::Backend<CapturableComm>::Backend;

  void upload(void* target, const void* source, std::size_t bytes, Stream stream) const {
    ++num_uploads;
    cpu::Backend<CapturableComm>::upload(target, source, bytes, stream);
  }

  static inline std::atomic<int> num_uploads = 0;
  static inline std::atomic<int> num_replays = 0;
};

/// Like CapturableBackend, and a step's results can be downloaded while the next step runs.
class DownloadingBackend : public CapturableBackend {
 public:
  using CapturableBackend::CapturableBackend;

  bool queue_download(const void* source, std::size_t bytes, Stream stream) {
    download_->bytes.resize(bytes);
    copy(download_->bytes.data(), source, bytes, stream);
    record(download_->event, stream);
    ++num_downloads;
    return true;
  }
  void take_download(void* target, std::size_t bytes) {
    const Stream waiting = create_stream();
    wait(waiting, download_->event);
    synchronize(waiting);
    std::memcpy(target, download_->bytes.data(), bytes);
  }

  static inline std::atomic<int> num_downloads = 0;

 private:
  struct Download {
    std::vector<std::byte> bytes;
    cpu::Event event;
  };
  std::shared_ptr<Download> download_ = std::make_shared<Download>();
};

template <class B = CapturableBackend>
GenerationResult run_capturable(const ReferenceModel& model, const Topology& topo,
                                const GenerationRequest& request) {
  B::num_uploads = B::num_replays = 0;
  std::vector<CapturableComm> world;
  for (cpu::LocalComm& comm : cpu::LocalComm::create_group(topo.world_size())) world.emplace_back(comm);
  return decode::run_rank_threads(
      std::move(world),
      [](int, const JobComms<CapturableComm>& comms) { return B(comms.stage, comms.kvp, 1); },
      model.checkpoint, model.config, topo, request, {});
}

/// Number of steps that may be queued before the tokens of the previous step are known, for sequences that
/// end at `lengths`, of at most `most` tokens. The prompt gives the first token. A step can be queued ahead
/// only if no sequence in it is known to have ended, or would end at `most`.
int steps_ahead(std::vector<std::int64_t> lengths, std::int64_t most) {
  int count = 0;
  std::int64_t known = 1;  // tokens that each sequence has, unless it is shorter
  std::erase_if(lengths, [&](std::int64_t length) { return length <= known; });
  for (; !lengths.empty(); ++known) {
    const bool is_ahead =
        std::ranges::all_of(lengths, [&](std::int64_t length) { return length > known; }) && known + 1 < most;
    count += is_ahead ? 1 : 0;
    if (!is_ahead) std::erase_if(lengths, [&](std::int64_t length) { return length <= known + 1; });
  }
  return count;
}

/// `tokens` up to and including the first `eos`.
decode::TokenIds up_to(const decode::TokenIds& tokens, std::int64_t eos) {
  const auto end = std::ranges::find(tokens, eos);
  return {tokens.begin(), end == tokens.end() ? end : end + 1};
}

}  // namespace

TEST_CASE("a step is captured at the second one of its own shape and replayed from the third", "[quick]") {
  decode::CapturedSteps<CapturableBackend, int> steps(/*is_on=*/true);
  const std::vector<std::int32_t> one{0, 1};
  const std::vector<std::int32_t> two{0, 1, 2};
  const std::vector<std::int32_t> longer{0, 2};
  const std::vector<decode::StepShape> shapes = {
      {one, 1, false}, {one, 1, true}, {two, 2, false}, {two, 1, false}, {longer, 1, false}};
  // The result of a step is its number, so a replayed step has the result of the second step of its shape.
  int number = 0;
  const auto run = [&](const decode::StepShape& shape) {
    return steps.run(shape, {}, [result = number++] { return result; });
  };
  const int count = static_cast<int>(shapes.size());
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < count; ++i) {
      CAPTURE(round, i);
      CHECK(run(shapes[static_cast<std::size_t>(i)]) == std::min(round, 1) * count + i);
    }
  }
  CHECK(steps.num_replayed() == 2 * count);

  decode::CapturedSteps<CapturableBackend, int> off(/*is_on=*/false);
  for (int i = 0; i < 4; ++i) CHECK(off.run(shapes[0], {}, [i] { return i; }) == i);
  CHECK(off.num_replayed() == 0);
}

TEST_CASE("a new shape takes the place of one that has not come for long", "[quick]") {
  decode::CapturedSteps<CapturableBackend, int> steps(/*is_on=*/true);
  cpu::Stream stream;
  const auto run = [&](std::int64_t num_rows) {
    const std::int64_t before = steps.num_replayed();
    steps.run({.query_offsets = {}, .num_rows = num_rows, .is_random = false}, stream, [] { return 0; });
    return steps.num_replayed() > before;
  };
  for (int i = 0; i < 2; ++i) {
    for (std::int64_t rows = 1; rows <= 64; ++rows) CHECK_FALSE(run(rows));  // as many as there is room for
  }
  for (int i = 0; i < 3; ++i) CHECK_FALSE(run(65));
  for (int i = 0; i < 1024; ++i) CHECK(run(1));
  for (int i = 0; i < 2; ++i) CHECK_FALSE(run(65));
  CHECK(run(65));
  CHECK(run(1));
  CHECK(run(3));
  CHECK_FALSE(run(2));  // 65 has taken its place
}

TEST_CASE("replayed steps give the golden output, whatever shapes follow each other", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Golden golden = model.golden();
  struct Case {
    TopologySpec spec;
    std::int64_t draft_tokens;
  };
  for (const Case& c : {Case{{}, 1}, Case{{.kvp = 2, .pp = 2}, 1}, Case{{}, 4},
                        Case{{.kvp = 2, .tpa = 2, .pp = 2}, 3}, Case{{.dp = 2}, 8}}) {
    const Topology topo(c.spec, model.config.shape);
    GenerationRequest request = golden_request(golden);
    request.page_tokens = 16;
    request.prefill_tokens = 2;  // steps of equal shapes, which must still be queued
    request.draft_tokens = c.draft_tokens;
    if (c.draft_tokens > 1) {
      // Every fifth draft is wrong and the drafts of one sequence end early, so sequences end at different
      // steps.
      request.teacher = drafts_partly_wrong(golden);
      request.teacher.front().resize(5);
    }
    INFO(describe(model.name, c.spec, request));
    const GenerationResult result = run_capturable(model, topo, request);
    CHECK(difference_from_golden(golden, result, topo.shape().vocab) == "");
    CHECK(result.captured_steps > 0);
    CHECK(CapturableBackend::num_replays >= result.captured_steps * topo.world_size() / topo.dp());
    if (c.draft_tokens == 1) CHECK(result.captured_steps == request.max_new_tokens - 1);
    if (topo.kvp() > 1) CHECK(result.exchange_bytes_per_rank_per_layer > 0);

    request.cuda_graphs = false;
    const GenerationResult queued = run_capturable(model, topo, request);
    CHECK(queued.captured_steps == 0);
    CHECK(CapturableBackend::num_replays == 0);
    CHECK(queued.exchange_bytes_per_rank_per_layer == result.exchange_bytes_per_rank_per_layer);
  }
}

TEST_CASE("a decode step that feeds what was drawn copies only a grown page table to the device", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Topology topo({}, model.config.shape);
  GenerationRequest request = golden_request(model.golden());
  REQUIRE(request.num_sequences() > 1);
  const auto uploads_of_ten_steps = [&] {
    const auto uploads = [&](std::int64_t new_tokens) {
      request.max_new_tokens = new_tokens;
      run_capturable(model, topo, request);
      return CapturableBackend::num_uploads.load();
    };
    return uploads(20) - uploads(10);
  };
  request.page_tokens = 512;
  CHECK(uploads_of_ten_steps() == 0);
  request.page_tokens = 1;
  CHECK(uploads_of_ten_steps() == 10);
  request.page_tokens = 512;
  request.teacher = model.golden().greedy;
  for (auto& tokens : request.teacher)
    for (std::int32_t& token : tokens) token = (token + 1) % 512;
  CHECK(uploads_of_ten_steps() == 20);  // one for tokens, one for the batch
}

TEST_CASE("draws do not depend on whether the device or the host made a step's inputs", "[quick]") {
  const ReferenceModel model("llama-tiny");
  for (const TopologySpec& spec : {TopologySpec{}, TopologySpec{.kvp = 2, .tpa = 2, .pp = 2}}) {
    const Topology topo(spec, model.config.shape);
    GenerationRequest request = golden_request(model.golden());
    request.sampling = {.temperature = 1.0f, .top_p = 0.9f, .seed = 5};
    request.ignore_eos = true;
    const GenerationResult by_device = run_capturable(model, topo, request);
    // A step with two correct tokens ends two positions later, so the host prepares the next inputs.
    request.draft_tokens = 2;
    for (const auto& sequence : by_device.sequences) request.teacher.push_back(sequence.tokens);
    const GenerationResult by_host = run_capturable(model, topo, request);
    REQUIRE(by_host.sequences.size() == by_device.sequences.size());
    for (std::size_t i = 0; i < by_host.sequences.size(); ++i) {
      CHECK(by_host.sequences[i].tokens == by_device.sequences[i].tokens);
      CHECK(by_host.sequences[i].tokens != model.golden().greedy[i]);
    }
  }
}

TEST_CASE("no step is queued ahead that depends on which tokens were drawn", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Topology topo({}, model.config.shape);
  GenerationRequest plain = golden_request(model.golden());
  plain.ignore_eos = true;
  std::vector<GenerationRequest> requests(3, plain);
  requests[0].teacher = drafts_partly_wrong(model.golden());
  requests[1].teacher = requests[0].teacher;
  requests[1].draft_tokens = 2;
  requests[2].penalties.presence = 5.0f;
  for (const GenerationRequest& request : requests) {
    CAPTURE(request.draft_tokens, request.teacher.size());
    const GenerationResult expected = run_capturable(model, topo, request);
    DownloadingBackend::num_downloads = 0;
    const GenerationResult got = run_capturable<DownloadingBackend>(model, topo, request);
    CHECK(DownloadingBackend::num_downloads == 0);
    for (std::size_t i = 0; i < expected.sequences.size(); ++i)
      CHECK(got.sequences.at(i).tokens == expected.sequences[i].tokens);
  }
}

TEST_CASE("steps queued before tokens are known give the same output, and none after an end of sequence",
          "[quick]") {
  ReferenceModel model("llama-tiny");
  for (const TopologySpec& spec : {TopologySpec{}, TopologySpec{.kvp = 2, .tpa = 2, .pp = 2}}) {
    const Topology topo(spec, model.config.shape);
    GenerationRequest request = golden_request(model.golden());
    request.page_tokens = 1;
    request.ignore_eos = true;
    const GenerationResult whole = run_capturable(model, topo, request);
    DownloadingBackend::num_downloads = 0;
    const GenerationResult ahead = run_capturable<DownloadingBackend>(model, topo, request);
    CHECK(difference_from_golden(model.golden(), ahead, topo.shape().vocab) == "");
    CHECK(ahead.captured_steps == whole.captured_steps);
    CHECK(DownloadingBackend::num_downloads == (request.max_new_tokens - 2) * topo.world_size());

    // Tokens from the middle end their sequences, at different steps, and a token may occur twice.
    request.ignore_eos = false;
    for (const decode::GeneratedSequence& sequence : whole.sequences) {
      model.config.eos_ids = {sequence.tokens[sequence.tokens.size() / 2]};
      const GenerationResult waited = run_capturable(model, topo, request);
      DownloadingBackend::num_downloads = 0;
      const GenerationResult stopped = run_capturable<DownloadingBackend>(model, topo, request);
      REQUIRE(stopped.sequences.size() == waited.sequences.size());
      std::vector<std::int64_t> lengths;
      for (std::size_t i = 0; i < waited.sequences.size(); ++i) {
        const decode::TokenIds& known = waited.sequences[i].tokens;
        CHECK(known == up_to(whole.sequences[i].tokens, model.config.eos_ids.front()));
        lengths.push_back(std::ssize(known));
      }
      CHECK(std::ranges::min(lengths) < request.max_new_tokens);
      CHECK(DownloadingBackend::num_downloads ==
            steps_ahead(lengths, request.max_new_tokens) * topo.world_size());
      for (std::size_t i = 0; i < waited.sequences.size(); ++i) {
        CHECK(stopped.sequences[i].tokens == waited.sequences[i].tokens);
        CHECK(stopped.sequences[i].logits_first8 == waited.sequences[i].logits_first8);
        CHECK(stopped.sequences[i].logits_norm == waited.sequences[i].logits_norm);
      }
      for (std::size_t rank = 0; rank < waited.memory.size(); ++rank)
        CHECK(stopped.memory[rank].kv_bytes == waited.memory[rank].kv_bytes);
    }
  }
}

}  // namespace helix::test
