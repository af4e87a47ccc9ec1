// SPDX-License-Identifier: Apache-2.0
// The exchange over windows in host memory: attention must write each head where it is combined, and nothing
// may overlap.
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/kvp_all_to_all.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

constexpr std::uint32_t kNobodyGaveUp = 0;

/// The window parts of all ranks, one after another; shared by threads.
struct HostWindow {
  std::shared_ptr<std::vector<std::byte>> memory;
  std::int64_t stride = 0;

  std::byte* part(int rank) const { return memory->data() + rank * stride; }
  std::int64_t stride_bytes() const { return stride; }
  const std::uint32_t* gave_up() const { return &kNobodyGaveUp; }
};

/// A line of LineRows as it lies in memory.
struct Line {
  std::uint32_t first, number, second, complement;
};

/// The lines that begin at `at`.
Line* lines_at(const std::byte* at) {
  return reinterpret_cast<Line*>(const_cast<std::byte*>(at));
}

/// Threads that reach each other's memory, like ranks on GPUs.
class WindowedComm : public cpu::LocalComm {
 public:
  explicit WindowedComm(cpu::LocalComm comm, bool has_windows = true)
      : LocalComm(std::move(comm)), has_windows_(has_windows) {}
  WindowedComm split(int color, int key) { return WindowedComm(LocalComm::split(color, key), has_windows_); }

  bool has_windows() const { return has_windows_; }
  /// Bytes that the last window was asked for.
  std::int64_t asked_bytes() const { return asked_bytes_; }
  HostWindow allocate_window(std::size_t bytes, std::int64_t parts) {
    asked_bytes_ = static_cast<std::int64_t>(bytes);
    const std::int64_t unit = 16 * parts;
    HostWindow window{.memory = {},
                      .stride = (static_cast<std::int64_t>(bytes) + unit - 1) / unit * unit + unit};
    auto* own = new std::shared_ptr<std::vector<std::byte>>;
    if (rank() == 0)
      *own = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size() * window.stride));
    std::vector<std::shared_ptr<std::vector<std::byte>>*> all(static_cast<std::size_t>(size()));
    cpu::Stream stream;
    all_gather(&own, all.data(), sizeof(own), stream);
    stream.synchronize();
    window.memory = *all.front();
    barrier(stream);
    stream.synchronize();
    delete own;
    return window;
  }

 private:
  bool has_windows_;
  std::int64_t asked_bytes_ = 0;
};

/// Ends an exchange with a barrier and its header, and checks the headers of the peers.
class WindowedBackend : public cpu::Backend<WindowedComm> {
 public:
  using cpu::Backend<WindowedComm>::Backend;

  void combine_window(const WindowExchangeArgs& window, const LseCombineArgs<float>& combine,
                      cpu::Stream stream) {
    synchronize(stream);
    for (std::int64_t p = 0; p < window.peers; ++p) {
      auto* header = reinterpret_cast<ExchangeHeader*>(window.sent + p * window.peer_bytes);
      *header = {exchange_epoch(*window.exchanges + 1, window.positions, window.tokens),
                 static_cast<std::uint32_t>(window.tokens), static_cast<std::uint32_t>(window.sender)};
    }
    comms().kvp->barrier(stream);
    synchronize(stream);
    for (std::int64_t p = 0; p < window.peers; ++p) {
      const auto* header = reinterpret_cast<const ExchangeHeader*>(window.received + p * window.sender_bytes);
      if (header->sender != p || header->tokens != window.tokens ||
          header->epoch != exchange_epoch(*window.exchanges + 1, window.positions, window.tokens))
        throw Error(ErrorCode::out_of_step, "the header of rank ", p);
    }
    lse_combine(combine, stream);
    synchronize(stream);
    comms().kvp->barrier(stream);  // before any rank writes again: there is only one slot
    synchronize(stream);
  }
};

/// Uses lines for steps of up to 4000 bytes: ends their exchange with a barrier and checks each line.
class LineBackend : public WindowedBackend {
 public:
  static constexpr std::int64_t kMaxLineBytes = 4000;
  using WindowedBackend::WindowedBackend;

