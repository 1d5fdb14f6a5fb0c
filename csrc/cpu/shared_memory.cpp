// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/shared_memory.h"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace tree_attention::cpu {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// A reader may begin with a piece while the next one is written.
constexpr size_t kPieceBytes = kChannelBytes / 4;

// A wait first watches the memory, then lets other threads of its core go first, then sleeps.
// Watching takes processor time, which a container with a quota then lacks for its computation.
constexpr microseconds kWatch{20};
constexpr microseconds kYield{500};
// A sleep is a small part of the wait so far: long waits leave the cores to those that compute.
constexpr int kSleepsPerWait = 20;
constexpr microseconds kShortestSleep{50}, kLongestSleep{1000};
// How often a sleeping wait looks for ranks that have ended and for interrupts.
constexpr microseconds kLook{20000};

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct SharedMemory::Header {
  char key[kKeyBytes];
  alignas(64) std::atomic<uint32_t> closed;  // 1 + the first member that closed the memory
  Channel channels[];
};

size_t SharedMemory::num_bytes(int num_members) {
  return sizeof(Header) + sizeof(Channel) * num_members * num_members;
}

SharedMemory::SharedMemory(int file, int own, std::vector<SharingRank> members)
    : own_(own), members_(std::move(members)) {
  const size_t size = num_bytes(num_members());
  struct stat status;
  if (fstat(file, &status) != 0 || static_cast<size_t>(status.st_size) != size) {
    throw std::runtime_error("the shared memory has not the size for " +
                             std::to_string(num_members()) + " ranks");
  }
  // Pages come into being where they are first written, so unused channels cost nothing.
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error(std::string("shared memory cannot be mapped: ") + strerror(errno));
  }
  header_ = static_cast<Header*>(memory);
}

SharedMemory::~SharedMemory() {
  munmap(header_, num_bytes(num_members()));
  for (const SharingRank& member : members_) {
    if (member.process >= 0) ::close(member.process);
  }
}

void SharedMemory::close() {
  uint32_t nobody = 0;
  header_->closed.compare_exchange_strong(nobody, 1 + own_);
}

std::string SharedMemory::name_of(int member) const {
  return "rank " + std::to_string(members_[member].rank);
}

Channel& SharedMemory::channel(int from, int to) const {
  return header_->channels[from * num_members() + to];
}

std::string SharedMemory::closed() const {
  const uint32_t closed = header_->closed.load(std::memory_order_acquire);
  return closed == 0 ? "" : name_of(closed - 1) + " has closed the connection";
}

std::string SharedMemory::ended(int member) const {
  pollfd process{members_[member].process, POLLIN, 0};
  const bool has_ended = process.fd >= 0 && poll(&process, 1, 0) > 0;
  return has_ended ? "the process of " + name_of(member) + " has ended" : "";
}

struct SharedRound::Transfer {
  Channel* channel;
  Message message;
  bool is_send;
  // How far it is: the length goes before the bytes.
  bool has_length = false;
  size_t done = 0;

  bool is_complete() const { return has_length && done == message.num_bytes; }
};

SharedRound::SharedRound(std::shared_ptr<SharedMemory> memory, std::vector<Message> receive,
                         std::vector<Message> send)
    : memory_(std::move(memory)), receive_(std::move(receive)), send_(std::move(send)) {
  for (const auto* messages : {&receive_, &send_}) {
    for (const Message& message : *messages) {
      const bool is_other = message.peer != memory_->own();
      if (message.peer < 0 || message.peer >= memory_->num_members() || !is_other) {
        throw std::invalid_argument("a message needs another member of the shared memory, got " +
                                    std::to_string(message.peer));
      }
    }
  }
}

namespace {

// Both copy up to `count` bytes, which are there, to or from place `position` of the ring. Each
// message begins where the ring does, so that small ones stay in the same few cache lines.
void write_ring(Channel& channel, uint64_t position, const char* from, size_t count) {
  const size_t begin = position % kChannelBytes, first = std::min(count, kChannelBytes - begin);
  std::memcpy(channel.bytes + begin, from, first);
  std::memcpy(channel.bytes, from + first, count - first);
}

void read_ring(const Channel& channel, uint64_t position, char* to, size_t count) {
  const size_t begin = position % kChannelBytes, first = std::min(count, kChannelBytes - begin);
  std::memcpy(to, channel.bytes + begin, first);
  std::memcpy(to + first, channel.bytes, count - first);
}

}  // namespace

