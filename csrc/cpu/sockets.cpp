// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/sockets.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace tree_attention::cpu {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// A wait first asks again and again, so that a message of a near host wakes nobody, and then sleeps
// until something comes.
constexpr microseconds kAsk{200};
// How often a sleeping wait looks for interrupts.
constexpr milliseconds kLook{20};

}  // namespace

Sockets::Sockets(const std::vector<std::pair<int, int>>& connections)
    : sockets_(connections.begin(), connections.end()) {}

Sockets::~Sockets() {
  for (const auto& [rank, socket] : sockets_) ::close(socket);
}

void Sockets::close() {
  is_closed_ = true;
  // A reset, not the end of a stream: what this rank has sent is not to be used any more.
  for (const auto& [rank, socket] : sockets_) {
    const sockaddr nowhere{AF_UNSPEC, {}};
    connect(socket, &nowhere, sizeof nowhere);
  }
}

int Sockets::to(int rank) const {
  const auto found = sockets_.find(rank);
  if (found == sockets_.end()) {
    throw std::invalid_argument("a message needs a connected rank, got " + std::to_string(rank));
  }
  return found->second;
}

std::string SocketRound::Transfer::name() const {
  return std::string("message ") + (is_send ? "to" : "from") + " rank " +
         std::to_string(message.peer) + ": ";
}

std::string SocketRound::Transfer::closed() const {
  return "rank " + std::to_string(message.peer) + " has ended or closed the connection";
}

SocketRound::SocketRound(std::shared_ptr<Sockets> sockets, std::vector<Message> receive,
                         std::vector<Message> send)
    : sockets_(std::move(sockets)) {
  for (const Message& message : send) {
    all_.push_back({message, sockets_->to(message.peer), true, message.num_bytes});
  }
  for (const Message& message : receive) {
    all_.push_back({message, sockets_->to(message.peer), false, 0});
  }
}

// Moves what can be moved now, and says whether that was anything.
bool SocketRound::advance(Transfer& transfer) const {
  const Message& message = transfer.message;
  const size_t before = transfer.done;
  while (!transfer.is_complete()) {
    const size_t of_length = std::min(transfer.done, sizeof transfer.length);
    const size_t of_bytes = transfer.done - of_length;
    iovec places[2] = {
        {reinterpret_cast<char*>(&transfer.length) + of_length, sizeof transfer.length - of_length},
        {message.data + of_bytes, message.num_bytes - of_bytes}};
    msghdr both{};
    both.msg_iov = places;
    both.msg_iovlen = 2;
    const ssize_t moved = transfer.is_send
                              ? sendmsg(transfer.socket, &both, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : recvmsg(transfer.socket, &both, MSG_DONTWAIT);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    const bool is_closed = moved == 0 || errno == ECONNRESET || errno == EPIPE;
    if (moved <= 0) {
      throw std::runtime_error(transfer.name() + (is_closed ? transfer.closed() : strerror(errno)));
    }
    transfer.done += moved;
    const bool has_length = transfer.done >= sizeof transfer.length;
    if (has_length && transfer.length != message.num_bytes) {
      throw std::runtime_error(transfer.name() + "it has " + std::to_string(transfer.length) +
                               " bytes instead of " + std::to_string(message.num_bytes));
    }
  }
  return transfer.done != before;
}

bool SocketRound::advance_all() {
  bool moved = false;
  for (Transfer& transfer : open_) moved |= advance(transfer);
  std::erase_if(open_, [](const Transfer& transfer) { return transfer.is_complete(); });
  return moved;
}

// Sleeps until something can be moved, or so long.
void SocketRound::wait(milliseconds longest) const {
  std::vector<pollfd> waiting;
  for (const Transfer& transfer : open_) {
    const short event = transfer.is_send ? POLLOUT : POLLIN;
    waiting.push_back({transfer.socket, event, 0});
  }
  poll(waiting.data(), waiting.size(), static_cast<int>(longest.count()));
}

// A rank that comes after others have failed is not to go on with what they left.
void SocketRound::check() const {
  if (sockets_->is_closed()) throw std::runtime_error("this rank has closed the connections");
  std::vector<pollfd> sockets;
  for (const Transfer& transfer : all_) sockets.push_back({transfer.socket, 0, 0});
  poll(sockets.data(), sockets.size(), 0);
  for (size_t i = 0; i < sockets.size(); ++i) {
    if (sockets[i].revents != 0) throw std::runtime_error(all_[i].name() + all_[i].closed());
  }
}

void SocketRound::start() {
  check();
  open_ = all_;
  advance_all();
}

void SocketRound::run(double seconds, const std::function<void()>& interrupt) {
  const Clock::time_point begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(seconds);
  Clock::time_point last_move = begin, last_look = begin;
  while (!open_.empty()) {
    const bool moved = advance_all();
    const Clock::time_point now = Clock::now();
    if (moved) {
      last_move = now;
      continue;
    }
    if (now - last_look >= kLook) {
      last_look = now;
      interrupt();
    }
    if (now >= deadline) throw std::runtime_error(open_.front().name() + "timed out");
    if (now - last_move < kAsk) {
      sched_yield();
    } else {
      wait(std::min<milliseconds>(std::chrono::ceil<milliseconds>(deadline - now), kLook));
    }
  }
}

}  // namespace tree_attention::cpu
