// SPDX-License-Identifier: BSD-3-Clause
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/sockets.h"
#include "exchange_with_all.h"

using namespace tree_attention;
using namespace tree_attention::cpu;

namespace {

// Both ends of a connection.
std::pair<int, int> connection() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* place = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  CHECK(bind(listener, place, size) == 0 && listen(listener, 1) == 0, "listen");
  getsockname(listener, place, &size);
  const int one = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(one, place, size) == 0, "connect");
  const int other = accept(listener, nullptr, nullptr);
  close(listener);
  return {one, other};
}

// Every rank's connections to all others.
std::vector<std::shared_ptr<Sockets>> connected(int world_size) {
  std::vector<std::vector<std::pair<int, int>>> connections(world_size);
  for (int a = 0; a < world_size; ++a) {
    for (int b = 0; b < a; ++b) {
      const auto [one, other] = connection();
      connections[a].push_back({b, one});
      connections[b].push_back({a, other});
    }
  }
  std::vector<std::shared_ptr<Sockets>> ranks;
  for (const auto& of_rank : connections) ranks.push_back(std::make_shared<Sockets>(of_rank));
  return ranks;
}

void run(SocketRound& round, double seconds) {
  round.start();
  round.run(seconds, [] {});
}

std::string error_of(SocketRound& round, double seconds) {
  try {
    run(round, seconds);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

// The largest messages fit into no socket, and both sides send them.
void test_sockets() {
  for (int world_size : {2, 3, 5}) {
    const auto ranks = connected(world_size);
    testing::in_threads(world_size, [&](int own) {
      for (size_t size : {size_t{0}, size_t{1}, size_t{4097}, size_t{3} << 20}) {
        testing::exchange_with_all(
            own, world_size, size,
            [&](auto receive, auto send) { return SocketRound(ranks[own], receive, send); },
            [](SocketRound& round) { run(round, 60.0); });
      }
    });
  }
}

void test_lost_sockets() {
  char bytes[8] = {};
  auto ranks = connected(2);
  SocketRound late(ranks[0], {{1, bytes, 1}}, {});
  CHECK(error_of(late, 0.05) == "message from rank 1: timed out", error_of(late, 0.05));

  ranks = connected(2);
  SocketRound longer(ranks[0], {{1, bytes, 8}}, {}), shorter(ranks[1], {}, {{0, bytes, 3}});
  run(shorter, 60.0);
  const std::string length = error_of(longer, 60.0);
  CHECK(length == "message from rank 1: it has 3 bytes instead of 8", length);

  // A message that was sent before its rank ended is there, the next one is not.
  ranks = connected(2);
  SocketRound last(ranks[1], {}, {{0, bytes, 1}}), first(ranks[0], {{1, bytes + 1, 1}}, {});
  bytes[0] = 7;
  run(last, 60.0);
  ranks[1].reset();
  last = SocketRound(ranks[0], {}, {});  // it kept the connections
  run(first, 60.0);
  CHECK(bytes[1] == 7, "the last message");
  const std::string ended = error_of(first, 60.0);
  CHECK(ended == "message from rank 1: rank 1 has ended or closed the connection", ended);

  ranks = connected(2);
  SocketRound waiting(ranks[0], {{1, bytes, 1}}, {});
  std::string reason;
  std::thread thread([&] { reason = error_of(waiting, 60.0); });
  ranks[0]->close();
  thread.join();
  CHECK(!reason.empty(), "closed in a wait");
  CHECK(error_of(waiting, 60.0) == "this rank has closed the connections", "closed before");
}