  void combine_window(const WindowExchangeArgs& window, const LseCombineArgs<float>& combine,
                      cpu::Stream stream) {
    if (window.lines.out == nullptr) return WindowedBackend::combine_window(window, combine, stream);
    comms().kvp->barrier(stream);
    synchronize(stream);
    const auto [ranks, tokens, heads] = std::array{window.peers, window.tokens, combine.out.extent(1)};
    const std::int64_t dim = combine.out.extent(2);
    std::vector<float> out, lse;
    const auto take = [&](const Line& line) {
      const auto number = static_cast<std::uint32_t>(*window.exchanges + 1);
      if (line.number != number || line.complement != ~number)
        throw Error(ErrorCode::out_of_step, "a line has not come");
      return line;
    };
    for (std::int64_t r = 0; r < ranks; ++r) {
      LineRows<const std::byte> rows = window.lines;
      rows.out += r * window.sender_bytes;
      rows.lse += r * window.sender_bytes;
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const Line head = take(*lines_at(rows.lse_of(t, h)));
          if (head.second != exchange_row_tag(window.positions, t, tokens))
            throw Error(ErrorCode::out_of_step, "a row of another step");
          lse.push_back(std::bit_cast<float>(head.first));
          for (std::int64_t i = 0; i < dim / 2; ++i) {
            const Line line = take(lines_at(rows.out_of(t, h))[i]);
            out.push_back(std::bit_cast<float>(line.first));
            out.push_back(std::bit_cast<float>(line.second));
          }
        }
      }
    }
    lse_combine({.partial_out = {out.data(), {ranks, tokens, heads, dim}},
                 .partial_lse = {lse.data(), {ranks, tokens, heads}},
                 .sinks = combine.sinks,
                 .out = combine.out},
                stream);
    synchronize(stream);
    *window.exchanges += 2;  // the same slot with another number
    comms().kvp->barrier(stream);
    synchronize(stream);
  }
};

/// The attention results of rank `rank`: [tokens, heads, dim] and [tokens, heads].
struct Attended {
  std::vector<float> out;
  std::vector<float> lse;

  Attended(int rank, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
    for (std::int64_t i = 0; i < tokens * heads; ++i) {
      lse.push_back(static_cast<float>((i * 7 + rank * 3) % 11) * 0.25f);
      for (std::int64_t d = 0; d < dim; ++d)
        out.push_back(static_cast<float>((i * 13 + d * 5 + rank * 17) % 101) - 50.0f);
    }
  }
};

/// Writes row (token, head) as attention does; `out` has [dim].
void write_row(const PartialTarget<float>& target, std::int64_t token, std::int64_t head, const float* out,
               float lse) {
  const std::int64_t dim = target.out.extent(2);
  if (target.lines.rows.out == nullptr) {
    target.lse(token, head) = lse;
    for (std::int64_t d = 0; d < dim; ++d) target.out(token, head, d) = out[d];
    return;
  }
  const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  const auto number = static_cast<std::uint32_t>(*target.slot.exchanges + 1);
  *lines_at(target.lines.rows.lse_of(token, head)) = {
      bits(lse), number, exchange_row_tag(target.lines.positions, token, target.lines.tokens), ~number};
  for (std::int64_t i = 0; i < dim / 2; ++i)
    lines_at(target.lines.rows.out_of(token, head))[i] = {bits(out[2 * i]), number, bits(out[2 * i + 1]),
                                                          ~number};
}

/// Combines `rounds` times over `exchange` and returns the last result. `value_dim` is that of the slices; 0
/// means the spec's.
template <class Backend>
std::vector<float> combine(Backend& backend, KvpAllToAll<Backend>& exchange, std::int64_t tokens, int rounds,
                           std::int64_t value_dim = 0) {
  const KvpAllToAllSpec& spec = exchange.spec();
  const std::int64_t heads = spec.num_query_heads;
  const int kvp = backend.comms().kvp->size();
  const std::int64_t dim = value_dim > 0 ? value_dim : spec.value_dim;
  const Attended attended(backend.comms().kvp->rank(), tokens, heads, dim);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens), 5);
  std::vector<float> combined(static_cast<std::size_t>(tokens * heads / kvp * dim));
  std::vector<float> sinks;
  for (std::int64_t h = 0; h < heads / kvp; ++h) sinks.push_back(static_cast<float>(h) - 0.5f);
  const auto stream = backend.create_stream();
  for (int round = 0; round < rounds; ++round) {
    const auto messages = exchange.outgoing({.tokens = tokens, .value_dim = value_dim}, positions.data());
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto row = static_cast<std::size_t>(t * heads + h);
        write_row(messages.target, t, h, attended.out.data() + row * static_cast<std::size_t>(dim),
                  attended.lse[row]);
      }
    }
    if (messages.target.headers.message != nullptr) backend.stamp(messages.target.headers, stream);
    exchange.exchange_and_combine(messages, sinks.data(), {combined.data(), {tokens, heads / kvp, dim}},
                                  stream);
    backend.synchronize(stream);
  }
  return combined;
}

/// The same over a new exchange.
template <class Backend>
std::vector<float> combine(Backend& backend, const KvpAllToAllSpec& spec, std::int64_t tokens, int rounds,
                           std::int64_t value_dim = 0) {
  KvpAllToAll<Backend> exchange(backend, spec);
  return combine(backend, exchange, tokens, rounds, value_dim);
}

