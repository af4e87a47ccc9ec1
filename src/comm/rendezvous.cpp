// SPDX-License-Identifier: Apache-2.0
// The rendezvous on ranks other than 0.
#include "comm/rendezvous.hpp"

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include <sys/random.h>

#include <helix/error.hpp>

#include "comm/address.hpp"

namespace helix::comm {
namespace {

constexpr milliseconds kGreeting{5000};  // rank 0 greets at once, unless it is busy or no rank 0

/// Receives one message of a fixed size; returns nothing if the transfer or `read` fails.
template <class Message, class Read>
std::optional<Message> recv_message(const Socket& socket, Clock::time_point deadline, Read&& read,
                                    Transfer& transfer) {
  std::array<std::byte, sizeof(Message)> bytes;
  transfer = recv_all(socket.fd(), bytes.data(), bytes.size(), deadline, kKeepWaiting);
  return transfer == Transfer::done ? read(bytes) : std::nullopt;
}

/// Answers rank 0's challenge. Returns false with a reason if the listener is not (yet) rank 0 of this job.
/// @throws Error(invalid_argument) if rank 0 says that this process is not of its job.
bool introduce(const BootstrapOptions& options, const JobKey& key, Hello hello, const Socket& socket,
               Clock::time_point deadline, std::string& reason) {
  Transfer transfer = Transfer::done;
  const auto challenge =
      recv_message<Challenge>(socket, std::min(deadline, Clock::now() + kGreeting), read_challenge, transfer);
  if (!challenge) {
    reason = transfer == Transfer::closed ? "the connection was closed"
             : transfer == Transfer::late ? "it accepts connections, but does not greet"
                                          : "another program listens there";
    return false;
  }
  hello.proof = key.proof_of(hello, *challenge, hello.process);
  (void)send_all(socket.fd(), &hello, sizeof(hello), deadline, kKeepWaiting);  // recv reports a failure
  // Wait until the deadline: a rank that leaves after rank 0 has accepted it counts as failed.
  const auto reply = recv_message<Reply>(socket, deadline, read_reply, transfer);
  if (!reply) {
    reason = transfer == Transfer::late ? "it did not answer" : "the connection was closed";
    return false;
  }
  HELIX_EXPECTS(
      reply->answer != Answer::stranger, ErrorCode::invalid_argument, "bootstrap: rank 0 at ",
      options.address, ":", options.port, " does not know rank ", options.rank, " of ", options.size,
      ": it is of another job, or has another HELIX_JOB_SECRET; give each job a port and all of its "
      "ranks one secret");
  if (key.is_proven(*reply, *challenge, hello.process)) return true;
  reason = "what listens there does not know the job's secret";
  return false;
}

}  // namespace

Nonce new_nonce() {
  Nonce nonce;
  HELIX_EXPECTS(::getentropy(nonce.data(), nonce.size()) == 0, ErrorCode::io,
                "bootstrap: no random bytes: ", words_of(errno));
  return nonce;
}

Connections join(const BootstrapOptions& options) {
  const Clock::time_point deadline = deadline_after(options.timeout);
  const JobKey key{options.secret, options.job};
  Hello hello{.rank = options.rank, .size = options.size, .config_hash = options.config_hash};
  hello.process = new_nonce();
  Connections connections;
  for (const Channel channel : {Channel::control, Channel::watch}) {
    hello.channel = channel;
    Socket socket = connect_to_rank_0(options, deadline, [&](const Socket& candidate, std::string& reason) {
      return introduce(options, key, hello, candidate, deadline, reason);
    });
    (channel == Channel::control ? connections.control : connections.watch).push_back(std::move(socket));
  }
  Transfer transfer = Transfer::done;
  const milliseconds patience = bounded(options.timeout) + verdict_grace(options.timeout);
  const auto verdict =
      recv_message<Verdict>(connections.control[0], deadline_after(patience), read_verdict, transfer);
  HELIX_EXPECTS(transfer != Transfer::late, ErrorCode::timeout, "bootstrap: rank 0 at ", options.address, ":",
                options.port, " did not answer rank ", options.rank, " within ", seconds(patience), " s");
  HELIX_EXPECTS(verdict.has_value(), ErrorCode::peer_failed, "bootstrap: rank 0 at ", options.address, ":",
                options.port, " closed the connection of rank ", options.rank);
  if (verdict->error_code >= 0)
    throw Error(static_cast<ErrorCode>(verdict->error_code), verdict->text.data());
  return connections;
}

}  // namespace helix::comm