// Moves what can be moved now, and says whether that was anything.
bool SharedRound::advance(Transfer& transfer) const {
  Channel& channel = *transfer.channel;
  const Message& message = transfer.message;
  uint64_t written = channel.written.load(transfer.is_send ? std::memory_order_relaxed
                                                           : std::memory_order_acquire);
  uint64_t read =
      channel.read.load(transfer.is_send ? std::memory_order_acquire : std::memory_order_relaxed);
  uint64_t& own = transfer.is_send ? written : read;
  std::atomic<uint64_t>& shown = transfer.is_send ? channel.written : channel.read;
  const uint64_t begin = own;
  // A sender is at most one message ahead, so that it notices when the receiver is lost.
  if (transfer.is_send && !transfer.has_length && written != read) return false;
  while (!transfer.is_complete()) {
    const size_t ready = transfer.is_send ? kChannelBytes - (written - read) : written - read;
    if (!transfer.has_length) {
      uint64_t length = message.num_bytes;
      if (ready < sizeof length) break;
      char* text = reinterpret_cast<char*>(&length);
      if (transfer.is_send) {
        write_ring(channel, 0, text, sizeof length);
      } else {
        read_ring(channel, 0, text, sizeof length);
      }
      if (length != message.num_bytes) {
        throw std::runtime_error("message from " + memory_->name_of(message.peer) + ": it has " +
                                 std::to_string(length) + " bytes instead of " +
                                 std::to_string(message.num_bytes));
      }
      transfer.has_length = true;
      own += sizeof length;
      continue;
    }
    const size_t count = std::min({ready, message.num_bytes - transfer.done, kPieceBytes});
    if (count == 0) break;
    if (transfer.is_send) {
      write_ring(channel, sizeof(uint64_t) + transfer.done, message.data + transfer.done, count);
    } else {
      read_ring(channel, sizeof(uint64_t) + transfer.done, message.data + transfer.done, count);
    }
    transfer.done += count;
    own += count;
    if (count == kPieceBytes) shown.store(own, std::memory_order_release);
  }
  if (own == begin) return false;
  shown.store(own, std::memory_order_release);
  return true;
}

void SharedRound::run(double seconds, const std::function<void()>& interrupt) {
  const int own = memory_->own();
  std::vector<Transfer> open;
  for (const Message& message : send_) {
    open.push_back({&memory_->channel(own, message.peer), message, true});
  }
  for (const Message& message : receive_) {
    open.push_back({&memory_->channel(message.peer, own), message, false});
  }
  const auto advance_all = [&] {
    bool moved = false;
    for (Transfer& transfer : open) moved |= advance(transfer);
    std::erase_if(open, [](const Transfer& transfer) { return transfer.is_complete(); });
    return moved;
  };

  // A rank that comes after others have failed is not to go on with what they left.
  if (const std::string reason = memory_->closed(); !reason.empty()) {
    throw std::runtime_error(reason);
  }

  const Clock::time_point begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(seconds);
  Clock::time_point last_move = begin, last_look = begin;
  while (true) {
    const bool moved = advance_all();
    if (open.empty()) return;
    const Clock::time_point now = Clock::now();
    std::string lost = moved ? "" : memory_->closed();
    if (now - last_look >= kLook) {
      last_look = now;
      interrupt();
      for (const Transfer& transfer : open) {
        if (lost.empty()) lost = memory_->ended(transfer.message.peer);
      }
    }
    // What a rank wrote before it closed or ended is there by now.
    if (!lost.empty() && advance_all()) continue;
    if (lost.empty() && now >= deadline) lost = "timed out";
    if (!lost.empty()) {
      const Transfer& first = open.front();
      throw std::runtime_error(std::string("message ") + (first.is_send ? "to " : "from ") +
                               memory_->name_of(first.message.peer) + ": " + lost);
    }
    if (moved) {
      last_move = now;
    } else if (now - last_move < kWatch) {
      pause_briefly();
    } else if (now - last_move < kYield) {
      sched_yield();
    } else {
      const Clock::duration share = (now - last_move) / kSleepsPerWait;
      std::this_thread::sleep_for(
          std::clamp<Clock::duration>(share, kShortestSleep, kLongestSleep));
    }
  }
}

}  // namespace tree_attention::cpu