TEST_CASE("windows combine to the bits of messages") {
  for (const int size : {2, 3, 4}) {
    for (const std::int64_t tokens : {1, 2, 5}) {
      for (const std::int64_t dim : {1, 6, 64}) {
        CAPTURE(size, tokens, dim);
        CHECK_NOTHROW(run_ranks_or_throw(size, [&](cpu::LocalComm& comm) {
          const KvpAllToAllSpec spec{.max_tokens = 5, .num_query_heads = 3 * size, .value_dim = dim};
          cpu::Backend<cpu::LocalComm> plain(comm, comm.split(0, comm.rank()));
          WindowedComm stage(comm);
          WindowedBackend windowed(stage, stage.split(0, comm.rank()));
          if (combine(plain, spec, tokens, 1) != combine(windowed, spec, tokens, 3))
            throw Error(ErrorCode::internal, "other bits");
        }));
      }
    }
  }
}

TEST_CASE("a slice of fewer columns than the spec combines as under a spec of its own, over both") {
  for (const int size : {2, 3}) {
    for (const std::int64_t tokens : {1, 5}) {
      for (const std::int64_t dim : {1, 6, 64}) {
        CAPTURE(size, tokens, dim);
        CHECK_NOTHROW(run_ranks_or_throw(size, [&](cpu::LocalComm& comm) {
          const KvpAllToAllSpec own{.max_tokens = 5, .num_query_heads = 3 * size, .value_dim = dim};
          const KvpAllToAllSpec wide{.max_tokens = 5, .num_query_heads = 3 * size, .value_dim = 64};
          cpu::Backend<cpu::LocalComm> plain(comm, comm.split(0, comm.rank()));
          WindowedComm stage(comm);
          WindowedBackend windowed(stage, stage.split(0, comm.rank()));
          const std::vector<float> expected = combine(plain, own, tokens, 1);
          if (combine(plain, wide, tokens, 3, dim) != expected ||
              combine(windowed, wide, tokens, 3, dim) != expected)
            throw Error(ErrorCode::internal, "other bits");
          KvpAllToAll<cpu::Backend<cpu::LocalComm>> exchange(plain, own);
          try {
            (void)exchange.outgoing({.tokens = 1, .value_dim = dim + 1}, nullptr);
            throw std::runtime_error("more columns than the spec's were taken");
          } catch (const Error& error) {
            if (error.code() != ErrorCode::invalid_argument) throw;
          }
        }));
      }
    }
  }
}

TEST_CASE("steps of few bytes combine as lines, among others, to the bits of messages") {
  for (const int size : {2, 3}) {
    for (const std::int64_t dim : {6, 64}) {
      CAPTURE(size, dim);
      CHECK_NOTHROW(run_ranks_or_throw(size, [&](cpu::LocalComm& comm) {
        const KvpAllToAllSpec spec{.max_tokens = 9, .num_query_heads = 3 * size, .value_dim = dim};
        cpu::Backend<cpu::LocalComm> plain(comm, comm.split(0, comm.rank()));
        WindowedComm stage(comm);
        LineBackend lined(stage, stage.split(0, comm.rank()));
        KvpAllToAll<LineBackend> exchange(lined, spec);
        const auto are_lines = [&](std::int64_t tokens, std::int64_t value_dim) {
          const std::vector<std::int64_t> positions(9);
          const auto target =
              exchange.outgoing({.tokens = tokens, .value_dim = value_dim}, positions.data()).target;
          if (target.lines.rows.out == nullptr) return false;
          if (target.lines.gave_up != &kNobodyGaveUp)
            throw Error(ErrorCode::internal, "lines without the window's word on ranks that gave up");
          return true;
        };
        for (const std::int64_t tokens : {1, 9, 2, 1}) {
          for (const std::int64_t columns : {dim, std::int64_t{4}, std::int64_t{3}}) {
            const std::int64_t most = 4000 / (3 * size * (dim + 1) * 4);
            if (are_lines(tokens, columns) != (tokens <= most && columns % 2 == 0))
              throw Error(ErrorCode::internal, "lines where there should be none, or none");
            if (combine(lined, exchange, tokens, 2, columns) != combine(plain, spec, tokens, 1, columns))
              throw Error(ErrorCode::internal, "other bits");
          }
        }
        KvpAllToAllSpec without = spec;
        without.has_lines = false;
        KvpAllToAll<LineBackend> messages(lined, without);
        if (messages.outgoing({.tokens = 1}, nullptr).target.lines.rows.out != nullptr)
          throw Error(ErrorCode::internal, "lines that the spec does not want");
      }));
    }
  }
}

