// SPDX-License-Identifier: BSD-3-Clause
//
// Messages between processes of different hosts through connections of their own. The caller itself
// moves the bytes, and a sender asks nobody: a message takes one way over the network. In a library
// that first asks whether the receiver has room it takes two, and a thread that moves the bytes
// waits for a core where the computation has them all.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/message.h"

namespace tree_attention::cpu {

// A connection of this rank to each of some others.
class Sockets {
 public:
  // (rank, connected stream socket): they are closed with this object.
  explicit Sockets(const std::vector<std::pair<int, int>>& connections);
  ~Sockets();
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  // Ends the rounds under way here and on the other ranks. From any thread.
  void close();
  bool is_closed() const { return is_closed_.load(); }

  // The socket to a rank. Throws std::invalid_argument if there is none.
  int to(int rank) const;

 private:
  std::map<int, int> sockets_;
  std::atomic<bool> is_closed_ = false;
};

// Messages that are sent and received together, as often as one likes; their peers are ranks.
// Between two ranks they arrive in the order of their rounds. A message that is sent may still be
// in the memory of the two hosts when a round ends: a rank that only sends learns late that nobody
// receives.
class SocketRound {
 public:
  SocketRound(std::shared_ptr<Sockets> sockets, std::vector<Message> receive,
              std::vector<Message> send);

  // Sends and receives what needs no wait.
  void start();

  // Finishes what `start` began. Throws std::runtime_error after so many seconds, if
  // a connection is closed, or if a message has another length than expected; the connections are
  // of no use then. `interrupt` is called now and then in long waits, and may throw.
  void run(double seconds, const std::function<void()>& interrupt);

 private:
  struct Transfer {
    Message message;
    int socket;
    bool is_send;
    uint64_t length;  // goes before the bytes
    size_t done = 0;  // of both together

    bool is_complete() const { return done == sizeof length + message.num_bytes; }
    std::string name() const;
    std::string closed() const;  // of the peer
  };

  void check() const;
  bool advance_all();
  bool advance(Transfer& transfer) const;
  void wait(std::chrono::milliseconds longest) const;

  std::shared_ptr<Sockets> sockets_;
  std::vector<Transfer> all_, open_;  // all of the round under way, and the incomplete ones
};

}  // namespace tree_attention::cpu