TEST_CASE("what lies in a window lies apart, for both slots of every sender, and inside it") {
  for (const std::int64_t peers : {2, 3, 8}) {
    for (const std::int64_t dim : {1, 6, 64, 512}) {
      for (const std::int64_t tokens : {1, 5, 32}) {
        for (const std::int64_t most_line_bytes : {0, 4000, 1 << 20}) {
          CAPTURE(peers, dim, tokens, most_line_bytes);
          const KvpAllToAllSpec spec{.max_tokens = tokens, .num_query_heads = 3 * peers, .value_dim = dim};
          const WindowLayout layout(spec, peers, 2, most_line_bytes);
          const std::int64_t lines = layout.line_tokens;
          CHECK(layout.heads == 3);
          CHECK(layout.lse_begin >= static_cast<std::int64_t>(sizeof(ExchangeHeader)));
          CHECK(layout.out_begin >= layout.lse_begin + tokens * 4);
          CHECK(layout.line_out_begin >= layout.out_begin + tokens * dim * 2);
          CHECK(layout.line_token_bytes >= dim * 2 / kExchangeLineDataBytes * kExchangeLineBytes);
          CHECK(layout.line_lse_begin >= layout.line_out_begin + lines * layout.line_token_bytes);
          CHECK(layout.sender_bytes >= layout.line_lse_begin + lines * kExchangeLineBytes);
          CHECK(layout.slot_bytes >= peers * layout.sender_bytes);
          CHECK(layout.head_bytes(layout.total_bytes) >= 2 * layout.slot_bytes);
        }
      }
    }
  }
}

TEST_CASE("a window has room for two slots, and attention and the combine are told of both") {
  for (const std::int64_t tokens : {1, 5}) {
    CAPTURE(tokens);
    CHECK_NOTHROW(run_ranks_or_throw(3, [&](cpu::LocalComm& comm) {
      const KvpAllToAllSpec spec{.max_tokens = tokens, .num_query_heads = 6, .value_dim = 4};
      WindowedComm stage(comm);
      LineBackend backend(stage, stage.split(0, comm.rank()));
      const KvpAllToAll<LineBackend> exchange(backend, spec);
      const WindowLayout layout(spec, 3, sizeof(float), LineBackend::kMaxLineBytes);
      const std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens));
      const auto target = exchange.outgoing({.tokens = tokens}, positions.data()).target;
      if (backend.comms().kvp->asked_bytes() != layout.total_bytes)
        throw Error(ErrorCode::internal, "a window of another size");
      if (target.slot.bytes != layout.slot_bytes || target.exchange.slot_bytes != layout.slot_bytes)
        throw Error(ErrorCode::internal, "another distance of slots");
    }));
  }
}

TEST_CASE("a backend whose group has no windows combines messages") {
  CHECK_NOTHROW(run_ranks_or_throw(2, [](cpu::LocalComm& comm) {
    const KvpAllToAllSpec spec{.max_tokens = 5, .num_query_heads = 4, .value_dim = 6};
    cpu::Backend<cpu::LocalComm> plain(comm, comm.split(0, comm.rank()));
    WindowedComm stage(comm, /*has_windows=*/false);
    WindowedBackend backend(stage, stage.split(0, comm.rank()));
    KvpAllToAll<WindowedBackend> exchange(backend, spec);
    if (exchange.has_windows()) throw Error(ErrorCode::internal, "windows that the group does not have");
    if (combine(backend, exchange, 5, 2) != combine(plain, spec, 5, 1))
      throw Error(ErrorCode::internal, "other bits");
  }));
}

TEST_CASE("over windows a step is one slice, and exchange() still packs messages") {
  CHECK_NOTHROW(run_ranks_or_throw(2, [](cpu::LocalComm& comm) {
    WindowedComm stage(comm);
    WindowedBackend backend(stage, stage.split(0, comm.rank()));
    KvpAllToAll<WindowedBackend> exchange(
        backend, {.max_tokens = 4, .num_query_heads = 2, .value_dim = 4, .max_slices = 2});
    if (!exchange.has_windows()) throw Error(ErrorCode::internal, "no windows");
    try {
      (void)exchange.outgoing({.index = 1, .first_token = 2, .tokens = 2}, nullptr);
      throw std::runtime_error("a second slice was taken");
    } catch (const Error& error) {
      if (error.code() != ErrorCode::invalid_argument) throw;
    }
    Attended attended(comm.rank(), 2, 2, 4);
    const auto stream = backend.create_stream();
    const auto received =
        exchange.exchange({{attended.out.data(), {2, 2, 4}}, {attended.lse.data(), {2, 2}}}, nullptr, stream);
    backend.synchronize(stream);
    for (int r = 0; r < 2; ++r) {
      const Attended theirs(r, 2, 2, 4);
      if (received.out(r, 1, 0, 3) != theirs.out[static_cast<std::size_t>((1 * 2 + comm.rank()) * 4 + 3)])
        throw Error(ErrorCode::internal, "another value came");
    }
  }));
}

}  // namespace
}  // namespace helix::test
